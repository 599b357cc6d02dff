"""A unit's visit to the device: what it is called with is there, what it returns stays there.

Arguments go up: a copy into host memory that the device can read, one to the device, behind the
last use of those bytes. What a unit on the device has returned, forward or backward, is there
already: it is handed over where it lies, for as long as nothing takes its place. Arguments that all
units get alike (position embeddings, masks) go up once and stay, as far as the plan has room.
Results come down when they are wanted in RAM (``landing``), first into host memory that the device
can write: whoever wants them waits, or nobody does until that memory is another's turn. Each copy
waits for an event of who wrote its source, and of who reads what it overwrites.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload.blocks import align_up
from offload.errors import OffloadError, PlanError
from offload.runtime.device import Device, Event, Memory, Region
from offload.train.device_plan import DevicePlacement
from offload.train.device_values import typed
from offload.train.landing import Home, Landing, plain
from offload.train.rings import Part, Ring
from offload.train.same_again import Sums
from offload.train.visit import Tensors, Visit
from offload.units import format_bytes

log = logging.getLogger(__name__)


class Pair:
    """The same bytes of the host and of the device."""

    def __init__(self, device: Device, nbytes: int, name: str) -> None:
        self.nbytes = nbytes
        self.host: Memory = device.host_memory(nbytes, f"{name}, host")
        self.there: Memory = device.device_memory(nbytes, name)

    def host_part(self, at: int, nbytes: int) -> Region:
        return Region(self.host, at, nbytes)

    def device_part(self, at: int, nbytes: int) -> Region:
        return Region(self.there, at, nbytes)


@dataclass(eq=False, slots=True)
class _Argument(Part):
    """Of a visit, in the host's memory, and in the device's unless it is one of the same."""

    visit: int
    there: bool
    copied: Event
    """The host's side may be written behind it."""
    left: Event | None = None
    """The end of its visit: the device's side may be."""


@dataclass(eq=False, slots=True)
class _Same(Part):
    """An argument that stays on the device."""

    key: Any
    alive: StorageWeakRef
    """As long as this is held no other storage has its address."""
    visit: int
    """That used it last."""
    copied: Event
    left: Event | None = None
    """The end of its last use."""


@dataclass(eq=False, slots=True)
class _Result(Part):
    """On the device."""

    visit: int
    """That made it."""
    home: weakref.ref[Home]
    made: Event
    used: int = 0
    """The visit that used it last."""
    copied: Event | None = None
    """It is down, in the host's memory that the device writes."""


@dataclass(eq=False, slots=True)
class _Fallen(Part):
    """In the host's memory that the device writes, or on its way there."""

    visit: int
    home: weakref.ref[Home]
    copied: Event


class Visits:
    """Visits to ``device``, one at a time. Results may be asked for from any thread."""

    def __init__(self, device: Device, placement: DevicePlacement) -> None:
        self._device = device
        self._up = Pair(device, placement.up_bytes, "arguments")
        self._arguments: Ring[_Argument] = Ring(placement.up_bytes)
        self._same: Ring[_Same] = Ring(placement.same_bytes)
        self._same_memory = (
            device.device_memory(placement.same_bytes, "arguments of all units")
            if placement.same_bytes
            else None
        )
        self._found: dict[Any, _Same] = {}
        nbytes = placement.down_bytes + placement.turn_bytes
        self._there = device.device_memory(nbytes, "results")
        self._results: Ring[_Result] = Ring(nbytes)
        self._host = device.host_memory(placement.down_bytes, "results, host")
        self._fallen: Ring[_Fallen] = Ring(placement.down_bytes)
        self._falling: deque[_Fallen] = deque()
        """In the order of their copies."""
        self._turns = placement.turns
        self._visit = 0
        """The number of the visit that runs, or was the last one."""
        self._inside = False
        self._upper = False
        """The last visit's arguments began in the middle of the memory for them."""
        self._lent: list[tuple[torch.Tensor, int, _Same | _Result]] = []
        """What this visit uses and later ones may, too, and its version at first."""
        self._lock = threading.RLock()
        self.up_bytes = self.down_bytes = 0
        self.stalls: Counter[str] = Counter()
        """How often the host has waited for what the last visit computes, by what for: the device
        has nothing to do then until the host has looked and goes on."""

    @contextlib.contextmanager
    def visiting(self) -> Iterator[Visit]:
        """What is inside runs on the device."""
        if self._inside:
            raise AssertionError("a visit within a visit")
        self._inside = True
        self._visit += 1
        try:
            yield self
            self._unchanged()
        finally:
            self._inside = False
            self._end()

    def _unchanged(self) -> None:
        for tensor, version, part in self._lent:
            if tensor._version == version:
                continue
            if isinstance(part, _Same):
                self._found.pop(part.key, None)
            elif (home := part.home()) is not None:
                home.touched = True
                if part.copied is not None:
                    raise OffloadError(
                        "a layer changes its input in place, of which backward needs what it was "
                        "before; it cannot be trained with recomputation"
                    )

    def _end(self) -> None:
        device = self._device
        for _, _, part in self._lent:
            device.touch("compute", self._region(part), "r")  # until now
        left = device.compute.record()
        for _, _, part in self._lent:
            if isinstance(part, _Same):
                part.left = left
        self._lent.clear()
        for argument in self._arguments.parts:
            if argument.visit == self._visit and argument.there:
                argument.left = left
                region = self._up.device_part(argument.offset, argument.nbytes)
                device.discard(region, (left,))

    def _region(self, part: _Same | _Result) -> Region:
        memory = self._there if isinstance(part, _Result) else self._same_memory
        assert memory is not None
        return Region(memory, part.offset, part.nbytes)

    # -- up -------------------------------------------------------------------------------

    def up(
        self, tensors: Sequence[torch.Tensor | None], *, same: Collection[int] = (),
        kept: Collection[int] = (),
    ) -> Tensors:  # fmt: skip
        """See ``Visit``.

        Raises:
            PlanError: they take more than was planned for.
        """
        with self._lock:
            out: Tensors = [None] * len(tensors)
            rising: list[tuple[int, torch.Tensor]] = []
            for i, tensor in enumerate(tensors):
                if tensor is None:
                    continue
                if not tensor.nbytes:
                    out[i] = plain(tensor).detach().to(self._device.torch_device)
                    continue
                if i not in kept and isinstance(tensor, Landing):
                    out[i] = self._handed(tensor)
                if out[i] is None:
                    value = _come(tensor)
                    if i in same:
                        out[i] = self._stayed(value)
                    if out[i] is None:
                        rising.append((i, value))
            if rising:
                self._send(rising, same, out)
            return out

    def _handed(self, landing: Landing) -> torch.Tensor | None:
        """What an earlier visit has left, if it is there still, and nobody may have changed it."""
        home, part = landing.home, landing.home.place
        if part is None or not home.as_made:
            return None
        lent = sum(p.nbytes for _, _, p in self._lent if isinstance(p, _Result))
        if lent + part.nbytes > self._results.nbytes // 2:  # the rest is for what this visit makes
            return None
        part.used = self._visit
        return self._lend(part, home.plain)

    def _stayed(self, value: torch.Tensor) -> torch.Tensor | None:
        part = self._found.get(_key(value))
        if part is None:
            return None
        part.visit = self._visit
        return self._lend(part, value)

    def _lend(self, part: _Same | _Result, like: torch.Tensor) -> torch.Tensor:
        region = self._region(part)
        there = typed(region.memory, region.offset, like.shape, like.dtype)
        self._device.touch("compute", region, "r")
        self._lent.append((there, there._version, part))
        return there

    def _send(
        self, rising: Sequence[tuple[int, torch.Tensor]], same: Collection[int], out: Tensors
    ) -> None:
        device = self._device
        at = self._room_for([value.nbytes for _, value in rising])
        places: list[tuple[int, torch.Tensor, Region, Region, _Same | None]] = []
        for i, value in rising:
            part = self._up.host_part(at, value.nbytes)
            device.touch("host", part, "w")
            typed(part.memory, at, value.shape, value.dtype).copy_(value.detach())
            stays = self._room_to_stay(value) if i in same else None
            to = self._up.device_part(at, value.nbytes) if stays is None else self._region(stays)
            places.append((i, value, part, to, stays))
            at += align_up(value.nbytes)
        device.h2d.wait(device.signal("host"))
        copied: Event | None = None
        for i, value, part, to, stays in places:
            copied = device.copy(to, part, device.h2d)
            self.up_bytes += part.nbytes
            argument = _Argument(part.offset, part.nbytes, self._visit, stays is None, copied)
            self._arguments.put(argument)
            if stays is None:
                out[i] = typed(to.memory, to.offset, value.shape, value.dtype)
            else:
                stays.copied = copied
                self._found[stays.key] = stays
        assert copied is not None
        device.compute.wait(copied)
        for i, value, _, to, stays in places:
            if stays is None:
                device.touch("compute", to, "r")
            else:
                out[i] = self._lend(stays, value)

    def _room_for(self, sizes: Sequence[int]) -> int:
        """Where arguments go, one behind the other: copies may begin. By turns in one half of the
        memory and in the other, if they fit: then they come while the last visit computes."""
        ring, total = self._arguments, sum(align_up(n) for n in sizes)
        mine = [part for part in ring.parts if part.visit == self._visit]
        first = None
        if not mine:
            half = align_up(ring.nbytes // 2)
            self._upper = not self._upper and half + total <= ring.nbytes
            first = half if self._upper else 0
        at = ring.find(total, lambda part: part.visit == self._visit, first)
        if at is None:
            taken = sum(align_up(part.nbytes) for part in mine) + total
            raise PlanError(
                f"a unit's arguments take {format_bytes(taken)}, the plan has "
                f"{format_bytes(ring.nbytes)} of the device for them; drop --gpu"
            )
        gone = ring.clear(at, total)
        for part in gone:
            part.copied.wait()
        self._after_last_use(gone)
        return at

    def _after_last_use(self, gone: Sequence[_Argument | _Same]) -> None:
        for part in gone:
            if part.left is not None:
                self._device.h2d.wait(part.left)

    def _room_to_stay(self, value: torch.Tensor) -> _Same | None:
        """A place for what all units get alike; None: there is none."""
        key = _key(value)
        recent = self._visit - self._turns  # others are used in no unit any more
        at = self._same.find(value.nbytes, lambda part: part.visit >= recent)
        if at is None or key is None:
            return None
        gone = self._same.clear(at, value.nbytes)
        self._after_last_use(gone)
        for part in gone:
            if self._found.get(part.key) is part:
                del self._found[part.key]
            after = (part.copied,) if part.left is None else (part.copied, part.left)
            self._device.discard(self._region(part), after)
        alive = StorageWeakRef(value.untyped_storage())
        none: Any = None  # set when it is copied
        part = _Same(at, value.nbytes, key, alive, self._visit, none)
        self._same.put(part)
        return part

    def begin_step(self) -> None:
        """What came up for units of the last step is not looked for any more."""
        self._found.clear()

    # -- down -----------------------------------------------------------------------------

    def leave(self, tensors: Sequence[torch.Tensor | None], *, wanted: bool) -> Tensors:
        """See ``Visit``.

        Raises:
            PlanError: they take more than was planned for.
        """
        return self._leave(tensors, wanted=wanted, ends=True)

    def down(self, tensors: Sequence[torch.Tensor | None]) -> Tensors:
        """See ``Visit``.

        Raises:
            PlanError: they take more than was planned for.
        """
        left = self._leave(tensors, wanted=True, ends=False)
        return [None if tensor is None else _come(tensor) for tensor in left]

    def same(self, before: Sums, now: Sums) -> bool:
        """See ``Visit``."""
        self.stalls["sums"] += 1
        return now.same(before)

    def _leave(
        self, tensors: Sequence[torch.Tensor | None], *, wanted: bool, ends: bool
    ) -> Tensors:
        """``ends``: compute is through with what this visit was given."""
        with self._lock:
            device = self._device
            values = [self._apart(t) if t is not None and t.nbytes else None for t in tensors]
            total = sum(align_up(value.nbytes) for value in values if value is not None)
            at = None
            if total <= self._host.nbytes:
                at = self._results.find(total, lambda part: not ends and self._in_use(part))
            if at is None:
                raise PlanError(
                    f"a unit's results take {format_bytes(total)}, the plan has "
                    f"{format_bytes(self._host.nbytes)} of the device for them; drop --gpu"
                )
            self._give_way(self._results.clear(at, total))
            homes: list[Home | None] = []
            for value in values:
                if value is None:
                    homes.append(None)
                    continue
                made_here, region = Home(self, value), Region(self._there, at, value.nbytes)
                device.touch("compute", region, "w")
                typed(self._there, at, value.shape, value.dtype).copy_(value)
                none: Any = None  # set when all are made
                part = _Result(at, value.nbytes, self._visit, weakref.ref(made_here), none)
                self._results.put(part)
                made_here.place = part
                homes.append(made_here)
                at += align_up(value.nbytes)
            event = device.compute.record()
            out: Tensors = []
            for tensor, home in zip(tensors, homes, strict=True):
                if home is None:
                    out.append(None if tensor is None else tensor.detach().to("cpu"))
                    continue
                home.place.made = event
                if wanted:
                    self.begin(home)
                out.append(Landing(home))
            return out

    def _apart(self, tensor: torch.Tensor) -> torch.Tensor:
        """It, or a copy of what was handed over and may be overwritten by what is left."""
        mine = self._there.tensor().untyped_storage()._cdata
        inside = tensor.untyped_storage()._cdata == mine
        return tensor.detach().clone() if inside else tensor.detach()

    def _in_use(self, part: _Result) -> bool:
        return self._visit in (part.used, part.visit)

    def _give_way(self, gone: Sequence[_Result]) -> None:
        """Others take the places of these; whoever has one of them may ask for it."""
        for part in gone:
            home = part.home()
            if home is not None:
                if not home.landed:
                    self.begin(home)
                home.place = None
            if part.copied is not None:
                self._device.compute.wait(part.copied)
            after = () if part.copied is None else (part.copied,)
            self._device.discard(self._region(part), after)

    def begin(self, home: Home) -> None:
        """See ``landing.Brings``."""
        with self._lock:
            part = home.place
            if home.landed or part is None or part.copied is not None:
                return
            device = self._device
            at = self._fallen.find(part.nbytes)
            assert at is not None
            for gone in self._fallen.clear(at, part.nbytes):
                self._land_until(gone)
            device.d2h.wait(part.made)
            self._after_the_host()
            to = Region(self._host, at, part.nbytes)
            part.copied = device.copy(to, self._region(part), device.d2h)
            self.down_bytes += part.nbytes
            fallen = _Fallen(at, part.nbytes, part.visit, part.home, part.copied)
            self._fallen.put(fallen)
            self._falling.append(fallen)

    def _after_the_host(self) -> None:
        """Copies down come after it has read what they overwrite."""
        self._device.d2h.wait(self._device.signal("host"))

    def land(self, home: Home) -> None:
        """See ``landing.Brings``."""
        with self._lock:
            self.begin(home)
            mine = next((f for f in self._falling if f.home() is home), None)
            if mine is None:
                if not home.landed:
                    raise OffloadError("a layer's result is gone: its step was given up")
                return
            if mine.visit == self._visit:
                self.stalls["results"] += 1
            self._land_until(mine)

    def _land_until(self, last: _Fallen) -> None:
        """What has come down is in its own memory, in the order of the copies; waits for it."""
        while last in self._falling:
            fallen = self._falling[0]
            home = fallen.home()
            if home is not None and not home.landed:
                fallen.copied.wait()
                region = Region(self._host, fallen.offset, fallen.nbytes)
                self._device.touch("host", region, "r")
                like = home.plain
                home.fill(typed(self._host, region.offset, like.shape, like.dtype))
            if self._falling and self._falling[0] is fallen:
                self._falling.popleft()

    def close(self) -> None:
        """Bring down what somebody has still."""
        with self._lock:
            for part in self._results.parts:
                home = part.home()
                if home is not None and not home.landed:
                    self.begin(home)
            try:
                if self._falling:
                    self._land_until(self._falling[-1])
            except Exception as error:  # noqa: BLE001  whoever asks for it gets it
                log.error("a copy from the device: %s", error)


def _come(tensor: torch.Tensor) -> torch.Tensor:
    """In RAM, and waited for; what is on the device of it stays what it is."""
    return tensor.home.take() if isinstance(tensor, Landing) else tensor


def _key(value: torch.Tensor) -> Any:
    """What tells a tensor from others, and from itself when it is changed; None: nothing does."""
    if value.is_inference():
        return None
    storage = value.untyped_storage()
    place = value.storage_offset(), tuple(value.shape), value.stride(), value.dtype
    return storage._cdata, *place, value._version


__all__ = ["Pair", "Visits"]
