"""Buffers that hold one group each: filled piece by piece by a pass, or by one read."""

from __future__ import annotations

from collections.abc import Callable

import torch

from offload.blocks import ALIGN, align_up
from offload.errors import OffloadError
from offload.kv.prefix_format import PIECE_ALIGN, DamagedGroupError, Group, Piece, footer_bytes
from offload.runtime.memory import HostMemory
from offload.units import format_bytes

MOST_TIMES = 8
"""A file of more than so many times the bytes that a group is expected to have is damaged."""


class Slot:
    """A buffer that holds one group; it grows to what one needs."""

    def __init__(self, nbytes: int) -> None:
        self.memory = HostMemory(align_up(nbytes) + ALIGN, "prompt cache")
        self.pieces: list[Piece] = []
        self.filled = 0

    def clear(self) -> None:
        self.pieces, self.filled = [], 0

    def put(self, layer: int, part: str, tensor: torch.Tensor) -> None:
        """Copy a tensor behind the last one."""
        piece = Piece(
            layer=layer,
            part=part,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            offset=align_up(self.filled, PIECE_ALIGN),
        )
        self._grow(piece.offset + piece.nbytes)
        self.memory.tensor()[self.filled : piece.offset].zero_()
        _view(self.memory, piece).copy_(tensor.detach())
        self.pieces.append(piece)
        self.filled = piece.offset + piece.nbytes

    def parts(self, group: Group) -> dict[int, dict[str, torch.Tensor]]:
        """The tensors of the group that was read into it, in place."""
        found: dict[int, dict[str, torch.Tensor]] = {}
        for piece in group.pieces:
            found.setdefault(piece.layer, {})[piece.part] = _view(self.memory, piece)
        return found

    def room(self, payload: int, pieces: int, tokens: int) -> memoryview:
        """All of it, with room for the footer behind the pieces."""
        self._grow(align_up(payload) + footer_bytes(pieces, tokens))
        return self.memory.view()

    def whole(self, nbytes: int) -> memoryview:
        """Its first bytes, to be overwritten."""
        self.filled = 0
        self._grow(nbytes)
        return self.memory.view()[:nbytes]

    def _grow(self, nbytes: int) -> None:
        if nbytes <= self.memory.nbytes:
            return
        larger = HostMemory(align_up(max(nbytes, self.memory.nbytes * 5 // 4)), "prompt cache")
        larger.tensor()[: self.filled].copy_(self.memory.tensor()[: self.filled])
        self.memory.close()
        self.memory = larger


def room_in(slot: Slot, expected: int) -> Callable[[int], memoryview]:
    """Room in a slot for a file, if that is no larger than a group can be."""

    def room(nbytes: int) -> memoryview:
        if nbytes % ALIGN or not 0 < nbytes <= MOST_TIMES * (align_up(expected) + 64 * ALIGN):
            raise DamagedGroupError(f"it has {nbytes} bytes")
        return slot.whole(nbytes)

    return room


def _view(memory: HostMemory, piece: Piece) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, piece.dtype)
    raw = memory.tensor()[piece.offset : piece.offset + piece.nbytes]
    return raw.view(dtype).view(piece.shape)


def check_limit(chunk: int, limit: int, group_bytes: int, group: int | None = None) -> None:
    """Raises OffloadError: the limit is below one group, or a chunk is too short."""
    if chunk < 2:
        raise OffloadError(
            f"--prompt-cache-chunk {chunk} is too short: a pass over one token is decoding; give "
            f"2 or more"
        )
    if limit < group_bytes:
        raise OffloadError(
            f"--prompt-cache-limit {format_bytes(limit)} is below one group: keys and values of "
            f"{group or chunk} tokens take {format_bytes(group_bytes)}; raise it"
            + (", or lower --prompt-cache-chunk" if group in (None, chunk) else "")
        )
