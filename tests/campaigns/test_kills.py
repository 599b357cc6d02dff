"""A sample of each campaign of kills: other moments would be another seed's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("campaign", "points", "seed"), [("finetune_crash", 1, 4), ("pack_crash", 8, 3)]
)
def test_kills_at_any_moment(campaign: str, points: int, seed: int, tmp_path: Path) -> None:
    script = Path(__file__).with_name(f"{campaign}.py")
    words = ["--points", str(points), "--seed", str(seed), "--directory", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *words],
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{points} points" in done.stdout
    assert "0 failures" in done.stdout
    assert not list(tmp_path.iterdir())
