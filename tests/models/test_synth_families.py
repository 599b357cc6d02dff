"""synth against transformers itself: names, shapes and behaviour of one tiny model per family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from offload.models.synth import synth

DENSE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2: dict[str, Any] = {
    "vocab_size": 160,
    "n_positions": 128,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
QWEN_MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "head_dim": 16,
}
DELTA_NET: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
LOCAL: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2}

FAMILIES: dict[str, dict[str, Any]] = {
    # dense
    "llama": DENSE,
    "llama-tied": DENSE | {"tie_word_embeddings": True},
    "mistral": DENSE | {"head_dim": 16},
    "qwen2": DENSE,
    "qwen3": DENSE | {"head_dim": 16},
    "gemma2": DENSE | {"head_dim": 16},
    "gemma3_text": DENSE | {"head_dim": 16},
    "gpt2": GPT2,
    "opt": DENSE | {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "gpt_neox": DENSE,
    "phi": DENSE,
    "phi3": DENSE,
    "olmo2": DENSE,
    "cohere": DENSE,
    "falcon": DENSE | {"num_kv_heads": 2},
    "bloom": DENSE | {"n_head": 4, "n_layer": 4},
    "mamba": {"vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 4},
    "mamba2": {
        "vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 4, "num_heads": 8,
        "head_dim": 16, "n_groups": 1, "state_size": 16,
    },
    # mixtures of experts
    "mixtral": DENSE | LOCAL,
    "qwen2_moe": DENSE | QWEN_MOE,
    "qwen3_moe": DENSE | QWEN_MOE,
    "olmoe": DENSE | {"num_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v2": DENSE | MLA | {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    },
    "deepseek_v3": DENSE | MLA | {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
    },
    "gpt_oss": DENSE | LOCAL | {"head_dim": 16, "sliding_window": 32},
    "granitemoe": DENSE | LOCAL,
    "qwen3_next": DENSE | QWEN_MOE | DELTA_NET,
    "glm4_moe": DENSE | {
        "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1,
    },
    "phimoe": DENSE | LOCAL,
    "jamba": DENSE | {
        "num_experts": 8, "num_experts_per_tok": 2, "use_mamba_kernels": False,
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
}  # fmt: skip


def write_config(folder: Path, family: str, **changes: Any) -> Path:
    """A folder with the family's tiny config.json, as transformers writes it."""
    model_type = family.removesuffix("-tied")
    config = AutoConfig.for_model(model_type, **FAMILIES[family], **changes)
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)
    return folder


def stored(folder: Path) -> dict[str, tuple[list[int], str]]:
    """Name -> (shape, dtype) of every tensor in the folder's safetensors files."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118  (not a dict)
                part = shard.get_slice(name)
                found[name] = (part.get_shape(), part.get_dtype())
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_family_loads_and_computes(family: str, tmp_path: Path) -> None:
    source = write_config(tmp_path / "config", family)
    out = tmp_path / "out"
    report = synth(source, out, dtype="bfloat16", seed=3)

    model, loading = AutoModelForCausalLM.from_pretrained(
        out, dtype="auto", output_loading_info=True
    )
    assert type(model).__name__ == report.architecture
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not loading[problem], (problem, loading[problem])

    ids_BT = torch.arange(3, 51).view(2, 24)
    with torch.no_grad():
        logits_BTV = model.eval()(input_ids=ids_BT).logits.float()
    assert logits_BTV.isfinite().all()
    assert logits_BTV.std(dim=-1).min() > 0.01
    # The context matters, not only the last token.
    ids_BT[:, -1] = 5
    with torch.no_grad():
        last_BV = model(input_ids=ids_BT).logits[:, -1].float()
    assert not torch.equal(last_BV[0], last_BV[1])

    # The published form is what the family's own save writes.
    model.save_pretrained(tmp_path / "saved")
    assert stored(out) == stored(tmp_path / "saved")


OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "encoder": (
        "bert", "BertForMaskedLM",
        {"vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 96},
    ),
    "encoder-decoder": (
        "t5", "T5ForConditionalGeneration",
        {"vocab_size": 160, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2,
         "num_heads": 4},
    ),
    "image": (
        "vit", "ViTForImageClassification",
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 96, "image_size": 32, "patch_size": 8},
    ),
    "image-and-text": (
        "gemma3", "Gemma3ForConditionalGeneration",
        {"text_config": DENSE | {"head_dim": 16},
         "vision_config": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                           "intermediate_size": 96, "image_size": 56, "patch_size": 14},
         "mm_tokens_per_image": 4},
    ),
    "text-of-a-composite": (
        "qwen3_5_moe", "Qwen3_5MoeForCausalLM",
        {"text_config": DENSE | QWEN_MOE | DELTA_NET | {"num_hidden_layers": 4},
         "vision_config": {"hidden_size": 64, "depth": 2, "num_heads": 4, "intermediate_size": 96,
                           "out_hidden_size": 64}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_other_kinds_of_model(kind: str, tmp_path: Path) -> None:
    model_type, architecture, keys = OTHERS[kind]
    config = AutoConfig.for_model(model_type, **keys)
    config.architectures = [architecture]
    config.save_pretrained(tmp_path / "config")
    report = synth(tmp_path / "config", tmp_path / "out", dtype="float32")
    assert report.architecture == architecture
    model, loading = getattr(transformers, architecture).from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not loading[problem], (problem, loading[problem])
    assert all(p.isfinite().all() for p in model.parameters())
    model.save_pretrained(tmp_path / "saved")
    assert stored(tmp_path / "out") == stored(tmp_path / "saved")


def test_published_names_are_per_expert(tmp_path: Path) -> None:
    source = write_config(tmp_path / "config", "qwen3_moe")
    synth(source, tmp_path / "out")
    names = stored(tmp_path / "out")
    assert names["model.layers.3.mlp.experts.7.gate_proj.weight"] == ([32, 64], "BF16")
    assert not any("gate_up_proj" in name for name in names)


def test_family_neutral_norms(tmp_path: Path) -> None:
    """Norm weights are each family's neutral value: 1 for llama, 0 for gemma's (1 + weight)."""
    for family, neutral in (("llama", 1.0), ("gemma2", 0.0)):
        out = tmp_path / family
        synth(write_config(tmp_path / f"{family}-config", family), out)
        with safe_open(out / "model.safetensors", "pt") as shard:
            weight = shard.get_tensor("model.layers.0.input_layernorm.weight")
        assert weight.eq(neutral).all()


def test_experts_are_chosen_about_evenly(tmp_path: Path) -> None:
    source = write_config(tmp_path / "config", "qwen3_moe")
    out = tmp_path / "out"
    synth(source, out, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        found = model(
            input_ids=torch.randint(160, (16, 64)), output_router_logits=True
        ).router_logits
    assert len(found) == 4
    for logits_TE in found:
        share = torch.bincount(logits_TE.topk(2).indices.flatten(), minlength=8) / (16 * 64 * 2)
        assert share.min() > 1 / 8 / 3
        assert share.max() < 3 / 8


def test_deep_model_stays_finite_in_bfloat16(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", **(DENSE | {"num_hidden_layers": 96}))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "config")
    synth(tmp_path / "config", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    assert model.dtype == torch.bfloat16
    with torch.no_grad():
        logits = model(input_ids=torch.arange(3, 43)[None]).logits.float()
    assert logits.isfinite().all()
    assert 0.1 < logits.std() < 10.0


def test_config_keeps_the_users_keys(tmp_path: Path) -> None:
    source = write_config(tmp_path / "config", "qwen3_moe")
    raw = json.loads((source / "config.json").read_text())
    raw["torch_dtype"] = "float16"
    raw.pop("dtype", None)
    raw["a_key_of_the_user"] = 7
    (source / "config.json").write_text(json.dumps(raw))
    report = synth(source, tmp_path / "out")
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    assert report.dtype == made["dtype"] == "float16"
    assert "torch_dtype" not in made
    assert made["a_key_of_the_user"] == 7
    assert {dtype for _, dtype in stored(tmp_path / "out").values()} == {"F16"}
