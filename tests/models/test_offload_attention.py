"""Attention "offload" in transformers' models: eager attention's logits, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.cache_utils import DynamicCache, DynamicLayer

from offload.errors import OffloadError, UnsupportedModelError
from offload.models.block_attention import (
    HANDLE,
    NAME,
    KvHandle,
    TensorBlocks,
    first_visible,
    offload_attention,
    register,
)

SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "sliding window": (MistralForCausalLM, MistralConfig, {"sliding_window": 7}),
    "softcap": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {"sliding_window": 9, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 20},
    ),
    "sinks": (
        GptOssForCausalLM,
        GptOssConfig,
        {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}


def model_of(family: str) -> Any:
    cls, config, more = FAMILIES[family]
    torch.manual_seed(3)
    register()
    return cls(config(**SMALL, **more)).eval()


class Parts:
    """A handle's blocks in two groups, as a cache gives them that reads from a disk."""

    def __init__(self, whole: TensorBlocks, calls: list[int]) -> None:
        self.length, self._whole, self._calls = whole.length, whole, calls

    def groups(self, first: int = 0) -> Iterator[Any]:
        self._calls.append(self.length)
        for layout, tables in self._whole.groups(first):
            yield layout, [table[:1] for table in tables]
            yield layout, [table[1:] for table in tables]


class Attached(DynamicLayer):  # type: ignore[misc]
    """Keys with a handle, and values that nobody may read in the keys' place."""

    calls: ClassVar[list[int]] = []

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        handle: KvHandle = Parts(TensorBlocks(keys, values), self.calls)
        stand_in = torch.full_like(keys, float("nan"))
        setattr(stand_in, HANDLE, handle)
        return stand_in, torch.full_like(values, float("nan"))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_of_eager(family: str) -> None:
    """A left-padded batch: prompt, then tokens one by one, then a chunk."""
    model = model_of(family)
    tokens = torch.randint(1, 97, (2, 30))
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, :6] = 0
    found = []
    for implementation in ("eager", NAME):
        model.set_attn_implementation(implementation)
        cache, logits = DynamicCache(config=model.config), []
        for start, stop in ((0, 20), (20, 21), (21, 22), (22, 30)):
            out = model(tokens[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
            logits.append(out.logits)
        found.append(torch.cat(logits, dim=1)[mask.bool()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=2e-5)
    assert torch.equal(found[1].argmax(-1), found[0].argmax(-1))


@torch.no_grad()
def test_keys_with_a_handle() -> None:
    """Blocks are read through the handle; tokens are those of the same kernels without one."""
    model = model_of("llama")
    model.set_attn_implementation(NAME)
    tokens = torch.randint(1, 97, (1, 300))
    Attached.calls.clear()
    cache = DynamicCache(config=model.config)
    cache.layers = [Attached() for _ in cache.layers]
    plain = DynamicCache(config=model.config)
    for start, stop in ((0, 290), (290, 300)):
        some = tokens[:, start:stop]
        want = model(some, past_key_values=plain).logits
        assert torch.equal(model(some, past_key_values=cache).logits, want)
    assert Attached.calls == [290, 290, 300, 300]


@torch.no_grad()
def test_bfloat16() -> None:
    """Near SDPA in float32; so is what a half-width query writes back."""
    q, k, v = (torch.randn(2, heads, n, 64) for heads, n in ((8, 1), (2, 400), (2, 400)))
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    module = SimpleNamespace(is_causal=True)
    got, _ = offload_attention(module, q, k, v, None)
    want = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), enable_gqa=True
    )
    assert got.shape == (2, 1, 8, 64)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want.transpose(1, 2), rtol=2**-7, atol=2**-8)


def test_refusals() -> None:
    q, k = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 10, 16)
    module = SimpleNamespace(is_causal=True)
    with pytest.raises(OffloadError, match="inference on the CPU"):
        offload_attention(module, q.requires_grad_(), k, k, None)
    blocked = torch.ones(1, 1, 3, 10, dtype=torch.bool).tril(7)
    assert first_visible(blocked, 10, 3, 0) == [0]
    blocked[..., 4] = False  # a hole: packed documents, or a tree of drafts
    with pytest.raises(UnsupportedModelError, match="another"):
        offload_attention(module, q.detach(), k, k, blocked)
    with pytest.raises(UnsupportedModelError, match="takes masks bool"):
        offload_attention(module, q.detach(), k, k, torch.zeros(1, 1, 3, 10))


@torch.no_grad()
def test_not_causal_goes_to_sdpa() -> None:
    module = SimpleNamespace(is_causal=False, num_key_value_groups=2)
    q, k = torch.randn(1, 4, 10, 16), torch.randn(1, 2, 10, 16)
    got, _ = offload_attention(module, q, k, k, None)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    torch.testing.assert_close(got, want.transpose(1, 2))
