"""Activations between the device and the CPU: memory on both sides, the same places in each.

What a MoE layer's experts are applied to comes down in one copy; each result goes up in one. A
place is used for one direction and once per layer, and a layer begins when all results of the one
before are on the device, so no copy ever meets another's bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from offload.blocks import TENSOR_ALIGN, align_up
from offload.errors import SchedulerError
from offload.runtime.device import Device, Memory, Region


class Mirror:
    """``nbytes`` of host memory and as many of device memory, given out from the front."""

    def __init__(self, device: Device, nbytes: int) -> None:
        """Raises PlanError: no room on the device."""
        self._memories: list[Memory] = []
        self.nbytes = nbytes
        self._used = 0
        try:
            self._host = device.host_memory(nbytes, "activations for the CPU")
            self._memories.append(self._host)
            self._top = device.device_memory(nbytes, "activations from the CPU")
            self._memories.append(self._top)
        except BaseException:
            self.close()
            raise

    def clear(self) -> None:
        """All places are free again."""
        self._used = 0

    def place(self, nbytes: int) -> int:
        """The offset of ``nbytes`` that nobody has.

        Raises:
            SchedulerError: more than the plan has set aside.
        """
        offset = self._used
        if offset + nbytes > self.nbytes:
            raise SchedulerError(
                f"{nbytes} bytes of activations at {offset} exceed the {self.nbytes} that "
                f"the plan has set aside"
            )
        self._used = align_up(offset + nbytes, TENSOR_ALIGN)
        return offset

    def below(self, offset: int, nbytes: int) -> Region:
        """A place in RAM."""
        return Region(self._host, offset, nbytes)

    def above(self, offset: int, nbytes: int) -> Region:
        """A place on the device."""
        return Region(self._top, offset, nbytes)

    def close(self) -> None:
        """Give both memories back. Idempotent."""
        for memory in self._memories:
            memory.close()


def sizes(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Bytes that tensors take side by side, each aligned."""
    return [align_up(t.numel() * t.element_size(), TENSOR_ALIGN) for t in tensors]


def typed(region: Region, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The first bytes of a region as a tensor."""
    nbytes = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    raw = region.memory.tensor()[region.offset : region.offset + nbytes]
    return raw.view(dtype).view(tuple(shape))


__all__ = ["Mirror", "sizes", "typed"]
