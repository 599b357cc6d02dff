"""Stand-ins for parameters that are not in memory: they know their shape, and refuse to be read."""

from __future__ import annotations

from typing import Any

import torch

from offload.errors import OffloadError

_SHAPE_ONLY = {
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
}


class AbsentTensor(torch.Tensor):
    """A parameter's name, shape, dtype and device without its data.

    Reading one is an error, never zeros or stale bytes: an operation that sees it was reached
    outside of the unit that streams the parameter.
    """

    _offload_name: str

    @staticmethod
    def __new__(
        cls, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> AbsentTensor:
        make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        tensor: AbsentTensor = make(cls, shape, dtype=dtype, device=device)
        tensor._offload_name = name
        return tensor

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        source = next((a for a in args if isinstance(a, AbsentTensor)), None)
        if func in _SHAPE_ONLY and source is not None:
            return AbsentTensor(source._offload_name, source.shape, source.dtype, source.device)
        name = source._offload_name if source is not None else "a streamed parameter"
        raise OffloadError(
            f"{name} is streamed and not in memory now ({func}); its data can be read only while "
            f"its layer runs. To get the whole model back call offload.unwrap(model), or load it "
            f"without a budget"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape = tuple(self.shape)
        return f"AbsentTensor({self._offload_name!r}, shape={shape}, dtype={self.dtype})"

    def __deepcopy__(self, memo: Any) -> AbsentTensor:
        raise OffloadError(
            f"{self._offload_name} is streamed: a streamed model cannot be copied; load it twice"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OffloadError(
            f"{self._offload_name} is streamed: a streamed model cannot be saved; its weights are "
            f"those of its checkpoint"
        )


def absent(name: str, like: torch.Tensor, device: torch.device) -> torch.nn.Parameter:
    """A parameter that is not in memory."""
    tensor = AbsentTensor(name, like.shape, like.dtype, device)
    return torch.nn.Parameter(tensor, requires_grad=False)
