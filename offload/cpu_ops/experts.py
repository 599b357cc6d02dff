"""Routed experts of one MoE layer in one call.

    T tokens, E experts of the call (distinct), H hidden size, I inner size

An expert is a *bundle*: gate, up and down in packed form, and their biases if the model has them,
at the same offsets in every bundle of a layer. Bundles lie anywhere in memory: in leases of an
arena, where the cache put them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.blocks import TENSOR_ALIGN, align_up
from offload.cpu_ops import threads
from offload.cpu_ops.activations import record_bytes, scratch_bytes
from offload.cpu_ops.entries import ffn_entry
from offload.cpu_ops.ffn import Ffn
from offload.cpu_ops.formats import Format
from offload.cpu_ops.functions import Glu
from offload.cpu_ops.isa import choose
from offload.cpu_ops.kernels import (
    Floats,
    address_of,
    check_floats,
    tiles_per_task,
    workspace,
)
from offload.cpu_ops.kv_cache import aligned
from offload.cpu_ops.packing import packed_bytes
from offload.cpu_ops.prefill_kernels import Sum, accumulate_entry
from offload.cpu_ops.program import Step
from offload.errors import OffloadError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayout:
    """Where things lie in a bundle, and what an expert computes.

    ``gate`` and ``up`` [I, H] in the format ``gate_up``, ``down`` [H, I] in its own; offsets in
    bytes from the bundle's start. Biases are float32, gate's and up's [I], down's [H]; an offset
    of -1: there is none. ``alpha`` and ``limit``: of ``Glu.CLAMPED``.
    """

    gate_up: Format
    down: Format
    hidden: int
    inner: int
    gate_offset: int
    up_offset: int
    down_offset: int
    gate_bias_offset: int = -1
    up_bias_offset: int = -1
    down_bias_offset: int = -1
    nbytes: int
    glu: Glu = Glu.SILU
    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        parts = sorted(
            (offset, offset + size)
            for offset, size in (
                (self.gate_offset, packed_bytes(self.gate_up, self.inner, self.hidden)),
                (self.up_offset, packed_bytes(self.gate_up, self.inner, self.hidden)),
                (self.down_offset, packed_bytes(self.down, self.hidden, self.inner)),
                (self.gate_bias_offset, 4 * self.inner),
                (self.up_bias_offset, 4 * self.inner),
                (self.down_bias_offset, 4 * self.hidden),
            )
            if offset != -1
        )
        ends = [0, *(end for _, end in parts)]
        starts = [*(start for start, _ in parts), self.nbytes]
        if any(start < end for start, end in zip(starts, ends, strict=True)):
            raise OffloadError(
                f"parts {parts} of an expert of {self.nbytes} bytes overlap or do not fit"
            )


def expert_layout(
    gate_up: Format,
    down: Format,
    hidden: int,
    inner: int,
    *,
    biases: bool = False,
    glu: Glu = Glu.SILU,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> ExpertLayout:
    """Gate, up, down, then gate's, up's and down's bias, each aligned to 64 bytes."""
    sizes = [
        packed_bytes(gate_up, inner, hidden),
        packed_bytes(gate_up, inner, hidden),
        packed_bytes(down, hidden, inner),
        *((4 * inner, 4 * inner, 4 * hidden) if biases else ()),
    ]
    offsets, end = [], 0
    for size in sizes:
        start = align_up(end, TENSOR_ALIGN)
        offsets.append(start)
        end = start + size
    gate_bias, up_bias, down_bias = offsets[3:] if biases else (-1, -1, -1)
    return ExpertLayout(
        gate_up=gate_up, down=down, hidden=hidden, inner=inner,
        gate_offset=offsets[0], up_offset=offsets[1], down_offset=offsets[2],
        gate_bias_offset=gate_bias, up_bias_offset=up_bias, down_bias_offset=down_bias,
        nbytes=end, glu=glu, alpha=alpha, limit=limit,
    )  # fmt: skip


def expert_ffn(
    layout: ExpertLayout,
    bases: npt.NDArray[Any],
    x: Floats,
    weights: Floats,
    out: Floats,
    *,
    add: bool = False,
    isa: str | None = None,
) -> Floats:
    """``out = sum over experts, in the given order, of weight * down(glu(gate x, up x))``.

    One token: ``x`` [H], ``weights`` [E], ``out`` [H]. Several: [T, H], [T, E], [T, H]; ``bases``
    are then the distinct experts of all tokens, and a weight of exactly 0 means that the token is
    not routed there. Each token's result is what it would be alone.

    ``add``: onto what ``out`` holds. Experts given in several calls, in the same order, give the
    same bits as in one.

    ``bases``: int64 or uint64 [E], addresses of bundles that stay in place during the call.
    Returns ``out``.

    Raises:
        OffloadError: a shape or dtype does not fit.
    """
    if x.ndim == 1:
        check_floats("weights", weights, (len(bases),))
        check_floats("out", out, (layout.hidden,), written=True)
        expert_ffn(layout, bases, x[None], weights[None], out[None], add=add, isa=isa)
        return out
    tokens, experts = x.shape[0], len(bases)
    check_floats("x", x, (tokens, layout.hidden))
    check_floats("weights", weights, (tokens, experts))
    check_floats("out", out, (tokens, layout.hidden), written=True)
    if bases.ndim != 1 or bases.dtype.itemsize != 8 or bases.dtype.kind not in "iu":
        raise OffloadError(f"bases must be int64 [E], got {bases.dtype} {list(bases.shape)}")
    if tokens == 0:
        return out
    if experts == 0:
        if not add:
            out[:] = 0
        return out
    entry = ffn_entry(layout.gate_up.name, layout.down.name, choose(isa))
    a, keep = _arguments(layout, np.ascontiguousarray(bases), x, weights, out)
    a[Ffn.ADD] = add
    threads.run(entry.call, entry.address, a)
    del keep
    return out


def add_weighted(
    values_nH: Floats, tokens: npt.NDArray[np.int64], weights: Floats, out_TH: Floats
) -> None:
    """``out[tokens[i]] = fma(weights[i], values[i], out[tokens[i]])``: the end of ``expert_ffn``,
    for one expert. ``tokens``: int64 [n], distinct; float32 [n, H], [n], [T, H].

    Raises:
        OffloadError: a shape or dtype does not fit.
    """
    count, columns = values_nH.shape
    check_floats("weights", weights, (count,))
    check_floats("out", out_TH, (len(out_TH), columns), written=True)
    # The kernel reads 16 columns at a time.
    padded = np.zeros((count, align_up(columns, 16)), np.float32)
    padded[:, :columns] = values_nH
    tokens = np.ascontiguousarray(tokens, np.int64)
    a = np.zeros(Sum.SIZE, np.int64)
    a[Sum.VALUES : Sum.OUT_STRIDE + 1] = (
        address_of(padded), 4 * padded.shape[1], columns, address_of(tokens),
        address_of(weights), count, address_of(out_TH), 4 * columns,
    )  # fmt: skip
    entry = accumulate_entry()
    threads.run(entry.call, entry.address, a)


class TokenExperts:
    """``expert_ffn`` of one token at a time, for one layout: its arguments are made once, and a
    call writes the seven of them that change. Results are ``expert_ffn``'s, bit for bit. Calls must
    not overlap."""

    def __init__(
        self,
        layout: ExpertLayout,
        most: int,
        *,
        isa: str | None = None,
        share: TokenExperts | None = None,
    ) -> None:
        """``most``: experts in one call at most. ``share``: of the same layout and ``most``, whose
        scratch memory this one uses too; then their calls must not overlap either."""
        self.layout, self.most = layout, most
        gate_up, down = layout.gate_up, layout.down
        self._entry = ffn_entry(gate_up.name, down.name, choose(isa))
        h_step = down.blocks(layout.inner) * record_bytes(down)
        if share is not None and (share.layout, share.most) != (layout, most):
            raise OffloadError("scratch memory is shared by calls of one layout and size")
        nbytes = (
            align_up(4 * most * layout.inner, 64)
            + align_up(scratch_bytes(gate_up, layout.hidden), 64)
            + scratch_bytes(down, layout.inner) * most
            + 64
        )
        memory: npt.NDArray[np.uint8]
        memory = np.empty(nbytes, np.uint8) if share is None else share._memory
        self._memory: npt.NDArray[np.uint8] = memory
        h_address = h_inputs = align_up(address_of(memory), 64)
        x_records = align_up(h_address + 4 * most * layout.inner, 64)
        h_records = align_up(x_records + scratch_bytes(gate_up, layout.hidden), 64)
        self._reads_floats = not scratch_bytes(gate_up, layout.hidden)
        if self._reads_floats:
            x_records = 0
        if scratch_bytes(down, layout.inner):
            h_inputs = h_records
        else:
            h_records = 0
        starts = np.arange(most + 1, dtype=np.int64)
        slot_tokens = np.zeros(most, np.int64)
        self._x_places = np.full(most, x_records, np.int64)
        h_places = h_inputs + h_step * np.arange(most, dtype=np.int64)
        self._keep = (starts, slot_tokens, h_places)
        self._a = a = aligned((Ffn.SIZE,), np.int64)
        alpha, limit = struct.unpack("<2i", struct.pack("<2f", layout.alpha, layout.limit))
        a[Ffn.EXPERTS : Ffn.LIMIT + 1] = (
            0, 0, address_of(starts), address_of(slot_tokens),
            0, 1, 0, x_records, address_of(self._x_places),
            h_address, h_records, address_of(h_places), 0, 4 * layout.hidden,
            *_fixed(layout), alpha, limit,
        )  # fmt: skip

    def __call__(
        self, bases: npt.NDArray[Any], x: Floats, weights: Floats, out: Floats, *, add: bool = False
    ) -> Floats:
        """``x`` [H], ``weights`` [E], ``out`` [H], ``bases`` int64 [E], at least one.

        Raises:
            OffloadError: a shape or dtype does not fit.
        """
        self._bind(bases, x, weights, out)
        self._a[Ffn.ADD] = add
        self._a[Ffn.NEXT_X :] = 0
        threads.run(self._entry.call, self._entry.address, self._a)
        return out

    def step(self, bases: npt.NDArray[np.int64], x: Floats, weights: Floats, out: Floats) -> Step:
        """What a call with these runs; they may be filled in later, but for how many there are.
        After it, this object is for that step only."""
        self._bind(bases, x, weights, out)
        self._a[Ffn.ADD] = 0
        keep = (self, bases, x, weights, out)
        return Step(self._entry, self._a, self._a[Ffn.NEXT_X :], keep)

    def _bind(self, bases: npt.NDArray[Any], x: Floats, weights: Floats, out: Floats) -> None:
        n = len(bases)
        if not 0 < n <= self.most or bases.dtype.itemsize != 8:
            raise OffloadError(
                f"bases must be int64 [1..{self.most}], got {bases.dtype} {list(bases.shape)}"
            )
        check_floats("x", x, (self.layout.hidden,))
        check_floats("weights", weights, (n,))
        check_floats("out", out, (self.layout.hidden,), written=True)
        a = self._a
        at = address_of(x)
        a[Ffn.EXPERTS], a[Ffn.BASES], a[Ffn.SLOT_WEIGHTS] = (
            n,
            address_of(bases),
            address_of(weights),
        )
        a[Ffn.X], a[Ffn.OUT] = at, address_of(out)
        if self._reads_floats:
            self._x_places.fill(at)


def _fixed(layout: ExpertLayout) -> tuple[int, ...]:
    """What a call's arguments hold for every token alike, from ``Ffn.HIDDEN`` to ``Ffn.GLU``."""
    gate_up, down = layout.gate_up, layout.down
    return (
        layout.hidden, layout.inner, gate_up.blocks(layout.hidden), down.blocks(layout.inner),
        layout.gate_offset, layout.up_offset, layout.down_offset,
        layout.gate_bias_offset, layout.up_bias_offset, layout.down_bias_offset,
        tiles_per_task(layout.inner, gate_up.row_bytes(layout.hidden)),
        tiles_per_task(layout.hidden, down.row_bytes(layout.inner)),
        int(layout.glu),
    )  # fmt: skip


def _arguments(
    layout: ExpertLayout, bases: npt.NDArray[Any], x: Floats,
    weights: Floats, out: Floats,
) -> tuple[npt.NDArray[np.int64], object]:  # fmt: skip
    """The kernel's arguments, and what must stay alive while it runs."""
    tokens, experts = weights.shape
    if tokens == 1:
        starts = np.arange(experts + 1, dtype=np.int64)
        slot_tokens = np.zeros(experts, np.int64)
        slot_weights = weights
    else:
        routed = weights.T != 0
        slot_experts, slot_tokens = map(np.ascontiguousarray, np.nonzero(routed))
        starts = np.searchsorted(slot_experts, np.arange(experts + 1)).astype(np.int64)
        slot_weights = np.ascontiguousarray(weights.T[routed])
    slots = len(slot_tokens)
    gate_up, down = layout.gate_up, layout.down
    x_step = gate_up.blocks(layout.hidden) * record_bytes(gate_up)
    h_step = down.blocks(layout.inner) * record_bytes(down)
    x_address = x_inputs = address_of(x)
    h_address = h_inputs = workspace.address("h", 4 * slots * layout.inner)
    x_records = h_records = 0
    if scratch_bytes(gate_up, layout.hidden):
        x_records = x_inputs = workspace.address("x", tokens * x_step)
    if scratch_bytes(down, layout.inner):
        h_records = h_inputs = workspace.address("h records", slots * h_step)
    x_places = x_inputs + slot_tokens * x_step
    h_places = np.arange(h_inputs, h_inputs + slots * h_step, h_step, dtype=np.int64)[:slots]
    a = np.zeros(Ffn.SIZE, np.int64)
    alpha, limit = struct.unpack("<2i", struct.pack("<2f", layout.alpha, layout.limit))
    a[Ffn.EXPERTS : Ffn.LIMIT + 1] = (
        experts, address_of(bases), address_of(starts), address_of(slot_tokens),
        address_of(slot_weights), tokens, x_address, x_records, address_of(x_places),
        h_address, h_records, address_of(h_places), address_of(out), 4 * layout.hidden,
        *_fixed(layout), alpha, limit,
    )  # fmt: skip
    return a, (starts, slot_tokens, slot_weights, x_places, h_places)
