"""The routed experts of a MoE layer on a card, straight from their packed bundles.

    T tokens, k experts of a token, H hidden size, I inner size

As ``offload.cpu_ops.experts``: each token's sum over its experts is made in the order in which the
experts are given, so it does not matter how many come in one call. Experts with few tokens are
computed together (``kernels/experts.cuh``), one with many goes through dequantised slabs. Which,
depends on the number of its tokens only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from offload.cpu_ops.experts import ExpertLayout
from offload.cpu_ops.formats import TILE_ROWS, Format
from offload.cpu_ops.functions import Glu
from offload.errors import OffloadError
from offload.gpu_ops import linear as dense
from offload.gpu_ops.arguments import MOST_EXPERTS, MOST_SLOTS, ExpertArgs, Records
from offload.gpu_ops.launch import Launcher
from offload.gpu_ops.records import Scratch, make_records, records_bytes
from offload.gpu_ops.source import MOST_THREADS, Kernel, kernel

Slots = npt.NDArray[np.int64]
"""Positions in the flat routing, ``token * k + place``, of an expert's tokens in their order."""

_MERGE_THREADS = 128

FEW_SLOTS = 64
"""Of a routing, up to which it is searched in Python."""


def scratch_bytes(layout: ExpertLayout, tokens: int, top_k: int) -> int:
    """Bytes of scratch for up to ``tokens`` tokens. What torch's products and the many tokens of
    an expert take is not in it (``many_bytes``)."""
    slots = min(MOST_SLOTS, tokens * top_k)
    few = _few_bytes(layout, tokens, slots)
    many = 0
    if tokens >= dense.MANY:
        many = max(
            dense.scratch_bytes(layout.gate_up, layout.inner, layout.hidden, tokens),
            dense.scratch_bytes(layout.down, layout.hidden, layout.inner, tokens),
        )
    return sum(few) + 64 * len(few) + many


def many_bytes(layout: ExpertLayout, tokens: int) -> int:
    """Bytes of torch's allocator while an expert with ``tokens`` tokens is computed."""
    return 4 * tokens * (3 * layout.hidden + 4 * layout.inner) if tokens >= dense.MANY else 0


def _few_bytes(layout: ExpertLayout, tokens: int, slots: int) -> tuple[int, int, int, int]:
    return (
        records_bytes(layout.gate_up, tokens, layout.hidden),
        4 * slots * layout.inner,
        records_bytes(layout.down, slots, layout.inner),
        4 * slots * layout.hidden,
    )


def expert_ffn(
    launcher: Launcher,
    scratch: Scratch,
    layout: ExpertLayout,
    experts: Sequence[int],
    bases: Sequence[int] | npt.NDArray[np.int64],
    x_TH: torch.Tensor,
    index_Tk: npt.NDArray[np.int64],
    weights_Tk: torch.Tensor,
    out_TH: torch.Tensor,
    *,
    add: bool = False,
) -> torch.Tensor:
    """``out = sum over experts, in the given order, of weight * down(glu(gate x, up x))``, queued.

    Args:
        experts: distinct numbers of experts; of others nothing is added.
        bases: addresses of their bundles on the device.
        x_TH: float32 [T, H] on the device, as ``weights_Tk`` [T, k] and ``out_TH`` [T, H] are.
        index_Tk: int64 [T, k] on the host: the experts that tokens are routed to.
        add: onto what ``out`` holds.

    Raises:
        OffloadError: a shape or dtype does not fit, or scratch is short.
    """
    tokens = x_TH.shape[0]
    dense.check("x", x_TH, (tokens, layout.hidden))
    dense.check("out", out_TH, (tokens, layout.hidden))
    dense.check("weights", weights_Tk, index_Tk.shape)
    if len(index_Tk) != tokens or len(bases) != len(experts):
        raise OffloadError(
            f"{len(index_Tk)} rows of routing for {tokens} tokens, {len(bases)} bundles of "
            f"{len(experts)} experts"
        )
    if tokens == 0:
        return out_TH
    flat = np.ascontiguousarray(index_Tk).reshape(-1)
    routed = [(int(b), s) for b, s in zip(bases, _slots(flat, experts), strict=True)]
    call = _Call(launcher, scratch, layout, x_TH, weights_Tk, out_TH)
    if not add and not any(len(slots) for _, slots in routed):
        return out_TH.zero_()
    for run in _runs([(base, slots) for base, slots in routed if len(slots)]):
        if len(run[0][1]) < dense.MANY:
            call.few(run, add)
        else:
            call.many(*run[0], add)
        add = True
    return out_TH


def _slots(flat: npt.NDArray[np.int64], experts: Sequence[int]) -> list[Slots]:
    """Of each expert."""
    if len(flat) > FEW_SLOTS:
        return [np.flatnonzero(flat == e) for e in experts]
    # A token's: NumPy takes as long for one of its experts as this for all.
    of: dict[int, list[int]] = {}
    for slot, expert in enumerate(flat.tolist()):
        of.setdefault(expert, []).append(slot)
    return [np.array(of.get(e, ()), np.int64) for e in experts]


def _runs(routed: list[tuple[int, Slots]]) -> Iterator[list[tuple[int, Slots]]]:
    """Neighbours that go into one launch; an expert with many tokens is alone."""
    run: list[tuple[int, Slots]] = []
    count = 0
    for base, slots in routed:
        many = len(slots) >= dense.MANY
        if run and (many or len(run) == MOST_EXPERTS or count + len(slots) > MOST_SLOTS):
            yield run
            run, count = [], 0
        if many:
            yield [(base, slots)]
        else:
            run.append((base, slots))
            count += len(slots)
    if run:
        yield run


class _Call:
    """One call's tensors; the tokens' records are made once."""

    def __init__(
        self, launcher: Launcher, scratch: Scratch, layout: ExpertLayout,
        x_TH: torch.Tensor, weights_Tk: torch.Tensor, out_TH: torch.Tensor,
    ) -> None:  # fmt: skip
        self._launcher, self._scratch, self._layout = launcher, scratch, layout
        self._x, self._weights, self._out = x_TH, weights_Tk, out_TH
        self._records: Records | None = None

    def few(self, run: list[tuple[int, Slots]], add: bool) -> None:
        """Experts with less than ``MANY`` tokens each, together."""
        layout, tokens, top_k = self._layout, len(self._x), self._weights.shape[1]
        slots = sum(len(s) for _, s in run)
        at_x, at_h, at_h_records, at_y = self._scratch.places(*_few_bytes(layout, tokens, slots))
        if self._records is None:
            self._records = make_records(
                self._launcher, layout.gate_up, self._x.data_ptr(), tokens, layout.hidden, at_x
            )
        a = ExpertArgs(
            gate=layout.gate_offset, up=layout.up_offset, down=layout.down_offset,
            gate_bias=layout.gate_bias_offset, up_bias=layout.up_bias_offset,
            down_bias=layout.down_bias_offset, x_records=self._records, x=self._x.data_ptr(),
            h=at_h, y=at_y, weights=self._weights.data_ptr(), out=self._out.data_ptr(),
            hidden=layout.hidden, inner=layout.inner, experts=len(run), tokens=tokens, top_k=top_k,
            kind=int(layout.glu), alpha=layout.alpha, limit=layout.limit, add=add,
        )  # fmt: skip
        end = 0
        for i, (base, mine) in enumerate(run):
            a.bases[i] = base
            a.slots[end : end + len(mine)] = mine.tolist()
            end += len(mine)
            a.starts[i + 1] = end
        most = max(len(mine) for _, mine in run)
        # Half of a block's warps are the gate's.
        half = dense.warps(layout.gate_up, layout.hidden, MOST_THREADS // 64)
        self._tiles(kernel("gate_up", layout.gate_up, most), layout.inner, len(run), 2 * half, a)
        a.h_records = make_records(
            self._launcher, layout.down, at_h, slots, layout.inner, at_h_records
        )
        each = dense.warps(layout.down, layout.inner)
        self._tiles(kernel("down", layout.down, most), layout.hidden, len(run), each, a)
        grid = (tokens, -(-layout.hidden // _MERGE_THREADS))
        self._launcher.launch(kernel("merge"), grid, _MERGE_THREADS, a)

    def _tiles(self, chosen: Kernel, rows: int, experts: int, warps: int, a: ExpertArgs) -> None:
        self._launcher.launch(chosen, (-(-rows // TILE_ROWS), experts), 32 * warps, a)

    def many(self, base: int, slots: Slots, add: bool) -> None:
        """One expert's tokens, by dequantised slabs; its sum is added to the tokens' rows."""
        layout, device = self._layout, self._x.device
        if not add:
            self._out.zero_()
        self._records = None  # slabs lie where they were
        top_k = self._weights.shape[1]
        at = torch.from_numpy(slots).to(device)
        tokens = torch.from_numpy(slots // top_k).to(device)
        x = self._x.index_select(0, tokens)
        gate = self._linear(layout.gate_up, base, layout.gate_offset, x, layout.inner)
        up = self._linear(layout.gate_up, base, layout.up_offset, x, layout.inner)
        self._bias(gate, base, layout.gate_bias_offset)
        self._bias(up, base, layout.up_bias_offset)
        h = _activate(layout, gate, up)
        y = self._linear(layout.down, base, layout.down_offset, h, layout.hidden)
        self._bias(y, base, layout.down_bias_offset)
        # Each row once: no two threads add to the same element.
        self._out.index_add_(0, tokens, y * self._weights.view(-1)[at][:, None])

    def _linear(
        self, fmt: Format, base: int, offset: int, x: torch.Tensor, rows: int
    ) -> torch.Tensor:
        out = torch.empty((len(x), rows), dtype=torch.float32, device=x.device)
        return dense.linear(self._launcher, self._scratch, fmt, base + offset, x, out)

    def _bias(self, to: torch.Tensor, base: int, offset: int) -> None:
        if offset >= 0:
            to += self._launcher.floats_at(base + offset, to.shape[1])


def _activate(layout: ExpertLayout, g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    if layout.glu is Glu.SILU:
        return F.silu(g) * u
    if layout.glu is Glu.GELU:
        return F.gelu(g) * u
    if layout.glu is Glu.GELU_TANH:
        return F.gelu(g, approximate="tanh") * u
    g, u = g.clamp(max=layout.limit), u.clamp(-layout.limit, layout.limit)
    return g * torch.sigmoid(layout.alpha * g) * (u + 1)


__all__ = ["expert_ffn", "many_bytes", "scratch_bytes"]
