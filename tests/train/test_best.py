"""Of a run that gets worse the best weights come out, bit for bit, however it was interrupted."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
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

from offload.errors import OffloadError, StoreError
from offload.io.tile_directory import TileSyscalls
from offload.io.tile_store import TileStore
from offload.train import commits, loop
from offload.train.commits import state_versions
from offload.train.engine import NotFinite
from offload.train.loop import LanguageLoop
from offload.train.options import TrainOptions
from offload.train.output import with_spare
from offload.train.preparing import prepare

STEPS, BEST = 5, 3
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "merged": {"method": "lora", "lora_alpha": 256.0, "lr": 0.5, "merge": True},
}
KINDS["packed"] = {
    **KINDS["merged"], "quant": "q4", "lr": 1.0, "lora_targets": ("q_proj", "down_proj"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    planned_once(monkeypatch)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("inputs")
    return write_model(place / "m"), write_data(place / "train.jsonl")


@pytest.fixture
def diverging(inputs: tuple[Path, Path], tmp_path: Path) -> Callable[..., TrainOptions]:
    """Options of a run whose rate is far too high: its loss falls for a few steps, and rises."""

    def make(place: str, **more: Any) -> TrainOptions:
        given = {
            "lr": 0.1, "warmup": 2, "schedule": "constant", "max_steps": STEPS, "eval_share": 0.3,
            "eval_every": 1, "save_every": None,
        }  # fmt: skip
        return options_for(*inputs, tmp_path / place, **{**given, **more})

    return make


def best_of(log: Log) -> int:
    return min(log.evals, key=lambda step: log.evals[step])


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_and_the_last(
    diverging: Callable[..., TrainOptions], tmp_path: Path, kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The best are those of a run that ends there; a run that keeps the last writes the others."""
    more = KINDS[kind]
    if kind == "packed":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    log = train(diverging("both", keep="both", **more), change=everything_on_disk)
    best, end = best_of(log), log.end
    assert 1 < best < STEPS
    assert end is not None
    assert (end.output_step, end.last_step) == (best, STEPS)
    assert end.best_loss == log.evals[best]
    assert end.last_output == str(tmp_path / "both" / "out.last")
    short = train(diverging("short", keep="last", **{**more, "max_steps": best}))
    assert short.losses == {k: v for k, v in log.losses.items() if k <= best}
    last = train(diverging("last", keep="last", **more), change=everything_on_disk)
    assert last.end is not None
    assert (last.end.output_step, last.end.best_loss, last.end.last_output) == (STEPS, None, None)
    for suffix in ("",) if kind == "full" else ("", ".adapter"):
        found = weights_of(tmp_path / "both" / f"out{suffix}")
        assert found == weights_of(tmp_path / "short" / f"out{suffix}")
        found = weights_of(tmp_path / "both" / f"out.last{suffix}")
        assert found == weights_of(tmp_path / "last" / f"out{suffix}")
        assert found != weights_of(tmp_path / "both" / f"out{suffix}")
    # Commits on the way take room, for the newest and the best; not a byte more is written.
    sizes = [(tmp_path / p / "disk" / "tiles.bin").stat().st_size for p in ("both", "last")]
    assert sizes[0] == 3 * sizes[1]
    assert end.written_bytes == last.end.written_bytes


def test_stopped_and_killed_in_between(
    diverging: Callable[..., TrainOptions], tmp_path: Path
) -> None:
    """Under other budgets, with commits in plenty, and once without one: the best stays."""
    whole = train(diverging("whole", keep="both"))
    assert best_of(whole) == BEST
    assert whole.commits == [1, 2, 3, STEPS]

    class Gone(Exception):
        pass

    def leave(step: int) -> None:
        if step == 5:
            raise Gone

    options = diverging("parts", keep="both")
    parts = [train(options, stop_after=3, change=everything_on_disk)]
    parts.append(train(again(options, save_every=1, ram=128 << 20), stop_after=4))
    with pytest.raises(Gone):
        train(again(options, order="usual"), Log(leave), change=everything_on_disk)
    held = sorted(p.name for p in (tmp_path / "parts" / "disk").glob("commit-*"))
    assert len(held) == 2
    parts.append(train(again(options), change=everything_on_disk))
    assert {k: v for p in parts for k, v in p.evals.items()} == whole.evals
    assert not [n for p in parts for n in p.notes if "best" in n]
    for name in ("out", "out.last"):
        assert weights_of(tmp_path / "parts" / name) == weights_of(tmp_path / "whole" / name)
    # Once more: nothing is left to train, the same comes out.
    log = train(again(options, keep="best"))
    assert not log.losses
    assert log.end is not None
    assert log.end.output_step == BEST
    assert weights_of(tmp_path / "parts" / "out") == weights_of(tmp_path / "whole" / "out")


def test_the_newest_commits_do_not_push_it_out(
    diverging: Callable[..., TrainOptions], tmp_path: Path
) -> None:
    train(diverging("one", save_every=1, save_total_limit=1))
    train(diverging("two", save_every=1, save_total_limit=2))

    def kept(place: str) -> list[int]:
        found = (tmp_path / place / "disk").glob("commit-*.json")
        return sorted(int(p.stem.removeprefix("commit-")) for p in found)

    # With a commit at each step, its number is the step's.
    assert kept("one") == [BEST, STEPS]
    assert kept("two") == [BEST, STEPS - 1, STEPS]
    assert weights_of(tmp_path / "one" / "out") == weights_of(tmp_path / "two" / "out")


def test_a_best_that_was_not_kept(diverging: Callable[..., TrainOptions]) -> None:
    """Whoever asks for it later is told, and gets the best of what is left."""
    options = diverging("a", keep="last")
    train(options, stop_after=BEST + 1)
    log = train(again(options, keep="best"))
    (note,) = [n for n in log.notes if "best" in n]
    assert f"step {BEST}, " in note
    assert log.end is not None
    assert log.end.output_step == STEPS


def test_the_last_may_be_the_best(diverging: Callable[..., TrainOptions], tmp_path: Path) -> None:
    log = train(diverging("a", keep="both", lr=3e-3))
    assert best_of(log) == STEPS
    assert log.end is not None
    assert log.end.output_step == STEPS
    assert weights_of(tmp_path / "a" / "out") == weights_of(tmp_path / "a" / "out.last")


def test_no_evaluation_is_a_number(
    diverging: Callable[..., TrainOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LanguageLoop, "evaluate", lambda *_: (math.nan, 1))
    log = train(diverging("a"))
    assert [n for n in log.notes if "no evaluation gave a finite loss" in n]
    assert log.end is not None
    assert (log.end.output_step, log.end.best_loss) == (STEPS, None)


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_gradient_that_is_no_number(
    diverging: Callable[..., TrainOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    clip: float,
) -> None:  # fmt: skip
    """The run cannot go on, but its best weights come out: also where updates inside backward have
    begun to change the last ones (``clip`` 0)."""
    whole = train(diverging("whole", max_grad_norm=clip))
    best = best_of(whole)
    assert 1 < best < STEPS
    real, calls = loop.head_loss, [0]

    def last(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        loss, gradient = real(*args, **kwargs)
        return loss, torch.full_like(gradient, math.inf) if calls[0] == STEPS else gradient

    with monkeypatch.context() as patch:
        patch.setattr(loop, "head_loss", last)
        with pytest.raises(NotFinite) as raised:
            train(diverging("a", max_grad_norm=clip))
        calls[0] = 0
        options = diverging("none", max_grad_norm=clip, keep="last", eval_every=None)
        with pytest.raises(NotFinite, match="rows begin with") as without:
            train(options)
    said = f"step {best}, loss {whole.evals[best]:.4f}) are in {tmp_path / 'a' / 'out'}"
    assert str(raised.value).startswith(f"step {STEPS}: the gradient norm is ")
    assert str(raised.value).endswith(said)
    assert weights_of(tmp_path / "a" / "out") == weights_of(tmp_path / "whole" / "out")
    assert "best" not in str(without.value)
    assert not options.output.exists()


@pytest.mark.parametrize(
    ("more", "versions"),
    [
        ({"keep": "last", "eval_every": 1}, 1),
        ({"keep": "last", "eval_every": 1, "save_every": 2}, 2),
        ({"eval_every": STEPS}, 1),
        ({"eval_every": STEPS - 1}, 2),
        ({"eval_every": 2}, 3),
        ({"eval_every": STEPS - 1, "save_every": STEPS - 1}, 2),
        ({"eval_every": STEPS - 1, "save_every": 3}, 3),
        ({"eval_every": 2, "save_every": 2, "save_total_limit": 9}, 3),
    ],
)
def test_versions_that_a_run_needs(
    diverging: Callable[..., TrainOptions], tmp_path: Path, more: dict[str, Any], versions: int
) -> None:
    options = diverging("a", **more)
    assert state_versions(options, tmp_path, STEPS) == versions
    (tmp_path / "commit-1.json").touch()
    assert state_versions(options, tmp_path, STEPS) == options.retained + 1


def test_the_disk_is_full_when_the_best_is_committed(
    diverging: Callable[..., TrainOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(diverging("whole"))
    real, calls = TileSyscalls(), [0]

    def write(fd: int, data: memoryview) -> int:
        calls[0] += 1
        if calls[0] == BEST:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real.write(fd, data)

    class Store:
        create = staticmethod(partial(TileStore.create, syscalls=TileSyscalls(write=write)))

    options = diverging("full")
    with monkeypatch.context() as patch:
        patch.setattr(commits, "TileStore", Store)
        with pytest.raises(StoreError, match="free some space"):
            train(options)
    log = train(again(options))
    assert min(log.losses) == BEST
    assert weights_of(tmp_path / "full" / "out") == weights_of(tmp_path / "whole" / "out")


def test_what_it_takes_is_planned(
    diverging: Callable[..., TrainOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = prepare(diverging("a"))
    lines = "\n".join(planned.describe())
    planned.close()
    assert "the 3 versions that commits need, one of them for the best evaluation" in lines
    real = os.statvfs
    need = planned.plan.disk_bytes + with_spare(planned.output_bytes())

    class Tight:
        def __init__(self, path: Any) -> None:
            self.f_frsize = 1
            self.f_bavail = need - 1
            self.f_blocks = real(path).f_blocks

    monkeypatch.setattr(os, "statvfs", Tight)
    less = planned.plan.disk_bytes // 3
    assert less > 1
    with pytest.raises(StoreError, match=r"or give --keep last, which needs .* less"):
        prepare(diverging("a"))
    prepare(diverging("a", keep="last")).close()
    (tmp_path / "a" / "out.last").mkdir()
    (tmp_path / "a" / "out.last" / "mine").touch()
    with pytest.raises(OffloadError, match=r"out\.last has other files in it"):
        prepare(dataclasses.replace(diverging("a"), keep="both"))
