"""``offload simulate`` and ``plan --hardware``: predictions for what is not here."""

from __future__ import annotations

import json
import os
import signal
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_support import Cli, refused

from offload.blocks import ALIGN, Tier
from offload.models import prepared
from offload.models.shape import shape_of
from offload.scheduler.plan import SITE_ACTIVATIONS
from offload.scheduler.planner import PlanRequest, make_plan

MACHINES = Path(__file__).resolve().parents[2] / "offload" / "hardware"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "configs" / "deepseek-v3-671b.json"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's family with 5 small layers."""
    config: dict[str, Any] = json.loads(EXAMPLE.read_text())
    config |= {
        "hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256,
        "num_hidden_layers": 5, "vocab_size": 4096, "n_routed_experts": 32,
        "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 128,
        "kv_lora_rank": 64, "max_position_embeddings": 4096, "first_k_dense_replace": 1,
        "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
    }  # fmt: skip
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(config))
    return path


def test_a_model_is_simulated_from_its_config_alone(cli: Cli, small: Path, tmp_path: Path) -> None:
    words = ["simulate", small, "--hardware", "rtx3060-laptop", "--quant", "q4", "--ram", "84MiB",
             "--gpu", "18MiB", "-n", "4", "--prompt-tokens", "16"]  # fmt: skip
    found = cli(*words, "--json", tmp_path / "a.json", "--trace", tmp_path / "t.json")
    assert found.code == 0, found.err
    for said in ("disk read |", "experts |", "bottleneck", "first token after", "expert hits"):
        assert said in found.out
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["decode"]["hit_rate"] > 0.3
    assert data["decode"]["lane_bytes"]["read"] > 0
    speed = data["decode"]["tokens_per_s"]
    assert speed["low"] <= speed["mid"] <= speed["high"] <= 1 / data["decode"]["bound_s"] * 1.3
    lanes = [
        e["args"]["name"]
        for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"]
        if e["name"] == "thread_name"
    ]
    assert lanes == ["passes", "disk read", "RAM to device", "compute", "experts", "waits"]
    again = cli(*words, "--json", tmp_path / "b.json")
    assert again.code == 0
    assert json.loads((tmp_path / "b.json").read_text()) == data


def test_more_memory_is_never_predicted_to_be_slower(cli: Cli, small: Path, tmp_path: Path) -> None:
    speeds = []
    for ram in ("90MiB", "104MiB", "220MiB"):
        found = cli("simulate", small, "--hardware", "cpu-laptop", "--ram", ram, "-n", "4",
                    "--prompt-tokens", "16", "--json", tmp_path / "s.json")  # fmt: skip
        assert found.code == 0, found.err
        data = json.loads((tmp_path / "s.json").read_text())
        speeds.append(data["decode"]["tokens_per_s"]["mid"])
    assert speeds == sorted(speeds)


def test_a_model_with_a_short_context(cli: Cli, small: Path, tmp_path: Path) -> None:
    """Nobody gave a --context: the default gives way, and no flag is blamed that was not there."""
    short = tmp_path / "config.json"
    config = json.loads(small.read_text()) | {"max_position_embeddings": 256}
    short.write_text(json.dumps(config))
    words = ("simulate", short, "--hardware", "cpu-laptop", "-n", 4)
    found = cli(*words, "--prompt-tokens", 32, "--json", tmp_path / "a.json")
    assert found.code == 0, found.err
    assert json.loads((tmp_path / "a.json").read_text())["context"] == 256
    said = refused(cli(*words))
    assert "512 tokens of prompt and 4 of answer are over the model's limit of 256" in said
    assert "--context 300 is over" in refused(cli(*words, "--prompt-tokens", 8, "-c", 300))


def test_impossible_simulations_are_refused(cli: Cli, small: Path, tmp_path: Path) -> None:
    def said(*words: object) -> str:
        return refused(cli("simulate", small, *words))

    laptop = ("--hardware", "rtx3060-laptop")
    assert "more than the 5905580032 bytes" in said(*laptop, "--gpu", "8GiB")
    assert "bytes too small: at least" in said(*laptop, "--ram", "1GiB", "--gpu", "1MiB")
    assert "has no card" in said("--hardware", "cpu-laptop", "--gpu", "1GiB")
    assert "more than the" in said(*laptop, "--ram", "64GiB")
    assert "--disk-space 1.0 MiB" in said(*laptop, "--disk-space", "1MiB")
    assert "rtx4090-desktop" in said("--hardware", "nothing")
    assert "zipf:S:R" in said(*laptop, "--routing", "zipf:9")
    assert "neither even" in said(*laptop, "--routing", "odd")
    weights = tmp_path / "w.json"
    weights.write_text("[1, 2]")
    assert "2 weights for 32 experts" in said(*laptop, "--routing", weights)
    assert "do not fit a context" in said(*laptop, "-c", "64", "--prompt-tokens", "60")
    bad = tmp_path / "hw.json"
    bad.write_text('{"version": 1, "sdd_read": {}}')
    assert "unknown field sdd_read" in said("--hardware", bad)
    fp8 = json.loads(small.read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(fp8))
    assert "--quant" in refused(cli("simulate", config, *laptop))
    config.write_text(json.dumps(json.loads(small.read_text()) | {"num_hidden_layers": 10**9}))
    assert "num_hidden_layers 1000000000" in refused(cli("simulate", config, *laptop))
    for name in ("num_hidden_layers", "hidden_size"):
        config.write_text(json.dumps(json.loads(small.read_text()) | {name: 0}))
        assert f"{name} 0: a model has 1 or more" in refused(cli("simulate", config, *laptop))
        out = tmp_path / "out"
        assert f"{name} 0: a model has 1 or more" in refused(cli("synth", config, out))
        assert not out.exists()


@pytest.fixture
def slow_link(tmp_path: Path) -> Path:
    """A machine whose link is so slow that the CPU is faster with every weight in RAM."""
    data = json.loads((MACHINES / "rtx3060-laptop.json").read_text())
    for name in ("h2d", "d2h"):
        data[name] |= dict.fromkeys(("median", "low", "high"), 1e6)
    file = tmp_path / "slow.json"
    file.write_text(json.dumps(data))
    return file


@pytest.mark.parametrize("quant", [None, "q4"])
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_dense_products_are_planned_as_for_a_run(
    cli: Cli, request: Any, slow_link: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    model: str, quant: str | None,
) -> None:  # fmt: skip
    """With the same rates, room and overhead the CPU gets the same blocks as in the plan of the
    checkpoint, but for what only a process knows of itself, and its files of where tensors lie in
    their pages."""
    directory = request.getfixturevalue(model)
    asked: list[PlanRequest] = []
    monkeypatch.setattr(prepared, "make_plan", lambda r: (asked.append(r), make_plan(r))[1])
    how = ("--hardware", slow_link, "--hybrid", "--prompt-tokens", 16, "-c", 64,
           *(() if quant is None else ("--quant", quant)))  # fmt: skip
    report = tmp_path / "plan.json"
    words = ("plan", "-m", directory, *how, "--ram", "512MiB", "--json", report)
    assert cli(*words, "--gpu", "64MiB").code == 0
    gpu = json.loads(report.read_text())["minimum_bytes"]["device"] + 2**17
    found = cli(*words, "--gpu", gpu)
    assert found.code == 0, found.err
    real = asked[-1]
    shape = shape_of(
        directory / "config.json", quant=quant, prompt_tokens=16, context=64, hybrid=True
    )
    assert shape.apart == real.apart
    assert shape.product_bytes <= real.reserves[Tier.DEVICE][SITE_ACTIVATIONS]
    assert real.costs is not None
    for block, spec in real.blocks.items():
        assert abs(spec.slot_nbytes - shape.blocks[block].slot_nbytes) <= 2 * ALIGN
    mine = replace(
        shape.request(real.budgets, real.costs, split_rows=real.split_rows),
        reserves=real.reserves, overhead_s=real.overhead_s, blocks=real.blocks,
    )  # fmt: skip
    wanted = make_plan(real).sites
    assert wanted is not None
    assert wanted.blocks
    assert make_plan(mine).sites == wanted
    words = ("simulate", directory / "config.json", *how, "--ram", "512MiB", "--gpu", gpu)
    shown = cli(*words, "-n", 4, "--json", report)
    assert shown.code == 0, shown.err
    data = json.loads(report.read_text())
    assert data["cpu"]["dense"]["blocks"] > 0
    assert data["cpu"]["expert_rows"] == (32 if model == "moe" else 0)
    assert "are computed there by the CPU" in shown.out
    assert data["reasons"][-1] in shown.out
    alone = cli(*(w for w in words if w != "--hybrid"), "-n", 4, "--json", report)
    assert alone.code == 0, alone.err
    assert json.loads(report.read_text())["cpu"] is None


def test_a_checkpoint_is_planned_for_another_machine(cli: Cli, moe: Path, tmp_path: Path) -> None:
    words = ["plan", "-m", moe, "--hardware", "h200", "-c", "64", "--ram", "64MiB"]
    found = cli(*words, "--gpu", "24MiB", "--json", tmp_path / "p.json")
    assert found.code == 0, found.err
    assert "NVIDIA H200" in found.out
    assert "first token" in found.out
    data = json.loads((tmp_path / "p.json").read_text())
    assert data["compute"] == "device"
    assert data["predicted_prompt"]["pass_s"]["mid"] > 0
    assert "more than the" in refused(cli(*words, "--gpu", "200GiB"))
    assert "too small" in refused(cli(*words, "--gpu", "64KiB"))


def test_a_plan_is_written_and_obeyed(cli: Cli, moe: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    found = cli("plan", "-m", moe, "--ram", "24MiB", "-c", "64", "--no-predict", "--plan-out", plan)
    assert found.code == 0, found.err
    words = ["generate", "-m", moe, "--prompt-ids", "5,6,7", "-n", "4", "--no-predict"]
    runs = []
    for name in ("a", "b"):
        run = cli(*words, "--ram", "24MiB", "--plan", plan, "--json", tmp_path / name)
        assert run.code == 0, run.err
        runs.append((run.out, json.loads((tmp_path / name).read_text())))
    assert runs[0][0] == runs[1][0]
    frozen = json.loads(plan.read_text())["tiers"]["RAM"]
    for _, data in runs:
        assert data["plan"]["tiers"]["ram"]["slots"] == frozen["slots"]
        assert data["plan"]["tiers"]["ram"]["ring_bytes"] == frozen["ring_bytes"]
    assert "this run has" in refused(cli(*words, "--ram", "25MiB", "--plan", plan))
    assert "--context" in refused(cli(*words, "--ram", "24MiB", "--plan", plan, "-c", "65"))
    assert "is no plan" in refused(cli(*words, "--ram", "24MiB", "--plan", moe / "config.json"))


def test_a_plan_is_obeyed_that_pins_less_than_the_run_would(
    cli: Cli, dense: Path, tmp_path: Path
) -> None:
    """As all do whose weights do not fit: room is set aside in what is written. What a plan pins is
    laid on cache lines, so the blocks that a run would lay for itself are not those of the plan."""
    plan, words = tmp_path / "plan.json", ("-m", dense, "--ram", "14MiB", "--no-predict")
    assert cli("plan", *words, "-c", "64", "--plan-out", plan).code == 0
    generate = ("generate", *words, "--prompt-ids", "5,6,7", "-n", "4", "--json", tmp_path / "j")
    runs = [cli(*generate, *more) for more in (("-c", "64"), ("--plan", plan))]
    assert [r.code for r in runs] == [0, 0], runs[-1].err
    assert runs[0].out == runs[1].out
    homes = json.loads((tmp_path / "j").read_text())["plan"]["homes"]
    pinned = json.loads(plan.read_text())["tiers"]["RAM"]["pinned"]
    assert sum(v["blocks"] for k, v in homes.items() if "pinned" in k) == len(pinned), homes


def test_a_run_leaves_a_private_trace_and_a_picture(cli: Cli, moe: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace, picture = tmp_path / "t.json", tmp_path / "t.png"
    words = ["generate", "-m", moe, "--prompt-ids", "5,6,7", "-n", "4", "--no-predict"]
    found = cli(*words, "--ram", "32MiB", "--gpu", "12MiB", "--device", "sim",
                "--trace", trace, "--trace-plot", picture)  # fmt: skip
    assert found.code == 0, found.err
    assert stat.S_IMODE(os.stat(trace).st_mode) == 0o600
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(e["ph"] == "X" and e["cat"] == "passes" for e in events) == 4
    assert {"read", "h2d", "compute", "experts"} <= {e.get("cat") for e in events}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "the same file" in refused(cli(*words, "--trace", trace, "--trace-plot", trace))
    assert "no directory" in refused(cli(*words, "--trace", tmp_path / "no" / "t.json"))


def test_an_interrupted_run_leaves_its_trace(
    cli: Cli, moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offload.cli import decode

    real, trace = decode.generate, tmp_path / "t.json"

    def generate(*args: Any, **kwargs: Any) -> Any:
        shown = kwargs["show"]

        def show(text: str) -> None:
            shown(text)
            os.kill(os.getpid(), signal.SIGINT)

        return real(*args, **kwargs | {"show": show})

    monkeypatch.setattr(decode, "generate", generate)
    found = cli("generate", "-m", moe, "--prompt-ids", "5,6,7", "-n", "9", "--no-predict",
                "--trace", trace)  # fmt: skip
    assert found.code == 130, found.err
    data = json.loads(trace.read_text())
    assert data["otherData"]["ended_with"] == "Interrupted"
    assert any(e["ph"] == "X" for e in data["traceEvents"])
