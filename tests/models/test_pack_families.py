"""Packed checkpoints against the parameters of the models that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import tiny_config, write
from pack_support import expert_of, found_in, open_pack, value_of
from transformers import AutoModelForCausalLM

from offload.errors import CheckpointError
from offload.io.pack_manifest import Kind, Layout
from offload.models.pack_checkpoint import CheckpointSource
from offload.models.pack_run import pack

FAMILIES = {
    "qwen3_moe": "one behind the other, stored per expert",
    "mixtral": "w1, w2, w3 under other names",
    "gpt_oss": "transposed, interleaved, with biases",
    "deepseek_v3": "shared experts, a correction bias",
    "aria_text": "transposed",
    "nemotron_h": "without a gate",
    "granitemoe": "experts of its own kind",
    "llama": "no experts",
    "gemma": "tied, scaled embedding",
    "gpt2": "Conv1D, positions",
    "phi3": "fused projections",
    "mamba": "convolutions",
    "qwen3_next": "linear attention, shared experts",
}


def packed(directory: Path, out: Path, quant: str) -> Any:
    source = CheckpointSource.open(directory)
    try:
        pack(source, out, quant=quant)
    finally:
        source.close()
    return open_pack(out)


def stock(directory: Path) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(directory, experts_implementation="eager")
    return found_in(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_changes_unless_asked(family: str, tmp_path: Path) -> None:
    write(family, tmp_path / "m")
    model, blocks = packed(tmp_path / "m", tmp_path / "p", "none")
    found = stock(tmp_path / "m")
    seen = set()
    for name, located in model.tensors.items():
        value = value_of(located.part, blocks[located.block.name])
        np.testing.assert_array_equal(value, found["state"][name], name)
        seen.add(name)
    for name, group in model.experts.items():
        for part in group.parts:
            for e, block in enumerate(group.blocks):
                want = expert_of(found, name, part.name, e)
                np.testing.assert_array_equal(value_of(part, blocks[block]), want, block)
        seen |= {k for k in found["state"] if k.startswith(f"{name}.")}
    assert seen == set(found["state"])
    assert not model.manifest.errors
    config = tmp_path / "m" / "config.json"
    assert (tmp_path / "p" / "config.json").read_bytes() == config.read_bytes()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "gemma", "deepseek_v3"])
@pytest.mark.parametrize("quant", ["q8", "q4"])
def test_quantised_weights_are_near(family: str, quant: str, tmp_path: Path) -> None:
    write(family, tmp_path / "m")
    model, blocks = packed(tmp_path / "m", tmp_path / "p", quant)
    found = stock(tmp_path / "m")
    # Measured: 0.5 % and 8.5 % for normal weights.
    most = {"q8_0": 0.01, "q4_0": 0.12}
    formats = set()
    pairs = [
        (located.part, value_of(located.part, blocks[located.block.name]), found["state"][name])
        for name, located in model.tensors.items()
    ] + [
        (part, value_of(part, blocks[block]), expert_of(found, name, part.name, e))
        for name, group in model.experts.items()
        for part in group.parts
        for e, block in enumerate(group.blocks)
    ]
    for part, value, want in pairs:
        if part.layout is Layout.PLAIN or (part.format == "bf16" and part.shape[1] % 32):
            np.testing.assert_array_equal(value, want)
            continue
        formats.add(part.format)
        error = np.linalg.norm(value - want) / np.linalg.norm(want)
        assert 0 < error < most[part.format], part
    assert formats == {"q8_0"} | ({"q4_0"} if quant == "q4" else set())
    assert set(model.manifest.errors) >= {"matrix", "head"}
    for stat in model.manifest.errors.values():
        assert 0 < stat.relative_rms < 0.12
        assert stat.rows >= 16


def test_routers_norms_and_biases_stay(tmp_path: Path) -> None:
    write("deepseek_v3", tmp_path / "m")
    model, _ = packed(tmp_path / "m", tmp_path / "p", "q4")
    kinds = {name: located.block.kind for name, located in model.tensors.items()}
    routers = [name for name in kinds if ".gate." in name]
    assert len(routers) >= 4
    assert all(kinds[name] is Kind.PLAIN for name in routers)
    assert all(kind is Kind.PLAIN for name, kind in kinds.items() if "norm" in name)
    assert kinds["model.layers.0.self_attn.o_proj.weight"] is Kind.MATRIX
    assert kinds["lm_head.weight"] is Kind.HEAD
    assert kinds["model.embed_tokens.weight"] is Kind.ROWS


def test_a_tied_embedding_is_stored_once(tmp_path: Path) -> None:
    config = tiny_config("qwen3", tie_word_embeddings=True)
    write("qwen3", tmp_path / "m", config=config)
    for quant in ("none", "q8"):
        model, blocks = packed(tmp_path / "m", tmp_path / quant, quant)
        assert model.manifest.aliases == {"model.embed_tokens.weight": "lm_head.weight"}
        assert model.blocks(Kind.ROWS) == ()
        rows = model.rows("model.embed_tokens.weight")
        head = model.tensors["lm_head.weight"]
        whole = value_of(head.part, blocks[head.block.name])
        for row in (0, 1, 15, 16, 31, rows.rows - 1):
            span = rows.span(row)
            data = memoryview(blocks[rows.block])[span.src : span.src + span.nbytes]
            np.testing.assert_array_equal(rows.decode(row, data), whole[row])
        with pytest.raises(IndexError):
            rows.span(rows.rows)


@pytest.mark.parametrize("quant", ["none", "q4"])
def test_rows_of_a_table(tmp_path: Path, quant: str) -> None:
    config = tiny_config("qwen3", tie_word_embeddings=False)
    write("qwen3", tmp_path / "m", config=config)
    model, blocks = packed(tmp_path / "m", tmp_path / "p", quant)
    rows = model.rows("model.embed_tokens.weight")
    located = model.tensors["model.embed_tokens.weight"]
    assert rows.read_bytes == located.part.nbytes // rows.rows
    whole = value_of(located.part, blocks[located.block.name])
    for row in (0, 7, rows.rows - 1):
        span = rows.span(row)
        data = memoryview(blocks[rows.block])[span.src : span.src + span.nbytes]
        np.testing.assert_array_equal(rows.decode(row, data), whole[row])


def test_float32_checkpoint_of_a_bfloat16_config(tmp_path: Path) -> None:
    """What is in the files is quantised, not what the config would cast it to."""
    write("qwen3_moe", tmp_path / "m", torch.float32)
    config = tmp_path / "m" / "config.json"
    config.write_text(config.read_text().replace('"float32"', '"bfloat16"'))
    model, blocks = packed(tmp_path / "m", tmp_path / "p", "none")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32).state_dict()
    group = model.experts["model.layers.1.mlp.experts"]
    assert group.part("gate").format == "f32"
    want = whole["model.layers.1.mlp.experts.down_proj"][2].numpy()
    np.testing.assert_array_equal(value_of(group.part("down"), blocks[group.blocks[2]]), want)


def test_sharded_checkpoints(tmp_path: Path) -> None:
    write("qwen3_moe", tmp_path / "one")
    write("qwen3_moe", tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert (
        packed(tmp_path / "one", tmp_path / "a", "q4")[1]
        == packed(tmp_path / "many", tmp_path / "b", "q4")[1]
    )


def test_a_checkpoint_that_changes_meanwhile(tmp_path: Path) -> None:
    write("llama", tmp_path / "m")
    source = CheckpointSource.open(tmp_path / "m")
    weights = next((tmp_path / "m").glob("*.safetensors"))
    weights.touch()
    with pytest.raises(CheckpointError, match="was changed while it was being packed"):
        pack(source, tmp_path / "p", quant="q8")
    source.close()


def test_a_checkpoint_that_is_cut_meanwhile(tmp_path: Path) -> None:
    write("llama", tmp_path / "m")
    source = CheckpointSource.open(tmp_path / "m")
    weights = next((tmp_path / "m").glob("*.safetensors"))
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"more bytes were wanted; it was cut while in use"):
        pack(source, tmp_path / "p", quant="q8")
    source.close()


def test_nan_and_infinite_weights_are_refused(tmp_path: Path) -> None:
    for value in (float("nan"), float("inf"), -float("inf")):
        config = tiny_config("llama")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[3, 5] = value
        name = f"m{value}"
        model.save_pretrained(tmp_path / name)
        with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight has NaN"):
            packed(tmp_path / name, tmp_path / f"p{value}", "q4")
