"""Tests of cards on one that torch takes for another device (``strict_card``), in a process of
their own: what torch is told of a device it does not forget.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CASES = {
    "generation": (
        ["gpu/test_gpu_equivalence.py"],
        "minimum and (llama or gpt_oss or deepseek_v3) or sampling and qwen3_moe",
    ),
    "training": (
        ["train/test_card.py", "train/test_device.py", "train/test_device_head.py",
         "train/test_device_lora.py"],
        "test_card and (adapters or measures or dropout or casts or clip or run and llama) or "
        "dense_model and disk-0.5-some or tied and gemma2-least",
    ),
    "updates and packed training": (
        ["train/test_device_updates.py", "train/test_device_qlora.py"],
        "updates and (disk-0.5-2 or rounded and 8bit) or "
        "unpacked_values and (gpt_oss and least or llama and some)",
    ),
}  # fmt: skip
"""Files and what of them: a part in each run of the tests, all of it with ``sweep``."""

OTHERS = "races or poison or every_wait or cupy or gpt2 or mutation or last_visit"
"""What is about the simulated device, or equals the CPU's dropout, which a card draws itself."""


def run(files: list[str], words: str) -> None:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not on the PATH: the card that is compiled for this is not there")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
         *(f"tests/{name}" for name in files), "-k", words],
        cwd=ROOT, env={**os.environ, "OFFLOAD_TEST_CARD": "strict"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("case", CASES)
def test_on_a_device_of_its_own(case: str) -> None:
    run(*CASES[case])


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES)
def test_all_of_it(case: str) -> None:
    files, _ = CASES[case]
    run(files, f"not ({OTHERS}) or test_card")
