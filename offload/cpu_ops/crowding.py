"""OpenMP's threads wait for each other awake while they have cores, asleep if others want those.

A thread that spins at a barrier answers at once. Beside another program it spins on while its
partner is kept from running, and uses up its own share of the core. libgomp decides which it is
when it is loaded, for good, with one exception: while a process has more OpenMP threads than there
are cores, a wait spins a thousand times only, then sleeps (``gomp_managed_threads`` against
``gomp_available_cpus`` in its ``config/linux/wait.h``). So a second team that does nothing is
started when threads are kept waiting for cores, and ended when they no longer are.

Whether they are the kernel says (``/proc/PID/task/TID/schedstat``: time on a core, time ready
without one). On two cores (``benchmarks/busy.py``) it is 0 to 3 % of a busy thread's time when
nothing else runs, up to 11 % where our own threads read beside it, and from 28 % on beside one
other busy program. Elsewhere than on Linux, with another OpenMP than libgomp, or where the user has
said how threads wait, nothing is done.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offload.cpu_ops.threads import OpenMP

log = logging.getLogger(__name__)

SPINS = "30000"
"""What the command line asks of libgomp, 20 to 50 ns each by processor: longer than Python takes
between two operations, shorter than libgomp's own 300,000."""

PERIOD_S = 0.2
"""Between two looks; at least ``_SPARSE`` times the processor time that one takes."""
_SPARSE = 200

CROWDED = 0.25
"""Share of busy threads' time without a core from which on they sleep,"""
LASTING = 2
"""if it is so in this many looks one after the other: our own threads may crowd for a moment."""
ALONE = 0.15
"""Share below which they may spin again,"""
CALM = 3
"""if it is so in this many looks."""

_BUSY = 0.3
"""A thread that wants a core for less than this share of the time (one that reads) says nothing."""

_COMPUTING = ("offload-cpu", "offload-engine", "offload-micro")
"""Of our own threads (all have names), those that begin parallel regions."""

_GO_ON = "threads go on spinning where they wait for each other: %s"

_TASKS = Path("/proc/self/task")
_SAID = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}

Times = Mapping[int, tuple[int, int]]
"""Of each thread: ns on a core, ns ready without one."""


def read_times(tasks: Path = _TASKS) -> Times:
    """What the kernel says of this process's threads; nothing where it does not."""
    times: dict[int, tuple[int, int]] = {}
    try:
        names = os.listdir(tasks)
    except OSError:
        return times
    for name in names:
        try:
            on, ready = (tasks / name / "schedstat").read_text().split()[:2]
            times[int(name)] = int(on), int(ready)
        except (OSError, ValueError):  # it has ended meanwhile; or a kernel without the file
            continue
    return times


def not_computing() -> set[int]:
    """Our own threads that read, write and copy: many at once, and now and then in the way of
    those that compute, where nothing else runs."""
    return {
        thread.native_id
        for thread in threading.enumerate()
        if thread.native_id is not None
        and thread.name.startswith("offload-")
        and not thread.name.startswith(_COMPUTING)
    }


def waiting_share(
    before: Times, after: Times, wall_ns: float, others: Collection[int] = ()
) -> float:
    """Of the time that busy threads wanted a core, the share they were without one because of
    other programs; 0 if none was busy.

    ``others``: threads that are in the way themselves, for as long as they run, and not asked.
    """
    on = ready = own = 0
    for thread, (on_after, ready_after) in after.items():
        on_before, ready_before = before.get(thread, (on_after, ready_after))
        ran, waited = on_after - on_before, ready_after - ready_before
        if thread in others:
            own += ran
        elif ran + waited > _BUSY * wall_ns:
            on, ready = on + ran, ready + waited
    return max(0, ready - own) / (on + ready) if on + ready else 0.0


class Decision:
    """Whether threads should sleep, from one share after the other."""

    def __init__(self) -> None:
        self.crowded = False
        self._against = 0
        """Looks in a row that spoke against what is decided."""

    def see(self, share: float) -> bool:
        """Take in the share of the last look; True if the threads should sleep from now on."""
        against = share < ALONE if self.crowded else share > CROWDED
        self._against = self._against + 1 if against else 0
        if self._against >= (CALM if self.crowded else LASTING):
            self.crowded, self._against = not self.crowded, 0
        return self.crowded


class IdleTeam:
    """OpenMP threads that do nothing but be there."""

    def __init__(self, runtime: OpenMP, threads: int) -> None:
        """``threads``: of the team, its own starting thread among them.

        Raises:
            RuntimeError: the system starts no more threads.
        """
        _try_to_start(threads)
        self._over = threading.Event()
        self._there = threading.Event()
        self._runtime, self._threads = runtime, threads
        self._thread = threading.Thread(target=self._stay, name="offload-idle-team", daemon=True)
        self._thread.start()
        self._there.wait()

    def _stay(self) -> None:
        # What the team runs must need neither Python nor its argument.
        try:
            nothing = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value or 0
            self._runtime.parallel(nothing, 0, self._threads, 0)
        finally:
            self._there.set()
        self._over.wait()
        # libgomp ends a team with the thread that has started it.

    def close(self) -> None:
        self._over.set()
        self._thread.join()


def _try_to_start(threads: int) -> None:
    """Where libgomp gets no thread it ends the process; Python raises RuntimeError."""
    over = threading.Event()
    tried: list[threading.Thread] = []
    try:
        for _ in range(threads):
            thread = threading.Thread(target=over.wait, name="offload-try", daemon=True)
            thread.start()
            tried.append(thread)
    finally:
        over.set()
        for thread in tried:
            thread.join()


class Watch:
    """Looks every ``PERIOD_S`` seconds, in a thread of its own, while anyone is in ``watched``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.team: IdleTeam | None = None
        """Where threads sleep at present; None where they spin."""

    def enter(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1 and (runtime := _controllable()) is not None:
                self._over = threading.Event()
                # Asked here: a thread that asks torch for the first time sets the number, too.
                size = _too_many()
                thread = threading.Thread(
                    target=self._serve, args=(runtime, size, self._over), name="offload-crowding",
                    daemon=True,
                )  # fmt: skip
                try:
                    thread.start()
                except RuntimeError as error:
                    log.info(_GO_ON, error)
                else:
                    self._thread = thread

    def leave(self) -> None:
        with self._lock:
            self._users = max(0, self._users - 1)  # a fork's child may leave what it never entered
            if self._users or self._thread is None:
                return
            self._over.set()
            self._thread.join()  # it never takes the lock
            self._thread = None

    def forget(self) -> None:
        """After a fork: the threads are the parent's."""
        self.__init__()  # type: ignore[misc]

    def _serve(self, runtime: OpenMP, size: int, over: threading.Event) -> None:
        decision = Decision()
        before, at = read_times(), time.perf_counter_ns()
        pause, began = PERIOD_S, time.thread_time_ns()
        try:
            while not over.wait(pause):
                after, now = read_times(), time.perf_counter_ns()
                crowded = decision.see(waiting_share(before, after, now - at, not_computing()))
                pause = max(PERIOD_S, _SPARSE * (time.thread_time_ns() - began) / 1e9)
                if crowded and self.team is None:
                    try:
                        self.team = IdleTeam(runtime, size)
                    except RuntimeError as error:
                        log.info(_GO_ON, error)
                        return
                elif not crowded:
                    self._end_team()
                before, at, began = after, now, time.thread_time_ns()
        finally:
            self._end_team()

    def _end_team(self) -> None:
        if self.team is not None:
            self.team.close()
            self.team = None


def _controllable() -> OpenMP | None:
    """libgomp, if it is what torch computes with, several threads do, and it may be told."""
    import torch

    from offload.cpu_ops.threads import openmp

    said = {name: os.environ[name] for name in _SAID & os.environ.keys()}
    if said and said != {"GOMP_SPINCOUNT": SPINS}:
        return None
    alone = torch.get_num_threads() < 2
    return None if alone or not (_TASKS.parent / "schedstat").exists() else openmp()


def _too_many() -> int:
    """Size of a team that makes one thread more than cores together with torch's."""
    import torch

    return max(2, len(os.sched_getaffinity(0)) - torch.get_num_threads() + 2)


_watch = Watch()
os.register_at_fork(after_in_child=_watch.forget)


@contextmanager
def watched() -> Iterator[None]:
    """While this lasts, waiting threads make room where other programs want the cores."""
    _watch.enter()
    try:
        yield
    finally:
        _watch.leave()


def enter() -> None:
    """Begin what ``watched`` does for a time that ends with ``leave``."""
    _watch.enter()


def leave() -> None:
    _watch.leave()


__all__ = ["SPINS", "IdleTeam", "enter", "leave", "watched"]
