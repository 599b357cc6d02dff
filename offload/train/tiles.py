"""What a tile's slot holds, for each kind of optimizer states, and the kernels that update it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offload.blocks import DTYPE_BYTES, align_up
from offload.cpu_ops.adam import adam_fp32
from offload.cpu_ops.adam_states import BLOCK, adam_8bit, adam_bf16, blocks
from offload.cpu_ops.adam_step import AdamStep
from offload.cpu_ops.grad_norm import Numbers
from offload.train.layout import Block, Tile

Bytes = npt.NDArray[np.uint8]

COPY = 0
"""The part that computes; with bf16 states it is the parameters themselves."""


@dataclass(frozen=True, slots=True)
class SlotKind:
    """The parts of a slot: names and bytes for ``n`` elements."""

    states: str
    """"fp32", "bf16" or "8bit"."""
    dtype: str
    """Of the weights that compute: "bfloat16" or "float32"."""

    @property
    def names(self) -> tuple[str, ...]:
        if self.states == "bf16":
            return ("copy", "m", "v")
        if self.states == "8bit":
            return ("copy", "p", "m", "v", "m_scales", "v_scales")
        return ("copy", "p", "m", "v")

    def parts(self, n: int) -> tuple[int, ...]:
        """Bytes of each part of a tile of ``n`` elements, in the order of ``names``."""
        copy = DTYPE_BYTES[self.dtype] * n
        if self.states == "bf16":
            return copy, 2 * n, 2 * n
        if self.states == "8bit":
            return copy, 4 * n, n, n, 4 * blocks(n), 4 * blocks(n)
        return copy, 4 * n, 4 * n, 4 * n

    def offsets(self, n: int) -> tuple[int, ...]:
        """Where each part starts in the slot, and at the end the slot's bytes."""
        out = [0]
        for size in self.parts(n):
            out.append(out[-1] + align_up(size))
        return tuple(out)

    @property
    def first_state(self) -> int:
        """The first part that an update reads: with bf16 states the copy is one."""
        return 0 if self.states == "bf16" else 1


class Slot:
    """Typed views of a tile's slot in memory."""

    def __init__(self, kind: SlotKind, n: int, memory: Bytes) -> None:
        """``memory`` [>= offsets(n)[-1]]: page-aligned."""
        self.kind = kind
        self.n = n
        offsets, sizes = kind.offsets(n), kind.parts(n)
        self._parts = [memory[at : at + size] for at, size in zip(offsets, sizes, strict=False)]

    def part(self, name: str) -> Bytes:
        return self._parts[self.kind.names.index(name)]

    @property
    def copy(self) -> Numbers:
        return numbers(self._parts[COPY], self.kind.dtype)

    def start(self, weights: Numbers) -> None:
        """The states of a parameter that was never updated: ``weights`` [n] widened, no moments."""
        np.copyto(self.copy, weights)
        if self.kind.states != "bf16":
            widen(weights, self.part("p").view(np.float32))
        for name in self.kind.names[1:]:
            if name != "p":
                self.part(name)[:] = 0

    def round(self) -> None:
        """Make the copy anew of the parameters."""
        if self.kind.states != "bf16":
            narrow(self.part("p").view(np.float32), self.copy)

    def update(
        self, step: AdamStep, gradient: Numbers, start: int, count: int, *, seed: int, first: int,
        workers: int | None,
    ) -> None:  # fmt: skip
        """One step of elements ``start`` .. ``start + count`` with ``gradient`` [count].

        A first step finds no moments, whatever an optimizer before this one has left.
        ``start`` is a multiple of ``layout.PIECE_ALIGN``. ``seed`` and ``first``, the global index
        of the first of these elements, are for stochastic rounding.
        """
        stop = start + count
        if step.step == 1:
            self._forget(start, count)
        copy = self.copy[start:stop]
        if self.kind.states == "bf16":
            if copy.dtype != np.uint16:
                raise TypeError("bf16 states need bfloat16 weights")
            first_moments, second_moments = (self.part(x).view(np.uint16)[start:stop] for x in "mv")
            bits = copy.view(np.uint16)
            adam_bf16(
                step, gradient, bits, first_moments, second_moments, seed=seed, first=first,
                workers=workers,
            )  # fmt: skip
            return
        p = self.part("p").view(np.float32)[start:stop]
        if self.kind.states == "8bit":
            low, high = start // BLOCK, start // BLOCK + blocks(count)
            adam_8bit(
                step, gradient, p, self.part("m")[start:stop], self.part("v")[start:stop],
                self.part("m_scales").view(np.float32)[low:high],
                self.part("v_scales").view(np.float32)[low:high],
                copy, workers=workers,
            )  # fmt: skip
            return
        m, v = (self.part(x).view(np.float32)[start:stop] for x in "mv")
        adam_fp32(step, gradient, p, m, v, copy, workers=workers)

    def _forget(self, start: int, count: int) -> None:
        """Make the moments of these elements zero."""
        size = {"fp32": 4, "bf16": 2, "8bit": 1}[self.kind.states]
        for name in "mv":
            self.part(name)[start * size : (start + count) * size] = 0
        if self.kind.states == "8bit":
            low, high = start // BLOCK, start // BLOCK + blocks(count)
            for name in ("m_scales", "v_scales"):
                self.part(name)[4 * low : 4 * high] = 0


def numbers(memory: Bytes, dtype: str) -> Numbers:
    """float32, or the bits of bfloat16."""
    return memory.view(np.float32) if dtype == "float32" else memory.view(np.uint16)


def widen(source: Numbers, out: npt.NDArray[np.float32]) -> None:
    """``out`` [n] float32 = ``source`` [n]."""
    if source.dtype == np.float32:
        np.copyto(out, source)
    else:
        bits = out.view(np.uint32)
        np.copyto(bits, source)
        np.left_shift(bits, 16, out=bits)


def narrow(source: npt.NDArray[np.float32], out: Numbers) -> None:
    """``out`` [n] = ``source`` [n], rounded to nearest even where it is bfloat16."""
    if out.dtype == np.float32:
        np.copyto(out, source)
        return
    import torch

    rounded = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)
    rounded.copy_(torch.from_numpy(source))


def clear_gaps(block: Block, tile: Tile, weights: Numbers) -> None:
    """Zero what lies between pieces: a checkpoint says nothing about it."""
    at = tile.start
    for piece in block.pieces:
        low, high = max(at, tile.start), min(piece.offset, tile.start + tile.count)
        if low < high:
            weights[low - tile.start : high - tile.start] = 0
        at = piece.offset + piece.count
    low = max(at, tile.start)
    if low < tile.start + tile.count:
        weights[low - tile.start :] = 0


__all__ = ["COPY", "Slot", "SlotKind", "clear_gaps", "narrow", "numbers", "widen"]
