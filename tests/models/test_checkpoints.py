"""Checkpoints as people have them: whatever transformers makes of one, it is the same streamed."""

from __future__ import annotations

import errno
import io
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence import opened, options, prompt
from families import randomise
from safetensors.torch import load_file, save_file

from offload.errors import CheckpointError, OffloadError, UnsupportedModelError
from offload.io.gguf_header import is_gguf
from offload.io.pack_manifest import is_pack
from offload.models.load import prepare
from offload.models.meta import build, read_config, resolve
from offload.models.pack_checkpoint import CheckpointSource
from offload.models.pack_plan import plan_pack
from offload.train.output_files import updated_config


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A dense model in bfloat16, whose config names no dtype."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        dtype=torch.bfloat16,
    )
    model: Any = LlamaForCausalLM(config)
    randomise(model)
    model.save_pretrained(tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": None}))
    return tmp_path / "m"


def rewrite(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def check(directory: Path) -> torch.dtype:
    """The logits are those of transformers in the dtype that it chooses, which is returned."""
    from transformers import AutoModelForCausalLM

    ids = prompt()
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    with torch.no_grad():
        want = model(ids).logits
    with opened(prepare(directory, options("cpu"))) as got, torch.no_grad():
        logits = got(ids).logits
    assert logits.dtype == want.dtype
    assert torch.equal(logits, want)
    return model.dtype


def test_the_dtype_of_several_is_that_of_the_first_name(tiny: Path) -> None:
    """Files have the wide ones first, whatever their names; 8 bits are none to compute in."""
    tensors = load_file(tiny / "model.safetensors")
    wide = {k: v.float() if "norm" in k else v.bfloat16() for k, v in tensors.items()}
    rewrite(tiny, wide)
    assert check(tiny) == torch.bfloat16
    rewrite(tiny, wide | {"lm_head.weight": tensors["lm_head.weight"].to(torch.float8_e4m3fn)})
    assert check(tiny) == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64])
def test_codes_of_nothing_known_are_no_weights(tiny: Path, dtype: torch.dtype) -> None:
    tensors, name = load_file(tiny / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    rewrite(tiny, tensors | {name: tensors[name].to(dtype)})
    with pytest.raises(UnsupportedModelError, match=r"up_proj.*codes.* use the unquantised"):
        build(tiny)


@pytest.mark.parametrize("quant", ["none", "q4"])
def test_wide_weights_are_not_packed(tiny: Path, quant: str) -> None:
    """No kernel has them; they were kept as they are, and so was a whole model."""
    tensors = load_file(tiny / "model.safetensors")
    rewrite(tiny, {name: value.double() for name, value in tensors.items()})
    with pytest.raises(UnsupportedModelError, match=r"float64.* make a copy .* in bfloat16"):
        plan_pack(CheckpointSource.open(tiny), quant)
    assert check(tiny) == torch.float64


def test_the_dtype_of_the_index(tiny: Path) -> None:
    tensors = load_file(tiny / "model.safetensors")
    (tiny / "model.safetensors").rename(tiny / "model-00001-of-00001.safetensors")
    (tiny / "model.safetensors.index.json").write_text(
        json.dumps(
            {
                "metadata": {"dtype": "float16"},
                "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors"),
            }
        )
    )
    assert check(tiny) == torch.float16


def test_one_parameter_under_two_names_is_the_first(tiny: Path, caplog: Any) -> None:
    tensors = load_file(tiny / "model.safetensors")
    name = "model.embed_tokens.weight"
    rewrite(tiny, tensors | {"embed_tokens.weight": tensors[name] * 2})
    check(tiny)
    assert f"the first is {name}" in caplog.text
    assert build(tiny).mapping.map.sources[name].tensors == ("embed_tokens.weight",)


def test_a_config_is_utf8_in_any_locale(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tiny / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | {"_name_or_path": "modèle"}
    file.write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    # What Python takes where nobody says an encoding and the locale is "C".
    monkeypatch.setattr(io, "text_encoding", lambda asked, *_: asked or "ascii")
    assert read_config(tiny).model_type == config["model_type"]


def test_a_config_that_nests_without_end_is_refused(tiny: Path) -> None:
    (tiny / "config.json").write_text('{"a": ' + "[" * 100_000)
    for read in (read_config, partial(updated_config, dtype=None)):
        with pytest.raises(CheckpointError, match=r"config\.json cannot be read: maximum recur"):
            read(tiny)


@pytest.mark.parametrize("closed", ["the directory", "the one around it"])
def test_a_directory_without_permission_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    """As root nothing is closed, so the system's answer is made."""
    real = os.stat
    folder = tmp_path / "m"
    folder.mkdir()

    def stat(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        name = os.fspath(path)
        inside = isinstance(name, str) and name.startswith(f"{folder}/")
        if inside or (closed == "the one around it" and name == str(folder)):
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(OffloadError, match=f"cannot read {folder}: Permission denied; give a"):
        resolve(folder)
    assert not is_pack(folder)
    assert is_gguf(folder / "m.gguf")  # by its name; whoever opens it says why it cannot be


def test_an_adapter_beside_weights_is_refused(tiny: Path) -> None:
    """transformers runs both, and the weights alone are another model."""
    (tiny / "adapter_config.json").write_text("{}")
    with pytest.raises(
        UnsupportedModelError, match=r"merge_and_unload.* move adapter_config\.json"
    ):
        build(tiny)


def test_an_adapter_is_no_model(tiny: Path) -> None:
    """Alone, or beside a config and no weights."""
    (tiny / "model.safetensors").rename(tiny / "adapter_model.safetensors")
    (tiny / "adapter_config.json").write_text("{}")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"an adapter of PEFT, .*merge_and_unload"):
            build(tiny)
        (tiny / "config.json").unlink(missing_ok=True)


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"]
)
def test_a_link_that_leads_nowhere_is_no_missing_file(tiny: Path, name: str) -> None:
    """Half of a download in the hub's cache: the model ran with other settings, or was none."""
    (tiny / name).unlink(missing_ok=True)
    (tiny / name).symlink_to("../../blobs/0123")
    with pytest.raises(CheckpointError, match=f"{name} is a link to ../../blobs/0123, which is"):
        prepare(tiny, options("cpu"))
