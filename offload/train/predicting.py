"""What a step of a plan will take: from rates of this machine, or of another, to seconds.

Pure: numbers in, numbers out. Each unit's traffic follows from where its blocks live, as in
``plan.traffic``; ``pace`` has units wait for one another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from offload.blocks import align_up
from offload.train.layout import TrainLayout
from offload.train.link import Link, UnitLink
from offload.train.pace import Beside, UnitSeconds, pace
from offload.train.plan import Needs, TrainPlan, grad_bytes, slot_bytes
from offload.train.reading import UnitReads, ring_bytes, unit_reads
from offload.train.update_place import moved_bytes, sent_share

PHASES = ("forward", "backward")

MOST_PARTS, UNITS_PACED = 8, 400
"""Of a unit whose experts come one by one; and units that a step is simulated with, at most, by
cutting them."""

UP, DOWN = "link up", "link down"
"""Lanes of a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRates:
    """What a machine does, measured before the plan or told."""

    units: Mapping[int, tuple[float, float]]
    """Unit -> seconds of its forwards in a step, and of its backwards with running it again."""
    head: float = 0.0
    """Seconds of the loss by slices, with its gradients."""
    head_away: float | None = None
    """The same on a device; None: as long."""
    head_unit: int | None = None
    """The head, where it is a unit."""
    disk_read: float
    disk_write: float
    """Bytes per second, of reads and of writes under a mix of both."""
    update: float
    """Bytes per second of an update's pass over memory, on one thread."""
    lane: float | None = None
    """Bytes per second of states that updates read and write with nothing beside them; None: as the
    disk's."""
    beside: Beside = field(default_factory=Beside)
    fetch: float | None = None
    """Bytes per second of weights that are read as they are, alone; None: as the disk's."""
    fetch_beside: Beside | None = None
    """What that and computing cost each other; None: as updates do."""
    faults: float = 1.0
    """How much longer units compute where freed blocks leave the process (``heap``)."""
    update_away: float | None = None
    """Bytes per second of an update's pass over the device's memory; None: nobody knows."""
    up: float = math.inf
    """Bytes per second of copies to the device."""
    down: float = math.inf
    """Of copies back."""

    @property
    def weights_read(self) -> float:
        """Bytes per second of weights that are read."""
        return self.disk_read if self.fetch is None else self.fetch

    @property
    def compute(self) -> dict[str, float]:
        """Phase -> seconds of computing in a step, with nothing to wait for."""
        forward, backward = (sum(unit[i] for unit in self.units.values()) for i in (0, 1))
        return {"forward": forward, "backward": backward + self.head}

    def with_head_away(self) -> StepRates:
        """Of a step whose loss is computed on the device."""
        return self if self.head_away is None else replace(self, head=self.head_away)

    def with_faults(self) -> StepRates:
        """Of a step whose freed blocks leave the process."""
        units = {u: (f * self.faults, b * self.faults) for u, (f, b) in self.units.items()}
        return replace(self, units=units, faults=1.0)

    def with_work(self, more: Mapping[str, float]) -> StepRates:
        """With so many seconds more in each phase, spread evenly over all units (unpacking)."""
        n = max(1, len(self.units))
        forward, backward = (more[phase] / n for phase in PHASES)
        units = {u: (f + forward, b + backward) for u, (f, b) in self.units.items()}
        return replace(self, units=units)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Seconds of a step."""

    phases: Mapping[str, float]
    """Phase -> seconds, waiting included."""
    lanes: Mapping[str, Mapping[str, float]]
    """Phase -> lane -> seconds that it is busy."""

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def busiest(self) -> str:
        """The lane that works most of a step: what a faster machine would be faster by."""
        total = {lane: 0.0 for lanes in self.lanes.values() for lane in lanes}
        for lanes in self.lanes.values():
            for lane, seconds in lanes.items():
                total[lane] += seconds
        return max(total, key=lambda lane: total[lane])


def predict(
    plan: TrainPlan, layout: TrainLayout, needs: Needs, rates: StepRates, *, clipping: bool,
    backwards: int = 1, link: Link | None = None,
) -> Prediction:  # fmt: skip
    """A step of ``plan``; arguments as of ``make_plan``. ``link``: what goes to a device and comes
    back, if layers run on one."""
    place = plan.placement
    if not place.freed_bytes:
        rates = rates.with_faults()
    ring = ring_bytes(layout, place)
    reads = unit_reads(
        layout, place, needs.routing, needs.copies, clipping=clipping, backwards=backwards
    )
    units = _units(plan, layout, needs, rates, reads)
    if link is not None:
        of = dict(link.units)
        if link.head is not None:  # a unit, or what comes behind all of them
            if rates.head_unit is None and not rates.head:
                units.append(UnitSeconds())
            of[len(units) - 1 if rates.head_unit is None else rates.head_unit] = link.head
        units = [_on_link(unit, of.get(u), rates) for u, unit in enumerate(units)]
    parts = [1] * len(units)
    if link is None:
        for u, experts in enumerate(reads.experts):
            parts[u] = _parts(experts, ring, len(units))
    at_once = [
        (sum(layout.blocks[b].nbytes for b in unit.blocks if b not in place.pinned) + experts) / k
        for unit, experts, k in zip(layout.units, reads.experts, parts, strict=False)
    ]
    units = [part for unit, k in zip(units, parts, strict=True) for part in _split(unit, k)]
    seconds = pace(
        units, deferred=clipping, beside=rates.beside, reading=rates.fetch_beside,
        ahead=max(1, int(ring // max(1.0, *at_once)) - 1), gradient_limit=place.gradient_bytes,
        slots=1 if place.device is None else place.device.slots,
    )  # fmt: skip
    kept = sum(rates.units.get(unit, (0.0, 0.0))[0] for unit in place.kept)
    away = None if place.device is None else place.device.updates
    update_bytes = 2 * sum(
        round(
            needs.updated.get(b.index, 1.0)
            * slot_bytes(layout, needs, b.index)
            * (1.0 - sent_share(layout, away, b.index))
        )
        for b in layout.trained
    )
    lanes: dict[str, dict[str, float]] = {}
    weights = dict(zip(PHASES, reads.sums(), strict=True))
    for phase, (read, written) in plan.phases.items():
        other = max(0.0, read - weights[phase])
        here = phase == ("forward" if clipping else "backward")
        lanes[phase] = {
            "compute": rates.compute[phase] - (kept if phase == "backward" else 0.0),
            "ssd": weights[phase] / rates.weights_read
            + other / rates.disk_read
            + written / rates.disk_write,
            "update": update_bytes / rates.update if here else 0.0,
        }
        if link is not None:
            up, down = link.bytes_of(PHASES.index(phase))
            lanes[phase] |= {UP: up / rates.up, DOWN: down / rates.down}
    return Prediction(phases=dict(zip(PHASES, seconds, strict=True)), lanes=lanes)


def _parts(experts: float, ring: int, units: int) -> int:
    """Into how many parts a unit is cut whose ``experts`` bytes come one by one: as many as let
    it compute on what is there while the ring takes what is not."""
    return max(
        1, min(MOST_PARTS, UNITS_PACED // max(1, units), math.ceil(4 * experts / max(1, ring)))
    )


def _split(unit: UnitSeconds, parts: int) -> list[UnitSeconds]:
    """``unit`` as so many equal ones, one after the other."""
    if parts == 1:
        return [unit]
    each = {f.name: getattr(unit, f.name) / parts for f in fields(unit)}
    each["gradient_bytes"] = unit.gradient_bytes // parts
    return [UnitSeconds(**each)] * parts


def _units(
    plan: TrainPlan, layout: TrainLayout, needs: Needs, rates: StepRates, reads: UnitReads
) -> list[UnitSeconds]:
    """Each unit alone. A block that several share is the first one's; what no unit has is the first
    unit's, for a step begins with it."""
    place = plan.placement
    mine: list[list[int]] = [[] for _ in layout.units]
    for index, users in enumerate(layout.users):
        mine[min(users, default=0)].append(index)
    update, spill, gradients = [0.0] * len(mine), [0.0] * len(mine), [0] * len(mine)
    tiles = None if place.device is None else place.device.updates
    sent = moved_bytes(layout, needs.kinds, needs.grad_dtype, tiles, needs.updated)
    for u, blocks in enumerate(mine):
        passed = there = 0.0
        for b in blocks:
            block = layout.blocks[b]
            if not block.trained:
                continue
            share = needs.updated.get(b, 1.0)
            slots = slot_bytes(layout, needs, b)
            gone = sent_share(layout, tiles, b)
            passed += share * 2 * slots * (1.0 - gone)
            there += share * 2 * slots * gone
            copy = block.nbytes if needs.kinds[block.dtype].first_state else 0
            if b not in place.resident:
                kept = copy if b in place.pinned else 0
                update[u] += share * _moving(slots - copy, slots - kept, rates)
            gradients[u] += grad_bytes(layout, needs, b)
            if b in place.spilled:
                nbytes = share * align_up(grad_bytes(layout, needs, b))
                update[u] += nbytes / rates.disk_read
                spill[u] += nbytes / rates.disk_write
        update[u] = max(
            update[u], passed / rates.update, there / (rates.update_away or rates.update)
        )
    spilled = frozenset() if place.inputs is None else place.inputs.units
    moved = plan.inputs_moved / max(1, len(spilled))
    out = []
    for u in range(len(mine)):
        run, again = rates.units.get(u, (0.0, 0.0))
        if u == rates.head_unit:
            again += rates.head
        away = moved if u in spilled else 0.0
        out.append(
            UnitSeconds(
                forward=run, backward=again - (run if u in place.kept else 0.0),
                update=update[u], spill=spill[u],
                fetch_forward=reads.forward[u] / rates.weights_read,
                fetch_backward=reads.backward[u] / rates.weights_read,
                input_away=away / rates.disk_write, input_back=away / rates.disk_read,
                gradient_bytes=gradients[u],
                states_up=sum(sent[b][0] for b in mine[u] if b in sent) / rates.up,
                states_down=sum(sent[b][1] for b in mine[u] if b in sent) / rates.down,
            )
        )  # fmt: skip
    if rates.head_unit is None and rates.head:
        out.append(UnitSeconds(backward=rates.head))
    return out


def _on_link(unit: UnitSeconds, link: UnitLink | None, rates: StepRates) -> UnitSeconds:
    """With the copies of a unit that runs on a device."""
    if link is None:
        return unit
    enter = [(a + b) / rates.up for a, b in zip(link.arguments, link.first_experts, strict=True)]
    rest = [(a - b) / rates.up for a, b in zip(link.experts, link.first_experts, strict=True)]
    # While a unit runs again there is less to compute beside its experts than all of backward.
    again = max(0.0, (link.experts_again - link.first_experts[1]) / rates.up - unit.forward)
    leave, last = link.results, link.last_gradient
    return replace(
        unit, up_forward=link.weights[0] / rates.up, up_backward=link.weights[1] / rates.up,
        enter_forward=enter[0], enter_backward=enter[1] + again,
        leave_forward=leave[0] / rates.down, slices_forward=rest[0],
        kept_down=link.kept / rates.down, leave_backward=(leave[1] + last) / rates.down,
        gradients_down=(link.gradients - last) / rates.down,
        slices_up=link.slices / rates.up + rest[1] - again,
    )  # fmt: skip


def _moving(read: int, written: int, rates: StepRates) -> float:
    """Seconds of a block's states through the update lane."""
    if rates.lane is not None:
        return (read + written) / rates.lane
    return read / rates.disk_read + written / rates.disk_write


__all__ = ["DOWN", "UP", "Beside", "Prediction", "StepRates", "predict"]
