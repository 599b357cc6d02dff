"""The optimizer's lane: a thread that carries tiles from the disk, through Adam, and back.

Tiles run through a fixed number of buffers: while one is computed, the next are read and the last
are written. Which step a tile takes was frozen when the step was taken (``AdamStep``), so it does
not matter how much later it runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from offload.blocks import ALIGN
from offload.cpu_ops import threads
from offload.cpu_ops.adam_step import AdamStep
from offload.io.store import PREFETCH
from offload.runtime.memory import HostMemory
from offload.scheduler.timeline import UPDATE, Record
from offload.train.buffers import BufferPool
from offload.train.device_updates import DeviceUpdates, Part
from offload.train.grads import Gradients
from offload.train.layout import Block, Tile, TrainLayout
from offload.train.tiles import COPY, Slot, SlotKind, clear_gaps
from offload.train.weights import Entry, Shared, Weights

log = logging.getLogger(__name__)

SPARED_CORES = 2
"""Of a machine whose layers run on a card: for the thread that drives it, and for the disk's."""

EARLIER, BUFFER = "the updates of the step before", "a buffer for optimizer states"
"""What is waited for."""


def update_workers(*, card: bool, cores: int | None = None) -> int:
    """Threads that update a tile: one beside layers that the CPU computes; where a card does, all
    but a few of ``cores`` (None: of the kernels' threads). They are the updater's own pool."""
    return max(1, (cores or threads.count()) - SPARED_CORES) if card else 1


class Tiles(Protocol):
    """Durable tiles: ``io.tile_store.TileStore``."""

    def written(self, tile: int) -> bool: ...

    def has(self, tile: int, part: int) -> bool: ...

    def read_into(
        self, tile: int, first: int, last: int, dst: memoryview, priority: int = ...
    ) -> Future[Any]: ...

    def write_from(self, tile: int, src: memoryview, parts: Any = None) -> Future[Any]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Job:
    """A block's update: for each piece the step it takes; pieces that are not in it stay."""

    block: int
    steps: Mapping[int, AdamStep]


@dataclass(slots=True)
class _Task:
    """A tile on its way."""

    job: Job
    block: Block
    tile: Tile
    kind: SlotKind
    memory: HostMemory | None
    """The buffer; None where the states are in RAM for good."""
    gradient: HostMemory | None
    reads: list[Future[Any]]
    virgin: bool
    position: int
    """Among its block's tiles."""

    @property
    def last(self) -> bool:
        return self.position == len(self.block.tiles) - 1


class Updater:
    """Owns the thread. ``schedule`` jobs; ``Weights.stale`` says which are not through yet."""

    def __init__(
        self, layout: TrainLayout, weights: Weights, gradients: Gradients, tiles: Tiles,
        shared: Shared, *, states: str, buffers: int, resident: Collection[int], seed: int,
        workers: int | None = 1, away: DeviceUpdates | None = None,
        memory: Callable[[int, str], HostMemory] = HostMemory,
    ) -> None:  # fmt: skip
        """``buffers``: tiles under way at once. ``resident``: blocks whose states stay in RAM.
        ``away``: what updates some of them on a device, which copies from ``memory``."""
        self.layout = layout
        self._weights = weights
        self._gradients = gradients
        self._tiles = tiles
        self._shared = shared
        self._states = states
        self._seed = seed
        self._workers = workers
        self.away = away
        self._memory = memory
        self._kinds = self.kinds(layout, states)
        largest = max((self.slot_bytes(t.index) for t in layout.tiles), default=ALIGN)
        self._pool = BufferPool(buffers * largest, "states under way", memory)
        gradient = max(
            (gradients.tile_bytes(layout.blocks[t.block], t.count) for t in layout.tiles), default=0
        )
        self._gradient_pool = BufferPool(buffers * gradient, "gradients under way")
        self.resident: dict[int, HostMemory] = {}
        self._resident_blocks = frozenset(resident)
        self._jobs: deque[Job] = deque()
        self._writing: set[int] = set()
        """Tiles whose write is under way."""
        self._target: Entry | None = None
        """Where the block that is being updated lies in RAM, if it does."""
        self._job: Iterator[_Task] = iter(())
        self._bases = _bases(layout)
        self._zeros: dict[str, Any] = {}
        self.busy_s = 0.0
        self.record: Record | None = None
        """Set: told of each tile that is updated."""
        self._thread = threading.Thread(target=self._serve, name="offload-update", daemon=True)
        self._thread.start()

    @staticmethod
    def kinds(layout: TrainLayout, states: str) -> dict[str, SlotKind]:
        """By the dtype of a block's weights, what its tiles hold."""
        return {b.dtype: SlotKind(_states_of(states, b.dtype), b.dtype) for b in layout.trained}

    def kind(self, block: Block) -> SlotKind:
        return self._kinds[block.dtype]

    def slot_bytes(self, tile: int) -> int:
        spec = self.layout.tiles[tile]
        return self._kinds[self.layout.blocks[spec.block].dtype].offsets(spec.count)[-1]

    def schedule(self, jobs: Collection[Job]) -> None:
        """Have these updates run, in this order; their blocks are stale until then.

        Waits for the update before of each of these blocks: most are through, because forward has
        used their weights since. Not so experts that no token went to, and units that were not
        called: two updates of a block under way at once would read the same old states, and the
        first to end would call the weights current.
        """
        shared, blocks = self._shared, frozenset(job.block for job in jobs)
        with shared.changed:
            self.wait_for(blocks)
            self._weights.make_stale(blocks)
            self._jobs.extend(jobs)
            shared.notify()

    def wait_for(self, blocks: Collection[int]) -> None:
        """Wait until no update of these blocks is pending."""
        with self._shared.changed:
            stale = self._weights.stale
            if not stale.isdisjoint(blocks):
                with self._weights.idle():
                    self._shared.wait_for(lambda: stale.isdisjoint(blocks), EARLIER)

    def drain(self) -> None:
        """Wait until every update is through and written."""
        with self._shared.changed:
            weights = self._weights
            self._shared.wait_for(
                lambda: not weights.stale and not weights.unsettled and not self._jobs,
                "the pending updates",
            )

    # -- the thread -----------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._run()
        except BaseException as error:
            if not self._shared.closed:
                log.debug("the update lane stopped", exc_info=True)
            self._shared.fail(error)
        finally:
            if self.away is not None:
                self.away.close()

    def _run(self) -> None:
        window: deque[_Task] = deque()
        ahead: _Task | None = None
        while True:
            while self._land(wait=False):
                continue
            # Read ahead as far as there are buffers; wait only with nothing under way.
            while True:
                ahead = ahead or self._next_task()
                waits = not window and (self.away is None or self.away.idle)
                if ahead is None or not self._prepare(ahead, wait=waits):
                    break
                window.append(ahead)
                ahead = None
            if window:
                self._finish(window.popleft())
                continue
            if self._land(wait=True):
                continue
            with self._shared.changed:
                self._shared.changed.wait_for(
                    lambda: self._jobs or self._shared.closed or self._shared.error
                )
                if self._shared.closed or self._shared.error:
                    return

    def _next_task(self) -> _Task | None:
        """The next tile of the job at hand, or the first of the next job."""
        task = next(self._job, None)
        if task is None:
            with self._shared.changed:
                if not self._jobs or self._shared.error:
                    return None
                self._job = self._tasks(self._jobs.popleft())
            task = next(self._job)
        return task

    def _tasks(self, job: Job) -> Iterator[_Task]:
        block = self.layout.blocks[job.block]
        for position, index in enumerate(block.tiles):
            yield _Task(
                job, block, self.layout.tiles[index], self.kind(block), None, None, [],
                virgin=False, position=position,
            )  # fmt: skip

    def _prepare(self, task: _Task, *, wait: bool) -> bool:
        """Give the task its buffers and start its reads; False if there is no buffer now."""
        shared, tile, block = self._shared, task.tile, task.block
        states = 0 if block.index in self._resident_blocks else self.slot_bytes(tile.index)
        spilled = self._gradients.tile_bytes(block, tile.count)
        with shared.changed:

            def fits() -> bool:
                # The last step's write may still be under way, behind a commit for instance: where
                # weights stay in RAM nothing else has waited for it.
                if states and tile.index in self._writing:
                    return False
                return (not states or self._pool.fits(states)) and (
                    not spilled or self._gradient_pool.fits(spilled)
                )  # fmt: skip

            if not fits():
                if not wait:
                    return False
                shared.wait_for(fits, BUFFER)
            task.memory = self._pool.take(states) if states else None
            task.gradient = self._gradient_pool.take(spilled) if spilled else None
        # Asked only now: before its first write has ended a tile passes for virgin.
        task.virgin = tile.index not in self.resident and not self._tiles.written(tile.index)
        if task.virgin:
            if states == 0:
                self._make_resident(task)
        elif task.memory is not None:
            first, kind = task.kind.first_state, task.kind
            at = kind.offsets(tile.count)[first]
            view = task.memory.view()[at:]
            task.reads.append(
                self._tiles.read_into(tile.index, first, len(kind.names) - 1, view, PREFETCH)
            )
        if task.gradient is not None:
            self._gradients.settle(block.index)
            read = self._gradients.read_tile(block, tile.index, task.gradient.view())
            if read is not None:
                task.reads.append(read)
        return True

    def _make_resident(self, task: _Task) -> None:
        self.resident[task.tile.index] = self._resident_memory(task.block, task.position)

    def _resident_memory(self, block: Block, position: int) -> HostMemory:
        """Only what goes to a device is its memory: pinning takes time."""
        sent = self.away is not None and self.away.takes(position, len(block.tiles))
        make = self._memory if sent else HostMemory
        return make(self.slot_bytes(block.tiles[position]), "optimizer states")

    def _finish(self, task: _Task) -> None:
        tile, block = task.tile, task.block
        for read in task.reads:
            read.result()
        if tile.start == 0:
            # Once: memory that came later would lack the first tiles.
            self._target = self._weights.entry_for_update(block.index, must=task.virgin)
        if self._goes_away(task):
            self._send(task)
            if task.last:
                self._land_all()
            return
        entry = self._target
        began = time.perf_counter()
        memory = task.memory or self.resident[tile.index]
        slot = Slot(task.kind, tile.count, memory.tensor().numpy())
        span = slice(tile.start, tile.start + tile.count)
        if task.virgin:
            assert entry is not None
            clear_gaps(block, tile, entry.numbers[span])  # the states' gaps must be zero, too
            slot.start(entry.numbers[span])
        elif len(task.job.steps) < len(block.pieces) and task.kind.first_state:
            slot.round()  # of pieces that take no step the copy was not read
        buffer = None if task.gradient is None else task.gradient.tensor().numpy()
        for i, piece, start, count, gradient in self._gradients.of_tile(block, tile.index, buffer):
            step = task.job.steps.get(i)
            if step is None:
                continue
            if gradient is None:
                gradient = self._no_gradient(block)[:count]
            first = self._bases[block.index] + tile.start + start
            slot.update(
                step, gradient, start, count, seed=self._seed, first=first, workers=self._workers
            )
            del gradient, piece
        self._end(task, slot, began)
        if task.last:
            self._land_all()
        self._let_go(task)

    def _end(self, task: _Task, slot: Slot, began: float) -> None:
        """The slot is as the step leaves it: its copy goes to the weights in RAM."""
        tile, entry = task.tile, self._target
        # So that a slot's bytes are a function of the states.
        clear_gaps(task.block, tile, slot.copy)
        if entry is not None:
            np.copyto(entry.numbers[tile.start : tile.start + tile.count], slot.copy)
        ended = time.perf_counter()
        self.busy_s += ended - began
        if self.record is not None:
            self.record(UPDATE, task.block.id, began, ended, self.slot_bytes(tile.index))

    # -- on the device -------------------------------------------------------------------------

    def _goes_away(self, task: _Task) -> bool:
        """Whether the device updates the tile. Not its first step, which makes the states; nor one
        of which some parameters take no part, whose copies are made anew."""
        return (
            self.away is not None
            and not task.virgin
            and self.away.takes(task.position, len(task.block.tiles))
            and len(task.job.steps) == len(task.block.pieces)
        )

    def _send(self, task: _Task) -> None:
        tile, block, away = task.tile, task.block, self.away
        assert away is not None
        while not away.room:
            self._land(wait=True)
        began = time.perf_counter()
        buffer = None if task.gradient is None else task.gradient.tensor().numpy()
        memory = task.memory or self.resident[tile.index]
        base = self._bases[block.index] + tile.start
        parts = (
            Part(
                step=task.job.steps[i], start=start, count=count, first=base + start,
                gradient=gradient,
            )
            for i, _, start, count, gradient in self._gradients.of_tile(block, tile.index, buffer)
        )  # fmt: skip
        away.send(
            task, block.id, task.kind, tile.count, memory, self._gradients.dtype_of(block), parts
        )
        self.busy_s += time.perf_counter() - began

    def _land(self, *, wait: bool) -> bool:
        """End the tile that went to the device first, if it is back (``wait``: once it is);
        whether there was one."""
        task: _Task | None = None if self.away is None else self.away.back(wait=wait)
        if task is None:
            return False
        began = time.perf_counter()
        memory = task.memory or self.resident[task.tile.index]
        self._end(task, Slot(task.kind, task.tile.count, memory.tensor().numpy()), began)
        self._let_go(task)
        return True

    def _land_all(self) -> None:
        """Before its last tile a block's others are through."""
        while self._land(wait=True):
            continue

    def _no_gradient(self, block: Block) -> Any:
        """Zeros, for experts that no token went to: the resident optimizer's gradient of them."""
        dtype = self._gradients.dtype_of(block)
        if dtype not in self._zeros:
            largest = max(t.count for t in self.layout.tiles)
            self._zeros[dtype] = np.zeros(largest, np.float32 if dtype == "float32" else np.uint16)
        return self._zeros[dtype]

    def _let_go(self, task: _Task) -> None:
        """Write the tile back, free its buffers, and if it is its block's last, say so."""
        shared, block = self._shared, task.block.index
        pinned = block in self._weights.pinned
        with shared.changed:
            if task.gradient is not None:
                self._gradient_pool.give(task.gradient)
                task.gradient = None
        write: Future[Any] | None = None
        memory = task.memory
        if memory is not None:
            parts = None
            if pinned and task.kind.first_state:
                parts = [i != COPY for i in range(len(task.kind.names))]
            self._weights.write_begins(block)
            with shared.changed:
                self._writing.add(task.tile.index)
            write = self._tiles.write_from(task.tile.index, memory.view(), parts)
        elif not pinned:
            raise AssertionError("states stay in RAM only where weights do")
        if task.last:
            self._target = None
            self._gradients.drop(block)
            self._weights.updated(block)
        if write is not None:
            write.add_done_callback(lambda f: self._written(f, memory, task))

    def _written(self, future: Future[Any], memory: HostMemory | None, task: _Task) -> None:
        error, block = future.exception(), task.block.index
        with self._shared.changed:
            self._writing.discard(task.tile.index)
            if memory is not None:
                self._pool.give(memory)
            if error is not None:
                self._shared.fail(error)
            self._weights.write_ended(block)

    # -- states that stay in RAM ----------------------------------------------------------

    def load_resident(self) -> None:
        """Read the states that stay in RAM, of tiles that were written."""
        for block in self._resident_blocks:
            spec = self.layout.blocks[block]
            kind = self.kind(spec)
            for position, index in enumerate(spec.tiles):
                if not self._tiles.written(index):
                    continue
                memory = self._resident_memory(spec, position)
                first = kind.first_state
                at = kind.offsets(self.layout.tiles[index].count)[first]
                view = memory.view()[at:]
                self._tiles.read_into(index, first, len(kind.names) - 1, view).result()
                self.resident[index] = memory

    def write_resident(self) -> None:
        """Write the states that stay in RAM, for a commit. No update may be pending."""
        writes: deque[Future[Any]] = deque()
        for index, memory in sorted(self.resident.items()):
            kind = self.kind(self.layout.blocks[self.layout.tiles[index].block])
            parts = [i >= kind.first_state for i in range(len(kind.names))]
            writes.append(self._tiles.write_from(index, memory.view(), parts))
            while len(writes) > 4:
                writes.popleft().result()
        for write in writes:
            write.result()

    def close(self) -> None:
        """End the thread; what is pending is lost, the last commit is not."""
        with self._shared.changed:
            self._shared.closed = True
            self._shared.notify()
        self._thread.join()

    def free(self) -> None:
        """Give the memory back, once no transfer is under way."""
        for memory in self.resident.values():
            memory.close()
        self.resident.clear()
        self._pool.close()
        self._gradient_pool.close()


def _states_of(states: str, dtype: str) -> str:
    """bf16 states need bf16 weights; what a model keeps in float32 keeps float32 states."""
    return "fp32" if states == "bf16" and dtype != "bfloat16" else states


def _bases(layout: TrainLayout) -> list[int]:
    """The global index of each block's first element, for stochastic rounding."""
    out, end = [], 0
    for block in layout.blocks:
        out.append(end)
        end += block.count
    return out


__all__ = ["Job", "Tiles", "Updater"]
