"""What there is to place: the planner's question, and the facts about it that do not depend on
the budgets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from offload.blocks import BlockSpec, Tier
from offload.scheduler.costs import CostModel
from offload.scheduler.policy import DEFAULT, NAMES
from offload.scheduler.trace import Trace

MIN_LOOKAHEAD = 8 * 2**20
"""Bytes ahead of compute that keep several disk requests of the usual size in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The question that a plan answers.

    Attributes:
        blocks: everything that needs a home, by id.
        trace: every weight step in order with all its weight blocks, pinned or not.
        experts: the blocks that a group (a MoE layer) may route to.
        top_k: how many of them one token uses.
        always: blocks that cannot be streamed: pinned in the compute tier.
        by_row: blocks that are only looked up (embeddings): read by row unless there is room
            for them after everything else.
        budgets: bytes that each tier may use, everything included.
        reserves: what of that is not weights, by name (KV, activations, logits, ...).
        compute_tier: RAM (two tiers) or DEVICE (three).
        costs: without them the plan is made by rule and predicts nothing.
        overhead_s: seconds of each step besides weights and I/O; for all units, or by unit.
        rows: tokens that a pass computes where many sequences decode beside each other: what is
            fastest is chosen for those. Predictions stay those of one.
        row_share: of ``overhead_s``, what each row after the first takes.
        guesses: whether a layer's experts may be read on a guess (see ``guesses``).
        expert_policy: what decides which expert leaves a slot (see ``policy``).
        hot: for the policy ``pinned``: experts, the most used first.
        split_rows: most tokens of a pass whose experts the CPU and the device share (see
            ``split``); 0: the compute tier has all of them.
        apart: dense blocks that the CPU may compute where they lie in RAM (see ``sites``), in
            passes of up to ``apart_rows`` tokens; 0: nobody asks for that.
        min_lookahead_bytes: a ring holds at least that much more than one step where the
            budget allows; capped by what is streamed at all.

    Raises:
        ValueError: the request contradicts itself (a bug of the caller).
    """

    blocks: Mapping[str, BlockSpec]
    trace: Trace
    budgets: Mapping[Tier, int]
    compute_tier: Tier = Tier.RAM
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    top_k: Mapping[str, int] = field(default_factory=dict)
    always: frozenset[str] = frozenset()
    by_row: frozenset[str] = frozenset()
    reserves: Mapping[Tier, Mapping[str, int]] = field(default_factory=dict)
    costs: CostModel | None = None
    overhead_s: float | Mapping[str, float] = 0.0
    rows: int = 1
    row_share: float = 1.0
    guesses: bool = False
    expert_policy: str = DEFAULT
    hot: tuple[str, ...] = ()
    split_rows: int = 0
    apart: frozenset[str] = frozenset()
    apart_rows: int = 0
    min_lookahead_bytes: int = MIN_LOOKAHEAD

    def __post_init__(self) -> None:
        if self.compute_tier == Tier.DISK:
            raise ValueError("nothing computes on disk")
        if lacking := [t.name for t in self.memory_tiers if t not in self.budgets]:
            raise ValueError(f"no budget for {', '.join(lacking)}")
        routed = [b for blocks in self.experts.values() for b in blocks]
        used = [b for step in self.trace for b in step.blocks]
        named = {*routed, *used, *self.always, *self.by_row, *self.apart}
        if unknown := sorted(named - self.blocks.keys()):
            raise ValueError(f"{len(unknown)} unknown blocks, first {unknown[0]!r}")
        if len(set(routed)) < len(routed) or not self.always.isdisjoint(routed):
            raise ValueError("an expert belongs to one group, and cannot be in `always`")
        if not set(routed).isdisjoint(used):
            raise ValueError("experts are routed to; they are not blocks of a step")
        for step in self.trace:
            if step.group and step.group not in self.experts:
                raise ValueError(f"step {step.unit} routes to unknown group {step.group!r}")
        if self.expert_policy not in NAMES or (self.hot and self.expert_policy != "pinned"):
            raise ValueError(f"policy {self.expert_policy!r} with {len(self.hot)} hot experts")
        if not set(self.hot) <= set(routed):
            raise ValueError("hot experts are experts")
        for group, blocks in self.experts.items():
            if not 1 <= self.top_k.get(group, 0) <= len(blocks):
                raise ValueError(f"group {group} needs a top_k between 1 and {len(blocks)}")

    @property
    def memory_tiers(self) -> tuple[Tier, ...]:
        """Tiers with an arena, from the lowest."""
        return (Tier.RAM,) if self.compute_tier == Tier.RAM else (Tier.RAM, Tier.DEVICE)

    def reserved(self, tier: Tier) -> int:
        """Bytes of the tier's budget that are not for weights."""
        return sum(self.reserves.get(tier, {}).values())


class Inventory:
    """A request, sorted by how its blocks may be placed. Sizes are slot sizes (whole pages)."""

    def __init__(self, request: PlanRequest) -> None:
        blocks, trace = request.blocks, request.trace
        self.size = {b: s.slot_nbytes for b, s in blocks.items()}
        self.always = [b for b in blocks if b in request.always]
        self.by_row = [b for b in blocks if b in request.by_row and b not in request.always]
        run = [s.group for s in trace if s.group]
        self.groups = tuple(dict.fromkeys([*run, *request.experts]))
        self.experts = [b for g in self.groups for b in request.experts[g]]
        fixed = {*self.always, *self.by_row, *self.experts}
        uses: dict[str, int] = {}
        for step in trace:
            for block in dict.fromkeys(step.blocks):
                if block not in fixed:
                    uses[block] = uses.get(block, 0) + 1
        # What the trace never uses is still asked for one day, each block by itself.
        off_trace = [b for b in blocks if b not in fixed and b not in uses]
        self.streamable = [*uses, *off_trace]
        """Dense blocks that may be pinned or streamed, in order of first use."""
        self.uses = uses
        """How often one pass uses each of them; nothing for those off the trace."""
        self.steps = [[b for b in dict.fromkeys(s.blocks) if b in uses] for s in trace]
        self.steps += [[b] for b in off_trace]
        order = dict.fromkeys([b for b, _ in trace.uses])
        self.load_order = {b: i for i, b in enumerate({**order, **dict.fromkeys(blocks)})}
        """Rank of every block: pinned ones are loaded in the order in which they are needed."""
        self.slot_bytes = self.largest(self.experts)
        self.top_k = max((request.top_k[g] for g in self.groups), default=0)
        self.per_token = sum(request.top_k[g] for g in run)
        """Expert uses of one token: the bytes of a cache that can hit at all, in slots."""

    def bytes(self, blocks: list[str]) -> int:
        """Room that the blocks take side by side."""
        return sum(self.size[b] for b in blocks)

    def largest(self, blocks: list[str]) -> int:
        """The size of the largest one, 0 for none."""
        return max((self.size[b] for b in blocks), default=0)

    def floor(self, pinned: set[str]) -> int:
        """The smallest ring of the compute tier: the largest step's blocks, side by side."""
        return max((sum(self.size[b] for b in s if b not in pinned) for s in self.steps), default=0)

    @property
    def least_slots(self) -> int:
        """One token's experts of a layer, and one arriving."""
        return min(self.top_k + 1, len(self.experts))
