"""Units' inputs between forward and backward: written to the disk behind one, read ahead of the
other.

Backward runs each unit again from its input, which is all that forward leaves of it. Those inputs
grow with the tokens of a step while everything else a step keeps in RAM grows with the model; where
they do not fit they go to a private file (ZeRO-Infinity, Rajbhandari et al. 2021, section 5.1.3,
offloads such checkpoints to the CPU; here the next tier down is the disk).

A tensor of torch's starts at no page boundary, so it is copied once, into a buffer that O_DIRECT
takes. Back it comes without a copy, into memory that starts at a page: it dies with its last user,
whoever in the model's code that is, which a pool of buffers could not know.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from offload.blocks import ALIGN, align_up
from offload.errors import OffloadError
from offload.io.engines import Engine
from offload.io.files import DirectFile
from offload.io.store import DEMAND, PREFETCH
from offload.train.buffers import BufferPool
from offload.train.landing import Home
from offload.train.weights import Shared

AHEAD = 2
"""Inputs on their way to the disk, or from it, beside the one that backward uses."""

REQUEST_BYTES = 4 << 20
"""Of one request: several of an input are under way at a time."""


def buffer_bytes(largest: int) -> int:
    """Bytes of RAM that spilling takes itself, of inputs of at most ``largest`` bytes."""
    return (AHEAD + 1) * align_up(largest)


class Kept:
    """One input in the file. Its room there is free when nothing can ask for it any more."""

    __slots__ = ("__weakref__", "_left", "_owner", "dtype", "group", "memory", "nbytes", "number",
                 "pending", "shape", "slot")  # fmt: skip

    def __init__(
        self, owner: SpilledInputs, left: deque[tuple[int, int]], slot: int, number: int,
        group: int, tensor: torch.Tensor,
    ) -> None:  # fmt: skip
        self._owner = owner
        self._left = left
        self.slot = slot
        self.number = number
        """In the order of forward."""
        self.group = group
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.nbytes = tensor.nbytes
        self.pending = 0
        """Requests under way: the writes of it, later the reads."""
        self.memory: torch.Tensor | None = None
        """Where reads put it, or have put it; None again when backward has taken it."""

    def take(self) -> torch.Tensor:
        """The input again, contiguous. May be called again (``retain_graph``).

        Raises:
            StoreError: it could not be written or read.
        """
        return self._owner.take(self)

    def __del__(self) -> None:
        # In any thread at any moment, so nothing but this: whoever needs room looks there.
        self._left.append((self.slot, 0 if self.memory is None else align_up(self.nbytes)))


class Waits(Protocol):
    """A unit's input that waits for its backward."""

    def take(self) -> torch.Tensor:
        """The input again, contiguous. May be called again (``retain_graph``)."""
        ...


class Later:
    """An input that is on its way from a device: put away when it has come."""

    def __init__(self, home: Home, keep: Callable[[torch.Tensor], Waits | None]) -> None:
        self._home: Home | None = home
        self._keep = keep
        self._kept: Waits | None = None
        home.then(self._come)
        home.begin()

    def _come(self) -> None:
        if self._home is not None:
            self._kept = self._keep(self._home.plain)
            if self._kept is not None:
                self._home = None

    def take(self) -> torch.Tensor:
        """See ``Waits``."""
        home = self._home
        if home is None:
            assert self._kept is not None
            return self._kept.take()
        self._keep = lambda _: None  # now it is needed here
        return home.take()


class SpilledInputs:
    """The inputs of ``units`` in ``file``. One training thread at a time, as the engine has."""

    def __init__(
        self, shared: Shared, engine: Engine, file: DirectFile, units: Collection[int],
        largest: int,
    ) -> None:  # fmt: skip
        """``largest``: bytes of the largest input; what is larger (a longer sequence than was
        planned for) stays in RAM. The file grows where more are kept than it has room for."""
        if largest <= 0:
            raise OffloadError("inputs that are spilled have at least a byte")
        self.units = frozenset(units)
        self.written_bytes = 0
        self.read_bytes = 0
        self._shared = shared
        self._engine = engine
        self._file = file
        self._slot_bytes = align_up(largest)
        self._limit = AHEAD * self._slot_bytes
        self._pool = BufferPool(self._limit, "inputs to be spilled")
        self._ahead_bytes = 0
        """Read, or being read, and not yet taken."""
        self._reading = False
        """Backward has begun: what lands can be read again."""
        self._left: deque[tuple[int, int]] = deque()
        """(slot, bytes that were read for nothing) of inputs that are gone."""
        self._free: list[int] = []
        self._slots = self._numbers = self._groups = 0
        self._last_unit = -1
        self._waiting: dict[int, weakref.ref[Kept]] = {}
        """By number: what backward has not begun to read."""
        self._ahead: dict[int, weakref.ref[Kept]] = {}
        """By number: what is being read, or was, and not yet taken."""

    # -- forward --------------------------------------------------------------------------

    def takes(self, unit: int, tensor: torch.Tensor) -> bool:
        """Whether it goes to the disk."""
        return (
            unit in self.units
            and tensor.is_floating_point()
            and tensor.is_contiguous()
            and 0 < tensor.nbytes <= self._slot_bytes
        )

    def keep(self, unit: int, tensor: torch.Tensor, *, in_turns: bool) -> Kept | None:
        """Begin to write a unit's input; None where it stays in RAM.

        ``in_turns``: all micro-batches pass a unit before any goes on, in backward, too.
        """
        if not self.takes(unit, tensor):
            return None
        nbytes = align_up(tensor.nbytes)
        with self._shared.changed:
            self._reading = False
            self._shared.wait_for(
                lambda: self._fits(nbytes, put_back=True), "room for inputs to be spilled"
            )
            memory = self._pool.take(nbytes)
            if not (in_turns and unit == self._last_unit):
                self._groups += 1
            self._last_unit = unit
            self._numbers += 1
            kept = Kept(self, self._left, self._slot(), self._numbers, self._groups, tensor)
            self._waiting[kept.number] = weakref.ref(kept)
        flat = memory.tensor()[: tensor.nbytes]
        flat.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        self.written_bytes += nbytes
        view = memory.view()
        starts = range(0, nbytes, REQUEST_BYTES)
        with self._shared.changed:
            kept.pending = len(starts)
        done = self._landed(kept, memory)
        for start in starts:
            part = view[start : min(start + REQUEST_BYTES, nbytes)]
            self._engine.write(self._file, self._offset(kept) + start, part).add_done_callback(done)
        return kept

    def _fits(self, nbytes: int, *, put_back: bool = False) -> bool:
        self._collect()
        if put_back:
            self._put_back()
        return self._pool.used + self._ahead_bytes + nbytes <= self._limit

    def _collect(self) -> None:
        while self._left:
            slot, nbytes = self._left.popleft()
            self._free.append(slot)
            self._ahead_bytes -= nbytes

    def _put_back(self) -> None:
        """Forward goes on before all was used (two forwards, then their backwards): what was read
        ahead is dropped. It is in the file still."""
        for number, reference in list(self._ahead.items()):
            kept = reference()
            if kept is not None and kept.pending:
                continue
            del self._ahead[number]
            if kept is not None:
                kept.memory = None
                self._ahead_bytes -= align_up(kept.nbytes)
                self._waiting[number] = reference

    def _slot(self) -> int:
        self._collect()
        if self._free:
            return self._free.pop()
        self._slots += 1
        return self._slots - 1

    def _offset(self, kept: Kept) -> int:
        return kept.slot * self._slot_bytes

    def _landed(self, kept: Kept, memory: Any) -> Callable[[Future[int]], None]:
        def done(future: Future[int]) -> None:
            error = future.exception()
            with self._shared.changed:
                kept.pending -= 1
                if error is not None:
                    self._shared.fail(error)
                if not kept.pending:
                    self._pool.give(memory)
                    self._pump()
                self._shared.notify()

        return done

    # -- backward -------------------------------------------------------------------------

    def ahead(self) -> None:
        """Backward runs: begin to read what it will ask for."""
        with self._shared.changed:
            self._reading = True
            self._pump()

    def _pump(self) -> None:
        """With the lock held: read the next ones as far as there is room."""
        if not self._reading or self._shared.error is not None or self._shared.closed:
            return
        if not self._pool.used:
            self._pool.close()  # forward is through: its buffers' memory is backward's now
        while (kept := self._next()) is not None:
            if not self._fits(align_up(kept.nbytes)):
                return
            self._read(kept, PREFETCH)

    def _next(self) -> Kept | None:
        """The last unit's first; None if it is still on its way to the file."""
        gone, first = [], None
        for number, reference in self._waiting.items():
            kept = reference()
            if kept is None:  # its backward will never come
                gone.append(number)
            elif first is None or (-kept.group, number) < (-first.group, first.number):
                first = kept
        for number in gone:
            del self._waiting[number]
        return first if first is not None and not first.pending else None

    def _read(self, kept: Kept, priority: int) -> None:
        nbytes = align_up(kept.nbytes)
        raw = torch.empty(nbytes + ALIGN, dtype=torch.uint8)
        start = -raw.data_ptr() % ALIGN
        kept.memory = raw[start : start + nbytes]
        numbers: Any = kept.memory.numpy()
        view = memoryview(numbers)
        starts = range(0, nbytes, REQUEST_BYTES)
        kept.pending = len(starts)
        self._ahead[kept.number] = weakref.ref(kept)
        self._waiting.pop(kept.number, None)
        self._ahead_bytes += nbytes
        self.read_bytes += nbytes
        done = self._came(kept)
        for at in starts:
            part = view[at : min(at + REQUEST_BYTES, nbytes)]
            future = self._engine.read(self._file, self._offset(kept) + at, part, priority)
            future.add_done_callback(done)

    def _came(self, kept: Kept) -> Callable[[Future[int]], None]:
        def done(future: Future[int]) -> None:
            error = future.exception()
            with self._shared.changed:
                kept.pending -= 1
                if error is not None:
                    self._shared.fail(error)
                self._shared.notify()

        return done

    def take(self, kept: Kept) -> torch.Tensor:
        """``Kept.take``."""
        with self._shared.changed:
            self._reading = True
            self._shared.wait_for(
                lambda: kept.memory is not None or not kept.pending, "an input to be spilled"
            )
            if kept.memory is None:
                self._read(kept, DEMAND)
            self._shared.wait_for(lambda: not kept.pending, "an input from the disk")
            memory, kept.memory = kept.memory, None
            self._ahead.pop(kept.number, None)
            self._ahead_bytes -= align_up(kept.nbytes)
            self._pump()
        assert memory is not None
        return memory[: kept.nbytes].view(kept.dtype).view(kept.shape)

    def close(self) -> None:
        """Let go of the file. What is under way ends first."""
        self._waiting.clear()
        self._ahead.clear()
        self._file.close()
        self._pool.close()
