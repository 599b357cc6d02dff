"""Packing that is killed (kill -9) again and again, and what comes of it.

    python tests/campaigns/pack_crash.py --points 100 --seed 1

Each *point* packs a small model and is killed once or more, at a random moment or at one of its
system calls (before it, behind it, in the middle of a write), is begun again by the same command,
and must end with the files of the run that nobody disturbed, byte for byte. What a kill leaves is
never taken for a pack unless it is that very pack. Runs are forked from a process that has imported
and compiled everything.

Exit code 0: every point ended with the right files. 1: some did not; their directories are kept.
"""

from __future__ import annotations

import argparse
import hashlib
import os
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
from dataclasses import dataclass, field
from pathlib import Path

# Beside this script; it also says where the tests' own modules are, and that there is one thread.
from finetune_crash import WAYS, Kill, Killer

MOST_KILLS = 4
PATIENCE_S = 60.0
"""A run that takes longer hangs: it is a failure."""
QUANTS = ("q4", "q8", "none")


@dataclass
class Reference:
    """The undisturbed run."""

    files: dict[str, str]
    seconds: float
    calls: int


@dataclass
class Summary:
    """What the points came to."""

    points: int = 0
    kills: int = 0
    where: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def pack_here(place: Path, quant: str, killer: Killer) -> None:
    """Pack into ``place/p`` with ``killer`` around every call that changes something."""
    from pack_support import small_source

    from offload.io.files import Syscalls
    from offload.models.pack_run import pack

    pwritev, write = os.pwritev, os.write

    def half_of_pages(fd: int, buffers: list[memoryview], offset: int) -> None:
        pwritev(fd, [memoryview(buffers[0])[: len(buffers[0]) // 8192 * 4096]], offset)

    def half_of_bytes(fd: int, data: bytes) -> None:
        write(fd, data[: len(data) // 2])

    os.write = killer.around(write, half_of_bytes)  # type: ignore[assignment]
    for name in ("fsync", "rename", "replace", "mkdir", "unlink", "truncate"):
        setattr(os, name, killer.around(getattr(os, name)))
    pack(
        small_source(experts=12, columns=256, inner=96, vocabulary=600), place / "p", quant=quant,
        bundle_bytes=1 << 17, sync_bytes=1 << 15, threads=2,
        syscalls=Syscalls(pwritev=killer.around(pwritev, half_of_pages)),
    )  # fmt: skip


def _work(place: Path, quant: str, kill: Kill | None) -> int:
    """In a child: one run."""
    at = kill.at if kill is not None and kill.by != "clock" else None
    killer = Killer(at, kill.by if kill is not None else "")
    try:
        pack_here(place, quant, killer)
        (place / "calls").write_text(str(killer.calls))
    except BaseException:  # noqa: BLE001  told to the parent
        (place / "error").write_text(traceback.format_exc())
        return 1
    return 0


def child(place: Path, quant: str, kill: Kill | None) -> tuple[int, bool]:
    """Run in a child; returns (exit code, whether it was killed)."""
    reads, writes = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        os._exit(_work(place, quant, kill))
    os.close(writes)
    patience = kill.at if kill is not None and kill.by == "clock" else PATIENCE_S
    ready, _, _ = select.select([reads], [], [], patience)  # the pipe ends with the child
    if not ready:
        os.kill(pid, signal.SIGKILL)
    os.close(reads)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, code == -signal.SIGKILL


def digests(out: Path) -> dict[str, str]:
    return {
        str(p.relative_to(out)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(out.rglob("*"))
        if p.is_file()
    }


def reached(out: Path) -> str:
    """How far a killed run had come."""
    from offload.io.pack_manifest import JOURNAL, is_pack

    if is_pack(out):
        return "behind the end"
    if not (out / JOURNAL).exists():
        return "before the journal"
    lines = (out / JOURNAL).read_bytes().count(b"\n")
    return "before the first block" if lines < 2 else "among the blocks"


class Campaign:
    """References in a directory; points beside them."""

    def __init__(self, place: Path) -> None:
        self.place = place
        # Imports and compiles what the children need; the references are made in children.
        for quant in QUANTS:
            warm = place / f"warm-{quant}"
            warm.mkdir()
            names = ("write", "fsync", "rename", "replace", "mkdir", "unlink", "truncate")
            real = {name: getattr(os, name) for name in names}
            try:
                pack_here(warm, quant, Killer(None, ""))
            finally:
                for name, call in real.items():
                    setattr(os, name, call)
            shutil.rmtree(warm)
        if threading.active_count() > 1:
            raise RuntimeError(f"threads are left before a fork: {threading.enumerate()}")
        self.references = {quant: self._reference(quant) for quant in QUANTS}

    def _reference(self, quant: str) -> Reference:
        place = self.place / f"reference-{quant}"
        place.mkdir()
        began = time.monotonic()
        code, _ = child(place, quant, None)
        if code != 0:
            raise RuntimeError(f"the undisturbed run failed: {(place / 'error').read_text()}")
        seconds = time.monotonic() - began
        return Reference(digests(place / "p"), seconds, int((place / "calls").read_text()))

    def point(self, number: int, rng: random.Random, summary: Summary) -> None:
        """One pack, killed until chance lets it through."""
        from offload.io.pack_manifest import is_pack

        quant = rng.choice(QUANTS)
        wanted = self.references[quant]
        place = self.place / f"point-{number}"
        place.mkdir()
        story: list[str] = []
        failure, kills = "", 0
        while not failure:
            kill = None
            if not kills or (kills < MOST_KILLS and rng.random() < 0.5):
                way = rng.choice(("clock", *WAYS))
                most = wanted.seconds if way == "clock" else wanted.calls
                at = rng.uniform(0.0, most) if way == "clock" else rng.randint(1, int(most))
                kill = Kill(way, at)
            story.append(str(kill))
            code, killed = child(place, quant, kill)
            if killed and kill is None:
                failure = "hangs"
            elif killed:
                kills += 1
                summary.where[reached(place / "p")] += 1
                if is_pack(place / "p") and not self._is_right(place, wanted):
                    failure = "what a kill left counts as a pack, and is not it"
            elif code != 0:
                failure = (place / "error").read_text()
            elif kills:
                break
            else:  # a run that was quicker than its killer is no point: again
                shutil.rmtree(place)
                place.mkdir()
                story.clear()
        if not failure and digests(place / "p") != wanted.files:
            failure = "other files"
        summary.points += 1
        summary.kills += kills
        if failure:
            summary.failures.append(f"point {number} ({quant}): {failure}; {story}")
        else:
            shutil.rmtree(place)

    def _is_right(self, place: Path, wanted: Reference) -> bool:
        """Whether all files of the pack are there; the journal is removed last."""
        found = digests(place / "p")
        return all(found.get(name) == digest for name, digest in wanted.files.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--points", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="where packs are made; default: temporary")
    asked = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="pack-crash-", dir=asked.directory))
    began = time.monotonic()
    campaign, summary = Campaign(place), Summary()
    for number in range(asked.points):
        # A seed for each: a point can be run again alone.
        campaign.point(number, random.Random(f"{asked.seed} {number}"), summary)
    print(
        f"{summary.points} points with {summary.kills} kills in {time.monotonic() - began:.0f} s, "
        f"seed {asked.seed}: {len(summary.failures)} failures"
    )
    print("killed", dict(summary.where.most_common()))
    for failure in summary.failures:
        print(failure)
    if summary.failures:
        print(f"what is left of them is in {place}")
        return 1
    shutil.rmtree(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
