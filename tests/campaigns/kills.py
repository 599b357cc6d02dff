"""What campaigns of kills (kill -9) share: when a run dies, how it is forked, and their record.

A campaign is a ``Trial``: some cases of a work that writes files. Each *point* is one run of a case
that is killed once or more, at a random moment or at one of its system calls (before it, behind it,
in the middle of a write), is begun again, and must end with the files of the run that nobody
disturbed, byte for byte.

Runs are forked from a process that has imported everything and computed nothing, which makes one a
matter of a second. It must not have computed: a process that has used torch's threads hands its
children a pool that the first of their threads replaces while the others look (``pthreadpool`` of
torch 2.13; four threads that begin to compute at once: 1,052 of 4,000 children died of "Invalid
thread pool"; none of a parent that had only imported torch).
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import platform
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WAYS = ("before", "half", "behind")
WARM_S = 240.0
"""A warm-up that takes longer hangs; most of it is compiling, once on a machine."""


def prepare_process() -> None:
    """Before torch is imported: where the tests' own modules are, and one thread of OpenMP."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "models"), str(ROOT / "tests" / "train")]
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ["OMP_NUM_THREADS"] = "1"


@dataclass(frozen=True)
class Kill:
    """When a run dies: ``at`` of its lifetime in seconds, or of its system calls."""

    by: str
    """"clock" or one of WAYS."""
    at: float


class Killer:
    """Counts system calls that change something on the disk, and dies at its ``kill``'s."""

    def __init__(self, kill: Kill | None = None) -> None:
        self.calls = 0
        self._at = kill.at if kill is not None and kill.by != "clock" else None
        self._way = kill.by if kill is not None else ""
        self._lock = threading.RLock()

    def around(
        self, call: Callable[..., Any], half: Callable[..., Any] = lambda *_, **__: None
    ) -> Callable[..., Any]:
        """``call``, counted. ``half`` does a part of it."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self._lock:  # held while dying, so that nobody else gets on
                self.calls += 1
                if self.calls != self._at:
                    return call(*args, **kwargs)
                if self._way != "before":
                    (call if self._way == "behind" else half)(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)

        return wrapped

    def around_os(self, names: Iterable[str]) -> None:
        """Stand around these functions of ``os``, and around ``os.write``."""
        write = os.write
        os.write = self.around(write, self.half_of_bytes(write))  # type: ignore[assignment]
        for name in names:
            setattr(os, name, self.around(getattr(os, name)))

    @staticmethod
    def half_of_bytes(write: Callable[..., Any]) -> Callable[..., Any]:
        return lambda fd, data: write(fd, data[: len(data) // 2])

    @staticmethod
    def half_of_pages(pwritev: Callable[..., Any]) -> Callable[..., Any]:
        def half(fd: int, buffers: Sequence[Any], offset: int) -> None:
            first = memoryview(buffers[0]).cast("B")
            pwritev(fd, [first[: first.nbytes // 8192 * 4096]], offset)

        return half


@dataclass(frozen=True)
class Reference:
    """The undisturbed run of a case."""

    files: dict[str, str]
    """Name -> digest."""
    seconds: float
    calls: int


@dataclass
class Summary:
    """What the points came to."""

    points: int = 0
    kills: int = 0
    where: Counter[str] = field(default_factory=Counter)
    """Kills by what had been reached."""
    by: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Which points these were."""


Work = Callable[[Killer], None]
"""What a child does: it stands the killer around its calls, and runs."""


class Trial(ABC):
    """What is killed."""

    name: str
    cases: Sequence[str]
    most_kills: int
    again: float
    """How likely a run that goes on after a kill is killed, too."""
    patience_s: float
    """A run that takes longer hangs: it is a failure."""

    @abstractmethod
    def warm(self, place: Path) -> None:
        """In a child: build what all runs share under ``place``, and compile their kernels into
        the cache."""

    @abstractmethod
    def load(self, place: Path) -> None:
        """In the parent, behind ``warm``: import what children need. No tensor is touched."""

    @abstractmethod
    def attempt(self, case: str, place: Path, rng: random.Random | None) -> tuple[str, Work]:
        """(a line for the story, what a child does) of the next run of a point; None: undisturbed.
        What the run before has left is in ``place``."""

    @abstractmethod
    def result(self, place: Path) -> Path:
        """The directory whose files count."""

    @abstractmethod
    def reached(self, place: Path) -> str:
        """How far a killed run had come."""

    pattern = "*"
    """Of the names of the files that count."""

    def look(self, place: Path, wanted: Reference) -> str:
        """What is wrong with what a kill has left; "" if nothing is."""
        del place, wanted
        return ""

    def digests(self, place: Path) -> dict[str, str]:
        top = self.result(place)
        return {
            str(p.relative_to(top)): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in sorted(top.rglob(self.pattern))
            if p.is_file()
        }


class Campaign:
    """A trial's references, and its points, in a directory."""

    def __init__(self, trial: Trial, place: Path) -> None:
        self.trial = trial
        self.place = place
        self._references: dict[str, Reference] = {}
        code, _ = self._child(lambda _: trial.warm(place), place, None, patience_s=WARM_S)
        if code != 0:
            raise RuntimeError(f"nothing can be killed, it does not run: {error_of(place)}")
        trial.load(place)
        # A run searches for garbage, which visits half a million objects of what is imported here.
        gc.collect()
        gc.freeze()
        if len(os.listdir("/proc/self/task")) > 1:
            raise RuntimeError(f"threads are left before a fork: {threading.enumerate()}")

    def reference(self, case: str) -> Reference:
        if case not in self._references:
            place = self.place / f"reference-{len(self._references)}"
            place.mkdir()
            began = time.monotonic()
            code, _ = self._child(self.trial.attempt(case, place, None)[1], place, None)
            if code != 0:
                raise RuntimeError(f"the undisturbed run of {case!r} failed: {error_of(place)}")
            seconds = time.monotonic() - began
            calls = int((place / "calls").read_text())
            self._references[case] = Reference(self.trial.digests(place), seconds, calls)
        return self._references[case]

    def point(self, number: int, rng: random.Random, summary: Summary) -> None:
        """One run, killed until chance lets it through."""
        trial, case = self.trial, rng.choice(list(self.trial.cases))
        wanted = self.reference(case)
        place = self.place / f"point-{number}"
        place.mkdir()
        story: list[str] = []
        failure, kills = "", 0
        while not failure:
            text, work = trial.attempt(case, place, rng)
            kill = None
            if not kills or (kills < trial.most_kills and rng.random() < trial.again):
                way = rng.choice(("clock", *WAYS))
                most = wanted.seconds if way == "clock" else wanted.calls
                kill = Kill(way, rng.uniform(0, most) if way == "clock" else rng.randint(1, most))  # type: ignore[arg-type]
            story.append(f"{text} {kill}")
            code, killed = self._child(work, place, kill)
            if killed:
                kills += 1
                summary.by[kill.by if kill is not None else "patience"] += 1
                summary.where[trial.reached(place)] += 1
                failure = "hangs" if kill is None else trial.look(place, wanted)
            elif code != 0:
                failure = f"exit {code}: {error_of(place)}"
            elif kills:
                break
            else:  # a run that was quicker than its killer is no point: again
                shutil.rmtree(place)
                place.mkdir()
                story.clear()
        if not failure and trial.digests(place) != wanted.files:
            failure = "other files"
        summary.points += 1
        summary.kills += kills
        if failure:
            summary.failed.append(f"point {number} ({case})")
            summary.failures.append(f"{summary.failed[-1]}: {failure}; {story}")
        else:
            shutil.rmtree(place)

    def _child(
        self, work: Work, place: Path, kill: Kill | None, patience_s: float | None = None
    ) -> tuple[int, bool]:
        """Run in a child; returns (exit code, whether it was killed)."""
        reads, writes = os.pipe()
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.close(reads)
            os._exit(_work(work, place, kill))
        os.close(writes)
        by_clock = kill is not None and kill.by == "clock"
        patience = patience_s or self.trial.patience_s
        if kill is not None and by_clock:
            patience = kill.at
        # The pipe ends with the child.
        ready, _, _ = select.select([reads], [], [], patience)
        if not ready:
            os.kill(child, signal.SIGKILL)
        os.close(reads)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code, code == -signal.SIGKILL


def _work(work: Work, place: Path, kill: Kill | None) -> int:
    """In a child: one run."""
    killer = Killer(kill)
    try:
        work(killer)
        (place / "calls").write_text(str(killer.calls))
    except BaseException:  # noqa: BLE001  told to the parent
        (place / "error").write_text(traceback.format_exc())
        return 1
    return 0


def error_of(place: Path) -> str:
    file = place / "error"
    return file.read_text() if file.exists() else "nothing was said"


class Record:
    """Campaigns of one kind in a JSON file, summed up: many points may be made of several with a
    seed each. Written at every point. A seed's run takes the place of its run on the same code.

    One campaign at a time writes to a file.
    """

    def __init__(self, file: Path, trial: Trial, seed: int) -> None:
        self._file = file
        git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--match", "no-tag"]
        done = subprocess.run(git, capture_output=True, text=True, check=False)
        self._key = {"commit": done.stdout.strip(), "seed": seed}
        self._facts = {
            "campaign": trial.name, "cases": list(trial.cases), "system": platform.platform(),
            "python": platform.python_version(),
        }  # fmt: skip
        runs = json.loads(file.read_text())["runs"] if file.exists() else []
        self._others = [run for run in runs if any(run.get(k) != v for k, v in self._key.items())]

    def write(self, summary: Summary, seconds: float) -> None:
        mine = {
            "date": time.strftime("%Y-%m-%d"), **self._key, "points": summary.points,
            "kills": summary.kills, "failures": len(summary.failures), "failed": summary.failed,
            "seconds": round(seconds, 1), "killed_by": dict(summary.by.most_common()),
            "killed": dict(summary.where.most_common()),
        }  # fmt: skip
        runs = [*self._others, mine]
        totals = {key: sum(run[key] for run in runs) for key in ("points", "kills", "failures")}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        partial = self._file.with_name(f".{self._file.name}.tmp")
        partial.write_text(json.dumps({**self._facts, **totals, "runs": runs}, indent=1) + "\n")
        partial.replace(self._file)


def main(doc: str, trial: Trial, *, points: int) -> int:
    """The command line of a campaign; returns its exit code."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--points", type=int, default=points)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="then begin no more points"
    )
    parser.add_argument("--directory", type=Path, help="where runs live; default: temporary")
    parser.add_argument("--json", type=Path, help="add the outcome to those in this file")
    asked = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix=f"{trial.name}-", dir=asked.directory))
    record = None if asked.json is None else Record(asked.json, trial, asked.seed)
    began = time.monotonic()
    campaign, summary = Campaign(trial, place), Summary()
    for number in range(asked.points):
        if time.monotonic() - began > asked.seconds:
            break
        # A seed for each: a point can be run again alone.
        campaign.point(number, random.Random(f"{asked.seed} {number}"), summary)
        if record is not None:
            record.write(summary, time.monotonic() - began)
        if (number + 1) % 10 == 0:
            print(f"{number + 1} points, {len(summary.failures)} failures", flush=True)
    print(
        f"{summary.points} points with {summary.kills} kills in {time.monotonic() - began:.0f} s, "
        f"seed {asked.seed}: {len(summary.failures)} failures"
    )
    print("killed by    ", dict(summary.by.most_common()))
    print("killed       ", dict(summary.where.most_common()))
    for failure in summary.failures:
        print(failure)
    if summary.failures:
        print(f"what is left of them is in {place}")
        return 1
    shutil.rmtree(place)
    return 0
