"""What a step of a plan will take: from rates of this machine, or of another, to seconds.

Pure: numbers in, numbers out. Each unit's traffic follows from where its blocks live, as in
``plan.traffic``; ``pace`` has units wait for one another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from offload.blocks import align_up
from offload.train.layout import TrainLayout
from offload.train.link import Link, UnitLink
from offload.train.pace import Beside, UnitSeconds, pace
from offload.train.plan import Needs, TrainPlan, grad_bytes, slot_bytes, weight_reads

PHASES = ("forward", "backward")

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
    up: float = math.inf
    """Bytes per second of copies to the device."""
    down: float = math.inf
    """Of copies back."""

    @property
    def compute(self) -> dict[str, float]:
        """Phase -> seconds of computing in a step, with nothing to wait for."""
        forward, backward = (sum(unit[i] for unit in self.units.values()) for i in (0, 1))
        return {"forward": forward, "backward": backward + self.head}

    def with_head_away(self) -> StepRates:
        """Of a step whose loss is computed on the device."""
        return self if self.head_away is None else replace(self, head=self.head_away)

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
    ring = place.weights_bytes - sum(layout.blocks[b].nbytes for b in place.pinned)
    per_unit = [
        sum(layout.blocks[b].nbytes for b in unit.blocks if b not in place.pinned)
        for unit in layout.units
    ]
    units = _units(plan, layout, needs, rates, ring, clipping=clipping, backwards=backwards)
    if link is not None:
        of = dict(link.units)
        if link.head is not None:  # a unit, or what comes behind all of them
            if rates.head_unit is None and not rates.head:
                units.append(UnitSeconds())
            of[len(units) - 1 if rates.head_unit is None else rates.head_unit] = link.head
        units = [_on_link(unit, of.get(u), rates) for u, unit in enumerate(units)]
    seconds = pace(
        units, deferred=clipping, beside=rates.beside,
        ahead=max(1, ring // max(1, *per_unit) - 1), gradient_limit=place.gradient_bytes,
    )  # fmt: skip
    kept = sum(rates.units.get(unit, (0.0, 0.0))[0] for unit in place.kept)
    update_bytes = 2 * sum(
        round(needs.updated.get(b.index, 1.0) * slot_bytes(layout, needs, b.index))
        for b in layout.trained
    )
    lanes: dict[str, dict[str, float]] = {}
    for phase, (read, written) in plan.phases.items():
        here = phase == ("forward" if clipping else "backward")
        lanes[phase] = {
            "compute": rates.compute[phase] - (kept if phase == "backward" else 0.0),
            "ssd": read / rates.disk_read + written / rates.disk_write,
            "update": update_bytes / rates.update if here else 0.0,
        }
        if link is not None:
            up, down = link.bytes_of(PHASES.index(phase))
            lanes[phase] |= {UP: up / rates.up, DOWN: down / rates.down}
    return Prediction(phases=dict(zip(PHASES, seconds, strict=True)), lanes=lanes)


def _units(
    plan: TrainPlan, layout: TrainLayout, needs: Needs, rates: StepRates, ring: int, *,
    clipping: bool, backwards: int,
) -> list[UnitSeconds]:  # fmt: skip
    """Each unit alone. A block that several share is the first one's; what no unit has is the first
    unit's, for a step begins with it."""
    place = plan.placement
    mine: list[list[int]] = [[] for _ in layout.units]
    for index, users in enumerate(layout.users):
        mine[min(users, default=0)].append(index)
    update, spill, forward, backward, gradients = (
        [0.0] * len(mine), [0.0] * len(mine), [0] * len(mine), [0] * len(mine), [0] * len(mine)
    )  # fmt: skip
    for u, blocks in enumerate(mine):
        passed = 0.0
        for b in blocks:
            block = layout.blocks[b]
            if b not in place.pinned:
                there, back = weight_reads(needs, block, clipping=clipping, backwards=backwards)
                forward[u] += there
                backward[u] += back
            if not block.trained:
                continue
            share = needs.updated.get(b, 1.0)
            slots = slot_bytes(layout, needs, b)
            passed += share * 2 * slots
            copy = block.nbytes if needs.kinds[block.dtype].first_state else 0
            if b not in place.resident:
                kept = copy if b in place.pinned else 0
                update[u] += share * _moving(slots - copy, slots - kept, rates)
            gradients[u] += grad_bytes(layout, needs, b)
            if b in place.spilled:
                nbytes = share * align_up(grad_bytes(layout, needs, b))
                update[u] += nbytes / rates.disk_read
                spill[u] += nbytes / rates.disk_write
        update[u] = max(update[u], passed / rates.update)
    # Around both turns of a step the ring has what comes next.
    _drop(forward, range(len(mine)), backwards * ring // 2)
    _drop(backward, reversed(range(len(mine))), backwards * ring // 2)
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
                update=update[u], spill=spill[u], fetch_forward=forward[u] / rates.disk_read,
                fetch_backward=backward[u] / rates.disk_read,
                input_away=away / rates.disk_write, input_back=away / rates.disk_read,
                gradient_bytes=gradients[u],
            )
        )  # fmt: skip
    if rates.head_unit is None and rates.head:
        out.append(UnitSeconds(backward=rates.head))
    return out


def _on_link(unit: UnitSeconds, link: UnitLink | None, rates: StepRates) -> UnitSeconds:
    """With the copies of a unit that runs on a device."""
    if link is None:
        return unit
    enter = [(a + b) / rates.up for a, b in zip(link.arguments, link.experts, strict=True)]
    leave, last = link.results, link.last_gradient
    return replace(
        unit, up_forward=link.weights[0] / rates.up, up_backward=link.weights[1] / rates.up,
        enter_forward=enter[0], enter_backward=enter[1], leave_forward=leave[0] / rates.down,
        leave_backward=(leave[1] + last) / rates.down,
        gradients_down=(link.gradients - last) / rates.down, slices_up=link.slices / rates.up,
    )  # fmt: skip


def _moving(read: int, written: int, rates: StepRates) -> float:
    """Seconds of a block's states through the update lane."""
    if rates.lane is not None:
        return (read + written) / rates.lane
    return read / rates.disk_read + written / rates.disk_write


def _drop(amounts: list[int], order: Iterable[int], nbytes: int) -> None:
    """Take ``nbytes`` off what comes first."""
    for u in order:
        taken = min(amounts[u], nbytes)
        amounts[u] -= taken
        nbytes -= taken


__all__ = ["DOWN", "UP", "Beside", "Prediction", "StepRates", "predict"]
