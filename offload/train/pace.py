"""How long a step takes when computing and the disk wait for each other.

Two lanes, as the engine has them: units compute one after the other, forward and then backward, and
the disk does one thing at a time. What waits for what is the engine's order. A unit's forward waits
for its update of the step before, so a step begins with what the disk needs for the first unit
(*fill*), which no sum over a lane shows; the head's update is needed behind forward only. While
both lanes work each is slower than alone: they share cores and memory (``Beside``, measured).

With a device two more: the link up and the link down. Weights go up ahead, one unit at a time, as
far as there are slots; a unit's arguments, and the first of its experts, go up while nothing
computes, behind what is on its way, other experts beside the unit, which ends when all have come;
results come down before the next unit begins, but for those that it finds on the device, which come
down beside it, and gradients beside the backward that makes them, which ends when all have come. A
head's slices go up beside the loss that they are for.

Pure: seconds in, seconds out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

INPUTS_AHEAD = 2
"""Inputs that are read before backward asks for them: ``inputs.AHEAD``."""

STEPS = 3
"""Simulated: the first two bring the lanes into the state in which later ones begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """How many times as long each lane takes while the other one works, too."""

    compute: float = 1.0
    disk: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSeconds:
    """What a unit takes in a step, each as if there were nothing else."""

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0
    """Of the disk, or of Adam where that takes longer."""
    fetch_forward: float = 0.0
    """Reading the weights that forward needs, and no update leaves behind."""
    fetch_backward: float = 0.0
    spill: float = 0.0
    """Writing gradients."""
    input_away: float = 0.0
    input_back: float = 0.0
    gradient_bytes: int = 0
    up_forward: float = 0.0
    """Copying weights to the device, ahead."""
    up_backward: float = 0.0
    enter_forward: float = 0.0
    """Copying to the device what compute waits for."""
    enter_backward: float = 0.0
    leave_forward: float = 0.0
    """Copying back what the next unit waits for."""
    leave_backward: float = 0.0
    kept_down: float = 0.0
    """Copying back, while the next unit computes, what it finds on the device: for its backward."""
    gradients_down: float = 0.0
    """Copying gradients back beside backward."""
    slices_forward: float = 0.0
    """Copying to the device beside forward what that asks for piece by piece."""
    slices_up: float = 0.0
    """The same beside backward."""
    states_up: float = 0.0
    """Copying states to the device that updates some of them, and back."""
    states_down: float = 0.0


Name = tuple[str, int, int]
"""(what, step, unit)"""


@dataclass(frozen=True, slots=True)
class _Task:
    name: Name
    seconds: float
    needs: tuple[Name, ...] = ()


def pace(
    units: Sequence[UnitSeconds], *, deferred: bool, ahead: int, beside: Beside,
    reading: Beside | None = None, gradient_limit: int | None = None, slots: int = 1,
) -> tuple[float, float]:  # fmt: skip
    """(seconds of forward, seconds of backward) of a step among others like it.

    Args:
        units: in the order of forward. One whose forward takes nothing (the head) is waited for in
            backward only.
        deferred: updates run behind the next forward; else inside backward.
        ahead: units whose weights are read before they are needed, at most.
        beside, reading: what computing and the disk cost each other, and while what the disk does
            is to read weights (None: the same).
        gradient_limit: of updates inside backward: computing waits while more gradients than these
            bytes wait for theirs.
        slots: units whose weights are on the device at a time.
    """
    last = len(units) - 1
    holds = _holds(units, gradient_limit) if not deferred else {}
    lanes = _Lanes()
    for k in range(STEPS):
        for u, unit in enumerate(units):
            lanes.forward(k, u, unit, _before_forward(k, u, ahead, last),
                          _through(*_before_forward(k, u, slots - 1, last)))  # fmt: skip
        for u in reversed(range(len(units))):
            unit = units[u]
            held = [("update", k, holds[u])] if u in holds else []
            lanes.backward(k, u, unit, held, _before_backward(k, u, ahead, last),
                           _through(*_before_backward(k, u, slots - 1, last)))  # fmt: skip
            soon = _before_backward(k, u, INPUTS_AHEAD, last)
            lanes.coming.append(_Task(("back", k, u), unit.input_back, (("away", k, u), soon)))
            lanes.leaving.append(_Task(("spill", k, u), unit.spill, _through(BACKWARD, k, u)))
            if not deferred:
                lanes.update(k, u, unit, _through(BACKWARD, k, u))
        if deferred:
            end = _through(BACKWARD, k, 0)  # the norm is known, and with it the clip factor
            for u, unit in enumerate(units):
                lanes.update(k, u, unit, (*end, ("spill", k, u)))
    ends = _run(lanes, beside, beside if reading is None else reading)

    def end_of(phase: str, step: int, unit: int) -> float:
        return max(ends.get(name, 0.0) for name in _through(phase, step, unit))

    begin = end_of(BACKWARD, STEPS - 2, 0)
    turn = end_of(FORWARD, STEPS - 1, last)
    return turn - begin, end_of(BACKWARD, STEPS - 1, 0) - turn


FORWARD, BACKWARD = "forward", "backward"
FETCHES = ("fetch forward", "fetch backward")


def _through(phase: str, step: int, unit: int) -> tuple[Name, ...]:
    """What ends a unit's run: it has computed, and what it leaves behind has come down."""
    names: tuple[Name, ...] = ((phase, step, unit), (f"leave {phase}", step, unit))
    slices: Name = f"slices {phase}", step, unit
    gradients: Name = "gradients", step, unit
    return (*names, slices, gradients) if phase == BACKWARD else (*names, slices)


def _updated(step: int, unit: int) -> list[Name]:
    """What ends a unit's update."""
    return [(what, step, unit) for what in ("update", "states up", "states down")]


class _Lanes:
    """What each lane has to do, in order. Of the disk and of the link the first queue whose first
    task can begin is served."""

    def __init__(self) -> None:
        self.compute: list[_Task] = []
        self.coming: list[_Task] = []
        self.fetches: list[_Task] = []
        self.updates: list[_Task] = []
        self.leaving: list[_Task] = []
        self.entering: list[_Task] = []
        self.rising: list[_Task] = []
        self.states_up: list[_Task] = []
        self.states_down: list[_Task] = []
        self.down: list[_Task] = []
        self.falling: list[_Task] = []

    @property
    def queues(self) -> list[list[list[_Task]]]:
        """By lane: compute, the disk, the link up, the link down."""
        return [
            [self.compute], [self.coming, self.fetches, self.updates, self.leaving],
            [self.entering, self.rising, self.states_up],
            [self.down, self.falling, self.states_down],
        ]  # fmt: skip

    def forward(
        self, k: int, u: int, unit: UnitSeconds, read: Name, slot: tuple[Name, ...]
    ) -> None:
        """``read``, ``slot``: what ends before the unit's weights are read, and go up."""
        before = _through(FORWARD, k, u - 1) if u else _through(BACKWARD, k - 1, 0)
        needs = [("fetch forward", k, u), *before]
        if unit.forward:
            needs += _updated(k - 1, u)
        self._device(FORWARD, k, u, needs, slot, unit.up_forward, unit.enter_forward)
        self.compute.append(_Task((FORWARD, k, u), unit.forward, tuple(needs)))
        self._leave(FORWARD, k, u, unit.leave_forward)
        if unit.slices_forward:
            slices: Name = f"slices {FORWARD}", k, u
            self.entering.append(_Task(slices, unit.slices_forward, tuple(needs)))
        if unit.kept_down:
            kept: Name = "kept", k, u
            self.falling.append(_Task(kept, unit.kept_down, ((FORWARD, k, u),)))
        self.fetches.append(_Task(("fetch forward", k, u), unit.fetch_forward, (read,)))
        self.leaving.append(_Task(("away", k, u), unit.input_away, ((FORWARD, k, u),)))

    def backward(
        self,
        k: int,
        u: int,
        unit: UnitSeconds,
        held: list[Name],
        read: Name,
        slot: tuple[Name, ...],
    ) -> None:
        """``held``: more that it waits for; otherwise as ``forward``."""
        # Of the last unit forward is what comes before; there is no unit behind it.
        before = (*_through(FORWARD, k, u), *_through(BACKWARD, k, u + 1))
        needs = [("fetch backward", k, u), ("back", k, u), *before, *held]
        if not unit.forward:
            needs += _updated(k - 1, u)
        self._device(BACKWARD, k, u, needs, slot, unit.up_backward, unit.enter_backward)
        self.compute.append(_Task((BACKWARD, k, u), unit.backward, tuple(needs)))
        self._leave(BACKWARD, k, u, unit.leave_backward)
        if unit.gradients_down:
            task = _Task(("gradients", k, u), unit.gradients_down, tuple(needs))
            self.falling.append(task)
        if unit.slices_up:
            slices: Name = f"slices {BACKWARD}", k, u
            self.entering.append(_Task(slices, unit.slices_up, tuple(needs)))
        self.fetches.append(_Task(("fetch backward", k, u), unit.fetch_backward, (read,)))

    def _device(
        self,
        phase: str,
        k: int,
        u: int,
        needs: list[Name],
        slot: tuple[Name, ...],
        up: float,
        enter: float,
    ) -> None:
        """Copies up before a unit runs, which ``needs`` gets."""
        if up:
            fetched = [n for n in needs if n[0].startswith(("fetch", "update", "states"))]
            rise: Name = f"up {phase}", k, u
            self.rising.append(_Task(rise, up, (*slot, *fetched)))
            needs.append(rise)
        if enter:
            name: Name = f"enter {phase}", k, u
            self.entering.append(_Task(name, enter, tuple(needs)))
            needs.append(name)

    def update(self, k: int, u: int, unit: UnitSeconds, needs: tuple[Name, ...]) -> None:
        """A unit's update, behind ``needs``; a device's part of it goes up meanwhile, and back."""
        self.updates.append(_Task(("update", k, u), unit.update, needs))
        if unit.states_up or unit.states_down:
            self.states_up.append(_Task(("states up", k, u), unit.states_up, needs))
            # The first one is back while others go up.
            self.states_down.append(_Task(("states down", k, u), unit.states_down, needs))

    def _leave(self, phase: str, k: int, u: int, seconds: float) -> None:
        if seconds:
            self.down.append(_Task((f"leave {phase}", k, u), seconds, ((phase, k, u),)))


def _before_forward(step: int, unit: int, ahead: int, last: int) -> Name:
    """What ran ``ahead`` units before a unit's forward: of forward, or of the step before."""
    before = unit - ahead - 1
    return ("forward", step, before) if before >= 0 else ("backward", step - 1, min(last, ~before))


def _before_backward(step: int, unit: int, ahead: int, last: int) -> Name:
    """What ran ``ahead`` units before a unit's backward: of backward, or of forward before that."""
    behind = unit + ahead + 1
    if behind <= last:
        return "backward", step, behind
    return "forward", step, max(0, 2 * last + 1 - behind)


def _holds(units: Sequence[UnitSeconds], limit: int | None) -> dict[int, int]:
    """Unit -> the unit (later in forward) whose update must be through before its backward."""
    if limit is None:
        return {}
    out: dict[int, int] = {}
    waiting, oldest = 0, len(units) - 1
    for u in reversed(range(len(units))):
        while waiting > limit and oldest > u:
            waiting -= units[oldest].gradient_bytes
            out[u] = oldest
            oldest -= 1
        waiting += units[u].gradient_bytes
    return out


@dataclass(slots=True)
class _Lane:
    """One thing at a time."""

    queues: list[deque[_Task]]
    name: Name | None = None
    """Of what is under way."""
    left: float = 0.0
    """Seconds of it, as if there were nothing else."""


def _run(lanes: _Lanes, beside: Beside, reading: Beside) -> dict[Name, float]:
    """When each task ends."""
    every = [_Lane([deque(queue) for queue in queues]) for queues in lanes.queues]
    compute, disk, up, down = every
    # What a step needs of one that is not simulated, or that takes no copies, is there.
    left = {task.name for lane in every for queue in lane.queues for task in queue}
    ends: dict[Name, float] = {}
    now = 0.0

    def begin(lane: _Lane) -> None:
        for queue in lane.queues:
            if queue and left.isdisjoint(queue[0].needs):
                task = queue.popleft()
                lane.name, lane.left = task.name, task.seconds
                return

    # What the last unit leaves comes down behind it, and what it still asks for goes up; whatever
    # else is left is a later step's.
    while (
        any(lane.name is not None or any(lane.queues) for lane in (compute, down))
        or up.queues[0]
        or up.name is not None
    ):
        for lane in every:
            if lane.name is None:
                begin(lane)
        busy = [lane for lane in every if lane.name is not None]
        if not busy:
            first = next(queue[0].name for lane in every for queue in lane.queues if queue)
            raise AssertionError(f"{first} waits for what never comes")
        both = compute.left > 0 and disk.left > 0
        now_beside = reading if disk.name is not None and disk.name[0] in FETCHES else beside
        slow = {id(compute): now_beside.compute, id(disk): now_beside.disk} if both else {}
        spent = min(lane.left * slow.get(id(lane), 1.0) for lane in busy)
        now += spent
        for lane in busy:
            lane.left -= spent / slow.get(id(lane), 1.0)
            if lane.left <= 1e-12 and lane.name is not None:
                left.discard(lane.name)
                ends[lane.name] = now
                lane.name, lane.left = None, 0.0
    return ends


__all__ = ["Beside", "UnitSeconds", "pace"]
