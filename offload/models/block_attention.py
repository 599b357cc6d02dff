"""Attention "offload" for transformers' models: our kernels over a cache's blocks.

    B sequences, H query heads, G key heads, n queries, T tokens, D head size

``register()`` puts it into transformers' tables together with its mask; without a mask entry left
padding would be ignored without a word. The cache is not handed to an attention function, so a
cache that keeps blocks attaches a handle to the keys that its ``update`` returns
(``offload.kv.in_place``)::

    keys._tier = handle      # a KvHandle

Keys without one (layers that keep transformers' own cache, models without cache) are copied into
blocks first: the same kernels, the same numbers. What the kernels cannot do is an error, except
attention that is not causal (encoders), which goes to torch's SDPA.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from offload.cpu_ops.block_attention import BlockAttention, Table
from offload.cpu_ops.block_layout import BlockKind, BlockLayout
from offload.errors import OffloadError, UnsupportedModelError
from offload.kv.in_place import HANDLE
from offload.models.watched_attention import WatchedAttention

NAME = "offload"
"""Of the implementation: ``model.set_attn_implementation("offload")``."""
BLOCK_TOKENS = 256

_PAIR = tuple[BlockLayout, Sequence[Table]]


class KvHandle(Protocol):
    """Where one layer's keys and values are, those of the running step included."""

    @property
    def length(self) -> int:
        """Tokens of each sequence."""
        ...

    def groups(self, first: int = 0) -> Iterator[_PAIR]:
        """Ascending runs of blocks: their layout, and for each sequence a table int64 [blocks, 3]
        of addresses of keys and values and of filled tokens. A group's memory is good until the
        next is asked for. No query sees a token before ``first``: blocks of such tokens alone need
        not be there."""
        ...


class TensorBlocks:
    """Keys and values [B, G, T, D] copied into blocks in RAM; a ``KvHandle``."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        batch, heads, self.length, key_dim = keys.shape
        half = keys.dtype == torch.bfloat16
        kind, dtype = (BlockKind.BF16, np.uint16) if half else (BlockKind.F32, np.float32)
        tokens = BLOCK_TOKENS if self.length > BLOCK_TOKENS else -(-self.length // 16) * 16
        self._layout = BlockLayout(kind, heads, key_dim, values.shape[-1], tokens)
        blocks = -(-self.length // tokens)
        self._tables: list[Table] = [np.empty((blocks, 3), np.int64) for _ in range(batch)]
        self._keep = []
        for column, x in enumerate((keys, values)):
            shape = (batch, blocks, heads, tokens, x.shape[-1])
            memory = np.zeros(shape, dtype)
            whole = torch.from_numpy(memory.view(np.int16) if half else memory)
            whole = whole.view(torch.bfloat16) if half else whole
            for i in range(blocks):
                some = x[:, :, i * tokens : (i + 1) * tokens]
                whole[:, i, :, : some.shape[2]] = some
            self._keep.append(memory)
            base, step = memory.__array_interface__["data"][0], memory[0, 0].nbytes
            for b, table in enumerate(self._tables):
                table[:, column] = base + (b * blocks + np.arange(blocks)) * step
        for table in self._tables:
            table[:, 2] = np.clip(self.length - tokens * np.arange(blocks), 0, tokens)

    def groups(self, first: int = 0) -> Iterator[_PAIR]:
        yield self._layout, self._tables


def to_numpy(x: torch.Tensor) -> Any:
    """float32, or the bits of bfloat16; other dtypes become float32. Shares memory if it can."""
    if x.dtype == torch.bfloat16:
        return x.view(torch.uint16).numpy()
    return x.float().numpy()


def first_visible(mask: torch.Tensor, length: int, queries: int, window: int) -> list[int]:
    """Each sequence's first token that is no padding, from a mask bool [B, 1, n, T].

    Raises:
        UnsupportedModelError: the mask is not padding and causality (in a window of ``window``
            tokens; 0: none), which is all that the kernels know.
    """
    if mask.dtype != torch.bool or mask.shape[1] != 1 or mask.shape[3] < length:
        raise UnsupportedModelError(
            f"attention '{NAME}' takes masks bool [sequences, 1, queries, tokens], got "
            f"{mask.dtype} {list(mask.shape)}; use attn_implementation='sdpa'"
        )
    seen = mask[:, 0, :, :length]
    some = seen.any(dim=1)
    firsts = torch.where(some.any(dim=1), some.int().argmax(dim=1), length)
    tokens = torch.arange(length, device=mask.device)
    places = torch.arange(length - queries, length, device=mask.device)[:, None]
    wanted = (tokens <= places) & (tokens >= firsts[:, None, None])
    if window:
        wanted &= tokens > places - window
    if not torch.equal(wanted, seen):
        raise UnsupportedModelError(
            f"attention '{NAME}' knows causal attention with left padding and a sliding window; "
            f"this model's mask is another; use attn_implementation='sdpa'"
        )
    return [int(first) for first in firsts]


def offload_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function as transformers calls it: [B, H, n, D] to [B, n, H, Dv].

    Raises:
        OffloadError: gradients or dropout are wanted, or tensors are not in RAM.
        UnsupportedModelError: the mask is one the kernels do not know.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    handle: KvHandle | None = getattr(key, HANDLE, None)
    if not causal and handle is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal=False, **kwargs
        )
        return out, None
    wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if wants_grad or dropout or query.device.type != "cpu":
        raise OffloadError(
            f"attention '{NAME}' is for inference on the CPU; use attn_implementation='sdpa' for "
            f"training or on {query.device.type}"
        )
    blocks = TensorBlocks(key, value) if handle is None else handle
    batch, queries, length = query.shape[0], query.shape[2], blocks.length
    window = sliding_window or 0
    firsts = None
    evicted = getattr(blocks, "evicted", 0)
    if attention_mask is not None:
        mask = attention_mask.expand(batch, -1, -1, -1)
        firsts = first_visible(mask, length + evicted, queries, window)
    if (attended := getattr(blocks, "attended", None)) is not None:
        if window or any(firsts or []):
            raise UnsupportedModelError(
                "kv_keep (--kv-keep) takes blocks out of the middle, and neither padding nor a "
                "sliding window can be told by place then; drop it, or give one sequence at a time"
            )
        firsts = None
    watched: Any = getattr(blocks, "watched", False)
    with torch.no_grad():
        one = (WatchedAttention if watched else BlockAttention)(
            to_numpy(query),
            key_heads=key.shape[1],
            dim=value.shape[-1],
            positions=[length - queries] * batch,
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            cap=softcap or 0.0,
            window=window,
            firsts=firsts,
        )
        first = max(min(firsts or [0]), length - queries - window + 1 if window else 0)
        for layout, tables in blocks.groups(first):
            one.add(layout, tables)
        sinks = None if s_aux is None else np.ascontiguousarray(s_aux.float().numpy())
        found = torch.from_numpy(one.result(sinks))
        if (whole := getattr(blocks, "whole", None)) is not None:
            last = one.of_last_query()
            for layout, tables in TensorBlocks(*whole).groups():
                last.add(layout, tables)
            right = torch.from_numpy(last.result(sinks))
            blocks.report(_error_of(found[:, :, -1:], right, query.dtype))  # type: ignore[attr-defined]
    if attended is not None:
        attended(one.shares() if isinstance(one, WatchedAttention) else None, queries)
    if query.dtype == torch.bfloat16:
        found = found.view(torch.bfloat16)
    return found.to(query.dtype).transpose(1, 2).contiguous(), None


def _error_of(found: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> float:
    if dtype == torch.bfloat16:
        found, right = found.view(dtype), right.view(dtype)
    largest = float(right.float().abs().max())
    return float((found.float() - right.float()).abs().max()) / max(largest, 1e-30)


def switch_on(model: Any) -> None:
    """Have a transformers model attend with our kernels.

    Raises:
        UnsupportedModelError: its attention cannot be exchanged.
    """
    register()
    if not model._can_set_attn_implementation():
        raise UnsupportedModelError(
            f"{type(model).__name__} has an attention of its own that cannot be exchanged; drop "
            f"--attention offload, and --kv or --kv-keep, which need it"
        )
    model.set_attn_implementation(NAME)


def register() -> None:
    """Make ``attn_implementation="offload"`` known to transformers; again does no harm."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, offload_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
