"""What attention holds, counted on the meta device as the kernel holds it that will compute."""

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


class CardAttention(TorchFunctionMode):
    """Fused attention as torch's kernels on a card hold it, where one of them takes the operands;
    what none takes is computed step by step there, scores and all, as it is on meta."""

    def __init__(self, flash: bool = True) -> None:
        """``flash``: whether flash attention runs on the card."""
        super().__init__()
        self._flash = flash

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            fused = _fused_on_card(self._flash, *args, **kwargs)
            if fused is not None:
                return fused
        return func(*args, **kwargs)


FLASH_DIM = 256
"""Columns of a head that flash attention takes at most."""


def _fused_on_card(
    flash: bool, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor | None:  # fmt: skip
    """None where a card computes step by step (``cuda/sdp_utils.cpp`` of torch): flash attention
    takes 16-bit operands without a mask, and fewer heads of keys than of queries; the other kernel
    takes float32 and masks, but as many of each. So float32 with grouped heads is taken by none.

    ``query`` [B, H, S, D], ``key`` and ``value`` [B, G, T, D].
    """
    if query.dim() != 4 or dropout_p or (attn_mask is not None and attn_mask.requires_grad):
        return None
    same = query.shape[-1] == value.shape[-1] == key.shape[-1]
    half = query.dtype in (torch.bfloat16, torch.float16)
    flash = flash and half and attn_mask is None and same and query.shape[-1] <= FLASH_DIM
    grouped = query.shape[1] != key.shape[1]
    if grouped and not (flash and enable_gqa):
        return None
    if not same or not (half or query.dtype == torch.float32):
        return None
    out: torch.Tensor = _OnCard.apply(query, key, value, attn_mask)
    return out


class _OnCard(torch.autograd.Function):
    """What fused attention on a card allocates, forward and backward, and keeps between."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        sums = query.new_empty(query.shape[:3], dtype=torch.float32)  # of each row
        held = [sums]
        if mask is not None:  # as numbers, on lines
            held.append(torch.empty_like(mask, dtype=query.dtype))
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out, *held)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        query, key, value = ctx.saved_tensors[:3]
        # Of grouped heads keys' and values' are made for each head of the queries, then summed;
        # queries' are summed in float32.
        shape = (*query.shape[:2], *key.shape[2:])
        each = [key.new_empty(shape), value.new_empty(shape)]
        total = torch.empty_like(query, dtype=torch.float32)
        result = [torch.empty_like(t) for t in (query, key, value)]
        del each, total
        return *result, None
