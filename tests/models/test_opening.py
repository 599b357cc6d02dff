"""A model that cannot be opened to the end leaves nothing behind."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from left_threads import threads_left
from test_packed_run import packed

import offload
from offload.errors import OffloadError
from offload.kv import tiers


@pytest.mark.parametrize("kind", ["checkpoint", "pack"])
def test_generation_settings_that_are_no_json(kind: str, tmp_path: Path) -> None:
    directory, pack_dir = packed("llama", tmp_path, "q4")
    (directory / "generation_config.json").write_text("{")
    (pack_dir / "generation_config.json").write_text("{")
    before = set(threading.enumerate())
    path = pack_dir if kind == "pack" else directory
    with pytest.raises(OffloadError, match=r"generation_config.json of [mp]: .*; correct it, or"):
        offload.load(path, ram=2**30, context=32)
    assert not threads_left(before)


def test_keys_and_values_that_find_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, pack_dir = packed("llama", tmp_path, "q4")
    before = set(threading.enumerate())

    def full(*_: Any, **__: Any) -> None:
        raise OffloadError("no space is left")

    monkeypatch.setattr(tiers, "KvTiers", full)
    for path in (directory, pack_dir):
        with pytest.raises(OffloadError, match="no space is left"):
            offload.load(path, ram=2**30, context=32, attention="offload")
        assert not threads_left(before)
