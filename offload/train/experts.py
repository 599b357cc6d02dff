"""Fused experts in training: one by one, in both directions.

A MoE layer's own eager loop indexes ``self.gate_up_proj[e]``. What it finds is a leaf of autograd
for expert ``e`` alone, whose memory is there while the loop is at it. What backward needs of it
later is not kept: saved tensors that are views of an expert's memory are saved as their place in it
(``torch.autograd.graph.saved_tensors_hooks``), and the expert comes again when backward asks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn

from offload.errors import OffloadError
from offload.models.expert_groups import ExpertGroup
from offload.models.experts import ExpertProxy, routing
from offload.models.shadow import shadow
from offload.train.device_values import Copy
from offload.train.forward_kernels import forgetting, forgetting_saved
from offload.train.layout import TrainLayout, TrainUnit
from offload.train.steps import Clock
from offload.train.weights import Entry, Weights

if TYPE_CHECKING:
    from offload.train.engine import Engine


def stream_experts(engine: Engine) -> Iterator[Callable[[], Any]]:
    """Let every group's experts come one by one; yields what undoes it."""
    for unit in engine.layout.units:
        for group in unit.groups:
            yield from ExpertRun(engine, unit, group).attach()


class ExpertHomes(Protocol):
    """Where experts are, and where their gradients go: ``device_tier.Homes``."""

    def hollow_device(self, block: int) -> torch.device: ...

    def acquire_expert(self, unit: int, block: int) -> Entry | Copy: ...

    def release_expert(self, unit: int, block: int) -> None: ...

    def add_gradient(self, block: int, piece: int, gradient: torch.Tensor) -> None: ...


class ExpertEngine(Protocol):
    """What experts ask of an engine."""

    @property
    def layout(self) -> TrainLayout: ...

    @property
    def weights(self) -> Weights: ...

    @property
    def homes(self) -> ExpertHomes: ...

    @property
    def clock(self) -> Clock: ...

    def last_in_round(self) -> bool: ...

    def unit_runs(self, unit: int) -> bool: ...

    def on_unit_end(self, unit: int, call: Callable[[], Any]) -> Callable[[], Any]: ...


class _Leaf:
    """One expert's piece of a fused parameter during one run of its layer."""

    def __init__(self, run: ExpertRun, block: int, piece: int) -> None:
        spec = run.engine.layout.blocks[block].pieces[piece]
        dtype: torch.dtype = getattr(torch, run.engine.layout.blocks[block].dtype)
        device = run.engine.homes.hollow_device(block)
        self.spec = spec
        trained = run.engine.layout.blocks[block].trained and run.trains(piece)
        with torch.inference_mode(False):  # no place for memory otherwise
            stand_in = torch.full((1,), math.nan, dtype=dtype, device=device)
            self.hollow = stand_in.expand(spec.shape)
            self.tensor = nn.Parameter(self.hollow, requires_grad=trained)
        if trained:
            homes = run.engine.homes

            def take(param: nn.Parameter) -> None:
                gradient, param.grad = param.grad, None
                if gradient is not None:
                    homes.add_gradient(block, piece, gradient)

            self.tensor.register_post_accumulate_grad_hook(take)

    def place(self, entry: Entry | Copy) -> None:
        spec = self.spec
        self.tensor.data = entry.tensor[spec.offset : spec.offset + spec.count].view(spec.shape)

    def remove(self) -> None:
        self.tensor.data = self.hollow


class ExpertRun:
    """A layer's experts while its forward or backward runs."""

    def __init__(self, engine: ExpertEngine, unit: TrainUnit, group: ExpertGroup) -> None:
        self.engine = engine
        self.unit = unit
        self.group = group
        self.blocks = unit.experts[group.name]
        self._index = {p.name: i for i, p in enumerate(group.params)}
        self._at: tuple[int, Entry | Copy] | None = None
        self._leaves: dict[int, list[_Leaf]] = {}
        self._mine = frozenset(self.blocks)
        self._routed: list[int] = []
        """Blocks of the experts of the last run."""

    def trains(self, piece: int) -> bool:
        """Whether the fused parameter wants a gradient now: a program may freeze it meanwhile."""
        at = self.group.params[piece].places[0].attr
        fused = self.group.module._parameters[at]
        return fused is not None and fused.requires_grad

    def attach(self) -> Iterator[Callable[[], Any]]:
        """Put them in the place of the fused ones; yields what undoes it."""
        module = self.group.module
        proxies = [ExpertProxy(self, param) for param in self.group.params]
        for param, proxy in zip(self.group.params, proxies, strict=True):
            yield shadow(module, param.places[0].attr, proxy)
        inner = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            for proxy in proxies:
                proxy.check()
            if torch.is_grad_enabled() and not self.engine.unit_runs(self.unit.index):
                # Nobody would let go of what backward fetches: no update could ever end.
                kind = type(self.unit.module).__name__
                raise OffloadError(
                    f"the {len(self.blocks)} experts of a streamed {kind} were called with "
                    f"gradients outside of it: they come and go with the {kind}. Call that, or "
                    f"take this part's result under torch.no_grad()"
                )
            self._leaves = {}
            try:
                self._announce(routing(args, kwargs, self.group))
                with (
                    forgetting_saved() if forgetting()
                    else torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
                ):  # fmt: skip
                    return inner(*args, **kwargs)
            finally:
                self._let_go()

        yield shadow(module, "forward", forward)
        done = self.engine.on_unit_end(self.unit.index, self._end)
        yield done

    def _announce(self, experts: list[int]) -> None:
        """Routed experts come in ascending order; where backward follows at once, which goes
        through them the other way round, again from the last one to the first."""
        weights = self.engine.weights
        weights.uses.expect_experts(len(experts), self.group.n_experts)
        self._routed = [self.blocks[e] for e in experts]
        back = self._routed[::-1] if torch.is_grad_enabled() and not forgetting() else []
        # What another micro-batch reaches in the same layer, behind this one, is much the same.
        more = [] if self.engine.last_in_round() else self._routed
        weights.expect([*self._routed, *back, *more], self._mine)

    def get(self, expert: int, name: str) -> torch.Tensor:
        """An expert's tensor, its memory in place until another expert's is asked for."""
        if not 0 <= expert < self.group.n_experts:
            raise IndexError(f"expert {expert} of {self.group.n_experts} in {self.group.name}")
        leaves = self._leaves.get(expert)
        if leaves is None:
            block = self.blocks[expert]
            leaves = [_Leaf(self, block, i) for i in range(len(self._index))]
            self._leaves[expert] = leaves
        self._come(expert)
        return leaves[self._index[name]].tensor

    def _come(self, expert: int) -> Entry | Copy:
        if self._at is not None and self._at[0] == expert:
            return self._at[1]
        self._let_go()
        block = self.blocks[expert]
        began = time.perf_counter()
        self.engine.weights.reached(block)
        entry = self.engine.homes.acquire_expert(self.unit.index, block)
        self.engine.clock.waiting += time.perf_counter() - began
        self._at = expert, entry
        for leaf in self._leaves.get(expert, ()):
            leaf.place(entry)
        return entry

    def _let_go(self) -> None:
        if self._at is not None:
            (expert, entry), self._at = self._at, None
            for leaf in self._leaves.get(expert, ()):
                leaf.remove()
            self.engine.homes.release_expert(self.unit.index, entry.block.index)

    def _end(self) -> None:
        """The unit is through: nothing of its experts is asked for any more."""
        self._let_go()
        self._leaves = {}
        if self.engine.last_in_round():
            self.engine.weights.expect_nothing()

    def _pack(self, tensor: torch.Tensor) -> Any:
        if self._at is None:
            return tensor
        expert, entry = self._at
        at = tensor.data_ptr() - entry.tensor.data_ptr()
        if not 0 <= at < entry.block.value_bytes:
            return tensor
        offset = at // tensor.element_size()
        return _Place(expert, offset, tuple(tensor.shape), tensor.stride())

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _Place):
            return saved  # type: ignore[no-any-return]
        entry = self._come(saved.expert)
        start = entry.tensor.storage_offset() + saved.offset
        return entry.tensor.as_strided(saved.shape, saved.stride, start)


class _Place(NamedTuple):
    """A saved view of an expert's memory: where in it, and how."""

    expert: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
