"""The experts of one MoE layer for a prompt: one expert at a time, all of its tokens at once.

    T tokens of the prompt, n tokens of an expert, H hidden size, I inner size

Experts arrive from the disk one by one and are used once each, so the sum over experts is made as
they come: ``out[token] = fma(weight, expert(x[token]), out[token])`` in float32. Callers add
experts in ascending order; then the order of additions is fixed.

An expert with few tokens goes through the decode kernels, and its tokens get to the bit what
``experts.expert_ffn`` gives them; one with many goes through dequantised slabs (``prefill.py``,
with its rounding). Which, depends on the format and n only.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from offload.blocks import align_up
from offload.cpu_ops import activations, threads
from offload.cpu_ops.experts import ExpertLayout, expert_ffn
from offload.cpu_ops.formats import Format
from offload.cpu_ops.isa import choose
from offload.cpu_ops.kernels import Floats, address_of, check_floats, workspace
from offload.cpu_ops.prefill import (
    KIND_BYTES,
    crossover,
    dequantize_slab,
    slab_bytes,
    slab_kind,
    slab_rows,
    tensor_at,
)
from offload.cpu_ops.prefill_kernels import Gate, Sum, accumulate_entry, activate_entry
from offload.errors import OffloadError

if TYPE_CHECKING:
    import torch

Integers = npt.NDArray[np.int64]

_LINE = 64

_GRAIN = 8
"""Tokens of an expert are filled up to a multiple of it: oneDNN prepares a product of every new
shape for 0.5 ms, as long as the product of 32 tokens takes."""


class _Places:
    """Addresses of scratch parts, one after the other; ``end`` is how much they take."""

    def __init__(self, base: int) -> None:
        self.base = self.end = base

    def take(self, nbytes: int) -> int:
        at = self.end
        self.end = at + align_up(nbytes, _LINE)
        return at


class _Slabs:
    """Where the slab path keeps what, for up to ``tokens`` tokens of an expert."""

    def __init__(self, layout: ExpertLayout, tokens: int, base: int) -> None:
        up, down = layout.gate_up, layout.down
        self.kind = slab_kind(up) if slab_kind(up) == slab_kind(down) else "f32"
        width, places = KIND_BYTES[self.kind], _Places(base)
        n = align_up(tokens, _GRAIN)
        self.inner_step = slab_rows(self.kind, layout.inner, layout.hidden)
        self.hidden_step = slab_rows(self.kind, layout.hidden, layout.inner)
        self.h_stride = align_up(layout.inner, 16) * width
        self.slab = places.take(
            max(
                slab_bytes(self.kind, layout.inner, layout.hidden),
                slab_bytes(self.kind, layout.hidden, layout.inner),
            )
        )
        self.x = places.take(n * layout.hidden * width)
        self.gate = places.take(n * self.inner_step * width)
        self.up = places.take(n * self.inner_step * width)
        self.h = places.take(n * self.h_stride)
        self.results = places.take(n * self.hidden_step * width)
        self.nbytes = places.end - base


def experts_scratch_bytes(layout: ExpertLayout, tokens: int, *, isa: str | None = None) -> int:
    """The most that ``ExpertSum`` holds besides its arguments while one expert has up to
    ``tokens`` tokens, on either path; what torch's product packs for itself is not in it."""
    up, down = layout.gate_up, layout.down
    least = _least(layout, isa)
    few = tokens if least is None else min(tokens, least - 1)
    decode = few * (
        4 * (2 * layout.hidden + layout.inner)
        + activations.scratch_bytes(up, layout.hidden)
        + activations.scratch_bytes(down, layout.inner)
    )
    many = 0
    if least is not None and tokens >= least:
        many = _Slabs(layout, tokens, 0).nbytes
    return decode + many + 6 * _LINE  # each of up to six buffers is aligned


def _least(layout: ExpertLayout, isa: str | None) -> int | None:
    """Tokens of an expert from which slabs are used: where all of its formats gain."""
    found = [crossover(fmt, isa) for fmt in (layout.gate_up, layout.down)]
    both = [n for n in found if n is not None]
    return max(both) if len(both) == len(found) else None


class ExpertSum:
    """One MoE layer of a prompt, expert by expert.

    ::

        moe = ExpertSum(layout, x, out)          # out becomes 0
        for expert in ascending order:
            moe.add(base, tokens, weights)       # base: an address; free again on return

    ``x`` and ``out`` float32 [T, H] stay in place until the last ``add``; ``slabs`` forces the
    slab path (True) or the decode kernels (False) for every expert.

    Raises:
        OffloadError: a shape or dtype does not fit.
    """

    def __init__(
        self, layout: ExpertLayout, x_TH: Floats, out_TH: Floats,
        *, slabs: bool | None = None, isa: str | None = None,
    ) -> None:  # fmt: skip
        tokens = x_TH.shape[0]
        check_floats("x", x_TH, (tokens, layout.hidden))
        check_floats("out", out_TH, (tokens, layout.hidden), written=True)
        out_TH[:] = 0
        self._layout, self._x, self._out, self._isa = layout, x_TH, out_TH, isa
        least = _least(layout, isa)
        self._slabs_from = {None: least, True: 0, False: None}[slabs]

    def add(self, base: int, tokens: Integers, weights: Floats) -> None:
        """Add ``weights[i] * expert(x[tokens[i]])`` to ``out[tokens[i]]``.

        ``tokens``: int64 [n], distinct; ``weights``: float32 [n]; n may be 0. ``base``: the
        address of the expert's bundle, no longer used after the call.
        """
        n = len(tokens)
        check_floats("weights", weights, (n,))
        if tokens.dtype != np.int64 or tokens.shape != (n,) or not tokens.flags.c_contiguous:
            raise OffloadError(f"tokens must be contiguous int64 [n], got {tokens.dtype}")
        if n == 0:
            return
        if tokens.min() < 0 or tokens.max() >= len(self._x):
            raise OffloadError(
                f"tokens {tokens.min()}..{tokens.max()} of an expert, but there are {len(self._x)}"
            )
        if self._slabs_from is not None and n >= self._slabs_from:
            self._by_slabs(base, tokens, weights)
        else:
            self._by_kernels(base, tokens, weights)

    def _by_kernels(self, base: int, tokens: Integers, weights: Floats) -> None:
        """``expert_ffn`` with a weight of 1; the true ones come in the sum, in one rounding."""
        layout, n = self._layout, len(tokens)
        size = 4 * n * layout.hidden
        x = _floats_at(workspace.address("expert x", size), n, layout.hidden)
        y = _floats_at(workspace.address("expert y", size), n, layout.hidden)
        np.take(self._x, tokens, axis=0, out=x, mode="clip")
        ones = np.ones((n, 1), np.float32)
        expert_ffn(layout, np.array([base]), x, ones, y, isa=self._isa)
        self._accumulate(
            "f32", address_of(y), 4 * layout.hidden, 0, tokens, weights, 0, layout.hidden
        )

    def _by_slabs(self, base: int, tokens: Integers, weights: Floats) -> None:
        import torch

        layout, n = self._layout, len(tokens)
        nbytes = _Slabs(layout, n, 0).nbytes
        at = _Slabs(layout, n, workspace.address("expert slabs", nbytes))
        kind, padded = at.kind, align_up(n, _GRAIN)
        width = KIND_BYTES[kind]
        x = tensor_at(at.x, kind, padded, layout.hidden, layout.hidden * width)
        x[:n] = torch.from_numpy(self._x)[torch.from_numpy(tokens)]
        x[n:] = 0
        for first in range(0, layout.inner, at.inner_step):
            rows = min(at.inner_step, layout.inner - first)
            stride = align_up(rows, 16) * width
            for offset, place in ((layout.gate_offset, at.gate), (layout.up_offset, at.up)):
                w = self._slab(at, layout.gate_up, base + offset, layout.inner, first)
                torch.mm(x, w.T, out=tensor_at(place, kind, padded, len(w), stride))
            self._activate(at, base, padded, first, rows, stride)
        h = tensor_at(at.h, kind, padded, layout.inner, at.h_stride)
        for first in range(0, layout.hidden, at.hidden_step):
            rows = min(at.hidden_step, layout.hidden - first)
            stride = align_up(rows, 16) * width
            w = self._slab(at, layout.down, base + layout.down_offset, layout.hidden, first)
            torch.mm(h, w.T, out=tensor_at(at.results, kind, padded, len(w), stride))
            bias = _bias(base, layout.down_bias_offset, first)
            self._accumulate(kind, at.results, stride, bias, tokens, weights, first, rows)

    def _slab(self, at: _Slabs, fmt: Format, packed: int, rows: int, first: int) -> torch.Tensor:
        columns = self._layout.hidden + self._layout.inner - rows
        return dequantize_slab(fmt, packed, rows, columns, first, at.slab, at.kind, isa=self._isa)

    def _activate(
        self, at: _Slabs, base: int, tokens: int, first: int, rows: int, stride: int
    ) -> None:
        layout = self._layout
        entry = activate_entry(at.kind, choose(self._isa))
        alpha, limit = struct.unpack("<2i", struct.pack("<2f", layout.alpha, layout.limit))
        a = np.zeros(Gate.SIZE, np.int64)
        a[Gate.GATE : Gate.LIMIT + 1] = (
            at.gate, at.up, stride,
            _bias(base, layout.gate_bias_offset, first),
            _bias(base, layout.up_bias_offset, first),
            rows, at.h + first * KIND_BYTES[at.kind], at.h_stride, tokens,
            int(layout.glu), alpha, limit,
        )  # fmt: skip
        threads.run(entry.call, entry.address, a)

    def _accumulate(
        self, kind: str, values: int, stride: int, bias: int, tokens: Integers,
        weights: Floats, first: int, columns: int,
    ) -> None:  # fmt: skip
        entry = accumulate_entry(kind)
        a = np.zeros(Sum.SIZE, np.int64)
        a[Sum.VALUES : Sum.OUT_STRIDE + 1] = (
            values, stride, bias, columns, address_of(tokens), address_of(weights), len(tokens),
            address_of(self._out) + 4 * first, 4 * self._layout.hidden,
        )  # fmt: skip
        threads.run(entry.call, entry.address, a)


def add_weighted(values_nH: Floats, tokens: Integers, weights: Floats, out_TH: Floats) -> None:
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
        address_of(padded), 4 * padded.shape[1], 0, columns, address_of(tokens),
        address_of(weights), count, address_of(out_TH), 4 * columns,
    )  # fmt: skip
    entry = accumulate_entry("f32")
    threads.run(entry.call, entry.address, a)


def _bias(base: int, offset: int, first: int) -> int:
    return 0 if offset < 0 else base + offset + 4 * first


def _floats_at(address: int, rows: int, columns: int) -> Floats:
    found: Floats = tensor_at(address, "f32", rows, columns, 4 * columns).numpy()
    return found


def experts_matmul(
    layout: ExpertLayout,
    bases: Iterable[int],
    x_TH: Floats,
    routing: Iterable[tuple[Integers, Floats]],
    out_TH: Floats,
    *,
    slabs: bool | None = None,
    isa: str | None = None,
) -> Floats:
    """``out[t] = sum over experts, in the given order, of weight * down(glu(gate x, up x))``.

    ``bases``: addresses of the experts' bundles; ``routing``: for each of them its tokens (int64
    [n], distinct) and their weights (float32 [n]). Otherwise as ``ExpertSum``. Returns ``out``.
    """
    moe = ExpertSum(layout, x_TH, out_TH, slabs=slabs, isa=isa)
    for base, (tokens, weights) in zip(bases, routing, strict=True):
        moe.add(int(base), tokens, weights)
    return out_TH
