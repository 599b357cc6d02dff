"""The CPU as a second site of compute: experts, and products with dense weights, whose weights stay
in RAM while the device works.

One thread computes, in the order of the schedule as far as weights are there. What an expert is
applied to comes down from the device, its result goes up, and the thread that drives the device
merges: it alone touches the device's compute stream. A product, for which that thread could only
wait, it computes itself. Nothing here decides; see ``scheduler.split`` and ``scheduler.sites``.

Seven orders between lanes are made here, each an event with a name, and each is missed by a test
when it is gone:

* ``activations-written``: the copy down comes after what computed them;
* ``activations-in-ram``: the CPU comes after the copy down;
* ``expert-in-ram``: the CPU comes after the read of the weights;
* ``result-written``: the copy up comes after the CPU;
* ``result-on-device``: the merge comes after the copy up;
* ``activations-sent``: the next activations are written after the copy down of these;
* ``activations-read``: and copied down after the CPU has read these.

The last two follow from the others where every result is merged; a layer may break off before. And
the next owner of an expert's slot in RAM comes after the CPU's use.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from offload.blocks import Tier
from offload.errors import OffloadError
from offload.runtime.device import Device, Event, Region
from offload.runtime.mirror import Mirror, sizes, typed
from offload.runtime.transfers import Transfers
from offload.scheduler.residency import Instruction, Residency
from offload.scheduler.timeline import CPU, Record

Work = Callable[..., torch.Tensor]
"""From a block's tensors in RAM to its result there; a product's inputs come behind them."""

ACTOR = "cpu"


@dataclass(slots=True, eq=False)
class Task:
    """One expert of the running layer, or one product."""

    expert: str
    rank: int
    work: Work
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    """Of its result, on both sides."""
    held: bool = False
    begun: bool = False
    error: BaseException | None = None
    landing: Event | None = field(default=None)
    """Done when the result is on the device; known when the copy is queued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What the executor lends: its lock, its books and its ways."""

    device: Device
    residency: Residency
    changed: threading.Condition
    transfers: Transfers
    submit: Callable[[Sequence[Instruction]], None]
    moved: Callable[[], None]
    """Something has finished: whoever waits looks again."""
    record: Record | None = None


class CpuSite:
    """See the module's text. All but the thread's own work happens under the executor's lock."""

    def __init__(self, ground: Ground, nbytes: int) -> None:
        """``nbytes``: of activations on their way, in RAM and on the device alike.

        Raises:
            PlanError: no room on the device.
        """
        self._ground = ground
        self._changed = ground.changed
        self._mirror = Mirror(ground.device, nbytes)
        self._tasks: dict[str, Task] = {}
        self._sent: Event | None = None
        self._down = self._mirror.below(0, 0)  # the activations of the running layer
        self._here = False  # the activations are in RAM
        self._read: Event | None = None  # what the CPU has read of them
        self._running: Task | None = None
        self._fault: OffloadError | None = None  # what the thread has ended with
        self._closed = False
        self._thread: threading.Thread | None = None
        self._threads = torch.get_num_threads()

    # -- the thread that drives the device ------------------------------------------------------

    def send(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Begin to copy tensors of the device to RAM. Returns where they will lie, for the tasks of
        this layer: a task begins when they are there.

        Raises:
            SchedulerError: more bytes than there is room for.
        """
        ground, mirror = self._ground, self._mirror
        self._drain()
        mirror.clear()
        parts = sizes(tensors)
        start, total = mirror.place(sum(parts)), sum(parts)
        up, down = mirror.above(start, total), mirror.below(start, total)
        below: list[torch.Tensor] = []
        if self._sent is not None:
            ground.transfers.order("activations-sent", "compute", self._sent)
        ground.device.touch("compute", up, "w")
        at = start
        for tensor, nbytes in zip(tensors, parts, strict=True):
            place = mirror.above(at, nbytes)
            typed(place, tensor.shape, tensor.dtype).copy_(tensor)
            below.append(typed(mirror.below(at, nbytes), tensor.shape, tensor.dtype))
            at += nbytes
        ground.transfers.order("activations-written", "d2h", ground.device.compute.record())
        if self._read is not None:
            ground.transfers.order("activations-read", "d2h", self._read)
        with self._changed:
            self._here = False
            sent = self._sent = ground.device.copy(down, up, ground.device.d2h)
            self._down = down

        def on_sent(error: BaseException | None) -> None:
            with self._changed:
                if sent is self._sent:
                    self._here = True
                    if error is not None:
                        self._fail_all(error)
                    ground.moved()

        sent.then(on_sent)
        return below

    def submit(self, expert: str, work: Work, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Have the CPU compute an expert that the running layer is routed to, as soon as its
        weights are in RAM. ``shape``, ``dtype``: of the result. Submit in the schedule's order.

        Raises:
            SchedulerError: more bytes than there is room for.
            OffloadError: the thread has ended with an error of its own.
        """
        nbytes = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
        with self._changed:
            if self._fault is not None:
                raise self._fault
            offset = self._mirror.place(nbytes)
            task = Task(expert, len(self._tasks), work, tuple(shape), dtype, offset)
            self._tasks[expert] = task
            self._hold(task)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="offload-cpu", daemon=True)
                thread.start()
                self._thread = thread
            self._changed.notify_all()

    def compute(
        self, block: str, inputs: Sequence[torch.Tensor], work: Work, shape: Sequence[int]
    ) -> torch.Tensor:
        """``send``, ``submit`` and ``take`` of one product, in this thread, of the dtype of its
        first input: the device has nothing else to do.

        Raises:
            SchedulerError: more bytes than there is room for.
            Exception: what copying, or ``work(views, *inputs)``, has raised.
        """
        below = self.send(inputs)
        dtype = inputs[0].dtype
        nbytes = math.prod(shape) * dtype.itemsize
        task = Task(block, 0, lambda v: work(v, *below), tuple(shape), dtype,
                    self._mirror.place(nbytes))  # fmt: skip
        assert self._sent is not None
        self._sent.wait()
        with self._changed:
            self._hold(task)
            self._running, task.begun = task, True
        self._perform(task)
        return self._landed(task)

    def pending(self, expert: str) -> bool:
        """Whether a result is not on its way up yet. Under the lock."""
        task = self._tasks[expert]
        return task.landing is None and task.error is None

    def take(self, expert: str) -> torch.Tensor:
        """The result of an expert that is not pending, on the device: until the next ``send``.

        Raises:
            Exception: what computing it, or copying, has raised.
        """
        with self._changed:  # the CPU's thread looks through the tasks for its next one
            task = self._tasks.pop(expert)
        return self._landed(task)

    def _landed(self, task: Task) -> torch.Tensor:
        if task.error is not None:
            raise task.error
        nbytes = math.prod(task.shape) * task.dtype.itemsize
        place = self._mirror.above(task.offset, nbytes)
        # Outside the lock: where the host is the compute stream it waits, and who ends the copy may
        # need the lock before.
        self._ground.transfers.order("result-on-device", "compute", task.landing)
        self._ground.device.touch("compute", place, "r")
        return typed(place, task.shape, task.dtype)

    def abandon(self) -> None:
        """Nobody wants the results that have not been taken: what has not begun never will."""
        with self._changed:
            for task in tuple(self._tasks.values()):
                if not task.begun:
                    del self._tasks[task.expert]
                    self._let_go(task)

    # -- the executor, under its lock -----------------------------------------------------------

    def arrived(self, expert: str) -> None:
        """An expert's bytes are in RAM."""
        task = self._tasks.get(expert)
        if task is not None and not task.held:
            self._hold(task)

    @property
    def busy(self) -> bool:
        """Whether the thread reads an expert."""
        return self._running is not None

    def stop(self) -> None:
        """Begin nothing any more."""
        self._closed = True
        self._changed.notify_all()

    def close(self) -> None:
        """Wait for the thread, give the memory back. Not under the lock. Idempotent."""
        with self._changed:
            self.stop()
        if self._thread is not None:
            self._thread.join()
        self._mirror.close()

    # -- the CPU's thread -----------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # OpenMP asks each thread of its own
        try:
            while (task := self._await_task()) is not None:
                self._perform(task)
        except BaseException as error:  # noqa: BLE001  nobody is to wait for what never comes
            with self._changed:
                self._running = None
                self._fault = OffloadError(
                    f"the thread that computes on the CPU has ended: {error!r}; load the "
                    f"model again, or without --hybrid"
                )
                self._fault.__cause__ = error
                for task in self._tasks.values():
                    if task.landing is None:
                        task.error = task.error or self._fault
                self._ground.moved()

    def _await_task(self) -> Task | None:
        """The next task, begun; None when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._next() is not None)
            task = None if self._closed else self._next()
            if task is not None:
                self._running, task.begun = task, True
            return task

    def _perform(self, task: Task) -> None:
        began = time.perf_counter()
        try:
            views = self._begin(task)
            with torch.no_grad():
                result = task.work(views)
            self._end(task, result)
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            task.error = error
        with self._changed:
            self._running = None
            self._read = self._ground.device.signal(ACTOR)
            try:
                self._let_go(task)
            except OffloadError as error:
                task.error = task.error or error
            if self._ground.record is not None:
                self._ground.record(CPU, task.expert, began, time.perf_counter(), 0)
            self._ground.moved()

    def _next(self) -> Task | None:
        """The first task that can begin. Under the lock."""
        if not self._here:
            return None
        ready = (t for t in self._tasks.values() if t.held and not t.begun and t.error is None)
        return min(ready, key=lambda t: t.rank, default=None)

    def _begin(self, task: Task) -> dict[str, torch.Tensor]:
        ground = self._ground
        lease = ground.transfers.lease(task.expert, Tier.RAM)
        ground.transfers.order("expert-in-ram", ACTOR, lease.ready)
        ground.transfers.order("activations-in-ram", ACTOR, self._sent)
        ground.device.touch(ACTOR, lease.region, "r")
        ground.device.touch(ACTOR, self._down, "r")
        return {spec.name: lease.tensor(spec) for spec in lease.spec.tensors}

    def _end(self, task: Task, result: torch.Tensor) -> None:
        ground = self._ground
        if tuple(result.shape) != task.shape or result.dtype != task.dtype:
            raise OffloadError(
                f"{task.expert} gave {result.dtype} {list(result.shape)} on the CPU, not "
                f"{task.dtype} {list(task.shape)}"
            )
        nbytes = result.numel() * result.element_size()
        below, above = (m(task.offset, nbytes) for m in (self._mirror.below, self._mirror.above))
        ground.device.touch(ACTOR, below, "w")
        typed(below, task.shape, task.dtype).copy_(result)
        with self._changed:
            self._up(task, below, above)

    def _up(self, task: Task, below: Region, above: Region) -> None:
        ground = self._ground
        ground.transfers.order("result-written", "up", ground.device.signal(ACTOR))
        # Not behind the weights that are on their way: compute waits for this one now.
        task.landing = ground.device.copy(above, below, ground.device.up)

    # -- under the lock -------------------------------------------------------------------------

    def _hold(self, task: Task) -> None:
        there, todo = self._ground.residency.hold_below(task.expert)
        task.held = there
        self._ground.submit(todo)
        if there:
            self._changed.notify_all()

    def _let_go(self, task: Task) -> None:
        if not task.held:
            return
        task.held = False
        if task.begun and self._read is not None:
            self._ground.transfers.used(Tier.RAM, task.expert, ACTOR, self._read)
        self._ground.submit(self._ground.residency.release_below(task.expert))

    def _fail_all(self, error: BaseException) -> None:
        for task in self._tasks.values():
            if not task.begun:
                task.error = error
                self._let_go(task)

    def _drain(self) -> None:
        """Of a layer that was broken off: what has begun ends, and its bytes are free."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._running is None)
                left = self._tasks.pop(next(iter(self._tasks), ""), None)
            if left is None:
                return
            if left.landing is not None:
                self._ground.transfers.order("result-on-device", "compute", left.landing)


__all__ = ["ACTOR", "CpuSite", "Ground", "Task", "Work"]
