"""From the tensors of a GGUF file to the parameters of the transformers model.

The list is written from the model's side: for each layer of the config, every tensor that the
model needs is asked for by its GGUF name and expected shape, and what is left of the file
afterwards must be known to be of no use. So a missing, a misshapen and an unknown tensor are each
an error that names it.

Names and what the converter does to values: ``convert_hf_to_gguf.py`` and ``tensor_mapping.py`` of
github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from offload.io.gguf import GGUFFile
from offload.models.gguf_entries import GGUFEntry, Taker, Transform

__all__ = ["GGUFEntry", "Transform", "entries_from_gguf", "unpermuted_rows"]

# H hidden size, V vocabulary, I width of an FFN, D elements of a head


def entries_from_gguf(gguf: GGUFFile, config: Any) -> list[GGUFEntry]:
    """Every parameter of ``config``'s model, in the order of the layers.

    Args:
        config: from ``config_from_gguf`` of the same file.

    Raises:
        CheckpointError: a tensor is missing, has another shape than the metadata asks for, or is
            not understood (each named).
    """
    take = Taker(gguf)
    H, V = config.hidden_size, config.vocab_size
    minus_one = Transform.MINUS_ONE if config.model_type == "gemma3_text" else Transform.NONE
    take("token_embd.weight", "model.embed_tokens.weight", (V, H))
    for i in range(config.num_hidden_layers):
        layer = _Layer(take, config, i, minus_one)
        _ATTENTION.get(config.model_type, _attention)(layer)
        _FFN.get(config.model_type, _dense)(layer)
    take("output_norm.weight", "model.norm.weight", (H,), transform=minus_one)
    if not config.tie_word_embeddings:
        take("output.weight", "lm_head.weight", (V, H))
    take.check_rest(config.num_hidden_layers)
    return take.entries


@lru_cache
def unpermuted_rows(heads: int, head_dim: int) -> tuple[int, ...]:
    """The stored row of each row of a Q or K projection of the llama architecture.

    The converter interleaves the halves of each head, which llama.cpp rotates as pairs of
    neighbours: stored row ``2 j + s`` of a head is row ``s * head_dim / 2 + j``.
    """
    half = head_dim // 2
    return tuple(
        h * head_dim + 2 * j + s for h in range(heads) for s in range(2) for j in range(half)
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    """Layer ``i``: takes tensors of ``blk.i`` for parameters of ``model.layers.i``."""

    take: Taker
    config: Any
    i: int
    norm: Transform

    def __call__(self, name: str, hf_name: str, shape: tuple[int, ...], **how: Any) -> None:
        self.take(self.gguf(name), self.hf(hf_name), shape, **how)

    def has(self, name: str) -> bool:
        return self.take.has(self.gguf(name))

    def gguf(self, name: str) -> str:
        return f"blk.{self.i}.{name}"

    def hf(self, name: str) -> str:
        return f"model.layers.{self.i}.{name}"

    def norms(self, **names: str) -> None:
        for name, hf_name in names.items():
            shape = (self.config.hidden_size,)
            self(f"{name}.weight", f"{hf_name}.weight", shape, transform=self.norm)


def _head_dim(config: Any) -> int:
    stated: int | None = getattr(config, "head_dim", None)
    return stated or int(config.hidden_size // config.num_attention_heads)


def _attention(layer: _Layer) -> None:
    config = layer.config
    kind = config.model_type
    H, D = config.hidden_size, _head_dim(config)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    permuted = kind in ("llama", "mistral", "mixtral")
    qkv_biased = kind in ("qwen2", "qwen2_moe") or getattr(config, "attention_bias", False)
    layer.norms(attn_norm="input_layernorm")
    for short, n in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        # Before a table of its rows is made: the metadata may promise any number of them.
        layer.take.find(layer.gguf(f"attn_{short}.weight"), (n * D, H))
        rows = unpermuted_rows(n, D) if permuted and short != "v" else None
        hf_name = f"self_attn.{short}_proj"
        layer(f"attn_{short}.weight", f"{hf_name}.weight", (n * D, H), rows=rows)
        if qkv_biased:
            layer(f"attn_{short}.bias", f"{hf_name}.bias", (n * D,), rows=rows)
    layer("attn_output.weight", "self_attn.o_proj.weight", (H, heads * D))
    if kind in ("llama", "gpt_oss") and config.attention_bias:
        layer("attn_output.bias", "self_attn.o_proj.bias", (H,))
    if kind in ("qwen3", "qwen3_moe", "gemma3_text") or getattr(config, "use_qk_norm", False):
        layer("attn_q_norm.weight", "self_attn.q_norm.weight", (D,), transform=layer.norm)
        layer("attn_k_norm.weight", "self_attn.k_norm.weight", (D,), transform=layer.norm)
    if kind == "gpt_oss":
        sinks = "attn_sinks.weight" if layer.has("attn_sinks.weight") else "attn_sinks"
        layer(sinks, "self_attn.sinks", (heads,))
    if kind == "gemma3_text":
        layer.norms(
            post_attention_norm="post_attention_layernorm",
            ffn_norm="pre_feedforward_layernorm",
            post_ffw_norm="post_feedforward_layernorm",
        )
    elif kind in ("gpt_oss", "glm4_moe"):
        layer.norms(post_attention_norm="post_attention_layernorm")
    else:
        layer.norms(ffn_norm="post_attention_layernorm")


def _latent_attention(layer: _Layer) -> None:
    """DeepSeek's: queries, and keys with values, through low ranks."""
    config = layer.config
    H, heads = config.hidden_size, config.num_attention_heads
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    q_rank, rank = config.q_lora_rank, config.kv_lora_rank
    layer.norms(attn_norm="input_layernorm")
    if q_rank:
        layer("attn_q_a.weight", "self_attn.q_a_proj.weight", (q_rank, H))
        layer("attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight", (q_rank,))
        layer("attn_q_b.weight", "self_attn.q_b_proj.weight", (heads * (nope + rope), q_rank))
    else:
        layer("attn_q.weight", "self_attn.q_proj.weight", (heads * (nope + rope), H))
    layer("attn_kv_a_mqa.weight", "self_attn.kv_a_proj_with_mqa.weight", (rank + rope, H))
    layer("attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight", (rank,))
    hf_name, hf_shape = "self_attn.kv_b_proj.weight", (heads * (nope + value), rank)
    if layer.has("attn_kv_b.weight"):
        layer("attn_kv_b.weight", hf_name, hf_shape)
        # Some files have both; the parts say the same once more.
        parts = (layer.gguf("attn_k_b.weight"), layer.gguf("attn_v_b.weight"))
        layer.take.used.update(parts)
    else:
        keys = layer.take.find(layer.gguf("attn_k_b.weight"), (heads, rank, nope))
        values = layer.take.find(layer.gguf("attn_v_b.weight"), (heads, value, rank))
        for h in range(heads):
            at = h * (nope + value)
            layer.take.add(
                keys, layer.hf(hf_name), hf_shape, (slice(at, at + nope),), h * rank, (rank, nope),
                transform=Transform.TRANSPOSE,
            )  # fmt: skip
            at += nope
            layer.take.add(
                values, layer.hf(hf_name), hf_shape, (slice(at, at + value),), h * value,
                (value, rank),
            )  # fmt: skip
    layer("attn_output.weight", "self_attn.o_proj.weight", (H, heads * value))
    layer.norms(ffn_norm="post_attention_layernorm")


def _dense(layer: _Layer, suffix: str = "", hf: str = "mlp", width: int | None = None) -> None:
    """A gated FFN; ``ffn_gate{suffix}`` and its like as ``{hf}.gate_proj`` and its like."""
    H, I = layer.config.hidden_size, width or layer.config.intermediate_size  # noqa: E741
    biased = getattr(layer.config, "mlp_bias", False)
    for part, shape in (("gate", (I, H)), ("up", (I, H)), ("down", (H, I))):
        layer(f"ffn_{part}{suffix}.weight", f"{hf}.{part}_proj.weight", shape)
        if biased:
            layer(f"ffn_{part}{suffix}.bias", f"{hf}.{part}_proj.bias", shape[:1])


def _experts(layer: _Layer, n: int, width: int, hf: str, names: tuple[str, str, str]) -> None:
    """Routed experts as ``{hf}.{e}.{name}.weight``; ``names`` of gate, up and down."""
    H = layer.config.hidden_size
    fused = layer.has("ffn_gate_up_exps.weight")
    for part, name, (rows, columns) in zip(
        ("gate", "up", "down"), names, ((width, H), (width, H), (H, width)), strict=True
    ):
        stack, first, stride = f"ffn_{part}_exps.weight", 0, rows
        if fused and part != "down":
            stack, first, stride = "ffn_gate_up_exps.weight", (part == "up") * rows, 2 * rows
        if layer.has(f"ffn_{part}.0.weight"):  # a file of 2023: one tensor per expert
            for e in range(n):
                shape = (rows, columns)
                layer(f"ffn_{part}.{e}.weight", f"{hf}.{e}.{name}.weight", shape)
            continue
        tensor = layer.take.find(layer.gguf(stack), (n, stride, columns))
        for e in range(n):
            layer.take.add(
                tensor,
                layer.hf(f"{hf}.{e}.{name}.weight"),
                (rows, columns),
                (),
                e * stride + first,
                (rows, columns),
                expert=e,
            )


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _mixtral(layer: _Layer) -> None:
    config = layer.config
    n, H = config.num_local_experts, config.hidden_size
    layer("ffn_gate_inp.weight", "block_sparse_moe.gate.weight", (n, H))
    hf = "block_sparse_moe.experts"
    _experts(layer, n, config.intermediate_size, hf, ("w1", "w3", "w2"))


def _qwen_moe(layer: _Layer) -> None:
    config = layer.config
    n, H = config.num_experts, config.hidden_size
    layer("ffn_gate_inp.weight", "mlp.gate.weight", (n, H))
    _experts(layer, n, config.moe_intermediate_size, "mlp.experts", _PROJECTIONS)
    if config.model_type == "qwen2_moe":
        layer("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight", (1, H))
        _dense(layer, "_shexp", "mlp.shared_expert", config.shared_expert_intermediate_size)


def _deepseek(layer: _Layer) -> None:
    config = layer.config
    if layer.i < config.first_k_dense_replace:
        _dense(layer)
        return
    n, H, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
    layer("ffn_gate_inp.weight", "mlp.gate.weight", (n, H))
    if config.model_type != "deepseek_v2":
        bias = "exp_probs_b.bias" if layer.has("exp_probs_b.bias") else "exp_probs_b"
        layer(bias, "mlp.gate.e_score_correction_bias", (n,))
    _experts(layer, n, width, "mlp.experts", _PROJECTIONS)
    _dense(layer, "_shexp", "mlp.shared_experts", width * config.n_shared_experts)


def _gpt_oss(layer: _Layer) -> None:
    """Stacks that transformers keeps transposed, with gate and up in alternating columns."""
    config = layer.config
    n, H, I = config.num_local_experts, config.hidden_size, config.intermediate_size  # noqa: E741
    layer("ffn_gate_inp.weight", "mlp.router.weight", (n, H))
    layer("ffn_gate_inp.bias", "mlp.router.bias", (n,))
    gate_columns, up_columns = slice(0, None, 2), slice(1, None, 2)
    joined, down = "gate_up_proj", "down_proj"
    fused = layer.has("ffn_gate_up_exps.weight")
    for part, hf, rows, columns, at in (
        ("gate", joined, I, H, gate_columns),
        ("up", joined, I, H, up_columns),
        ("down", down, H, I, slice(None)),
    ):
        stack, first, stride = f"ffn_{part}_exps", 0, rows
        if fused and part != "down":
            stack, first, stride = "ffn_gate_up_exps", (part == "up") * rows, 2 * rows
        width = rows if part == "down" else 2 * rows
        weight = layer.take.find(layer.gguf(f"{stack}.weight"), (n, stride, columns))
        bias = layer.take.find(layer.gguf(f"{stack}.bias"), (n, stride))
        hf_name = layer.hf(f"mlp.experts.{hf}")
        for e in range(n):
            layer.take.add(
                weight, hf_name, (n, columns, width), (e, slice(None), at), e * stride + first,
                (rows, columns), expert=e, transform=Transform.TRANSPOSE,
            )  # fmt: skip
            layer.take.add_run(bias, f"{hf_name}_bias", (n, width), (e, at), e, first, rows)


_ATTENTION: dict[str, Callable[[_Layer], None]] = {
    "deepseek_v2": _latent_attention,
    "deepseek_v3": _latent_attention,
}
_FFN: dict[str, Callable[[_Layer], None]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "glm4_moe": _deepseek,
    "gpt_oss": _gpt_oss,
}
