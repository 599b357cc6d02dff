"""Tiny models of every architecture that a GGUF file can have."""

from __future__ import annotations

from typing import Any

import torch
from families import randomise, tiny_config

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # name: family, config overrides, how it is written
    "llama": ("llama", {}, {}),
    "llama with wide heads": ("llama", {"head_dim": 32}, {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "llama 3.1": (
        "llama",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        {},
    ),
    "llama linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        {},
    ),
    "mistral": ("mistral", {}, {}),
    "mixtral": ("mixtral", {"sliding_window": None}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}, {}),
    "qwen3": ("qwen3", {}, {}),
    "qwen3 yarn": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        {},
    ),
    "qwen2_moe": ("qwen2_moe", {}, {}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}, {}),
    "qwen3_moe fused": ("qwen3_moe", {"norm_topk_prob": True}, {"fuse": True}),
    "gpt_oss": ("gpt_oss", {}, {}),
    "gpt_oss fused": ("gpt_oss", {}, {"fuse": True}),
    "deepseek_v2": ("deepseek_v2", {"first_k_dense_replace": 1}, {}),
    "deepseek_v2 without q_lora": ("deepseek_v2", {"q_lora_rank": None}, {}),
    "deepseek_v2 groups": (
        "deepseek_v2",
        {"n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy",
         "routed_scaling_factor": 16.0},
        {"split_kv_b": True},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {"first_k_dense_replace": 1, "n_group": 2, "routed_scaling_factor": 2.5,
         "rope_parameters": {
             "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "mscale": 1.0,
             "mscale_all_dim": 1.0, "original_max_position_embeddings": 64,
             "beta_fast": 32.0, "beta_slow": 1.0,
         }},
        {"split_kv_b": True},
    ),
    "glm4_moe": ("glm4_moe", {"first_k_dense_replace": 1, "use_qk_norm": True}, {}),
    "glm4_moe with biases": ("glm4_moe", {"attention_bias": True}, {}),
    "gemma3": ("gemma3_text", {}, {}),
    "gemma3 linear": (
        "gemma3_text",
        {"rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }},
        {},
    ),
}  # fmt: skip


def tiny(family: str, seed: int = 0, **overrides: Any) -> Any:
    from transformers import AutoModelForCausalLM

    config = tiny_config(family, **overrides)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomise(model, seed)
    with torch.no_grad():
        for name, p in model.named_buffers():
            if "e_score_correction_bias" in name:
                p.copy_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)))
    return model.float().eval()
