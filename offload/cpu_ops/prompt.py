"""Many tokens through the parts of a decoder layer, by the kernels that decode one.

    T tokens, H hidden size, E experts, k of them chosen

transformers' own code makes a dozen arrays [T, H] per layer, each in memory that the system has to
hand out and clear, and attends in float32 without leaving out what is hidden: with a small MoE
model in Q4_0 that took as long as all matrices together. Here norms, rotation, attention and
residuals are one pass over rows in buffers that stay (``Room``), and every token gets to the bit
what ``decode.py`` gives it alone; only ``prefill.linear``, where it prefers dequantised slabs,
rounds otherwise. So nothing depends on how a prompt is cut, either.

The tokens of several sequences, one of each, go the same way: each has a cache of its own, and the
products are those whose rows do not depend on each other.

The parts are made from those of single tokens and know where weights lie through them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from offload.blocks import align_up
from offload.cpu_ops import threads
from offload.cpu_ops.attention import BLOCK, GROUP, PARTIAL_EXTRA
from offload.cpu_ops.decode import AttentionHalf, DenseMlp, Region, TokenRouter
from offload.cpu_ops.entries import Entry, Kernel
from offload.cpu_ops.kernels import Floats, address_of, check_floats, gemm
from offload.cpu_ops.kv_cache import KvCache, KvType, aligned
from offload.cpu_ops.layer_bodies import Attention, Common, Matrix, Mlp, Router
from offload.cpu_ops.layer_plan import AttentionPlan, LayerPlan, MatrixPlan, MlpPlan
from offload.cpu_ops.prefill import linear
from offload.cpu_ops.prefill_kernels import Gate, activate_entry, activate_kernel
from offload.cpu_ops.prompt_bodies import (
    Rows,
    add_rows,
    attend_rows,
    choose_rows,
    heads_rows,
    norm_rows,
)
from offload.cpu_ops.routing_choice import MOST_GROUPS
from offload.cpu_ops.tags import tag
from offload.errors import OffloadError

CHUNK = 512
"""Tokens that go through attention, or a feed-forward part, together."""
INNER_BYTES = 32 << 20
"""What is between the matrices of a feed-forward part, at most: its tokens then are fewer, down to
LEAST_CHUNK."""
LEAST_CHUNK = 64


def fits(plan: LayerPlan) -> bool:
    """Whether prompts can go this way: what lies between gate and down is whole registers."""
    return all(m.gate.rows % 16 == 0 for m in (plan.mlp, plan.shared) if m is not None)


def _together(plan: AttentionPlan) -> int:
    """Tokens whose queries attend together."""
    return max(1, GROUP // (plan.heads // plan.key_heads))


def _partial_bytes(plan: AttentionPlan, capacity: int) -> int:
    """Of a thread: partial results of the queries that attend together."""
    queries = _together(plan) * (plan.heads // plan.key_heads)
    return align_up((capacity // BLOCK + 2) * queries * 4 * (plan.dim + PARTIAL_EXTRA), 64)


def _choice_bytes(experts: int) -> int:
    """Of a thread: a token's logits, and what its choice is made in."""
    return align_up(4 * (2 * align_up(experts, 16) + MOST_GROUPS), 64)


def _mlp_rows(plan: MlpPlan, rows: int) -> int:
    return min(rows, max(LEAST_CHUNK, INNER_BYTES // (8 * plan.gate.rows)))


class Room:
    """Buffers for the prompts of one model, for up to ``rows`` tokens at a time. One prompt uses it
    at a time."""

    def __init__(
        self, plans: Iterable[LayerPlan], rows: int, capacity: int, *, quantised: bool = False
    ) -> None:
        """``capacity``: of the cache, in tokens; ``quantised``: it is a ``QuantisedKv``."""
        self.rows = rows
        self.workers = threads.count()
        """Threads that it has scratch memory for."""
        self._buffers = {
            name: aligned((nbytes,), np.uint8)
            for name, nbytes in _room_parts(plans, rows, capacity, quantised).items()
        }

    def floats(self, name: str, rows: int, columns: int) -> Floats:
        """[rows, columns], the same memory for each of a name."""
        found: Floats = self._buffers[name][: 4 * rows * columns].view(np.float32)
        return found.reshape(rows, columns)

    def address(self, name: str) -> int:
        return address_of(self._buffers[name])

    def scratch(self) -> int:
        """Address of the threads' own. Raises OffloadError: there are more of them than before."""
        if threads.count() > self.workers:
            raise OffloadError(
                f"buffers made for {self.workers} threads are used by {threads.count()}"
            )
        return self.address("workers")


def _room_parts(
    plans: Iterable[LayerPlan], rows: int, capacity: int, quantised: bool
) -> dict[str, int]:
    most: dict[str, int] = {}
    workers = threads.count()
    for plan in plans:
        attention = plan.attention
        queries, keys = attention.heads * attention.dim, attention.key_heads * attention.dim
        parts = {
            "normed": rows * attention.hidden, "q": rows * queries, "queries": rows * queries,
            "k": rows * keys, "v": rows * keys,
        }  # fmt: skip
        for mlp in (plan.mlp, plan.shared):
            if mlp is not None:
                inner = _mlp_rows(mlp, rows) * mlp.gate.rows
                parts["gate"] = max(inner, parts.get("gate", 0))
        parts["up"] = parts.get("gate", 0)
        if quantised:
            parts["states"] = rows * attention.heads * (attention.dim + PARTIAL_EXTRA)
            parts["attended"] = rows * queries
        per_worker = _partial_bytes(attention, capacity)
        if plan.router is not None:
            parts["logits"] = rows * plan.router.gate.rows
            per_worker = max(per_worker, _choice_bytes(plan.router.gate.rows))
        sizes = {name: 4 * n for name, n in parts.items()} | {"workers": workers * per_worker}
        for name, nbytes in sizes.items():
            most[name] = max(nbytes, most.get(name, 0))
    return most


def room_bytes(
    plans: Iterable[LayerPlan], rows: int, capacity: int, *, quantised: bool = False
) -> int:
    """What a ``Room`` takes."""
    return sum(_room_parts(plans, rows, capacity, quantised).values())


class _Rows:
    """A region's arguments for many tokens."""

    def __init__(self, region: Region, *, alone: bool = False, isa: str | None = None) -> None:
        """``alone``: every token gets the bits of single tokens, however many there are; without,
        of formats that are faster so, many are multiplied by dequantised slabs."""
        self._region, self._isa = region, isa
        self._a = region.wide(Rows.SIZE)
        self._product = gemm if alone else linear

    def _run(self, entry: Entry) -> None:
        self._region.check_placed()
        self._a[Rows.NEXT] = self._a[Rows.NEXT_WORKER] = 0
        threads.run(entry.call, entry.address, self._a)

    def _norm(self, x_TH: Floats, out_TH: Floats) -> None:
        a = self._a
        a[Rows.TOKENS : Rows.OUTPUT + 1] = len(x_TH), address_of(x_TH), address_of(out_TH)
        self._run(prompt_entry("norm"))

    def _add(self, values_TH: Floats, bias: int, into_TH: Floats) -> None:
        a = self._a
        a[Rows.TOKENS : Rows.BIAS + 1] = (
            len(values_TH), address_of(values_TH), address_of(into_TH), bias,
        )  # fmt: skip
        self._run(prompt_entry("add"))

    def _linear(self, plan: MatrixPlan, at: int, x: Floats, out: Floats) -> None:
        weight = int(self._a[at + Matrix.WEIGHT])
        self._product(plan.format, weight, plan.rows, plan.columns, x, out, isa=self._isa)


class PromptAttention(_Rows):
    """``x += attention(norm(x))`` of one layer, for the tokens of a prompt or of sequences."""

    def __init__(self, half: AttentionHalf, *, alone: bool = False, isa: str | None = None) -> None:
        super().__init__(half, alone=alone, isa=isa)
        self._half = half
        self._a[Rows.WINDOW] = half.plan.window
        self._arrange(half.cache.kind)

    def _arrange(self, kind: KvType) -> None:
        self._heads = prompt_entry("heads", kind.value)
        self._attend = prompt_entry("attend", kind.value)

    def __call__(self, x_TH: Floats, positions_T: npt.NDArray[np.int64], room: Room) -> None:
        """Add to ``x`` and store the tokens' keys and values behind those in the layer's cache.

        ``positions``: of the tokens for the rotation.

        Raises:
            OffloadError: the cache is full, or an address is missing.
        """
        half, a = self._half, self._a
        check_floats("x", x_TH, (len(x_TH), half.plan.hidden), written=True)
        a[Rows.CACHES], a[Rows.TOGETHER] = 0, _together(half.plan)
        for first in range(0, len(x_TH), room.rows):
            some_TH = x_TH[first : first + room.rows]
            half.cache.make_room(half.layer, len(some_TH))
            self._some(some_TH, positions_T[first : first + room.rows], room, None)

    def of_each(
        self, x_TH: Floats, positions_T: npt.NDArray[np.int64], caches: Sequence[KvCache],
        room: Room,
    ) -> None:  # fmt: skip
        """As a call, for the next token of each of T sequences: ``caches``, all different.

        Raises:
            OffloadError: a cache is full or of another shape, and nothing has been stored; or an
                address is missing.
        """
        half, a = self._half, self._a
        check_floats("x", x_TH, (len(caches), half.plan.hidden), written=True)
        table_T3 = np.empty((len(caches), 3), np.int64)
        for row, cache in zip(table_T3, caches, strict=True):
            half.check_cache(cache)
            cache.make_room(half.layer)
            row[:] = *cache.places(half.layer), cache.row(half.layer)
        a[Rows.TOGETHER] = 1
        for first in range(0, len(x_TH), room.rows):
            last = first + room.rows
            a[Rows.CACHES] = address_of(table_T3[first:])
            self._some(x_TH[first:last], positions_T[first:last], room, caches[first:last])
        for cache in caches:
            cache.advance(half.layer)

    def _some(
        self, x_TH: Floats, positions_T: npt.NDArray[np.int64], room: Room,
        caches: Sequence[KvCache] | None,
    ) -> None:  # fmt: skip
        half, a, n = self._half, self._a, len(x_TH)
        plan = half.plan
        normed = room.floats("normed", n, plan.hidden)
        self._norm(x_TH, normed)
        q = room.floats("q", n, plan.q.rows)
        k, v = room.floats("k", n, plan.k.rows), room.floats("v", n, plan.v.rows)
        for matrix, at, out in (
            (plan.q, Common.A, q), (plan.k, Common.B, k), (plan.v, Common.C, v),
        ):  # fmt: skip
            self._linear(matrix, at, normed, out)
        a[Rows.QUERIES] = room.address("queries")
        a[Rows.Q_BIAS : Rows.V_BIAS + 1] = [
            a[at + Matrix.BIAS] for at in (Common.A, Common.B, Common.C)
        ]
        self._tables = half.rope.rows(positions_T)
        self._attention(q, k, v, room, caches)
        self._linear(plan.o, Common.D, q, normed)
        self._add(normed, int(a[Common.D + Matrix.BIAS]), x_TH)

    def _store(self, q: Floats, k: Floats, v: Floats, first: int = 0) -> None:
        """Queries ready to attend, keys and values to the cache; of tokens from ``first`` on."""
        a, (cos, sin, stride) = self._a, self._tables
        a[Rows.TOKENS] = len(q)
        a[Attention.Q_OUT : Attention.V_OUT + 1] = address_of(q), address_of(k), address_of(v)
        a[Attention.COS], a[Attention.SIN] = cos + first * stride, sin + first * stride
        a[Rows.TABLE_STRIDE] = stride
        self._run(self._heads)

    def _attention(
        self, q: Floats, k: Floats, v: Floats, room: Room, caches: Sequence[KvCache] | None
    ) -> None:
        """In place of the queries: attention of some tokens, whose keys and values are stored;
        ``caches``: of each, which will be told; None: of the one, which is."""
        half, a = self._half, self._a
        a[Attention.LENGTH] = half.cache.length(half.layer)
        self._store(q, k, v)
        a[Rows.OUTPUT] = address_of(q)  # free again
        a[Rows.SCRATCH] = room.scratch()
        a[Rows.WORKER_BYTES] = _partial_bytes(half.plan, half.cache.capacity)
        self._run(self._attend)
        if caches is None:
            half.cache.advance(half.layer, len(q))


class PromptMlp(_Rows):
    """``x += mlp(norm(x))``, or for a plan without norm ``into += mlp(x)``, for many tokens."""

    def __init__(self, mlp: DenseMlp, *, alone: bool = False, isa: str | None = None) -> None:
        super().__init__(mlp, alone=alone, isa=isa)
        self._plan = mlp.plan

    def __call__(self, x_TH: Floats, room: Room, into_TH: Floats | None = None) -> None:
        """``into``: given if and only if the plan has no norm; [T, H]."""
        step = _mlp_rows(self._plan, room.rows)
        for first in range(0, len(x_TH), step):
            last = first + step
            into = None if into_TH is None else into_TH[first:last]
            self._some(x_TH[first:last], room, into)

    def _some(self, x_TH: Floats, room: Room, into_TH: Floats | None) -> None:
        plan, a, n = self._plan, self._a, len(x_TH)
        results = room.floats("normed", n, plan.hidden)
        if into_TH is None:
            self._norm(x_TH, results)
            inputs, into = results, x_TH
        else:
            inputs, into = x_TH, into_TH
        gate, up = (room.floats(name, n, plan.gate.rows) for name in ("gate", "up"))
        self._linear(plan.gate, Common.A, inputs, gate)
        self._linear(plan.up, Common.B, inputs, up)
        self._activate(gate, up)
        a[Rows.SHARE], a[Rows.SHARE_INPUT] = a[Mlp.SHARE], address_of(inputs)
        self._linear(plan.down, Common.C, gate, results)
        self._add(results, int(a[Common.C + Matrix.BIAS]), into)

    def _activate(self, gate: Floats, up: Floats) -> None:
        """In place of the gate."""
        a, entry = self._a, activate_entry()
        g = np.zeros(Gate.SIZE, np.int64)
        stride, at = 4 * gate.shape[1], address_of(gate)
        g[Gate.GATE : Gate.LIMIT + 1] = (
            at, address_of(up), stride, a[Common.A + Matrix.BIAS], a[Common.B + Matrix.BIAS],
            gate.shape[1], at, stride, len(gate), a[Mlp.GLU], a[Mlp.ALPHA], a[Mlp.LIMIT],
        )  # fmt: skip
        threads.run(entry.call, entry.address, g)


class PromptRouter(_Rows):
    """``normed = norm(x)`` and the experts that each token goes to."""

    def __init__(self, router: TokenRouter, *, alone: bool = False, isa: str | None = None) -> None:
        super().__init__(router, alone=alone, isa=isa)
        self._plan = router.plan

    def __call__(
        self, x_TH: Floats, normed_TH: Floats, room: Room
    ) -> tuple[npt.NDArray[np.int64], Floats]:
        """Fills ``normed``; returns ids int64 [T, k], best first, and weights float32 [T, k]."""
        plan, a, tokens = self._plan, self._a, len(x_TH)
        ids = np.empty((tokens, plan.top_k), np.int64)
        weights = np.empty((tokens, plan.top_k), np.float32)
        self._norm(x_TH, normed_TH)
        a[Rows.SCRATCH] = room.scratch()
        a[Rows.WORKER_BYTES] = _choice_bytes(plan.gate.rows)
        for first in range(0, tokens, room.rows):
            n = min(room.rows, tokens - first)
            logits = room.floats("logits", n, plan.gate.rows)
            self._linear(plan.gate, Common.A, normed_TH[first : first + n], logits)
            a[Rows.TOKENS], a[Rows.INPUT] = n, address_of(logits)
            a[Router.IDS], a[Router.WEIGHTS] = address_of(ids[first:]), address_of(weights[first:])
            self._run(prompt_entry("choose"))
        return ids, weights


@functools.cache
def _kernel(name: str, kv: str = "") -> Kernel:
    """``kv``: "f32" or "bf16", how keys and values are cached, for "heads" and "attend"."""
    kind = tag("kv", kv)

    # One by one: the disk cache's key is of what a closure holds, and a function from a table has
    # another one in every process.
    def norm_body(arguments: int) -> None:
        norm_rows(kind, arguments)

    def heads_body(arguments: int) -> None:
        heads_rows(kind, arguments)

    def attend_body(arguments: int) -> None:
        attend_rows(kind, arguments)

    def add_body(arguments: int) -> None:
        add_rows(kind, arguments)

    def choose_body(arguments: int) -> None:
        choose_rows(kind, arguments)

    body, seconds = {
        "norm": (norm_body, 0.4), "heads": (heads_body, 2.0), "attend": (attend_body, 5.0),
        "add": (add_body, 0.8), "choose": (choose_body, 2.5),
    }[name]  # fmt: skip
    return Kernel(body, f"{name} of many tokens", seconds)


@functools.cache
def prompt_entry(name: str, kv: str = "") -> Entry:
    return _kernel(name, kv).entry()


def prompt_kernels(kv: KvType) -> list[Kernel]:
    """What prompts run on, besides their matrices' kernels and those of quantised caches; ``kv``:
    how they are cached."""
    if kv.quantised:
        attend = [_kernel("heads", KvType.F32.value)]
    else:
        attend = [_kernel("heads", kv.value), _kernel("attend", kv.value)]
    return [
        _kernel("norm"), *attend, _kernel("add"), _kernel("choose"),
        activate_kernel(),
    ]  # fmt: skip


__all__ = [
    "CHUNK", "PromptAttention", "PromptMlp", "PromptRouter", "Room", "fits", "prompt_entry",
    "prompt_kernels", "room_bytes",
]  # fmt: skip
