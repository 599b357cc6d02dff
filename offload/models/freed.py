"""A parameter whose data ``wrap`` has taken, wherever else a program has kept it.

The module finds a stand-in in its place; but a list in somebody's hands, an optimizer or a second
model has the object itself, and would read a tensor without elements: a norm of 0, a file of
nothing.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from offload.errors import OffloadError

_FACTS = frozenset({
    "grad", "requires_grad", "is_leaf", "grad_fn", "device", "dtype", "layout", "names",
    "is_sparse", "is_quantized", "is_meta", "_version", "_backward_hooks", "output_nr",
    "retains_grad", "is_cpu", "is_cuda",
})  # fmt: skip
"""What it still says of itself; optimizers look for its gradient."""

_CALLS = frozenset({
    "__hash__", "requires_grad_", "is_floating_point", "is_complex", "is_contiguous", "is_conj",
    "is_neg", "is_inference", "register_hook", "register_post_accumulate_grad_hook",
})  # fmt: skip


class FreedParameter(nn.Parameter):
    """What ``freed`` makes of a parameter."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            allowed = getattr(func.__self__, "__name__", "") in _FACTS
        else:
            allowed = name in _CALLS
        if not allowed:
            _refuse(next(a for a in (*args, *(kwargs or {}).values()) if isinstance(a, cls)))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FreedParameter({self.__dict__.get('_offload_name', '')!r})"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _refuse(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse(self)


def _refuse(parameter: torch.Tensor) -> NoReturn:
    name = parameter.__dict__.get("_offload_name", "a parameter")
    raise OffloadError(
        f"{name} belongs to a streamed model: its data is on the disk, and only the model's own "
        f"modules get it back. Ask the model for its parameters instead of keeping them, or call "
        f"offload.unwrap(model) first"
    )


def freed(parameter: torch.Tensor, name: str) -> None:
    """Have a parameter without data refuse to be read."""
    if type(parameter) is nn.Parameter:
        parameter.__dict__["_offload_name"] = name
        parameter.__class__ = FreedParameter


def filled(parameter: torch.Tensor) -> None:
    """It has data again, or is about to."""
    if type(parameter) is FreedParameter:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        del parameter.__dict__["_offload_name"]


__all__ = ["FreedParameter", "filled", "freed"]
