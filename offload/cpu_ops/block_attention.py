"""Attention of queries over tables of blocks of keys and values, wherever in memory those lie.

    B sequences, Hq query heads, G key heads, n queries, Dk, Dv head sizes

The tokens of a sequence may be added in several goes, in ascending order: blocks that were read
into a small window of memory, then others in the same places; quantised blocks, then newer ones
that are not. How they are divided into goes, how many threads there are, whether a query stands
alone or in a chunk: the result is the same to the bit, as long as it is cut between blocks.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from offload.cpu_ops import threads
from offload.cpu_ops.block_bodies import (
    Attend,
    Finish,
    blocks_entry,
    blocks_kernel,
    finish_entry,
    finish_kernel,
    mode_of,
)
from offload.cpu_ops.block_kernels import EXTRA, ROWS
from offload.cpu_ops.block_layout import BlockLayout
from offload.cpu_ops.entries import Entry, Kernel
from offload.cpu_ops.isa import Isa, choose
from offload.cpu_ops.kernels import address_of
from offload.cpu_ops.kv_cache import from_bf16
from offload.errors import OffloadError

Array = npt.NDArray[Any]
Table = npt.NDArray[np.int64]
"""[blocks, 3]: addresses of keys and values, filled tokens; only the last may be partly filled.
A block that no query sees is not touched, its addresses may be anything."""

SCRATCH_BYTES = 3 * 2**20
"""Of partial results that are kept at a time, which stay in cache."""
LEAST_GO = 8
"""Segments of a region at least, so that threads are not started for too little."""
EVEN = 0.95
"""Of the threads' time that is used if each takes whole heads, so that they do: at least."""
LINE = 64


def _lined(shape: tuple[int, ...], dtype: Any) -> Array:
    """Memory at the start of a cache line."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(nbytes + LINE, np.uint8)
    skip = -address_of(memory) % LINE
    found: Array = memory[skip : skip + nbytes].view(dtype).reshape(shape)
    return found


def scratch_bytes(
    *, sequences: int, heads: int, key_heads: int, queries: int, key_dim: int, dim: int
) -> int:
    """What attention of so many queries holds beside them and its result: state, queries in the
    kernels' order and in float32, partial results."""
    row = 4 * (dim + EXTRA)
    some = min(queries, max(1, ROWS // max(1, heads // key_heads)))
    partial = max(SCRATCH_BYTES, LEAST_GO * heads * some * row)
    return sequences * heads * queries * (row + 8 * key_dim) + partial


class _Scratch(threading.local):
    """Memory for partial results, kept: fresh pages for every layer cost a tenth of the time."""

    memory: Array = np.empty(0, np.float32)

    def floats(self, count: int) -> Array:
        if self.memory.size < count:
            self.memory = _lined((count,), np.float32)
        return self.memory


_scratch = _Scratch()


def kernels_for(layout: BlockLayout, *, half_queries: bool, isa: str | None = None) -> list[Kernel]:
    """What queries (bfloat16 or float32) over such blocks need: for ``warm.compile_ahead``."""
    mode = _mode(layout, half_queries=half_queries, isa=choose(isa))
    return [blocks_kernel(mode), finish_kernel()]


def _mode(layout: BlockLayout, *, half_queries: bool, isa: Isa) -> str:
    whole = layout.key_dim % 64 == layout.dim % 64 == 0
    return mode_of(layout.kind.value, half_queries=half_queries, whole=whole, isa=isa)


class BlockPlan(NamedTuple):
    """What all calls for some layout and shape have in common."""

    mode: str
    entry: Entry
    arguments: Array


@functools.lru_cache(maxsize=256)
def block_plan(
    layout: BlockLayout, batch: int, rows: int, group: int, half: bool, isa: Isa
) -> BlockPlan:
    """Kept: filling in two dozen numbers takes longer than starting the kernel."""
    mode = _mode(layout, half_queries=half, isa=isa)
    a = np.zeros(Attend.SIZE, np.int64)
    a[Attend.BATCH], a[Attend.KEY_HEADS] = batch, layout.key_heads
    a[Attend.ROWS], a[Attend.GROUP] = rows, group
    a[Attend.KEY_STRIDE] = layout.stride(keys=True)
    a[Attend.VALUE_STRIDE] = layout.stride(keys=False)
    a[Attend.PARTS], a[Attend.SPAN] = layout.parts, layout.span
    a[Attend.KEY_PART] = layout.record(keys=True)
    a[Attend.VALUE_PART] = layout.record(keys=False)
    a[Attend.KEY_DIM], a[Attend.DIM] = layout.key_dim, layout.dim
    return BlockPlan(mode, blocks_entry(mode), a)


class BlockAttention:
    """Some queries' attention over one layer's blocks.

    Args:
        q: [B, Hq, n, Dk], float32 or the bits of bfloat16 as uint16.
        key_heads: G, of which Hq is a multiple.
        dim: Dv.
        positions: [B], the place of each sequence's first query among its tokens; the others
            follow it. A query sees itself and what is before it.
        scale: scores are multiplied with it.
        cap: scores become cap * tanh(score / cap); 0: they do not.
        window: tokens a query sees, itself included; 0: all.
        firsts: [B], each sequence's first token that is no padding; default 0.
        isa: instruction set by name; default as ``isa.choose``.

    Raises:
        OffloadError: shapes or dtypes do not fit.
    """

    def __init__(
        self,
        q: Array,
        *,
        key_heads: int,
        dim: int,
        positions: Sequence[int],
        scale: float,
        cap: float = 0.0,
        window: int = 0,
        firsts: Sequence[int] | None = None,
        isa: str | None = None,
    ) -> None:
        if q.ndim != 4 or q.dtype not in (np.float32, np.uint16):
            raise OffloadError(
                f"queries must be float32, or bfloat16 as uint16, [sequences, heads, queries, "
                f"dim]; got {q.dtype} {list(q.shape)}"
            )
        self.batch, self.heads, self.queries, self.key_dim = q.shape
        if key_heads < 1 or self.heads % key_heads or self.queries < 1:
            raise OffloadError(
                f"{self.heads} query heads (of {self.queries} queries) are no multiple of "
                f"{key_heads} key heads"
            )
        self.key_heads, self.dim, self.group = key_heads, dim, self.heads // key_heads
        self.rows = self.queries * self.group
        self._isa = choose(isa)
        self._positions = self._per_sequence("positions", positions)
        self._firsts = self._per_sequence("firsts", firsts or [0] * self.batch)
        self._window = window
        self._scalars = np.array([scale, cap], np.float32).view(np.uint32)
        self._q = self._by_key_head(q)
        self._wide_q: Array | None = None
        self._state = _lined((self.batch, key_heads, self.rows, dim + EXTRA), np.float32)
        self._state[...] = 0
        self._state[..., dim] = -np.inf
        self._given = [0] * self.batch

    def of_last_query(self) -> BlockAttention:
        """A new one of the last query alone, over nothing yet."""
        q = self._q.reshape(self.batch, self.key_heads, self.queries, self.group, self.key_dim)
        last = np.ascontiguousarray(q[:, :, -1]).reshape(self.batch, self.heads, 1, self.key_dim)
        scale, cap = self._scalars.view(np.float32)
        return BlockAttention(
            last,
            key_heads=self.key_heads,
            dim=self.dim,
            positions=list(self._positions + self.queries - 1),
            scale=float(scale),
            cap=float(cap),
            window=self._window,
            firsts=list(self._firsts),
            isa=self._isa.value,
        )

    def _per_sequence(self, name: str, values: Sequence[int]) -> Table:
        if len(values) != self.batch:
            raise OffloadError(f"{len(values)} {name} for {self.batch} sequences")
        return np.array(values, np.int64)

    def _by_key_head(self, q: Array) -> Array:
        """[B, G, n * group, Dk]: rows that share keys together, a query's heads side by side."""
        shape = (self.batch, self.key_heads, self.group, self.queries, self.key_dim)
        out = _lined((self.batch, self.key_heads, self.queries, self.group, self.key_dim), q.dtype)
        out[...] = q.reshape(shape).transpose(0, 1, 3, 2, 4)
        return out.reshape(self.batch, self.key_heads, self.rows, self.key_dim)

    def _queries_for(self, mode: str) -> Array:
        if self._q.dtype == np.float32 or mode == "bf16dot":
            return self._q
        if self._wide_q is None:
            self._wide_q = _lined(self._q.shape, np.float32)
            self._wide_q[...] = from_bf16(self._q)
        return self._wide_q

    def add(self, layout: BlockLayout, tables: Sequence[Table]) -> None:
        """Attend to the next tokens of each sequence, in blocks of ``layout``: a table each.

        Raises:
            OffloadError: the layout or the tables do not fit the queries.
        """
        if (layout.key_heads, layout.key_dim, layout.dim) != (
            self.key_heads, self.key_dim, self.dim,
        ) or len(tables) != self.batch:  # fmt: skip
            raise OffloadError(
                f"blocks of {layout.key_heads} heads of {layout.key_dim} and {layout.dim} in "
                f"{len(tables)} tables do not fit {self.batch} sequences' queries for "
                f"{self.key_heads} heads of {self.key_dim} and {self.dim}"
            )
        rows, ranges, total = [], [], 0
        for b, table in enumerate(tables):
            some, start = self._seen_by_some(layout, b, table)
            count = len(some) * layout.parts
            rows.append(some)
            ranges.append((total, total + count, start))
            total += count
        if total:
            table = np.ascontiguousarray(rows[0] if len(rows) == 1 else np.concatenate(rows))
            self._run(layout, table, total, np.array(ranges, np.int64))

    def _seen_by_some(self, layout: BlockLayout, b: int, table: Table) -> tuple[Table, int]:
        """The blocks that some query sees, and the place of their first token."""
        if table.ndim != 2 or table.shape[1] != 3 or table.dtype != np.int64:
            raise OffloadError(f"a table is int64 [blocks, 3], got {table.dtype} {table.shape}")
        blocks, tokens, start = len(table), layout.tokens, self._given[b]
        if not blocks:
            return table, start
        last_filled = int(table[-1, 2])
        if (table[:-1, 2] != tokens).any() or not 0 < last_filled <= tokens:
            raise OffloadError(f"blocks before the last must hold all {tokens} tokens")
        self._given[b] += (blocks - 1) * tokens + last_filled
        position, window = int(self._positions[b]), self._window
        low = max(int(self._firsts[b]), position - window + 1 if window else 0)
        end = position + self.queries
        first = min(blocks, max(0, low - start) // tokens)
        behind = max(first, min(blocks, -(-(end - start) // tokens)))
        return table[first:behind], start + first * tokens

    def _even(self, segments: int, ranges: Table) -> bool:
        """Whether a thread per sequence and head leaves few threads waiting at the end."""
        longest = segments if self.batch == 1 else int((ranges[:, 1] - ranges[:, 0]).max())
        workers = threads.count()
        turns = -(-self.batch * self.key_heads // workers)
        return segments * self.key_heads >= EVEN * workers * turns * longest

    def _run(self, layout: BlockLayout, table: Table, segments: int, ranges: Table) -> None:
        half = self._q.dtype == np.uint16
        plan = block_plan(layout, self.batch, self.rows, self.group, half, self._isa)
        q, chunk, a = self._queries_for(plan.mode), self.rows > ROWS, plan.arguments.copy()
        a[Attend.Q], a[Attend.Q_ROW] = address_of(q), q.itemsize * self.key_dim
        a[Attend.STATE] = address_of(self._state)
        a[Attend.TABLE], a[Attend.RANGES] = address_of(table), address_of(ranges)
        a[Attend.SCALE], a[Attend.CAP] = self._scalars
        a[Attend.POSITIONS] = address_of(self._positions)
        a[Attend.FIRSTS], a[Attend.WINDOW] = address_of(self._firsts), self._window
        go = segments
        if not chunk and not self._even(segments, ranges):
            each = self.key_heads * self.rows * (self.dim + EXTRA)
            go = min(segments, max(LEAST_GO, SCRATCH_BYTES // (4 * each)))
            a[Attend.PARTIALS] = address_of(_scratch.floats(go * each))
        for first in range(0, segments, go):
            a[Attend.FIRST], a[Attend.COUNT] = first, min(go, segments - first)
            a[Attend.NEXT] = a[Attend.NEXT_FOLD] = 0
            threads.run(plan.entry.call, plan.entry.address, a)

    def result(self, sinks: npt.NDArray[np.float32] | None = None) -> Array:
        """[B, Hq, n, Dv] in the queries' dtype, of what was added so far.

        ``sinks``: [Hq], scores that take their share and have no value (gpt-oss). A query that
        saw no token gets zeros.
        """
        a = np.zeros(Finish.SIZE, np.int64)
        if sinks is not None:
            if sinks.shape != (self.heads,) or sinks.dtype != np.float32:
                raise OffloadError(f"sinks are float32 [{self.heads}], got {list(sinks.shape)}")
            sinks = np.ascontiguousarray(sinks)
            a[Finish.SINKS] = address_of(sinks)
        out = np.empty((self.batch, self.heads, self.queries, self.dim), self._q.dtype)
        a[Finish.STATE], a[Finish.OUT] = address_of(self._state), address_of(out)
        a[Finish.HALF], a[Finish.BATCH] = self._q.dtype == np.uint16, self.batch
        a[Finish.KEY_HEADS], a[Finish.ROWS] = self.key_heads, self.rows
        a[Finish.GROUP], a[Finish.DIM] = self.group, self.dim
        entry = finish_entry()
        # One token's result is less work than waking the other threads.
        threads.run(entry.call, entry.address, a, None if self.rows > ROWS else 1)
        return out
