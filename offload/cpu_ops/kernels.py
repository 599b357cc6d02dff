"""Matrix times vector, and the experts of a MoE layer, on packed weights.

    K columns, N rows, T tokens, H hidden size, E experts of a call

Results do not depend on the number of threads, on how many tokens are computed together or (the
integer formats and float32 sums alike) on the instruction set. Against exact arithmetic they
carry the rounding of activations to int8 (see ``activations.py``) and of float32 sums.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.cpu_ops import threads
from offload.cpu_ops.activations import record_bytes, scratch_bytes
from offload.cpu_ops.entries import gemm_entry
from offload.cpu_ops.formats import TILE_ROWS, Format
from offload.cpu_ops.isa import choose
from offload.cpu_ops.packing import packed_bytes
from offload.cpu_ops.tiles import STREAMS, Gemm
from offload.errors import OffloadError

Floats = npt.NDArray[np.float32]
Weights = npt.NDArray[np.uint8] | int
"""Packed weights, or their address if the caller vouches for them."""

TASK_BYTES = 128 << 10
"""Weights of a task: long enough for a stream, short enough to share out."""


class Workspace(threading.local):
    """Scratch memory of the calling thread, by name; grows, never shrinks."""

    def __init__(self) -> None:
        self._buffers: dict[str, npt.NDArray[np.uint8]] = {}

    def address(self, name: str, nbytes: int) -> int:
        """64-aligned memory of at least ``nbytes``; valid until the name is asked for again."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < nbytes + 64:
            buffer = np.empty(nbytes + 64, np.uint8)
            self._buffers[name] = buffer
        return (address_of(buffer) + 63) & ~63

    @property
    def nbytes(self) -> int:
        """Held now."""
        return sum(b.size for b in self._buffers.values())


workspace = Workspace()


_NOTHING = ctypes.c_char * 0


def address_of(array: npt.NDArray[Any]) -> int:
    """Of its first element. Four times as fast as ``__array_interface__`` where it can be, which
    with ten arrays per call is a quarter of what a call costs."""
    if array.size and array.flags.writeable and array.flags.c_contiguous:
        buffer: Any = array  # numpy's annotations lack the buffer protocol before Python 3.12
        return ctypes.addressof(_NOTHING.from_buffer(buffer))
    return int(array.__array_interface__["data"][0])


def tiles_per_task(rows: int, row_bytes: int) -> int:
    """About TASK_BYTES, but at least four tasks per thread if there are that many tiles; whole
    STREAMS of them."""
    tiles = -(-rows // TILE_ROWS)
    by_size = TASK_BYTES // (TILE_ROWS * row_bytes)
    wanted = min(by_size, tiles // (4 * threads.count()))
    return max(STREAMS, wanted // STREAMS * STREAMS)


def check_floats(
    name: str, array: Floats, shape: tuple[int, ...], *, written: bool = False
) -> None:
    """Raise OffloadError unless float32, C-contiguous and of that shape."""
    if array.dtype != np.float32 or array.shape != shape or not array.flags.c_contiguous:
        raise OffloadError(
            f"{name} must be contiguous float32 {list(shape)}, got {array.dtype} "
            f"{list(array.shape)}{'' if array.flags.c_contiguous else ', not contiguous'}"
        )
    if written and not array.flags.writeable:
        raise OffloadError(f"{name} is read-only")


def gemv(
    fmt: Format, packed: Weights, rows: int, columns: int, x: Floats, out: Floats,
    *, isa: str | None = None,
) -> Floats:  # fmt: skip
    """``out`` [N] = W [N, K] x [K]; ``packed`` by ``packing.pack_rows``. Returns ``out``.

    ``isa`` forces an instruction set (``isa.choose``).

    Raises:
        OffloadError: a shape, dtype or size does not fit.
    """
    check_floats("x", x, (columns,))
    check_floats("out", out, (rows,), written=True)
    gemm(fmt, packed, rows, columns, x[None], out[None], isa=isa)
    return out


def gemm(
    fmt: Format, packed: Weights, rows: int, columns: int, x_TK: Floats, out_TN: Floats,
    *, isa: str | None = None,
) -> Floats:  # fmt: skip
    """``out`` [T, N] = x [T, K] W^T, for few tokens: each row of ``out`` is what ``gemv`` gives.

    Weights are read once per 8 tokens. Raises as ``gemv`` does.
    """
    tokens = x_TK.shape[0]
    check_floats("x", x_TK, (tokens, columns))
    check_floats("out", out_TN, (tokens, rows), written=True)
    if not isinstance(packed, int):
        want = packed_bytes(fmt, rows, columns)
        if packed.dtype != np.uint8 or packed.shape != (want,) or not packed.flags.c_contiguous:
            raise OffloadError(
                f"{rows} x {columns} weights in {fmt.name} are contiguous uint8 [{want}], got "
                f"{packed.dtype} {list(packed.shape)}"
            )
        packed = address_of(packed)
    entry = gemm_entry(fmt.name, choose(isa))
    blocks, x = fmt.blocks(columns), address_of(x_TK)
    if rows == 0 or tokens == 0:
        return out_TN
    a = np.zeros(Gemm.SIZE, np.int64)
    a[Gemm.PACKED : Gemm.X + 1] = packed, rows, blocks, tokens, x
    per_token = scratch_bytes(fmt, columns)
    inputs = x
    if per_token:
        a[Gemm.RECORDS] = inputs = workspace.address("x", tokens * per_token)
    step = blocks * record_bytes(fmt)
    addresses = np.arange(inputs, inputs + tokens * step, step, dtype=np.int64)
    a[Gemm.INPUTS : Gemm.TILES_PER_TASK + 1] = (
        address_of(addresses),
        address_of(out_TN),
        4 * rows,
        tiles_per_task(rows, fmt.row_bytes(columns)),
    )
    threads.run(entry.call, entry.address, a)
    return out_TN
