"""Which inputs that are kept for backward go to the disk.

Pure: plans in, plans out. Spilling writes and reads each of them once for every micro-batch, so it
pays where a step does not fit without, or where the RAM it frees saves more: states that stay in
RAM save the busier phase, and backward often has time to spare for reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offload.blocks import align_up
from offload.errors import PlanError
from offload.train.footprint import TrainFootprint
from offload.train.inputs import buffer_bytes
from offload.train.layout import TrainLayout
from offload.train.opening import InputSpill
from offload.train.plan import Needs, TrainPlan
from offload.train.predicting import Prediction
from offload.units import format_bytes

KEPT = "inputs kept for backward"
"""The name in ``Needs.fixed`` of what forward leaves in RAM for backward."""

MOVING = "inputs to and from the disk"

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the inputs that may be spilled: one plan for each."""

WORTH = 0.02
"""Of a step's time, that spilling more must save to be chosen: it wears the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptInputs:
    """What forward keeps of a micro-batch for backward."""

    sizes: dict[int, int]
    """Unit -> bytes of its input; only of units whose input can be spilled."""
    at_once: int = 1
    """Micro-batches whose inputs are there at a time."""
    micro_batches: int = 1
    """Of a step."""

    @property
    def nbytes(self) -> int:
        """In RAM, if none is spilled."""
        return self.at_once * sum(self.sizes.values())


def input_sizes(
    layout: TrainLayout, modules: Sequence[Any], footprint: TrainFootprint
) -> dict[int, int]:
    """``KeptInputs.sizes`` from what was measured of ``modules``; empty where nothing was."""
    measured = dict(zip(map(id, modules), footprint.inputs, strict=False))
    sizes = {u.index: measured.get(id(u.module), 0) for u in layout.units}
    return {unit: size for unit, size in sizes.items() if size}


def plans(make: Callable[[Needs], TrainPlan], needs: Needs, inputs: KeptInputs) -> list[TrainPlan]:
    """A plan for each share of inputs on the disk that fits, the least first.

    Raises:
        PlanError: none fits; says what is missing with all of them on the disk.
    """
    found: list[TrainPlan] = []
    error: PlanError | None = None
    for spill in _choices(inputs):
        try:
            found.append(_spilled(make, needs, inputs, spill))
        except PlanError as e:
            error = e
    if not found:
        assert error is not None
        raise error
    return [replace(p, inputs_text=_text(p, inputs, found, error)) for p in found]


def best(found: Sequence[TrainPlan], predictions: Sequence[Prediction]) -> int:
    """The index of the plan to take: the fastest, but none that spills more for next to nothing."""
    fastest = min(p.seconds for p in predictions)
    good = [i for i, p in enumerate(predictions) if p.seconds <= fastest * (1 + WORTH)]
    least = min(found[i].inputs_bytes for i in good)
    return min(
        (i for i in good if found[i].inputs_bytes == least), key=lambda i: predictions[i].seconds
    )


def _choices(inputs: KeptInputs) -> list[frozenset[int]]:
    """Sets of units, each evenly spread: forward's writes and backward's reads never come in a
    burst. Those that would save nothing, for the buffers that they need, are left out."""
    units = sorted(inputs.sizes)
    out = [frozenset[int]()]
    for share in SHARES[1:]:
        count = round(share * len(units))
        chosen = frozenset(units[i * len(units) // count] for i in range(count))
        sizes = [inputs.sizes[u] for u in chosen]
        if sizes and inputs.at_once * sum(sizes) > buffer_bytes(max(sizes)) and chosen != out[-1]:
            out.append(chosen)
    return out


def _spilled(
    make: Callable[[Needs], TrainPlan], needs: Needs, inputs: KeptInputs, units: frozenset[int]
) -> TrainPlan:
    if not units:
        return make(needs)
    sizes = [inputs.sizes[u] for u in units]
    moved = sum(align_up(n) for n in sizes)
    largest = max(sizes)
    fixed = dict(needs.fixed)
    fixed[KEPT] -= inputs.at_once * sum(sizes)
    fixed[MOVING] = buffer_bytes(largest)
    plan = make(replace(needs, fixed=fixed))
    spill = InputSpill(
        units=units, largest=largest,
        file_bytes=inputs.at_once * len(units) * align_up(largest),
    )  # fmt: skip
    phases = dict(plan.phases)
    step = inputs.micro_batches * moved
    (read, written), (read_back, written_back) = phases["forward"], phases["backward"]
    phases["forward"] = read, written + step
    phases["backward"] = read_back + step, written_back
    return replace(
        plan,
        placement=replace(plan.placement, inputs=spill),
        phases=phases,
        inputs_bytes=spill.file_bytes,
        inputs_moved=step,
    )


def _text(
    plan: TrainPlan, inputs: KeptInputs, found: Sequence[TrainPlan], error: PlanError | None
) -> str:
    spill = plan.placement.inputs
    if not inputs.sizes:
        return ""
    if spill is None:
        return f"{format_bytes(inputs.nbytes)} of inputs kept for backward stay in RAM"
    bytes_away = inputs.at_once * sum(inputs.sizes[u] for u in spill.units)
    why = "a step does not fit otherwise" if error is not None and plan is found[0] else (
        "the RAM saves more elsewhere"
    )  # fmt: skip
    return (
        f"{format_bytes(bytes_away)} of the {format_bytes(inputs.nbytes)} of inputs kept for "
        f"backward go to the disk ({len(spill.units)} of {len(inputs.sizes)} units): {why}"
    )


__all__ = ["KEPT", "KeptInputs", "best", "input_sizes", "plans"]
