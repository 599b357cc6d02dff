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


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_layers_on_its_card(
    cli: Cli, configs: dict[str, Path], tmp_path: Path, family: str
) -> None:
    """What a step copies, each way and in each phase; a smaller card copies more."""
    words = (configs[family], "--seq-len", 128, "--ram", "4GiB")
    alone = planned(cli, tmp_path, *words, "--method", "full")
    assert alone["device"] is None
    assert alone["step"]["link"] == {}
    large = planned(cli, tmp_path, *words, "--method", "full", "--gpu", "5GiB")
    assert sum(large["device"]["bytes"].values()) <= large["device"]["budget"] == 5 * 2**30
    link = large["step"]["link"]
    assert set(link) == {"forward", "backward"}
    assert all(n > 0 for phase in link.values() for n in phase.values())
    for phase, moved in link.items():
        lanes = large["step"]["lanes"][phase]
        assert lanes["link up"] == pytest.approx(moved["up_bytes"] / 12.6e9, rel=0.01)
    lora = ("--method", "lora", "--head", "cpu", "--gpu")
    kept = planned(cli, tmp_path, *words, *lora, "5GiB")
    parts = kept["device"]["bytes"]
    less = sum(parts.values()) - parts["weights"] // 2 - parts.get("experts", 0) * 9 // 10
    moving = planned(cli, tmp_path, *words, *lora, less)
    assert kept["device"]["layers_at_a_time"] == kept["device"]["layers"]
    assert moving["device"]["layers_at_a_time"] < moving["device"]["layers"]
    up = [sum(p["up_bytes"] for p in found["step"]["link"].values()) for found in (kept, moving)]
    assert up[0] < up[1]
    assert kept["device"]["head"] is False
    there = planned(cli, tmp_path, *words, "--method", "lora", "--head", "gpu", "--gpu", "5GiB")
    assert there["device"]["head"] is True
    assert there["device"]["bytes"]["head"] > 0
    alone = cli("plan", "-m", *words, *LAPTOP, "--method", "lora", "--head", "gpu")
    refused(alone, "--head gpu cannot take effect")


def test_states_updated_on_the_card(cli: Cli, configs: dict[str, Path], tmp_path: Path) -> None:
    """Where Adam is what a step waits for the card takes some of it, as many tiles as pay."""
    words = (configs["llama"], "--seq-len", 8, "--method", "full", "--ram", "8GiB", "--gpu", "5GiB")
    found = {
        asked: planned(cli, tmp_path, *words, "--gpu-updates", asked)
        for asked in ("off", "auto", "1", "2", "3")
    }
    seconds = {asked: plan["step"]["seconds"] for asked, plan in found.items()}
    every = {asked: plan["device"]["updates_every"] for asked, plan in found.items()}
    assert every == {"off": None, "auto": every["auto"], "1": 1, "2": 2, "3": 3}
    assert seconds["auto"] < 0.98 * seconds["off"]
    assert seconds["auto"] <= 1.01 * min(seconds.values())
    up = {k: sum(p["up_bytes"] for p in v["step"]["link"].values()) for k, v in found.items()}
    assert up["off"] < up["3"] < up["2"] < up["1"]
    assert found["1"]["device"]["bytes"]["tiles to update"] > 0
    # A card so small that room for tiles is room that layers had: what is said to go up is what
    # the link is busy with.
    parts = found["off"]["device"]["bytes"]
    tight = sum(parts.values())
    small = planned(cli, tmp_path, *words[:-1], tight)
    assert small["device"]["updates_every"] is not None
    assert small["device"]["layers_at_a_time"] < found["off"]["device"]["layers_at_a_time"]
    for phase, moved in small["step"]["link"].items():
        lanes = small["step"]["lanes"][phase]
        assert lanes["link up"] == pytest.approx(moved["up_bytes"] / 12.6e9, rel=0.001)
    # Where the disk is what a step waits for it does not matter who computes.
    slow = (*words[:-3], "320MiB", *words[-2:])
    assert planned(cli, tmp_path, *slow)["device"]["updates_every"] is None
    for asked, said in (("0", "none of auto, off"), ("x", "none of"), ("9999", "the most are")):
        refused(cli("plan", "-m", *words, *LAPTOP, "--gpu-updates", asked), said)
    alone = cli("plan", "-m", *words[:-2], *LAPTOP, "--gpu-updates", 2)
    refused(alone, "--gpu-updates 2 cannot take effect")


def test_a_routers_sums_are_copied(cli: Cli, configs: dict[str, Path], tmp_path: Path) -> None:
    words = (configs["qwen3_moe"], "--seq-len", 128, "--method", "full", "--gpu", "5GiB")
    plain = planned(cli, tmp_path, *words)["step"]["link"]
    found = planned(cli, tmp_path, *words, "--router-aux-loss", 0.01)["step"]["link"]
    config = tiny_config("qwen3_moe")
    each = 4 * config.num_experts * config.num_hidden_layers
    assert found["forward"]["down_bytes"] == plain["forward"]["down_bytes"] + 2 * each
    mask = 128  # which tokens are padding: the same for all layers
    assert found["forward"]["up_bytes"] == plain["forward"]["up_bytes"] + mask
    # Where it stays for backward; so do the experts' shares, which are the same for all layers.
    assert found["backward"]["up_bytes"] == plain["backward"]["up_bytes"] + 4 * config.num_experts
    model = configs["llama"]
    refused(
        cli("plan", "-m", model, *LAPTOP, "--method", "full", "--router-aux-loss", 0.01),
        "--router-aux-loss 0.01 cannot take effect",
    )


def test_what_makes_no_sense(cli: Cli, configs: dict[str, Path]) -> None:
    model = configs["llama"]
    refused(cli("plan", "-m", model, "--method", "full"), "--hardware")
    refused(cli("plan", "-m", model, *LAPTOP, "--method", "full", "--kv", "q8"), "--kv")
    refused(cli("plan", "-m", model, *LAPTOP, "--seq-len", 128), "--seq-len", "--method")
    refused(cli("plan", "-m", model, *LAPTOP, "--method", "full", "--ram", "64MiB"), "too small")
