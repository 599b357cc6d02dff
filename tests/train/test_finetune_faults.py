"""What the disk does wrong in a run: one clear error, no thread left, the last commit intact."""

from __future__ import annotations

import errno
import math
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from left_threads import threads_left
from run_support import (
    Log,
    again,
    everything_on_disk,
    options_for,
    planned_once,
    train,
    weights_of,
    write_data,
    write_model,
)
from safetensors.torch import load_file, save_file

from offload.errors import OffloadError, StoreError
from offload.io.files import DirectFile, Syscalls, TransferError
from offload.io.stores import RangeStore
from offload.io.tile_directory import TileSyscalls
from offload.io.tile_file import DamagedError
from offload.io.tile_store import TileStore
from offload.train import commits, opening, source
from offload.train.engine import NotFinite
from offload.train.result import Result
from offload.train.run import Run

STEPS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "train.jsonl")


@pytest.fixture(scope="module")
def wanted(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The weights of a run that nothing disturbs."""
    place = tmp_path_factory.mktemp("whole")
    train(options_for(model, data, place))
    return weights_of(place / "out")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    planned_once(monkeypatch)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = threads_left(before)
    assert not left, f"threads left: {left}"


class Fault:
    """A system call that fails once ``armed``, after ``skip`` that still work."""

    def __init__(self, code: int, skip: int = 0) -> None:
        self.code = code
        self.skip = skip
        self.armed = False
        self.hits = 0
        self.run: Run | None = None
        self._lock = threading.Lock()

    def __call__(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self._lock:
                if self.armed:
                    self.skip -= 1
                    if self.skip < 0:
                        self.hits += 1
                        raise OSError(self.code, os.strerror(self.code))
            return real(*args)

        return call

    def watch(self, run: Run) -> None:
        """Have everything of the run on the disk, and know it."""
        everything_on_disk(run)
        self.run = run

    def after(self, step: int) -> Log:
        """A listener that arms it behind ``step``, when a commit of a step before is durable."""

        def arm(done: int) -> None:
            if done == step:
                if self.run is not None:
                    self.run._commits.end(log)
                self.armed = True

        log = Log(arm)
        return log


def with_store(patch: pytest.MonkeyPatch, **calls: Any) -> None:
    """Have the run's tile store use these system calls."""
    given = TileSyscalls(**calls)

    class Store:
        create = staticmethod(partial(TileStore.create, syscalls=given))
        open = staticmethod(partial(TileStore.open, syscalls=given))

    patch.setattr(commits, "TileStore", Store)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("call", "code", "skip"),
    [
        *[("pwritev", errno.ENOSPC, skip) for skip in (0, 1, 3, 6)],
        ("pwritev", errno.EIO, 3),
        *[("preadv", errno.EIO, skip) for skip in (0, 1, 6)],
        *[("fsync", errno.EIO, skip) for skip in (0, 1, 3, 6)],
        # A step has one or two of these.
        *[("write", errno.ENOSPC, skip) for skip in (0, 1)],
        *[("rename", errno.EIO, skip) for skip in (0, 1)],
    ],
)  # fmt: skip
def test_a_call_on_the_tiles_fails(
    model: Path, data: Path, wanted: dict[str, bytes], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, call: str, code: int, skip: int,
) -> None:  # fmt: skip
    """In a step or in a commit behind step 2: the commit of step 1 at least is there."""
    options = options_for(model, data, tmp_path, save_every=1)
    fault = Fault(code, skip)
    with monkeypatch.context() as patch:
        with_store(patch, **{call: fault(getattr(TileSyscalls(), call))})
        log = fault.after(2)
        with pytest.raises(StoreError) as raised:
            train(options, log, change=fault.watch)
    assert fault.hits
    assert os.strerror(code) in str(raised.value)
    assert str(raised.value).count("--resume") == 1  # the way out, once
    assert not (tmp_path / "out").exists()
    resumed = train(again(options))
    assert min(resumed.losses, default=STEPS + 1) >= 2
    assert weights_of(tmp_path / "out") == wanted


def test_reading_the_checkpoint_fails(
    model: Path, data: Path, wanted: dict[str, bytes], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    options = options_for(model, data, tmp_path)
    fault = Fault(errno.EIO, skip=2)
    fault.armed = True
    calls = Syscalls(preadv=fault(os.preadv))
    with monkeypatch.context() as patch:
        opened = partial(RangeStore, open_file=lambda path: DirectFile.open(path, syscalls=calls))
        patch.setattr(source, "RangeStore", opened)
        with pytest.raises(StoreError, match=os.strerror(errno.EIO)):
            train(options, change=everything_on_disk)
    assert fault.hits
    train(again(options))
    assert weights_of(tmp_path / "out") == wanted


@pytest.mark.parametrize("what", ["gradients", "inputs"])
@pytest.mark.parametrize(("call", "code"), [("pwritev", errno.ENOSPC), ("preadv", errno.EIO)])
def test_spilling_fails(
    model: Path, data: Path, wanted: dict[str, bytes], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, call: str, code: int, what: str,
) -> None:  # fmt: skip
    options = options_for(model, data, tmp_path)
    fault = Fault(code, skip=2)
    calls = Syscalls(**{call: fault(getattr(os, call))})

    def file(fd: int, path: str, **more: Any) -> DirectFile:
        return DirectFile(fd, path, **more, syscalls=calls if what in path else None)

    with monkeypatch.context() as patch:
        patch.setattr(opening, "DirectFile", file)
        # A commit may have ended before the write that fails.
        left = rf"(no step is committed|step 1 is safe) in {options.disk}.*--resume"
        with pytest.raises(StoreError, match=rf"{what}.*{os.strerror(code)}.*{left}"):
            train(options, fault.after(1), change=everything_on_disk)
    assert fault.hits
    train(again(options))
    assert weights_of(tmp_path / "out") == wanted


def test_a_read_fails_while_the_output_is_written(
    model: Path, data: Path, wanted: dict[str, bytes], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Training is safe, but for what is damaged."""
    options = options_for(model, data, tmp_path)
    damaged = StoreError("tile 3: part 0 is damaged; start again")
    damaged.__cause__ = DamagedError("part 0 is damaged")  # as the store hands it on
    refused = TransferError("cannot read", path="p", offset=0, errno=errno.EIO)
    with monkeypatch.context() as patch:
        patch.setattr(Result, "write", Mock(side_effect=[refused, damaged]))
        with pytest.raises(TransferError, match="cannot read; training has ended and is safe in"):
            train(options)
        with pytest.raises(StoreError, match=r"start again$"):
            train(again(options))
    train(again(options))
    assert weights_of(tmp_path / "out") == wanted


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def test_a_flipped_byte_in_a_state(
    model: Path, data: Path, wanted: dict[str, bytes], tmp_path: Path
) -> None:
    """Wherever it is: the run ends as if it were not there, or with an error; never otherwise."""
    options = options_for(model, data, tmp_path)
    train(options, stop_after=2)
    tiles = tmp_path / "disk" / "tiles.bin"
    noticed = 0
    size = tiles.stat().st_size
    for at in range(size // 24, size, size // 12):
        flip(tiles, at)
        try:
            train(again(options), stop_after=3, change=everything_on_disk)
        except StoreError as error:
            noticed += "tile" in str(error)
        else:
            # It was in a slot of no commit, or between parts; undone it may hit a new one.
            train(again(options))
            assert weights_of(tmp_path / "out") == wanted
            return
        flip(tiles, at)
    assert noticed
    train(again(options))
    assert weights_of(tmp_path / "out") == wanted


def test_a_flipped_byte_in_a_manifest(
    model: Path, data: Path, wanted: dict[str, bytes], tmp_path: Path
) -> None:
    """With one commit there is nothing to go back to; with two the older one is taken."""
    for keep, place in ((1, tmp_path / "one"), (2, tmp_path / "two")):
        place.mkdir()
        options = options_for(model, data, place, save_total_limit=keep)
        train(options, stop_after=3)
        manifests = sorted((place / "disk").glob("commit-*.json"))
        assert len(manifests) == keep
        newest = max(manifests, key=lambda p: int(p.stem.split("-")[1]))
        flip(newest, newest.stat().st_size // 2)
        if keep == 1:
            with pytest.raises(StoreError, match="commit"):
                train(again(options))
            flip(newest, newest.stat().st_size // 2)  # the refusal has deleted nothing
        train(again(options))
        assert weights_of(place / "out") == wanted


def test_no_room_for_the_states(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before the first step, and nothing is left behind."""
    real = os.statvfs

    class Full:
        def __init__(self, path: Any) -> None:
            self.f_frsize = real(path).f_frsize
            self.f_bavail = 16

    monkeypatch.setattr(os, "statvfs", Full)
    log = Log()
    with pytest.raises(StoreError, match="free"):
        train(options_for(model, data, tmp_path), log)
    assert not log.losses
    assert not (tmp_path / "disk").exists()


def spoil(model: Path, directory: Path, value: float) -> Path:
    """A copy of ``model`` with one weight of its last layer's MLP that is ``value``."""
    directory.mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    tensors = load_file(model / "model.safetensors")
    name = max(n for n in tensors if n.endswith("mlp.down_proj.weight"))
    tensors[name][0, 0] = value
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_an_infinite_weight(
    model: Path, data: Path, tmp_path: Path, clip: float, accumulated: int
) -> None:
    bad = spoil(model, tmp_path / "bad", math.inf)
    options = options_for(bad, data, tmp_path, max_grad_norm=clip, grad_accum=accumulated)
    told = r"step 1: the (loss|gradient norm) is (nan|inf).*rows"
    with pytest.raises(NotFinite, match=told) as raised:
        train(options)
    assert "--lr" not in str(raised.value)  # no step was taken that could have gone too far
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "disk").glob("commit-*.json"))


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_harms_nothing(
    model: Path, data: Path, wanted: dict[str, bytes], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, clip: float, where: str,
) -> None:  # fmt: skip
    """Step 3 fails, without any commit before it: the first two are committed then, or, if updates
    of the third have begun, none. Either way the run can go on from what is there."""
    from offload.train import loop

    options = options_for(model, data, tmp_path / "a", max_grad_norm=clip, save_every=None)
    whole = train(options_for(model, data, tmp_path / "b", max_grad_norm=clip))
    del wanted
    real, calls = loop.head_loss, [0]

    def third(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        loss, gradient = real(*args, **kwargs)
        if calls[0] == 3:
            if where == "loss":
                loss = torch.full_like(loss, math.nan)
            else:
                gradient = torch.full_like(gradient, math.inf)
        return loss, gradient

    with monkeypatch.context() as patch:
        patch.setattr(loop, "head_loss", third)
        log = Log()
        with pytest.raises(NotFinite, match=r"step 3: .* a lower --lr than 0\.01") as raised:
            train(options, log)
    assert isinstance(raised.value.__cause__, NotFinite)  # where it was found
    torn = where == "gradient" and not clip
    assert log.commits == ([] if torn else [2])
    resumed = train(again(options))
    assert resumed.losses == {k: v for k, v in whole.losses.items() if torn or k > 2}
    assert weights_of(tmp_path / "a" / "out") == weights_of(tmp_path / "b" / "out")


def test_two_runs_on_one_disk(model: Path, data: Path, tmp_path: Path) -> None:
    options = options_for(model, data, tmp_path)
    seen: list[str] = []

    def second(step: int) -> None:
        if step == 2:
            with pytest.raises(OffloadError) as raised:
                train(again(options))
            seen.append(str(raised.value))
            with pytest.raises(OffloadError) as raised:
                train(options)
            seen.append(str(raised.value))

    train(options, Log(second))
    assert "in use" in seen[0]
    assert "another run" in seen[1]
