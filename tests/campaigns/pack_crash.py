"""Packing that is killed (kill -9) again and again, and what comes of it.

    python tests/campaigns/pack_crash.py --points 100 --seed 1 --json pack-crash.json

Each *point* packs a small model and is killed once or more, is begun again by the same command, and
must end with the files of the run that nobody disturbed, byte for byte (see ``kills``). What a kill
leaves is never taken for a pack unless it is that very pack.

Exit code 0: every point ended with the right files. 1: some did not; their directories are kept.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from functools import partial
from pathlib import Path

from kills import Killer, Reference, Trial, Work, main, prepare_process

prepare_process()

CALLS = ("fsync", "rename", "replace", "mkdir", "unlink", "truncate")


class Pack(Trial):
    name = "pack_crash"
    cases = ("q4", "q8", "none")
    most_kills = 4
    again = 0.5
    patience_s = 60.0

    def warm(self, place: Path) -> None:
        for quant in self.cases:
            warm = place / f"warm-{quant}"
            warm.mkdir()
            pack_here(warm, quant, Killer())
            shutil.rmtree(warm)

    def load(self, place: Path) -> None:
        del place
        import pack_support  # noqa: F401

        from offload.models import pack_run  # noqa: F401

    def attempt(self, case: str, place: Path, rng: random.Random | None) -> tuple[str, Work]:
        del rng
        return "", partial(pack_here, place, case)

    def result(self, place: Path) -> Path:
        return place / "p"

    def look(self, place: Path, wanted: Reference) -> str:
        """The journal is removed last, so that all files of a pack are there."""
        from offload.io.pack_manifest import is_pack

        if not is_pack(place / "p"):
            return ""
        found = self.digests(place)
        if all(found.get(name) == digest for name, digest in wanted.files.items()):
            return ""
        return "what a kill left counts as a pack, and is not it"

    def reached(self, place: Path) -> str:
        from offload.io.pack_manifest import JOURNAL, is_pack

        journal = place / "p" / JOURNAL
        if is_pack(place / "p"):
            return "behind the end"
        if not journal.exists():
            return "before the journal"
        lines = journal.read_bytes().count(b"\n")
        return "before the first block" if lines < 2 else "among the blocks"


def pack_here(place: Path, quant: str, killer: Killer) -> None:
    """Pack into ``place/p`` with ``killer`` around every call that changes something."""
    from pack_support import small_source

    from offload.io.files import Syscalls
    from offload.models.pack_run import pack

    pwritev = killer.around(os.pwritev, killer.half_of_pages(os.pwritev))
    killer.around_os(CALLS)
    pack(
        small_source(experts=12, columns=256, inner=96, vocabulary=600), place / "p", quant=quant,
        bundle_bytes=1 << 17, sync_bytes=1 << 15, threads=2, syscalls=Syscalls(pwritev=pwritev),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", Pack(), points=100))
