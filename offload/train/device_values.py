"""Values of packed weights on the device, while the unit that they belong to runs there.

What crosses the link, and what a slot holds, are a pack's bytes. When a unit begins to run, forward
and again backward, they are unpacked into memory of the device that all units share, in the order
of compute; experts come one by one into memory of their own. Where the host addresses the device's
memory (the simulated one) the CPU's kernels unpack, on a card its own (``card_values``): values are
those of a run without a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from offload.blocks import align_up
from offload.errors import PlanError
from offload.runtime.arena import row_major
from offload.runtime.device import Device, Memory, Region
from offload.train.card_values import unpacker_for
from offload.train.layout import Block
from offload.train.packed_values import Fill, Unpacker
from offload.units import format_bytes


class Recipe(Protocol):
    """How a packed block is unpacked: ``packed_base.Packed``."""

    @property
    def fills(self) -> tuple[Fill, ...]: ...


@dataclass(frozen=True, slots=True)
class Copy:
    """A block on the device."""

    block: Block
    tensor: torch.Tensor
    """[count] in the compute dtype; as a packed block lies in its slot: uint8 [nbytes]."""


class _Place(NamedTuple):
    """Where a block is unpacked to."""

    copy: Copy
    region: Region


def typed(memory: Memory, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor over a memory's bytes from ``offset``, with a version counter of its own:
    to autograd, a copy into other bytes of the memory is no change of this one."""
    base = memory.tensor()
    return typed_storage(base.untyped_storage(), int(base.storage_offset()) + offset, shape, dtype)


def typed_storage(
    storage: torch.UntypedStorage, offset: int, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """As ``typed``, over a storage."""
    sizes = tuple(shape)
    strides = row_major(sizes)
    # This runs several times for each use of an expert, and entering a mode costs more than it: it
    # is left only where it is on. A tensor just made requires no gradient, in whichever mode.
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            empty = torch.empty(0, dtype=dtype, device=storage.device)
            return empty.set_(storage, offset // dtype.itemsize, sizes, strides)
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset // dtype.itemsize, sizes, strides)


def as_it_lies(block: Block, memory: Memory, offset: int) -> Copy:
    """A block in its slot."""
    if block.packed is not None:
        return Copy(block, typed(memory, offset, (block.nbytes,), torch.uint8))
    dtype: torch.dtype = getattr(torch, block.dtype)
    return Copy(block, typed(memory, offset, (block.count,), dtype))


class DeviceValues:
    """Unpacks what is packed of a unit, or of a fused expert, for as long as it is used."""

    def __init__(
        self, device: Device, nbytes: int, name: str, recipes: Mapping[int, Recipe]
    ) -> None:
        """``nbytes``: most that is unpacked at a time; 0 where nothing is packed.

        Raises:
            OffloadError: packed weights cannot be unpacked on this device; names what is missing.
        """
        self._device = device
        self._name = name
        self._memory = device.device_memory(nbytes, name) if nbytes else None
        self._recipes = recipes
        self._unpacker = unpacker_for(device) if nbytes else Unpacker()
        self._used: Region | None = None

    def take(self, copies: list[Copy]) -> list[Copy]:
        """These as compute uses them, until ``give``: what is packed is unpacked now.

        Raises:
            PlanError: it takes more than was planned for.
        """
        places = list(self._places(copies))
        if not places:
            return copies
        if self._used is not None:
            raise AssertionError(f"{self._name}: used twice at a time")
        last = places[-1].region
        whole = self._used = Region(last.memory, 0, last.offset + last.nbytes)
        self._device.touch("compute", whole, "w")
        out = {c.block.index: c for c in copies}
        for copy, region in places:
            block = copy.block
            dtype: torch.dtype = getattr(torch, block.dtype)
            values = typed(region.memory, region.offset, (block.count,), dtype)
            for fill in self._recipes[block.index].fills:
                self._unpacker.fill(fill, copy.tensor, values)
            out[block.index] = Copy(block, values)
        return list(out.values())

    def _places(self, copies: Sequence[Copy]) -> Iterator[_Place]:
        at = 0
        for copy in copies:
            if copy.block.packed is None:
                continue
            nbytes = copy.block.value_bytes
            if self._memory is None or at + nbytes > self._memory.nbytes:
                room = 0 if self._memory is None else self._memory.nbytes
                raise PlanError(
                    f"{self._name} take {format_bytes(at + nbytes)} of the device, the plan has "
                    f"{format_bytes(room)} for them; drop --gpu"
                )
            yield _Place(copy, Region(self._memory, at, nbytes))
            at += align_up(nbytes)

    def give(self) -> None:
        """Compute is through with them."""
        if self._used is None:
            return
        used, self._used = self._used, None
        self._device.touch("compute", used, "r")  # until now
        self._device.discard(used, (self._device.compute.record(),))


__all__ = ["Copy", "DeviceValues", "Recipe", "as_it_lies", "typed", "typed_storage"]
