"""Gradients of weights on their way from the device to where updates read them, in order.

They lie behind each other in two areas, one on each side. The host waits for the oldest only where
a new one finds no room: with room for the gradients of two units it can queue a unit's backward
while the device is at the one before it, and what lands meanwhile is taken in passing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from offload.blocks import align_up
from offload.runtime.device import Device, Event
from offload.train.device_plan import DevicePlacement
from offload.train.device_values import typed
from offload.train.grads import Gradients
from offload.train.visits import Pair


class _Falling(NamedTuple):
    """A gradient on its way down."""

    block: int
    piece: int
    place: int
    nbytes: int
    shape: torch.Size
    dtype: torch.dtype
    end: Event
    rows: slice | None
    once: bool


class FallingGradients:
    """Gradients of weights on their way from the device to where updates read them, in order."""

    def __init__(
        self, device: Device, placement: DevicePlacement, gradients: Gradients,
        stalls: Counter[str],
    ) -> None:  # fmt: skip
        """``stalls``: see ``Visits``."""
        self._stalls = stalls
        self._device = device
        self._gradients = gradients
        self._room = placement.gradients * placement.gradient_bytes
        self._pair = Pair(device, self._room, "gradients on their way") if self._room else None
        self._falling: deque[_Falling | Callable[[], None]] = deque()
        """Copies, and what is to be done when those before it have landed."""
        self._copies = 0
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
        while self._copies and self._oldest().end.done():
            self._land_one()
        nbytes = gradient.nbytes
        at = self._place(align_up(nbytes))
        device.touch("compute", pair.device_part(at, nbytes), "w")
        typed(pair.there, at, gradient.shape, gradient.dtype).copy_(gradient)
        device.d2h.wait(device.compute.record())
        end = device.copy(pair.host_part(at, nbytes), pair.device_part(at, nbytes), device.d2h)
        self.down_bytes += nbytes
        self._copies += 1
        self._falling.append(
            _Falling(block, piece, at, nbytes, gradient.shape, gradient.dtype, end, rows, once)
        )

    def _place(self, nbytes: int) -> int:
        """Where the next gradient goes; waits until it has room."""
        at = self._next if self._next + nbytes <= self._room else 0
        while any(
            isinstance(one, _Falling) and one.place < at + nbytes and at < one.place + one.nbytes
            for one in self._falling
        ):
            self._land_one()
        self._next = at + nbytes
        return at

    def _oldest(self) -> _Falling:
        oldest = self._falling[0]
        assert isinstance(oldest, _Falling)
        return oldest

    def then(self, call: Callable[[], None]) -> None:
        """Call when all that were begun are where updates read them, and before a later one is."""
        self._falling.append(call)
        self._go_on()

    def land(self) -> None:
        """All that were begun are where updates read them."""
        self._stalls["gradients"] += self._copies > 0
        while self._copies:
            self._land_one()
        self._go_on()

    def forget(self) -> None:
        """Wait for what is under way, and drop it."""
        for falling in self._falling:
            if isinstance(falling, _Falling):
                falling.end.wait()
        self._falling.clear()
        self._copies = 0

    def _go_on(self) -> None:
        """Do what waits for no copy any more."""
        while self._falling and not isinstance(self._falling[0], _Falling):
            call = self._falling.popleft()
            assert not isinstance(call, _Falling)
            call()

    def _land_one(self) -> None:
        self._land_first()
        self._go_on()

    def _land_first(self) -> None:
        pair, falling = self._pair, self._oldest()
        assert pair is not None
        self._falling.popleft()
        self._copies -= 1
        falling.end.wait()
        place, nbytes = falling.place, falling.nbytes
        self._device.touch("host", pair.host_part(place, nbytes), "r")
        value = typed(pair.host, place, falling.shape, falling.dtype)
        self._device.discard(pair.device_part(place, nbytes), (falling.end,))
        at, rows = (falling.block, falling.piece), falling.rows
        if rows is None:
            self._gradients.add(*at, value.clone())  # which may keep it
        elif falling.once:
            self._gradients.add_slice(*at, value, rows)
        else:
            self._gradients.add(*at, value, rows)


__all__ = ["FallingGradients"]
