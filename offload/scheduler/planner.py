"""From a request to a plan: the placement that a simulation finds fastest, or the reason why none
exists.

Pure and deterministic: the same request gives the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from offload.blocks import Tier
from offload.errors import PlanError
from offload.scheduler.bounds import hit_rate, lane_seconds, traffic
from offload.scheduler.costs import CostModel, Pick
from offload.scheduler.explain import explain
from offload.scheduler.guesses import spare_slots
from offload.scheduler.interval import Interval
from offload.scheduler.inventory import Inventory, PlanRequest
from offload.scheduler.placement import NoRoomError, Placement, least_bytes, placements
from offload.scheduler.plan import Home, Plan, TierLayout
from offload.scheduler.policy import kept_experts
from offload.scheduler.simulate import simulate
from offload.scheduler.sites import choose_sites
from offload.scheduler.split import SplitCosts
from offload.units import format_bytes

__all__ = ["PlanRequest", "make_plan", "minimum_budgets"]

TRIES = 16
"""Candidates that are simulated."""
CLOSE = 0.01
"""Predicted times that differ by less are equal: the ring with room for jitter wins."""
MAX_SIMULATED = 20_000
"""Beyond so many blocks a rule picks the ring, beyond so many uses in a pass arithmetic predicts:
a plan should take seconds."""

_FLAG = {Tier.RAM: "--ram", Tier.DEVICE: "--gpu"}


def make_plan(request: PlanRequest) -> Plan:
    """The plan for a request.

    Raises:
        PlanError: a budget is too small; the message says by how much, what takes the room and
            what to change.
    """
    inv = Inventory(request)
    by_rule = request.costs is None or len(request.blocks) > MAX_SIMULATED
    try:
        options = placements(request, inv, by_rule=by_rule)
    except NoRoomError as e:
        raise PlanError(_too_small(request, inv, e)) from None
    if request.costs is None or by_rule or len(options) == 1:
        chosen = _by_rule(inv, options)
    else:
        chosen = _fastest(request, inv, options, request.costs)
    plan = _assemble(request, inv, chosen)
    shared: tuple[str, ...] = ()
    if request.apart_rows and request.compute_tier is Tier.DEVICE:
        long = by_rule or len(plan.trace.uses) > MAX_SIMULATED
        sites, why = choose_sites(
            plan, request.apart, request.apart_rows, request.costs, by_rule=long
        )
        plan, shared = replace(plan, sites=sites), (why,)
    if request.costs is not None:
        plan = _predict(plan, request.costs)
    shapes = {t: share.shape for t, share in chosen.items()}
    return replace(plan, reasons=explain(plan, shapes, request.costs) + shared)


def minimum_budgets(request: PlanRequest) -> Mapping[Tier, int]:
    """Bytes that each tier needs at least, reserves included, when every tier has just that; the
    request's own budgets play no part."""
    inv = Inventory(request)
    return {t: n + request.reserved(t) for t, n in least_bytes(request, inv).items()}


# -- choosing -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Scored:
    pass_s: float
    roomy: bool
    read_bytes: int
    placement: Placement


def _fastest(
    request: PlanRequest, inv: Inventory, options: list[Placement], costs: CostModel
) -> Placement:
    """Branch and bound: candidates in the order of their bounds, simulated until none of the
    rest can be better."""
    bounded = []
    for i, option in enumerate(options):
        plan = _with_rows(_assemble(request, inv, option), request)
        bounded.append((max(lane_seconds(plan, costs, request.rows).values()), i, plan))
    bounded.sort(key=lambda b: b[:2])
    tried: list[_Scored] = []
    best = math.inf
    for bound_s, i, plan in bounded:
        if bound_s > best * (1 + CLOSE) or len(tried) == TRIES:
            break
        pass_s = simulate(plan, costs, tokens=request.rows).pass_s
        best = min(best, pass_s)
        tried.append(_score(pass_s, inv, options[i]))
    # As fast as the best for what anyone can measure: prefer room for jitter, then less reading.
    close = [t for t in tried if t.pass_s <= best * (1 + CLOSE)]
    return min(close, key=lambda t: (not t.roomy, t.read_bytes, t.pass_s)).placement


def _with_rows(plan: Plan, request: PlanRequest) -> Plan:
    """The plan with what steps take beside their weights for all rows of a pass."""
    by = 1 + request.row_share * (request.rows - 1)
    one = plan.overhead_s
    if isinstance(one, (int, float)):
        return replace(plan, overhead_s=one * by)
    return replace(plan, overhead_s={unit: seconds * by for unit, seconds in one.items()})


def _by_rule(inv: Inventory, options: list[Placement]) -> Placement:
    """The roomy placement that reads least; without one, the longest rings."""
    scored = [_score(0.0, inv, option) for option in options]
    roomy = [s for s in scored if s.roomy]
    if roomy:
        return min(roomy, key=lambda s: s.read_bytes).placement
    return max(scored, key=lambda s: sum(x.ring - x.floor for x in s.placement.values())).placement


def _score(pass_s: float, inv: Inventory, option: Placement) -> _Scored:
    pinned = {b for share in option.values() for b in share.pinned}
    read = sum(inv.size[b] * n for b, n in inv.uses.items() if b not in pinned)
    return _Scored(pass_s, all(share.roomy for share in option.values()), read, option)


# -- assembling ---------------------------------------------------------------------------


def _assemble(request: PlanRequest, inv: Inventory, placement: Placement) -> Plan:
    tiers: dict[Tier, TierLayout] = {}
    for tier, share in placement.items():
        offsets: dict[str, int] = {}
        end = 0
        for block in sorted(share.pinned, key=lambda b: inv.load_order[b]):
            offsets[block] = end
            end += inv.size[block]
        tiers[tier] = TierLayout(
            pinned=offsets,
            ring_base=end,
            ring_bytes=share.ring,
            slot_base=end + share.ring,
            slot_bytes=inv.slot_bytes if share.slots else 0,
            slots=share.slots,
        )
    kept = tiers[request.compute_tier].pinned
    routed = set(inv.experts)
    rows = set(inv.by_row)
    homes = {
        b: Home.PINNED
        if b in kept
        else Home.CACHED
        if b in routed
        else Home.BY_ROW
        if b in rows
        else Home.STREAMED
        for b in request.blocks
    }
    plan = Plan(
        blocks=request.blocks,
        trace=request.trace,
        groups=inv.groups,
        compute_tier=request.compute_tier,
        tiers=tiers,
        homes=homes,
        budgets=request.budgets,
        reserves=request.reserves,
        weight_bytes=sum(s.nbytes for s in request.blocks.values()),
        streamed_bytes_per_pass=0,
        expected_hit_rate=_hits(inv, tiers, request),
        expert_policy=request.expert_policy,
        kept={
            t: frozenset(request.hot[: kept_experts(a.slots, request.top_k, _spare(a, request))])
            for t, a in tiers.items()
            if request.hot
        },
        top_k=request.top_k,
        by_row=request.by_row,
        overhead_s=request.overhead_s,
        guesses=request.guesses,
        split=_split(request, inv, homes),
    )
    return replace(plan, streamed_bytes_per_pass=round(traffic(plan)[Tier.RAM]))


def _hits(inv: Inventory, tiers: Mapping[Tier, TierLayout], request: PlanRequest) -> float | None:
    if not inv.experts:
        return None
    if any(inv.experts[0] in layout.pinned for layout in tiers.values()):
        return 1.0
    largest = max(tiers.values(), key=lambda a: a.slots)
    slots = largest.slots - _spare(largest, request)
    return hit_rate(slots, len(inv.experts), request.expert_policy, inv.per_token)


def _split(request: PlanRequest, inv: Inventory, homes: Mapping[str, Home]) -> SplitCosts | None:
    """Costs of the two sites, where experts have to move to be computed on the device."""
    cached = [b for b in inv.experts if homes[b] is Home.CACHED]
    if not cached or not request.split_rows or request.compute_tier is not Tier.DEVICE:
        return None
    spec = max((request.blocks[b] for b in cached), key=lambda s: s.nbytes)
    if request.costs is None:
        return SplitCosts.assumed(spec.nbytes, request.split_rows)
    return SplitCosts.measured(request.costs, spec, request.split_rows)


def _spare(layout: TierLayout, request: PlanRequest) -> int:
    """Slots that are kept free for guesses."""
    guesses = request.guesses and len(request.memory_tiers) == 1
    return spare_slots(layout.slots, request.top_k) if guesses else 0


def _predict(plan: Plan, costs: CostModel) -> Plan:
    lane_s = lane_seconds(plan, costs)
    bound_s = max(lane_s.values())
    if len(plan.trace.uses) > MAX_SIMULATED:
        predicted = costs.interval(lambda c: _coarse(plan, c))
    else:
        # Not `costs.interval`: queueing makes times almost, but not strictly, monotone in rates.
        times = sorted(simulate(plan, costs.at(p)).pass_s for p in Pick)
        predicted = Interval(low=times[0], mid=times[1], high=times[2])
    return replace(plan, lane_s=lane_s, bound_pass_s=bound_s, predicted_pass_s=predicted)


def _coarse(plan: Plan, costs: CostModel) -> float:
    """A pass without a simulation: the busiest lane, or the latencies of its reads."""
    kept = plan.tiers[Tier.RAM].pinned
    reads = sum(plan.homes[b] is Home.STREAMED and b not in kept for b, _ in plan.trace.uses)
    waits_s = reads * costs.read_latency_s / costs.queue_depth
    return max(waits_s, *lane_seconds(plan, costs).values())


# -- refusing -----------------------------------------------------------------------------


def _too_small(request: PlanRequest, inv: Inventory, short: NoRoomError) -> str:
    """The message: how much is missing, what takes the room, what to change."""
    tier = short.tier
    reserves = {k: n for k, n in request.reserves.get(tier, {}).items() if n}
    need = short.need + sum(reserves.values())
    given = request.budgets[tier]
    parts = dict(reserves)
    if tier == request.compute_tier:
        parts["weights that must stay resident"] = inv.bytes(inv.always)
        parts["the blocks of the largest step"] = inv.floor(set())
    else:
        parts["the largest block on its way up"] = inv.largest([*inv.always, *inv.streamable])
    if inv.experts:
        slots = inv.least_slots
        parts[f"{slots} expert slots (top-{inv.top_k} and one arriving)"] = min(
            slots * inv.slot_bytes, inv.bytes(inv.experts)
        )
    if sum(parts.values()) > need:  # then it is keeping everything that needs least
        parts = {**reserves, "all blocks, which is less than streaming needs": short.need}
    took = ", ".join(f"{k} {format_bytes(n)}" for k, n in parts.items() if n)
    flag = _FLAG[tier]
    ways = [f"raise {flag} to {-(-need // 2**20)}MiB or more"]
    if any("kv" in k.lower() or "cache" in k.lower() for k in reserves):
        ways.append("shorten --context")
    if any(w in k.lower() for k in reserves for w in ("activation", "logit", "prompt")):
        ways.append("use a shorter prompt or a smaller batch")
    return (
        f"the {tier.name} budget of {given} bytes ({format_bytes(given)}) is "
        f"{need - given} bytes too small: at least {need} bytes ({format_bytes(need)}) are "
        f"needed for {took}; {' or '.join(ways)}"
    )
