"""Decoding one token: the parts of a decoder layer, each one parallel region.

    H hidden size, E experts, k of them chosen

Objects are made once per layer from a plan; a call patches a few integers of a prepared argument
array and starts the region. Addresses of weights are given by
``place``, as often as they change; the caller keeps the memory alive while a call runs. Calls of
one ``Scratch`` must not overlap. Results do not depend on the number of threads.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.blocks import align_up
from offload.cpu_ops import threads
from offload.cpu_ops.activations import scratch_bytes
from offload.cpu_ops.attention import BLOCK, PARTIAL_EXTRA
from offload.cpu_ops.entries import Entry
from offload.cpu_ops.formats import Format
from offload.cpu_ops.isa import choose
from offload.cpu_ops.kernels import Floats, address_of, check_floats, tiles_per_task
from offload.cpu_ops.kv_cache import KvCache, aligned
from offload.cpu_ops.layer_bodies import (
    ATTEND_COUNTERS,
    IN_COUNTERS,
    OUT_COUNTERS,
    Attention,
    Common,
    Matrix,
    Mlp,
    Router,
)
from offload.cpu_ops.layer_entries import (
    attend_kernel,
    attention_in_kernel,
    attention_out_kernel,
    mlp_entry,
    router_entry,
)
from offload.cpu_ops.layer_plan import (
    AttentionPlan,
    LayerPlan,
    MatrixPlan,
    MlpPlan,
    NormPlan,
    QkNorm,
    RouterPlan,
    common_columns,
)
from offload.cpu_ops.program import Program, Step
from offload.cpu_ops.rope import Rope
from offload.cpu_ops.routing_choice import MOST_GROUPS
from offload.cpu_ops.threads import Arguments
from offload.errors import OffloadError

_NORM_COLUMNS = 512
"""Columns that a task of norms has at least, where a row is longer."""
_ALIGN = 64


class Scratch:
    """Memory for what lives during one call only; one for all layers of a model."""

    def __init__(self, nbytes: int) -> None:
        self._memory = np.empty(nbytes + _ALIGN, np.uint8)
        self._start = align_up(address_of(self._memory), _ALIGN)
        self.nbytes = nbytes

    @classmethod
    def of(cls, plans: Iterable[LayerPlan], capacity: int) -> Scratch:
        """Enough for these layers and ``capacity`` cached tokens."""
        return cls(max((scratch_need(plan, capacity) for plan in plans), default=0))

    def address(self, nbytes: int) -> int:
        """Of the start, if there are ``nbytes``."""
        if nbytes > self.nbytes:
            raise OffloadError(
                f"a layer needs {nbytes} bytes of scratch, there are {self.nbytes}; make it with "
                f"Scratch.of of all layers and the cache's capacity"
            )
        return self._start


def scratch_need(plan: LayerPlan, capacity: int) -> int:
    """Bytes of scratch that a layer needs with ``capacity`` cached tokens."""
    parts = [_attention_scratch(plan.attention, capacity)]
    parts += [_mlp_scratch(mlp) for mlp in (plan.mlp, plan.shared) if mlp is not None]
    parts += [_router_scratch(plan.router)] if plan.router is not None else []
    return max(sum(align_up(n, _ALIGN) for n in part.values()) for part in parts)


def _records(formats: dict[str, Format], columns: int) -> dict[str, int]:
    """Bytes of records, one entry per kind of activations, under the first matrix's name."""
    found, seen = {}, set()
    for name, fmt in formats.items():
        if fmt.activation not in seen:
            seen.add(fmt.activation)
            found[name] = scratch_bytes(fmt, columns)
    return found


def _attention_scratch(plan: AttentionPlan, capacity: int) -> dict[str, int]:
    queries, keys = plan.heads * plan.dim, plan.key_heads * plan.dim
    blocks = -(-capacity // BLOCK)
    return {
        "normed": 4 * plan.hidden, "q out": 4 * queries, "k out": 4 * keys, "v out": 4 * keys,
        "partials": 4 * blocks * plan.heads * (plan.dim + PARTIAL_EXTRA),
        "state": 4 * plan.heads * (plan.dim + PARTIAL_EXTRA), "merged": 4 * queries,
        "result": 4 * plan.hidden if plan.post_norm else 0,
        **_records({"q": plan.q.format, "k": plan.k.format, "v": plan.v.format}, plan.hidden),
        "o": scratch_bytes(plan.o.format, queries),
    }  # fmt: skip


def _router_scratch(plan: RouterPlan) -> dict[str, int]:
    experts = align_up(plan.gate.rows, 16)
    return {
        "logits": 4 * experts, "choice": 4 * (experts + MOST_GROUPS),
        **_records({"gate": plan.gate.format}, plan.hidden),
    }  # fmt: skip


def _mlp_scratch(plan: MlpPlan) -> dict[str, int]:
    return {
        "normed": 4 * plan.hidden, "inner": 4 * plan.gate.rows,
        "result": 4 * plan.hidden if plan.post_norm else 0,
        **_records({"gate": plan.gate.format}, plan.hidden),
        "down": scratch_bytes(plan.down.format, plan.gate.rows),
    }  # fmt: skip


class Region:
    """A region's arguments, and running it."""

    def __init__(self, size: int, slots: dict[str, int]) -> None:
        self._a = aligned((size,), np.int64)  # counters on cache lines of their own
        self._all = [self._a]
        """And those of steps and of prompts."""
        self._slots, self._missing = slots, set(slots)

    def place(self, **addresses: int) -> None:
        """Tell where weights lie, by the plan's slot names; the caller vouches for them."""
        for name, address in addresses.items():
            if name not in self._slots:
                raise OffloadError(f"no slot {name!r}; there are {', '.join(self._slots)}")
            for a in self._all:
                a[self._slots[name]] = address
            self._missing.discard(name)

    def _scratch(self, scratch: Scratch, need: dict[str, int]) -> dict[str, int]:
        """Addresses of the parts of scratch memory."""
        at = scratch.address(sum(align_up(n, _ALIGN) for n in need.values()))
        found = {}
        for name, nbytes in need.items():
            found[name] = at
            at += align_up(nbytes, _ALIGN)
        return found

    def _matrix(self, at: int, plan: MatrixPlan, **fields: int) -> None:
        fmt = plan.format
        record = self._a[at : at + Matrix.SIZE]
        record[Matrix.ROWS] = plan.rows
        record[Matrix.BLOCKS] = fmt.blocks(plan.columns)
        record[Matrix.COLUMNS] = fmt.block
        record[Matrix.STEP] = tiles_per_task(plan.rows, fmt.row_bytes(plan.columns))
        for name, value in fields.items():
            record[Matrix[name]] = value

    def _inputs(self, at: int, formats: dict[str, Format], floats: int, made: Any) -> None:
        """Records shared by matrices that read the same; float formats read ``floats``."""
        places: dict[Any, int] = {}
        for i, (name, fmt) in enumerate(formats.items()):
            record = self._a[at + Matrix.SIZE * i : at + Matrix.SIZE * (i + 1)]
            if not scratch_bytes(fmt, fmt.block):
                record[Matrix.INPUT] = floats
            elif fmt.activation in places:
                record[Matrix.INPUT] = places[fmt.activation]
            else:
                places[fmt.activation] = made[name]
                record[Matrix.INPUT] = record[Matrix.RECORDS] = made[name]

    def _norm(self, hidden: int, norm: NormPlan, *formats: Format) -> None:
        columns = common_columns(*formats)
        self._a[Common.HIDDEN] = hidden
        self._a[Common.EPS], self._a[Common.PLUS] = _bits(norm.eps), _bits(norm.plus)
        self._a[Common.UNIT] = align_up(_NORM_COLUMNS, columns)

    def wide(self, size: int) -> Arguments:
        """A copy of the arguments with more places behind them, told of addresses as they are."""
        a = aligned((size,), np.int64)
        a[: self._a.size] = self._a
        self._all.append(a)
        return a

    def check_placed(self) -> None:
        """Raises OffloadError: an address is missing."""
        if self._missing:
            raise OffloadError(f"no address for {', '.join(sorted(self._missing))}; call place")

    def _own(self) -> Arguments:
        """Arguments for a program's steps."""
        self.check_placed()
        return self.wide(self._a.size)


class OneKernel(Region):
    """A region of one kernel."""

    def __init__(self, size: int, slots: dict[str, int], entry: Entry) -> None:
        super().__init__(size, slots)
        self._counters = self._a[Common.COUNTERS : Common.OWN]
        self._entry = entry

    def _run(self) -> None:
        self.check_placed()
        self._counters[:] = 0
        threads.run(self._entry.call, self._entry.address, self._a)

    def _step(self) -> tuple[Step, Arguments]:
        """The region as one of a program's steps, with arguments of its own."""
        a = self._own()
        return Step(self._entry, a, a[Common.COUNTERS : Common.OWN], self), a


def _bits(x: float) -> int:
    """Of a float32, as the kernels take it."""
    return int(struct.unpack("<i", struct.pack("<f", x))[0])


def _slots(names: tuple[str, ...], matrices: dict[str, int], own: dict[str, int]) -> dict[str, int]:
    """Slot names to places in the arguments."""
    places = dict(own)
    for name, at in matrices.items():
        places[name], places[f"{name}_bias"] = at + Matrix.WEIGHT, at + Matrix.BIAS
    return {name: places[name] for name in names}


class AttentionHalf(Region):
    """``x += attention(norm(x))`` of one layer, for one token."""

    def __init__(
        self, plan: AttentionPlan, rope: Rope, cache: KvCache, layer: int, scratch: Scratch,
        *, isa: str | None = None,
    ) -> None:  # fmt: skip
        """
        Raises:
            OffloadError: the rope or the cache have other shapes than the plan.
        """
        if (rope.rotary, rope.pairs) != (plan.rotary, plan.pairs):
            raise OffloadError(f"the plan rotates {plan.rotary} columns, the rope {rope.rotary}")
        if (cache.heads, cache.dim) != (plan.key_heads, plan.dim):
            raise OffloadError(
                f"the plan has {plan.key_heads} key heads of {plan.dim}, the cache {cache.heads} "
                f"of {cache.dim}"
            )
        formats = {"q": plan.q.format, "k": plan.k.format, "v": plan.v.format}
        self._isa = choose(isa)
        matrices = {"q": Common.A, "k": Common.B, "v": Common.C, "o": Common.D}
        own = {
            "norm": Common.NORM, "post_norm": Common.POST_NORM, "q_norm": Attention.Q_NORM,
            "k_norm": Attention.K_NORM, "sinks": Attention.SINKS,
        }  # fmt: skip
        super().__init__(Attention.SIZE, _slots(plan.slots, {**matrices}, {**own}))
        self.plan, self.rope, self.cache, self.layer = plan, rope, cache, layer
        self._keep = scratch
        self._program: Program | None = None
        made = self._scratch(scratch, _attention_scratch(plan, cache.capacity))
        a = self._a
        self._norm(plan.hidden, plan.norm, *formats.values())
        for name, at in matrices.items():
            self._matrix(at, getattr(plan, name))
        self._inputs(Common.A, formats, made["normed"], made)
        self._inputs(Common.D, {"o": plan.o.format}, made["merged"], made)
        a[Common.NORMED], a[Common.RESULT] = made["normed"], made["result"]
        a[Attention.Q_OUT : Attention.DIM + 1] = (
            made["q out"], made["k out"], made["v out"],
            plan.key_heads, plan.heads // plan.key_heads, plan.dim,
        )  # fmt: skip
        a[Attention.WIDE_NORM : Attention.CAP + 1] = (
            plan.qk_norm is QkNorm.WIDE, plan.rotary, plan.pairs, rope.cos, rope.sin,
            _bits(plan.scaling), _bits(plan.softcap),
        )  # fmt: skip
        a[Attention.KEYS], a[Attention.VALUES] = cache.places(layer)
        a[Attention.CAPACITY], a[Attention.KV_BYTES] = cache.rows, cache.kind.nbytes
        a[Attention.PARTIALS], a[Attention.MERGED] = made["partials"], made["merged"]
        unit = math.lcm(plan.dim, plan.o.format.block)
        a[Attention.MERGE_HEADS] = unit // plan.dim
        self._arrange(made)

    def _arrange(self, made: dict[str, int]) -> None:
        """For subclasses: the rest of the arguments; ``made``: addresses of scratch memory."""

    def read(self, cache: KvCache) -> None:
        """Go on with another sequence's cache, of the same shape as the first one.

        Raises:
            OffloadError: it has another one.
        """
        if cache is self.cache:
            return
        self.check_cache(cache)
        self.cache = cache
        for a in self._all:
            a[Attention.KEYS], a[Attention.VALUES] = cache.places(self.layer)

    def check_cache(self, cache: KvCache) -> None:
        """Raises OffloadError: it has another shape than the first one."""
        mine = self.cache
        if (cache.heads, cache.dim, cache.capacity, cache.kind) != (
            mine.heads, mine.dim, mine.capacity, mine.kind
        ):  # fmt: skip
            raise OffloadError(
                f"this layer reads caches of {mine.heads} heads of {mine.dim} and {mine.capacity} "
                f"tokens, and got {cache.heads} of {cache.dim} and {cache.capacity}"
            )

    def __call__(self, x: Floats, position: int | None = None) -> Floats:
        """Add to ``x`` [H] and store the token's key and value. Returns ``x``.

        ``position``: of the token for the rotation; default: as many as are cached.

        Raises:
            OffloadError: the cache is full, ``x`` does not fit, or an address is missing.
        """
        check_floats("x", x, (self.plan.hidden,), written=True)
        self.check_placed()
        self._a[Common.X] = address_of(x)
        if self._program is None:
            self._program = Program(self._steps(self._a))
        self.begin(position)
        self._program.run()
        self.finish()
        return x

    def steps(self, x: Floats) -> list[Step]:
        """What a call with ``x``, which the caller keeps, runs; before it comes ``begin``, after it
        ``finish``."""
        check_floats("x", x, (self.plan.hidden,), written=True)
        a = self._own()
        a[Common.X] = address_of(x)
        return self._steps(a)

    def _steps(self, a: Arguments) -> list[Step]:
        plan = self.plan
        formats = (matrix.format.name for matrix in (plan.q, plan.k, plan.v))
        first = attention_in_kernel(*formats, self._isa).entry()
        last = attention_out_kernel(plan.o.format.name, self._isa).entry()
        return [
            Step(first, a, a[IN_COUNTERS], self),
            *self._attend(a),
            Step(last, a, a[OUT_COUNTERS], self),
        ]

    def _attend(self, a: Arguments) -> list[Step]:
        """Between queries and output."""
        entry = attend_kernel(self.cache.kind.value).entry()
        return [Step(entry, a, a[ATTEND_COUNTERS], self)]

    def begin(self, position: int | None) -> None:
        """Make the arguments those of the next token. Raises OffloadError: the cache is full."""
        length = self.cache.make_room(self.layer)
        self.rope.turn_to(length if position is None else position)
        window = self.plan.window
        start = max(0, length + 1 - window) if window else 0
        for a in self._all:
            a[Attention.LENGTH], a[Attention.START] = length, start

    def finish(self) -> None:
        """The token's key and value are stored."""
        self.cache.advance(self.layer)


class TokenRouter(OneKernel):
    """``normed = norm(x)`` and the experts it goes to.

    ``ids`` int64 [k], best first, ``weights`` float32 [k] and ``normed`` float32 [H] are
    overwritten by the next call.
    """

    def __init__(self, plan: RouterPlan, scratch: Scratch, *, isa: str | None = None) -> None:
        own = {"norm": Common.NORM, "choice_bias": Router.CHOICE_BIAS}
        slots = _slots(plan.slots, {"gate": Common.A}, {**own})
        super().__init__(Router.SIZE, slots, router_entry(plan.gate.format.name, choose(isa)))
        self.plan, self._keep = plan, scratch
        self.ids = np.zeros(plan.top_k, np.int64)
        self.weights: Floats = np.zeros(plan.top_k, np.float32)
        self.normed: Floats = np.zeros(plan.hidden, np.float32)
        made = self._scratch(scratch, _router_scratch(plan))
        a = self._a
        self._norm(plan.hidden, plan.norm, plan.gate.format)
        self._matrix(Common.A, plan.gate)
        self._inputs(Common.A, {"gate": plan.gate.format}, address_of(self.normed), made)
        a[Common.NORMED] = address_of(self.normed)
        a[Router.LOGITS : Router.FACTOR + 1] = (
            made["logits"], int(plan.scoring), plan.top_k, plan.renorm, _bits(plan.factor)
        )  # fmt: skip
        a[Router.GROUPS : Router.WEIGHTS + 1] = (
            plan.groups, plan.keep_groups, made["choice"], address_of(self.ids),
            address_of(self.weights),
        )  # fmt: skip

    def __call__(self, x: Floats) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
        """(ids, weights, normed) of ``x`` [H], which stays as it is."""
        check_floats("x", x, (self.plan.hidden,))
        self._a[Common.X] = address_of(x)
        self._run()
        return self.ids, self.weights, self.normed

    def step(self, x: Floats) -> Step:
        """What a call with ``x``, which the caller keeps, runs."""
        check_floats("x", x, (self.plan.hidden,))
        step, a = self._step()
        a[Common.X] = address_of(x)
        return step


class DenseMlp(OneKernel):
    """``x += mlp(norm(x))``, or for a plan without norm ``into += mlp(x)``."""

    def __init__(self, plan: MlpPlan, scratch: Scratch, *, isa: str | None = None) -> None:
        entry = mlp_entry(plan.gate.format.name, plan.down.format.name, choose(isa))
        matrices = {"gate": Common.A, "up": Common.B, "down": Common.C}
        own = {"norm": Common.NORM, "post_norm": Common.POST_NORM, "share": Mlp.SHARE}
        super().__init__(Mlp.SIZE, _slots(plan.slots, {**matrices}, {**own}), entry)
        self.plan, self._keep = plan, scratch
        made = self._scratch(scratch, _mlp_scratch(plan))
        a, gate, down = self._a, plan.gate.format, plan.down.format
        self._norm(plan.hidden, plan.norm or NormPlan(eps=0.0), gate)
        self._matrix(Common.A, plan.gate)
        self._matrix(Common.B, plan.up)
        self._matrix(Common.C, plan.down)
        self._direct = plan.norm is None
        self._float_input = not scratch_bytes(gate, gate.block)
        self._inputs(Common.A, {"gate": gate, "up": gate}, made["normed"], made)
        self._inputs(Common.C, {"down": down}, made["inner"], made)
        # A task's rows are whole blocks of what the down projection reads: it makes them itself.
        tiles = common_columns(down) // 16
        a[Common.A + Matrix.STEP] = align_up(int(a[Common.A + Matrix.STEP]), tiles)
        a[Common.NORMED], a[Common.RESULT] = made["normed"], made["result"]
        a[Mlp.INNER : Mlp.LIMIT + 1] = (
            made["inner"], int(plan.glu), _bits(plan.alpha), _bits(plan.limit)
        )  # fmt: skip

    def __call__(self, x: Floats, into: Floats | None = None) -> Floats:
        """Add to ``x`` [H], or to ``into`` [H] if the plan has no norm; returns what was added to.

        Raises:
            OffloadError: an array does not fit, or ``into`` is missing or has no use.
        """
        out = self._bind(self._a, x, into)
        self._run()
        return out

    def step(self, x: Floats, into: Floats | None = None) -> Step:
        """What a call with these, which the caller keeps, runs."""
        step, a = self._step()
        self._bind(a, x, into)
        return step

    def _bind(self, a: Arguments, x: Floats, into: Floats | None) -> Floats:
        """Returns what is added to."""
        if (into is not None) != self._direct:
            raise OffloadError("into is for feed-forward plans without a norm, and only for those")
        out = x if into is None else into
        check_floats("x", x, (self.plan.hidden,))
        check_floats("into", out, (self.plan.hidden,), written=True)
        a[Common.X] = at = address_of(x)
        a[Mlp.INTO] = at if into is None else address_of(into)
        if self._direct and self._float_input:
            a[Common.A + Matrix.INPUT] = a[Common.B + Matrix.INPUT] = at
        return out
