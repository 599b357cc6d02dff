"""Waiting threads sleep while others want their cores, and spin while nobody does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import offload
from offload.cpu_ops import crowding
from offload.cpu_ops.crowding import (
    ALONE,
    CALM,
    CROWDED,
    LASTING,
    Decision,
    not_computing,
    read_times,
    waiting_share,
)
from offload.cpu_ops.threads import OpenMP

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not read_times(), reason="the kernel does not say who waits"
)


def test_share_of_threads_that_want_a_core() -> None:
    before = {1: (0, 0), 2: (500, 100), 3: (0, 0)}
    # 1 waited 300 of 1000; 2 had its core; 3 reads, mostly asleep; 4 is new.
    after = {1: (600, 300), 2: (1400, 100), 3: (50, 200), 4: (900, 900)}
    assert waiting_share(before, after, 1000) == 300 / (600 + 300 + 900)
    assert waiting_share(before, after, 1000, {4}) == 300 / 1800
    assert waiting_share(before, after, 1000, {3}) == 250 / 1800  # it ran 50 in 1's place
    assert waiting_share(before, after, 1000, {2}) == 0
    assert waiting_share(after, after, 1000) == 0
    assert waiting_share({}, {}, 1000) == 0


def test_it_takes_several_looks_to_change_it() -> None:
    decision = Decision()
    crowded, between = CROWDED + 0.01, (ALONE + CROWDED) / 2
    for _ in range(3):  # a moment now and then
        assert not any(decision.see(crowded) for _ in range(LASTING - 1))
        assert not decision.see(CROWDED)
    assert [decision.see(crowded) for _ in range(LASTING)][-1]
    assert all(decision.see(0.0) for _ in range(CALM - 1))
    assert decision.see(between)  # neither: begins to count anew
    assert all(decision.see(0.0) for _ in range(CALM - 1))
    assert not decision.see(0.0)
    assert not decision.see(between)


def test_own_times_are_read(tmp_path: Path) -> None:
    assert threading.get_native_id() in read_times()
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "schedstat").write_text("120 34 5\n")
    (tmp_path / "8").mkdir()  # ended, or a kernel without it
    assert read_times(tmp_path) == {7: (120, 34)}
    assert read_times(tmp_path / "none") == {}


def test_threads_that_do_not_compute() -> None:
    over, found = threading.Event(), {}
    for name in ("offload-pread-0", "offload-cpu", "offload-engine", "of a program"):
        thread = threading.Thread(target=over.wait, name=name)
        thread.start()
        found[thread.native_id] = name
    others = not_computing()
    over.set()
    assert {found[task] for task in others & found.keys()} == {"offload-pread-0"}


def _run(code: str, **env: str) -> str:
    own = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    own["PYTHONPATH"] = str(Path(offload.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], env=own | env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


_SLEEPS = """
import ctypes, os, sys, time
from pathlib import Path
import torch
from offload.cpu_ops.crowding import IdleTeam
from offload.cpu_ops.threads import openmp

def tasks():
    return set(os.listdir("/proc/self/task"))

def slept(task):
    for line in Path(f"/proc/self/task/{task}/status").read_text().splitlines():
        if line.startswith("voluntary_ctxt_switches"):
            return int(line.split()[1])

runtime = openmp()
if runtime is None:
    sys.exit("no libgomp")
nothing = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value
torch.set_num_threads(2)
before = tasks()
runtime.parallel(nothing, 0, 2, 0)
worker, = tasks() - before

def waits():
    at = slept(worker)
    for _ in range(20):
        runtime.parallel(nothing, 0, 2, 0)
        time.sleep(0.002)
    return slept(worker) - at

spinning = waits()
there = tasks()
team = IdleTeam(runtime, max(2, len(os.sched_getaffinity(0)) - 2 + 2))
sleeping = waits()
team.close()
deadline = time.monotonic() + 30
while tasks() != there:
    assert time.monotonic() < deadline, "its threads did not end"
    time.sleep(0.001)
print(spinning, sleeping, waits())
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: threads never spin")
def test_waits_sleep_while_there_is_an_idle_team() -> None:
    spinning, sleeping, after = map(int, _run(_SLEEPS, OMP_WAIT_POLICY="active").split())
    assert spinning <= 2 and after <= 2  # noqa: PT018
    assert sleeping >= 15


_PINNED = """
import os, sys, time
import torch
from offload.cpu_ops import crowding
torch.set_num_threads(2)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # two threads compute on one core
crowding.PERIOD_S = 0.05
big = torch.ones(512, 512)

def until(wanted, work):
    deadline = time.monotonic() + 60
    while (crowding._watch.team is not None) != wanted:
        assert time.monotonic() < deadline, wanted
        work()

with crowding.watched():
    if crowding._controllable() is None:
        print("said")
        sys.exit()
    until(True, lambda: big @ big)
    until(False, lambda: time.sleep(0.01))
    until(True, lambda: big @ big)
    import threading
    names = {thread.name for thread in threading.enumerate()}
    assert {"offload-crowding", "offload-idle-team"} <= names, names
assert crowding._watch.team is None
left = {thread.name for thread in threading.enumerate()} - {"MainThread"}
assert not left, left
print("done")
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: threads never spin")
@pytest.mark.parametrize(
    ("env", "end"), [({}, "done"), ({"GOMP_SPINCOUNT": crowding.SPINS}, "done"),
                     ({"GOMP_SPINCOUNT": "77"}, "said"), ({"OMP_WAIT_POLICY": "passive"}, "said")],
)  # fmt: skip
def test_crowded_threads_get_an_idle_team_for_as_long(env: dict[str, str], end: str) -> None:
    assert _run(_PINNED, **env).strip() == end


def test_no_thread_where_one_computes() -> None:
    code = (
        "import threading, torch; from offload.cpu_ops import crowding\n"
        "torch.set_num_threads(1)\n"
        "with crowding.watched(): print(threading.active_count())"
    )
    assert _run(code).strip() == "1"


def test_a_system_without_threads_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """libgomp would end the process."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    asked: list[int] = []
    runtime = OpenMP(lambda _f, _a, threads, _flags: asked.append(threads), 0)
    with pytest.raises(RuntimeError, match="new thread"):
        crowding.IdleTeam(runtime, 2)
    assert not asked
    monkeypatch.setattr(crowding, "_controllable", lambda: runtime)
    watch = crowding.Watch()
    watch.enter()
    watch.leave()
    watch.leave()
    monkeypatch.undo()
    monkeypatch.setattr(crowding, "_controllable", lambda: runtime)
    before = threading.active_count()
    watch.enter()
    assert threading.active_count() == before + 1
    watch.leave()
    assert threading.active_count() == before
