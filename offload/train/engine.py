"""The training engine: a model whose weights, gradients and optimizer states stream.

It stands between a model's own code and the lanes. ``Segment``s tell it which unit runs; it puts
weights in place and takes gradients away. What becomes of those is ``stepping``'s.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from offload.cpu_ops import crowding
from offload.errors import OffloadError
from offload.runtime.heap import GiveBack, keeping_freed
from offload.scheduler.timeline import COMPUTE, WAITS, Record
from offload.train.device_tier import DeviceTier, Homes
from offload.train.device_values import Copy
from offload.train.generators import Generators
from offload.train.grads import Gradients
from offload.train.inputs import Later, SpilledInputs, Waits
from offload.train.landing import Landing, plain
from offload.train.layout import Block, TrainLayout
from offload.train.order import UseOrder
from offload.train.passing import refuse_unfilled
from offload.train.row_grads import taking_rows
from offload.train.saved_places import SavedPlaces
from offload.train.segments import Segment
from offload.train.stepping import Stepping
from offload.train.steps import Group, NotFinite, StepResult
from offload.train.updates import Updater
from offload.train.visit import AT_HOME, Visit
from offload.train.weights import Entry, Shared, Weights

__all__ = ["Engine", "Group", "NotFinite", "StepResult", "take_own_gradient"]


_OWN_GRAD: Any = torch.Tensor.grad
"""The attribute that autograd writes to: what ``param.grad`` says may be something else
(``streamed``)."""


def take_own_gradient(param: torch.Tensor) -> torch.Tensor | None:
    """What autograd has just left with ``param``; it is the caller's from now on."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: torch.Tensor | None = _OWN_GRAD.__get__(param)
        _OWN_GRAD.__set__(param, None)
    return gradient


@dataclass(slots=True)
class _Running:
    """A unit whose weights are in place."""

    depth: int = 0
    entries: Sequence[Entry | Copy] = ()
    ends: list[Callable[[], Any]] = field(default_factory=list)


class Engine(Stepping):
    """See the module. One training thread at a time; the lanes are the engine's own."""

    def __init__(
        self, model: nn.Module, layout: TrainLayout, order: UseOrder, weights: Weights,
        gradients: Gradients, updater: Updater, shared: Shared, tier: DeviceTier | None = None,
    ) -> None:  # fmt: skip
        """``tier``: the device that layers run on; None: everything runs in RAM."""
        homes = Homes(weights, gradients, tier)
        super().__init__(layout, order, weights, gradients, updater, shared, homes)
        self.model = model
        self.micro = 0
        """The number of this micro-batch in its step, in the usual order."""
        self.visit: Visit = AT_HOME
        """Where the unit that runs does."""
        self.random_key: Callable[[int, int], int] | None = None
        """Set: seed torch's generator for each unit's forward by (micro-batch, unit), so that
        dropout is the same in any order of micro-batches. None: torch's own sequence."""
        self.on_backward: Callable[[], Any] | None = None
        """Set: called in backward before a unit runs in it, and before a gradient outside of units
        is taken. For loops that do not say which backward is the last."""
        self.compares = False
        """See ``segments.Runtime``. For loops that may change anything at any time."""
        self.present: set[str] = set()
        """Parameters whose memory is in place."""
        self.hollow: dict[str, torch.Tensor] = {}
        self.params: dict[str, nn.Parameter] = {}
        self._running = [_Running() for _ in layout.units]
        self._pieces: dict[str, tuple[int, int]] = {
            piece.param: (block.index, i)
            for block in layout.blocks
            for i, piece in enumerate(block.pieces)
            if piece.expert is None
        }
        self.extra: Callable[[], list[tuple[torch.Tensor, torch.Tensor]]] | None = None
        """Set: losses that units add when they are run again (routers')."""
        self.table_rows: Callable[[int, int, int], torch.Tensor | None] | None = None
        """Set: (block, first row, end) -> rows of a table that is kept packed and never whole in
        the compute dtype, valid until the next call; None for other blocks."""
        self.row_tables: frozenset[str] = frozenset()
        """Parameters whose gradients from lookups are kept by rows (``row_grads``)."""
        self.kept_units: frozenset[int] = frozenset()
        """Units that keep their graph until backward instead of being run again."""
        self.give_back: GiveBack | None = None
        """Set: freed blocks that stay with the process have a limit (``keep_freed``,
        ``bound_freed``)."""
        self.inputs: SpilledInputs | None = None
        """Set: units' inputs that are on the disk between forward and backward."""
        self._by_name: dict[str, list[tuple[int, int]]] = {}
        self.record: Record | None = None
        """Set: told which unit computes, and when it waits for its weights."""
        self.checkpoint_bytes: Callable[[], int] = lambda: 0
        """Bytes read so far of the checkpoint itself."""
        self._closers: list[Callable[[], Any]] = []
        self._install()

    # -- the model ------------------------------------------------------------------------

    def _install(self) -> None:
        """Give the model parameters without memory, and units that ask for theirs."""
        for name, param in self.layout.params.items():
            at = self._pieces.get(name)
            device = self.homes.hollow_device(None if at is None else at[0])
            stand_in = torch.full((1,), math.nan, dtype=param.tensor.dtype, device=device)
            hollow = stand_in.expand(param.tensor.shape)
            fresh = nn.Parameter(hollow, requires_grad=param.tensor.requires_grad)
            self.hollow[name] = hollow
            self.params[name] = fresh
            for place in param.places:
                place.module._parameters[place.attr] = fresh
            if fresh.requires_grad and fresh.numel() and name in self._pieces:
                handle = fresh.register_post_accumulate_grad_hook(self._take(name))
                self._closers.append(handle.remove)
        for whole in {self.model, getattr(self.model, "base_model", self.model)}:
            hook = whole.register_forward_pre_hook(refuse_unfilled, with_kwargs=True)
            self._closers.append(hook.remove)
        trained = {b.index for b in self.layout.trained}
        for unit in self.layout.units:
            mine = {*unit.blocks, *itertools.chain.from_iterable(unit.experts.values())}
            segment = Segment(self, unit.index, unit.module, trains=bool(mine & trained))
            self._closers.append(segment.restore)

    def start(self) -> None:
        """Read what stays in RAM and put in place what is used everywhere."""
        crowding.enter()
        self._closers.append(crowding.leave)
        self.updater.load_resident()
        self.weights.pin_all()
        for block in self.layout.rest:
            self._place(self.weights.acquire(block))
            self.weights.release(block)  # pinned: it stays where it is
        with self.shared.changed:
            self.weights.pump()

    def keep_freed(self, nbytes: int, limit: int) -> None:
        """From now on until the engine closes freed blocks stay on the heap, for the next unit.

        ``nbytes``: how many may be there beside what is in use; 0: none, nothing changes.
        ``limit``: resident bytes of the process with them.
        """
        if nbytes:
            stack = contextlib.ExitStack()
            stack.enter_context(keeping_freed())
            self._closers.append(stack.close)
            self.give_back = GiveBack(limit, nbytes)

    def bound_freed(self, ahead: int, limit: int) -> None:
        """From now on free blocks are given back before a unit that may take the process beyond
        ``limit`` resident bytes. Not where ``keep_freed`` has set a limit, which is less.

        Blocks that are too small to leave by themselves stay between others that are in use: with
        512 tokens they added up to a quarter of a budget of 290 MiB, and exceeded it by an eighth.

        ``ahead``: bytes that a unit takes; 0: nothing changes.
        """
        if ahead and self.give_back is None:
            self.give_back = GiveBack(limit, ahead)

    def _place(self, entry: Entry | Copy) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # parameters may be ``streamed``
            for piece in entry.block.pieces:
                data = entry.tensor[piece.offset : piece.offset + piece.count]
                self.params[piece.param].data = data.view(piece.shape)
                self.present.add(piece.param)

    def _remove(self, entry: Entry | Copy) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for piece in entry.block.pieces:
                self.params[piece.param].data = self.hollow[piece.param]
                self.present.discard(piece.param)

    def _take(self, name: str) -> Callable[[nn.Parameter], None]:
        block, piece = self._pieces[name]

        def take(param: nn.Parameter) -> None:
            gradient = take_own_gradient(param)
            if self.on_backward is not None and not any(r.depth for r in self._running):
                self.on_backward()
            if gradient is not None:
                self.homes.add_gradient(block, piece, gradient)

        return take

    def lookups(self, unit: int) -> contextlib.AbstractContextManager[None]:
        """Gradients of the unit's tables that are looked up inside leave by rows."""
        if not self.row_tables:
            return contextlib.nullcontext()
        tables = {
            piece.param: (b, i)
            for b in self.layout.units[unit].blocks
            for i, piece in enumerate(self.layout.blocks[b].pieces)
            if piece.param in self.row_tables
        }
        return taking_rows(
            {
                id(self.params[name]): functools.partial(self.gradients.add_rows, *at)
                for name, at in tables.items()
            }
        )

    # -- units ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self, unit: int, *, backward: bool) -> Iterator[None]:
        """The unit's weights are in place inside. Nests (a unit within its own backward)."""
        state = self._running[unit]
        if backward and self.on_backward is not None:
            self.on_backward()
        if not state.depth and self.give_back is not None:
            self.give_back()
        if not state.depth and self.rounds is not None:
            self.rounds.door()
        if backward and self.inputs is not None:
            self.inputs.ahead()
        if not state.depth and not state.entries:
            began = time.perf_counter()
            with self.shared.changed:
                self.weights.enter(unit, backward=backward)
                blocks = self.layout.units[unit].blocks
                pending = not self.weights.stale.isdisjoint(blocks)
            state.entries = self.homes.acquire(unit, blocks)
            for entry in state.entries:
                self._place(entry)
            spent = time.perf_counter() - began
            self.clock.waiting += spent
            self.clock.updates += spent if pending else 0.0
            self._tell(WAITS, unit, began, backward)
        began = time.perf_counter()
        state.depth += 1
        try:
            yield
        finally:
            state.depth -= 1
            if not state.depth:
                self._tell(COMPUTE, unit, began, backward)
                for end in state.ends:
                    end()
                if self.last_in_round():
                    self._leave(unit)

    def _tell(self, lane: str, unit: int, began: float, backward: bool) -> None:
        """Record what the unit did from ``began`` until now."""
        if self.record is not None:
            name = self.layout.units[unit].name + (" backward" if backward else "")
            self.record(lane, name, began, time.perf_counter(), 0)

    def _leave(self, unit: int) -> None:
        state = self._running[unit]
        if not state.entries:
            return
        for entry in state.entries:
            self._remove(entry)
        self.homes.release(unit, [entry.block.index for entry in state.entries])
        state.entries = ()

    @contextlib.contextmanager
    def visiting(self, unit: int) -> Iterator[Visit]:
        """See ``segments.Runtime``."""
        before = self.visit
        with self.homes.visiting(unit) as self.visit:
            try:
                yield self.visit
            finally:
                self.visit = before

    def abandon(self) -> None:
        """A step has failed in the middle: let go of weights that wait for other micro-batches, and
        of the gradients there are. Not for steps whose updates run inside backward."""
        for unit, state in enumerate(self._running):
            state.depth = 0
            self._leave(unit)
        self._left = self._uses()
        self.homes.forget()
        self.gradients.forget()
        with self.shared.changed:
            self.order.forget()

    def unit_runs(self, unit: int) -> bool:
        """Whether a unit is in its forward or backward now."""
        return self._running[unit].depth > 0

    def on_unit_end(self, unit: int, call: Callable[[], Any]) -> Callable[[], Any]:
        """Call ``call`` whenever the unit's weights are about to leave; returns what undoes it."""
        self._running[unit].ends.append(call)
        return lambda: self._running[unit].ends.remove(call)

    def kind(self, unit: int) -> str:
        return self.homes.torch_device(unit).type

    def _generators(self, unit: int) -> Generators:
        return Generators(self.homes.torch_device(unit))

    def forward_key(self, unit: int) -> Any:
        generators = self._generators(unit)
        if self.random_key is None:
            return generators.state()
        seed = self.random_key(self.current_micro, unit)
        generators.seed(seed)
        return seed

    @property
    def current_micro(self) -> int:
        """The number of the micro-batch that runs."""
        return self.micro if self.rounds is None else self.rounds.index

    def keeps_graph(self, unit: int) -> bool:
        return unit in self.kept_units

    def saving(self, unit: int) -> contextlib.AbstractContextManager[Any]:
        """Inside, autograd saves weights of the running unit as their places: their memory is
        another's between forward and backward."""
        state = self._running[unit]

        def find(block: int) -> torch.Tensor | None:
            return next((e.tensor for e in state.entries if e.block.index == block), None)

        places = SavedPlaces({e.block.index: e.tensor for e in state.entries}, find)
        return torch.autograd.graph.saved_tensors_hooks(places.pack, places.unpack)

    def keep(self, unit: int, tensor: torch.Tensor) -> Waits | None:
        if self.inputs is None:
            return None
        put = functools.partial(self.inputs.keep, unit, in_turns=self.rounds is not None)
        if isinstance(tensor, Landing) and not tensor.home.landed:
            return Later(tensor.home, put) if self.inputs.takes(unit, tensor) else None
        return put(plain(tensor))

    def extra_losses(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [] if self.extra is None else self.extra()

    def rewind(self, unit: int, key: Any) -> None:
        self._generators(unit).rewind(key)

    def replay(self, unit: int, key: Any) -> contextlib.AbstractContextManager[None]:
        return self._generators(unit).again(key)

    def drain(self) -> None:
        """Wait until everything is updated and written."""
        self.updater.drain()

    def go_back(self, switch: Callable[[], None]) -> None:
        """Show an earlier state, to read it: ``switch`` changes what the tiles hold.

        Waits for pending updates first. No step may be taken afterwards: optimizer states that stay
        in RAM are those of the later state.
        """
        self.drain()
        self.weights.reread(switch)

    def piece_of(self, param: str) -> tuple[int, int]:
        """(block, index in it) of a parameter that is one piece."""
        return self._pieces[param]

    def forget_order(self) -> None:
        """What ran since the last step says nothing about the next one."""
        with self.shared.changed:
            self.order.forget()

    # -- reading --------------------------------------------------------------------------

    def block_values(self, block: Block) -> torch.Tensor:
        """A copy of a block's current weights [count], its update waited for."""
        entry = self.weights.acquire(block.index)
        try:
            return entry.copy(0, block.count)
        finally:
            self.weights.release(block.index)

    def read_elements(self, name: str, start: int, count: int) -> torch.Tensor:
        """Elements ``start`` .. ``start + count`` of a parameter (by any of its names), flat; its
        update is waited for."""
        out: list[torch.Tensor] = []
        for block, i in self.places_of(name):
            piece = self.layout.blocks[block].pieces[i]
            low, high = max(start, piece.start), min(start + count, piece.start + piece.count)
            if low >= high:
                continue
            entry = self.weights.acquire(block)
            try:
                at = piece.offset - piece.start
                out.append(entry.copy(at + low, at + high))
            finally:
                self.weights.release(block)
        if sum(t.numel() for t in out) != count:
            raise OffloadError(f"{name} has no elements {start} to {start + count}")
        return out[0] if len(out) == 1 else torch.cat(out)

    def places_of(self, name: str) -> list[tuple[int, int]]:
        """(block, index of the piece) of all pieces of a parameter, in order."""
        if not self._by_name:
            canonical = {a: p.name for p in self.layout.params.values() for a in p.names}
            found: dict[str, list[tuple[int, int]]] = {}
            for block in self.layout.blocks:
                for i, piece in enumerate(block.pieces):
                    found.setdefault(piece.param, []).append((block.index, i))
            for places in found.values():
                places.sort(key=lambda at: self.layout.blocks[at[0]].pieces[at[1]].start)
            self._by_name = {a: found[n] for a, n in canonical.items() if n in found}
        if name not in self._by_name:
            raise OffloadError(f"the model has no parameter {name}")
        return self._by_name[name]

    def on_close(self, close: Callable[[], Any]) -> None:
        """Call ``close`` when the engine closes, after its thread has ended."""
        self._closers.append(close)

    def __deepcopy__(self, memo: Any) -> Any:
        raise OffloadError(
            "a streamed part of the model that holds others, or experts, cannot be copied: its "
            "weights are not in memory; leave it out of modules_to_save (or of what copies it)"
        )

    def close(self) -> None:
        """End the threads and free the memory. Updates that are pending are lost: ``drain`` or
        commit first. Idempotent."""
        if not self._closers:
            return
        with torch._C.DisableTorchFunctionSubclass():
            for name, param in self.params.items():
                param.data = self.hollow[name]
        self.present.clear()
        while self._closers:
            self._closers.pop(0)()
