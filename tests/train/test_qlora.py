"""Adapters on a base that stays packed, against the same adapters on a resident model with the
values that the pack holds: bit for bit, at every placement."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence import reference
from lora_support import EXPERTS, adapted_oracle
from qlora_support import Packs, pack_checkpoint, packed_engine, unpacked_model
from run_support import (
    again,
    everything_on_disk,
    not_warmed,
    options_for,
    planned_once,
    train,
    weights_of,
    write_data,
    write_model,
)
from safetensors.torch import load_file
from test_lora import train as train_both

from offload.errors import OffloadError, StoreError
from offload.models.pack_reader import PackedModel
from offload.train.lora_output import merged
from offload.train.options import TrainOptions
from offload.train.preparing import prepare
from offload.train.result import adapter_directory


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Packs:
    return Packs(tmp_path_factory)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", ["disk", "ram"])
@pytest.mark.parametrize(
    ("family", "quant"),
    [("qwen3", "q4"), ("llama", "q8"), ("qwen3_moe", "q4"), ("gpt_oss", "q4")],
)
def test_equals_resident_lora_on_the_unpacked_values(
    packs: Packs, family: str, quant: str, place: str
) -> None:
    _, packed, values = packs(family, quant)
    how: dict[str, Any] = {"targets": EXPERTS} if "moe" in family or "oss" in family else {}
    with packed_engine(packed, None, place, **how) as (engine, adapters, base, _):
        kept = {engine.layout.blocks[b].id for b in base.recipes}
        assert any("~packed" in k for k in kept)
        assert any(recipe.table for recipe in base.recipes.values())
        assert bool(how) == any("experts#" in k for k in kept)
        train_both(engine, adapted_oracle(values, engine.layout, **how), 2, 0.05)
        assert adapters.unused() == []


EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_moe"


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "offload" / "packs"


def command(
    place: Path, data: Path, *more: object, ram: str = "512MiB", quant: str | None = "q4"
) -> int:
    from offload.cli.main import main

    words = [
        "finetune", "--model", EXAMPLE, "--method", "lora", "--data", data,
        *(() if quant is None else ("--quant", quant)),
        "--output", place / "out", "--disk", place / "disk", "--ram", ram, "--seq-len", 32,
        "--max-steps", 3, "--batch-size", 2, "--threads", 1, "--no-tensorboard", *more,
    ]  # fmt: skip
    return main([str(w) for w in words])


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_the_command_line_packs_trains_and_resumes(
    own_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    peft = pytest.importorskip("peft")
    data = write_data(tmp_path / "train.jsonl")
    assert command(tmp_path / "one", data) == 0
    said = capsys.readouterr()
    assert "packing" in said.err
    assert str(own_cache) in said.err
    assert "packed (q4_0" in said.err
    assert "s a step (forward" in said.err  # how long unpacking and computing will take
    assert len(list(own_cache.glob("*-q4"))) == 1
    loaded = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(EXAMPLE), tmp_path / "one" / "out"
    )
    assert any(p.abs().max() > 0 for n, p in loaded.named_parameters() if "lora_B" in n)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adapters_on_a_gguf_file(
    own_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Converted once, into the user's cache; the adapter says that the converted file is its base.
    Its own weights are not trained, and that is said before anything is converted."""
    pytest.importorskip("gguf")
    from gguf_fixtures import Kind, write_gguf
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr("offload.train.preparing.warm_training", not_warmed)
    monkeypatch.setattr("offload.train.preparing.step_rates", lambda *_: None)
    model = AutoModelForCausalLM.from_pretrained(EXAMPLE, dtype=torch.float32)
    file = write_gguf(
        tmp_path / "tiny-Q8_0.gguf", model, Kind.Q8_0, tokenizer=(EXAMPLE, "gpt-2")
    )  # fmt: skip
    words = ("--model", file, "--max-steps", 2)
    data = write_data(tmp_path / "train.jsonl")
    assert command(tmp_path / "full", data, *words, "--method", "full", quant=None) == 2
    assert "give --method lora" in capsys.readouterr().err
    assert not own_cache.exists()
    assert command(tmp_path / "one", data, *words, quant=None) == 0
    assert "packed (q8_0" in capsys.readouterr().err
    (converted,) = own_cache.iterdir()
    config = json.loads((tmp_path / "one" / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(converted)
    factors = load_file(tmp_path / "one" / "out" / "adapter_model.safetensors")
    assert any(value.any() for name, value in factors.items() if "lora_B" in name)
    assert (tmp_path / "one" / "out" / "tokenizer.json").is_file()


def lora_options(model: Path, data: Path, place: Path, **more: Any) -> TrainOptions:
    how = {"method": "lora", "lora_r": 4, "max_steps": 3, **more}
    return options_for(model, data, place, **how)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("moe") / "moe", "qwen3_moe", vocab_size=520)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "train.jsonl")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    planned_once(monkeypatch)


@pytest.mark.usefixtures("quick")
def test_a_run_that_was_interrupted_goes_on_with_the_same_pack_only(
    moe: Path, data: Path, tmp_path: Path
) -> None:
    targets = ("q_proj", "gate_up_proj")
    whole = lora_options(moe, data, tmp_path / "whole", quant="q4", lora_targets=targets)
    train(whole)
    parts = lora_options(moe, data, tmp_path / "parts", quant="q4", lora_targets=targets)
    train(parts, stop_after=1, change=everything_on_disk)
    for other in ("q8", None):
        with pytest.raises(OffloadError, match=r"frozen weights are in another pack.*--quant"):
            train(again(parts, quant=other))
    log = train(again(parts))
    assert sorted(log.losses) == [2, 3]
    assert weights_of(whole.output) == weights_of(parts.output)


@pytest.mark.usefixtures("quick")
def test_what_adapters_are_merged_into(moe: Path, data: Path, tmp_path: Path) -> None:
    """Into the checkpoint's own weights if the run was given the checkpoint, else the pack's."""
    pack = pack_checkpoint(moe, tmp_path / "pack", "q4")
    values = unpacked_model(moe, PackedModel.open(pack), tmp_path / "values")
    targets = ("v_proj", "down_proj")
    for name, model, base, quant in (
        ("checkpoint", moe, moe, "q4"),
        ("pack", pack, values, None),
    ):
        options = lora_options(
            model, data, tmp_path / f"on-{name}", quant=quant, merge=True, lora_targets=targets
        )
        log = train(options)
        assert log.end is not None
        assert log.end.merged_onto is not None
        assert ("not quantised" in log.end.merged_onto) == (name == "checkpoint")
        adapter = load_file(adapter_directory(options) / "adapter_model.safetensors")
        before = dict(reference(base, torch.bfloat16).named_parameters())
        after = dict(reference(options.output, torch.bfloat16).named_parameters())
        assert before.keys() == after.keys()
        changed = {n for n in before if not torch.equal(before[n], after[n])}
        assert changed == {n for n in before if "v_proj" in n or "down_proj" in n}
        for path in (n.removesuffix(".weight") for n in changed if "v_proj" in n):
            a, b = (adapter[f"base_model.model.{path}.lora_{x}.weight"] for x in "AB")
            wanted = merged(before[f"{path}.weight"].detach(), a, b, 32.0 / 4)
            assert torch.equal(after[f"{path}.weight"].detach(), wanted)
        assert not (options.output / "pack.json").exists()


def test_full_training_of_a_pack_is_refused(
    moe: Path, data: Path, tmp_path: Path, own_cache: Path
) -> None:
    pack = pack_checkpoint(moe, tmp_path / "pack", "q4")
    with pytest.raises(OffloadError, match=r"is a pack.*--method lora.*made from"):
        prepare(options_for(pack, data, tmp_path / "run"))
    with pytest.raises(OffloadError, match=r"--quant cannot take effect.*--method lora"):
        prepare(options_for(moe, data, tmp_path, quant="q4"))
    with pytest.raises(OffloadError, match="packed as q4 already"):
        prepare(lora_options(pack, data, tmp_path / "run", quant="q8"))


def test_a_damaged_pack_stops_the_run(tmp_path: Path, packs: Packs) -> None:
    _, packed, _ = packs("qwen3", "q4")
    copy = shutil.copytree(packed, tmp_path / "copy")
    bundle = next(copy.glob("bundle-*.bin"))
    raw = bytearray(bundle.read_bytes())
    block = next(b for b in PackedModel.open(copy).manifest.blocks if "q_proj" in b.name)
    raw[block.offset + 7] ^= 1
    bundle.write_bytes(raw)
    with (
        pytest.raises(StoreError, match="is damaged"),
        packed_engine(copy, None, "ram") as (engine, *_),
    ):
        engine.model(input_ids=torch.ones((1, 4), dtype=torch.int64))
