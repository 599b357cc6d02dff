"""Writes a transformers model as a GGUF file, as llama.cpp's converter would.

An independent description of the same facts as ``offload.models.gguf_*``, in the converter's
direction: what it does to metadata keys, names and values. ``gguf.GGUFWriter`` writes the file and
``gguf.quants`` quantises.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

Tensors = dict[str, torch.Tensor]

ARCH = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "glm4_moe": "glm4moe",
    "gemma3_text": "gemma3",
}  # fmt: skip


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What the converter does to Q and K of the llama architecture."""
    half = weight.shape[0] // heads // 2
    split = weight.reshape(heads, 2, half, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


def to_gguf_tensors(model: Any, *, split_kv_b: bool = False, fuse: bool = False) -> Tensors:
    """The tensors of the file by GGUF name. ``split_kv_b`` as files of DeepSeek since 2025,
    ``fuse`` with gate and up of the experts as one tensor."""
    config, state = model.config, model.state_dict()
    kind = config.model_type
    out: Tensors = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        out["output.weight"] = state["lm_head.weight"]
    for i in range(config.num_hidden_layers):
        start = f"model.layers.{i}."
        layer = {k.removeprefix(start): v for k, v in state.items() if k.startswith(start)}
        converted = _layer(kind, config, layer, split_kv_b, fuse)
        out |= {f"blk.{i}.{k}": v for k, v in converted.items()}
    if kind == "gemma3_text":
        out = {k: v + 1 if k.endswith("norm.weight") else v for k, v in out.items()}
    return {k: v.detach().float().contiguous() for k, v in out.items()}


_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip


def _layer(kind: str, config: Any, layer: Tensors, split_kv_b: bool, fuse: bool) -> Tensors:
    names = dict(_NAMES)
    if kind in ("gemma3_text", "gpt_oss", "glm4_moe"):
        names["post_attention_layernorm"] = "post_attention_norm"
    if kind == "gemma3_text":
        names["pre_feedforward_layernorm"] = "ffn_norm"
        names["post_feedforward_layernorm"] = "post_ffw_norm"
    out: Tensors = {}
    for name, value in layer.items():
        if name == "self_attn.sinks":
            out["attn_sinks.weight"] = value
        elif name == "mlp.gate.e_score_correction_bias":
            out["exp_probs_b.bias"] = value
        elif name.startswith("mlp.experts."):
            out |= _experts(kind, name.removeprefix("mlp.experts."), value, fuse)
        else:
            stem, _, suffix = name.rpartition(".")
            if kind in ("llama", "mistral", "mixtral"):
                if stem == "self_attn.q_proj":
                    value = permute(value, config.num_attention_heads)
                elif stem == "self_attn.k_proj":
                    value = permute(value, config.num_key_value_heads)
            if stem == "mlp.shared_expert_gate":
                value = value.squeeze(0)
            out[f"{names[stem]}.{suffix}"] = value
    if split_kv_b:
        nope, rank = config.qk_nope_head_dim, config.kv_lora_rank
        heads = out.pop("attn_kv_b.weight").view(config.num_attention_heads, -1, rank)
        out["attn_k_b.weight"] = heads[:, :nope].transpose(1, 2)
        out["attn_v_b.weight"] = heads[:, nope:]
    return out


def _experts(kind: str, name: str, value: torch.Tensor, fuse: bool) -> Tensors:
    """``value`` is a stack in the module's layout."""
    part, _, bias = name.partition("_proj")
    suffix = "bias" if bias else "weight"
    if kind == "gpt_oss":
        if not bias:
            value = value.transpose(1, 2)
        gate, up = value[:, 0::2], value[:, 1::2]
    else:
        gate, up = value.chunk(2, dim=1)
    if part == "down":
        return {f"ffn_down_exps.{suffix}": value}
    if fuse:
        return {f"ffn_gate_up_exps.{suffix}": torch.cat([gate, up], dim=1)}
    return {f"ffn_gate_exps.{suffix}": gate, f"ffn_up_exps.{suffix}": up}


def _metadata(w: gguf.GGUFWriter, config: Any, *, mla: bool) -> None:
    kind, arch = config.model_type, ARCH[config.model_type]
    deepseek = kind.startswith("deepseek")
    w.add_context_length(config.max_position_embeddings)
    w.add_embedding_length(config.hidden_size)
    w.add_block_count(config.num_hidden_layers)
    w.add_feed_forward_length(config.intermediate_size)
    w.add_head_count(config.num_attention_heads)
    w.add_head_count_kv(1 if mla else config.num_key_value_heads)
    w.add_layer_norm_rms_eps(config.rms_norm_eps)
    w.add_vocab_size(config.vocab_size)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    w.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        w.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        w.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "mscale_all_dim" in rope:
            w.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    head_dim = getattr(config, "head_dim", None)
    if kind == "glm4_moe":  # its published configs say it, a small one may not
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
    if deepseek:
        key = config.qk_nope_head_dim + config.qk_rope_head_dim
        w.add_kv_lora_rank(config.kv_lora_rank)
        if config.q_lora_rank:
            w.add_q_lora_rank(config.q_lora_rank)
        w.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim if mla else key)
        w.add_value_length(config.kv_lora_rank if mla else config.v_head_dim)
        if mla:
            w.add_key_length_mla(key)
            w.add_value_length_mla(config.v_head_dim)
        w.add_rope_dimension_count(config.qk_rope_head_dim)
    elif kind in ("llama", "mistral", "mixtral"):
        w.add_rope_dimension_count(head_dim)
        if head_dim * config.num_attention_heads != config.hidden_size:
            w.add_key_length(head_dim)
            w.add_value_length(head_dim)
    elif head_dim:
        w.add_key_length(head_dim)
        w.add_value_length(head_dim)
    if kind == "glm4_moe":
        w.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    if kind in ("gemma3_text", "gpt_oss", "mistral") or getattr(config, "sliding_window", None):
        w.add_sliding_window(config.sliding_window)
    if kind in ("gemma3_text", "gpt_oss"):
        slides = [t == "sliding_attention" for t in config.layer_types]
        w.add_array(f"{arch}.attention.sliding_window_pattern", slides)
    experts = next(
        (n for k in ("num_local_experts", "num_experts", "n_routed_experts")
         if (n := getattr(config, k, None))), None,
    )  # fmt: skip
    if not experts:
        return
    w.add_expert_count(experts)
    w.add_expert_used_count(config.num_experts_per_tok)
    width = getattr(config, "moe_intermediate_size", None)
    if kind == "gpt_oss":
        width = config.intermediate_size
    if width:
        w.add_expert_feed_forward_length(width)
    if kind == "qwen2_moe":
        w.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if deepseek or kind == "glm4_moe":
        w.add_leading_dense_block_count(config.first_k_dense_replace)
        w.add_expert_shared_count(config.n_shared_experts)
        w.add_expert_weights_scale(config.routed_scaling_factor)
        w.add_expert_weights_norm(config.norm_topk_prob)
        w.add_uint32(f"{arch}.expert_gating_func", 1 if kind == "deepseek_v2" else 2)
        w.add_uint32(f"{arch}.expert_group_count", config.n_group)
        w.add_uint32(f"{arch}.expert_group_used_count", config.topk_group)


def llama3_rope_freqs(config: Any) -> torch.Tensor:
    """The divisors that the converter writes for Llama 3.1's scaling."""
    rope = config.rope_parameters
    base, n = rope["rope_theta"], config.head_dim
    length = rope["original_max_position_embeddings"]
    low, high = length / rope["low_freq_factor"], length / rope["high_freq_factor"]
    out = []
    for i in range(0, n, 2):
        wavelength = 2 * math.pi * base ** (i / n)
        if wavelength < high:
            out.append(1.0)
        elif wavelength > low:
            out.append(rope["factor"])
        else:
            smooth = (length / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            out.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return torch.tensor(out)


def add_byte_level_tokenizer(w: gguf.GGUFWriter, directory: Path, pre: str) -> None:
    """The vocabulary of a directory with a byte-level ``tokenizer.json``."""
    content = json.loads((directory / "tokenizer.json").read_text())
    vocab = dict(content["model"]["vocab"])
    types = {}
    for token in content["added_tokens"]:
        vocab[token["content"]] = token["id"]
        types[token["id"]] = 3 if token["special"] else 4
    tokens = sorted(vocab, key=lambda t: vocab[t])
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    w.add_token_list(tokens)
    w.add_token_types([types.get(vocab[t], 1) for t in tokens])
    merges = content["model"]["merges"]
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    for key in ("eos", "bos", "pad"):
        token = settings.get(f"{key}_token")
        if token is not None:
            getattr(w, f"add_{key}_token_id")(vocab[token])
    template = directory / "chat_template.jinja"
    if template.is_file():
        w.add_chat_template(template.read_text())


SCALES = {
    Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,),
    Kind.IQ4_NL: (0,), Kind.IQ4_XS: (0,), Kind.IQ2_XXS: (0,), Kind.IQ3_S: (0,), Kind.TQ2_0: (64,),
}  # fmt: skip
"""Where blocks have their float16 scales: types that ``gguf.quants`` cannot quantise to."""


def random_blocks(shape: tuple[int, ...], kind: Kind, seed: int) -> np.ndarray:
    """Rows of random bits with scales that real weights have."""
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(seed)
    count = math.prod(shape) // elements
    blocks = draw.integers(0, 256, (count, nbytes), dtype=np.uint8)
    if kind is Kind.MXFP4:
        blocks[:, 0] = draw.integers(118, 124, count)  # 2^-9 to 2^-3
    if kind.name == "NVFP4":  # four scales, unsigned E4M3
        blocks[:, :4] = draw.integers(1, 9, (count, 4))  # 2^-9 to 2^-6
    for at in SCALES.get(kind, ()):
        scale = draw.uniform(0.001, 0.002, count).astype(np.float16)
        blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(*shape[:-1], -1)


def write_gguf(
    path: Path,
    model: Any,
    kind: Kind = Kind.F32,
    *,
    split_kv_b: bool = False,
    fuse: bool = False,
    tokenizer: tuple[Path, str] | None = None,
    extra: dict[str, torch.Tensor] | None = None,
    kinds: dict[str, Kind] | None = None,
    templates: list[dict[str, str]] | None = None,
    **writer: Any,
) -> Path:
    """Write ``model`` with its matrices in ``kind`` (vectors and routers in F32, as llama.cpp).

    ``kinds``: of tensors whose names end so, whatever they are. Kinds that ``gguf.quants`` cannot
    quantise to get random bits. ``templates``: named chat templates, as ``GGUFWriter`` takes them.
    """
    config = model.config
    w = gguf.GGUFWriter(path, ARCH[config.model_type], **writer)
    _metadata(w, config, mla=split_kv_b)
    if tokenizer:
        add_byte_level_tokenizer(w, *tokenizer)
    if templates:
        w.add_chat_template(templates)
    tensors = to_gguf_tensors(model, split_kv_b=split_kv_b, fuse=fuse) | (extra or {})
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = llama3_rope_freqs(config)
    for name, value in tensors.items():
        array = np.ascontiguousarray(value.numpy())
        stays = array.ndim < 2 or "ffn_gate_inp" in name or name.endswith(".bias")
        mine = Kind.F32 if stays or array.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] else kind
        mine = next((k for end, k in (kinds or {}).items() if name.endswith(end)), mine)
        if mine is Kind.F32:
            w.add_tensor(name, array)
        elif mine in SCALES or mine.name in ("MXFP4", "NVFP4"):
            blocks = random_blocks(array.shape, mine, len(name))
            w.add_tensor(name, blocks, raw_dtype=mine)
        else:
            w.add_tensor(name, gguf.quants.quantize(array, mine), raw_dtype=mine)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path
