"""A layer's attention for one token over keys and values in 8 or 4 bits.

The kernels are those of blocks (``block_bodies.py``): full parts first, then the tail in float32,
merged in that order. They stand between the parts of ``AttentionHalf`` that know matrices.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from offload.cpu_ops import threads
from offload.cpu_ops.block_attention import EVEN, block_plan
from offload.cpu_ops.block_bodies import Attend
from offload.cpu_ops.block_layout import PART, BlockLayout
from offload.cpu_ops.decode import AttentionHalf, Scratch
from offload.cpu_ops.entries import Entry
from offload.cpu_ops.isa import Isa
from offload.cpu_ops.kernels import address_of
from offload.cpu_ops.kv_cache import KvCache, aligned
from offload.cpu_ops.kv_quantised import QuantisedKv, tail_layout
from offload.cpu_ops.layer_bodies import Attention
from offload.cpu_ops.layer_plan import AttentionPlan
from offload.cpu_ops.program import Step
from offload.cpu_ops.rope import Rope
from offload.cpu_ops.threads import Arguments


class Seen(NamedTuple):
    """Tokens of a sequence that its next ones see, in full parts: ``first`` .. ``last`` - 1 of
    those, then the tail, which begins behind ``done`` tokens."""

    first: int
    last: int
    done: int

    @classmethod
    def of(cls, done: int, length: int, window: int) -> Seen:
        """By tokens behind ``length`` others; ``window``: 0: all."""
        last = done // PART
        start = max(0, length + 1 - window) if window else 0
        return cls(min(start // PART, last), last, done)


class Over:
    """A kernel's attention over one layout, of ``rows`` rows per key head of ``batch`` sequences.

    What its arguments point to is here: nothing but weights, queries and states is the caller's.
    """

    def __init__(
        self, plan: AttentionPlan, layout: BlockLayout, rows: int, batch: int, isa: Isa
    ) -> None:
        group = plan.heads // plan.key_heads
        made = block_plan(layout, batch, rows, group, False, isa)
        self.entry: Entry = made.entry
        self.heads, self.parts, self.batch = plan.key_heads, layout.parts, batch
        self.a: Arguments = aligned((Attend.SIZE,), np.int64)
        self.a[:] = made.arguments
        self._table = np.zeros((batch, 3), np.int64)
        self._ranges = np.zeros((batch, 3), np.int64)
        self._firsts = np.zeros(batch, np.int64)
        self._positions = np.zeros(batch, np.int64)
        a = self.a
        a[Attend.Q_ROW] = 4 * plan.dim
        a[Attend.TABLE], a[Attend.RANGES] = address_of(self._table), address_of(self._ranges)
        a[Attend.FIRSTS] = address_of(self._firsts)
        a[Attend.POSITIONS] = address_of(self._positions)
        scalars = np.array([plan.scaling, plan.softcap], np.float32).view(np.uint32)
        a[Attend.SCALE], a[Attend.CAP], a[Attend.WINDOW] = *scalars, plan.window

    def look(
        self, b: int, places: tuple[int, int], filled: int, first: int, last: int, start: int,
        position: int,
    ) -> None:  # fmt: skip
        """Sequence ``b`` has ``filled`` tokens at addresses of keys and values, of which its rows
        see parts ``first`` .. ``last`` - 1, whose first token is its ``start``-th; its first query
        is at ``position``."""
        self._table[b] = *places, filled
        at = b * self.parts
        self._ranges[b] = at + first, at + last, start
        self._positions[b] = position

    def share(self, partials: int) -> None:
        """Split the parts of one sequence among threads if whole heads would leave some waiting;
        ``partials``: memory for their results, 0: whole heads anyway."""
        a, (first, last, _) = self.a, self._ranges[0]
        a[Attend.FIRST], a[Attend.COUNT] = first, last - first
        workers = threads.count()
        even = self.heads >= EVEN * workers * -(-self.heads // workers)
        a[Attend.PARTIALS] = 0 if even or self.batch > 1 else partials

    def run(self) -> None:
        a = self.a
        a[Attend.NEXT] = a[Attend.NEXT_FOLD] = 0
        threads.run(self.entry.call, self.entry.address, a)

    def step(self) -> Step:
        """As a program's step."""
        return Step(self.entry, self.a, self.a[Attend.NEXT :], self)


class QuantisedHalf(AttentionHalf):
    """``AttentionHalf`` over a ``QuantisedKv``."""

    cache: QuantisedKv

    def _arrange(self, made: dict[str, int]) -> None:
        plan, a, group = self.plan, self._a, self.plan.heads // self.plan.key_heads
        a[Attention.STATE] = made["state"]
        # The kernels of blocks scale scores themselves.
        a[Attention.SCALING] = np.float32(1.0).view(np.int32)
        self._parts_seen = Over(plan, self.cache.layout, group, 1, self._isa)
        self._tail_seen = Over(plan, tail_layout(plan.key_heads, plan.dim), group, 1, self._isa)
        self._partials = made["partials"]
        for over in (self._parts_seen, self._tail_seen):
            over.a[Attend.Q], over.a[Attend.STATE] = a[Attention.Q_OUT], made["state"]

    def _attend(self, a: Arguments) -> list[Step]:
        return [self._parts_seen.step(), self._tail_seen.step()]

    def begin(self, position: int | None) -> None:
        super().begin(position)
        cache, layer = self.cache, self.layer
        length, row = cache.length(layer), cache.row(layer)
        for a in self._all:
            a[Attention.LENGTH] = row
        seen = Seen.of(cache.done(layer), length, self.plan.window)
        parts, tail = self._parts_seen, self._tail_seen
        parts.look(
            0, cache.record(layer), seen.done, seen.first, seen.last, seen.first * PART, length
        )
        parts.share(self._partials)
        tail.look(0, cache.places(layer), row + 1, 0, 1, seen.done, length)
        tail.share(0)


def half_for(
    plan: AttentionPlan, rope: Rope, cache: KvCache, layer: int, scratch: Scratch,
    *, isa: str | None = None,
) -> AttentionHalf:  # fmt: skip
    """What attends over a cache of that kind. Raises as ``AttentionHalf``."""
    made = QuantisedHalf if isinstance(cache, QuantisedKv) else AttentionHalf
    return made(plan, rope, cache, layer, scratch, isa=isa)


__all__ = ["Over", "QuantisedHalf", "Seen", "half_for"]
