"""Packed models from the command line: made once, within the budget, one text at any of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_support import Cli, refused

TINY = Path(__file__).parents[2] / "examples" / "tiny_moe"
MIB = 2**20


def generate(cli: Cli, target: Path, *words: object, **more: Any) -> dict[str, Any]:
    report = target / "run.json"
    done = cli(
        "generate", "--no-predict", "-p", "The function returns", "-n", 24, "--json", report,
        *words, **more,
    )  # fmt: skip
    assert done.code == 0, done.err
    return json.loads(report.read_text()) | {"stdout": done.out, "stderr": done.err}


@pytest.mark.slow
def test_quant_packs_once_and_says_so(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = generate(cli, tmp_path, "-m", TINY, "--quant", "q8", "--ram", 24 * MIB)
    asked = cli(
        "plan", "-m", TINY, "--quant", "q8", "--no-predict", "-c", 64, "--prompt-tokens", 16,
        "--json", tmp_path / "plan.json",
    )  # fmt: skip
    assert asked.code == 0, asked.err
    # Room for what the least differs by from one moment to the next.
    least = json.loads((tmp_path / "plan.json").read_text())["minimum_bytes"]["ram"] + MIB
    again = generate(cli, tmp_path, "-m", TINY, "--quant", "q8", "--ram", least)
    assert "packing: once, into" in first["stderr"]
    assert "packing" not in again["stderr"]
    assert "differ from the unquantised" in again["stderr"]
    assert first["stdout"] == again["stdout"]
    assert first["token_ids"] == again["token_ids"]
    assert again["decode_misses"] > 0 == first["decode_misses"]
    grown = again["peak_rss_bytes"] - again["baseline_rss_bytes"]
    assert grown <= 1.05 * again["ram_budget_bytes"]
    (made,) = (tmp_path / "cache" / "offload" / "packs").iterdir()
    assert generate(cli, tmp_path, "-m", made, "--ram", 24 * MIB)["stdout"] == first["stdout"]
    refused(cli("generate", "-m", made, "--quant", "q4", "-p", "x"), "packed as q8 already")


@pytest.mark.slow
def test_a_device_takes_packed_weights(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same text whatever the device's budget, and both budgets together bound the process,
    whose memory the simulated device is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    on_device = ("-m", TINY, "--quant", "q8", "--device", "sim", "--ram", 24 * MIB)
    wide = generate(cli, tmp_path, *on_device, "--gpu", 24 * MIB)
    small = generate(cli, tmp_path, *on_device, "--gpu", 4 * MIB)
    assert wide["token_ids"] == small["token_ids"]
    assert small["stdout"].strip()
    assert "single tokens run through transformers' own layers" in small["stderr"]
    for run, gpu in ((wide, 24 * MIB), (small, 4 * MIB)):
        grown = run["peak_rss_bytes"] - run["baseline_rss_bytes"]
        assert grown <= 1.05 * (run["ram_budget_bytes"] + gpu)
        assert run["device_budget_bytes"] == gpu
        assert "of the simulated device, which are RAM, too" in run["stderr"]


@pytest.mark.usefixtures("tiny_probe")
def test_what_cannot_take_effect(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with_sim = ("--kernels", "fast", "--device", "sim", "-p", "x")
    refused(cli("generate", "-m", TINY, *with_sim), "--kernels fast compares the CPU's kernels")
    refused(cli("generate", "-m", TINY, "--quant", "q5", "-p", "x"), "q5")
    refused(cli("generate", "-m", tmp_path / "none.gguf", "-p", "x"), "none.gguf")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(b"GGUF\x03\x00\x00\x00")
    refused(cli("generate", "-m", cut, "-p", "x"), "cut.gguf")
