"""A model written as GGUF and read back: the same config, the same weights, the same logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_cases import CASES, tiny
from gguf_fixtures import write_gguf
from gguf_support import dequantised, load_model, state_dict
from safetensors.torch import load_file

from offload.errors import CheckpointError, UnsupportedModelError
from offload.io.gguf import GGUFFile, read_gguf
from offload.models.gguf_config import config_from_gguf
from offload.models.gguf_generation import generation_defaults
from offload.models.gguf_names import GGUFEntry, Transform, entries_from_gguf
from offload.models.gguf_tokenizer import load_tokenizer


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(2, 34).view(2, 16) * 7 % model.config.vocab_size
    out: torch.Tensor = model(tokens).logits
    return out


# Fields that no computation reads, or that restate others.
_IDLE = {
    "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "eos_token_id",
    "pad_token_id", "dtype", "id2label", "initializer_range", "label2id", "max_window_layers",
    "output_router_logits", "pretraining_tp", "router_aux_loss_coef", "transformers_version",
    "use_cache", "_sliding_window_pattern", "num_nextn_predict_layers", "router_jitter_noise",
    "_attn_implementation", "head_dim", "qkv_bias",
}  # fmt: skip


def fields(config: Any) -> dict[str, Any]:
    out = {k: v for k, v in config.to_dict().items() if k not in _IDLE}
    if not out.get("sliding_window"):
        out.pop("sliding_window", None)
    return out


@pytest.mark.parametrize("case", CASES)
def test_the_same_model(tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture) -> None:
    family, overrides, how = CASES[case]
    model = tiny(family, **overrides)
    file = read_gguf(write_gguf(tmp_path / "m.gguf", model, **how))
    config = config_from_gguf(file)
    assert not caplog.records  # no key is said to be without effect
    assert type(config) is type(model.config)
    read = load_model(tmp_path / "hf", file, config, entries_from_gguf(file, config))
    want, got = model.state_dict(), read.state_dict()
    assert want.keys() == got.keys()
    for name in want:
        if family == "gemma3_text" and name.endswith("norm.weight"):
            torch.testing.assert_close(got[name], want[name], rtol=0, atol=1e-7)
        else:
            assert torch.equal(got[name], want[name]), name
    mine, theirs = fields(config), fields(model.config)
    rope = mine.pop("rope_parameters"), theirs.pop("rope_parameters")
    assert mine == theirs
    for key, value in rope[1].items():
        assert rope[0][key] == value
    torch.testing.assert_close(logits(read), logits(model), rtol=1e-5, atol=1e-5)
    if family != "gemma3_text":
        assert torch.equal(logits(read), logits(model))


QUANTISED = [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1]


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda k: k.name)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_pieces_of_quantised_tensors(tmp_path: Path, family: str, kind: Kind) -> None:
    """Slices, permuted rows and parts land on whole blocks: what is read is what each of the
    model's matrices gives when it is quantised on its own, in the file's orientation."""
    sizes = {"hidden_size": 128, "intermediate_size": 64, "head_dim": 32}
    if family == "deepseek_v3":
        sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "kv_lora_rank": 32,
                 "qk_nope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": 32}  # fmt: skip
    model = tiny(family, **sizes)
    how = {"split_kv_b": True} if family == "deepseek_v3" else {}
    file = read_gguf(write_gguf(tmp_path / "m.gguf", model, kind, **how))
    config = config_from_gguf(file)
    entries = entries_from_gguf(file, config)
    assert {e.type for e in entries} == {"f32", kind.name.lower()}
    plain = read_gguf(write_gguf(tmp_path / "plain.gguf", model, Kind.F32, **how))
    exact = entries_from_gguf(plain, config_from_gguf(plain))
    for mine, original in zip(entries, exact, strict=True):
        assert mine.hf_name == original.hf_name
        assert mine.hf_index == original.hf_index
        got, want = dequantised(file, mine), dequantised(plain, original)
        if mine.type == "f32":
            assert torch.equal(got, want)
            continue
        if mine.transform is Transform.TRANSPOSE:  # blocks run along the stored rows
            got, want = got.T, want.T
        alone = gguf.quants.quantize(want.contiguous().numpy(), kind)
        assert torch.equal(got, torch.from_numpy(gguf.quants.dequantize(alone, kind)))


# What the metadata and the tensors must not be


def damaged(tmp_path: Path, family: str = "qwen3_moe", /, **changes: Any) -> GGUFFile:
    """A sound file with metadata keys replaced, or removed where the value is None, and tensors
    renamed, reshaped or removed."""
    rename = changes.pop("tensors", {})
    file = read_gguf(write_gguf(tmp_path / "m.gguf", tiny(family)))
    metadata = {k: v for k, v in (file.metadata | changes).items() if v is not None}
    tensors = {}
    for name, t in file.tensors.items():
        new = rename.get(name, name)
        if isinstance(new, tuple):
            tensors[name] = t._replace(shape=new)
        elif new is not None:
            tensors[new] = t._replace(name=new)
    return replace(file, metadata=metadata, tensors=tensors)


def opened(file: GGUFFile) -> list[GGUFEntry]:
    return entries_from_gguf(file, config_from_gguf(file))


YARN = {"qwen3.rope.scaling.type": "yarn", "qwen3.rope.scaling.factor": 4.0}

BAD: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "architecture": (
        "llama", {"general.architecture": "mamba"}, UnsupportedModelError,
        "architecture 'mamba' is not supported; supported are deepseek2, gemma3, glm4moe, gpt-oss, "
        "llama, qwen2, qwen2moe, qwen3, qwen3moe",
    ),
    "a long architecture": (
        "llama", {"general.architecture": "x" * 10**5}, UnsupportedModelError,
        "architecture 'x{57}…' is not supported; supported are",
    ),
    "no architecture": (
        "llama", {"general.architecture": None}, CheckpointError, "general.architecture is missing",
    ),
    "no blocks": (
        "qwen3_moe", {"qwen3moe.block_count": None}, CheckpointError,
        "metadata key qwen3moe.block_count is missing",
    ),
    "blocks without end": (
        "gpt_oss", {"gpt-oss.block_count": 2**32 - 1}, CheckpointError,
        r"block_count leaves 4294967295 layers, and the file has \d+ tensors",
    ),
    "heads without end": (
        "llama", {"llama.attention.head_count_kv": 2**31}, CheckpointError,
        r"blk.0.attn_k.weight has the shape .* by the metadata it is \[34359738368, 64\]",
    ),
    "no eps": (
        "llama", {"llama.attention.layer_norm_rms_epsilon": None}, CheckpointError,
        "llama.attention.layer_norm_rms_epsilon is missing",
    ),
    "no heads": (
        "llama", {"llama.attention.head_count": 0}, CheckpointError,
        "llama.attention.head_count is 0, at least 1",
    ),
    "text": (
        "llama", {"llama.block_count": "4"}, CheckpointError, "block_count is '4', not a count",
    ),
    "no number": (
        "llama", {"llama.rope.freq_base": "x"}, CheckpointError, "freq_base is 'x', not a number",
    ),
    "layers differ": (
        "llama", {"llama.attention.head_count_kv": [2, 2, 1, 2]}, UnsupportedModelError,
        "head_count_kv differs from layer to layer",
    ),
    "hidden size": (
        "qwen2", {"qwen2.embedding_length": 32}, CheckpointError,
        "token_embd.weight has rows of 64, qwen2.embedding_length is 32",
    ),
    "experts": (
        "qwen3_moe", {"qwen3moe.expert_used_count": 9}, CheckpointError,
        "expert_used_count is 9 of only 4 experts",
    ),
    "value heads": (
        "qwen3", {"qwen3.attention.value_length": 24}, UnsupportedModelError,
        "keys of 16 and values of 24 elements",
    ),
    "partial rotation": (
        "qwen3", {"qwen3.rope.dimension_count": 8}, UnsupportedModelError, "rotating 8 of the 16",
    ),
    "scaling": (
        "qwen3", {"qwen3.rope.scaling.type": "longrope"}, UnsupportedModelError,
        "scaling of type 'longrope' is not supported",
    ),
    "scaling without factor": (
        "qwen3", {"qwen3.rope.scaling.type": "yarn"}, CheckpointError,
        "qwen3.rope.scaling.factor is missing",
    ),
    "groups of two sizes": (
        "deepseek_v3",
        {"deepseek2.expert_group_count": 3, "deepseek2.expert_group_used_count": 1},
        CheckpointError, "experts in 3 groups, of which 1 are used",
    ),
    "more groups than there are": (
        "deepseek_v3",
        {"deepseek2.expert_group_count": 2, "deepseek2.expert_group_used_count": 3},
        CheckpointError, "in 2 groups, of which 3 are used",
    ),
    "groups of which nobody says how many": (
        "deepseek_v3",
        {"deepseek2.expert_group_count": 2, "deepseek2.expert_group_used_count": None},
        CheckpointError, "expert_group_used_count is missing",
    ),
    "no angles": (
        "llama", {"llama.rope.freq_base": 0.0}, CheckpointError, "freq_base is 0, not above 0",
    ),
    "infinite": (
        "llama", {"llama.rope.freq_base": float("inf")}, CheckpointError, "is inf, not a number",
    ),
    "below zero": (
        "llama", {"llama.attention.layer_norm_rms_epsilon": -1.0}, CheckpointError,
        "layer_norm_rms_epsilon is -1, not a number from 0 on",
    ),
    "scaled by nothing": (
        "qwen3",
        {"qwen3.rope.scaling.type": "yarn", "qwen3.rope.scaling.factor": 0.0,
         "qwen3.rope.scaling.attn_factor": 2.0},
        CheckpointError, "scaling.factor is 0, not above 0",
    ),
    "odd heads": (
        "qwen3", {"qwen3.attention.key_length": 33, "qwen3.attention.value_length": 33},
        CheckpointError, "transformers cannot make a config of its metadata: .* even rotary",
    ),
    "a scale": (
        "llama", {"llama.attention.scale": 0.5}, UnsupportedModelError,
        "llama.attention.scale is 0.5, which is not supported",
    ),
    "a scale that is nothing": (
        "gemma3_text", {"gemma3.attention.scale": 1e-300}, UnsupportedModelError,
        "gemma3.attention.scale is 1e-300, which is not supported",
    ),
    "a scale between": (
        "gemma3_text", {"gemma3.attention.scale": 0.3}, UnsupportedModelError,
        "gemma3.attention.scale is 0.3, which is not supported",
    ),
    "softcapping": (
        "qwen3", {"qwen3.final_logit_softcapping": 30.0}, UnsupportedModelError,
        "final_logit_softcapping is 30.0, which is not supported",
    ),
    "a list of clamps": (
        "gpt_oss", {"gpt-oss.swiglu_clamp_exp": [0.0, 0.0, 7.0, 0.0]}, UnsupportedModelError,
        "gpt-oss.swiglu_clamp_exp is .*, which is not supported",
    ),
    "attention by the length": (
        "deepseek_v3", {"deepseek2.attention.temperature_scale": 0.1}, UnsupportedModelError,
        "deepseek2.attention.temperature_scale is 0.1",
    ),
    "another size behind windows": (
        "gemma3_text", {"gemma3.attention.key_length_swa": 8}, UnsupportedModelError,
        "gemma3.attention.key_length_swa is 8",
    ),
    "part of a head": (
        "gemma3_text", {"gemma3.rope.dimension_count": 8}, UnsupportedModelError,
        "rotating 8 of the 16",
    ),
    "gates of another kind": (
        "qwen3_moe", {"qwen3moe.expert_gating_func": 2}, UnsupportedModelError,
        "qwen3moe.expert_gating_func is 2, which is not supported for it; supported are 1",
    ),
    "gates of Mixtral": (
        "mixtral", {"llama.expert_gating_func": 3}, UnsupportedModelError, "gating_func is 3",
    ),
    "gates of gpt-oss": (
        "gpt_oss", {"gpt-oss.expert_gating_func": 2}, UnsupportedModelError, "gating_func is 2",
    ),
    "gates that nobody knows": (
        "deepseek_v3", {"deepseek2.expert_gating_func": 4}, UnsupportedModelError,
        "deepseek2.expert_gating_func is 4, .* supported are 1, 2",
    ),
    "weights that are not normalised": (
        "mixtral", {"llama.expert_weights_norm": False}, UnsupportedModelError,
        "llama.expert_weights_norm is False",
    ),
    "a factor of attention without YaRN": (
        "qwen3", {"qwen3.rope.scaling.attn_factor": 1.2}, UnsupportedModelError,
        "qwen3.rope.scaling.attn_factor is 1.2, which is not supported",
    ),
    "another one without YaRN": (
        "llama", {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0,
                  "llama.rope.scaling.yarn_attn_factor": 0.5}, UnsupportedModelError,
        "llama.rope.scaling.yarn_attn_factor is 0.5",
    ),
    "a mix without YaRN": (
        "llama", {"llama.rope.scaling.yarn_ext_factor": 1.0}, UnsupportedModelError,
        "llama.rope.scaling.yarn_ext_factor is 1",
    ),
    "half of YaRN": (
        "qwen3", YARN | {"qwen3.rope.scaling.yarn_ext_factor": 0.5}, UnsupportedModelError,
        "qwen3.rope.scaling.yarn_ext_factor is 0.5",
    ),
    "YaRN's factor of attention": (
        "qwen3", YARN | {"qwen3.rope.scaling.yarn_attn_factor": 1.0}, UnsupportedModelError,
        "yarn_attn_factor is 1, where a factor of 4 makes 1.13863",
    ),
    "DeepSeek's YaRN elsewhere": (
        "qwen3", YARN | {"qwen3.rope.scaling.yarn_log_multiplier": 1.0}, UnsupportedModelError,
        "qwen3.rope.scaling.yarn_log_multiplier is 1",
    ),
    "scaling by NTK": (
        "qwen3", {"qwen3.rope.scaling.alpha": 1000.0}, UnsupportedModelError,
        "qwen3.rope.scaling.alpha is 1000",
    ),
    "no window": (
        "gpt_oss", {"gpt-oss.attention.sliding_window": None}, CheckpointError,
        "gpt-oss.attention.sliding_window is missing",
    ),
    "no rank": (
        "deepseek_v2", {"deepseek2.attention.kv_lora_rank": None}, CheckpointError,
        "deepseek2.attention.kv_lora_rank is missing",
    ),
    "gates": (
        "deepseek_v2", {"deepseek2.expert_weights_norm": True}, UnsupportedModelError,
        "softmax gates that are normalised",
    ),
    "missing tensor": (
        "qwen3_moe", {"tensors": {"blk.2.ffn_up_exps.weight": None}}, CheckpointError,
        r"tensor blk.2.ffn_up_exps.weight is missing, .* \[4, 32, 64\]",
    ),
    "shape": (
        "qwen3_moe", {"tensors": {"blk.1.attn_v.weight": (64, 32)}}, CheckpointError,
        r"blk.1.attn_v.weight has the shape \[64, 32\], by the metadata it is \[32, 64\]",
    ),
    "no embedding": (
        "llama", {"tensors": {"token_embd.weight": None}}, CheckpointError, "no matrix token_embd",
    ),
    "a tensor more": (
        "qwen3_moe", {"qwen3moe.block_count": 3}, CheckpointError,
        r"tensor blk\.3\.\w+\.weight is not understood for the architecture 'qwen3moe'",
    ),
    "unknown tensor": (
        "llama", {"tensors": {"output.weight": "output.extra"}}, CheckpointError,
        "tensor output.extra is not understood",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_refused(tmp_path: Path, what: str) -> None:
    family, changes, error, message = BAD[what]
    with pytest.raises(error, match=message):
        opened(damaged(tmp_path, family, **changes))


def test_keys_that_change_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What a file says that is so anyway is taken; of what nobody knows it is said."""
    more = {
        "rope.scaling.yarn_ext_factor": -1.0, "rope.scaling.yarn_attn_factor": 1.13862944,
        "rope.scaling.yarn_log_multiplier": 0.0, "rope.scaling.finetuned": True,
        "expert_gating_func": 0, "attention.temperature_scale": 0.0, "attention.causal": True,
        "attention.key_length_swa": 16, "expert_count": 0, "expert_used_count": 0,
        "swiglu_clamp_exp": [0.0] * 4, "vocab_size": 256,
    }  # fmt: skip
    plain = damaged(tmp_path, "qwen3", **YARN)
    said = {f"qwen3.{key}": value for key, value in more.items()}
    config = config_from_gguf(replace(plain, metadata=plain.metadata | said))
    assert config.to_dict() == config_from_gguf(plain).to_dict()
    assert not caplog.records
    config_from_gguf(replace(plain, metadata=plain.metadata | {"qwen3.new_trick": 3}))
    assert "without effect: qwen3.new_trick" in caplog.text


def test_layers_that_only_predict_ahead_are_left_out(tmp_path: Path) -> None:
    model = tiny("glm4_moe")
    extra = {
        "blk.4.nextn.eh_proj.weight": torch.zeros(64, 128),
        "blk.4.attn_norm.weight": torch.zeros(64),
    }
    file = read_gguf(write_gguf(tmp_path / "m.gguf", model, extra=extra))
    count = {"glm4moe.block_count": 5, "glm4moe.nextn_predict_layers": 1}
    file = replace(file, metadata=file.metadata | count)
    config = config_from_gguf(file)
    assert config.num_hidden_layers == 4
    assert not any("nextn" in e.gguf_name for e in entries_from_gguf(file, config))


def test_one_tensor_per_expert(tmp_path: Path) -> None:
    """Mixtral files of 2023."""
    model = tiny("mixtral")
    stacked = read_gguf(write_gguf(tmp_path / "a.gguf", model))
    extra = {}
    for name in stacked.tensors:
        if (at := name.find("_exps.weight")) > 0:
            stack = torch.frombuffer(bytearray(stacked.read(name)), dtype=torch.float32)
            for e, one in enumerate(stack.view(stacked.tensors[name].shape)):
                extra[f"{name[:at]}.{e}.weight"] = one.contiguous()
    file = read_gguf(write_gguf(tmp_path / "b.gguf", model, extra=extra))
    tensors = {k: v for k, v in file.tensors.items() if "_exps" not in k}
    file = replace(file, tensors=tensors)
    want = state_dict(stacked, opened(stacked))
    got = state_dict(file, opened(file))
    assert want.keys() == got.keys()
    assert all(torch.equal(got[k], want[k]) for k in want)


def test_widths_by_the_tensors_alone(tmp_path: Path) -> None:
    """Qwen MoE files from before the expert keys."""
    file = damaged(
        tmp_path, "qwen2_moe",
        **{"qwen2moe.expert_feed_forward_length": None,
           "qwen2moe.expert_shared_feed_forward_length": None},
    )  # fmt: skip
    config = config_from_gguf(file)
    assert config.moe_intermediate_size == 32
    assert config.shared_expert_intermediate_size == 32
    entries_from_gguf(file, config)


def test_a_factor_without_a_type_is_linear(tmp_path: Path) -> None:
    """As llama.cpp has it; 1 is none."""
    file = read_gguf(write_gguf(tmp_path / "m.gguf", tiny("llama")))
    for key in ("llama.rope.scaling.factor", "llama.rope.scale_linear"):
        for factor, kind in ((4.0, "linear"), (1.0, "default")):
            scaled = replace(file, metadata=file.metadata | {key: factor})
            rope = config_from_gguf(scaled).rope_parameters
            assert rope["rope_type"] == kind
            assert rope.get("factor", 1.0) == factor


def test_any_rope_factors_keep_their_values(tmp_path: Path) -> None:
    """Divisors that no published Llama has: applied as they are."""
    factors = torch.linspace(1, 3, 8)
    model = tiny("llama")
    file = read_gguf(write_gguf(tmp_path / "m.gguf", model, extra={"rope_freqs.weight": factors}))
    config = config_from_gguf(file)
    read = load_model(tmp_path / "hf", file, config, entries_from_gguf(file, config))
    plain: torch.Tensor = model.model.rotary_emb.inv_freq
    torch.testing.assert_close(read.model.rotary_emb.inv_freq, plain / factors)
    assert read.model.rotary_emb.attention_scaling == 1.0


def test_split_model(tmp_path: Path) -> None:
    model = tiny("qwen3_moe", norm_topk_prob=True)
    write_gguf(tmp_path / "m.gguf", model, split_max_tensors=20)
    first = min(tmp_path.glob("m-00001-of-*.gguf"))
    file = read_gguf(first)
    assert len(file.files) > 2
    config = config_from_gguf(file)
    read = load_model(tmp_path / "hf", file, config, entries_from_gguf(file, config))
    assert torch.equal(logits(read), logits(model))


# The repository's own model, with its tokenizer

TINY_MOE = Path(__file__).parents[2] / "examples" / "tiny_moe"


def test_tiny_moe(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(TINY_MOE, dtype=torch.float32)
    path = write_gguf(tmp_path / "m.gguf", model, Kind.BF16, tokenizer=(TINY_MOE, "gpt-2"))
    file = read_gguf(path)
    config, original = config_from_gguf(file), AutoConfig.from_pretrained(TINY_MOE)
    assert fields(config) == fields(original)
    assert config.dtype == original.dtype == torch.bfloat16
    assert config.architectures == original.architectures
    assert config.eos_token_id == original.eos_token_id

    published = load_file(TINY_MOE / "model.safetensors")
    got = state_dict(file, entries_from_gguf(file, config))
    assert got.keys() == published.keys()
    for name, value in published.items():
        assert torch.equal(got[name].to(value.dtype), value), name

    mine, theirs = load_tokenizer(file), AutoTokenizer.from_pretrained(TINY_MOE)
    texts = [
        "",
        "Once upon a time",
        " a  b\n\n\tc",
        "naïve café 日本 🙂",
        "don't 12345<|endoftext|>x",
    ]
    texts += (TINY_MOE / "heldout.txt").read_text().split("\n\n")
    for text in texts:
        assert mine(text).input_ids == theirs(text).input_ids, text
        ids = theirs(text).input_ids
        assert mine.decode(ids) == theirs.decode(ids)
    assert (mine.eos_token, mine.pad_token) == (theirs.eos_token, theirs.pad_token)
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    assert mine.apply_chat_template(messages) == theirs.apply_chat_template(messages)
    published_defaults = GenerationConfig.from_pretrained(TINY_MOE)
    defaults = generation_defaults(file)
    assert defaults["eos_token_id"] == published_defaults.eos_token_id
    assert defaults["pad_token_id"] == published_defaults.pad_token_id
