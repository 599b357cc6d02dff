"""Attention of packed models on a card: float32, without the scores in memory.

transformers hands grouped heads to torch as they are, and on a card no fused kernel takes those in
float32: torch then computes step by step, with the scores [B, H, S, T] of a whole prompt in memory,
for 2048 tokens of 32 heads a gigabyte. With keys and values repeated for each head of the queries
one does. A pack's results are not the unquantised model's to the bit; a checkpoint's have to be, so
its attention stays what it is, and its plan counts what that takes (``meta_attention``).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

NAME = "offload_card"
"""Of the attention, as transformers' ``attn_implementation``."""


def switch_on(model: Any) -> None:
    """Have a model that attends with torch's fused kernels do so with heads repeated."""
    if model.config._attn_implementation != "sdpa" or not model._can_set_attn_implementation():
        return
    register()
    model.set_attn_implementation(NAME)


def register() -> None:
    """Make ``NAME`` known to transformers; again does no harm."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, card_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def card_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """As transformers' ``sdpa_attention_forward``. ``query`` [B, H, S, D], ``key`` and ``value``
    [B, G, T, D]; the result is [B, S, H, D]."""
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    groups = query.shape[1] // key.shape[1]
    key, value = (repeat_kv(each, groups) for each in (key, value))
    # It repeats them, or does not, by what the module says of its groups.
    alone: Any = SimpleNamespace(is_causal=getattr(module, "is_causal", True))
    out, _ = sdpa_attention_forward(alone, query, key, value, attention_mask, **kwargs)
    return out, None


__all__ = ["NAME", "card_attention", "register", "switch_on"]
