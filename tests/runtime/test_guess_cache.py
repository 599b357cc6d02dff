"""Guesses that were right, remembered per model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offload.runtime import guess_cache
from offload.runtime.guess_cache import FEWEST, guesses_path, recall, remember


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_what_was_remembered_is_recalled_and_adds_up(tmp_path: Path) -> None:
    assert recall(tmp_path) is None
    remember(tmp_path, FEWEST - 1, FEWEST - 1)
    assert recall(tmp_path) is None, "too few to say anything"
    remember(tmp_path, 101, 51)
    assert recall(tmp_path) == pytest.approx(150 / 200)
    assert recall(tmp_path / "other") is None
    assert guesses_path().stat().st_mode & 0o777 == 0o600


def test_nothing_guessed_writes_nothing(tmp_path: Path) -> None:
    remember(tmp_path, 0, 0)
    assert not guesses_path().exists()


def test_a_changed_model_is_believed_in_time(tmp_path: Path) -> None:
    remember(tmp_path, 10**9, 10**9)
    remember(tmp_path, guess_cache.MOST, 0)
    assert recall(tmp_path) == pytest.approx(0.5)


def test_the_models_that_ran_last_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guess_cache, "MODELS", 2)
    for name in "abac":
        remember(tmp_path / name, FEWEST, FEWEST)
    assert [recall(tmp_path / name) for name in "abc"] == [1.0, None, 1.0]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"version": 1, "models": {"x": 3}}', "\x00", '{"version": 99, "models": {}}'],
)
def test_a_damaged_file_is_ignored_and_replaced(tmp_path: Path, text: str) -> None:
    remember(tmp_path, FEWEST, 1)
    guesses_path().write_text(text)
    assert recall(tmp_path) is None
    remember(tmp_path, FEWEST, FEWEST)
    assert recall(tmp_path) == 1.0


def test_impossible_counts_are_ignored(tmp_path: Path) -> None:
    remember(tmp_path, FEWEST, 1)
    data = json.loads(guesses_path().read_text())
    data["models"] = {key: [FEWEST, FEWEST + 1] for key in data["models"]}
    guesses_path().write_text(json.dumps(data))
    assert recall(tmp_path) is None


def test_a_folder_that_cannot_be_written_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    remember(tmp_path, FEWEST, 1)
    assert recall(tmp_path) is None
