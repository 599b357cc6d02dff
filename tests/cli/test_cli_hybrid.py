"""``--hybrid`` on a dense model: the CPU multiplies with weights in RAM; the text is the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_support import Cli, refused

MIB = 2**20
WORDS = ("--prompt-ids", "9,8,7", "-n", 6, "--ignore-eos", "--no-predict")


@pytest.fixture
def sizes(cli: Cli, dense: Path, tmp_path: Path) -> tuple[object, ...]:
    """All weights in RAM, the least on the device, with room for what a plan in a file keeps."""
    report = tmp_path / "least.json"
    words = ("-m", dense, "--no-predict", "-c", 9, "--device", "sim", "--hybrid", "--json", report)
    assert cli("plan", *words).code == 0
    least = json.loads(report.read_text())["minimum_bytes"]
    return ("--ram", least["ram"] + 64 * MIB, "--gpu", least["device"] + 2 * MIB, "--device", "sim")


def run(cli: Cli, dense: Path, report: Path, *more: object) -> dict[str, Any]:
    found = cli("generate", "-m", dense, *WORDS, *more, "--json", report)
    assert found.code == 0, found.err
    return json.loads(report.read_text()) | {"shown": found.err}


def test_tokens_are_the_same_and_the_plan_says_who_computes(
    cli: Cli, dense: Path, tmp_path: Path, sizes: tuple[object, ...]
) -> None:
    alone = run(cli, dense, tmp_path / "a", *sizes)
    shared = run(cli, dense, tmp_path / "b", *sizes, "--hybrid")
    assert shared["token_ids"] == alone["token_ids"]
    assert shared["decode_cpu_products"] > 0 == alone["decode_cpu_products"]
    assert shared["decode_h2d_bytes"] < alone["decode_h2d_bytes"]
    assert "products/token on the CPU" in shared["shown"]
    cpu = shared["plan"]["cpu"]
    assert cpu["expert_rows"] == 0
    assert cpu["dense"]["blocks"] > 0
    assert cpu["dense"]["rows"] == 32
    assert alone["plan"]["cpu"] is None
    assert any("are computed there by the CPU" in why for why in shared["plan"]["reasons"])


def test_a_packs_experts_are_shared(cli: Cli, moe: Path, tmp_path: Path) -> None:
    words = ("-m", moe, "--quant", "q4", "--device", "sim", "--no-predict")
    least = tmp_path / "least.json"
    assert cli("plan", *words, "-c", 9, "--hybrid", "--json", least).code == 0
    device = json.loads(least.read_text())["minimum_bytes"]["device"]
    budgets = ("--ram", 256 * MIB, "--gpu", device + MIB)
    found = []
    for more in ((), ("--hybrid",)):
        report = tmp_path / "run.json"
        run = cli("generate", *words, "--prompt-ids", "9,8,7", "-n", 6, "--ignore-eos", *budgets,
                  *more, "--json", report)  # fmt: skip
        assert run.code == 0, run.err
        found.append(json.loads(report.read_text()))
    assert found[0]["token_ids"] == found[1]["token_ids"]
    assert found[1]["decode_cpu_experts"] > 0 == found[0]["decode_cpu_experts"]
    assert found[1]["plan"]["cpu"]["expert_rows"] == 32
    assert "experts/token on the CPU" in run.err


def test_a_frozen_plan_has_the_same_sites(
    cli: Cli, dense: Path, tmp_path: Path, sizes: tuple[object, ...]
) -> None:
    plan = tmp_path / "plan.json"
    words = ("-m", dense, *sizes, "-c", 9, "--no-predict")
    assert cli("plan", *words, "--hybrid", "--plan-out", plan).code == 0
    frozen = json.loads(plan.read_text())["sites"]
    runs = [run(cli, dense, tmp_path / n, *sizes, "--hybrid", "--plan", plan) for n in "ab"]
    assert runs[0]["token_ids"] == runs[1]["token_ids"]
    for found in runs:
        assert found["plan"]["cpu"]["dense"]["blocks"] == len(frozen["blocks"])
        assert found["decode_cpu_products"] == runs[0]["decode_cpu_products"] > 0
    other = cli("generate", "-m", dense, *WORDS, *sizes, "--plan", plan)
    refused(other, "made with a part for the CPU", "give --hybrid, or replan")
