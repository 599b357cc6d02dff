"""Memory that does not grow with the data, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 2**20

_CHILD = """
import json, sys
from pathlib import Path
from data_support import options, tokenizer
from offload.runtime.rss import current_rss
from offload.train.data import open_data

small, large, cache = map(Path, sys.argv[1:4])
peaks = []
for path in (small, small, large):  # the first pass warms the allocator
    peak = 0

    def look(done, total):
        global peak
        peak = max(peak, current_rss())

    with open_data(
        options(path, seq_len=512, batch_size=4), tokenizer(), max_positions=None, cache=cache,
        progress=look,
    ) as data:
        for step in range(0, data.steps_per_epoch, max(1, data.steps_per_epoch // 200)):
            data.train.micro_batch(step, 0)
            look(0, 0)
        peaks.append((peak, data.train.tokens))
print(json.dumps(peaks))
"""


@pytest.mark.parametrize(
    ("suffix", "large"),
    [
        (".jsonl", 8),
        pytest.param(".txt", 8, marks=pytest.mark.sweep),
        pytest.param(".jsonl", 100, marks=pytest.mark.sweep),
    ],
)
def test_memory_does_not_grow_with_the_data(suffix: str, large: int, tmp_path: Path) -> None:
    words = "the king and the queen of the land went out to see the sea and came home again. " * 12
    row = {".jsonl": json.dumps({"text": words}), ".txt": words}[suffix] + "\n"
    files = []
    for name, nbytes in (("small", MIB), ("large", large * MIB)):
        files.append(tmp_path / f"{name}{suffix}")
        with files[-1].open("w") as out:
            for _ in range(nbytes // len(row)):
                out.write(row)
    found = subprocess.run(
        [sys.executable, "-c", _CHILD, *map(str, files), str(tmp_path)],
        env={"PYTHONPATH": ":".join(p for p in sys.path if p), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    _, (small_peak, small_tokens), (large_peak, large_tokens) = json.loads(found.stdout)
    assert large_tokens > 3 * small_tokens
    # The tokens alone are larger than what may stay.
    assert large_peak - small_peak < 5 * MIB < 4 * (large_tokens - small_tokens)
