"""Many generations of one model in one thread, that read its weights once for all of them.

Every sequence runs its own, unmodified ``model.generate`` in a greenlet: own cache, own logits
processors, own end. Where its forward needs weights that are not in memory for good, it waits.
When all wait, the conductor goes to the next such place in the order of the forward pass, fetches
what is needed there once, lets everybody run who waits there, and moves on. So each sequence
computes bit for bit what it would compute alone, whatever the architecture, and the weights that a
pass reads serve all sequences. This is the zig-zag block schedule of FlexGen (Sheng et al., 2023,
"High-Throughput Generative Inference of Large Language Models with a Single GPU", section 4), with
sequences that come and go at every pass.

Within a MoE layer the places are its experts, in ascending order: what is read is the union of what
the sequences are routed to, each expert once. Linear layers are places, too, or packed models'
whole layers: those who decode are computed there in one go, if that gives each the bits it would
get alone (``joined``).

The road left: one padded batch. Its kernels have other shapes and so other rounding, a sequence's
answer would depend on its neighbours, and the longest would hold up all.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

from offload.batch.joined import Joins, Product
from offload.batch.order import Order
from offload.batch.sequence import Cancelled, Sequence
from offload.batch.shared import EXPERT, RUN, Held, SharedLayer, SharedUnits
from offload.errors import ClosedError, OffloadError
from offload.io.store import Span
from offload.models.module_state import OwnState, state_places
from offload.runtime.executor import Executor, Views
from offload.scheduler.policy import Scores

logger = logging.getLogger(__name__)

T = TypeVar("T")

PASS, UNIT, ROUTE, ROWS, JOIN = "pass", "unit", "route", "rows", "join"
_START = (PASS, 1)


@dataclass(slots=True)
class Counters:
    """Since the conductor was made.

    Attributes:
        passes: rounds over the model; each reads what streams once.
        forwards: forward passes of sequences in them.
        rows: tokens that they read.
        joined: rows that were computed in one go with others', at linear layers, or at whole ones
            and at all layers where a packed model's tokens go through them without their modules.
        stops: places at which sequences have waited for each other.
    """

    passes: int = 0
    forwards: int = 0
    rows: int = 0
    joined: int = 0
    stops: int = 0


class Conductor:
    """Runs sequences of one streamed model. For one thread, the one that calls ``step``.

    ::

        with Conductor(model) as conductor:
            one = conductor.start(lambda: model.generate(ids, ...))
            two = conductor.start(lambda: model.generate(other, ...), seed=1)
            while conductor.step():
                ...  # start more, cancel some
            one.result, two.error

    Sequences may be started at any time, also from ``on_end``; they join with the next pass. While
    sequences are under way, the model may be used by nobody else between two steps but for calls
    that read nothing of it (tokenizers, caches).
    """

    def __init__(self, model: Any, *, most_rows: int | None = None) -> None:
        """
        Args:
            model: opened by ``offload``, resident or not.
            most_rows: tokens of prompts that one pass reads at most, for the memory that their
                activations take; one prompt always goes. None: no limit.

        Raises:
            OffloadError: the model has a conductor already, or is closed.
        """
        handle = model.offload
        executor: Executor = handle.executor
        if executor.closed:
            raise ClosedError("this model has been closed; load it again")
        if executor.conductor is not None:
            raise OffloadError("this model has a conductor already; a model runs under one")
        self.most_rows = most_rows
        self.counters = Counters()
        self._model, self._executor = model, executor
        ranks = {
            g.name: {block: i for i, block in enumerate(g.blocks)}
            for g in handle.attachment.cut.groups
        }
        self._units = SharedUnits(executor, self._resume, self._fail)
        self._layer = SharedLayer(executor, self._resume, self._fail, ranks)
        self._places = state_places(model)
        self._order = Order(_START)
        self._cursor: tuple[Hashable, int] = (_START, -1)  # a stop, as indices change
        self._new: list[Sequence] = []
        self._sequences: list[Sequence] = []
        self._running: Sequence | None = None
        self._closed = False
        before = model.register_forward_pre_hook(self._before_pass, with_kwargs=True)
        after = model.register_forward_hook(self._after_pass, always_call=True)
        self._hooks = [before, after]
        self._joins = Joins(model, self._join)
        executor.conductor = self

    def __enter__(self) -> Conductor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- sequences ------------------------------------------------------------------------

    def start(
        self,
        work: Callable[[], Any],
        *,
        seed: int | None = None,
        on_end: Callable[[Sequence], None] | None = None,
    ) -> Sequence:
        """Run ``work`` beside the others from the next step on.

        Args:
            work: what one would call if one were alone, e.g. ``model.generate``; in this thread,
                with autograd as it is now.
            seed: of its random numbers: what ``torch.manual_seed`` would be given before the same
                call alone. None: it draws none, as greedy decoding does.
            on_end: called by the conductor when the sequence has ended in whatever way.

        Raises:
            ClosedError: the conductor is closed.
        """
        if self._closed:
            raise ClosedError("the conductor is closed")
        sequence = Sequence(work, seed, on_end, OwnState(self._places))
        self._new.append(sequence)
        return sequence

    def __len__(self) -> int:
        """Sequences under way."""
        return len(self._new) + len(self._sequences)

    def step(self) -> bool:
        """Go to the next place where sequences wait and let them run to their next ones. Takes as
        long as one unit (a layer) takes for all of them. False: there are none.

        What a sequence raises ends that sequence, and is its ``error``; only what is no
        ``Exception`` (an interruption) comes out of here, and then the conductor is to be closed.
        """
        for sequence in self._take_new():
            self._sequences.append(sequence)
            self._resume(sequence)
        for sequence in [s for s in self._sequences if s.cancelled]:
            self._resume(sequence)
        waiting = self._next()
        if waiting:
            self.counters.stops += 1
            self._visit(waiting)
        self._units.let_go()
        return len(self) > 0

    def run(self) -> None:
        """Step until there are no sequences."""
        while self.step():
            pass

    def close(self) -> None:
        """End what is under way with ``Cancelled``, and give the model back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._new.clear()
        try:
            while self._sequences:
                self._sequences[0].cancelled = True
                self._resume(self._sequences[0])
            if not self._executor.closed:
                self._units.let_go()
        finally:
            self._joins.close()
            for hook in self._hooks:
                hook.remove()
            self._executor.conductor = None

    # -- the conductor's way --------------------------------------------------------------

    def _take_new(self) -> list[Sequence]:
        new, self._new = self._new, []
        return new

    def _place(self, sequence: Sequence) -> tuple[int, int]:
        return self._order[sequence.stop], sequence.rank

    def _next(self) -> list[Sequence]:
        """Those who wait at the next place: the first one behind the last."""
        among: Iterable[Sequence] = self._layer.routed or self._units.inside
        # What has begun within a layer is finished first; all others wait further on.
        places = {s: self._place(s) for s in among or self._sequences}
        if not places:
            return []
        stop, rank = self._cursor
        cursor = self._order[stop], rank
        ahead = [p for p in places.values() if p > cursor]
        here = min(ahead or places.values())
        waiting = [s for s in self._sequences if places.get(s) == here]
        self._cursor = waiting[0].stop, here[1]
        return waiting

    def _visit(self, waiting: list[Sequence]) -> None:
        first = waiting[0]
        match first.call:
            case "pass":
                self._begin_pass(waiting)
            case "unit":
                self._units.open(waiting)
            case "route":
                self._layer.open(waiting)
            case "expert":
                self._layer.bring_expert(waiting)
            case "run":
                self._layer.bring_run(waiting)
            case "rows":
                self._read_rows(waiting)
            case "join":
                self._multiply(waiting)
            case other:
                raise AssertionError(f"nobody waits at {other}")

    def _begin_pass(self, waiting: list[Sequence]) -> None:
        rows = 0
        self.counters.passes += 1
        for sequence in waiting:
            new = sequence.rows if sequence.rows > 1 else 0
            if new and rows and self.most_rows is not None and rows + new > self.most_rows:
                continue  # with the next pass
            rows += new
            self.counters.forwards += 1
            self.counters.rows += sequence.rows
            self._resume(sequence)

    def _read_rows(self, waiting: list[Sequence]) -> None:
        """The rows of all in one go: each waits for the disk only once."""
        block = waiting[0].payload[0]
        total = sum(len(s.payload[2]) for s in waiting)
        together = memoryview(bytearray(total))
        spans: list[Span] = []
        at = 0
        for sequence in waiting:
            _, own, buffer = sequence.payload
            spans += [Span(src, at + dst, nbytes) for src, dst, nbytes in own]
            at += len(buffer)
        try:
            self._executor.read_rows(block, spans, together)
        except Exception as error:  # noqa: BLE001  theirs to handle
            self._fail(waiting, error)
            return
        at = 0
        for sequence in waiting:
            buffer = sequence.payload[2]
            buffer[:] = together[at : at + len(buffer)]
            at += len(buffer)
            self._resume(sequence)

    def _multiply(self, waiting: list[Sequence]) -> None:
        product: Product = waiting[0].payload[0]
        most = product.at_once(len(self._sequences))
        for first in range(0, len(waiting), most):
            some = waiting[first : first + most]
            try:
                with torch.no_grad():
                    found = product.multiply([s.payload[1] for s in some])
            except Exception as error:  # noqa: BLE001  theirs to handle
                self._fail(some, error)
                continue
            if len(some) > 1:
                self.counters.joined += len(some)
            for sequence in some:
                sequence.payload = None
                self._resume(sequence, found.pop(0))

    def _fail(self, waiting: Listing[Sequence], error: Exception) -> None:
        """Each of those who wait gets a copy of an error that is theirs to handle."""
        for sequence in waiting:
            self._resume(sequence, error=copy.copy(error))

    def _resume(
        self, sequence: Sequence, answer: Any = None, error: Exception | None = None
    ) -> None:
        """Let a sequence run to where it waits next, or to its end. For who has what it waited
        for: ``answer``, or the ``error``."""
        self._running = sequence
        try:
            sequence.resume(answer, error)
        finally:
            self._running = None
        if not sequence.done:
            return
        self._sequences.remove(sequence)
        self._units.leave(sequence)
        self._layer.leave(sequence)
        failure = sequence.error
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        if failure is not None and not isinstance(failure, Cancelled):
            logger.info("a sequence has failed: %s", failure)
        if sequence.on_end is not None:
            sequence.on_end(sequence)

    # -- the road, asked by sequences -----------------------------------------------------

    def conducts(self) -> bool:
        running = self._running
        return running is not None and running.running

    def alone(self) -> bool:
        return len(self._sequences) < 2

    def who(self) -> object:
        return self._current()

    def local(self, key: object, make: Callable[[], T]) -> T:
        kept = self._current().local
        if key not in kept:
            kept[key] = make()
        return cast(T, kept[key])

    def enter(
        self, unit: str, blocks: Listing[str], let_go: Callable[[], None] | None = None
    ) -> int:
        sequence = self._current()
        held: Held = self._wait(UNIT, unit, (unit, blocks, let_go))
        held.inside.add(sequence)
        return held.ticket

    def leave(self, ticket: int, blocks: Listing[str]) -> None:
        self._units.leave(self._current(), ticket)

    def views(self, block: str) -> Views:
        return self._executor.views(block)

    def route(self, group: str, experts: Listing[str], scores: Scores | None = None) -> None:
        ranks = self._wait(ROUTE, group, (group, experts, scores))
        self._current().local[_RANKS] = ranks

    def guess(self, group: str, experts: Listing[str], *, far: bool = False) -> None:
        if not far:  # several sequences' experts of the next layer are work enough
            self._layer.guess(group, experts)

    def acquire(self, expert: str) -> Views:
        views: Views = self._wait_in_layer(EXPERT, expert, (expert,))
        return views

    def acquire_run(self, experts: Listing[str], most: int) -> list[int]:
        found: list[int] = self._wait_in_layer(RUN, experts[0], (experts, most))
        return found

    def release(self, expert: str) -> None:
        """The conductor does, when nobody waits for it any more."""

    def release_run(self, experts: Listing[str]) -> None:
        """As ``release``."""

    def end_route(self) -> None:
        self._layer.leave(self._current())

    def read_rows(self, block: str, spans: Listing[Span], buffer: memoryview) -> None:
        self._wait(ROWS, block, (block, spans, buffer))

    def _join(self, product: Product, row: Any) -> Any:
        """A sequence is about to compute with ``row``: what comes of it, or None: as if alone."""
        if not self.conducts():
            return None
        visit = self._count(product.name)  # also of who is alone: it says which run this is
        if self.alone() or not product.takes(row):
            return None
        return self._wait(JOIN, product.name, (product, row), visit)

    def _count(self, name: str) -> int:
        """How often the running sequence has come there in this pass."""
        visits = self._current().visits
        visits[name] = visits.get(name, 0) + 1
        return visits[name]

    def _current(self) -> Sequence:
        if self._running is None:
            raise AssertionError("asked by a sequence of this conductor only")
        return self._running

    def _wait(self, call: str, name: str, payload: Any = None, visit: int | None = None) -> Any:
        """Wait at a stop. A module that runs twice in a pass has two."""
        sequence = self._current()
        visit = visit or self._count(name)
        stop = (name, visit) if call is PASS else (call, name, visit)
        self._order.learn(stop, sequence.stop or _START)
        sequence.call, sequence.stop, sequence.rank = call, stop, -1
        sequence.payload = payload
        return sequence.wait()

    def _wait_in_layer(self, call: str, expert: str, payload: Any) -> Any:
        """Wait for an expert, behind the stop of its layer's routing."""
        sequence = self._current()
        sequence.call, sequence.rank = call, sequence.local[_RANKS][expert]
        sequence.payload = payload
        return sequence.wait()

    # -- forward passes -------------------------------------------------------------------

    def _before_pass(self, module: Any, args: Any, kwargs: Any) -> None:
        if not self.conducts():
            return
        sequence = self._current()
        sequence.draw(False)
        ids = kwargs.get("input_ids", kwargs.get("inputs_embeds", args[0] if args else None))
        sequence.rows = ids.shape[:2].numel() if isinstance(ids, torch.Tensor) else 1
        sequence.visits.clear()
        self._wait(PASS, PASS)

    def _after_pass(self, module: Any, args: Any, output: Any) -> None:
        if self.conducts():
            self._current().draw(True)


_RANKS = object()


__all__ = ["Cancelled", "Conductor", "Counters", "Sequence"]
