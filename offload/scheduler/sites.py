"""Which dense blocks the CPU computes where they lie in RAM, beside a device that has the rest.

At decode a weight is used once for each time it moves. Where a copy over the link costs more than
the CPU's own pass over the same bytes, moving the hidden state is cheaper than moving the weight.
But the link and the CPU are two lanes: while the CPU is at one block the link can bring up the next
ones, so that some of each is faster than all of either, even where a copy costs a little less. So
the question is how many: evenly over the trace, as many as a simulation finds fastest, and none if
that hardly saves anything.

Only blocks that are pinned in RAM are asked about: one that comes from disk is waited for on either
site. In a pass of many tokens (a prompt) all of them go up: the copy is paid once for all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from offload.blocks import BlockSpec, Tier
from offload.scheduler.bounds import COMPUTE, CPU, H2D, host_product_s, lane_seconds
from offload.scheduler.costs import CostModel
from offload.scheduler.plan import DenseSites, Home, Plan
from offload.scheduler.simulate import simulate
from offload.units import format_bytes

SHARES = 16
"""Numbers of blocks that are looked at: so many parts of those that may."""

TRIES = 4
"""Of them, those that are simulated: the best by the lanes' sums."""

WORTH = 0.1
"""What the CPU's part has to save of a token's time: less is within what rates are measured to."""


def choose_sites(
    plan: Plan, apart: Collection[str], rows: int, costs: CostModel | None, *, by_rule: bool = False
) -> tuple[DenseSites, str]:
    """The blocks that the CPU computes, and the reason in a sentence.

    Args:
        apart: blocks that can be computed by themselves on either site.
        rows: most tokens of a pass that the CPU may have a part in.
        costs: None: a link half as fast as the CPU reads is assumed, and two thirds stay.
        by_rule: do not simulate.
    """
    kept = plan.tiers[Tier.RAM].pinned
    uses = dict.fromkeys(b for b, _ in plan.trace.uses)
    may = [b for b in uses if b in apart and b in kept and plan.homes[b] is Home.STREAMED]
    if not may:
        return DenseSites(blocks=frozenset(), rows=rows), (
            "no dense block is in RAM and has to go up: there is nothing for the CPU to compute"
        )
    if costs is None:
        chosen = _spread(may, 2 * len(may) / 3)
        sites = DenseSites(blocks=chosen, rows=rows)
        return sites, (
            f"{_these(plan, chosen, may)} are computed there by the CPU in passes of up to {rows} "
            "tokens: without measured rates a link half as fast as RAM is assumed"
        )
    largest = max(may, key=lambda b: plan.blocks[b].nbytes)
    spec = plan.blocks[largest]
    facts = (
        f"a copy of {format_bytes(spec.nbytes)} up takes {_ms(costs.copy_up_s(spec.nbytes))}, the "
        f"CPU's own pass over it with its hidden states {_ms(host_product_s(spec, costs))}"
    )
    rows = _rows(spec, costs, rows)
    tried = [
        replace(plan, sites=DenseSites(blocks=_spread(may, len(may) * i / SHARES), rows=rows))
        for i in range(SHARES + 1)
    ]
    seconds = {id(one): _chain_s(one, costs) for one in tried}
    none, best = tried[0], min(tried, key=lambda one: seconds[id(one)])
    if not by_rule:
        near = [none, *sorted(tried[1:], key=lambda one: seconds[id(one)])[:TRIES]]
        seconds = {id(one): simulate(one, costs).pass_s for one in near}
        best = min(near, key=lambda one: seconds[id(one)])
    alone_s, best_s = seconds[id(none)], seconds[id(best)]
    if best_s > alone_s * (1 - WORTH):
        return DenseSites(blocks=frozenset(), rows=rows), (
            f"the dense blocks in RAM go up and the device computes all of them: {facts}, but a "
            f"token would take {_ms(best_s)} with the CPU and takes {_ms(alone_s)} without"
        )
    assert best.sites is not None
    return best.sites, (
        f"{_these(plan, best.sites.blocks, may)} are computed there by the CPU in passes of up to "
        f"{rows} tokens: {facts}; a token takes {_ms(best_s)} so, and {_ms(alone_s)} if all go up"
    )


def _rows(spec: BlockSpec, costs: CostModel, most: int) -> int:
    """Most tokens up to ``most`` for which the CPU's pass costs less than the copy, or hardly more
    beside it than for one token."""

    def ratio(tokens: int) -> float:
        moved_s = costs.copy_up_s(spec.nbytes) + costs.weights_s((spec,), tokens)
        return host_product_s(spec, costs, tokens) / moved_s

    rows, limit = 1, max(1.0, 1.01 * ratio(1))
    while 2 * rows <= most and ratio(2 * rows) <= limit:
        rows *= 2
    return rows


def _chain_s(plan: Plan, costs: CostModel) -> float:
    """A pass by the lanes' sums alone: device and CPU take turns, the link works beside both."""
    lanes = lane_seconds(plan, costs)
    return max(lanes[H2D], lanes[COMPUTE] + lanes.get(CPU, 0.0))


def _spread(blocks: Sequence[str], n: float) -> frozenset[str]:
    """About ``n`` of the blocks, evenly over their order: between them the link has time."""
    share = n / len(blocks)
    return frozenset(b for i, b in enumerate(blocks) if int((i + 1) * share) > int(i * share))


def _these(plan: Plan, chosen: Collection[str], may: Collection[str]) -> str:
    some, all_of_them = (sum(plan.blocks[b].nbytes for b in of) for of in (chosen, may))
    return (
        f"{len(chosen)} of the {len(may)} dense blocks in RAM that the device has no room for "
        f"({format_bytes(some)} of {format_bytes(all_of_them)})"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


__all__ = ["choose_sites"]
