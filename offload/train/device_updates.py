"""Tiles of optimizer states that the device updates, while the CPU updates the others.

After Maurya, Ye, Rafique, Cappello and Nicolae, "Deep Optimizer States: Towards Scalable Training
of Transformer Models Using Interleaved Offloading" (Middleware 2024), section 4: of each ``every``
tiles of a block the first one goes up with its gradient, takes its step there and comes back, while
the CPU is at the others. Bits do not tell where a tile was updated, so how many go is a matter of
time alone, and the plan's (``update_place``).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from offload.blocks import DTYPE_BYTES
from offload.cpu_ops.adam_step import AdamStep
from offload.cpu_ops.dynamic_map import BLOCK
from offload.cpu_ops.grad_norm import Numbers
from offload.gpu_ops.adam import Range, adam, kernel_of
from offload.gpu_ops.launch import Launcher
from offload.runtime.device import Device, Event, Region
from offload.runtime.memory import HostMemory
from offload.scheduler.timeline import UPDATE_AWAY, Record
from offload.train import card_values
from offload.train.layout import TILE
from offload.train.marks import UPDATE
from offload.train.stopwatch import timed
from offload.train.tiles import Slot, SlotKind, numbers
from offload.train.update_place import UpdatePlacement
from offload.train.weights import Shared

log = logging.getLogger(__name__)

AWAY = "a tile on the device"
"""What is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Elements ``start`` .. ``start + count`` of a tile, which take one step."""

    step: AdamStep
    start: int
    count: int
    first: int
    """Global index of the first one, for stochastic rounding."""
    gradient: Numbers | None
    """None: zeros."""


class TileSite(Protocol):
    """What updates a tile that lies on the device."""

    queues: bool
    """Whether ``update`` returns before it is done."""

    def update(
        self, kind: SlotKind, count: int, slot: torch.Tensor, gradients: torch.Tensor, dtype: str,
        parts: Sequence[Part],
    ) -> None:  # fmt: skip
        """Update ``parts`` of a tile of ``count`` elements. ``slot``, ``gradients`` (of ``dtype``,
        as the tile's elements lie): uint8 on the device."""
        ...


class HostSite:
    """The CPU's kernels, in memory of a device that they can address."""

    queues = False

    def __init__(self, seed: int, workers: int | None) -> None:
        self._seed = seed
        self._workers = workers

    def update(
        self, kind: SlotKind, count: int, slot: torch.Tensor, gradients: torch.Tensor, dtype: str,
        parts: Sequence[Part],
    ) -> None:  # fmt: skip
        """See ``TileSite``."""
        there, all_of_them = Slot(kind, count, slot.numpy()), numbers(gradients.numpy(), dtype)
        for part in parts:
            mine = all_of_them[part.start : part.start + part.count]
            if part.gradient is None:
                mine[:] = 0
            there.update(
                part.step, mine, part.start, part.count, seed=self._seed, first=part.first,
                workers=self._workers,
            )  # fmt: skip


class CardSite:
    """A card's kernels."""

    queues = True

    def __init__(self, launcher: Launcher, seed: int, kinds: Sequence[SlotKind]) -> None:
        """Compile them for ``kinds``. Raises OffloadError: that fails."""
        self._launcher = launcher
        self._seed = seed
        for kind in kinds:
            launcher.prepare(kernel_of(kind.states))

    def update(
        self, kind: SlotKind, count: int, slot: torch.Tensor, gradients: torch.Tensor, dtype: str,
        parts: Sequence[Part],
    ) -> None:  # fmt: skip
        """See ``TileSite``."""
        at = dict(zip(kind.names, kind.offsets(count), strict=False))
        base, masters = slot.data_ptr(), "copy" if kind.states == "bf16" else "p"
        moment = {"fp32": 4, "bf16": 2, "8bit": 1}[kind.states]
        for part in parts:
            scales = {
                name: base + at[name] + 4 * (part.start // BLOCK)
                for name in ("m_scales", "v_scales")
                if name in at
            }
            copy = base + at["copy"] + DTYPE_BYTES[kind.dtype] * part.start
            p = base + at[masters] + (2 if masters == "copy" else 4) * part.start
            gradient = gradients.data_ptr() + DTYPE_BYTES[dtype] * part.start
            where = Range(
                count=part.count, p=p, m=base + at["m"] + moment * part.start,
                v=base + at["v"] + moment * part.start, copy=0 if p == copy else copy,
                copy_dtype=kind.dtype, gradient=0 if part.gradient is None else gradient,
                gradient_dtype=dtype, **scales,
            )  # fmt: skip
            adam(self._launcher, kind.states, part.step, where, seed=self._seed, first=part.first)


def site_for(device: Device, seed: int, workers: int | None, kinds: Sequence[SlotKind]) -> TileSite:
    """What updates in the device's memory.

    Raises:
        OffloadError: CuPy is missing, or the kernels do not compile for the card.
    """
    if device.torch_device.type == "cpu":
        return HostSite(seed, workers)
    return CardSite(card_values.make_launcher(device.torch_device), seed, kinds)


def card_rate(place: torch.device, settle: Callable[[], object], kind: SlotKind) -> float:
    """Bytes per second of an update's pass over a card's memory, read and written.

    Raises:
        OffloadError: CuPy is missing, or the kernels do not compile for the card.
    """
    site = CardSite(card_values.make_launcher(place), 0, [kind])
    slot = torch.zeros(kind.offsets(TILE)[-1], dtype=torch.uint8, device=place)
    gradients = torch.zeros(4 * TILE, dtype=torch.uint8, device=place)
    part = Part(step=AdamStep(lr=0.0, step=1), start=0, count=TILE, first=0, gradient=_ANY)

    def update() -> None:
        for _ in range(SAMPLES):
            site.update(kind, TILE, slot, gradients, "float32", [part])
        settle()

    (seconds,) = timed(update)
    return 2 * SAMPLES * slot.nbytes / seconds


_ANY = np.zeros(1, np.float32)

SAMPLES = 8
"""Tiles that are timed at once."""


@dataclass(slots=True)
class Away:
    """A tile on the device, or on its way there or back."""

    task: Any
    """The caller's own."""
    name: str
    kind: SlotKind
    count: int
    memory: HostMemory
    dtype: str
    """Of the gradients."""
    parts: Sequence[Part]
    place: int
    up: Event
    end: Event | None = None
    """Of the copy back; None: not begun."""
    sent_s: float = field(default_factory=time.perf_counter)
    over: bool = False
    error: BaseException | None = None


class DeviceUpdates:
    """See the module. Belongs to the updater's thread."""

    def __init__(
        self, device: Device, place: UpdatePlacement, site: TileSite, shared: Shared
    ) -> None:
        self.place = place
        self.tiles = 0
        """Updated so far."""
        self.up_bytes = self.down_bytes = 0
        self.record: Record | None = None
        """Set: told of each tile, from when it is sent until it is back."""
        self._device = device
        self._site = site
        self._shared = shared
        self._slots = device.device_memory(place.slots * place.slot_bytes, "tiles to update")
        n = place.slots * place.gradient_bytes
        self._gradients = device.device_memory(n, "gradients of tiles")
        self._staged = device.host_memory(n, "gradients of tiles")
        self._free = deque(range(place.slots))
        self._flying: deque[Away] = deque()

    def takes(self, position: int, tiles: int) -> bool:
        """Whether the tile at ``position`` of a block of so many goes to the device."""
        return position in self.place.sent(tiles)

    @property
    def idle(self) -> bool:
        """Whether no tile is away."""
        return not self._flying

    @property
    def room(self) -> bool:
        """Whether one more can be sent."""
        return bool(self._free)

    def send(
        self, task: Any, name: str, kind: SlotKind, count: int, memory: HostMemory, dtype: str,
        parts: Iterable[Part],
    ) -> None:  # fmt: skip
        """Begin to copy a tile of the block ``name`` up, its slot in ``memory`` and its gradients
        of ``dtype``, each of which may last until the next one is asked for. There is room for the
        tile; ``memory`` is the device's until it is back."""
        self._begin_waiting()
        device, at = self._device, self._free.popleft()
        whole, width = kind.offsets(count)[-1], DTYPE_BYTES[dtype]
        staged = Region(self._staged, at * self.place.gradient_bytes, width * count)
        values = numbers(
            staged.memory.tensor()[staged.offset : staged.offset + staged.nbytes].numpy(), dtype
        )
        mine = []
        for part in parts:
            if part.gradient is not None:
                values[part.start : part.start + part.count] = part.gradient
            mine.append(part)
        device.touch(UPDATE, staged, "w")
        device.touch(UPDATE, Region(memory, 0, whole), "w")
        device.h2d.wait(device.signal(UPDATE))
        first = kind.offsets(count)[kind.first_state]
        device.copy(
            self._slot(at, first, whole - first), Region(memory, first, whole - first), device.h2d
        )
        up = device.copy(self._gradient(at, staged.nbytes), staged, device.h2d)
        self.up_bytes += whole - first + staged.nbytes
        away = Away(task, name, kind, count, memory, dtype, mine, at, up)
        self._flying.append(away)
        if self._site.queues:
            self._begin(away)

    def _slot(self, place: int, at: int, nbytes: int) -> Region:
        return Region(self._slots, place * self.place.slot_bytes + at, nbytes)

    def _gradient(self, place: int, nbytes: int) -> Region:
        return Region(self._gradients, place * self.place.gradient_bytes, nbytes)

    def _begin_waiting(self) -> None:
        """Have tiles take their steps that have only been sent: a site that computes at once has
        left them the time to arrive."""
        for away in self._flying:
            if away.end is None:
                self._begin(away)

    def _begin(self, away: Away) -> None:
        device, width = self._device, DTYPE_BYTES[away.dtype]
        whole = away.kind.offsets(away.count)[-1]
        slot = self._slot(away.place, 0, whole)
        gradient = self._gradient(away.place, width * away.count)
        device.update.wait(away.up)
        with device.updating():
            device.touch(UPDATE, gradient, "w")  # zeros, where there is none
            self._site.update(
                away.kind, away.count, _bytes(slot), _bytes(gradient), away.dtype, away.parts
            )
            device.touch(UPDATE, slot, "w")
        away.parts = ()
        device.d2h.wait(device.update.record())
        away.end = device.copy(Region(away.memory, 0, whole), slot, device.d2h)
        self.down_bytes += whole
        away.end.then(lambda error: self._over(away, error))

    def _over(self, away: Away, error: BaseException | None) -> None:
        if self.record is not None:
            now, nbytes = time.perf_counter(), away.kind.offsets(away.count)[-1]
            self.record(UPDATE_AWAY, away.name, away.sent_s, now, nbytes)
        with self._shared.changed:
            away.over, away.error = True, error
            self._shared.notify()

    def back(self, *, wait: bool) -> Any:
        """The task of the tile that was sent first and has come back, its slot in RAM; None: it has
        not yet, or nothing was sent. ``wait``: until it has.

        Raises:
            Exception: what made it fail on the device.
        """
        if not self._flying:
            return None
        away = self._flying[0]
        if away.end is None and wait:
            self._begin(away)
        with self._shared.changed:
            if wait:
                self._shared.wait_for(lambda: away.over, AWAY)
            if not away.over:
                return None
        if away.error is not None:
            raise away.error
        self._flying.popleft()
        assert away.end is not None
        device, whole = self._device, away.kind.offsets(away.count)[-1]
        device.acquire(UPDATE, away.end)
        device.touch(UPDATE, Region(away.memory, 0, whole), "r")
        width = DTYPE_BYTES[away.dtype]
        device.discard(self._slot(away.place, 0, whole), (away.end,))
        device.discard(self._gradient(away.place, width * away.count), (away.end,))
        self._free.append(away.place)
        self.tiles += 1
        return away.task

    def close(self) -> None:
        """Wait for the copies under way: their memory may go."""
        while self._flying:
            away = self._flying.popleft()
            event = away.up if away.end is None else away.end
            try:
                event.wait()
            except Exception as error:  # noqa: BLE001  ``Device.check`` raises it; closing goes on
                log.error("a tile on the device: %s", error)


def _bytes(region: Region) -> torch.Tensor:
    return region.memory.tensor()[region.offset : region.offset + region.nbytes]


__all__ = ["CardSite", "DeviceUpdates", "HostSite", "Part", "TileSite", "card_rate", "site_for"]
