"""Leases: which block holds which bytes of a memory, and which events guard them.

The scheduler decides the offsets; the arena only refuses what cannot be, with the story of both
sides, and remembers which events the next owner of the bytes must come after.
"""

from __future__ import annotations

import itertools
import logging
import threading
from bisect import bisect_left
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from types import TracebackType

import torch

from offload.blocks import ALIGN, DTYPE_BYTES, BlockSpec, TensorSpec
from offload.errors import ClosedError, SchedulerError
from offload.runtime.device import Device, Event, Memory, Region
from offload.runtime.intervals import IntervalMap

log = logging.getLogger(__name__)

VIEWS_KEPT = 2048
"""Typed views an arena remembers, of about 1 KiB each: making one takes 25 µs, which every expert
that is read again would pay twice."""


def outside_transforms() -> AbstractContextManager[object]:
    """A context in which torch.func's transforms see nothing: they would wrap a view of memory into
    a tensor of theirs, which is void when they end, while the view is kept."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def outside_inference() -> AbstractContextManager[object]:
    """A context that makes no inference tensors: a lease made while generating may serve a backward
    later. To enter ``torch.inference_mode(False)`` is a quarter of what a view takes, so not where
    that is so already."""
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(False)
    return nullcontext()


class Lease:
    """A block's right to bytes of a memory, from ``Arena.lease`` to ``Arena.release``.

    Attributes:
        spec: the block.
        offset, nbytes: the slot: 4096-aligned, ``spec.slot_nbytes`` long.
        after: events of the slot's previous owners; whoever writes first comes after all of them.
        ready: done when the block's bytes are in place; set by whoever fills the lease.
        last_use: set at release: the events that end the use of the bytes.
    """

    __slots__ = (
        "_address",
        "_memory",
        "_remembered",
        "_tensors",
        "_view",
        "after",
        "last_use",
        "live",
        "nbytes",
        "number",
        "offset",
        "ready",
        "spec",
    )

    def __init__(
        self,
        memory: Memory,
        spec: BlockSpec,
        offset: int,
        after: tuple[Event, ...],
        number: int,
        remembered: dict[tuple[int, str, tuple[int, ...]], torch.Tensor],
    ) -> None:
        self.spec = spec
        self.offset = offset
        self.nbytes = spec.slot_nbytes
        self.after = after
        self.ready: Event | None = None
        self.last_use: tuple[Event, ...] = ()
        self.live = True
        self.number = number
        self._memory = memory
        self._remembered = remembered
        self._view: memoryview | None = None
        self._address: int | None = None
        self._tensors: dict[TensorSpec, torch.Tensor] = {}

    @property
    def region(self) -> Region:
        """The slot, for copies and touches."""
        return Region(self._memory, self.offset, self.nbytes)

    @property
    def view(self) -> memoryview:
        """The slot's bytes, for I/O; host memory only. Raises SchedulerError after release."""
        self._check_live()
        if self._view is None:
            self._view = self._memory.view()[self.offset : self.offset + self.nbytes]
        return self._view

    @property
    def address(self) -> int:
        """Of the slot's first byte; host memory only. Raises SchedulerError after release."""
        self._check_live()
        if self._address is None:
            self._address = self._memory.tensor().data_ptr() + self.offset
        return self._address

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """The bytes of one tensor of the block, typed and shaped, without a copy.

        The same object each time. It has its own version counter: autograd's check for changes
        in place would otherwise see every refill of every other slot as a change of this one.

        Raises:
            SchedulerError: after release, or if the tensor does not lie in the block.
        """
        self._check_live()
        found = self._tensors.get(spec)
        if found is None:
            found = self._tensors[spec] = self._typed(spec)
        return found

    def _typed(self, spec: TensorSpec) -> torch.Tensor:
        if spec.offset < 0 or spec.offset + spec.nbytes > self.nbytes:
            raise SchedulerError(
                f"tensor {spec.name} takes bytes [{spec.offset}, {spec.offset + spec.nbytes}) of a "
                f"slot of {self.nbytes}: {self.story()}"
            )
        key = (self.offset + spec.offset, spec.dtype, spec.shape)
        found = self._remembered.get(key)
        if found is None:
            found = self._new_view(spec)
            if len(self._remembered) < VIEWS_KEPT:
                self._remembered[key] = found
        return found

    def _new_view(self, spec: TensorSpec) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, spec.dtype)
        base = self._memory.tensor()
        start = base.storage_offset() + self.offset + spec.offset
        with outside_inference(), outside_transforms():
            empty = torch.empty(0, dtype=dtype, device=base.device)
            stride = row_major(spec.shape)
            return empty.set_(
                base.untyped_storage(), start // DTYPE_BYTES[spec.dtype], spec.shape, stride
            )

    def _check_live(self) -> None:
        if not self.live:
            raise SchedulerError(f"used after release: {self.story()}")

    def story(self) -> str:
        """What happened to the lease so far, in one line."""
        if not self.live:
            state = f"released with {len(self.last_use)} event(s)"
        elif self.ready is None:
            state = "live, not filled"
        else:
            state = "live, ready" if self.ready.done() else "live, being filled"
        return (
            f"lease {self.number} of block '{self.spec.id}' ({self.spec.kind.value}) at "
            f"[{self.offset}, {self.offset + self.nbytes}) of '{self._memory.name}', {state}"
        )


@lru_cache(maxsize=256)
def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor."""
    stride, step = [0] * len(shape), 1
    for i in reversed(range(len(shape))):
        stride[i] = step
        step *= max(shape[i], 1)
    return tuple(stride)


class Arena:
    """The live leases over one memory, which the arena owns and closes. Thread-safe.

    As a context manager it raises SchedulerError at a clean exit if leases were leaked.
    """

    def __init__(self, memory: Memory, device: Device) -> None:
        self.memory = memory
        self._device = device
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._offsets: list[int] = []  # sorted; live leases are disjoint, so their ends are, too
        self._leases: dict[int, Lease] = {}
        # What the next owner of bytes comes after. Also of bytes that are let: nobody else can ask
        # meanwhile.
        self._released: IntervalMap[tuple[Event, ...]] = IntervalMap()
        # Slots of experts are let again and again to tensors of the same shapes.
        self._views: dict[tuple[int, str, tuple[int, ...]], torch.Tensor] = {}
        self._closed = False

    def lease(self, spec: BlockSpec, offset: int) -> Lease:
        """Give ``[offset, offset + spec.slot_nbytes)`` to the block.

        Does not wait: the bytes may still be in use until the events of ``Lease.after`` are done.

        Raises:
            SchedulerError: unaligned, outside the memory, or overlapping a live lease.
            ClosedError: the arena is closed.
        """
        nbytes = spec.slot_nbytes
        with self._lock:
            if self._closed:
                raise ClosedError(f"arena '{self.memory.name}' is closed")
            self._check_place(spec, offset, nbytes)
            # The same events guard all of a previous owner's bytes; name each once, in order.
            previous = self._released.overlapping(offset, offset + nbytes)
            after = dict.fromkeys(event for _, _, events in previous for event in events)
            lease = Lease(self.memory, spec, offset, tuple(after), next(self._numbers), self._views)
            if nbytes:
                self._offsets.insert(bisect_left(self._offsets, offset), offset)
                self._leases[offset] = lease
            return lease

    def _check_place(self, spec: BlockSpec, offset: int, nbytes: int) -> None:
        stop = offset + nbytes
        if offset % ALIGN or offset < 0 or stop > self.memory.nbytes:
            raise SchedulerError(
                f"cannot lease [{offset}, {stop}) of '{self.memory.name}' "
                f"({self.memory.nbytes} bytes) to block '{spec.id}': it must lie inside, "
                f"at a multiple of {ALIGN}"
            )
        # Disjoint and sorted, so only the last lease that starts before ``stop`` can overlap.
        i = bisect_left(self._offsets, stop)
        if i and nbytes:
            other = self._leases[self._offsets[i - 1]]
            if other.offset + other.nbytes > offset:
                raise SchedulerError(
                    f"cannot lease [{offset}, {stop}) of '{self.memory.name}' to block "
                    f"'{spec.id}' ({spec.kind.value}): it overlaps {other.story()}"
                )

    def views_at(self, spec: BlockSpec, offset: int) -> dict[str, torch.Tensor]:
        """A block's tensors as a lease at ``offset`` has them, for whoever knows when it is one's.

        Raises:
            SchedulerError: it does not lie inside.
        """
        if offset % ALIGN or offset < 0 or offset + spec.slot_nbytes > self.memory.nbytes:
            raise SchedulerError(f"block '{spec.id}' does not lie at {offset} of a memory")
        look = Lease(self.memory, spec, offset, (), -1, self._views)
        return {tensor.name: look.tensor(tensor) for tensor in spec.tensors}

    def all_after(self, *events: Event) -> None:
        """Whoever is given bytes that nobody has now comes after all of these events, which are
        behind all that was done with them without a lease: also bytes that nobody has had yet."""
        with self._lock:
            self._released.put(0, self.memory.nbytes, events)

    def release(self, lease: Lease, *last_use: Event) -> None:
        """End the lease. Its bytes may be used again after all of ``last_use``; give none only
        if nobody used them, or the calling host thread did or has waited for it.

        Raises:
            SchedulerError: the lease is not live in this arena.
        """
        with self._lock:
            if not lease.live or (lease.nbytes and self._leases.get(lease.offset) is not lease):
                raise SchedulerError(f"cannot release what is not live here: {lease.story()}")
            # A lease given back unused (a prefetch that was cancelled) leaves to the next owner
            # what its own owner would have had to wait for.
            last_use = last_use or lease.after
            # Poison first: once the registry forgets the lease, another thread may write there.
            self._device.discard(lease.region, last_use)
            lease.live = False
            lease.last_use = last_use
            lease._view = None
            lease._tensors = {}
            if lease.nbytes:
                del self._offsets[bisect_left(self._offsets, lease.offset)]
                del self._leases[lease.offset]
                # What an earlier owner left is implied: this one came after it.
                self._released.put(lease.offset, lease.offset + lease.nbytes, last_use)

    def live(self) -> tuple[Lease, ...]:
        """Live leases by offset."""
        with self._lock:
            return tuple(self._leases[o] for o in self._offsets)

    def leaked(self) -> tuple[Lease, ...]:
        """Leases that were live when the arena was closed."""
        return self.live() if self._closed else ()

    def close(self) -> None:
        """Close the memory. Idempotent. Logs leaked leases as errors and keeps them for
        ``leaked()``: raising here would hide the error that made the owner forget them."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for lease in self.leaked():
            log.error("leaked: %s", lease.story())
        self._views.clear()
        self.memory.close()

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        leaked = self.leaked()
        if kind is None and leaked:
            raise SchedulerError(f"{len(leaked)} leaked lease(s), first: {leaked[0].story()}")
