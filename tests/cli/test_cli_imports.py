"""What a command imports is not searched for garbage meanwhile, and what it makes is."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.__main__ import run
from offload.cli.imports import imported, importing


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    usual = gc.get_threshold()
    yield
    imported()
    assert gc.get_threshold() == usual


@pytest.mark.parametrize("command", ["plan", "generate"])
def test_searches_are_as_usual_once_a_model_is_planned(
    command: str, dense: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual, seen = gc.get_threshold(), []
    more = ["--prompt-ids", "1,2,3", "-n", "1"] if command == "generate" else []
    monkeypatch.setattr(sys, "argv", ["offload", command, "-m", str(dense), *more])
    monkeypatch.setattr("offload.cli.main.main", lambda: seen.append(gc.get_threshold()) or 0)
    assert run() == 0
    assert seen[0][0] > usual[0]
    monkeypatch.undo()
    monkeypatch.setattr(sys, "argv", ["offload", command, "-m", str(dense), *more])
    assert run() == 0
    assert gc.get_threshold() == usual
    assert gc.get_freeze_count() > 0


def test_twice_is_once() -> None:
    usual = gc.get_threshold()
    importing()
    importing()
    imported()
    assert gc.get_threshold() == usual
