"""From budgets to a placement: what stays in RAM, what streams, and how long a step will take.

Pure: numbers in, numbers out. What a step must have at hand comes first (``Needs``); what is left
of the budget goes to where each byte saves most traffic with the disk.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from offload.blocks import DTYPE_BYTES, align_up
from offload.errors import PlanError
from offload.models.workspace import growth
from offload.runtime.heap import LARGE_BYTES
from offload.train.layout import TrainLayout
from offload.train.opening import CHUNK_BYTES, STAGING_CHUNKS, Placement
from offload.train.reading import Routing, unit_reads
from offload.train.tiles import SlotKind
from offload.units import format_bytes

MOST_BUFFERS, LEAST_BUFFERS = 8, 2
SLACK_SHARE = 32
"""Of the budget, kept free for what no one counts (at least ``LEAST_SLACK``)."""
LEAST_SLACK, MOST_SLACK = 24 << 20, 256 << 20
WORKING = "activations of a unit"
LOSS = "loss"
LEAVING = "gradients of a unit, to be spilled"
FREED = "freed blocks for the next unit"
"""The name of ``Placement.freed_bytes`` in a plan."""
FREED_SHARE = 8
DRIFT = 16 << 20
"""What Python and the data weigh differs by so much from process to process. On a machine that is
busy with other things 25 to 34 MiB were found of the same run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a run needs in RAM whatever is placed where, in bytes by name."""

    fixed: Mapping[str, int]
    kinds: Mapping[str, SlotKind]
    """Slots by the dtype of weights."""
    grad_dtype: str | None
    """In which gradients are summed; None: in their weights'."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """Parameters whose gradients are kept by rows, and in RAM -> bytes of them at most."""
    sliced: frozenset[str] = frozenset()
    """Parameters whose gradients leave by slices where they are spilled."""
    fetched_bytes: int = 0
    """Of fused experts that a unit needs beside its own weights: two at a time."""
    updated: Mapping[int, float] = field(default_factory=dict)
    """Block -> share of the steps that update it, where that is not all of them."""
    routing: Routing = field(default_factory=Routing)
    """Which experts are read."""
    copies: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """Block -> times that it goes to a device in a step's forward and backward, if its unit runs
    there: RAM needs it for that only (``link.Link.copies``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlan:
    """A placement, and what it means."""

    budget: int
    placement: Placement
    ram: Mapping[str, int]
    """Bytes of RAM by what they are for."""
    disk_bytes: int
    """Of states on the disk, retained commits included."""
    spill_bytes: int
    phases: Mapping[str, tuple[int, int]]
    """Phase -> bytes read from and written to the disk in a step, by the homes of blocks."""
    versions: int = 1
    """How often states are on the disk: what changes, and what commits keep meanwhile."""
    inputs_bytes: int = 0
    """Of the file that inputs kept for backward are spilled to."""
    inputs_moved: int = 0
    """Of inputs that a step writes there, and reads again."""
    inputs_text: str = ""
    """What became of them, and why."""
    link: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Phase -> bytes copied to the device and back in a step; empty: there is none."""
    notes: tuple[str, ...] = field(default=())

    @property
    def read_bytes(self) -> int:
        """From the disk, each step."""
        return sum(read for read, _ in self.phases.values())

    @property
    def written_bytes(self) -> int:
        return sum(written for _, written in self.phases.values())

    @property
    def up_bytes(self) -> int:
        """To the device, each step."""
        return sum(up for up, _ in self.link.values())

    @property
    def down_bytes(self) -> int:
        return sum(down for _, down in self.link.values())

    @property
    def ram_bytes(self) -> int:
        return sum(self.ram.values())

    @property
    def limit(self) -> int:
        """Of the budget, what the run knows how to spend."""
        return self.budget - self.ram["slack"]

    @property
    def ahead(self) -> int:
        """What a unit that computes in RAM takes at most beside what is there before it."""
        if self.placement.device is not None:
            return 0
        return sum(self.ram.get(name, 0) for name in (WORKING, LOSS, LEAVING))


def slack_bytes(budget: int) -> int:
    """What is kept free of a budget."""
    return min(MOST_SLACK, max(LEAST_SLACK, budget // SLACK_SHARE))


def freed_bytes(working: int, loss: int) -> int:
    """Bytes of freed blocks that are worth keeping from unit to unit, where activations of one take
    ``working`` and the loss ``loss``: as much again as the larger. A unit finds few of its blocks
    again at worst (a layer of 2,048 tokens peaked at 1.2 to 1.6 times what was in use). 0: there
    are none that would leave."""
    most = max(working, loss)
    return most if most > LARGE_BYTES else 0


def affordable(freed: int, budget: int) -> bool:
    """Whether to keep ``freed`` bytes of freed blocks where nobody has rates: an eighth or less of
    the budget, whose reading again takes less than the page faults do."""
    return FREED_SHARE * freed <= budget


def slot_bytes(layout: TrainLayout, needs: Needs, block: int) -> int:
    """Bytes of the slots of a block's tiles."""
    spec = layout.blocks[block]
    kind = needs.kinds[spec.dtype]
    return sum(kind.offsets(layout.tiles[t].count)[-1] for t in spec.tiles)


def grad_bytes(layout: TrainLayout, needs: Needs, block: int) -> int:
    spec = layout.blocks[block]
    size = DTYPE_BYTES[needs.grad_dtype or spec.dtype]
    return sum(needs.rows.get(p.param, p.count * size) for p in spec.pieces)


ORDERS = ("weights", "states")
"""What is given RAM first: see ``make_plan``."""


def make_plan(
    layout: TrainLayout, needs: Needs, budget: int, *, versions: int, clipping: bool,
    backwards: int = 1, always: frozenset[int] = frozenset(), first: str = "weights",
) -> TrainPlan:  # fmt: skip
    """Place everything under ``budget`` bytes.

    ``versions``: how often states are on the disk. ``backwards``: times that weights move forward
    and backward in a step. ``always``: blocks whose weights and states stay in RAM whatever it
    costs (adapters).

    ``first``: what gets RAM first. A byte of "weights" (or gradients) saves most traffic of the
    whole step; a byte of "states" saves most of the phase that updates run in, which is what counts
    where the other phase waits for computing anyway. Whoever has rates tries both.

    Raises:
        PlanError: it does not fit; says by how much, and what to change.
    """
    blocks = layout.blocks
    pinned = frozenset(layout.rest) | always
    resident = frozenset(b for b in always if blocks[b].trained)
    largest_slot = max(
        (needs.kinds[blocks[t.block].dtype].offsets(t.count)[-1] for t in layout.tiles), default=0
    )
    largest_tile = max((t.count for t in layout.tiles), default=0) * 4

    def unit_bytes(u: int) -> int:
        return sum(blocks[b].nbytes for b in layout.units[u].blocks if b not in pinned)

    ring_least = max((unit_bytes(u.index) for u in layout.units), default=0) + needs.fetched_bytes
    most = max((b.nbytes for b in blocks if b.index not in pinned), default=0)
    ring_least += most  # an update's block, beside the unit that computes
    trained = [b.index for b in layout.trained]
    grads = {b: grad_bytes(layout, needs, b) for b in trained}
    in_backward = not clipping and backwards == 1

    def parting(b: int) -> int:
        """Of a block's gradients, what is in RAM before it is spilled."""
        whole = grads.get(b, 0)
        slices = not in_backward and any(p.param in needs.sliced for p in blocks[b].pieces)
        return min(whole, 2 * largest_tile) if slices else whole

    under_way = max(
        (
            sum(parting(b) for b in itertools.chain(u.blocks, *u.experts.values()))
            for u in layout.units
        ),
        default=0,
    )
    # Gradients by rows are never spilled: they are small, and a tile's are made when it is updated.
    by_rows = {b for b in trained if any(p.param in needs.rows for p in blocks[b].pieces)}
    kept_grads = sum(grads[b] for b in {*pinned, *by_rows} if b in grads)
    slack = slack_bytes(budget)

    def fixed(buffers: int) -> dict[str, int]:
        out = dict(needs.fixed)
        out["I/O staging"] = STAGING_CHUNKS * CHUNK_BYTES
        out["states under way"] = buffers * (largest_slot + align_up(largest_tile))
        out["gradients spilling"] = 3 * align_up(largest_tile)
        out[LEAVING] = under_way
        if needs.rows:
            out["rows of a tile"] = align_up(largest_tile)
        out["slack"] = slack
        return out

    pinned_bytes = sum(blocks[b].nbytes for b in pinned)
    states_bytes = sum(slot_bytes(layout, needs, b) for b in resident)

    def total(buffers: int) -> int:
        return sum(fixed(buffers).values()) + ring_least + pinned_bytes + states_bytes + kept_grads

    buffers = MOST_BUFFERS
    while buffers > LEAST_BUFFERS and total(buffers) > budget - budget // 8:
        buffers -= 1
    if total(buffers) > budget:
        parts = {**fixed(buffers), "weights": ring_least + pinned_bytes + states_bytes + kept_grads}
        names = ", ".join(
            f"{format_bytes(v)} {k}"
            for k, v in sorted(parts.items(), key=lambda item: -item[1])[:4]
        )
        least = total(buffers) - slack
        while least + slack < (need := least + slack_bytes(least + slack)):
            slack = need - least
        told = need + DRIFT + growth(budget, need, trained=bool(needs.routing.shares))
        raise PlanError(
            f"--ram {format_bytes(budget)} is too small by {format_bytes(need - budget)}: a step "
            f"needs {format_bytes(need)} ({names}); raise it to "
            f"{-(-told // 2**20)}MiB, or lower --seq-len or --batch-size"
        )
    left = budget - total(buffers)
    pinned_now, resident_now = set(pinned), set(resident)
    in_ram: set[int] = {b for b in trained if b in pinned or b in by_rows}
    order = [b for b in _spread(layout) if b not in pinned]
    if in_backward:
        in_ram.update(trained)  # the engine waits where more than a unit's are there at a time
    # States and gradients by when forward uses their weights: what is updated first is there at
    # once, and the disk begins with what comes behind it while the first units run.
    by_use = sorted(order, key=lambda b: (min(layout.users[b], default=0), b))
    outside = [b for b in by_use if b in grads and b not in in_ram]
    weights_extra = 0
    if first == "states":
        for b in by_use:
            if not blocks[b].trained:
                continue  # frozen: there are no states, nor a kind of them for its dtype
            size = blocks[b].nbytes + slot_bytes(layout, needs, b)
            if size <= left:
                pinned_now.add(b)
                resident_now.add(b)
                weights_extra += blocks[b].nbytes
                left -= size
    if not in_backward and sum(grads[b] for b in outside) <= left + under_way:
        in_ram.update(outside)
        left += under_way - sum(grads[b] for b in outside)
        under_way = 0  # nothing waits to be spilled
    for b in outside:
        if b not in in_ram and grads[b] <= left:
            in_ram.add(b)
            left -= grads[b]
    for b in order:
        if b not in pinned_now and blocks[b].nbytes <= left:
            pinned_now.add(b)
            left -= blocks[b].nbytes
            weights_extra += blocks[b].nbytes
    for b in by_use:
        size = slot_bytes(layout, needs, b) if blocks[b].trained else 0
        if b in pinned_now - resident_now and blocks[b].trained and size <= left:
            resident_now.add(b)
            left -= size
    states_extra = sum(slot_bytes(layout, needs, b) for b in resident_now - resident)
    ring = ring_least + max(0, left)
    ram = fixed(buffers)
    ram["weights that stay"] = pinned_bytes + weights_extra
    ram["weights that come and go"] = ring
    if clipping or backwards > 1:
        ram["gradients"] = sum(grads[b] for b in in_ram)
    ram["states that stay"] = states_bytes + states_extra
    spilled = frozenset(b for b in trained if b not in in_ram)
    placement = Placement(
        weights_bytes=ring + pinned_bytes + weights_extra,
        pinned=frozenset(pinned_now),
        resident=frozenset(resident_now),
        spilled=spilled,
        buffers=buffers,
        gradient_bytes=under_way if in_backward else None,
        freed_bytes=needs.fixed.get(FREED, 0),
    )
    phases = traffic(layout, needs, placement, clipping=clipping, backwards=backwards)
    return TrainPlan(
        budget=budget,
        placement=placement,
        ram={k: v for k, v in ram.items() if v},
        disk_bytes=sum(slot_bytes(layout, needs, b) for b in trained) * versions,
        versions=versions,
        spill_bytes=sum(align_up(grads[b]) for b in spilled),
        phases=phases,
    )


def _spread(layout: TrainLayout) -> list[int]:
    """All blocks, in an order whose every beginning is spread over the model: so that each stretch
    of compute has something to read, and something that is there."""
    order, n = [], len(layout.blocks)
    step = 1
    while step < n:
        step *= 2
    seen: set[int] = set()
    while step >= 1:
        for i in range(0, n, step):
            if i not in seen:
                seen.add(i)
                order.append(i)
        step //= 2
    return order


def traffic(
    layout: TrainLayout, needs: Needs, placement: Placement, *, clipping: bool, backwards: int
) -> dict[str, tuple[int, int]]:
    """Phase -> (bytes read, bytes written) of the disk in a step.

    Deferred updates run under forward and leave behind what it computes with; without clipping
    updates run inside backward, and forward reads its weights.
    """
    states_read = states_written = spilled = 0.0
    for block in layout.blocks:
        b = block.index
        if not block.trained:
            continue
        copy = block.nbytes if needs.kinds[block.dtype].first_state else 0
        share = needs.updated.get(b, 1.0)
        if b not in placement.resident:
            states = slot_bytes(layout, needs, b)
            states_read += share * (states - copy)
            states_written += share * (states - (copy if b in placement.pinned else 0))
        if b in placement.spilled:
            spilled += share * grad_bytes(layout, needs, b)
    weights = unit_reads(
        layout, placement, needs.routing, needs.copies, clipping=clipping, backwards=backwards
    )
    reads = dict(zip(("forward", "backward"), weights.sums(), strict=True))
    update = "forward" if clipping else "backward"
    reads[update] += states_read + spilled
    writes = {"forward": 0.0, "backward": spilled}
    writes[update] += states_written
    return {phase: (round(reads[phase]), round(writes[phase])) for phase in writes}
