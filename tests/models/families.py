"""Tiny random checkpoints of every family of causal language models that transformers has.

A family's config class is shrunk by name (``offload.models.toy.small_config``); ``OVERRIDES`` has
what that cannot guess. Weights are drawn so that logits differ from token to token: with
transformers' own initialisation a tiny model says the same token for ever, and a test that
compares such logits sees little.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from offload.models.toy import small_config

LAYERS = 4

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 50, "encoder_hash_byte_group_size": [3]},
    "cohere_compass_text": {
        "rope_parameters": {
            k: {"rope_type": "default", "rope_theta": 10000.0}
            for k in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
             "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2,
                            "hidden_size": 64}},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": LAYERS - 2, "n_output_layers": 1,
             "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * (LAYERS // 2)},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]], "num_layers": LAYERS},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "mamba2": {"num_heads": 8},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
                       "indexer_budget": 16, "indexer_compress_ratio": 4},
    "reformer": {"is_decoder": True, "axial_pos_embds": False,
                 "attn_layers": ["local", "lsh"] * (LAYERS // 2)},
    "roc_bert": {"shape_vocab_size": 50, "shape_embed_dim": 16, "pronunciation_vocab_size": 50,
                 "pronunciation_embed_dim": 16},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    # Youtu's initialisation overwrites the padding row of embeddings that are already loaded:
    # with a padding token transformers itself does not give the checkpoint's logits.
    "youtu": {"pad_token_id": None},
    "zamba": {"num_hidden_layers": 6, "layers_block_type": ["linear_attention", "hybrid"] * 3,
              "attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4},
    "zamba2": {"num_hidden_layers": 6, "layers_block_type": ["linear_attention", "hybrid"] * 3,
               "attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4,
               "n_mamba_heads": 8},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""Config arguments on top of the generic small ones."""


def tiny_config(family: str, **overrides: Any) -> Any:
    """The config of a tiny model of ``family`` (a transformers ``model_type``)."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family]
    known = kind().to_dict()
    depth = {k: LAYERS for k in ("num_hidden_layers", "n_layer", "n_layers") if k in known}
    return small_config(kind, **{**depth, **OVERRIDES.get(family, {}), **overrides})


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Matrices of unit gain, everything else near what its class makes of it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.dim() >= 2 and not any(k in name for k in ("A_log", "dt_", "time_")):
                fan_in = p.shape[-1] if p.dim() == 2 else p[0].numel() // p.shape[1]
                p.copy_(noise * (1.0 / max(1, fan_in)) ** 0.5)
            elif p.is_floating_point():
                p.add_((0.1 * noise).to(p.dtype))


def write(
    family: str,
    directory: Path,
    dtype: torch.dtype = torch.bfloat16,
    *,
    config: Any = None,
    auto: Any = None,
    seed: int = 0,
    **save: Any,
) -> Path:
    """Write a tiny checkpoint of ``family`` to ``directory``; ``save`` goes to save_pretrained."""
    from transformers import AutoModelForCausalLM

    auto = auto or AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config or tiny_config(family))
    randomise(model, seed)
    model.to(dtype).save_pretrained(directory, **save)
    return directory


CORE = (
    # dense
    "bloom", "codegen", "cohere", "falcon", "gemma", "gemma2", "gemma3_text", "glm4",
    "gpt2", "gpt_neox", "gptj", "llama", "mpt", "olmo2", "opt", "phi", "phi3", "qwen2", "qwen3",
    "smollm3", "stablelm", "starcoder2",
    # state spaces, linear attention, hybrids
    "bamba", "falcon_mamba", "jamba", "mamba", "mamba2", "qwen3_next", "recurrent_gemma", "zamba2",
    # experts
    "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "flex_olmo", "glm4_moe", "gpt_oss",
    "granitemoe", "hunyuan_v1_moe", "jetmoe", "llama4_text", "minimax", "mixtral", "olmoe",
    "phimoe", "qwen2_moe", "qwen3_moe",
)  # fmt: skip
"""Tested at every budget on every device, here or in the sweep."""

FLOAT32_ONLY = frozenset({"xlnet"})
"""Families whose own code mixes in float32: transformers cannot run them in bfloat16."""

UNTESTED = {
    "blt": "transformers cannot run its default config (no num_hidden_layers)",
    "dots3_note": "its config does not shrink: sizes are fixed layer by layer",
    "dots3_note_text": "its config does not shrink: sizes are fixed layer by layer",
    "gemma3n": "its vision tower needs the timm package (gemma3n_text is tested)",
    "gemma4_assistant": "a draft head that runs on another model's cache",
    "gemma4_unified_assistant": "a draft head that runs on another model's cache",
    "musicgen": "its decoder cannot be built from the family's own config",
    "musicgen_melody": "its decoder cannot be built from the family's own config",
    "qwen4_exp": "its config does not shrink (qwen4_exp_text is tested)",
    "rwkv": "its forward divides its own weights in place: it runs only where all of them stay "
    "in RAM, and says so otherwise (test_a_forward_that_changes_weights)",
}
"""Families with no tiny model to compare with, and why. None of them but rwkv is refused."""


def all_families() -> list[str]:
    """Every ``model_type`` that the installed transformers has a causal language model for."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tail() -> list[str]:
    """What is neither in ``CORE`` nor in ``UNTESTED``."""
    return [f for f in all_families() if f not in CORE and f not in UNTESTED]
