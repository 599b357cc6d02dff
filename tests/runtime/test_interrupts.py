"""Ctrl-C in a program that uses the library: no hang, no leak, and the model still works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.runtime.interrupts import Shield

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    """Whatever runs the tests may have a handler of its own; these are about Python's."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_signal_waits_for_the_end_of_the_outermost_shield() -> None:
    shield, reached = Shield(), []

    def interrupted() -> None:
        with shield:
            with shield:
                os.kill(os.getpid(), signal.SIGINT)
                reached.append("inner")
            reached.append("outer")
            assert shield.received
        reached.append("after")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert reached == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_program_with_its_own_handler_keeps_it() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        with Shield():
            os.kill(os.getpid(), signal.SIGINT)
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_are_left_alone() -> None:
    shield, errors = Shield(), []

    def work() -> None:
        try:
            with shield:
                pass
        except BaseException as error:  # noqa: BLE001  the assertion is about any
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []


@pytest.mark.slow
def test_ctrl_c_in_a_notebook_leaves_a_model_that_works_and_closes() -> None:
    """Many interrupts at random moments of a streamed forward; then the right bits, then close."""
    code = textwrap.dedent(
        f"""
        import os, random, signal, threading, time, torch, offload
        # A background job of a script starts with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        model = offload.load({str(ROOT / "examples" / "tiny_moe")!r}, ram="4MiB", context=32,
                             overhead_bytes=0)
        assert model.offload.plan.streamed_bytes_per_pass > 0
        ids = torch.arange(5, 13)[None]
        with torch.no_grad():
            want = model(ids).logits
        rnd, hits = random.Random(0), 0
        for i in range(40):
            fired = threading.Event()
            def fire(delay=rnd.random() * 0.15):
                time.sleep(delay)
                fired.set()
                os.kill(os.getpid(), signal.SIGINT)
            thread = threading.Thread(target=fire)
            try:
                thread.start()
                with torch.no_grad():
                    while True:
                        model(ids)
            except KeyboardInterrupt:
                hits += 1
            thread.join()
        with torch.no_grad():
            assert torch.equal(model(ids).logits, want)
        model.offload.executor.validate()
        model.offload.close()
        names = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
        print(hits, names)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().splitlines()[-1] == "40 []"
