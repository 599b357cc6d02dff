"""Linear layers on packed weights on a card.

    K columns, N rows, T tokens

Few tokens: packed bytes times quantised activations, as ``offload.cpu_ops.kernels.gemm`` computes
them (the same integers; the float32 sums are in another order). Many: slabs of rows are dequantised
to bfloat16 and multiplied by torch, as ``offload.cpu_ops.prefill`` does, with its rounding.
"""

from __future__ import annotations

import torch

from offload.blocks import TENSOR_ALIGN, align_up
from offload.cpu_ops.formats import TILE_ROWS, Activation, Format
from offload.cpu_ops.packing import packed_bytes
from offload.errors import OffloadError
from offload.gpu_ops.arguments import DequantizeArgs, LinearArgs
from offload.gpu_ops.launch import Launcher
from offload.gpu_ops.records import Scratch, make_records, records_bytes
from offload.gpu_ops.source import MOST_THREADS, kernel

MANY = 32
"""Tokens from which a matrix is dequantised. A constant and not a measurement: a choice by the
clock would make results differ between runs. Kernels read the packed bytes once per 4 tokens, which
for 32 is as much as writing and reading bfloat16 once."""

SLAB_BYTES = 64 << 20
"""What is dequantised at once, at most but for one tile."""

_INTO = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def warps(fmt: Format, columns: int, most: int = MOST_THREADS // 32) -> int:
    """Warps that share a tile's columns: what a row's sum depends on."""
    step = 32 * fmt.block if fmt.activation is Activation.FLOAT32 else 256
    return max(1, min(most, -(-columns // step)))


def slab_rows(rows: int, columns: int) -> int:
    """Rows that are dequantised at once: whole tiles."""
    most = max(TILE_ROWS, SLAB_BYTES // (2 * columns) // TILE_ROWS * TILE_ROWS)
    return min(most, align_up(rows, TILE_ROWS))


def scratch_bytes(fmt: Format, rows: int, columns: int, tokens: int) -> int:
    """Bytes of scratch for up to ``tokens`` tokens. What torch's product takes is not in it."""
    few = records_bytes(fmt, min(tokens, MANY - 1), columns)
    if tokens < MANY:
        return few
    size, slab = _slab_dtype(fmt).itemsize, slab_rows(rows, columns)
    return max(few, size * (slab * columns + tokens * (columns + slab)) + 3 * TENSOR_ALIGN)


def _slab_dtype(fmt: Format) -> torch.dtype:
    """As ``offload.cpu_ops.prefill`` has it: float32 weights lose nothing."""
    return torch.float32 if fmt.name == "f32" else torch.bfloat16


def linear(
    launcher: Launcher,
    scratch: Scratch,
    fmt: Format,
    packed: int,
    x_TK: torch.Tensor,
    out_TN: torch.Tensor,
    bias_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """``out`` = x W^T + bias, queued; ``x`` [T, K] and ``out`` [T, N] float32 on the device.

    Args:
        packed: the address of the packed weights on the device.

    Raises:
        OffloadError: a shape or dtype does not fit, or scratch is short.
    """
    (tokens, columns), rows = x_TK.shape, out_TN.shape[1]
    check("x", x_TK, (tokens, columns))
    check("out", out_TN, (tokens, rows))
    if bias_N is not None:
        check("bias", bias_N, (rows,))
    fmt.blocks(columns)
    if tokens == 0 or rows == 0:
        return out_TN
    if tokens >= MANY:
        return _by_slabs(launcher, scratch, fmt, packed, x_TK, out_TN, bias_N)
    (at,) = scratch.places(records_bytes(fmt, tokens, columns))
    chosen = kernel("linear", fmt, tokens)
    arguments = LinearArgs(
        packed=packed,
        records=make_records(launcher, fmt, x_TK.data_ptr(), tokens, columns, at),
        x=x_TK.data_ptr(),
        bias=0 if bias_N is None else bias_N.data_ptr(),
        out=out_TN.data_ptr(),
        rows=rows, columns=columns, tokens=tokens,
    )  # fmt: skip
    grid = (-(-rows // TILE_ROWS), -(-tokens // chosen.tokens))
    launcher.launch(chosen, grid, 32 * warps(fmt, columns), arguments)
    return out_TN


def _by_slabs(
    launcher: Launcher, scratch: Scratch, fmt: Format, packed: int, x_TK: torch.Tensor,
    out_TN: torch.Tensor, bias_N: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    (tokens, columns), rows = x_TK.shape, out_TN.shape[1]
    step, dtype = slab_rows(rows, columns), _slab_dtype(fmt)
    size = dtype.itemsize
    at_slab, at_x, at_results = scratch.places(
        size * step * columns, size * tokens * columns, size * tokens * step
    )
    x = scratch.tensor(at_x, dtype, (tokens, columns))
    x.copy_(x_TK)
    for first in range(0, rows, step):
        n = min(step, rows - first)
        slab = scratch.tensor(at_slab, dtype, (n, columns))
        dequantize(launcher, fmt, packed + first * fmt.row_bytes(columns), slab)
        results = scratch.tensor(at_results, dtype, (tokens, n))
        torch.mm(x, slab.T, out=results)
        out_TN[:, first : first + n] = results
    if bias_N is not None:
        out_TN += bias_N
    return out_TN


def dequantize(launcher: Launcher, fmt: Format, packed: int, out_NK: torch.Tensor) -> torch.Tensor:
    """Rows from a tile's first at address ``packed`` on into ``out`` [N, K]: float32, exact, or
    bfloat16 or float16, nearest to it.

    Raises:
        OffloadError: a shape or dtype does not fit.
    """
    rows, columns = out_NK.shape
    if out_NK.dtype not in _INTO or not out_NK.is_contiguous():
        raise OffloadError(f"weights are dequantised to contiguous floats, not {out_NK.dtype}")
    fmt.blocks(columns)
    if rows == 0:
        return out_NK
    arguments = DequantizeArgs(
        packed=packed, out=out_NK.data_ptr(), rows=rows, columns=columns, into=_INTO[out_NK.dtype]
    )
    step = 32 * fmt.block if fmt.activation is Activation.FLOAT32 else 256
    chunks = -(-columns // step)
    each = min(4, chunks)
    # Tiles along x, of which there may be 2^31; along y 65535.
    grid = (-(-rows // TILE_ROWS), -(-chunks // each))
    launcher.launch(kernel("dequantize", fmt), grid, 32 * each, arguments)
    return out_NK


def check(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise OffloadError unless float32, contiguous and of that shape."""
    if tensor.dtype != torch.float32 or tensor.shape != shape or not tensor.is_contiguous():
        raise OffloadError(
            f"{name} must be contiguous float32 {list(shape)}, got {tensor.dtype} "
            f"{list(tensor.shape)}{'' if tensor.is_contiguous() else ', not contiguous'}"
        )


def weights_address(fmt: Format, packed: torch.Tensor, rows: int, columns: int) -> int:
    """Of packed weights, checked. Raises OffloadError."""
    want = packed_bytes(fmt, rows, columns)
    if packed.dtype != torch.uint8 or packed.shape != (want,) or not packed.is_contiguous():
        raise OffloadError(
            f"{rows} x {columns} weights in {fmt.name} are contiguous uint8 [{want}], got "
            f"{packed.dtype} {list(packed.shape)}"
        )
    return packed.data_ptr()


__all__ = ["MANY", "dequantize", "linear", "scratch_bytes", "weights_address"]
