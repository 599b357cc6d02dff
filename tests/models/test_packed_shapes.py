"""Packed models of shapes and codes that kernels have nothing for run all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from equivalence import reference
from families import tiny_config, write
from gguf import GGMLQuantizationType as Kind
from gguf_cases import tiny
from gguf_fixtures import write_gguf

import offload
from offload.errors import UnsupportedModelError

IDS = torch.arange(5, 29)[None]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs of its own; compiled kernels are shared."""
    monkeypatch.setattr("offload.models.pack_cache.pack_cache_dir", lambda *_: tmp_path / "pack")


def near_the_reference(directory: Path) -> None:
    with torch.no_grad():
        want = reference(directory, torch.float32)(IDS).logits
        model = offload.load(directory, quant="none", ram="256MiB", context=48)
        try:
            got = model(IDS).logits
            longer = model.generate(IDS, max_new_tokens=3, do_sample=False)
        finally:
            model.offload.close()
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * want.abs().max().item())
    assert longer.shape == (1, IDS.shape[1] + 3)


@pytest.mark.parametrize("family", ["mamba", "jamba"])
def test_weights_that_the_code_multiplies_by_hand(family: str, tmp_path: Path) -> None:
    """``self.dt_proj.weight @ x``: packed bytes would be no tensor for it."""
    near_the_reference(write(family, tmp_path / "m", torch.float32))


def test_a_single_expert(tmp_path: Path) -> None:
    """It is no choice and stays with its layer, which the kernels' own step then leaves alone."""
    config = tiny_config("mixtral", num_local_experts=1, num_experts_per_tok=1)
    near_the_reference(write("mixtral", tmp_path / "m", torch.float32, config=config))


def test_experts_with_an_odd_number_of_columns(tmp_path: Path) -> None:
    """Kernels take 16-bit values in pairs; as float32 the same values are exact."""
    config = tiny_config("qwen3_moe", moe_intermediate_size=33)
    near_the_reference(write("qwen3_moe", tmp_path / "m", torch.bfloat16, config=config))


@pytest.mark.parametrize("quant", ["none", "q8"])
def test_a_tied_table_that_is_too_small_to_pack(quant: str, tmp_path: Path) -> None:
    """Fewer rows than a tile, stored once as they are, for the embedding and the head."""
    config = tiny_config("llama", vocab_size=7, tie_word_embeddings=True)
    directory = write("llama", tmp_path / "m", torch.float32, config=config)
    ids = torch.tensor([[3, 1, 4, 1, 5, 6]])
    with torch.no_grad():
        want = reference(directory, torch.float32)(ids).logits
        model = offload.load(directory, quant=quant, ram="256MiB", context=48)
        try:
            got = model(ids).logits
        finally:
            model.offload.close()
    near = 1e-4 if quant == "none" else 0.1
    torch.testing.assert_close(got, want, rtol=0, atol=near * want.abs().max().item())


def test_padding_that_generate_sees_in_the_prompt(tmp_path: Path) -> None:
    """Without a mask, transformers takes padding tokens in a prompt for padding: what the kernels'
    own cache cannot do, another one does."""
    config = tiny_config("llama", pad_token_id=0)
    directory = write("llama", tmp_path / "m", torch.float32, config=config)
    ids = torch.tensor([[0, 0, 3, 1, 0, 5, 6]])
    asked = {"max_new_tokens": 6, "do_sample": False}
    want = reference(directory, torch.float32).generate(ids, **asked)
    model = offload.load(directory, quant="none", ram="256MiB", context=48)
    try:
        assert torch.equal(model.generate(ids, **asked), want)
    finally:
        model.offload.close()


def test_a_gate_and_an_up_of_two_formats_are_refused_with_a_way_out(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    kinds = {"ffn_up_exps.weight": Kind.Q8_0}
    write_gguf(file, tiny("qwen3_moe"), Kind.Q4_0, kinds=kinds)
    with pytest.raises(UnsupportedModelError, match=r"gate is in q4_0 and the up in q8_0.* use a"):
        offload.load(file, ram="256MiB", context=48)
