"""What one pass of a plan moves and computes, and the bound that follows: no schedule is faster
than its busiest lane. Arithmetic on expectations; ``simulate`` adds the waiting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from offload.blocks import BlockSpec, Tier
from offload.scheduler.costs import CostModel
from offload.scheduler.plan import Home, Plan
from offload.scheduler.policy import CYCLIC, DEFAULT
from offload.scheduler.split import Job, Place, SplitCosts, split
from offload.scheduler.trace import Step

READ, H2D, COMPUTE, CPU = "read", "h2d", "compute", "cpu"
"""Lanes: disk to RAM, RAM to device, computation, and the CPU's where a device computes, too."""

PRODUCT_S = 1.5e-4
"""What a product that the CPU computes beside the device costs besides the product and the copies,
where nobody has measured it (a machine that is not here): Python, and threads that wake each
other."""


def experts_of(plan: Plan) -> dict[str, list[str]]:
    """The plan's experts by group, in the plan's order."""
    groups: dict[str, list[str]] = {g: [] for g in plan.groups}
    for block, spec in plan.blocks.items():
        if spec.group in groups:
            groups[spec.group].append(block)
    return groups


def distinct(experts: int, top_k: int, tokens: float) -> float:
    """Expected number of experts of a layer that ``tokens`` tokens use together, when routing is
    independent and even: ``E (1 − (1 − k/E)^T)``."""
    return experts * (1.0 - (1.0 - top_k / experts) ** tokens) if tokens > 1 else float(top_k)


def row_bytes(spec: BlockSpec) -> int:
    """Bytes of one row of a block that is looked up."""
    return sum(t.nbytes // max(t.shape[0], 1) for t in spec.tensors if t.shape)


def hit_rate(slots: int, experts: int, policy: str = DEFAULT, cycle: int = 0) -> float:
    """A cache's share of the experts, by number: what even routing hits. 0 for a policy that
    loses everything between two tokens because it has less than one token's ``cycle`` of slots.

    A RAM slot keeps its copy when the expert goes up to the device, so of two caches the larger
    one counts and not the sum.
    """
    if not experts:
        return 1.0
    return 0.0 if policy in CYCLIC and slots < min(cycle, experts) else min(1.0, slots / experts)


def traffic(plan: Plan, tokens: float = 1.0) -> dict[Tier, float]:
    """Expected bytes that one pass brings into each tier from the one below.

    A block that several steps use counts each time (a window rarely spans two uses), so for such
    models this is an upper estimate and the simulation is the better figure.
    """
    tiers = sorted(plan.tiers)
    into = dict.fromkeys(tiers, 0.0)
    in_ram = plan.computed_in_ram(tokens)
    for step in plan.trace:
        for block in dict.fromkeys(step.blocks):
            spec = plan.blocks[block]
            if block in in_ram:
                continue
            if plan.homes[block] is Home.STREAMED:
                for tier in reversed(tiers):
                    if block in plan.tiers[tier].pinned:
                        break
                    into[tier] += spec.nbytes
            elif plan.homes[block] is Home.BY_ROW:
                into[Tier.RAM] += row_bytes(spec) * tokens
    cached = sum(h is Home.CACHED for h in plan.homes.values())
    cycle = sum(k * times for _, k, times in _routing(plan))
    for block_ids, k, times in _routing(plan):
        if plan.homes[block_ids[0]] is not Home.CACHED:
            continue
        used = times * distinct(len(block_ids), k, tokens)
        each = sum(plan.blocks[b].nbytes for b in block_ids) / len(block_ids)
        missed = 1.0
        for tier in reversed(tiers):
            if block_ids[0] in plan.tiers[tier].pinned:
                break
            slots = plan.tiers[tier].slots
            missed = min(missed, 1.0 - hit_rate(slots, cached, plan.expert_policy, cycle))
            into[tier] += used * each * missed
    return into


def lane_seconds(plan: Plan, costs: CostModel, tokens: float = 1.0) -> dict[str, float]:
    """Busy seconds of each lane in one pass, latencies left out: they overlap."""
    into = traffic(plan, tokens)
    lanes = {READ: costs.read_busy_s(into[Tier.RAM])}
    if Tier.DEVICE in into:
        lanes[H2D] = costs.copy_up_busy_s(into[Tier.DEVICE])
    lanes[COMPUTE] = compute_seconds(plan, costs, tokens)
    if plan.computed_in_ram(tokens):
        lanes[CPU] = sum(map(host_seconds(plan, costs, tokens), plan.trace))
    if plan.split is not None and tokens <= plan.split.rows:
        on_cpu = _on_cpu(plan, plan.split, tokens)
        host = costs.beside_card()
        lanes.setdefault(CPU, 0.0)
        for spec, times, each in on_cpu:
            lanes[CPU] += times * host.expert_s(spec, each)
            lanes[COMPUTE] -= times * costs.expert_s(spec, each)
            lanes[H2D] -= costs.copy_up_busy_s(times * spec.nbytes)
        lanes[COMPUTE], lanes[H2D] = max(0.0, lanes[COMPUTE]), max(0.0, lanes[H2D])
    return lanes


def _on_cpu(plan: Plan, costs: SplitCosts, tokens: float) -> list[tuple[BlockSpec, float, float]]:
    """What the CPU computes in a pass beside the device, by layer: an expert of it, how many, and
    tokens of each. From a schedule of as many hits and misses as are expected."""
    cached = sum(h is Home.CACHED for h in plan.homes.values())
    here = min(1.0, plan.tiers[Tier.DEVICE].slots / max(1, cached))
    ram = plan.tiers[Tier.RAM]
    found = []
    for experts, k, times in _routing(plan):
        if plan.homes[experts[0]] is not Home.CACHED:
            continue
        used = distinct(len(experts), k, tokens)
        each = tokens * k / used
        n = max(1, round(used))
        slots = round(n * here)
        kept = experts[0] in ram.pinned
        in_ram = n if kept else round(n * min(1.0, ram.slots / max(1, cached)))
        spec = plan.blocks[experts[0]]
        places = [Place.SLOT] * slots + [Place.RAM] * max(0, in_ram - slots)
        places += [Place.DISK] * (n - len(places))
        jobs = [
            Job(b, max(1, round(each)), p, spec.nbytes)
            for b, p in zip(experts, places, strict=False)
        ]
        found.append((spec, times * used / n * len(split(jobs, costs).cpu), each))
    return found


def compute_seconds(plan: Plan, costs: CostModel, tokens: float = 1.0) -> float:
    """Seconds that one pass computes."""
    busy_s = sum(map(dense_seconds(plan, costs, tokens), plan.trace))
    for block_ids, k, times in _routing(plan):
        used = distinct(len(block_ids), k, tokens)
        each = tokens * k / used
        # One price per size: experts of a layer have the same tensors almost always.
        by_size = {plan.blocks[b].nbytes: plan.blocks[b] for b in block_ids}
        price = {n: costs.expert_s(spec, each) for n, spec in by_size.items()}
        mean_s = sum(price[plan.blocks[b].nbytes] for b in block_ids) / len(block_ids)
        busy_s += times * used * mean_s
    return busy_s


def dense_seconds(plan: Plan, costs: CostModel, tokens: float) -> Callable[[Step], float]:
    """What the compute tier takes for a step without its experts, as a function."""
    overhead, aside = plan.overhead_s, plan.by_row | plan.computed_in_ram(tokens)

    def seconds(step: Step) -> float:
        specs = [plan.blocks[b] for b in dict.fromkeys(step.blocks) if b not in aside]
        extra = overhead if isinstance(overhead, (int, float)) else overhead.get(step.unit, 0.0)
        return costs.step_s(specs, tokens=tokens, overhead_s=extra)

    return seconds


def host_seconds(plan: Plan, costs: CostModel, tokens: float) -> Callable[[Step], float]:
    """What the CPU takes for the blocks of a step that it computes beside the device."""
    in_ram = plan.computed_in_ram(tokens)

    def seconds(step: Step) -> float:
        blocks = (plan.blocks[b] for b in dict.fromkeys(step.blocks) if b in in_ram)
        return sum(host_product_s(spec, costs, tokens) for spec in blocks)

    return seconds


def host_product_s(spec: BlockSpec, costs: CostModel, tokens: float = 1.0) -> float:
    """A dense block that the CPU computes where it lies in RAM: the products, and for each of its
    matrices a hidden state that goes down and one that comes up."""
    # A packed matrix is just bytes.
    matrices = sum(len(t.shape) > 1 or t.dtype == "uint8" for t in spec.tensors)
    each_s = costs.product_overhead_s
    if each_s is None:
        each_s = PRODUCT_S + 2 * costs.copy_latency_s
    return costs.beside_card().weights_s((spec,), tokens) + matrices * each_s


def _routing(plan: Plan) -> list[tuple[list[str], int, int]]:
    """(experts, top_k, runs per pass) of each group that the trace runs."""
    runs = Counter(step.group for step in plan.trace if step.group)
    groups = experts_of(plan) if runs else {}
    return [(groups[g], plan.top_k[g], n) for g, n in runs.items()]
