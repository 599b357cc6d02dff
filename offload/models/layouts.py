"""Where in its slot each tensor of a block lies: for the disk, or for the cores.

A block that comes through again and again lies as the file has it, so that reading costs no copy.
A block that stays is read once and multiplied with ever after: it lies on cache lines.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from offload.blocks import ALIGN, DTYPE_BYTES, TENSOR_ALIGN, BlockSpec, TensorSpec, align_up
from offload.io.ranges import Piece

IN_PAGES_FROM = 128 * 2**10
"""Tensors of at least so many bytes are laid out as in the file; smaller ones are copied, a page of
padding for each would be felt."""

CARD_ALIGN = 512
"""Where the allocator of torch's starts tensors on a card. cuBLAS is told an operand's alignment up
to 256 bytes."""

FREE = ("bfloat16", "float16")
"""Dtypes whose results do not depend on where a tensor starts, see ``units._phase``."""


def lay_as_in_file(spec: BlockSpec, found: Sequence[Sequence[Piece]]) -> BlockSpec:
    """Lay a block out anew: large tensors lie in their pages as they do in the file's.

    Then O_DIRECT brings whole pages straight to where they belong; without, each byte is copied
    once more, and on two cores that copy takes memory bandwidth from the disk's own transfers
    (2.2 instead of 2.9 GB/s from a virtual disk). Costs at most one page of padding per tensor.

    Args:
        found: for each tensor its pieces of files, targets counted from the tensor's start.
    """
    out: list[TensorSpec] = []
    end = 0
    for tensor, pieces in zip(spec.tensors, found, strict=True):
        phase, to = tensor.offset % TENSOR_ALIGN, TENSOR_ALIGN
        shifts: dict[int, int] = {}
        for p in pieces:
            shift = (p.src - p.dst) % ALIGN
            shifts[shift] = shifts.get(shift, 0) + p.nbytes
        if tensor.nbytes >= IN_PAGES_FROM:
            # Of a tensor made of several, the page that suits most of it.
            best = max(shifts, key=lambda s: shifts[s])
            fits = tensor.dtype in FREE or best % TENSOR_ALIGN == phase
            if best % DTYPE_BYTES[tensor.dtype] == 0 and fits:
                phase, to = best, ALIGN
        offset = align_up(end - phase, to) + phase
        out.append(replace(tensor, offset=offset))
        end = offset + tensor.nbytes
    return replace(spec, tensors=tuple(out), nbytes=end)


def lay_for_card(spec: BlockSpec, expert: int = 0, row: int = 0) -> BlockSpec:
    """Lay a block out for a card, whose libraries choose kernels by how the operands are aligned.

    Each tensor starts where it would in a resident model, within ``CARD_ALIGN`` bytes: at 0 if it
    is a parameter, and if it is a part of one, where that part lies. So the same kernels run. The
    bytes cost one copy in RAM on their way from the disk, which to a card does not matter.

    Args:
        expert: which of a fused parameter's parts the block is.
        row: of the parameter, at which the block's rows begin.
    """
    out: list[TensorSpec] = []
    end = 0
    for tensor in spec.tensors:
        per_row = tensor.nbytes // tensor.shape[0] if tensor.shape and tensor.shape[0] else 0
        phase = (expert * tensor.nbytes + row * per_row) % CARD_ALIGN
        offset = align_up(end - phase, CARD_ALIGN) + phase
        out.append(replace(tensor, offset=offset))
        end = offset + tensor.nbytes
    return replace(spec, tensors=tuple(out), nbytes=end)


def lay_on_lines(spec: BlockSpec, pieces: Sequence[Piece]) -> tuple[BlockSpec, tuple[Piece, ...]]:
    """Move tensors to multiples of 64 bytes, in a block of the same size.

    A product of a matrix and a vector reads each weight once, in whole cache lines; of a weight
    that starts at 8 within one, every vector register is loaded from two, and it takes 8 % longer.
    What starts elsewhere for the sake of equal bits (see ``blocks.TENSOR_ALIGN``) stays there.

    Args:
        pieces: of files, targets counted from the block's start.

    Returns:
        The block and its pieces with new offsets; both as given where the tensors would not fit.
    """
    moved: list[TensorSpec] = []
    end = 0
    for tensor in spec.tensors:
        phase = 0 if tensor.dtype in FREE else tensor.offset % TENSOR_ALIGN
        offset = align_up(end - phase, TENSOR_ALIGN) + phase
        moved.append(replace(tensor, offset=offset))
        end = offset + tensor.nbytes
    if end > spec.nbytes:
        return spec, tuple(pieces)
    starts = [t.offset for t in spec.tensors]
    by = [new.offset - old for new, old in zip(moved, starts, strict=True)]
    return (
        replace(spec, tensors=tuple(moved)),
        tuple(p._replace(dst=p.dst + by[bisect_right(starts, p.dst) - 1]) for p in pieces),
    )
