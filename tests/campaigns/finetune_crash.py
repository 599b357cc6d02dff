"""Fine-tuning runs that are killed (kill -9) again and again, and their results.

    python tests/campaigns/finetune_crash.py --points 200 --seed 1 --json finetune-crash.json

Each *point* is a run of a tiny model that is killed once or more, at a random moment or at one of
its system calls (before it, behind it, in the middle of a write), is continued with ``--resume``
under another budget, another order of micro-batches and another distance of commits, and must end
with the weights of the run that nobody disturbed, byte for byte. Runs are forked from a process
that has imported and compiled everything, which makes one a matter of tenths of a second.

Exit code 0: every point ended with the right weights. 1: some did not; their directories are kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "models"), str(ROOT / "tests" / "train")]
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ["OMP_NUM_THREADS"] = "1"  # a pool of threads would not survive the fork

WAYS = ("before", "half", "behind")
MOST_KILLS = 3
PATIENCE_S = 120.0
"""A run that takes longer hangs: it is a failure."""

CASES: dict[str, dict[str, Any]] = {
    "llama fp32": {"family": "llama"},
    "llama bf16 unclipped": {"family": "llama", "states": "bf16", "max_grad_norm": 0.0},
    "llama masters 8bit": {"family": "llama-float32", "states": "8bit", "dtype": "bfloat16"},
    "moe fp32 accumulated": {"family": "qwen3_moe", "grad_accum": 2},
    "moe bf16": {"family": "qwen3_moe", "states": "bf16"},
    "llama best": {
        "family": "llama",
        "eval_share": 0.3,
        "eval_every": 1,
        "lr": 0.1,
        "schedule": "constant",
    },
    "moe untouched": {
        "family": "qwen3_moe",
        "seq_len": 3,
        "batch_size": 1,
        "skip_untouched_experts": True,
    },
}


@dataclass(frozen=True)
class Kill:
    """When a run dies: ``at`` of its lifetime in seconds, or of its system calls."""

    by: str
    """"clock" or one of WAYS."""
    at: float


@dataclass
class Reference:
    """The undisturbed run of a case."""

    weights: dict[str, str]
    seconds: float
    calls: int


@dataclass
class Summary:
    """What the points came to."""

    points: int = 0
    kills: int = 0
    where: Counter[str] = field(default_factory=Counter)
    """Kills by what had been reached: the number of the last commit, or the output."""
    by: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


class Killer:
    """Counts system calls that change something on the disk, and dies at number ``at``."""

    def __init__(self, at: float | None, way: str) -> None:
        self.calls = 0
        self._at = at
        self._way = way
        self._lock = threading.RLock()

    def around(
        self, call: Callable[..., Any], half: Callable[..., Any] = lambda *_, **__: None
    ) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self._lock:  # held while dying, so that nobody else gets on
                self.calls += 1
                if self.calls != self._at:
                    return call(*args, **kwargs)
                if self._way != "before":
                    (call if self._way == "behind" else half)(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)

        return wrapped

    def install(self) -> None:
        """Stand around the calls of this process: the tile store's and the output's."""
        from offload.io.tile_directory import TileSyscalls
        from offload.io.tile_store import TileStore
        from offload.train import commits

        real, pwritev, write = TileSyscalls(), os.pwritev, os.write

        def half_of_pages(fd: int, buffers: list[memoryview], offset: int) -> None:
            pwritev(fd, [buffers[0][: buffers[0].nbytes // 8192 * 4096]], offset)

        def half_of_bytes(fd: int, data: memoryview) -> None:
            write(fd, data[: len(data) // 2])

        calls = TileSyscalls(
            pwritev=self.around(real.pwritev, half_of_pages),
            write=self.around(real.write, half_of_bytes),
            fsync=self.around(real.fsync),
            rename=self.around(real.rename),
            unlink=self.around(real.unlink),
        )

        class Store:
            create = staticmethod(partial(TileStore.create, syscalls=calls))
            open = staticmethod(partial(TileStore.open, syscalls=calls))

        commits.TileStore = Store  # type: ignore[assignment, misc]
        # The output's are the module's own.
        os.write = self.around(os.write, half_of_bytes)  # type: ignore[assignment]
        for name in ("fsync", "rename", "mkdir", "unlink"):
            setattr(os, name, self.around(getattr(os, name)))


class Campaign:
    """Models, data and references in a directory; runs in children."""

    def __init__(self, place: Path) -> None:
        import torch
        from run_support import options_for, write_data, write_model
        from tqdm import tqdm

        torch.set_num_threads(1)
        tqdm.monitor_interval = 0  # its thread would not survive the fork
        self.place = place
        self._options_for = options_for
        self._models = {
            "llama": write_model(place / "llama", "llama"),
            "llama-float32": write_model(place / "llama-float32", "llama", torch.float32),
            "qwen3_moe": write_model(place / "moe", "qwen3_moe"),
        }
        self._data = write_data(place / "data.jsonl")
        self._references: dict[str, Reference] = {}

    def options(self, case: str, place: Path, **more: Any) -> Any:
        given = dict(CASES[case])
        model = self._models[given.pop("family")]
        return self._options_for(model, self._data, place, **{**given, **more})

    def warm(self) -> None:
        """Import and compile in this process what the children need."""
        from run_support import train

        for case in CASES:
            train(self.options(case, self.place / "warm"))
            shutil.rmtree(self.place / "warm")
        if threading.active_count() > 1:
            raise RuntimeError(f"threads are left before a fork: {threading.enumerate()}")

    def reference(self, case: str) -> Reference:
        if case not in self._references:
            place = self.place / f"reference-{len(self._references)}"
            place.mkdir()
            began = time.monotonic()
            code, _ = self._child(self.options(case, place), place, None)
            if code != 0:
                raise RuntimeError(f"the undisturbed run of {case!r} failed: see {place}/error")
            seconds = time.monotonic() - began
            calls = int((place / "calls").read_text())
            self._references[case] = Reference(digests(place / "out"), seconds, calls)
        return self._references[case]

    def point(self, number: int, rng: random.Random, summary: Summary) -> None:
        """One run, killed until chance lets it through."""
        case = rng.choice(list(CASES))
        wanted = self.reference(case)
        place = self.place / f"point-{number}"
        place.mkdir()
        story: list[str] = []
        kills = 0
        while True:
            resume = (place / "disk" / "tiles.bin").exists()
            options = self.options(
                case, place, resume=resume,
                ram=rng.choice((112 << 20, 160 << 20, 1 << 30)),
                order=rng.choice(("vertical", "usual")),
                save_every=rng.choice((1, 1, 2, None)),
            )  # fmt: skip
            kill = None
            if not kills or (kills < MOST_KILLS and rng.random() < 0.3):
                way = rng.choice(("clock", *WAYS))
                if way == "clock":
                    kill = Kill(way, rng.uniform(0.0, wanted.seconds))
                else:
                    kill = Kill(way, rng.randint(1, wanted.calls))
            on_disk = rng.random() < 0.5
            story.append(f"resume={resume} ram={options.ram >> 20} {kill} on_disk={on_disk}")
            code, killed = self._child(options, place, kill, on_disk=on_disk)
            if killed:
                kills += 1
                summary.by[kill.by if kill else "patience"] += 1
                summary.where[reached(place)] += 1
                if kill is None:
                    summary.failures.append(f"point {number} ({case}): hangs; {story}")
                    break
            elif code != 0:
                error = (place / "error").read_text() if (place / "error").exists() else ""
                summary.failures.append(f"point {number} ({case}): exit {code}; {story}\n{error}")
                break
            elif kills:  # a run that was quicker than its killer is no point: again
                break
            else:
                shutil.rmtree(place)
                place.mkdir()
                story.clear()
        else_right = not summary.failures or not summary.failures[-1].startswith(f"point {number} ")
        if else_right and digests(place / "out") != wanted.weights:
            summary.failures.append(f"point {number} ({case}): other weights; {story}")
            else_right = False
        summary.points += 1
        summary.kills += kills
        if else_right:
            shutil.rmtree(place)

    def _child(
        self, options: Any, place: Path, kill: Kill | None, *, on_disk: bool = False
    ) -> tuple[int, bool]:
        """Run in a child; returns (exit code, whether it was killed)."""
        reads, writes = os.pipe()
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.close(reads)
            os._exit(_work(options, place, kill, on_disk))
        os.close(writes)
        patience = kill.at if kill is not None and kill.by == "clock" else PATIENCE_S
        # The pipe ends with the child.
        ready, _, _ = select.select([reads], [], [], patience)
        if not ready:
            os.kill(child, signal.SIGKILL)
        os.close(reads)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code, code == -signal.SIGKILL


def _work(options: Any, place: Path, kill: Kill | None, on_disk: bool) -> int:
    """In a child: one run, from its options to its output."""
    from run_support import everything_on_disk, train

    from offload.runtime.rss import current_rss
    from offload.train import run

    run.warm_training = lambda *_: current_rss()  # type: ignore[assignment]
    try:
        at = kill.at if kill is not None and kill.by != "clock" else None
        killer = Killer(at, kill.by if kill is not None else "")
        killer.install()
        train(options, change=everything_on_disk if on_disk else lambda _: None)
        (place / "calls").write_text(str(killer.calls))
    except BaseException:  # noqa: BLE001  told to the parent
        (place / "error").write_text(traceback.format_exc())
        return 1
    return 0


def digests(output: Path) -> dict[str, str]:
    return {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(output.glob("*.safetensors"))
    }


def reached(place: Path) -> str:
    """How far a killed run had come."""
    if (place / "out").exists():
        return "behind the output"
    if list(place.glob(".out.*")):
        return "in the output"
    disk = place / "disk"
    commits = sorted(int(p.stem.split("-")[1]) for p in disk.glob("commit-*.json"))
    if (disk / "commit.tmp").exists():
        return "in a commit"
    if commits:
        return f"behind commit {commits[-1]}"
    return "before the first commit" if disk.exists() else "before the store"


def run_campaign(points: int, seed: int, place: Path, *, seconds: float = float("inf")) -> Summary:
    """``points`` points, or as many as begin within ``seconds``."""
    began = time.monotonic()
    campaign, summary = Campaign(place), Summary()
    campaign.warm()
    for number in range(points):
        if time.monotonic() - began > seconds:
            break
        # A seed for each: a point can be run again alone.
        campaign.point(number, random.Random(f"{seed} {number}"), summary)
        if (number + 1) % 10 == 0:
            print(f"{number + 1} points, {len(summary.failures)} failures", flush=True)
    return summary


def add_record(file: Path, summary: Summary, seed: int, seconds: float) -> None:
    """Add a campaign to those in ``file``, which sums them up: 200 points may be made of several
    with a seed each."""
    runs = json.loads(file.read_text())["runs"] if file.exists() else []
    runs.append(
        {
            "date": time.strftime("%Y-%m-%d"),
            "seed": seed,
            "points": summary.points,
            "kills": summary.kills,
            "failures": len(summary.failures),
            "seconds": round(seconds, 1),
            "killed_by": dict(summary.by.most_common()),
            "killed": dict(summary.where.most_common()),
        }
    )
    totals = {key: sum(run[key] for run in runs) for key in ("points", "kills", "failures")}
    facts = {"campaign": "finetune_crash", "cases": list(CASES), "system": platform.platform()}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**facts, **totals, "runs": runs}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="then begin no more points"
    )
    parser.add_argument("--directory", type=Path, help="where runs live; default: temporary")
    parser.add_argument("--json", type=Path, help="add the outcome to those in this file")
    asked = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="finetune-crash-", dir=asked.directory))
    began = time.monotonic()
    summary = run_campaign(asked.points, asked.seed, place, seconds=asked.seconds)
    print(
        f"{summary.points} points with {summary.kills} kills in {time.monotonic() - began:.0f} s, "
        f"seed {asked.seed}: {len(summary.failures)} failures"
    )
    if asked.json is not None:
        add_record(asked.json, summary, asked.seed, time.monotonic() - began)
    print("killed by    ", dict(summary.by.most_common()))
    print("killed       ", dict(summary.where.most_common()))
    for failure in summary.failures:
        print(failure)
    if summary.failures:
        print(f"what is left of them is in {place}")
        return 1
    shutil.rmtree(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
