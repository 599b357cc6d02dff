"""Which units keep what forward computed, so that backward need not run them again.

Recomputation costs a forward pass in backward. Where the budget has room, some units keep their
graph (selective recomputation: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models", section 5, there by operation, here by unit): RAM that would save traffic as
states saves computing instead. Which of the two counts is what the phase's busiest lane says, so
each share is a plan of its own and the predicted times decide.

Pure: plans in, plans out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from offload.errors import PlanError
from offload.train.plan import Needs, TrainPlan
from offload.units import format_bytes

GRAPHS = "activations kept for backward"
"""The name of their bytes in a plan."""

SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
"""Of the units that can keep their graph: one plan for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptGraphs:
    """What units keep if they are not run again."""

    sizes: Mapping[int, int]
    """Unit -> bytes of one micro-batch; only of units that can."""
    at_once: int = 1
    """Micro-batches whose graphs are there at a time."""

    def nbytes(self, units: frozenset[int]) -> int:
        return self.at_once * sum(self.sizes[u] for u in units)


def plans_keeping(
    make: Callable[[Needs], TrainPlan], needs: Needs, graphs: KeptGraphs, *, buffers: int
) -> list[TrainPlan]:
    """A plan for each share of kept graphs that fits: always the last units, whose graphs are
    there for the shortest time.

    ``buffers``: of the plan that keeps none. Plans with fewer are left out: with three tiles of
    states under way instead of eight the disk waits for the optimizer, which no lane's time shows
    (a billion parameters in 4 GiB: 14.9 s of forward where the disk needs 10.9).
    """
    order = sorted(graphs.sizes)
    found: list[TrainPlan] = []
    before = 0
    for share in SHARES:
        count = round(share * len(order))
        if count == before:
            continue
        before = count
        units = frozenset(order[len(order) - count :])
        fixed = {**needs.fixed, GRAPHS: graphs.nbytes(units)}
        try:
            plan = make(replace(needs, fixed=fixed))
        except PlanError:
            break  # more of them take more
        if plan.placement.buffers < buffers:
            break
        text = (
            f"{count} of {len(order)} units keep what they computed "
            f"({format_bytes(graphs.nbytes(units))}) and are not run again"
        )
        placement = replace(plan.placement, kept=units)
        found.append(replace(plan, placement=placement, inputs_text=text))
    return found


__all__ = ["GRAPHS", "KeptGraphs", "plans_keeping"]
