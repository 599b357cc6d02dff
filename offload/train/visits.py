"""A unit's visit to the device: its arguments go up, its results and its gradients come down.

Between units everything is in RAM, in ordinary memory, as without a device. Up: a copy into host
memory that the device can read, one to the device, behind the last visit's use of those bytes.
Down: computed into device memory, copied from there, and out of the host's side into memory of its
own. Each copy waits for an event of who wrote its source.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from offload.blocks import align_up
from offload.errors import PlanError
from offload.runtime.device import Device, Event, Memory, Region
from offload.train.device_plan import DevicePlacement
from offload.train.device_values import typed
from offload.train.grads import Gradients
from offload.units import format_bytes

Tensors = list[torch.Tensor | None]


class Visit(Protocol):
    """Where a unit runs."""

    def up(self, tensors: Sequence[torch.Tensor | None]) -> Tensors:
        """These where the unit runs, without their history. Valid until the end of the visit."""
        ...

    def down(self, tensors: Sequence[torch.Tensor | None]) -> Tensors:
        """These in RAM, for good."""
        ...


class AtHome:
    """The unit runs in RAM: everything is where it is."""

    def up(self, tensors: Sequence[torch.Tensor | None]) -> Tensors:
        return list(tensors)

    def down(self, tensors: Sequence[torch.Tensor | None]) -> Tensors:
        return list(tensors)


AT_HOME = AtHome()


class _Pair:
    """The same bytes of the host and of the device."""

    def __init__(self, device: Device, nbytes: int, name: str) -> None:
        self.nbytes = nbytes
        self.host: Memory = device.host_memory(nbytes, f"{name}, host")
        self.there: Memory = device.device_memory(nbytes, name)

    def host_part(self, at: int, nbytes: int) -> Region:
        return Region(self.host, at, nbytes)

    def device_part(self, at: int, nbytes: int) -> Region:
        return Region(self.there, at, nbytes)


class Visits:
    """Visits to ``device``, one at a time."""

    def __init__(self, device: Device, placement: DevicePlacement) -> None:
        self._device = device
        self._up = _Pair(device, placement.up_bytes, "arguments")
        self._down = _Pair(device, placement.down_bytes, "results")
        self._at = 0
        """Bytes of ``_up`` that this visit has taken."""
        self._free: Event | None = None
        """The end of the last visit."""
        self._copied: Event | None = None
        """The last copy up: the host's side may be written behind it."""
        self.up_bytes = self.down_bytes = 0

    @contextlib.contextmanager
    def visiting(self) -> Iterator[Visit]:
        """What is inside runs on the device."""
        if self._at:
            raise AssertionError("a visit within a visit")
        if self._copied is not None:
            self._copied.wait()
        try:
            yield self
        finally:
            self._leave()

    def _leave(self) -> None:
        self._free = self._device.compute.record()
        if self._at:
            self._device.discard(self._up.device_part(0, self._at), (self._free,))
        self._at = 0

    def up(self, tensors: Sequence[torch.Tensor | None]) -> Tensors:
        """See ``Visit``.

        Raises:
            PlanError: they take more than was planned for.
        """
        device = self._device
        places: list[tuple[int, Region] | None] = []
        for tensor in tensors:
            if tensor is None or not tensor.nbytes:
                places.append(None)
                continue
            part = self._up.host_part(self._take(self._up, tensor.nbytes), tensor.nbytes)
            self._fill(part, tensor)
            places.append((part.offset, part))
        device.h2d.wait(device.signal("host"))
        self._after_last_visit()
        out: Tensors = []
        for tensor, place in zip(tensors, places, strict=True):
            if tensor is None or place is None:
                out.append(None if tensor is None else tensor.detach().to(device.torch_device))
                continue
            at, part = place
            self._copied = device.copy(self._up.device_part(at, part.nbytes), part, device.h2d)
            self.up_bytes += part.nbytes
            out.append(typed(self._up.there, at, tensor.shape, tensor.dtype))
        if self._copied is not None:
            device.compute.wait(self._copied)
        for place in places:
            if place is not None:
                device.touch("compute", self._up.device_part(place[0], place[1].nbytes), "r")
        return out

    def _after_last_visit(self) -> None:
        if self._free is not None:
            self._device.h2d.wait(self._free)

    def _take(self, pair: _Pair, nbytes: int) -> int:
        at = self._at
        if at + nbytes > pair.nbytes:
            raise PlanError(
                f"a unit's arguments take {format_bytes(at + nbytes)}, the plan has "
                f"{format_bytes(pair.nbytes)} of the device for them; drop --gpu"
            )
        self._at = align_up(at + nbytes)
        return at

    def _fill(self, part: Region, tensor: torch.Tensor) -> None:
        self._device.touch("host", part, "w")
        typed(part.memory, part.offset, tensor.shape, tensor.dtype).copy_(tensor.detach())

    def down(self, tensors: Sequence[torch.Tensor | None]) -> Tensors:
        """See ``Visit``.

        Raises:
            PlanError: they take more than was planned for.
        """
        device, at = self._device, 0
        parts: list[int | None] = []
        for tensor in tensors:
            if tensor is None or not tensor.nbytes:
                parts.append(None)
                continue
            if at + tensor.nbytes > self._down.nbytes:
                raise PlanError(
                    f"a unit's results take {format_bytes(at + tensor.nbytes)}, the plan has "
                    f"{format_bytes(self._down.nbytes)} of the device for them; drop --gpu"
                )
            self._device.touch("compute", self._down.device_part(at, tensor.nbytes), "w")
            typed(self._down.there, at, tensor.shape, tensor.dtype).copy_(tensor.detach())
            parts.append(at)
            at = align_up(at + tensor.nbytes)
        device.d2h.wait(device.compute.record())
        end: Event | None = None
        for tensor, start in zip(tensors, parts, strict=True):
            if tensor is not None and start is not None:
                n = tensor.nbytes
                end = device.copy(
                    self._down.host_part(start, n), self._down.device_part(start, n), device.d2h
                )
                self.down_bytes += n
        if end is not None:
            end.wait()
        out: Tensors = []
        for tensor, start in zip(tensors, parts, strict=True):
            if tensor is None or start is None:
                out.append(None if tensor is None else tensor.detach().to("cpu"))
                continue
            device.touch("host", self._down.host_part(start, tensor.nbytes), "r")
            out.append(typed(self._down.host, start, tensor.shape, tensor.dtype).clone())
        if at:
            device.discard(self._down.device_part(0, at), () if end is None else (end,))
        return out


class _Falling(NamedTuple):
    """A gradient on its way down."""

    block: int
    piece: int
    place: int
    shape: torch.Size
    dtype: torch.dtype
    end: Event
    rows: slice | None
    once: bool


class FallingGradients:
    """Gradients of weights on their way from the device to where updates read them, in order."""

    def __init__(self, device: Device, placement: DevicePlacement, gradients: Gradients) -> None:
        self._device = device
        self._gradients = gradients
        self._size = placement.gradient_bytes
        self._count = placement.gradients
        self._pair = (
            _Pair(device, self._count * self._size, "gradients on their way")
            if self._size
            else None
        )
        self._falling: deque[_Falling] = deque()
        self._next = 0
        self.down_bytes = 0

    def add(
        self, block: int, piece: int, gradient: torch.Tensor, rows: slice | None = None, *,
        once: bool = False,
    ) -> None:  # fmt: skip
        """Begin to copy a gradient that compute has made; its memory may be freed. ``rows``: it is
        of these alone; ``once``: and they come once in a step (``Gradients.add_slice``)."""
        device, pair = self._device, self._pair
        assert pair is not None
        if len(self._falling) == self._count:
            self._land_one()
        place, nbytes = self._next, gradient.nbytes
        self._next = (place + 1) % self._count
        at = place * self._size
        device.touch("compute", pair.device_part(at, nbytes), "w")
        typed(pair.there, at, gradient.shape, gradient.dtype).copy_(gradient)
        device.d2h.wait(device.compute.record())
        end = device.copy(pair.host_part(at, nbytes), pair.device_part(at, nbytes), device.d2h)
        self.down_bytes += nbytes
        self._falling.append(
            _Falling(block, piece, at, gradient.shape, gradient.dtype, end, rows, once)
        )

    def land(self) -> None:
        """All that were begun are where updates read them."""
        while self._falling:
            self._land_one()

    def forget(self) -> None:
        """Wait for what is under way, and drop it."""
        for falling in self._falling:
            falling.end.wait()
        self._falling.clear()

    def _land_one(self) -> None:
        pair, falling = self._pair, self._falling.popleft()
        assert pair is not None
        falling.end.wait()
        nbytes = falling.shape.numel() * falling.dtype.itemsize
        self._device.touch("host", pair.host_part(falling.place, nbytes), "r")
        value = typed(pair.host, falling.place, falling.shape, falling.dtype)
        self._device.discard(pair.device_part(falling.place, nbytes), (falling.end,))
        at, rows = (falling.block, falling.piece), falling.rows
        if rows is None:
            self._gradients.add(*at, value.clone())  # which may keep it
        elif falling.once:
            self._gradients.add_slice(*at, value, rows)
        else:
            self._gradients.add(*at, value, rows)


__all__ = ["AT_HOME", "AtHome", "FallingGradients", "Visit", "Visits"]
