"""``offload finetune`` on disks that are full, and over states that are damaged.

Each time: one line that says what is wrong and what to do, exit code 2, nothing deleted, and the
last good commit leads to the weights of the run that nothing disturbed.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cli_support import Cli, Result, refused
from disk_support import fill, small_filesystem
from run_support import (
    everything_on_disk,
    options_for,
    planned_once,
    train,
    weights_of,
    write_data,
    write_model,
)

from offload.io.tile_directory import TileSyscalls
from offload.io.tile_manifest import load
from offload.io.tile_store import TileStore
from offload.train import commits as run_commits
from offload.train import preparing
from offload.train.metrics import Listeners
from offload.train.reports import StepReport
from offload.train.run import Run

KEEP = 2
PARTS = ("copy", "p", "m", "v")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "train.jsonl")


@pytest.fixture(autouse=True)
def _on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stays in RAM, so that every part of a tile is read and written."""
    real = preparing.prepare

    def prepare(options: Any) -> Run:
        made = real(options)
        everything_on_disk(made)
        return made

    planned_once(monkeypatch)
    monkeypatch.setattr(preparing, "prepare", prepare)


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        planned_once(patch)
        yield


@pytest.fixture(scope="module")
def wanted(
    model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory, quiet: None
) -> dict[str, bytes]:
    """The weights of a run that nothing disturbs."""
    place = tmp_path_factory.mktemp("whole")
    train(options_for(model, data, place, save_total_limit=KEEP))
    return weights_of(place / "out")


@pytest.fixture(scope="module")
def stopped(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory, quiet: None) -> Path:
    """The states of a run with commits 2 and 3, one step before its end."""
    place = tmp_path_factory.mktemp("stopped")
    options = options_for(model, data, place, save_total_limit=KEEP)
    train(options, stop_after=3, change=everything_on_disk)
    assert commits(place / "disk") == [2, 3]
    return place / "disk"


@pytest.fixture
def finetune(cli: Cli, model: Path, data: Path, tmp_path: Path) -> Callable[..., Result]:
    """The run of ``options_for`` by its flags; later ones win."""

    def run(*more: object) -> Result:
        rows = () if "--data" in more else ("--data", data)
        return cli(
            "finetune", "--model", model, *rows, "--output", tmp_path / "out",
            "--disk", tmp_path / "disk", "--ram", "1GiB", "--seq-len", 32, "--max-steps", 4,
            "--batch-size", 2, "--lr", "1e-2", "--warmup", 1, "--weight-decay", 0.1,
            "--save-every", 1, "--save-total-limit", KEEP, "--threads", 1, "--no-tensorboard",
            *more,
        )  # fmt: skip

    return run


def commits(states: Path) -> list[int]:
    return sorted(int(p.stem.split("-")[1]) for p in states.glob("commit-*.json"))


def behind(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], Any]) -> None:
    """Call ``act`` when step ``step`` is told of."""
    real = Listeners.step

    def told(self: Listeners, report: StepReport) -> None:
        real(self, report)
        if report.step == step:
            act()

    monkeypatch.setattr(Listeners, "step", told)


# -- full disks -----------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with small_filesystem(tmp_path, 24) as disk:
        yield disk


@pytest.mark.parametrize("step", [1, 2])
def test_the_disk_of_the_states_is_full(
    finetune: Any, small: Path, tmp_path: Path, wanted: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch, step: int,
) -> None:  # fmt: skip
    """All of the data file was reserved, and one manifest: so the step goes through, and its commit
    unless the one before has just used that; the next one does not."""
    flags = ("--disk", small / "states")
    with monkeypatch.context() as patch:
        behind(patch, step, lambda: fill(small))
        result = finetune(*flags)
    refused(result, "commit-", "No space left on device", "free some space")
    assert not (tmp_path / "out").exists()
    made = commits(small / "states")
    assert made in (list(range(1, max(2, step))), list(range(1, step + 1)))
    refused(finetune(*flags, "--resume"), "space")  # still full: and still nothing is lost
    assert commits(small / "states") == made
    (small / "filler").unlink()
    assert finetune(*flags, "--resume").code == 0
    assert weights_of(tmp_path / "out") == wanted


def test_the_disk_of_the_output_is_full(
    finetune: Any, small: Path, tmp_path: Path, wanted: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It had room when the run was planned; all is committed, and only the output is missing."""
    flags = ("--output", small / "out")
    from offload.train import output

    monkeypatch.setattr(output, "_SPARE_BYTES", 0)
    with monkeypatch.context() as patch:
        behind(patch, 4, lambda: fill(small))
        error = refused(finetune(*flags), "free")
    assert "KiB" in error or "bytes" in error
    assert f"safe in {tmp_path / 'disk'}: the same command with --resume writes" in error
    assert [p.name for p in small.iterdir() if p.name != "lost+found"] == ["filler"]
    assert commits(tmp_path / "disk")[-1] == 4
    (small / "filler").unlink()
    assert finetune(*flags, "--resume").code == 0
    assert weights_of(small / "out") == wanted


def test_the_disk_fills_while_the_output_is_written(
    finetune: Any, small: Path, tmp_path: Path, wanted: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from offload.train import output

    flags = ("--output", small / "out")
    monkeypatch.setattr(output, "_SPARE_BYTES", 0)
    with monkeypatch.context() as patch:
        real = output.write_shards

        def late(*args: Any) -> None:
            fill(small)
            real(*args)

        patch.setattr(output, "write_shards", late)
        refused(
            finetune(*flags), "cannot write", "No space left on device", "free", "to go", "--resume"
        )  # fmt: skip
    assert [p.name for p in small.iterdir() if p.name != "lost+found"] == ["filler"]
    # Elsewhere, as the error says.
    elsewhere = ("--output", tmp_path / "elsewhere", "--disk", tmp_path / "disk", "--resume")
    assert finetune(*elsewhere).code == 0
    assert weights_of(tmp_path / "elsewhere") == wanted
    (small / "filler").unlink()
    assert finetune(*flags, "--resume").code == 0
    assert weights_of(small / "out") == wanted


def test_the_tokens_do_not_fit(finetune: Any, small: Path, tmp_path: Path) -> None:
    """What the data becomes is written to the disk, too, before there are any states."""
    fill(small)
    with (small / "filler").open("r+b") as file:
        file.truncate((small / "filler").stat().st_size - (64 << 10))
    many = write_data(tmp_path / "many.jsonl", 20_000)
    error = refused(finetune("--disk", small / "states", "--data", many), str(small))
    assert "space" in error
    assert not (small / "states").exists()


# -- damaged states -------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def place_of(states: Path, commit: int, tile: int, part: int) -> int:
    """Where the bytes of a part are that belong to a commit."""
    file = states / f"commit-{commit}.json"
    found = load(file.read_bytes(), os.fspath(file))
    return found.layout.offset(tile, found.generations[tile]) + found.layout.places(tile)[part]


def snapshot(states: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(states.iterdir())}


@pytest.mark.parametrize("part", range(4), ids=PARTS)
def test_a_flipped_byte_in_the_live_commit(
    finetune: Any, stopped: Path, tmp_path: Path, wanted: dict[str, bytes], part: int
) -> None:
    states = shutil.copytree(stopped, tmp_path / "disk")
    flip(states / "tiles.bin", place_of(states, 3, 1, part) + 5)
    before = snapshot(states)
    error = refused(finetune("--resume"), "tile 1", f"part {part} is damaged", "tiles.bin")
    assert "commit-3.json" in error
    assert "commit 2" in error
    after = snapshot(states)
    assert before.keys() <= after.keys()
    assert all(after[name] == before[name] for name in before if name != "tiles.bin")
    (states / "commit-3.json").rename(tmp_path / "aside.json")  # as it says
    assert finetune("--resume").code == 0
    assert weights_of(tmp_path / "out") == wanted


@pytest.mark.parametrize("part", range(4), ids=PARTS)
def test_a_flipped_byte_in_a_retained_commit(
    finetune: Any, stopped: Path, tmp_path: Path, wanted: dict[str, bytes], part: int
) -> None:
    """Nobody reads it, and it is in nobody's way; whoever goes back to it is told."""
    states = shutil.copytree(stopped, tmp_path / "disk")
    flip(states / "tiles.bin", place_of(states, 2, 1, part))
    back = shutil.copytree(states, tmp_path / "back")
    assert finetune("--resume").code == 0
    assert weights_of(tmp_path / "out") == wanted
    (back / "commit-3.json").unlink()
    error = refused(finetune("--resume", "--disk", back), "tile 1", f"part {part} is damaged")
    assert "commit 2" in error
    assert commits(back) == [2]


def test_a_flipped_byte_in_a_manifest(
    finetune: Any, stopped: Path, tmp_path: Path, wanted: dict[str, bytes]
) -> None:
    """The older commit is taken, and said; without one there is an error, and nothing deleted."""
    states = shutil.copytree(stopped, tmp_path / "disk")
    manifest = states / "commit-3.json"
    flip(manifest, manifest.stat().st_size // 2)
    alone = shutil.copytree(states, tmp_path / "alone")
    (alone / "commit-2.json").unlink()
    before = snapshot(alone)
    refused(finetune("--resume", "--disk", alone), "commit-3.json is damaged", "no other commit")
    assert snapshot(alone) == before
    result = finetune("--resume")
    assert result.code == 0, result.err
    assert "commit-3.json is damaged" in result.err
    assert weights_of(tmp_path / "out") == wanted


def test_a_data_file_that_is_cut_or_gone(finetune: Any, stopped: Path, tmp_path: Path) -> None:
    states = shutil.copytree(stopped, tmp_path / "disk")
    tiles = states / "tiles.bin"
    last = max(place_of(states, n, 0, 0) for n in (2, 3))
    os.truncate(tiles, last + 4096)
    refused(finetune("--resume"), "tiles.bin", "was cut")
    assert commits(states) == [2, 3]
    tiles.rename(tmp_path / "tiles.bin")
    refused(finetune("--resume"), str(states))
    assert commits(states) == [2, 3]
    error = refused(finetune(), str(states))  # nor is it begun anew over them
    assert "not empty" in error or "another run" in error
    assert commits(states) == [2, 3]


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_disk_with_errors(
    finetune: Any, stopped: Path, tmp_path: Path, wanted: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch, call: str,
) -> None:  # fmt: skip
    states = shutil.copytree(stopped, tmp_path / "disk")
    real, calls = getattr(TileSyscalls(), call), [0]

    def fails(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] > 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args)

    given = TileSyscalls(**{call: fails})

    class Store:
        create = staticmethod(partial(TileStore.create, syscalls=given))
        open = staticmethod(partial(TileStore.open, syscalls=given))

    with monkeypatch.context() as patch:
        patch.setattr(run_commits, "TileStore", Store)
        refused(finetune("--resume"), "Input/output error", "tile")
    assert calls[0] > 1
    assert commits(states) == [2, 3]
    assert finetune("--resume").code == 0
    assert weights_of(tmp_path / "out") == wanted


def test_figures_on_a_full_disk_stop_no_run(
    finetune: Any, small: Path, tmp_path: Path, wanted: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    figures = small / "figures.jsonl"
    behind(monkeypatch, 2, lambda: fill(small))
    result = finetune("--json", figures)
    assert result.code == 0, result.err
    assert "No space left on device" in result.err
    assert weights_of(tmp_path / "out") == wanted
    for line in figures.read_text().splitlines():
        json.loads(line)
