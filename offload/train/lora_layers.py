"""How adapters compute, beside weights that stay as they are: ``y = x Wᵀ + x Aᵀ Bᵀ · scale``.

Modules are not wrapped, for then every weight would have another name than in its checkpoint: a
linear layer's ``forward`` is replaced on the instance. Fused experts have no module of their own;
their layer's loop finds an object that stands for ``gate_up_proj`` and hands out, for expert ``e``,
one that stands for ``W[e] + scale · B[e] A[e]`` in products and never multiplies it out.

The arithmetic is peft's: factors are float32, the input is cast to that, the sum is rounded once
to what the base layer returned. (For experts peft does add B A to W, in W's dtype and for all of
them in every forward: that is another rounding, and more memory than the experts themselves.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from offload.errors import UnsupportedModelError
from offload.train.lora_targets import Target

# r rank, I in, O out, E experts


@dataclass(frozen=True, slots=True)
class Rule:
    """What all adapters of a model have in common."""

    scale: float
    dropout: float

    def add(self, base: Tensor, x: Tensor, a_rI: Tensor, b_Or: Tensor, training: bool) -> Tensor:
        """``base`` [..., O] plus the low-rank path of ``x`` [..., I], in ``base``'s dtype."""
        x = x.to(a_rI.dtype)
        if self.dropout:
            x = F.dropout(x, self.dropout, training)
        return (base + F.linear(F.linear(x, a_rI), b_Or) * self.scale).to(base.dtype)


class LinearAdapter:
    """Replaces the ``forward`` of a linear module that has ``lora_A`` [r, I], ``lora_B`` [O, r]."""

    def __init__(self, target: Target, rule: Rule) -> None:
        self.target = target
        self.module = target.module
        self.rule = rule
        self.used = False
        """Whether the model ever called it: some use a layer's weight without the layer."""
        self.inner = self.module.forward
        self._before = self.module.__dict__.get("forward")
        self.module.__dict__["forward"] = self

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.used = True
        module: Any = self.module
        base = self.inner(x, *args, **kwargs)
        return self.rule.add(base, x, module.lora_A, module.lora_B, module.training)

    def undo(self) -> None:
        _put_back(self.module, "forward", self._before)


class FusedAdapters:
    """The adapters of one layer's fused experts: replaces the ``forward`` of their module.

    The factors of all experts of a weight are one parameter, [E·r, I] and [E·O, r]: they are small,
    belong in RAM, and move as part of their layer if they have to. With a block for each expert
    thousands of them would be updated one by one, since every expert takes every step, as with any
    resident optimizer. They are unbound once in a forward, so that backward makes each gradient
    once, with zeros for experts that no token went to; indexing would make one per expert.
    """

    def __init__(self, targets: Sequence[Target], rule: Rule) -> None:
        """``targets``: all of one module."""
        self.module = targets[0].module
        self.weights = [FusedWeight(target, rule) for target in targets]
        self.inner = self.module.forward
        self._before = self.module.__dict__.get("forward")
        self.module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Only while it runs: whoever else looks at the module (transformers' initialisation, what
        # saves a model) finds its parameters. Below may be an engine's own stand-in.
        own, parameters = self.module.__dict__, self.module._parameters
        below = {w.target.attr: own.get(w.target.attr) for w in self.weights}
        try:
            for weight in self.weights:
                attr = weight.target.attr
                weight.begin(parameters[attr] if below[attr] is None else below[attr])
                own[attr] = weight
            return self.inner(*args, **kwargs)
        finally:
            for weight in self.weights:
                _put_back(self.module, weight.target.attr, below[weight.target.attr])
                weight.end()

    def undo(self) -> None:
        _put_back(self.module, "forward", self._before)


class FusedWeight:
    """What a forward of an experts module finds in place of a parameter with adapters."""

    def __init__(self, target: Target, rule: Rule) -> None:
        self.target = target
        self.rule = rule
        self.used = False
        self._weights: Any = None
        self._factors: list[tuple[Tensor, Tensor]] = []
        """(A [r, I], B [O, r]) of each expert."""

    def begin(self, weights: Any) -> None:
        """A forward begins; expert e's own weight is ``weights[e]``."""
        a, b = (getattr(self.target.module, f"{self.target.attr}_lora_{x}") for x in "AB")
        experts = self.target.experts or 1
        parts = (x.unflatten(0, (experts, -1)).unbind(0) for x in (a, b))
        self._weights, self._factors = weights, list(zip(*parts, strict=True))

    def end(self) -> None:
        """It is through: keep nothing of its graph."""
        self._weights, self._factors = None, []

    def __getitem__(self, key: Any) -> AdaptedWeight:
        if isinstance(key, Tensor) and key.dim() == 0:
            key = int(key)
        if not isinstance(key, int):
            return self._refuse(f"indexing with {key!r}")
        self.used = True
        weight = self._weights[key]
        a, b = self._factors[key]
        left, right = (a.T, b.T) if self.target.transposed else (b, a)
        return AdaptedWeight(self, weight, left, right)

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "dtype", "device", "ndim", "size", "dim", "is_meta"):
            return getattr(self._weights, name)
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse(name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _first(cls, args, kwargs)._refuse(f"torch's {getattr(func, '__name__', func)}")

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedModelError(
            f"{self.target.name} has an adapter for each expert and is used one expert at a time; "
            f"{what} needs all of them: leave it out of the LoRA targets"
        )


class AdaptedWeight:
    """``M = W + scale · L R`` for products with M or Mᵀ.

    ``weight`` [m, n], ``left`` [m, r], ``right`` [r, n]. Transposing it is free; every other
    operation is refused, since it would have to multiply L R out.
    """

    __slots__ = ("_left", "_of", "_right", "_weight")

    def __init__(self, of: FusedWeight, weight: Tensor, left: Tensor, right: Tensor) -> None:
        self._of = of
        self._weight = weight
        self._left = left
        self._right = right

    @property
    def shape(self) -> torch.Size:
        return self._weight.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._weight.dtype

    @property
    def device(self) -> torch.device:
        return self._weight.device

    @property
    def ndim(self) -> int:
        return 2

    def dim(self) -> int:
        return 2

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    @property
    def T(self) -> AdaptedWeight:
        return AdaptedWeight(self._of, self._weight.T, self._right.T, self._left.T)

    mT = T

    def t(self) -> AdaptedWeight:
        return self.T

    def transpose(self, first: int, second: int) -> AdaptedWeight:
        return self.T if (first - second) % 2 else self

    def _linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x Mᵀ + bias``."""
        base = F.linear(x, self._weight, bias)
        return self._add(base, x, self._right, self._left)

    def _matmul(self, x: Tensor) -> Tensor:
        """``x M``."""
        base = torch.matmul(x, self._weight)
        return self._add(base, x, self._left.T, self._right.T)

    def _add(self, base: Tensor, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        training = self._of.target.module.training
        return self._of.rule.add(base, x, first, second, training)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        product = _PRODUCTS.get(func)
        if product is not None:
            return product(*args, **(kwargs or {}))
        return _first(cls, args, kwargs)._refuse(f"torch's {getattr(func, '__name__', func)}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse(name)

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedModelError(
            f"{self._of.target.name} has adapters, which work in products with an expert's weight, "
            f"not in {what}: leave it out of the LoRA targets"
        )

    def __matmul__(self, other: Any) -> Any:
        return self._refuse("a product from the left")

    def __mul__(self, other: Any) -> Any:
        return self._refuse("*")

    def __add__(self, other: Any) -> Any:
        return self._refuse("+")

    def __getitem__(self, key: Any) -> Any:
        return self._refuse(f"indexing with {key!r}")


def _linear(input: Any, weight: Any, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, AdaptedWeight) or not isinstance(input, Tensor):
        adapted = weight if isinstance(weight, AdaptedWeight) else input
        return adapted._refuse("a linear layer's input")  # type: ignore[no-any-return]
    return weight._linear(input, bias)


def _matmul(input: Any, other: Any) -> Tensor:
    if not isinstance(other, AdaptedWeight) or not isinstance(input, Tensor):
        return input._refuse("a product from the left")  # type: ignore[no-any-return]
    return other._matmul(input)


_PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.mm: _matmul,
    Tensor.__matmul__: _matmul,
}
"""What ``x @ w`` is called depends on torch's version: all of its names."""


def _first(kind: type, args: Any, kwargs: Any) -> Any:
    """The first of ``kind`` among arguments, lists of them included."""
    return next(x for x in tree_leaves((args, kwargs)) if isinstance(x, kind))


def _put_back(module: nn.Module, name: str, before: Any) -> None:
    module.__dict__.pop(name, None)
    if before is not None:
        module.__dict__[name] = before


__all__ = ["AdaptedWeight", "FusedAdapters", "FusedWeight", "LinearAdapter", "Rule"]
