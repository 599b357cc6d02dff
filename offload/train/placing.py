"""From budgets to a placement: what stays in RAM, and what streams.

Pure: numbers in, numbers out. What a step must have at hand comes first (``Least``); what is left
of the budget goes to where each byte saves most traffic with the disk (``Filling``).
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

from offload.blocks import align_up
from offload.errors import PlanError
from offload.models.workspace import growth
from offload.train.layout import TrainLayout
from offload.train.opening import CHUNK_BYTES, STAGING_CHUNKS, Placement
from offload.train.plan import (
    FREED,
    LEAVING,
    Needs,
    TrainPlan,
    grad_bytes,
    slack_bytes,
    slot_bytes,
    traffic,
)
from offload.units import format_bytes

MOST_BUFFERS, LEAST_BUFFERS = 8, 2
DRIFT = 16 << 20
"""What Python and the data weigh differs by so much from process to process. On a machine that is
busy with other things 25 to 34 MiB were found of the same run."""


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
    in_backward = not clipping and backwards == 1
    least = Least.of(layout, needs, always, slack=slack_bytes(budget), in_backward=in_backward)
    buffers = least.buffers(budget)
    if least.total(buffers) > budget:
        raise too_small(least, budget, trained=bool(needs.routing.shares))
    filling = Filling(least, budget - least.total(buffers))
    if first == "states":
        filling.states_with_weights()
    filling.gradients()
    filling.weights()
    filling.states()
    ram = least.fixed(buffers, filling.leaving)
    ram["weights that stay"] = filling.weights_bytes
    ram["weights that come and go"] = ring = least.ring + max(0, filling.left)
    if not in_backward:
        ram["gradients"] = sum(least.grads[b] for b in filling.in_ram)
    ram["states that stay"] = filling.states_bytes
    spilled = frozenset(least.grads.keys() - filling.in_ram)
    placement = Placement(
        weights_bytes=ring + filling.weights_bytes,
        pinned=frozenset(filling.pinned),
        resident=frozenset(filling.resident),
        spilled=spilled,
        buffers=buffers,
        gradient_bytes=filling.leaving if in_backward else None,
        freed_bytes=needs.fixed.get(FREED, 0),
    )
    phases = traffic(layout, needs, placement, clipping=clipping, backwards=backwards)
    return TrainPlan(
        budget=budget,
        placement=placement,
        ram={k: v for k, v in ram.items() if v},
        disk_bytes=sum(slot_bytes(layout, needs, b.index) for b in layout.trained) * versions,
        versions=versions,
        spill_bytes=sum(align_up(least.grads[b]) for b in spilled),
        phases=phases,
    )


@dataclass(frozen=True, kw_only=True)
class Least:
    """What a step takes at least, in bytes: every block comes and goes that may.

    Attributes:
        in_backward: updates run inside backward, so that gradients are gone at once.
        pinned: blocks that stay whatever it costs; resident: of them, those with states.
        grads: trained block -> bytes of its gradients.
        by_rows: blocks whose gradients are kept by rows, and never spilled: they are small, and a
            tile's are made when it is updated.
        ring: weights of the unit that computes, and an update's block beside it.
        leaving: gradients of a unit that are there before they are spilled.
        slot, tile: the largest ones.
        slack: as of ``slack_bytes``.
    """

    layout: TrainLayout
    needs: Needs
    in_backward: bool
    pinned: frozenset[int]
    resident: frozenset[int]
    grads: dict[int, int]
    by_rows: frozenset[int]
    ring: int
    leaving: int
    slot: int
    tile: int
    slack: int

    @classmethod
    def of(
        cls, layout: TrainLayout, needs: Needs, always: frozenset[int], *, slack: int,
        in_backward: bool,
    ) -> Least:  # fmt: skip
        blocks = layout.blocks
        pinned = frozenset(layout.rest) | always
        trained = [b.index for b in layout.trained]
        grads = {b: grad_bytes(layout, needs, b) for b in trained}
        tile = max((t.count for t in layout.tiles), default=0) * 4

        def moving(unit: int) -> int:
            return sum(blocks[b].nbytes for b in layout.units[unit].blocks if b not in pinned)

        def parting(b: int) -> int:
            """Of a block's gradients, what is in RAM before it is spilled."""
            whole = grads.get(b, 0)
            slices = not in_backward and any(p.param in needs.sliced for p in blocks[b].pieces)
            return min(whole, 2 * tile) if slices else whole

        computing = max((moving(u.index) for u in layout.units), default=0) + needs.fetched_bytes
        updated = max((b.nbytes for b in blocks if b.index not in pinned), default=0)
        leaving = [
            sum(map(parting, itertools.chain(u.blocks, *u.experts.values()))) for u in layout.units
        ]
        slots = [needs.kinds[blocks[t.block].dtype].offsets(t.count)[-1] for t in layout.tiles]
        return cls(
            layout=layout, needs=needs, in_backward=in_backward, pinned=pinned,
            resident=frozenset(b for b in always if blocks[b].trained), grads=grads,
            by_rows=frozenset(
                b for b in trained if any(p.param in needs.rows for p in blocks[b].pieces)
            ),
            ring=computing + updated, leaving=max(leaving, default=0),
            slot=max(slots, default=0), tile=tile, slack=slack,
        )  # fmt: skip

    @functools.cached_property
    def blocks_bytes(self) -> int:
        """Of weights, states and gradients."""
        kept = (self.pinned | self.by_rows) & self.grads.keys()
        weights = sum(self.layout.blocks[b].nbytes for b in self.pinned)
        states = sum(slot_bytes(self.layout, self.needs, b) for b in self.resident)
        return self.ring + weights + states + sum(self.grads[b] for b in kept)

    def fixed(self, buffers: int, leaving: int) -> dict[str, int]:
        """What is no block's for good, by name; ``buffers``: tiles of states under way."""
        out = dict(self.needs.fixed)
        out["I/O staging"] = STAGING_CHUNKS * CHUNK_BYTES
        out["states under way"] = buffers * (self.slot + align_up(self.tile))
        out["gradients spilling"] = 3 * align_up(self.tile)
        out[LEAVING] = leaving
        if self.needs.rows:
            out["rows of a tile"] = align_up(self.tile)
        out["slack"] = self.slack
        return out

    def total(self, buffers: int) -> int:
        return sum(self.fixed(buffers, self.leaving).values()) + self.blocks_bytes

    def buffers(self, budget: int) -> int:
        """Tiles of states under way: as many as leave an eighth of the budget to blocks."""
        buffers = MOST_BUFFERS
        while buffers > LEAST_BUFFERS and self.total(buffers) > budget - budget // 8:
            buffers -= 1
        return buffers


def too_small(least: Least, budget: int, *, trained: bool) -> PlanError:
    """What to say where not even the least fits. ``trained``: as of ``growth``."""
    buffers = LEAST_BUFFERS
    parts = {**least.fixed(buffers, least.leaving), "weights": least.blocks_bytes}
    largest = sorted(parts.items(), key=lambda item: -item[1])[:4]
    names = ", ".join(f"{format_bytes(v)} {k}" for k, v in largest)
    without, slack = least.total(buffers) - least.slack, least.slack
    # Slack grows with the budget.
    while without + slack < (need := without + slack_bytes(without + slack)):
        slack = need - without
    told = need + DRIFT + growth(budget, need, trained=trained)
    return PlanError(
        f"--ram {format_bytes(budget)} is too small by {format_bytes(need - budget)}: a step "
        f"needs {format_bytes(need)} ({names}); raise it to "
        f"{-(-told // 2**20)}MiB, or lower --seq-len or --batch-size"
    )


class Filling:
    """Gives away what is left of a budget, in the order in which its methods are called."""

    def __init__(self, least: Least, left: int) -> None:
        layout = least.layout
        self._least, self._blocks = least, layout.blocks
        self.left = left
        """Bytes."""
        self.leaving = least.leaving
        """Bytes of gradients that wait to be spilled."""
        self.pinned, self.resident = set(least.pinned), set(least.resident)
        self.in_ram = {b for b in least.grads if b in least.pinned or b in least.by_rows}
        """Blocks whose gradients stay until they are used."""
        if least.in_backward:
            # The engine waits where more than a unit's are there at a time.
            self.in_ram.update(least.grads)
        self._order = [b for b in _spread(layout) if b not in least.pinned]
        # States and gradients by when forward uses their weights: what is updated first is there
        # at once, and the disk begins with what comes behind it while the first units run.
        self._by_use = sorted(self._order, key=lambda b: (min(layout.users[b], default=0), b))

    @property
    def weights_bytes(self) -> int:
        return sum(self._blocks[b].nbytes for b in self.pinned)

    @property
    def states_bytes(self) -> int:
        return sum(map(self._slots, self.resident))

    def states_with_weights(self) -> None:
        """Trained blocks, weights and states together."""
        for b in self._by_use:
            # Frozen: there are no states, nor a kind of them for its dtype.
            if self._blocks[b].trained and self._takes(self._blocks[b].nbytes + self._slots(b)):
                self.pinned.add(b)
                self.resident.add(b)

    def gradients(self) -> None:
        """All of them, in the room of those that leave, or as many as there is room for."""
        grads = self._least.grads
        outside = [b for b in self._by_use if b in grads and b not in self.in_ram]
        whole = sum(grads[b] for b in outside)
        if not self._least.in_backward and whole <= self.left + self.leaving:
            self.in_ram.update(outside)
            self.left += self.leaving - whole
            self.leaving = 0  # nothing waits to be spilled
            return
        for b in outside:
            if self._takes(grads[b]):
                self.in_ram.add(b)

    def weights(self) -> None:
        for b in self._order:
            if b not in self.pinned and self._takes(self._blocks[b].nbytes):
                self.pinned.add(b)

    def states(self) -> None:
        """Of trained blocks that stay."""
        for b in self._by_use:
            lacking = b in self.pinned and b not in self.resident and self._blocks[b].trained
            if lacking and self._takes(self._slots(b)):
                self.resident.add(b)

    def _takes(self, nbytes: int) -> bool:
        """Whether there is room, which is taken."""
        if nbytes > self.left:
            return False
        self.left -= nbytes
        return True

    def _slots(self, block: int) -> int:
        return slot_bytes(self._least.layout, self._least.needs, block)


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


__all__ = ["DRIFT", "LEAST_BUFFERS", "MOST_BUFFERS", "make_plan"]
