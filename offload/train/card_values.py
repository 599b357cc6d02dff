"""Values of packed bytes on a card: ``packed_values.Unpacker`` by the card's own kernels.

float32 values are exactly the CPU's, bfloat16 ones the nearest to them. Kernels write whole rows,
one behind the other; what belongs elsewhere (every second output, columns) goes through scratch.
"""

# N rows (outputs), K columns (inputs)

from __future__ import annotations

import torch

from offload.cpu_ops.formats import TILE_ROWS, get_format
from offload.errors import OffloadError
from offload.gpu_ops.launch import CupyLauncher, Launcher
from offload.gpu_ops.linear import dequantize
from offload.gpu_ops.source import kernel
from offload.io.pack_manifest import Layout, Part
from offload.runtime.device import Device
from offload.train.packed_values import SCRATCH_BYTES, Fill, Unpacker, plain


class CardUnpacker(Unpacker):
    """See the module. What it does is queued where torch computes."""

    def __init__(self, launcher: Launcher) -> None:
        super().__init__()
        self._launcher = launcher

    def prepare(self, fills: list[Fill]) -> None:
        """Compile what these need. Raises OffloadError: that fails."""
        formats = {f.part.format for f in fills if f.part.layout is Layout.PACKED}
        for name in sorted(formats):
            self._launcher.prepare(kernel("dequantize", get_format(name)))

    def rows(
        self, part: Part, raw: torch.Tensor, first: int, end: int, out_NK: torch.Tensor
    ) -> None:
        """See ``Unpacker``.

        Raises:
            OffloadError: they lie as in a GGUF file, which is the CPU's to read.
        """
        if part.layout is Layout.PLAIN:
            out_NK.copy_(plain(part, raw)[first:end])
            return
        if part.layout is not Layout.PACKED:
            raise OffloadError(f"{part.name} lies in rows, which are not unpacked on a card")
        fmt = get_format(part.format)
        row_bytes = fmt.row_bytes(part.shape[1])
        if out_NK.is_contiguous():
            dequantize(self._launcher, fmt, raw.data_ptr() + first * row_bytes, out_NK)
            return
        each = SCRATCH_BYTES // (out_NK.element_size() * part.shape[1]) // TILE_ROWS * TILE_ROWS
        each = max(TILE_ROWS, each)
        for at in range(first, end, each):
            n = min(each, end - at)
            scratch = out_NK.new_empty(n, part.shape[1])
            dequantize(self._launcher, fmt, raw.data_ptr() + at * row_bytes, scratch)
            out_NK[at - first : at - first + n] = scratch


def unpacker_for(device: Device) -> Unpacker:
    """What unpacks in the device's memory: the CPU's kernels where they can address it.

    Raises:
        OffloadError: CuPy is missing; names the extra to install.
    """
    if device.torch_device.type == "cpu":
        return Unpacker()
    return CardUnpacker(make_launcher(device.torch_device))


def make_launcher(device: torch.device) -> Launcher:
    """Of kernels on a card."""
    return CupyLauncher(device)


__all__ = ["CardUnpacker", "unpacker_for"]
