"""A unit's forward with the kernels that it takes in the resident model.

Units run forward without autograd, and once more with it when backward comes. torch computes
attention in another way where its mask wants a gradient (Doge's, and every position bias that is
learnt: T5's, Inkling's): step by step instead of fused, with other last bits. The resident model
runs with autograd, and so do units whose graph is kept; without it the others would come to
something else, and a run's result would depend on how many of them have room. So such units run
forward with autograd, too, and keep nothing of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_forgetting: ContextVar[bool] = ContextVar("autograd is on, and keeps nothing", default=False)


def forgetting() -> bool:
    """Whether autograd is on for its choices alone: no backward will follow."""
    return _forgetting.get()


@contextlib.contextmanager
def _autograd_without_graph() -> Iterator[None]:
    """torch chooses as with autograd inside, and what it would save for backward is let go of."""
    token = _forgetting.set(True)
    try:
        with torch.enable_grad(), forgetting_saved():
            yield
    finally:
        _forgetting.reset(token)


def forgetting_saved() -> contextlib.AbstractContextManager[Any]:
    """What autograd would save inside is let go of."""
    return torch.autograd.graph.saved_tensors_hooks(_forget, _refuse)


def _forget(tensor: Tensor) -> None:
    del tensor


def _refuse(packed: None) -> NoReturn:
    raise AssertionError("backward through a forward that kept nothing")


class _MayWant(BaseException):
    """A mask may want a gradient with autograd: not for a model's own code to catch."""


class _Masks(TorchFunctionMode):
    """Looks at the masks of attention that is computed inside. Without autograd nobody knows which
    of them would want a gradient: it stops the run at one of numbers that was neither given nor is
    a view of what was."""

    def __init__(self, given: Sequence[Tensor | None], needs: Sequence[bool]) -> None:
        """``given``: what the unit is called with; ``needs``: which of it wants a gradient."""
        super().__init__()
        self._plain = {
            tensor.untyped_storage()._cdata
            for tensor, need in zip(given, needs, strict=True)
            if tensor is not None and not need
        }
        self.wants = False
        """A mask wants a gradient."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            if mask is not None and mask.is_floating_point():
                if torch.is_grad_enabled():
                    self.wants |= mask.requires_grad
                elif mask.untyped_storage()._cdata not in self._plain:
                    raise _MayWant
        return func(*args, **kwargs)


Run = Callable[[list[Tensor | None]], list[Any]]


class ForwardKernels:
    """Runs a unit's forward, and knows when that takes autograd."""

    def __init__(self) -> None:
        self._wants: dict[Any, bool] = {}
        """By what the unit was called with: whether a mask of its attention wants a gradient."""

    def run(
        self, run: Run, tensors: list[Tensor | None], needs: Sequence[bool],
        weights: Sequence[Tensor], rewind: Callable[[], None],
    ) -> list[Any]:  # fmt: skip
        """What ``run(tensors)`` returns with the kernels that autograd takes, without a graph.

        Args:
            needs: which of ``tensors`` want a gradient.
            weights: of the unit, which want one or not.
            rewind: to the random numbers that ``run`` begins with.
        """
        trained = tuple(weight.requires_grad for weight in weights)
        case = tuple(tensor is None for tensor in tensors), tuple(needs), trained
        if case in self._wants:
            return _run_as_autograd(run, tensors, needs) if self._wants[case] else run(tensors)
        masks = _Masks(tensors, needs)
        try:
            with masks:
                out = run(tensors)
        except _MayWant:
            rewind()
            with masks:
                out = _run_as_autograd(run, tensors, needs)
        self._wants[case] = masks.wants
        return out


def _run_as_autograd(
    run: Run, tensors: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Any]:  # fmt: skip
    leaves = [
        None if tensor is None else tensor.detach().requires_grad_(need)
        for tensor, need in zip(tensors, needs, strict=True)
    ]
    with _autograd_without_graph():
        out = run(leaves)
    return [x.detach() if isinstance(x, Tensor) else x for x in out]


__all__ = ["ForwardKernels", "forgetting", "forgetting_saved"]
