"""``offload plan --method``: fine-tuning on machines that are not here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_support import Cli, refused
from families import tiny_config

LAPTOP = ("--hardware", "rtx3060-laptop")


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Nothing but a config.json each."""
    place, out = tmp_path_factory.mktemp("configs"), {}
    for family in ("llama", "qwen3_moe"):
        config = tiny_config(family, hidden_size=512, intermediate_size=2048, vocab_size=32000)
        config.dtype = "bfloat16"
        config.save_pretrained(place / family)
        out[family] = place / family
    return out


def planned(cli: Cli, place: Path, *words: object) -> dict[str, Any]:
    result = cli("plan", "-m", *words, *LAPTOP, "--json", place / "plan.json")
    assert result.code == 0, result.err
    found: dict[str, Any] = json.loads((place / "plan.json").read_text())
    assert f"{found['step']['seconds']:.2f} s a step" in result.out
    assert sum(found["ram"].values()) <= found["budget"]
    for phase, seconds in found["step"]["phases"].items():
        assert seconds >= found["step"]["lanes"][phase]["compute"] * 0.999 > 0
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_full_and_lora_from_a_config_alone(
    cli: Cli, configs: dict[str, Path], tmp_path: Path, family: str
) -> None:
    words = (configs[family], "--seq-len", 128)
    small, large = (
        planned(cli, tmp_path, *words, "--method", "full", "--ram", ram)
        for ram in ("320MiB", "4GiB")
    )
    # What is used outside of all layers is a norm; only its states come and go.
    assert small["step"]["read_bytes"] > 100 * large["step"]["read_bytes"]
    lora = planned(cli, tmp_path, *words, "--method", "lora", "--ram", "320MiB")
    assert 100 * lora["step"]["written_bytes"] < small["step"]["written_bytes"]
    assert lora["disk_bytes"] < small["disk_bytes"]
    assert lora["step"]["seconds"] < small["step"]["seconds"]
    narrow = planned(
        cli, tmp_path, *words, "--method", "full", "--ram", "320MiB", "--states", "8bit"
    )
    assert narrow["disk_bytes"] < small["disk_bytes"]


def test_what_makes_no_sense(cli: Cli, configs: dict[str, Path]) -> None:
    model = configs["llama"]
    refused(cli("plan", "-m", model, "--method", "full"), "--hardware")
    refused(cli("plan", "-m", model, *LAPTOP, "--method", "full", "--kv", "q8"), "--kv")
    refused(cli("plan", "-m", model, *LAPTOP, "--seq-len", 128), "--seq-len", "--method")
    refused(cli("plan", "-m", model, *LAPTOP, "--method", "full", "--ram", "64MiB"), "too small")
