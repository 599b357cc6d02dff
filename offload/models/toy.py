"""A two-layer toy of a family, and what it shows of a process (``baseline`` runs it)."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)

TOY_BYTES = 8 * 2**20
"""A toy is at most this large."""

_SMALL: dict[str, Any] = {
    # depth
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "num_blocks": 2,
    "encoder_layers": 2, "decoder_layers": 2, "num_encoder_layers": 2, "num_decoder_layers": 2,
    # width
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "word_embed_proj_dim": 64, "emb_dim": 64,
    "embedding_size": 64, "input_embedding_size": 64, "output_embedding_size": 64,
    "embedding_dim": 64, "attention_hidden_size": 64, "lru_width": 64,
    "intermediate_size": 96, "ffn_dim": 96, "n_inner": 96, "d_ff": 96, "dff": 96, "d_inner": 96,
    "ffn_hidden_size": 96, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "feed_forward_size": 96,
    "dim_ff": 96, "intermediate_size_mlp": 96, "dense_intermediate_size": 96,
    # heads
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "attention_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "num_query_groups": 2,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16,
    "head_dim": 16, "d_kv": 16, "dim_head": 16, "d_head": 16, "attention_head_size": 16,
    "attention_head_dim": 16, "kv_channels": 16, "rotary_dim": 8, "query_pre_attn_scalar": 16,
    "q_lora_rank": 16, "kv_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "qk_head_dim": 24, "v_head_dim": 16,
    "index_head_dim": 16, "index_n_heads": 2, "index_topk": 16,
    # linear attention and state spaces
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_num_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_head_dim": 16,
    "state_size": 8, "mamba_d_state": 8, "ssm_state_size": 8, "time_step_rank": 4,
    "mamba_dt_rank": 4, "mamba_n_heads": 8, "mamba_num_heads": 8, "n_mamba_heads": 2,
    "mamba_d_head": 16, "mamba_head_dim": 16, "mamba_headdim": 16, "mamba_d_ssm": 128,
    "n_groups": 1, "mamba_n_groups": 1, "mamba_ngroups": 1, "chunk_size": 16,
    "mamba_chunk_size": 16, "adapter_rank": 8, "laurel_rank": 8,
    # experts
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32, "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32, "shared_experts_intermediate_size": 32,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2,
    "n_group": 1, "topk_group": 1, "num_expert_group": 1, "n_shared_experts": 1,
    "first_k_dense_replace": 0, "zero_expert_num": 2, "router_hidden_size": 32,
    # lengths and vocabulary
    "vocab_size": 256, "vocab_size_per_layer_input": 256, "decoder_vocab_size": 256,
    "hidden_size_per_layer_input": 16, "unpadded_vocab_size": 256,
    "max_position_embeddings": 256, "n_positions": 256, "max_seq_len": 256, "n_ctx": 256,
    "max_source_positions": 64, "max_target_positions": 256, "context_length": 256,
    "sliding_window": 8, "sliding_window_size": 8, "attention_window_size": 8, "window_size": 8,
    "local_attention": 8, "attention_chunk_size": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
"""Small numbers for every name that families give to the same few quantities."""


def small_config(kind: type, **overrides: Any) -> Any:
    """A tiny config of class ``kind``: few layers, narrow, a vocabulary of 256.

    Whatever the class calls its sizes is found by name among its attributes; nested configs
    (``text_config``, ...) are shrunk the same way. ``overrides`` go on top.

    Raises:
        Exception: whatever the class raises if these numbers do not go together.
    """
    default = kind()
    known = default.to_dict()
    small = {k: v for k, v in _SMALL.items() if k in known}
    if "qk_rope_head_dim" in known:
        # Latent attention: every head has its own keys, and ``head_dim`` is the rotary part's.
        small["num_key_value_heads"] = small.get("num_attention_heads", 4)
        small["head_dim"] = small["qk_rope_head_dim"]
    if "num_kv_shared_layers" in known:
        small["num_kv_shared_layers"] = 0
    layers = overrides.get("num_hidden_layers", _SMALL["num_hidden_layers"])
    for name, value in known.items():
        # One kind for each layer (attention, mamba, sparse, ...): the few there are, in turn.
        if isinstance(value, list) and len(value) == known.get("num_hidden_layers"):
            kinds = list(dict.fromkeys(v for v in value if isinstance(v, str)))
            if kinds:
                small[name] = [kinds[i % len(kinds)] for i in range(layers)]
    small = {k: v for k, v in small.items() if k in known}
    for name in getattr(kind, "sub_configs", {}):
        part = getattr(default, name, None)
        if part is not None and name not in overrides:
            small[name] = small_config(type(part))
    return kind(**{**small, **overrides})


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


def toy_config(config: Any, experts: int | None = None) -> Any | None:
    """A tiny config of the same class, or None if the family refuses these numbers.

    Args:
        experts: how many a token is routed to; None: two.
    """
    more: dict[str, Any] = {}
    if experts is not None:
        text = config.get_text_config()
        more = {name: 2 * experts for name in _EXPERTS if hasattr(text, name)}
        more |= {name: experts for name in _PER_TOKEN if hasattr(text, name)}
        if text is not config or not more:
            return None
    try:
        return small_config(type(config), **more)
    except Exception as error:  # noqa: BLE001  config classes validate in their own ways
        logger.info("no toy of %s: %s", type(config).__name__, error)
        return None


def two_layers(config: Any, model_cls: Any, dtype: torch.dtype) -> Any | None:
    """The first two layers of a model that is small itself, so that the kernels compiled for its
    shapes count as what they are: code, not weights. None for large models and other families."""
    small = copy.deepcopy(config)
    if getattr(small, "num_hidden_layers", 0) <= 2:
        return None
    try:
        small.num_hidden_layers = 2
        for name in ("layer_types", "mlp_layer_types"):
            if isinstance(getattr(small, name, None), list):
                setattr(small, name, getattr(small, name)[:2])
        with torch.device("meta"):
            meta = model_cls._from_config(small, dtype=dtype)
    except Exception as error:  # noqa: BLE001  other depth-dependent lists may disagree
        logger.info("no two layers of %s: %s", type(config).__name__, error)
        return None
    nbytes = sum(p.numel() * p.element_size() for p in meta.parameters())
    return small if nbytes <= TOY_BYTES else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Warm:
    """What the toy has shown of this process, in bytes and in seconds per token.

    ``layer_s``, ``expert_s``: the time that one layer (without its experts) and one routed expert
    take when there is next to nothing to compute, that is, Python, dispatch and the books of what
    is where. ``fixed_s``: what ``generate`` adds to each token besides the layers. ``fetch_s``:
    what each block that is read from disk costs those who compute, besides the wait for its bytes:
    the way to the disk's queue and back, and threads that take turns with Python. ``crowd_s``: the
    processor time that those threads take for each. Zero where there was no toy.
    """

    baseline_rss: int
    layer_s: float = 0.0
    expert_s: float = 0.0
    fixed_s: float = 0.0
    fetch_s: float = 0.0
    crowd_s: float = 0.0


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide transformers' progress bars: a toy is not what the user waits for."""
    from transformers.utils import logging as hf

    shown = hf.is_progress_bar_enabled()
    hf.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf.enable_progress_bar()
