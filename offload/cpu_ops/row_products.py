"""Rows of activations times a matrix of bfloat16, each as torch computes it when it is alone.

    K columns, N rows of the matrix, T tokens

Several generations of one model each multiply one row with the same matrix. One product of all rows
reads the matrix once; but torch's (oneDNN's) sums a row's products in another order when there are
more rows, and one result in thousands differs in its last bit. Here the order is that of a single
row: VDPBF16PS from the first pair of columns to the last within blocks of columns, the blocks'
float32 sums added one after the other, one rounding to bfloat16 at the end. How long oneDNN's
blocks are is nowhere promised: ``find_block`` tries, and finds none where torch adds otherwise.

The matrix stays as it is in a checkpoint, rows of columns. 32 rows times 128 columns become a
panel (pairs of columns, lanes are rows) that stays in the first cache, and is multiplied with all
tokens, eight at a time: 16 sums in registers, ten loads for 16 instructions. Few tokens wait for
the memory: each thread knows its next rows before it begins with these, and asks for them in time.
"""

from __future__ import annotations

import enum
import functools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from offload.cpu_ops import threads
from offload.cpu_ops.block_vectors import dot_pairs
from offload.cpu_ops.entries import Entry, Kernel
from offload.cpu_ops.isa import Isa, choose, features
from offload.cpu_ops.prefill_vectors import store_bf16, store_transposed
from offload.cpu_ops.tags import inline, outline, tag
from offload.cpu_ops.tiles import field
from offload.cpu_ops.vectors import (
    fadd,
    fetch_add,
    load_f32,
    load_i32,
    prefetch,
    splat,
    splat_i32,
    stack,
    store_f32,
)

logger = logging.getLogger(__name__)

LANES, PANEL_ROWS = 16, 32
PANEL_COLUMNS = 128
"""Of a panel, 8 KiB. With whole blocks of 512 the memory was idle while a panel was multiplied
with, and the panel and what comes next filled the first cache."""
AHEAD = 512
"""Columns before they are transposed, they are asked for."""
MOST_BLOCK = 1024
"""Columns of a block; oneDNN's seen so far have 512."""
BLOCKS = (512, 1024, 256, 128, 64)
"""Columns of a block, as they are tried."""
TOGETHER = 64
"""Tokens for which a panel is used before the next; more transpose it again."""
OUTPUTS_TRIED = 2**18
"""Outputs that must agree: two orders of sums agree on all but one in thousands."""
OUTPUTS_AGAIN = 2**14
OUTPUTS_AT_ONCE = 2**18
LEAST_ROWS = 8
"""Single rows tried, however many outputs one has."""

_panel = stack(PANEL_ROWS * PANEL_COLUMNS * 2)
SO_FAR = TOGETHER * PANEL_ROWS * 4
"""Bytes behind a token's sums of whole blocks: those of the block that is under way."""
_sums = stack(2 * SO_FAR)


class Rows(enum.IntEnum):
    """Places in the kernel's arguments; the counter on a cache line of its own, and then what is
    multiplied, ``Matrix.SIZE`` places for each matrix."""

    BARRIER = 0
    ROWS = 1
    """Of every matrix."""
    COLUMNS = 2
    BLOCK = 3
    """Columns that are summed before they are added to the blocks before."""
    BIAS = 4
    """Address of float32 [rows], of all matrices; 0: none."""
    MATRICES = 5
    NEXT = 8
    SIZE = 16


class Matrix(enum.IntEnum):
    """Of a matrix."""

    WEIGHTS = 0
    """bfloat16 [rows, columns], contiguous."""
    X = 1
    """bfloat16 [tokens, columns]"""
    TOKENS = 2
    OUT = 3
    """bfloat16 [tokens, rows]"""
    SIZE = 4


@inline
def _transpose(w: int, stride: int, panel: int, ahead: int) -> None:
    """16 rows of 16 pairs; ``ahead`` bytes further is what will be transposed next."""
    for i in range(LANES):
        prefetch(w + i * stride + ahead)
    store_transposed(
        panel, 2 * 64,
        load_i32(w), load_i32(w + stride), load_i32(w + 2 * stride), load_i32(w + 3 * stride),
        load_i32(w + 4 * stride), load_i32(w + 5 * stride), load_i32(w + 6 * stride),
        load_i32(w + 7 * stride), load_i32(w + 8 * stride), load_i32(w + 9 * stride),
        load_i32(w + 10 * stride), load_i32(w + 11 * stride), load_i32(w + 12 * stride),
        load_i32(w + 13 * stride), load_i32(w + 14 * stride), load_i32(w + 15 * stride),
    )  # fmt: skip


@inline
def _begin(at: int, begins: bool) -> Any:
    """What a block's sum is so far."""
    return splat(0.0) if begins else load_f32(at)


@inline
def _keep(at: int, ends: bool, first: bool, low: Any, high: Any) -> None:
    if not ends:
        store_f32(at + SO_FAR, low)
        store_f32(at + SO_FAR + 64, high)
    elif first:
        store_f32(at, low)
        store_f32(at + 64, high)
    else:
        store_f32(at, fadd(load_f32(at), low))
        store_f32(at + 64, fadd(load_f32(at + 64), high))


@outline
def _eight(
    panel: int, pairs: int, x: int, step: int, n: int, sums: int, first: bool, begins: bool,
    ends: bool,
) -> None:  # fmt: skip
    """As ``_multiply``; who is missing is computed as the last is."""
    last = n - 1
    x0, x1, x2, x3 = x, x + step * min(1, last), x + step * min(2, last), x + step * min(3, last)
    x4, x5 = x + step * min(4, last), x + step * min(5, last)
    x6, x7 = x + step * min(6, last), x + step * min(7, last)
    a0, b0 = _begin(sums + SO_FAR, begins), _begin(sums + SO_FAR + 64, begins)
    a1, b1 = _begin(sums + SO_FAR + 128, begins), _begin(sums + SO_FAR + 192, begins)
    a2, b2 = _begin(sums + SO_FAR + 256, begins), _begin(sums + SO_FAR + 320, begins)
    a3, b3 = _begin(sums + SO_FAR + 384, begins), _begin(sums + SO_FAR + 448, begins)
    a4, b4 = _begin(sums + SO_FAR + 512, begins), _begin(sums + SO_FAR + 576, begins)
    a5, b5 = _begin(sums + SO_FAR + 640, begins), _begin(sums + SO_FAR + 704, begins)
    a6, b6 = _begin(sums + SO_FAR + 768, begins), _begin(sums + SO_FAR + 832, begins)
    a7, b7 = _begin(sums + SO_FAR + 896, begins), _begin(sums + SO_FAR + 960, begins)
    for k in range(pairs):
        v, w, at = load_i32(panel + 128 * k), load_i32(panel + 128 * k + 64), 4 * k
        u = splat_i32(x0 + at)
        a0, b0 = dot_pairs(a0, v, u), dot_pairs(b0, w, u)
        u = splat_i32(x1 + at)
        a1, b1 = dot_pairs(a1, v, u), dot_pairs(b1, w, u)
        u = splat_i32(x2 + at)
        a2, b2 = dot_pairs(a2, v, u), dot_pairs(b2, w, u)
        u = splat_i32(x3 + at)
        a3, b3 = dot_pairs(a3, v, u), dot_pairs(b3, w, u)
        u = splat_i32(x4 + at)
        a4, b4 = dot_pairs(a4, v, u), dot_pairs(b4, w, u)
        u = splat_i32(x5 + at)
        a5, b5 = dot_pairs(a5, v, u), dot_pairs(b5, w, u)
        u = splat_i32(x6 + at)
        a6, b6 = dot_pairs(a6, v, u), dot_pairs(b6, w, u)
        u = splat_i32(x7 + at)
        a7, b7 = dot_pairs(a7, v, u), dot_pairs(b7, w, u)
    _keep(sums, ends, first, a0, b0)
    if n > 1:
        _keep(sums + 128, ends, first, a1, b1)
    if n > 2:
        _keep(sums + 256, ends, first, a2, b2)
    if n > 3:
        _keep(sums + 384, ends, first, a3, b3)
    if n > 4:
        _keep(sums + 512, ends, first, a4, b4)
    if n > 5:
        _keep(sums + 640, ends, first, a5, b5)
    if n > 6:
        _keep(sums + 768, ends, first, a6, b6)
    if n > 7:
        _keep(sums + 896, ends, first, a7, b7)


@outline
def _two(
    panel: int, pairs: int, x: int, step: int, n: int, sums: int, first: bool, begins: bool,
    ends: bool,
) -> None:  # fmt: skip
    """One or two tokens."""
    x0, x1 = x, x + step * (n - 1)
    a0, b0 = _begin(sums + SO_FAR, begins), _begin(sums + SO_FAR + 64, begins)
    a1, b1 = _begin(sums + SO_FAR + 128, begins), _begin(sums + SO_FAR + 192, begins)
    for k in range(pairs):
        v, w, at = load_i32(panel + 128 * k), load_i32(panel + 128 * k + 64), 4 * k
        u = splat_i32(x0 + at)
        a0, b0 = dot_pairs(a0, v, u), dot_pairs(b0, w, u)
        u = splat_i32(x1 + at)
        a1, b1 = dot_pairs(a1, v, u), dot_pairs(b1, w, u)
    _keep(sums, ends, first, a0, b0)
    if n > 1:
        _keep(sums + 128, ends, first, a1, b1)


@outline
def _four(
    panel: int, pairs: int, x: int, step: int, n: int, sums: int, first: bool, begins: bool,
    ends: bool,
) -> None:  # fmt: skip
    """Three or four."""
    x0, x1, x2, x3 = x, x + step, x + step * 2, x + step * (n - 1)
    a0, b0 = _begin(sums + SO_FAR, begins), _begin(sums + SO_FAR + 64, begins)
    a1, b1 = _begin(sums + SO_FAR + 128, begins), _begin(sums + SO_FAR + 192, begins)
    a2, b2 = _begin(sums + SO_FAR + 256, begins), _begin(sums + SO_FAR + 320, begins)
    a3, b3 = _begin(sums + SO_FAR + 384, begins), _begin(sums + SO_FAR + 448, begins)
    for k in range(pairs):
        v, w, at = load_i32(panel + 128 * k), load_i32(panel + 128 * k + 64), 4 * k
        u = splat_i32(x0 + at)
        a0, b0 = dot_pairs(a0, v, u), dot_pairs(b0, w, u)
        u = splat_i32(x1 + at)
        a1, b1 = dot_pairs(a1, v, u), dot_pairs(b1, w, u)
        u = splat_i32(x2 + at)
        a2, b2 = dot_pairs(a2, v, u), dot_pairs(b2, w, u)
        u = splat_i32(x3 + at)
        a3, b3 = dot_pairs(a3, v, u), dot_pairs(b3, w, u)
    _keep(sums, ends, first, a0, b0)
    _keep(sums + 128, ends, first, a1, b1)
    _keep(sums + 256, ends, first, a2, b2)
    if n > 3:
        _keep(sums + 384, ends, first, a3, b3)


@inline
def _multiply(
    panel: int, pairs: int, x: int, step: int, n: int, sums: int, first: bool, begins: bool,
    ends: bool,
) -> None:  # fmt: skip
    """A panel with up to eight tokens, ``step`` bytes apart.

    ``begins``, ``ends``: it is the first, the last of a block; ``first``: of the first block.
    """
    if n <= 2:
        _two(panel, pairs, x, step, n, sums, first, begins, ends)
    elif n <= 4:
        _four(panel, pairs, x, step, n, sums, first, begins, ends)
    else:
        _eight(panel, pairs, x, step, n, sums, first, begins, ends)


@inline
def _matrix(a: int, number: int) -> int:
    return a + 8 * (Rows.SIZE + Matrix.SIZE * number)


@inline
def row_products(how: Any, a: int) -> None:
    """Every thread of the region takes panels of rows from a counter."""
    rows, columns = field(a, Rows.ROWS), field(a, Rows.COLUMNS)
    block, bias, stride = field(a, Rows.BLOCK), field(a, Rows.BIAS), 2 * field(a, Rows.COLUMNS)
    early = min(AHEAD, columns)
    panel, sums = _panel(), _sums()
    each = rows // PANEL_ROWS
    panels = each * field(a, Rows.MATRICES)
    at = fetch_add(a + 8 * Rows.NEXT, 1)
    while at < panels:
        # Taken before it is due: what is fetched ahead has to be this thread's.
        following = fetch_add(a + 8 * Rows.NEXT, 1)
        matrix, row = _matrix(a, at // each), PANEL_ROWS * (at % each)
        weights, tokens = field(matrix, Matrix.WEIGHTS) + row * stride, field(matrix, Matrix.TOKENS)
        then = min(following, panels - 1)
        after = field(_matrix(a, then // each), Matrix.WEIGHTS)
        after += PANEL_ROWS * (then % each) * stride - weights - stride
        for t0 in range(0, tokens, TOGETHER):
            many = min(TOGETHER, tokens - t0)
            x = field(matrix, Matrix.X) + t0 * stride
            for c in range(0, columns, block):
                end = min(c + block, columns)
                for k in range(c, end, PANEL_COLUMNS):
                    part = min(PANEL_COLUMNS, end - k)
                    ahead = 2 * early
                    if k + early >= columns:  # then of the rows that come next
                        ahead += after
                    for i in range(0, part, 32):
                        w = weights + 2 * (k + i)
                        _transpose(w, stride, panel + 64 * i, ahead)
                        _transpose(w + LANES * stride, stride, panel + 64 * i + 64, ahead)
                    for t in range(0, many, 8):
                        _multiply(
                            panel, part // 2, x + t * stride + 2 * k, stride, min(8, many - t),
                            sums + 128 * t, c == 0, k == c, k + part == end,
                        )  # fmt: skip
            for t in range(many):
                out = field(matrix, Matrix.OUT) + 2 * ((t0 + t) * rows + row)
                low, high = load_f32(sums + 128 * t), load_f32(sums + 128 * t + 64)
                if bias != 0:
                    low = fadd(low, load_f32(bias + 4 * row))
                    high = fadd(high, load_f32(bias + 4 * row + 64))
                store_bf16(out, how, low)
                store_bf16(out + 32, how, high)
        at = following


@functools.cache
def row_products_kernel() -> Kernel:
    how = tag("rounding", "instruction")

    def row_products_body(arguments: int) -> None:
        row_products(how, arguments)

    return Kernel(row_products_body, "products of several single rows", 3.0)


@functools.cache
def _entry() -> Entry:
    return row_products_kernel().entry()


def fits(weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Whether there is a kernel for it: the processor has the instruction, and the shape is one of
    whole panels. Says nothing of bits."""
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and weight.dim() == 2
        and weight.is_contiguous()
        and weight.shape[0] % PANEL_ROWS == 0
        and weight.shape[1] % 32 == 0
        and weight.numel() > 0
        and (bias is None or bias.dtype == torch.bfloat16)
        and choose() is Isa.AVX512VNNI
        and "avx512bf16" in features()
    )


def prepare() -> None:
    """Have the code there before anybody measures what the process weighs without a model."""
    if fits(torch.zeros(PANEL_ROWS, PANEL_ROWS, dtype=torch.bfloat16)):
        _entry()


def multiply_rows(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, block: int, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """``F.linear`` of each row by itself, as ``find_block`` has found ``block`` for.

    Args:
        x_TK: bfloat16, contiguous.
        weight_NK: one that ``fits``.

    Returns:
        bfloat16 [T, N].
    """
    tokens, columns = x_TK.shape
    rows = weight_NK.shape[0]
    out_TN = torch.empty(tokens, rows, dtype=torch.bfloat16)
    bias = None if bias_N is None else bias_N.detach().float()
    a = np.zeros(Rows.SIZE + Matrix.SIZE, np.int64)
    a[Rows.ROWS : Rows.MATRICES + 1] = (
        rows, columns, min(block, MOST_BLOCK), 0 if bias is None else bias.data_ptr(), 1,
    )  # fmt: skip
    a[Rows.SIZE :] = weight_NK.data_ptr(), x_TK.data_ptr(), tokens, out_TN.data_ptr()
    _run(a)
    return out_TN


def multiply_groups(
    x_UK: torch.Tensor,
    weights: npt.ArrayLike,
    counts: Sequence[int],
    rows: int,
    block: int,
) -> torch.Tensor:
    """Products of some rows with one matrix, some more with another, and so on, in one region.

    Args:
        x_UK: bfloat16, contiguous; or one row [1, K], which is every matrix's.
        weights: addresses of the matrices [rows, K]; ``block`` has been found for all of them.
        counts: rows of ``x`` that are each one's, in order.

    Returns:
        bfloat16 [U, rows].
    """
    columns = x_UK.shape[1]
    out_UN = torch.empty(sum(counts), rows, dtype=torch.bfloat16)
    a = np.zeros(Rows.SIZE + Matrix.SIZE * len(counts), np.int64)
    a[Rows.ROWS : Rows.MATRICES + 1] = rows, columns, min(block, MOST_BLOCK), 0, len(counts)
    table = a[Rows.SIZE :].reshape(-1, Matrix.SIZE)
    ends = np.cumsum(counts)
    first = ends - counts
    table[:, Matrix.WEIGHTS] = weights
    table[:, Matrix.X] = x_UK.data_ptr() + (0 if len(x_UK) == 1 else 2 * columns * first)
    table[:, Matrix.TOKENS] = counts
    table[:, Matrix.OUT] = out_UN.data_ptr() + 2 * rows * first
    _run(a)
    return out_UN


def _run(a: threads.Arguments) -> None:
    entry = _entry()
    # As many threads as torch has now: tokens of a model that is streamed may have one fewer.
    threads.run(entry.call, entry.address, a, torch.get_num_threads())


def find_block(
    weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None, expected: int | None = None
) -> int | None:
    """The columns of a block with which ``multiply_rows`` gives ``F.linear``'s bits for single
    rows with this matrix, on this machine and with as many threads as now; None: there is none.

    Takes as long as some hundred products of single rows (as many as have OUTPUTS_TRIED outputs).

    Args:
        expected: only this one is tried, with OUTPUTS_AGAIN outputs: it was found here before.
    """
    if not fits(weight_NK, bias_N):
        return None
    rows, columns = weight_NK.shape
    wanted = OUTPUTS_TRIED if expected is None else OUTPUTS_AGAIN
    # No more at once than have a megabyte of outputs: a budget knows nothing of this.
    some = max(1, min(LEAST_ROWS, OUTPUTS_AT_ONCE // rows, -(-wanted // rows)))
    count = max(LEAST_ROWS if expected is None else 1, -(-wanted // rows))
    generator = torch.Generator().manual_seed(0)
    candidates = [b for b in BLOCKS if b < columns] + [MOST_BLOCK] * (columns <= MOST_BLOCK)
    if expected is not None:
        candidates = [b for b in candidates if b == expected]
    with torch.no_grad():
        for first in range(0, count, some):
            drawn = torch.randn(some, columns, generator=generator, dtype=torch.float32)
            x_TK = drawn.to(torch.bfloat16)
            alone = torch.cat([F.linear(x[None], weight_NK, bias_N) for x in x_TK])
            candidates = [
                b
                for b in candidates
                if torch.equal(multiply_rows(x_TK, weight_NK, b, bias_N), alone)
            ]
            if not candidates:
                logger.info(
                    "single rows times %d x %d are added in an order that is not known (%d rows "
                    "tried): they are not joined", rows, columns, first + some,
                )  # fmt: skip
                return None
    return candidates[0]


__all__ = [
    "BLOCKS", "find_block", "fits", "multiply_groups", "multiply_rows", "prepare",
    "row_products_kernel",
]  # fmt: skip
