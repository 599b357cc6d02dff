"""Blocks with their homes: which are in RAM, which on disk, and how they get from one to the other.

One thread computes and calls; transfers end on the engine's threads, and what that changes here is
taken note of when the calling thread comes by. So there are no locks, and what is where depends on
no timing but for blocks that are written: those stay readable in RAM until their slot is wanted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import closing
from dataclasses import dataclass
from itertools import chain

from offload.errors import OffloadError, SchedulerError, StoreError, WatchdogError
from offload.kv.homes import KvHomes, shares
from offload.kv.pool import Pool
from offload.kv.spill import Spill
from offload.units import format_bytes

log = logging.getLogger(__name__)

WATCHDOG_S = 120.0
"""A transfer of one block that takes longer hangs."""


@dataclass(slots=True)
class KvStats:
    """Since the cache was made. A read of a block finds it in RAM (``hits``), is waited for though
    it was begun ahead or not at all (``late``), or finds it arrived (``ahead``)."""

    hits: int = 0
    ahead: int = 0
    late: int = 0
    stall_s: float = 0.0
    copies: int = 0
    """Blocks copied because two sequences went apart."""


class Block:
    """A few tokens of one layer of one or several sequences. Only a store changes it."""

    __slots__ = ("layer", "owner", "place", "refs", "slot", "writing")

    def __init__(self, owner: BlockStore, layer: int, slot: int) -> None:
        self.owner = owner
        self.layer = layer
        self.refs = 1
        self.slot: int | None = slot
        self.place: int | None = None
        self.writing: Future[int] | None = None

    def __repr__(self) -> str:
        where = f"slot {self.slot}" if self.slot is not None else f"place {self.place}"
        return f"<block of layer {self.layer}, {self.refs} refs, {where}>"


@dataclass(slots=True)
class _Incoming:
    slot: int
    reading: Future[int]


class BlockStore:
    """The blocks of one model over a pool and a spill."""

    def __init__(self, pool: Pool, spill: Spill, homes: KvHomes) -> None:
        self.pool = pool
        self.spill = spill
        self.stats = KvStats()
        self._layers = homes.layers
        self._shared = homes.slots - homes.window
        self._sequences = homes.sequences
        self.others = 0
        """Sequences of other caches, whose newest blocks need slots, too."""
        self._resident: list[dict[Block, None]] = [{} for _ in range(homes.layers)]
        self._quota = homes.resident
        self._writing: dict[Block, None] = {}
        self._window_free = [s for s in (pool.take() for _ in range(homes.window)) if s is not None]
        self._window: dict[Block, _Incoming] = {}
        self._window_slots = homes.window
        self._dying: list[tuple[_Incoming, int | None]] = []
        self._refused: StoreError | None = None
        """Why nothing is spilled any more."""

    # -- blocks ---------------------------------------------------------------------------

    def expect(self, sequences: int) -> None:
        """As many are cached at once: each needs a slot of each layer for its newest block."""
        sequences += self.others
        if sequences != self._sequences:
            self._sequences = sequences
            self._quota = shares(self._shared - self._layers * sequences, self._layers)

    def retry(self) -> None:
        """Try to spill again, if the disk was full before."""
        self._refused = None

    def new(self, layer: int) -> Block:
        """An empty block, to be filled in RAM. Raises as ``writable``."""
        return Block(self, layer, self._slot())

    def fork(self, block: Block) -> None:
        """One more sequence has it."""
        block.refs += 1

    def drop(self, block: Block) -> None:
        """One sequence less has it; the last one frees it."""
        block.refs -= 1
        if block.refs < 0:
            raise SchedulerError(f"dropped too often: {block}")
        if block.refs or block.writing is not None:  # its slot is still being read from
            return
        if block.slot is not None:
            self._resident[block.layer].pop(block, None)
            self.pool.give(block.slot)
            block.slot = None
        if block.place is not None:
            place, block.place = block.place, None
            incoming = self._window.pop(block, None)
            if incoming is None:
                self.spill.release(place)
            elif incoming.reading.cancel():
                self._window_free.append(incoming.slot)
                self.spill.release(place)
            else:
                self._dying.append((incoming, place))

    def writable(self, block: Block) -> Block:
        """The block in RAM, of one sequence only, and nowhere else: itself or a copy.

        Raises:
            OffloadError: no slot is left and nothing can leave RAM.
            StoreError: it could not be read back.
        """
        if block.refs > 1:
            slot = self._slot(keep=block)
            self._copy_to(block, slot)
            self.stats.copies += 1
            self.drop(block)
            return Block(self, block.layer, slot)
        if block.writing is not None:
            self._end_of(block.writing)
            self._written(block)
        if block.slot is None:
            slot = self._slot(keep=block)
            self._copy_to(block, slot)
            block.slot, place = slot, block.place
            block.place = None
            incoming = self._window.pop(block, None)
            if incoming is not None:
                self._window_free.append(incoming.slot)
            if place is not None:
                self.spill.release(place)
        self._resident[block.layer].pop(block, None)
        return block

    def filled(self, block: Block) -> None:
        """It is full and does not change any more: it stays in RAM or goes to the disk."""
        resident = self._resident[block.layer]
        if len(resident) < self._quota[block.layer] or not self._write(block):
            resident[block] = None

    def walk(
        self, blocks: Sequence[Block], behind: Iterable[Block] = ()
    ) -> Iterator[tuple[int, int]]:
        """Visit blocks in order as ``(index, slot)``; the slot is good until the next is asked for.
        What is on disk is read ahead, then what is used ``behind`` it.

        Raises:
            StoreError: a block could not be read.
        """
        with closing(self.runs(blocks, behind, most=1)) as runs:
            for run in runs:
                yield from run

    def runs(
        self, blocks: Sequence[Block], behind: Iterable[Block] = (), *, most: int | None = None
    ) -> Generator[list[tuple[int, int]], None, None]:
        """As ``walk``, several at a time: what is in RAM in a row, or what has arrived from the
        disk, of which half the window at most, so that reading goes on meanwhile. How blocks are
        divided into runs depends on the disk's pace; their order does not.
        """
        at = -1

        def rest() -> Iterator[Block]:
            # The window may be full until some blocks have been visited: what was read for them by
            # the walk before must not be read again.
            for index, block in enumerate(blocks):
                if index > at:
                    yield block

        share = 1 if most == 1 else max(1, self._window_slots // 2)
        ahead = chain(rest(), behind)
        self._read_ahead(ahead)
        streamed: list[tuple[Block, int]] = []
        while at + 1 < len(blocks):
            run: list[tuple[int, int]] = []
            for index in range(at + 1, len(blocks)):
                block = blocks[index]
                if block.slot is not None:
                    if streamed or len(run) == most:
                        break
                    self.stats.hits += 1
                    run.append((index, block.slot))
                    continue
                if run and not (streamed and len(streamed) < share and self._is_here(block)):
                    break
                incoming = self._arrive(block)
                streamed.append((block, incoming.slot))
                run.append((index, incoming.slot))
            at = run[-1][0]
            try:
                yield run
            finally:
                for block, slot in streamed:
                    if self._window.pop(block, None) is not None:
                        self._window_free.append(slot)
            if streamed:
                streamed.clear()
                self._read_ahead(ahead)

    def settle(self) -> None:
        """Wait for what is under way to the disk, and for reads that nobody needs."""
        for block in list(self._writing):
            if block.writing is not None:
                self._end_of(block.writing)
                self._written(block)
        for incoming, _ in self._dying:
            self._end_of(incoming.reading)
        self._bury()

    # -- figures --------------------------------------------------------------------------

    def counts(self) -> tuple[int, int]:
        """Slots that hold blocks, and blocks that are on disk only or on their way there."""
        used = self._shared - self.pool.free
        return used, self.spill.places - sum(1 for b in self._writing if b.slot is not None)

    def validate(self) -> None:
        """Raises SchedulerError if the books do not balance; for tests."""
        window = len(self._window) + len(self._window_free) + len(self._dying)
        if window + self._shared != self.pool.slots:
            raise SchedulerError(f"{self.pool.slots} slots, {window} of them in the window")
        for layer, resident in enumerate(self._resident):
            for block in resident:
                if block.layer != layer or block.slot is None or block.refs < 1:
                    raise SchedulerError(f"not resident in layer {layer}: {block}")

    # -- inside ---------------------------------------------------------------------------

    def _slot(self, keep: Block | None = None) -> int:
        """A slot for a block that is written to. Takes it from one that has been spilled, else
        waits for one, else makes one leave."""
        while True:
            found = self.pool.take()
            if found is not None:
                return found
            done = next((b for b in self._writing if b.writing and b.writing.done()), None)
            block = done or next(iter(self._writing), None)
            if block is not None and block.writing is not None:
                self._end_of(block.writing)
                self._written(block)
                continue
            victim = self._victim(keep)
            if victim is None or not self._write(victim):
                raise self._no_room()
            del self._resident[victim.layer][victim]

    def _victim(self, keep: Block | None) -> Block | None:
        """Of the layer that has most in RAM, the newest: the others' prefix stays whole."""
        if self._refused is not None:
            return None
        fullest = max(self._resident, key=len)
        return next((b for b in reversed(fullest) if b is not keep), None)

    def _no_room(self) -> OffloadError:
        size = format_bytes(self.pool.slots * self.pool.slot_bytes)
        if self._refused is not None:
            return StoreError(
                f"the KV cache is full: its {size} of RAM are taken, and nothing can be spilled: "
                f"{self._refused}"
            )
        return OffloadError(
            f"the KV cache is full: {self._layers} layers of {self._sequences} sequences write to "
            f"a block each, and its {size} of RAM hold {self._shared} blocks beside the window; "
            f"raise kv_ram (--kv-ram) or use fewer sequences at once"
        )

    def _write(self, block: Block) -> bool:
        """Start to spill a block; False if the disk takes no more."""
        if self._refused is not None or block.slot is None:
            return False
        try:
            block.place, block.writing = self.spill.write(self.pool.view(block.slot))
        except StoreError as error:
            self._refuse(error)
            return False
        self._writing[block] = None
        return True

    def _written(self, block: Block) -> None:
        """Take note of the end of a write: the slot is free, or the block stays."""
        writing, block.writing = block.writing, None
        del self._writing[block]
        if writing is None or block.slot is None or block.place is None:
            raise SchedulerError(f"was not being written: {block}")
        error = writing.exception()
        if error is not None or not block.refs:
            self.spill.release(block.place)
            block.place = None
        if error is None or not block.refs:
            self.pool.give(block.slot)
            block.slot = None
        else:
            # It is the only copy; RAM has it as before.
            self._resident[block.layer][block] = None
            self._refuse(error if isinstance(error, StoreError) else StoreError(str(error)))

    def _refuse(self, error: StoreError) -> None:
        if self._refused is None:
            self._refused = error
            log.warning("KV blocks stay in RAM from now on: %s", error)

    def _copy_to(self, block: Block, slot: int) -> None:
        """The bytes of a block, wherever they are, into a slot."""
        if block.slot is not None:
            self.pool.copy(slot, block.slot)
            return
        incoming = self._window.get(block)
        if incoming is not None:
            self._wait(incoming.reading)
            self.pool.copy(slot, incoming.slot)
        elif block.place is not None:
            self._wait(self.spill.read(block.place, self.pool.view(slot), ahead=False))

    def _read_ahead(self, ahead: Iterator[Block]) -> None:
        self._bury()
        while self._window_free:
            block = next(ahead, None)
            if block is None:
                return
            if block.slot is None and block.place is not None and block not in self._window:
                self._read(block, self._window_free.pop(), ahead=True)

    def _read(self, block: Block, slot: int, *, ahead: bool) -> _Incoming:
        if block.place is None:
            raise SchedulerError(f"is nowhere: {block}")
        reading = self.spill.read(block.place, self.pool.view(slot), ahead=ahead)
        found = self._window[block] = _Incoming(slot, reading)
        return found

    def _is_here(self, block: Block) -> bool:
        """Whether it has been read without an error."""
        incoming = self._window.get(block)
        if incoming is None or not incoming.reading.done():
            return False
        return incoming.reading.exception() is None

    def _arrive(self, block: Block) -> _Incoming:
        """A block of the window that is there, read now if nobody did before."""
        incoming = self._window.get(block)
        if incoming is None:
            incoming = self._read(block, self._window_slot(), ahead=False)
        if incoming.reading.done() and incoming.reading.exception() is None:
            self.stats.ahead += 1
            return incoming
        self.stats.late += 1
        try:
            self._wait(incoming.reading)
        except WatchdogError:
            raise  # the slot is still written to
        except BaseException:
            del self._window[block]
            self._window_free.append(incoming.slot)
            raise
        return incoming

    def _window_slot(self) -> int:
        """One for a block that is wanted now; what is read for the farthest use gives way."""
        self._bury()
        if self._window_free:
            return self._window_free.pop()
        if self._window:
            block = next(reversed(self._window))
            incoming = self._window.pop(block)
            if not incoming.reading.cancel():
                self._end_of(incoming.reading)
            return incoming.slot
        incoming, place = self._dying.pop()
        self._end_of(incoming.reading)
        if place is not None:
            self.spill.release(place)
        return incoming.slot

    def _bury(self) -> None:
        """Slots of reads that nobody wants any more, as far as those have ended."""
        left = []
        for incoming, place in self._dying:
            if not incoming.reading.done():
                left.append((incoming, place))
                continue
            self._window_free.append(incoming.slot)
            if place is not None:
                self.spill.release(place)
        self._dying = left

    def _wait(self, future: Future[int]) -> None:
        """For its end. Raises what it raised."""
        self._end_of(future)
        if (error := future.exception()) is not None:
            raise error

    def _end_of(self, future: Future[int]) -> None:
        """Wait for a transfer, whatever its outcome."""
        if future.done():
            return
        began = time.perf_counter()
        try:
            future.exception(timeout=WATCHDOG_S)
        except FutureTimeout:
            raise WatchdogError(
                f"a block of the KV cache has been on its way for {WATCHDOG_S:.0f} s; the disk of "
                f"{self.spill.directory} may hang"
            ) from None
        finally:
            self.stats.stall_s += time.perf_counter() - began
