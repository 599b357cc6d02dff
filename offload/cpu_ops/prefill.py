"""Many tokens at once: dequantise a slab of rows while it stays in cache, let torch multiply.

    K columns, N rows, T tokens, R rows of a slab

The decode kernels (``kernels.gemm``) read packed weights once per 8 tokens and multiply in int8 or
float32; here they are dequantised once for all tokens and multiplied at the processor's matrix
rate. Which is faster depends on the format, the processor and T (``crossover``), ``linear`` picks.

Rounding. With "bf16" slabs weights, activations and results are rounded to bfloat16 and sums are
float32, as in ``x.bfloat16() @ w.bfloat16().T``: about 0.2 % of a result's norm, where the int8
activations of the decode kernels cost about 0.6 %. Results are bfloat16 values because torch's CPU
product has no float32 output for bfloat16 inputs. "f32" slabs round sums only.

A token's result depends on T through the choice of path only, as long as torch's own product does
not depend on T; so prompts are to be cut on a fixed grid of chunks if runs are to be repeatable.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from offload.blocks import align_up
from offload.cpu_ops import threads
from offload.cpu_ops.formats import TILE_ROWS, Format
from offload.cpu_ops.isa import Isa, choose, features
from offload.cpu_ops.kernels import (
    Floats,
    Weights,
    address_of,
    check_floats,
    gemm,
    workspace,
)
from offload.cpu_ops.packing import packed_bytes
from offload.cpu_ops.prefill_kernels import Tiles, dequantize_entry
from offload.errors import OffloadError

if TYPE_CHECKING:
    import torch

KIND_BYTES = {"bf16": 2, "f32": 4}

SLAB_BYTES = 8 << 20
"""What is dequantised at once, at most but for one tile. Of plain bfloat16 ``torch.mm`` (q4_0,
4096 x 4096, 512 tokens, two Zen 4 cores with 32 MiB of L3): 1 and 2 MiB 74 %, 4 MiB 80 %,
8 MiB 89 %."""

_LINE = 64

_CROSSOVERS = {"bf16": 48, "f16": 48}
"""With AVX512-VNNI and AVX512-BF16, measured on two Zen 4 cores, 1024 x 2048 weights. In
microseconds, ``gemm`` / ``matmul``: bf16 641 / 667 for 32 tokens, 1025 / 851 for 48.
Not listed: never. The integer products of Q4_0, Q8_0 and K-quants ran at 0.5 to 0.6 Tops/s before
there were panels, above the 0.43 Tflop/s of bfloat16 (for 512 tokens q4_0 4087 / 6003, q4_k 3971 /
6592, q5_k 5292 / 7275, q6_k 7958 / 11093); f32 stays float32 (11290 / 12592). Formats that were not
measured count as never."""
_AMX_CROSSOVER = 32
"""With AMX: not measured. Its bfloat16 peak is 16 times that of AVX512-BF16, so dequantising is
what is left: about the time of 8 to 16 tokens' integer products, and torch's overhead."""


def slab_kind(fmt: Format) -> str:
    """What weights of a format are multiplied as: "bf16", or "f32" where they are float32 or the
    processor has no instruction for bfloat16 products."""
    fast = {"avx512bf16", "amx-bf16", "bf16"} & features()
    return "bf16" if fast and fmt.name != "f32" else "f32"


def row_stride(kind: str, columns: int) -> int:
    """Bytes between rows of a slab: columns to the next multiple of 32, and a cache line.

    Without that line the 16 rows that are written side by side share one set of the first cache
    if a row is a power of two: dequantising is then half as fast (10.9 instead of 19.6 G weights/s,
    q4_0, K = 2048, two Zen 4 cores).
    """
    return align_up(columns, 32) * KIND_BYTES[kind] + _LINE


def slab_rows(kind: str, rows: int, columns: int) -> int:
    """Rows of a slab: whole tiles of about SLAB_BYTES, slabs of a matrix of about equal size."""
    most = max(TILE_ROWS, SLAB_BYTES // row_stride(kind, columns) // TILE_ROWS * TILE_ROWS)
    slabs = -(-rows // most)
    return align_up(-(-rows // slabs), TILE_ROWS) if slabs else TILE_ROWS


def tensor_at(address: int, kind: str, rows: int, columns: int, stride: int) -> torch.Tensor:
    """A tensor [rows, columns] on memory that the caller keeps alive; ``stride`` in bytes."""
    import torch

    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    memory = (ctypes.c_char * (rows * stride)).from_address(address)
    step = stride // KIND_BYTES[kind]
    flat = torch.frombuffer(memory, dtype=dtype)
    return flat.as_strided((rows, columns), (step, 1))


def dequantize_tiles(
    fmt: Format, packed: int, columns: int, tiles: int, out: int, kind: str,
    *, stride: int | None = None, isa: str | None = None,
) -> None:  # fmt: skip
    """``tiles`` tiles at address ``packed`` to 16 x ``tiles`` rows of ``columns`` at ``out``.

    Rows lie ``stride`` bytes apart, None: ``row_stride(kind, columns)``; columns up to the next
    multiple of 32 are written too. float32 values equal ``codecs.decode_rows``, bfloat16 are
    nearest to them, ties to even, subnormal ones 0. About 20 G weights/s (q4_0, bfloat16, two Zen 4
    cores).
    """
    entry = dequantize_entry(fmt.name, kind, choose(isa))
    a = np.zeros(Tiles.SIZE, np.int64)
    a[Tiles.PACKED : Tiles.STRIDE + 1] = (
        packed,
        tiles,
        columns,
        TILE_ROWS * fmt.row_bytes(columns),
        out,
        row_stride(kind, columns) if stride is None else stride,
    )
    threads.run(entry.call, entry.address, a)


def dequantize_slab(
    fmt: Format, packed: int, rows: int, columns: int, first: int, out: int, kind: str,
    *, isa: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Rows ``first``.. of a matrix into the slab at ``out``: a tensor [rows of the slab, columns],
    the matrix' padding rows included in its memory, not in its shape."""
    last = min(first + slab_rows(kind, rows, columns), rows)
    tiles = -(-(last - first) // TILE_ROWS)
    at = packed + first * fmt.row_bytes(columns)
    dequantize_tiles(fmt, at, columns, tiles, out, kind, isa=isa)
    return tensor_at(out, kind, last - first, columns, row_stride(kind, columns))


def slab_bytes(kind: str, rows: int, columns: int) -> int:
    """Bytes of the slab that a matrix is dequantised into."""
    return slab_rows(kind, rows, columns) * row_stride(kind, columns)


def scratch_bytes(fmt: Format, rows: int, columns: int, tokens: int) -> int:
    """Bytes that ``matmul`` holds besides its arguments: a slab, and in the slab's dtype the
    activations and one slab's results. What torch's product packs for itself is not in it."""
    kind = slab_kind(fmt)
    results = align_up(tokens * slab_rows(kind, rows, columns) * KIND_BYTES[kind], _LINE)
    inputs = align_up(tokens * columns * KIND_BYTES[kind], _LINE) if kind == "bf16" else 0
    return slab_bytes(kind, rows, columns) + results + inputs + _LINE


def weights_address(fmt: Format, packed: Weights, rows: int, columns: int) -> int:
    """Checked as ``kernels.gemm`` checks."""
    if isinstance(packed, int):
        return packed
    want = packed_bytes(fmt, rows, columns)
    if packed.dtype != np.uint8 or packed.shape != (want,) or not packed.flags.c_contiguous:
        raise OffloadError(
            f"{rows} x {columns} weights in {fmt.name} are contiguous uint8 [{want}], got "
            f"{packed.dtype} {list(packed.shape)}"
        )
    return address_of(packed)


def matmul(
    fmt: Format, packed: Weights, rows: int, columns: int, x_TK: Floats, out_TN: Floats,
    *, isa: str | None = None,
) -> Floats:  # fmt: skip
    """``out`` [T, N] = x [T, K] W^T by dequantised slabs; see the module for rounding.

    Scratch: ``scratch_bytes``, kept for the next call. ``isa`` forces the instruction set of the
    dequantising kernel. Returns ``out``.

    Raises:
        OffloadError: a shape, dtype or size does not fit.
    """
    import torch

    tokens = x_TK.shape[0]
    check_floats("x", x_TK, (tokens, columns))
    check_floats("out", out_TN, (tokens, rows), written=True)
    address = weights_address(fmt, packed, rows, columns)
    if rows == 0 or tokens == 0:
        fmt.blocks(columns)
        return out_TN
    kind, size = slab_kind(fmt), slab_bytes(slab_kind(fmt), rows, columns)
    step = slab_rows(kind, rows, columns)
    width = KIND_BYTES[kind]
    scratch = workspace.address("prefill", scratch_bytes(fmt, rows, columns, tokens) - _LINE)
    at_results = scratch + size
    at_inputs = at_results + align_up(tokens * step * width, _LINE)
    x, out = torch.from_numpy(x_TK), torch.from_numpy(out_TN)
    inputs = x
    if kind == "bf16":
        inputs = tensor_at(at_inputs, kind, tokens, columns, columns * width)
        inputs.copy_(x)
    for first in range(0, rows, step):
        slab = dequantize_slab(fmt, address, rows, columns, first, scratch, kind, isa=isa)
        n = slab.shape[0]
        results = tensor_at(at_results, kind, tokens, n, n * width)
        torch.mm(inputs, slab.T, out=results)
        out[:, first : first + n] = results
    return out_TN


def crossover(fmt: Format, isa: str | None = None) -> int | None:
    """Tokens from which ``matmul`` is faster than ``kernels.gemm``; None: never.

    Constants and not a calibration: a choice by the clock would make results differ between runs.
    """
    if choose(isa) is not Isa.AVX512VNNI or slab_kind(fmt) != "bf16":
        return None
    return _AMX_CROSSOVER if "amx-bf16" in features() else _CROSSOVERS.get(fmt.name)


def linear(
    fmt: Format, packed: Weights, rows: int, columns: int, x_TK: Floats, out_TN: Floats,
    *, isa: str | None = None,
) -> Floats:  # fmt: skip
    """``matmul`` or ``kernels.gemm``, whichever is faster for this many tokens (``crossover``)."""
    least = crossover(fmt, isa)
    faster = matmul if least is not None and x_TK.shape[0] >= least else gemm
    return faster(fmt, packed, rows, columns, x_TK, out_TN, isa=isa)
