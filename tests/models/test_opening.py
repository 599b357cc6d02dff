"""A model that cannot be opened to the end leaves nothing behind."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from families import write
from left_threads import threads_left
from safetensors.torch import load_file, save_file
from test_packed_run import packed
from wrap_support import mlp

import offload
from offload.api import _in_python
from offload.errors import CheckpointError, OffloadError
from offload.kv import tiers
from offload.models.load import Options, prepare


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


def test_a_checkpoint_that_is_saved_again_after_it_was_planned(tmp_path: Path) -> None:
    """Tensors lie elsewhere in the new file: what was planned would read bytes of others."""
    directory = tmp_path / "m"
    write("llama", directory)
    before = set(threading.enumerate())
    plan = prepare(directory, Options(ram=2**30, context=32))
    file = directory / "model.safetensors"
    os.utime(file, (0, 0))
    plan.open().offload.close()  # only touched: its tensors are where they were

    plan = prepare(directory, Options(ram=2**30, context=32))
    new = tmp_path / "new"
    save_file({"a": load_file(file)["model.norm.weight"], **load_file(file)}, new)
    new.replace(file)
    with pytest.raises(CheckpointError, match=r"was replaced while the model was planned .* start"):
        plan.open()
    assert not threads_left(before)


def test_a_checkpoint_that_is_written_to_while_it_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its bytes have no sums, so that is said at the end. A file in its place leaves the old one to
    those who have it open."""
    directory = tmp_path / "m"
    write("llama", directory)
    file = directory / "model.safetensors"
    for in_place in (False, True):
        caplog.clear()
        model = offload.load(directory, ram=2**30, context=32)
        if in_place:
            with file.open("r+b") as f:
                f.seek(-8, os.SEEK_END)
                f.write(b"\1" * 8)
            os.utime(file, (0, 0))  # however coarse the clock of the filesystem is
        else:
            (tmp_path / "copy").write_bytes(file.read_bytes())
            (tmp_path / "copy").replace(file)
        model.offload.close()
        assert ("was written to while it was in use" in caplog.text) == in_place


@pytest.mark.parametrize("where", ["path", "disk", "prompt_cache", "record_routing", "device"])
def test_the_home_of_nobody(where: str, tmp_path: Path) -> None:
    """pathlib says neither whose home it looked for nor which path that was in."""
    nobody = "~nobody-of-this-name/x"
    options: dict[str, Any] = {where: nobody}
    if where == "disk":
        options["kv_ram"] = "1MiB"
    elif where == "device":
        options = {"device": f"sim:{nobody}", "gpu": "1GiB"}
    path = options.pop("path", None) or write("olmoe", tmp_path)
    with pytest.raises(OffloadError, match=f"{nobody}: there is no home directory ~nobody"):
        offload.load(path, ram="2GiB", **options)


def test_the_home_of_nobody_for_a_model_in_memory() -> None:
    model = mlp()[0]
    with pytest.raises(OffloadError, match="there is no home directory ~nobody"):
        offload.wrap(model, ram="2GiB", disk="~nobody-of-this-name/x")
    assert not hasattr(model, "offload")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ram": "1GiB", "kv_ram": "2GiB"}, r"^kv_ram is a part of ram, .* or raise ram$"),
        ({"ram": "1GiB", "kv": "q8", "attention": "exact"}, "^kv q8 needs .*drop attention exact$"),
        ({"ram": 4096}, r"raise ram to "),
    ],
)
def test_errors_name_options_and_no_flags(
    options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(OffloadError, match=says) as error:
        offload.load(write("olmoe", tmp_path), **options)
    assert "--" not in str(error.value)


def test_errors_name_commands_with_their_flags() -> None:
    @_in_python
    def refused() -> None:
        raise OffloadError("--no-mmap: raise --kv-ram, or run offload pack --quant q4 --jobs 2")

    with pytest.raises(OffloadError) as error:
        refused()
    assert str(error.value) == ("--no-mmap: raise kv_ram, or run offload pack --quant q4 --jobs 2")
