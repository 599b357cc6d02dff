"""``benchmarks/gpu/run_all.py``: time on a card is short, and one failure is not another case's."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

GPU = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def run_all(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    own = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(GPU), str(GPU.parent), *sys.path])
    import run_all

    monkeypatch.setattr(run_all, "facts", lambda: {"commit": "none"})
    yield run_all
    for name in set(sys.modules) - own:
        if str(GPU) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def section(run_all: Any, tmp_path: Path) -> Callable[..., Any]:
    def make(left: float = 1000.0) -> Any:
        args = argparse.Namespace(device="sim", out=str(tmp_path))
        return run_all.Section("first", args, time.monotonic() + left)

    return make


def written(tmp_path: Path) -> dict[str, Any]:
    cases: dict[str, Any] = json.loads((tmp_path / "first.json").read_text())["cases"]
    return cases


def test_what_a_case_raises_is_written_down_and_the_next_runs(
    section: Callable[..., Any], tmp_path: Path
) -> None:
    ours = section()
    assert ours.case("a", lambda left: {"rate": 1 / (left * 0)}, 60) is None
    assert ours.case("b", lambda left: {}["h2d"], 60) is None
    assert ours.case("c", lambda left: {"seconds": left}, 60) == {"seconds": 60}
    found = written(tmp_path)
    assert "Traceback" in found["a"]["error"]
    assert "ZeroDivisionError" in found["a"]["error"]
    assert "KeyError: 'h2d'" in found["b"]["error"]
    assert ours.end() == 2
    again = section()  # only what failed
    assert again.case("a", lambda left: {"rate": 2}, 60) == {"rate": 2}
    assert again.case("c", lambda left: pytest.fail("it is there"), 60)["seconds"] == 60
    assert again.end() == 0


def test_a_case_that_is_too_long_for_what_is_left_is_passed_over(
    section: Callable[..., Any],
) -> None:
    ours = section(left=30.0)
    assert ours.case("long", lambda left: pytest.fail("no time"), 90) is None
    assert ours.case("short", lambda left: {"left": left}, 20) == {"left": 20}
    assert ours.case("as ever", lambda left: pytest.fail("no time")) is None
    assert ours.end() == 3


def test_at_its_limit_a_case_ends_with_all_it_has_started(
    run_all: Any, section: Callable[..., Any], tmp_path: Path
) -> None:
    """What a test left behind on the card would be in the next one's figures."""
    note = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(note)!r}, 'w').write(str(child.pid))\n"
        "print('so far', flush=True)\n"
        "time.sleep(600)\n"
    )

    def case(left: float) -> dict[str, Any]:
        while not note.exists():  # the limit of this test is the runner's
            try:
                run_all.finish([sys.executable, "-c", code], 2.0, {})
            except subprocess.TimeoutExpired as error:
                if note.exists():
                    raise error
        return {}

    ours = section()
    assert ours.case("hangs", case, 60) is None
    assert ours.case("next", lambda left: {"ran": True}, 60) == {"ran": True}
    said = written(tmp_path)["hangs"]["error"]
    assert said.startswith("it took more than 60 s; its last words: so far")
    state = Path(f"/proc/{note.read_text()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_exit_code_and_words_of_a_program(run_all: Any) -> None:
    code, out, said = run_all.finish(
        [sys.executable, "-c", "import os, sys; print(os.environ['ONE']); sys.exit('two')"],
        60.0,
        {"ONE": "1"},
    )
    assert (code, out, said) == (1, "1\n", "two\n")
    assert "ONE" not in os.environ
    assert run_all.last_words("a" * 9999, b"two\n").endswith("a\ntwo")
