"""What autograd saves of a unit's weights: their places, as their memory is another's between
forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class _Place:
    """A view of a block's weights: elements from the block's first one, and strides."""

    block: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class SavedPlaces:
    """Tells views of these blocks' weights from other tensors, and finds them again."""

    def __init__(
        self, blocks: dict[int, torch.Tensor], find: Callable[[int], torch.Tensor | None]
    ) -> None:
        """``find(block)``: its weights in backward, as ``blocks`` has them now; None: not there."""
        self._blocks = [
            (t.data_ptr(), t.data_ptr() + t.nbytes, index, t.element_size())
            for index, t in blocks.items()
        ]
        self._find = find

    def pack(self, tensor: torch.Tensor) -> Any:
        at = tensor.data_ptr()
        for low, high, index, size in self._blocks:
            if low <= at < high:
                offset = (at - low) // size
                return _Place(index, offset, tuple(tensor.shape), tensor.stride())
        return tensor

    def unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Place):
            return packed  # type: ignore[no-any-return]
        whole = self._find(packed.block)
        if whole is None:
            raise AssertionError("backward of a unit whose weights are not in place")
        with torch.no_grad():
            return whole.as_strided(
                packed.shape, packed.stride, whole.storage_offset() + packed.offset
            )


__all__ = ["SavedPlaces"]
