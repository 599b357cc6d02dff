"""What was found out once is found again, and a file that is not there costs a trial only."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from offload.runtime.known import Known


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_answers_stay() -> None:
    Known("a.json").put("key", [1, 2])
    Known("a.json").put("other", False)
    Known("b.json").put("key", "elsewhere")
    assert Known("a.json").get("key") == [1, 2]
    assert Known("a.json").get("other") is False
    assert Known("a.json").get("none") is None
    assert stat.S_IMODE(Known("a.json").path.stat().st_mode) == 0o600


@pytest.mark.parametrize("text", ["", "{", "[1]", '"key"', "\x00", "\udcff"])
def test_a_file_that_is_none_of_ours(text: str) -> None:
    known = Known("a.json")
    known.path.parent.mkdir(parents=True)
    known.path.write_bytes(text.encode(errors="surrogateescape"))
    assert known.get("key") is None
    known.put("key", 1)
    assert known.get("key") == 1


def test_a_place_that_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    known = Known("a.json")
    known.put("key", 1)
    assert known.get("key") is None
