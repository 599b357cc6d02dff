"""Many tokens' attention over keys and values in 8 or 4 bits: a prompt's, or one of each sequence.

    T tokens, G key heads, R query heads per key head, D head size

A prompt's tokens go part by part, so that each sees its own part before it is rounded, as it does
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from offload.cpu_ops import threads
from offload.cpu_ops.block_attention import BlockAttention
from offload.cpu_ops.block_bodies import Attend, Finish, finish_entry
from offload.cpu_ops.block_kernels import EXTRA
from offload.cpu_ops.block_layout import PART, BlockKind, BlockLayout
from offload.cpu_ops.decode import AttentionHalf
from offload.cpu_ops.isa import choose
from offload.cpu_ops.kernels import Floats, address_of
from offload.cpu_ops.kv_cache import KvCache, KvType
from offload.cpu_ops.kv_quantised import QuantisedKv, tail_layout
from offload.cpu_ops.layer_bodies import Attention
from offload.cpu_ops.prompt import PromptAttention, Room, prompt_entry
from offload.cpu_ops.quantised_half import Over, QuantisedHalf, Seen


class _Sequence(NamedTuple):
    """One that tokens belong to, with those that are cached before them."""

    cache: QuantisedKv
    length: int


class QuantisedPrompt(PromptAttention):
    """``PromptAttention`` of a ``QuantisedHalf``."""

    _half: QuantisedHalf

    def _arrange(self, kind: KvType) -> None:
        self._heads = prompt_entry("heads", KvType.F32.value)
        self._chosen = choose(self._isa)

    def _attention(
        self, q: Floats, k: Floats, v: Floats, room: Room, caches: Sequence[KvCache] | None
    ) -> None:
        if caches is None:
            self._prompt(q, k, v, room)
            return
        plan, n = self._half.plan, len(q)
        self._store(q, k, v)
        queries = room.floats("queries", n, plan.q.rows)
        shape = n, plan.key_heads, plan.heads // plan.key_heads, plan.dim
        by_head = queries.reshape(shape[1], n, *shape[2:])
        q.reshape(shape)[...] = by_head.swapaxes(0, 1)
        layer = self._half.layer
        rows = [_Sequence(c, c.length(layer)) for c in caches if isinstance(c, QuantisedKv)]
        out = room.floats("attended", n, plan.q.rows)
        self._over(q, rows, 1, room, out)
        q[...] = out

    def _prompt(self, q: Floats, k: Floats, v: Floats, room: Room) -> None:
        half, a = self._half, self._a
        plan, cache, layer = half.plan, half.cache, half.layer
        first, at, last = cache.length(layer) == 0, 0, None
        while at < len(q):
            n = min(cache.at_once(layer), len(q) - at)
            some = slice(at, at + n)
            a[Attention.LENGTH] = cache.row(layer)
            self._store(q[some], k[some], v[some], at)
            queries = room.floats("queries", n, plan.q.rows)
            out = room.floats("attended", n, plan.q.rows)
            self._over(queries, [_Sequence(cache, cache.length(layer))], n, room, out)
            torch.from_numpy(q[some].reshape(n, plan.heads, plan.dim)).copy_(
                torch.from_numpy(out.reshape(plan.heads, n, plan.dim)).transpose(0, 1)
            )
            cache.advance(layer, n)
            at += n
            last = queries.reshape(plan.key_heads, n, -1)[:, -1]
        if first and last is not None and cache.done(layer):
            self._measure(last, k, v)

    def _over(
        self, q: Floats, sequences: Sequence[_Sequence], n: int, room: Room, out: Floats
    ) -> None:
        """Attention of ``n`` queries of each sequence, rows as the kernels of blocks take them, to
        ``out`` as ``Finish.OUT``; their keys and values are stored."""
        half, batch = self._half, len(sequences)
        plan, layer, window = half.plan, half.layer, half.plan.window
        rows = n * (plan.heads // plan.key_heads)
        states = room.floats("states", batch * plan.key_heads * rows, plan.dim + EXTRA)
        states.fill(0)
        states[:, plan.dim] = -np.inf
        parts = Over(plan, half.cache.layout, rows, batch, self._chosen)
        tails = Over(plan, tail_layout(plan.key_heads, plan.dim), rows, batch, self._chosen)
        for b, (cache, length) in enumerate(sequences):
            seen = Seen.of(cache.done(layer), length, window)
            first = seen.first * PART
            parts.look(b, cache.record(layer), seen.done, seen.first, seen.last, first, length)
            tails.look(b, cache.places(layer), length - seen.done + n, 0, 1, seen.done, length)
        for over in (parts, tails):
            over.a[Attend.Q], over.a[Attend.STATE] = address_of(q), address_of(states)
            over.share(0)
            over.run()
        a = np.zeros(Finish.SIZE, np.int64)
        a[Finish.STATE], a[Finish.OUT] = address_of(states), address_of(out)
        a[Finish.SINKS] = self._a[Attention.SINKS]
        a[Finish.BATCH], a[Finish.KEY_HEADS] = batch, plan.key_heads
        a[Finish.ROWS], a[Finish.GROUP], a[Finish.DIM] = rows, rows // n, plan.dim
        entry = finish_entry()
        threads.run(entry.call, entry.address, a)

    def _measure(self, last: Floats, k: Floats, v: Floats) -> None:
        """What rounding costs the last of a prompt's first tokens, whose keys and values are still
        there: its queries [heads, D], sinks aside."""
        plan, cache, layer, n = self._half.plan, self._half.cache, self._half.layer, len(k)
        done, found = cache.done(layer), []
        if not done:  # none of them is rounded yet
            return
        for rounded in (True, False):
            one = BlockAttention(
                last.reshape(1, plan.heads, 1, plan.dim), key_heads=plan.key_heads, dim=plan.dim,
                positions=[n - 1], scale=plan.scaling, cap=plan.softcap, window=plan.window,
                isa=self._isa,
            )  # fmt: skip
            if rounded:
                one.add(cache.layout, [np.array([(*cache.record(layer), done)], np.int64)])
            first = done if rounded else 0
            if first < n:
                layout, block = _as_block(k[first:], v[first:], plan.key_heads, plan.dim)
                at = address_of(block)
                one.add(layout, [np.array([(at, at + layout.values_at, n - first)], np.int64)])
            found.append(one.result())
        off = float(np.abs(found[0] - found[1]).max())
        cache.note_error(layer, off / max(float(np.abs(found[1]).max()), 1e-30))


def _as_block(
    k: Floats, v: Floats, heads: int, dim: int
) -> tuple[BlockLayout, npt.NDArray[np.uint8]]:
    """Keys and values [n, G * D] as one block in float32."""
    n = len(k)
    layout = BlockLayout(BlockKind.F32, heads, dim, dim, -(-n // PART) * PART)
    block = np.zeros(layout.nbytes, np.uint8)
    for x, keys in ((k, True), (v, False)):
        layout.plain(block, keys=keys)[:, :n] = x.reshape(n, heads, dim).swapaxes(0, 1)
    return layout, block


def prompt_for(
    half: AttentionHalf, *, alone: bool = False, isa: str | None = None
) -> PromptAttention:
    """For many tokens what ``half`` is for one."""
    made = QuantisedPrompt if isinstance(half, QuantisedHalf) else PromptAttention
    return made(half, alone=alone, isa=isa)


__all__ = ["QuantisedPrompt", "prompt_for"]
