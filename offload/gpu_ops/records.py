"""Activations quantised on the card, and scratch memory to put them in.

The records are those of ``offload.cpu_ops.activations``, to the bit, in three arrays one after the
other: int8 [T, K], float32 scales, int32 sums.
"""

from __future__ import annotations

import torch

from offload.blocks import TENSOR_ALIGN, align_up
from offload.cpu_ops.formats import Activation, Format
from offload.errors import OffloadError
from offload.gpu_ops.arguments import QuantizeArgs, Records
from offload.gpu_ops.launch import Launcher
from offload.gpu_ops.source import MOST_THREADS, kernel

_COLUMNS_OF_SUM = {Activation.Q8_32: 32, Activation.Q8_256: 16}
_COLUMNS_OF_WARP = 256


def records_bytes(fmt: Format, tokens: int, columns: int) -> int:
    """Bytes of the records of ``tokens`` rows; 0 where the kernels read float32."""
    if fmt.activation is Activation.FLOAT32:
        return 0
    fmt.blocks(columns)
    return sum(_parts(fmt, tokens, columns))


def _parts(fmt: Format, tokens: int, columns: int) -> tuple[int, int, int]:
    per_scale, per_sum = fmt.activation.columns, _COLUMNS_OF_SUM[fmt.activation]
    return (
        align_up(tokens * columns, TENSOR_ALIGN),
        align_up(4 * tokens * (columns // per_scale), TENSOR_ALIGN),
        align_up(4 * tokens * (columns // per_sum), TENSOR_ALIGN),
    )


def make_records(
    launcher: Launcher, fmt: Format, x: int, tokens: int, columns: int, at: int
) -> Records:
    """Queue the quantising of float32 [tokens, columns] at address ``x`` into scratch at ``at``,
    of ``records_bytes``. For float formats there is nothing to do."""
    if fmt.activation is Activation.FLOAT32:
        return Records()
    q, scale, _ = _parts(fmt, tokens, columns)
    made = Records(at, at + q, at + q + scale)
    chunks = -(-columns // _COLUMNS_OF_WARP)
    warps = min(MOST_THREADS // 32, chunks)
    arguments = QuantizeArgs(
        x=x, q=made.q, scale=made.scale, sums=made.sums,
        columns=columns, tokens=tokens, per_scale=fmt.activation.columns,
    )  # fmt: skip
    launcher.launch(kernel("quantize"), (tokens, -(-chunks // warps)), 32 * warps, arguments)
    return made


class Scratch:
    """Memory of the device that calls on one stream use one after the other.

    Args:
        nbytes: as much as the largest call needs; what a plan has set aside.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        with torch.inference_mode(False):
            self._memory = torch.empty(nbytes + TENSOR_ALIGN, dtype=torch.uint8, device=device)
        self._start = align_up(self._memory.data_ptr(), TENSOR_ALIGN)

    def places(self, *sizes: int) -> list[int]:
        """Addresses of parts of these sizes; they are free again at the next call.

        Raises:
            OffloadError: together they are more than there is.
        """
        found, end = [], 0
        for size in sizes:
            found.append(self._start + end)
            end += align_up(size, TENSOR_ALIGN)
        if end > self.nbytes:
            raise OffloadError(
                f"a call needs {end} bytes of scratch on the device and {self.nbytes} are set "
                f"aside; plan the model for as many tokens as it is called with"
            )
        return found

    def tensor(self, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A part as a tensor."""
        count = 1
        for size in shape:
            count *= size
        first = at - self._memory.data_ptr()
        flat = self._memory[first : first + count * dtype.itemsize]
        return flat.view(dtype).view(shape)


__all__ = ["Scratch", "make_records", "records_bytes"]
