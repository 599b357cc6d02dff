"""What attention holds, counted on the meta device as the processor's kernel holds it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class CpuAttention(TorchFunctionMode):
    """Fused attention as the CPU computes it: its kernel never holds the scores [B, H, S, T]. On
    meta torch takes the road that does, which would count gigabytes that nobody allocates (17 GB
    for 8192 tokens of 32 heads)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            fused = _fused_attention(*args, **kwargs)
            if fused is not None:
                return fused
        return func(*args, **kwargs)


def _fused_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor | None:  # fmt: skip
    """None where the CPU computes step by step, too (``sdp_utils_cpp.cpp`` of torch).

    ``query`` [B, H, S, D], ``key`` and ``value`` [B, G, T, D].
    """
    heads = query.dim() == 4 and (enable_gqa or query.shape[1] == key.shape[1])
    same = query.shape[-1] == value.shape[-1] == key.shape[-1]
    if not heads or not same or dropout_p or (attn_mask is not None and attn_mask.requires_grad):
        return None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
    # Keys and values are packed for the matrix unit, once for each head of the queries.
    most = max(query.shape[2], key.shape[2])
    shape = (*query.shape[:2], most, query.shape[3])
    packed = query.new_empty(shape), query.new_empty(shape)
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    del packed
    return out
