"""How long a step takes when computing and the disk wait for each other.

Two lanes, as the engine has them: units compute one after the other, forward and then backward, and
the disk does one thing at a time. What waits for what is the engine's order. A unit's forward waits
for its update of the step before, so a step begins with what the disk needs for the first unit
(*fill*), which no sum over a lane shows; the head's update is needed behind forward only. While
both lanes work each is slower than alone: they share cores and memory (``Beside``, measured).

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


Name = tuple[str, int, int]
"""(what, step, unit)"""


@dataclass(frozen=True, slots=True)
class _Task:
    name: Name
    seconds: float
    needs: tuple[Name, ...] = ()


def pace(
    units: Sequence[UnitSeconds], *, deferred: bool, ahead: int, beside: Beside,
    gradient_limit: int | None = None,
) -> tuple[float, float]:  # fmt: skip
    """(seconds of forward, seconds of backward) of a step among others like it.

    Args:
        units: in the order of forward. One whose forward takes nothing (the head) is waited for in
            backward only.
        deferred: updates run behind the next forward; else inside backward.
        ahead: units whose weights are read before they are needed, at most.
        gradient_limit: of updates inside backward: computing waits while more gradients than these
            bytes wait for theirs.
    """
    compute: list[_Task] = []
    updates: list[_Task] = []
    fetches: list[_Task] = []
    leaving: list[_Task] = []
    coming: list[_Task] = []
    last = len(units) - 1
    holds = _holds(units, gradient_limit) if not deferred else {}
    for k in range(STEPS):
        for u, unit in enumerate(units):
            needs = [("fetch forward", k, u)]
            if unit.forward:
                needs.append(("update", k - 1, u))
            compute.append(_Task(("forward", k, u), unit.forward, tuple(needs)))
            turn = _before_forward(k, u, ahead, last)
            fetches.append(_Task(("fetch forward", k, u), unit.fetch_forward, (turn,)))
            leaving.append(_Task(("away", k, u), unit.input_away, (("forward", k, u),)))
        for u in reversed(range(len(units))):
            unit = units[u]
            needs = [("fetch backward", k, u), ("back", k, u)]
            if not unit.forward:
                needs.append(("update", k - 1, u))
            if u in holds:
                needs.append(("update", k, holds[u]))
            compute.append(_Task(("backward", k, u), unit.backward, tuple(needs)))
            soon = _before_backward(k, u, ahead, last)
            fetches.append(_Task(("fetch backward", k, u), unit.fetch_backward, (soon,)))
            soon = _before_backward(k, u, INPUTS_AHEAD, last)
            coming.append(_Task(("back", k, u), unit.input_back, (("away", k, u), soon)))
            leaving.append(_Task(("spill", k, u), unit.spill, (("backward", k, u),)))
            if not deferred:
                updates.append(_Task(("update", k, u), unit.update, (("backward", k, u),)))
        if deferred:
            end = ("backward", k, 0)  # the norm is known, and with it the clip factor
            updates += [
                _Task(("update", k, u), unit.update, (end, ("spill", k, u)))
                for u, unit in enumerate(units)
            ]
    ends = _run(compute, [coming, fetches, updates, leaving], beside)
    begin, turn_at, end_at = (
        ends[name]
        for name in (("backward", STEPS - 2, 0), ("forward", STEPS - 1, last),
                     ("backward", STEPS - 1, 0))
    )  # fmt: skip
    return turn_at - begin, end_at - turn_at


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


def _run(
    compute: Sequence[_Task], queues: Sequence[Sequence[_Task]], beside: Beside
) -> dict[Name, float]:
    """When each task ends. The disk takes the first queue whose first task can begin."""
    waiting = deque(compute)
    lines = [deque(queue) for queue in queues]
    # What a step needs of one that is not simulated is there.
    left = {task.name for queue in (compute, *queues) for task in queue}
    ends: dict[Name, float] = {}
    now = 0.0
    computes: list[_Task] = []
    moves: list[_Task] = []
    to_compute = to_move = 0.0

    def ready(line: deque[_Task]) -> bool:
        return bool(line) and left.isdisjoint(line[0].needs)

    while waiting or computes:
        if not computes and ready(waiting):
            computes = [waiting.popleft()]
            to_compute = computes[0].seconds
        if not moves:
            line = next((line for line in lines if ready(line)), None)
            if line is not None:
                moves = [line.popleft()]
                to_move = moves[0].seconds
        if not computes and not moves:
            raise AssertionError(f"{waiting[0].name} waits for what never comes")
        both = bool(computes and moves and to_compute > 0 and to_move > 0)
        slow_c, slow_m = (beside.compute, beside.disk) if both else (1.0, 1.0)
        spent = min(
            *([to_compute * slow_c] if computes else []),
            *([to_move * slow_m] if moves else []),
            float("inf"),
        )
        now += spent
        if computes:
            to_compute -= spent / slow_c
            if to_compute <= 1e-12:
                left.discard(computes[0].name)
                ends[computes[0].name] = now
                computes = []
        if moves:
            to_move -= spent / slow_m
            if to_move <= 1e-12:
                left.discard(moves[0].name)
                ends[moves[0].name] = now
                moves = []
    return ends


__all__ = ["Beside", "UnitSeconds", "pace"]
