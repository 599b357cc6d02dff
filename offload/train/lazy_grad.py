"""``p.grad`` of a streamed parameter: a tensor without data that knows its norm and can be scaled.

A wrapper subclass: autograd and torch's Python code see a tensor of the parameter's shape and
dtype; operations on it arrive in ``__torch_dispatch__``. Norms are answered from the sums of
squares that were taken when the gradient left backward, scaling in place is remembered until the
step multiplies by it, so unmodified ``clip_grad_norm_`` costs nothing and is exact: sums in
float64, the factor applied in float32 to each element. (torch takes norms of a bfloat16 gradient in
bfloat16, and rounds the product to it; the norm here is float32 whatever the gradient's dtype.) Any
other reading operation reads the gradient into memory for its duration. Other changes in place
raise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

from offload.errors import OffloadError

Tensor = torch.Tensor


class GradientError(OffloadError):
    """A streamed gradient was used in a way it cannot be; the message says what instead."""


class Gradient(Protocol):
    """One parameter's gradient, as the run knows it. All raise GradientError once a step or
    ``zero_grad`` has taken it."""

    name: str

    def norm(self) -> float:
        """The 2-norm, factors included."""
        ...

    def multiply(self, factor: float) -> None: ...

    def value(self) -> Tensor:
        """A copy, in the parameter's shape and dtype, factors included."""
        ...

    def drop(self) -> None: ...


class LazyGrad(Tensor):
    """See the module."""

    gradient: Gradient

    @staticmethod
    def __new__(cls, gradient: Gradient, like: Tensor) -> LazyGrad:
        made: LazyGrad = Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device
        )
        made.gradient = gradient
        return made

    def __init__(self, gradient: Gradient, like: Tensor) -> None:
        pass

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        raise GradientError(
            f"p.grad.data = ... would leave the streamed gradient of {self.gradient.name} as it "
            f"is; assign to the gradient itself: p.grad = ..."
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyGrad({self.gradient.name}, {tuple(self.shape)}, {self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        answer = _ANSWERS.get(func.overloadpacket)
        if answer is not None:
            result = answer(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func._schema.is_mutable and _changed(func, args, kwargs):
            raise GradientError(_why_not(func.overloadpacket.__name__, _first(args, kwargs)))
        args, kwargs = tree_map_only(LazyGrad, lambda g: g.gradient.value(), (args, kwargs))
        return func(*args, **kwargs)


def _first(args: Any, kwargs: Any) -> str:
    found: list[str] = []
    tree_map_only(LazyGrad, lambda g: found.append(g.gradient.name), (args, kwargs))
    return found[0]


def _changed(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an argument that the operation writes to is one of ours."""
    for i, spec in enumerate(func._schema.arguments):
        if spec.alias_info is None or not spec.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else kwargs.get(spec.name)
        if any(
            isinstance(v, LazyGrad)
            for v in (value if isinstance(value, (list, tuple)) else [value])
        ):
            return True
    return False


def _why_not(operation: str, name: str) -> str:
    if "unscale" in operation:
        return (
            f"the gradient of {name} is streamed and cannot be unscaled: fp16 with a GradScaler is "
            f"not supported; train in bfloat16 (bf16=True, or dtype='bfloat16' when loading)"
        )
    return (
        f"{operation} would change the streamed gradient of {name} in place. Only scaling "
        f"(clip_grad_norm_, mul_, div_) and zeroing are recorded; compute the new gradient and "
        f"assign it: p.grad = f(p.grad)"
    )


# -- what is answered without data ------------------------------------------------------------


def _is_plain_norm(ord: Any, dim: Any) -> bool:
    return (ord is None or float(ord) == 2.0) and not dim


def _vector_norm(self: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *,
                 dtype: torch.dtype | None = None) -> Any:  # fmt: skip
    if not isinstance(self, LazyGrad) or not _is_plain_norm(ord, dim):
        return NotImplemented
    if keepdim and self.dim():
        return NotImplemented
    return torch.tensor(self.gradient.norm(), dtype=dtype or torch.float32)


def _norm(self: Any, p: Any = 2, *rest: Any, **kwargs: Any) -> Any:
    if rest or kwargs:
        return NotImplemented
    return _vector_norm(self, p)


def _foreach_norm(tensors: list[Any], ord: Any = 2, dtype: torch.dtype | None = None) -> Any:
    if not _is_plain_norm(ord, None):
        return [torch.linalg.vector_norm(t, ord, dtype=dtype) for t in tensors]
    return [torch.linalg.vector_norm(t, 2, dtype=dtype) for t in tensors]


def _factor_of(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not isinstance(value, LazyGrad) else None
    return float(value) if isinstance(value, (int, float)) else None


def _scaled(inverse: bool) -> Callable[..., Any]:
    def scale(self: Any, other: Any, **kwargs: Any) -> Any:
        factor = _factor_of(other)
        if not isinstance(self, LazyGrad) or factor is None or kwargs:
            return NotImplemented
        self.gradient.multiply(1.0 / factor if inverse and factor else _checked(factor, inverse))
        return self

    return scale


def _checked(factor: float, inverse: bool) -> float:
    if inverse:
        raise GradientError("a streamed gradient cannot be divided by zero")
    return factor


def _foreach_scaled(inverse: bool) -> Callable[..., Any]:
    def scale(tensors: list[Any], other: Any) -> Any:
        many = other if isinstance(other, (list, tuple)) else [other] * len(tensors)
        for tensor, factor in zip(tensors, many, strict=True):
            (tensor.div_ if inverse else tensor.mul_)(factor)
        return None

    return scale


def _zero(self: Any) -> Any:
    if not isinstance(self, LazyGrad):
        return NotImplemented
    self.gradient.drop()
    return self


def _foreach_zero(tensors: list[Any]) -> None:
    for tensor in tensors:
        tensor.zero_()


def _alias(self: Any) -> Any:
    return LazyGrad(self.gradient, self)


_aten = torch.ops.aten
_ANSWERS: dict[Any, Callable[..., Any]] = {
    _aten.linalg_vector_norm: _vector_norm,
    _aten.norm: _norm,
    _aten._foreach_norm: _foreach_norm,
    _aten.mul_: _scaled(False),
    _aten.div_: _scaled(True),
    _aten._foreach_mul_: _foreach_scaled(False),
    _aten._foreach_div_: _foreach_scaled(True),
    _aten.zero_: _zero,
    _aten._foreach_zero_: _foreach_zero,
    _aten.detach: _alias,
    _aten.alias: _alias,
}


def norm_of(squares: list[float], factors: list[float]) -> float:
    """The norm of a gradient in parts: sums of squares of each, and what each is multiplied by."""
    return math.sqrt(math.fsum(s * f * f for s, f in zip(squares, factors, strict=True)))


__all__ = ["Gradient", "GradientError", "LazyGrad", "norm_of"]
