"""A MoE layer's packed experts on two sites: the device has those in its slots, the CPU others.

    T tokens, k experts of a token, n tokens of an expert, H hidden size

As ``hybrid``, with kernels in place of the class's loop: an expert that the CPU computes is a call
of the fused kernel on its bundle where it lies in RAM, and its n rows go up without their weights.
How the sum is put together is the device's affair: where the CPU's kernels are the device's, too
(the simulated one), every expert's rows are added in ascending order by the very step that the
kernel ends with, so that who computed what changes no bit. A card adds its own as they come, in the
order of the schedule, and the CPU's behind them; it rounds otherwise anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from offload.blocks import TENSOR_ALIGN, align_up
from offload.cpu_ops.experts import ExpertLayout, add_weighted, expert_ffn
from offload.cpu_ops.kernels import Floats
from offload.models.expert_groups import ExpertGroup
from offload.models.hybrid import ROWS, Rows
from offload.models.packed_modules import PackedSession
from offload.runtime.executor import Executor
from offload.scheduler.policy import Scores

Routed = tuple[list[int], list[int]]
"""An expert's tokens, and their places in the routing."""


class Merge(Protocol):
    """Puts a layer's sum together on the device."""

    def on_device(self, experts: Sequence[int], bases: npt.NDArray[np.int64]) -> None:
        """The device computes these experts, whose bundles are at ``bases``."""
        ...

    def from_cpu(self, expert: int, rows_nH: torch.Tensor) -> None:
        """The CPU has computed an expert: its rows without weights, until the layer ends."""
        ...

    def result(self) -> torch.Tensor:
        """float32 [T, H], when all are there."""
        ...


MakeMerge = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Rows], Merge]
"""From the hidden states, the routing [T, k] and its weights [T, k], on the device."""


class KernelMerge:
    """The device computes with the CPU's kernels."""

    def __init__(
        self, layout: ExpertLayout, x_TH: torch.Tensor, weights_Tk: torch.Tensor, rows: Rows
    ) -> None:
        self._layout, self._rows = layout, rows
        self._x = x_TH.numpy()
        self._weights = weights_Tk.numpy()
        self._parts: dict[int, Floats] = {}

    def on_device(self, experts: Sequence[int], bases: npt.NDArray[np.int64]) -> None:
        """See ``Merge``."""
        for expert, base in zip(experts, bases.tolist(), strict=True):
            x_nH = self._x[self._rows.of[expert][0]]
            self._parts[expert] = unweighted(self._layout, base, x_nH)

    def from_cpu(self, expert: int, rows_nH: torch.Tensor) -> None:
        """See ``Merge``."""
        self._parts[expert] = rows_nH.numpy()

    def result(self) -> torch.Tensor:
        """See ``Merge``."""
        out_TH = np.zeros_like(self._x)
        for expert, (tokens, places) in self._rows.of.items():
            weights = self._weights[tokens, places]
            add_weighted(self._parts[expert], np.array(tokens, np.int64), weights, out_TH)
        return torch.from_numpy(out_TH)


class HybridPacked:
    """What stands for the forward of a layer's experts module."""

    def __init__(
        self, executor: Executor, group: ExpertGroup, session: PackedSession,
        layout: ExpertLayout, merge: MakeMerge, rows: int, at_once: int,
    ) -> None:  # fmt: skip
        """``rows``: most tokens of a pass that is split; ``at_once``: experts that the device
        computes in one go."""
        self._executor, self._group, self._session = executor, group, session
        self._layout, self._merge = layout, merge
        self._rows, self._at_once = rows, at_once
        self._inner: Callable[..., Any] = group.module.forward
        self._scores: Scores | None = None
        blocks = executor.plan.blocks
        first = {b: blocks[b].tensors[0] for b in group.blocks}
        self._first = {b: (tensor.name, tensor.offset) for b, tensor in first.items()}

    def takes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether this pass is split: a short one, of a single sequence."""
        alone = self._executor.road() is self._executor
        given = [*args, *kwargs.values()]
        if not alone or len(given) != 3 or not all(isinstance(t, torch.Tensor) for t in given):
            return False
        tokens = given[0].numel() // self._layout.hidden
        return 0 < tokens <= self._rows

    def begin(self, scores: Scores | None) -> None:
        """A pass that is split begins. ``scores``: what its router says of the experts."""
        self._session.end()  # left by a Ctrl-C before
        self._executor.abandon_cpu()
        self._scores = scores

    def __call__(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Route, compute on both sites, merge; as ``PackedExperts``."""
        if not self.takes((hidden, top_k_index, top_k_weights), {}):
            return self._inner(hidden, top_k_index, top_k_weights)  # type: ignore[no-any-return]
        x_TH = hidden.detach().reshape(-1, self._layout.hidden).float().contiguous()
        index_Tk = top_k_index.reshape(len(x_TH), -1)
        weights_Tk = top_k_weights.detach().reshape(len(x_TH), -1).float().contiguous()
        group, executor = self._group, self._executor
        rows = Rows(index_Tk, group.n_experts)
        name, number = group.blocks, {group.blocks[e]: e for e in rows.of}
        loads = {name[e]: len(tokens) for e, (tokens, _) in rows.of.items()}
        self._session.expect(list(rows.of))  # before: what fails behind the routing has to end, too
        schedule, below = executor.split_route(group.name, loads, lambda _: [x_TH], self._scores)
        if schedule is None:
            return self._inner(hidden, top_k_index, top_k_weights)  # type: ignore[no-any-return]
        merge = self._merge(x_TH, index_Tk, weights_Tk, rows)
        try:
            for block in schedule.cpu:
                tokens = rows.of[number[block]][0]
                shape = (len(tokens), self._layout.hidden)
                executor.on_cpu(block, self._work(block, tokens, below[0]), shape, torch.float32)
            self._on_device(schedule.device, number, merge)
            for block in schedule.cpu:
                merge.from_cpu(number[block], executor.from_cpu(block))
            out_TH = merge.result()
        finally:
            executor.abandon_cpu()
        return out_TH.view(hidden.shape).to(hidden.dtype)

    def _work(
        self, block: str, tokens: list[int], x_TH: torch.Tensor
    ) -> Callable[[Mapping[str, torch.Tensor]], torch.Tensor]:
        tensor, offset = self._first[block]

        def work(views: Mapping[str, torch.Tensor]) -> torch.Tensor:
            base = views[tensor].data_ptr() - offset
            return torch.from_numpy(unweighted(self._layout, base, x_TH.numpy()[tokens]))

        return work

    def _on_device(self, blocks: Sequence[str], number: Mapping[str, int], merge: Merge) -> None:
        """In the order in which they come up, as many at once as are there."""
        executor, at = self._executor, 0
        while at < len(blocks):
            some = blocks[at : at + self._at_once]
            bases = executor.acquire_run(some, self._at_once)
            held = some[: len(bases)]
            try:
                merge.on_device([number[b] for b in held], np.array(bases, np.int64))
            finally:
                executor.release_run(held)
            at += len(held)


def unweighted(layout: ExpertLayout, base: int, x_nH: Floats) -> Floats:
    """One expert, whose bundle is at ``base``, on its tokens: [n, H]."""
    x_nH = np.ascontiguousarray(x_nH)
    one, ones = np.array([base], np.int64), np.ones((len(x_nH), 1), np.float32)
    return expert_ffn(layout, one, x_nH, ones, np.empty_like(x_nH))


def split_bytes(layouts: Iterable[ExpertLayout], top_k: int) -> int:
    """Most bytes that ``ROWS`` tokens of a layer send between the sites."""
    most = 0
    for layout in layouts:
        row = 4 * layout.hidden
        down, up = align_up(ROWS * row, TENSOR_ALIGN), ROWS * top_k * (row + TENSOR_ALIGN)
        most = max(most, down + up)
    return align_up(most)


__all__ = ["HybridPacked", "KernelMerge", "MakeMerge", "Merge", "split_bytes", "unweighted"]
