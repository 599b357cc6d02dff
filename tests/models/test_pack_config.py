"""The config.json of a pack: another one than was packed, none, or no config."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from families import write
from pack_support import small_source

from offload.errors import CheckpointError
from offload.io.pack_manifest import dump
from offload.models.meta import read_config
from offload.models.pack_checkpoint import CheckpointSource
from offload.models.pack_reader import PackedModel
from offload.models.pack_run import pack


def test_a_config_that_is_not_the_packed_one_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Within the blocks' shapes any is run, and another one may be meant; never in silence."""
    write("llama", tmp_path / "m")
    with contextlib.closing(CheckpointSource.open(tmp_path / "m")) as source:
        pack(source, tmp_path / "p")
    config = tmp_path / "p" / "config.json"
    said = json.loads(config.read_text())
    config.write_text(json.dumps(said, sort_keys=True))  # says the same
    PackedModel.open(tmp_path / "p")
    assert not caplog.messages
    config.write_text(json.dumps(said | {"rms_norm_eps": 1e-3}))
    PackedModel.open(tmp_path / "p")
    (message,) = caplog.messages
    assert str(config) in message
    assert f"put the config.json of {tmp_path / 'm'} in its place" in message
    config.write_text("{")
    PackedModel.open(tmp_path / "p")  # whoever reads it says what is wrong with it
    assert len(caplog.messages) == 2
    config.unlink()
    os.mkfifo(config)  # not waited for
    PackedModel.open(tmp_path / "p")


def test_a_pack_from_before_configs_were_noted_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pack(small_source(), tmp_path / "p")
    path = tmp_path / "p" / "pack.json"
    manifest = PackedModel.open(tmp_path / "p").manifest
    assert manifest.config
    path.write_bytes(dump(replace(manifest, config="")))
    assert b'"config"' not in path.read_bytes()
    (tmp_path / "p" / "config.json").write_text('{"other": 1}')
    PackedModel.open(tmp_path / "p")
    assert not caplog.messages


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_pack_whose_config_is_gone_or_none_says_the_way_out(
    tmp_path: Path, content: str | None
) -> None:
    """By itself packing again does nothing: what has a manifest is complete."""
    pack(small_source(), tmp_path / "p")
    config = tmp_path / "p" / "config.json"
    config.write_text("{}")
    config.unlink() if content is None else config.write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json.*; put that of its .*, or delete"):
        read_config(tmp_path / "p")
