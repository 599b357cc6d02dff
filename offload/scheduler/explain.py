"""The facts behind a plan's choices, as sentences with numbers."""

from __future__ import annotations

from collections.abc import Mapping

from offload.blocks import BlockKind, Tier
from offload.scheduler.bounds import CPU, H2D, READ, experts_of
from offload.scheduler.costs import CostModel
from offload.scheduler.guesses import spare_slots
from offload.scheduler.plan import Home, Plan
from offload.scheduler.policy import CYCLIC, DEFAULT
from offload.scheduler.split import Job, Place
from offload.units import format_bytes

WARNING = "warning:"
"""How a sentence begins that a user should see even in a summary."""

_NAME = {Tier.RAM: "RAM", Tier.DEVICE: "the device"}
_LANE = {READ: "the disk", H2D: "copies to the device", CPU: "the CPU's part"}


def explain(plan: Plan, shapes: Mapping[Tier, str], costs: CostModel | None) -> tuple[str, ...]:
    """Why blocks are pinned or streamed, the rings, the slots, and what more room would bring.

    Args:
        shapes: how pins were chosen in each tier: all, dense, spread or prefix.
    """
    lines: list[str] = []
    for tier in sorted(plan.tiers, reverse=True):
        lines += _pins(plan, tier, shapes[tier])
    lines += _experts(plan)
    lines += _rows(plan)
    lines += _lanes(plan)
    lines += _more(plan, costs)
    return tuple(lines)


def _pins(plan: Plan, tier: Tier, shape: str) -> list[str]:
    layout, name = plan.tiers[tier], _NAME[tier]
    size = sum(plan.blocks[b].slot_nbytes for b in layout.pinned)
    if shape == "all":
        if tier == plan.compute_tier:
            return [f"everything fits {name}: all {format_bytes(size)} stay there, nothing streams"]
        if not layout.pinned:
            return [f"{name} only lets blocks pass: everything stays above it"]
        return [f"all that streams up fits {name}: {format_bytes(size)} stay there"]
    if shape == "dense" and not layout.pinned:
        return []
    if shape == "dense":
        return [
            f"{format_bytes(size)} of dense weights stay in {name}: each token uses all of them, "
            "an expert only now and then"
        ]
    streamed = [
        s
        for b, s in plan.blocks.items()
        if plan.homes[b] is Home.STREAMED and b not in layout.pinned
    ]
    below = sum(s.slot_nbytes for s in streamed)
    how = (
        "spread evenly over the layers, so that the disk has work while pinned ones compute"
        if shape == "spread"
        else "the first ones in order of use, which the simulation found faster than spread ones"
    )
    lines = []
    if layout.pinned:
        lines.append(
            f"{format_bytes(size)} in {len(layout.pinned)} blocks stay in {name}, {how}; "
            f"{format_bytes(below)} do not fit and stream"
        )
    else:
        lines.append(f"no dense block can stay in {name}: {format_bytes(below)} stream")
    step = max(
        (
            sum(
                plan.blocks[b].slot_nbytes
                for b in dict.fromkeys(s.blocks)
                if plan.homes[b] is Home.STREAMED and b not in layout.pinned
            )
            for s in plan.trace
        ),
        default=0,
    )
    lines.append(
        f"a ring of {format_bytes(layout.ring_bytes)} in {name}: the largest step streams "
        f"{format_bytes(step)}, the rest lets reads run ahead of compute; longer would leave "
        "less room to pin"
    )
    return lines


def _experts(plan: Plan) -> list[str]:
    groups = experts_of(plan)
    cached = [b for g in groups.values() for b in g if plan.homes[b] is Home.CACHED]
    if not cached:
        return []
    total = sum(plan.blocks[b].slot_nbytes for b in cached)
    lines = []
    per_token = sum(plan.top_k[s.group] for s in plan.trace if s.group)
    for tier in sorted(plan.tiers, reverse=True):
        layout, name = plan.tiers[tier], _NAME[tier]
        if cached[0] in layout.pinned:
            lines.append(f"all {len(cached)} experts ({format_bytes(total)}) stay in {name}")
        elif layout.slots:
            lines.append(
                f"{layout.slots} expert slots of {format_bytes(layout.slot_bytes)} in {name} hold "
                f"{layout.slots / len(cached):.0%} of {len(cached)} experts"
            )
    lines += _sites(plan, cached)
    slots = max(a.slots for a in plan.tiers.values())
    if plan.guesses and len(plan.tiers) == 1 and (spare := spare_slots(slots, plan.top_k)):
        lines.append(
            f"{spare} of the slots are kept free for experts of the next layer, read on a guess "
            "when the disk has nothing else to do"
        )
    device = plan.tiers.get(Tier.DEVICE)
    if plan.guesses and plan.split is None and device is not None and device.slots:
        lines.append(
            "experts of the next layer that are in RAM go up on a guess when the link has nothing "
            "else to do, in place of those that are less likely to be used"
        )
    kept = max(map(len, plan.kept.values()), default=0)
    if plan.expert_policy != DEFAULT:
        lines.append(
            f"the expert policy {plan.expert_policy} was asked for"
            + (f": the {kept} most used experts of the recorded routing stay" if kept else "")
        )
    if (plan.expected_hit_rate or 0.0) < 1.0 and slots < per_token:
        lines.append(_cliff(plan, slots, per_token, len(cached)))
    return lines


def _sites(plan: Plan, cached: list[str]) -> list[str]:
    """Who computes an expert that is in no slot of the device."""
    costs = plan.split
    if costs is None:
        return []
    largest = max((plan.blocks[b] for b in cached), key=lambda s: s.nbytes)
    job = Job(largest.id, 1, Place.RAM, largest.nbytes)
    here, up, there = costs.cpu_s(job), costs.up_s(job), costs.device_s(job)
    return [
        f"experts that are in no slot: the CPU takes {here / (up + there):.3g} times as long for "
        f"one token as a copy up and the device; each layer's are shared so that both end "
        f"together, for up to {costs.rows} tokens at once"
    ]


def _cliff(plan: Plan, slots: int, per_token: int, experts: int) -> str:
    """Slots for less than one token's experts: LRU evicts each just before its next use."""
    size = max(a.slot_bytes for a in plan.tiers.values())
    short = (
        f"{WARNING} {slots} slots hold less than the {per_token} experts of one token "
        f"({format_bytes(per_token * size)})"
    )
    more = f"{format_bytes((per_token - slots) * size)} more RAM would pass this cliff"
    if plan.expert_policy in CYCLIC:
        return (
            f"{short}, so with {plan.expert_policy} none is there when it comes round again (hit "
            "rate about 0): drop --expert-policy, whose default keeps some from token to token "
            f"(about {slots / experts:.0%} of uses hit), or {more}"
        )
    return (
        f"{short}: LRU would never hit; {plan.expert_policy} keeps some of them from token to "
        f"token, and about {plan.expected_hit_rate or 0.0:.0%} of uses hit; {more}"
    )


def _rows(plan: Plan) -> list[str]:
    rows = [b for b, h in plan.homes.items() if h is Home.BY_ROW]
    if not rows:
        return []
    size = format_bytes(sum(plan.blocks[b].nbytes for b in rows))
    return [f"{', '.join(rows)} ({size}): single rows are read from disk as tokens need them"]


def _lanes(plan: Plan) -> list[str]:
    worst = plan.bottleneck
    if worst is None or plan.bound_pass_s is None:
        return []
    shares = ", ".join(f"{k} {s * 1e3:.3g} ms" for k, s in plan.lane_s.items())
    return [f"{_LANE.get(worst, 'computing')} takes longest ({shares} per pass)"]


def _more(plan: Plan, costs: CostModel | None) -> list[str]:
    """What another budget would save."""
    if not plan.streamed_bytes_per_pass:
        return []
    low = Tier.RAM
    used = {b for a in plan.tiers.values() for b in a.pinned}
    layout = plan.tiers[low]
    missing = sum(
        s.slot_nbytes
        for b, s in plan.blocks.items()
        if b not in used and plan.homes[b] is not Home.BY_ROW
    )
    if not missing:
        return []
    free = plan.budgets[low] - plan.resident_bytes(low)
    more = max(0, missing - layout.ring_bytes - layout.slot_bytes * layout.slots - free)
    line = f"with {format_bytes(more)} more RAM nothing but rows would be read from disk"
    dense = any(
        h is Home.STREAMED and b not in used and plan.blocks[b].kind is not BlockKind.EXPERT
        for b, h in plan.homes.items()
    )
    if costs is not None and dense and plan.bottleneck == READ:
        line += f"; each GiB of it saves up to {costs.read_busy_s(2**30):.2g} s per pass"
    return [line]
