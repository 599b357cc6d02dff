"""Attention of queries over tables of blocks of keys and values, wherever in memory those lie.

    B sequences, Hq query heads, G key heads, n queries, Dk, Dv head sizes

The tokens of a sequence may be added in several goes, in ascending order: blocks that were read
into a small window of memory, then others in the same places; quantised blocks, then newer ones
that are not. How they are divided into goes, how many threads there are, whether a query stands
alone or in a chunk: the result is the same to the bit, as long as it is cut between blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.cpu_ops import threads
from offload.cpu_ops.block_bodies import Attend, Segment, blocks_entry, mode_of
from offload.cpu_ops.block_kernels import EXTRA, ROWS
from offload.cpu_ops.block_layout import BlockLayout
from offload.cpu_ops.isa import choose
from offload.cpu_ops.kernels import address_of
from offload.cpu_ops.kv_cache import from_bf16, to_bf16
from offload.errors import OffloadError

Array = npt.NDArray[Any]
Table = npt.NDArray[np.int64]
"""[blocks, 3]: addresses of keys and values, filled tokens; only the last may be partly filled.
A block that no query sees is not touched, its addresses may be anything."""

GO = 256
"""Segments whose partial results are kept at a time: 1 to 3 MiB, which stay in cache."""
LINE = 64


def _lined(shape: tuple[int, ...], dtype: Any) -> Array:
    """Memory at the start of a cache line."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.empty(nbytes + LINE, np.uint8)
    skip = -address_of(memory) % LINE
    found: Array = memory[skip : skip + nbytes].view(dtype).reshape(shape)
    return found


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
        self._seen = np.zeros(self.batch, np.int64)

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
        found = [self._segments(layout, b, table) for b, table in enumerate(tables)]
        segments = np.ascontiguousarray(np.concatenate(found))
        if len(segments):
            self._run(layout, segments)

    def _segments(self, layout: BlockLayout, b: int, table: Table) -> Table:
        """Parts of the blocks that some query sees."""
        if table.ndim != 2 or table.shape[1] != 3 or table.dtype != np.int64:
            raise OffloadError(f"a table is int64 [blocks, 3], got {table.dtype} {table.shape}")
        filled = table[:, 2]
        if len(table) and ((filled[:-1] != layout.tokens).any() or filled[-1] > layout.tokens):
            raise OffloadError(f"blocks before the last must hold all {layout.tokens} tokens")
        blocks, parts, span = len(table), layout.parts, layout.span
        out = np.empty((blocks, parts, Segment.SIZE), np.int64)
        part = np.arange(parts)
        out[..., Segment.KEYS] = table[:, :1] + part * layout.record(keys=True)
        out[..., Segment.VALUES] = table[:, 1:2] + part * layout.record(keys=False)
        start = np.arange(blocks)[:, None] * layout.tokens + part * span
        out[..., Segment.START] = self._seen[b] + start
        out[..., Segment.TOKENS] = np.clip(filled[:, None] - part * span, 0, span)
        out[..., Segment.SEQUENCE] = b
        self._seen[b] += int(filled.sum())
        flat = out.reshape(-1, Segment.SIZE)
        first, last = int(self._positions[b]), int(self._positions[b]) + self.queries - 1
        low = max(int(self._firsts[b]), first - self._window + 1 if self._window else 0)
        begin, count = flat[:, Segment.START], flat[:, Segment.TOKENS]
        return flat[(count > 0) & (begin <= last) & (begin + count > low)]

    def _run(self, layout: BlockLayout, segments: Table) -> None:
        mode = mode_of(
            layout.kind.value,
            half_queries=self._q.dtype == np.uint16,
            whole=self.key_dim % 64 == self.dim % 64 == 0,
            isa=self._isa,
        )
        q, chunk = self._queries_for(mode), self.rows > ROWS
        entry = blocks_entry(mode, chunk=chunk)
        a = np.zeros(Attend.SIZE, np.int64)
        a[Attend.Q], a[Attend.Q_ROW] = address_of(q), q.itemsize * self.key_dim
        a[Attend.STATE] = address_of(self._state)
        a[Attend.BATCH], a[Attend.KEY_HEADS] = self.batch, self.key_heads
        a[Attend.ROWS], a[Attend.GROUP] = self.rows, self.group
        a[Attend.KEY_STRIDE] = layout.stride(keys=True)
        a[Attend.VALUE_STRIDE] = layout.stride(keys=False)
        a[Attend.SPAN], a[Attend.KEY_DIM], a[Attend.DIM] = layout.span, self.key_dim, self.dim
        a[Attend.SCALE], a[Attend.CAP] = self._scalars
        a[Attend.POSITIONS] = address_of(self._positions)
        a[Attend.FIRSTS], a[Attend.WINDOW] = address_of(self._firsts), self._window
        go = len(segments) if chunk else GO
        if not chunk:
            shape = (min(go, len(segments)), self.key_heads, self.rows, self.dim + EXTRA)
            partials = _lined(shape, np.float32)
            a[Attend.PARTIALS] = address_of(partials)
        for start in range(0, len(segments), go):
            some = segments[start : start + go]
            ids = np.arange(self.batch)
            ends = [np.searchsorted(some[:, Segment.SEQUENCE], ids, s) for s in ("left", "right")]
            ranges = np.ascontiguousarray(np.stack(ends, axis=1).astype(np.int64))
            a[Attend.SEGMENTS], a[Attend.COUNT] = address_of(some), len(some)
            a[Attend.RANGES] = address_of(ranges)
            a[Attend.NEXT] = a[Attend.NEXT_FOLD] = 0
            threads.run(entry.call, entry.address, a)

    def result(self, sinks: npt.NDArray[np.float32] | None = None) -> Array:
        """[B, Hq, n, Dv] in the queries' dtype, of what was added so far.

        ``sinks``: [Hq], scores that take their share and have no value (gpt-oss). A query that
        saw no token gets zeros.
        """
        by_row = (self.batch, self.key_heads, self.queries, self.group)
        state = self._state.reshape(*by_row, -1)
        o, top, total = state[..., : self.dim], state[..., self.dim], state[..., self.dim + 1]
        share = np.ones_like(top)
        if sinks is not None:
            if sinks.shape != (self.heads,) or sinks.dtype != np.float32:
                raise OffloadError(f"sinks are float32 [{self.heads}], got {list(sinks.shape)}")
            sink = sinks.reshape(self.key_heads, 1, self.group)
            highest = np.maximum(top, sink)
            share = np.exp(top - highest)
            total = total * share + np.exp(sink - highest)
        factor = np.divide(share, total, out=np.zeros_like(share), where=total > 0)
        out = np.empty((self.batch, self.key_heads, self.group, self.queries, self.dim), np.float32)
        np.multiply(o, factor[..., None], out=out.transpose(0, 1, 3, 2, 4))
        out = out.reshape(self.batch, self.heads, self.queries, self.dim)
        return out if self._q.dtype == np.float32 else to_bf16(out)
