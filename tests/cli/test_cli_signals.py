"""Ctrl-C, SIGTERM and a closed pipe in the middle of generation leave nothing behind."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cli_support import Cli, process

from offload.cli import session, signals
from offload.cli.signals import (
    Interrupted,
    heard,
    raise_received,
    signals_at_once,
    signals_raise,
    signals_wait,
)
from offload.models import load


@contextmanager
def started(model: Path, disk: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that generates for long, with converted weights in ``disk``."""
    words = ["generate", "-m", model, "-p", "the disk", "-n", 1900, "--ignore-eos", "-t", 1]
    with process(*words, "--no-predict", "--dtype", "float32", "--disk", disk) as generating:
        yield generating


def test_ctrl_c_after_the_first_token(dense: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with started(dense, disk) as generating:
        assert generating.stdout is not None
        first = generating.stdout.read(1)
        generating.send_signal(signal.SIGINT)
        text, err = generating.communicate(timeout=120)
    assert first
    assert generating.returncode == 130, err
    assert err.splitlines()[-1] == "interrupted"
    assert [line for line in err.splitlines() if line.startswith("stats:")]
    assert "Traceback" not in err
    assert len(first + text) < 1900
    assert list(disk.iterdir()) == []


WITHIN_IMPORTS = """
import os, runpy, signal, sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupting())
runpy.run_module("offload", run_name="__main__")
"""


def test_ctrl_c_before_a_command_begins() -> None:
    words = [sys.executable, "-c", WITHIN_IMPORTS, "--version"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGINT, ended.stderr
    assert ended.stdout == ended.stderr == ""


def test_a_reader_that_goes_away(dense: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with started(dense, disk) as generating:
        assert generating.stdout is not None
        assert generating.stderr is not None
        assert generating.stdout.read(1)
        generating.stdout.close()
        err = generating.stderr.read()
        assert generating.wait(timeout=120) == 128 + signal.SIGPIPE, err
    assert not any(word in err for word in ("Traceback", "Broken", "Exception", "error"))
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize(
    ("signum", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_the_model_is_closed_and_what_was_done_is_reported(
    cli: Cli,
    dense: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    signum: int,
    code: int,
    word: str,
) -> None:
    """``cli`` checks that no thread is left."""
    closed: list[Any] = []
    opened, show = session.open_model, session._show

    def keep(prepared: Any) -> Any:
        closed.append(opened(prepared))
        return closed[-1]

    def stop(text: str, first_text: Any) -> None:
        show(text, first_text)
        os.kill(os.getpid(), signum)

    before = signal.getsignal(signum)
    monkeypatch.setattr(session, "open_model", keep)
    monkeypatch.setattr(session, "_show", stop)
    report = tmp_path / "run.json"
    done = cli(
        "generate", "-m", dense, "--prompt-ids", "5,6", "--no-predict", "--ignore-eos",
        "--json", report,
    )  # fmt: skip
    assert done.code == code
    assert done.err.splitlines()[-1] == word
    assert "stats:" in done.err
    run = json.loads(report.read_text())
    assert run["finished"] == "interrupted"
    assert 1 <= run["new_tokens"] < 128
    assert closed[0].offload.executor.held() == []
    assert signal.getsignal(signum) is before


def test_in_the_middle_of_the_prompt(
    cli: Cli, dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer that runs is finished, the next one is not begun, and no block is held."""
    opened, ran = session.open_model, []

    def hook(prepared: Any) -> Any:
        model = opened(prepared)
        layers = model.model.layers
        layers[3].mlp.register_forward_pre_hook(
            lambda *_: os.kill(os.getpid(), signal.SIGINT) if 3 not in ran else None
        )
        for i, layer in enumerate(layers):
            layer.register_forward_hook(lambda *_, i=i: ran.append(i))
        held.append(model.offload.executor.held)
        return model

    held: list[Any] = []
    monkeypatch.setattr(session, "open_model", hook)
    done = cli("generate", "-m", dense, "--prompt-ids", "5,6", "--no-predict")
    assert done.code == 130
    assert ran == [0, 1, 2, 3]
    assert held[0]() == []
    assert done.out == ""
    assert "decode - (0 tokens)" in done.err


def test_while_loading(cli: Cli, dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``cli`` checks that no thread is left."""
    opened = load.Prepared.open

    def interrupted(*words: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return opened(*words)

    monkeypatch.setattr(load.Prepared, "open", interrupted)
    done = cli("generate", "-m", dense, "--prompt-ids", "5,6", "--no-predict")
    assert done.code == 130
    assert done.err.splitlines()[-1] == "interrupted"
    assert "stats:" not in done.err


def test_a_signal_raises_at_once_or_waits_for_a_safe_place() -> None:
    with signals_raise():
        passed: list[int] = []

        def wait() -> None:
            with signals_wait():
                os.kill(os.getpid(), signal.SIGTERM)
                passed.append(1)

        with pytest.raises(Interrupted) as raised:
            wait()
        assert passed  # behind the last place to look it is not forgotten
        with pytest.raises(Interrupted):
            raise_received()
        assert raised.value.signum == signal.SIGTERM
        # A second one ends the process, whatever it waits for.
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with signals_raise():
        raise_received()  # the one before is forgotten
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_module_is_imported_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What libraries could not import they go on without, or with half of it; the signal raises
    when all is there."""
    (tmp_path / "interrupted.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nwhole = True\n"
    )
    (tmp_path / "optional.py").write_text(
        "try:\n    import interrupted\nexcept BaseException:\n    interrupted = None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    before = signal.getsignal(signal.SIGALRM)

    def import_and_wait() -> None:
        importlib.import_module("optional")
        threading.Event().wait(60)

    try:
        with signals_raise():
            with pytest.raises(Interrupted) as raised:
                import_and_wait()
            heard()
            assert raised.value.signum == signal.SIGTERM
        assert sys.modules["optional"].interrupted.whole
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        assert signal.getsignal(signal.SIGALRM) is before
    finally:
        for name in ("interrupted", "optional"):
            sys.modules.pop(name, None)


class _Waits:
    def __del__(self) -> None:
        threading.Event().wait(60)


class _Killed:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("kind", [_Waits, _Killed])
def test_a_signal_is_not_lost_in_what_nothing_can_be_raised_from(
    kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python drops what a ``__del__`` raises; it raises again behind it."""
    (tmp_path / "interrupted_too.py").write_text(
        "import signal\nsignal.raise_signal(signal.SIGTERM)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    dropped: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    hook, before = sys.unraisablehook, signal.getsignal(signal.SIGALRM)

    def lose_it_and_wait() -> None:
        if kind is _Waits:
            importlib.import_module("interrupted_too")
        kind()
        threading.Event().wait(60)

    try:
        with signals_raise():
            with pytest.raises(Interrupted) as raised:
                lose_it_and_wait()
            assert raised.value.signum == signal.SIGTERM
            heard()
    finally:
        sys.modules.pop("interrupted_too", None)
    assert not dropped
    assert sys.unraisablehook is hook
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before


def test_leaving_is_not_interrupted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cleans up runs to its end, however many alarms come meanwhile."""
    (tmp_path / "interrupted_first.py").write_text(
        "import signal\nsignal.raise_signal(signal.SIGTERM)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[str] = []

    def clean_up() -> None:
        try:
            importlib.import_module("interrupted_first")
            threading.Event().wait(60)
        finally:
            try:
                raise OSError
            except OSError:
                signal.raise_signal(signal.SIGALRM)
            signal.raise_signal(signal.SIGALRM)
            seen.append("cleaned up")

    try:
        with signals_raise():
            with pytest.raises(Interrupted):
                clean_up()
            heard()
    finally:
        sys.modules.pop("interrupted_first", None)
    assert seen == ["cleaned up"]


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with signals_raise():
            os.kill(os.getpid(), signal.SIGINT)
            raise_received()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_no_tick_is_left_when_the_wait_for_the_user_is_over() -> None:
    """Neither an armed timer nor a signal that is on its way: either kills by default."""
    before = signal.getsignal(signal.SIGALRM)
    with signals_wait():
        with signals_at_once():
            assert signal.getitimer(signal.ITIMER_REAL)[1] > 0
            # As one that is on its way to a thread that sleeps.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
            signal.raise_signal(signal.SIGALRM)
            assert signal.SIGALRM in signal.sigpending()
        assert signal.SIGALRM not in signal.sigpending()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        assert signal.getsignal(signal.SIGALRM) is before


def test_a_signal_while_the_ticks_begin_or_end_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It raises once they have begun, or behind them; never with the timer left running."""
    ticks = signals._ticks
    seen: list[str] = []

    @contextmanager
    def interrupted(when: str) -> Iterator[None]:
        if when == "begin":
            signal.raise_signal(signal.SIGTERM)
        with ticks():
            yield
        if when == "end":
            signal.raise_signal(signal.SIGTERM)
        seen.append(when)

    for when, enters in (("begin", False), ("end", True)):
        monkeypatch.setattr(signals, "_ticks", lambda when=when: interrupted(when))
        entered = False
        with signals_raise(), pytest.raises(Interrupted), signals_at_once():
            entered = True
        assert entered == enters
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert seen == ["end"]
