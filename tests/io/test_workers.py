"""Threads that work for whoever is left when the main thread has ended."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from offload.errors import StoreError
from offload.io.engines import make_engine
from offload.io.workers import Workers


def test_work_runs_in_order_in_no_more_threads_than_asked() -> None:
    workers, gate = Workers(2, "few"), threading.Event()
    seen: list[int] = []
    first = [workers.submit(gate.wait, 60) for _ in range(2)]
    later = [workers.submit(seen.append, i) for i in range(20)]
    refused = workers.submit(seen.append, 99)
    assert refused.cancel()
    assert sum(t.name.startswith("few_") for t in threading.enumerate()) == 2
    gate.set()
    assert [f.result(60) for f in first] == [True, True]
    for future in later:
        future.result(60)
    assert sorted(seen) == list(range(20))
    workers.shutdown()
    workers.shutdown()
    assert not any(t.name.startswith("few_") for t in threading.enumerate())
    with pytest.raises(RuntimeError, match="few takes no work after its shutdown"):
        workers.submit(print)


def test_errors_and_what_is_cancelled_at_the_end() -> None:
    workers, gate, begun = Workers(1, "one"), threading.Event(), threading.Event()

    def fail() -> None:
        begun.set()
        gate.wait(60)
        raise ValueError("no")

    failing, waiting = workers.submit(fail), workers.submit(print)
    assert begun.wait(60)
    workers.shutdown(wait=False, cancel_futures=True)
    gate.set()
    with pytest.raises(ValueError, match="no"):
        failing.result(60)
    assert waiting.cancelled()
    workers.shutdown()


@contextmanager
def threads_left(monkeypatch: pytest.MonkeyPatch, n: int) -> Iterator[list[int]]:
    """The system gives ``n`` threads more; the list's number may be raised."""
    left, real = [n], threading.Thread.start

    def start(self: threading.Thread) -> None:
        if left[0] < 1:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        real(self)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield left


def test_fewer_threads_than_asked_for_do_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not start is not counted as one, and what it was for is done by others."""
    workers = Workers(3, "left")
    with threads_left(monkeypatch, 0) as left:
        for _ in range(5):
            with pytest.raises(StoreError, match=r"no thread can be started: .*ulimit -u"):
                workers.submit(print)
        left[0] = 1
        done = [workers.submit(int, "7") for _ in range(20)]
        assert [f.result(60) for f in done] == [7] * 20
        workers.shutdown()


@pytest.mark.parametrize("name", ["aiofiles", "threads"])
def test_engines_with_few_threads(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = set(threading.enumerate())
    with threads_left(monkeypatch, 0), pytest.raises(StoreError, match="no thread can be started"):
        make_engine(name, 4)
    with threads_left(monkeypatch, 2):
        engine = make_engine(name, 4)
        done = [engine.submit(lambda: 7) for _ in range(20)]
        assert [f.result(60) for f in done] == [7] * 20
        engine.close()
    assert set(threading.enumerate()) <= before


def test_an_engine_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any worker what is asked for fails, and not what comes when there are threads."""
    with threads_left(monkeypatch, 1) as left:
        engine = make_engine("aiofiles", 2)
        for _ in range(3):
            with pytest.raises(StoreError, match="no thread can be started"):
                engine.submit(lambda: 7).result(60)
        left[0] = 1
        assert engine.submit(lambda: 7).result(60) == 7
        engine.close()


AFTER = """
    import threading
    from concurrent.futures import thread
    import torch
    import offload
    from offload.io import engines

    engines.LINGER_S = 0.0  # workers end between two runs
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)]).eval()
    x = torch.ones(1, 256)
    with torch.no_grad():
        want = model(x)
    offload.wrap(model, ram=1 << 20, disk=DISK)

    def go():
        threading.main_thread().join()
        while not thread._shutdown:  # pools of the standard library refuse work
            pass
        with torch.no_grad():
            print(all(torch.equal(model(x), want) for _ in range(3)))

    threading.Thread(target=go).start()
"""
WRITTEN = """
    import threading
    from offload.io.workers import Workers

    gate = threading.Event()
    Workers(1, "last", finish=True).submit(lambda: (gate.wait(60), print("written", flush=True)))
    threading.Timer(0.2, gate.set).start()
"""


@pytest.mark.parametrize(("script", "said"), [(AFTER, "True\n"), (WRITTEN, "written\n")])
def test_after_the_main_thread(script: str, said: str, tmp_path: Path) -> None:
    text = textwrap.dedent(script).replace("DISK", repr(str(tmp_path)))
    run = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, said, "")
