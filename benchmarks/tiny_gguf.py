"""``examples/tiny_moe`` as a GGUF file, and the values of such a file as a state dict.

Written from the checkpoint's published names with the ``gguf`` package (an optional dependency), as
llama.cpp's converter lays a Qwen3-MoE out: experts of a layer stacked, norms and routers float32.
Reading back with the same package gives the exact values of a quantised file, by nobody's kernels.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip
"""Modules of a layer and what GGUF calls them."""
OUTER = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip

Arrays = dict[str, npt.NDArray[np.float32]]


def write(checkpoint: Path, target: Path, kind: str = "F32") -> Path:
    """Write the checkpoint with its matrices in ``kind``: F32, or what ``gguf`` quantises to."""
    import gguf

    config = json.loads((checkpoint / "config.json").read_text())
    w = gguf.GGUFWriter(target, "qwen3moe")
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_block_count(config["num_hidden_layers"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(config["num_attention_heads"])
    w.add_head_count_kv(config["num_key_value_heads"])
    w.add_key_length(config["head_dim"])
    w.add_value_length(config["head_dim"])
    w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    w.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    w.add_expert_count(config["num_experts"])
    w.add_expert_used_count(config["num_experts_per_tok"])
    w.add_expert_feed_forward_length(config["moe_intermediate_size"])
    w.add_vocab_size(config["vocab_size"])
    _vocabulary(w, checkpoint)
    type_ = gguf.GGMLQuantizationType[kind]
    for name, array in _stacked(checkpoint).items():
        if array.ndim < 2 or "ffn_gate_inp" in name or kind == "F32":
            w.add_tensor(name, array)
        else:
            w.add_tensor(name, gguf.quants.quantize(array, type_), raw_dtype=type_)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return target


def _vocabulary(w: Any, checkpoint: Path) -> None:
    """A byte-level BPE: its words, their kinds and the merges."""
    content = json.loads((checkpoint / "tokenizer.json").read_text())
    words = dict(content["model"]["vocab"])
    special = {t["content"]: t["id"] for t in content["added_tokens"]}
    words.update(special)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    ordered = sorted(words, key=lambda word: words[word])
    w.add_token_list(ordered)
    w.add_token_types([3 if word in special else 1 for word in ordered])
    merges = content["model"]["merges"]
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    w.add_eos_token_id(0)


def _stacked(checkpoint: Path) -> Arrays:
    """Every tensor by its GGUF name, experts ``[E, outputs, inputs]``."""
    from safetensors.torch import load_file

    state = load_file(checkpoint / "model.safetensors")
    values: Arrays = {k: v.float().numpy() for k, v in state.items()}
    out: Arrays = {}
    experts: dict[str, dict[int, npt.NDArray[np.float32]]] = {}
    for name, value in values.items():
        stem = name.removesuffix(".weight")
        if stem in OUTER:
            out[f"{OUTER[stem]}.weight"] = value
        elif found := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)_proj", stem):
            layer, expert, part = found.groups()
            experts.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", {})[int(expert)] = value
        else:
            _, _, layer, module = stem.split(".", 3)
            out[f"blk.{layer}.{NAMES[module]}.weight"] = value
    for name, each in experts.items():
        out[name] = np.stack([each[i] for i in range(len(each))])
    return out


def values(file: Path) -> Arrays:
    """The exact values of a file by the names of transformers' parameters (gate and up fused)."""
    import gguf

    found: Arrays = {}
    for t in gguf.GGUFReader(file).tensors:
        array = gguf.quants.dequantize(t.data, t.tensor_type)
        found[t.name] = np.ascontiguousarray(array, np.float32).reshape(
            [int(n) for n in reversed(t.shape)]
        )
    back = {v: k for k, v in NAMES.items()}
    out: Arrays = {f"{hf}.weight": found.pop(f"{ours}.weight") for hf, ours in OUTER.items()}
    for layer in sorted({name.split(".")[1] for name in found}, key=int):
        start, to = f"blk.{layer}.", f"model.layers.{layer}."
        gate, up, down = (
            found.pop(f"{start}ffn_{part}_exps.weight") for part in ("gate", "up", "down")
        )
        out[f"{to}mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        out[f"{to}mlp.experts.down_proj"] = down
        for name in [n for n in found if n.startswith(start)]:
            module = name.removeprefix(start).removesuffix(".weight")
            out[f"{to}{back[module]}.weight"] = found.pop(name)
    return out


def bits_per_weight(file: Path) -> tuple[float, dict[str, str]]:
    """Of all matrices together, routers included, and the type of each kind of tensor."""
    import gguf

    nbytes = elements = 0
    kinds: dict[str, set[str]] = {}
    for t in gguf.GGUFReader(file).tensors:
        if len(t.shape) > 1:
            nbytes += int(t.n_bytes)
            elements += int(t.n_elements)
            kind = re.sub(r"blk\.\d+\.", "", t.name).removesuffix(".weight")
            kinds.setdefault(kind, set()).add(t.tensor_type.name)
    return 8 * nbytes / elements, {k: "+".join(sorted(v)) for k, v in sorted(kinds.items())}
