"""Checkpoints of models with several parts: whatever transformers makes of their names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence import opened, options, prompt
from families import randomise, write
from safetensors.torch import load_file, save_file

from offload.errors import CheckpointError
from offload.models.load import prepare
from offload.models.meta import build
from offload.models.toy import small_config


def whole(kind: str, directory: Path) -> Path:
    """A tiny model with images, as its class writes it."""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    torch.manual_seed(0)
    model: Any = AutoModelForImageTextToText.from_config(small_config(CONFIG_MAPPING[kind]))
    randomise(model)
    for parameter in model.parameters():  # buffers of rotations may be complex
        parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(directory)
    return directory


def edit_config(directory: Path, **fields: Any) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def check(directory: Path, auto: Any) -> None:
    """The logits of a text are those of transformers, from a RAM tier as small as it can be."""
    ids = prompt()
    model = auto.from_pretrained(
        directory, dtype=torch.bfloat16, experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        want = model(ids).logits
    with opened(prepare(directory, options("cpu"))) as got, torch.no_grad():
        assert type(got).__name__ == type(model).__name__
        assert torch.equal(got(ids).logits, want)


@pytest.mark.parametrize("named", ["nothing", "the causal LM"])
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe", "llama4", "mllama"])
def test_the_text_of_a_model_with_images(tmp_path: Path, kind: str, named: str) -> None:
    """Without a class of its own to name, the auto class takes the causal LM and the text config,
    and conversions take the language model out of the names."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    whole(kind, tmp_path / "m")
    edit_config(tmp_path / "m", architectures=None if named == "nothing" else [CAUSAL[kind]])
    check(tmp_path / "m", AutoModelForCausalLM)


def test_operations_that_ask_for_the_class_of_tensors(tmp_path: Path) -> None:
    """A rotary permutation takes what is no tensor for a list of them: of biases its first number,
    of matrices their first row."""
    import transformers

    check(whole("step3p7", tmp_path / "m"), transformers.AutoModelForImageTextToText)
    found = build(tmp_path / "m")
    file = load_file(tmp_path / "m" / "model.safetensors")
    reference = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "m")
    for name, value in reference.state_dict().items():
        if name in found.mapping.map.sources:
            got = found.mapping.convert(name, file.__getitem__)
            assert torch.equal(got, value), name


def test_names_that_nobody_takes_are_told(tmp_path: Path) -> None:
    """The text config alone beside a whole model's weights: transformers would draw all weights."""
    config = whole("gemma3", tmp_path / "m") / "config.json"
    text = json.loads(config.read_text())["text_config"]
    text |= {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    config.write_text(json.dumps(text))
    weights = tmp_path / "m" / "model.safetensors"
    names = load_file(weights)
    assert not any(name.startswith("model.embed_tokens") for name in names)
    other = next(name for name in names if name.endswith("embed_tokens.weight"))
    with pytest.raises(CheckpointError, match=f"first: model.embed_tokens.weight; .* has {other},"):
        build(tmp_path / "m")
    # A part that is really missing is not taken for another name.
    save_file({"vision.weight": torch.zeros(1)}, weights, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight; config\.json and"):
        build(tmp_path / "m")


def test_a_config_that_says_a_window_layer_by_layer(tmp_path: Path) -> None:
    """transformers' own error that there is none for all layers came through."""
    from transformers import CONFIG_MAPPING, AutoModelForMaskedLM

    if "neomme" not in CONFIG_MAPPING:
        pytest.skip("transformers has no such family")
    model = build(write("neomme", tmp_path / "m", auto=AutoModelForMaskedLM)).model
    with pytest.raises(RuntimeError, match="sliding_window"):
        _ = model.config.sliding_window
