"""Keeping some blocks of a long context: which, right positions, bounded, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from offload.cpu_ops.block_attention import BlockAttention
from offload.errors import OffloadError, UnsupportedModelError
from offload.kv.keep import (
    LEAST_BLOCKS,
    AttentionMass,
    Importance,
    Keep,
    Recency,
    block_tokens_to_keep,
)
from offload.kv.tiers import KvTiers
from offload.models.block_attention import TensorBlocks, switch_on
from offload.models.watched_attention import WatchedAttention

BLOCK, TOKENS = 16, 64


@given(st.integers(1, 5000))
def test_blocks_are_small_enough_to_choose_among(tokens: int) -> None:
    if tokens < LEAST_BLOCKS * 16:
        with pytest.raises(OffloadError, match=f"keep {LEAST_BLOCKS * 16} or more"):
            block_tokens_to_keep(tokens)
        return
    size = block_tokens_to_keep(tokens)
    keep = Keep(tokens=tokens, block_tokens=size)
    columns = keep.candidates(tokens + 1)
    assert len(columns) >= 1
    assert columns.start == 1
    assert columns.stop <= tokens // size - keep.window + 1, "the newest stay"
    assert not keep.candidates(tokens)


def test_what_got_least_attention_has_the_lowest_score() -> None:
    scores = AttentionMass()
    scores.observe([0.5, 0.1, 0.4], 2)
    scores.observe([0.5, 0.1, 0.2, 0.2], 1)
    assert [scores.score(c) for c in range(4)] == pytest.approx([0.5, 0.1, 1 / 3, 0.2])
    scores.forget(1)
    assert [scores.score(c) for c in range(3)] == pytest.approx([0.5, 1 / 3, 0.2])
    assert scores.score(3) == 0, "newer than what was observed"


@pytest.mark.parametrize("queries", [1, 40])
def test_shares_are_those_of_a_softmax_and_the_result_the_same_bits(queries: int) -> None:
    draw = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 2, 600, 32, generator=draw) for _ in range(2))
    q = torch.randn(2, 4, queries, 32, generator=draw)
    how: dict[str, Any] = {
        "key_heads": 2, "dim": 32, "positions": [600 - queries] * 2, "scale": 32**-0.5,
    }  # fmt: skip
    plain, watched = (cls(q.numpy(), **how) for cls in (BlockAttention, WatchedAttention))
    blocks = TensorBlocks(keys, values)
    for one in (plain, watched):
        for layout, tables in blocks.groups():
            one.add(layout, tables)
    assert np.array_equal(plain.result(), watched.result())
    scores = q @ keys.repeat_interleave(2, 1).transpose(-1, -2) * 32**-0.5
    seen = torch.arange(600) <= torch.arange(600 - queries, 600)[:, None]
    mass = scores.masked_fill(~seen, -torch.inf).softmax(-1).mean((0, 1, 2))
    want = [float(part.sum()) for part in mass.split(256)]
    assert watched.shares() == pytest.approx(want, abs=1e-5)


def tiers(model: Any, directory: Path, importance: Callable[[], Importance] | None) -> KvTiers:
    keep = None
    if importance is not None:
        keep = Keep(tokens=TOKENS, block_tokens=BLOCK, importance=importance)
    return KvTiers(
        model.config, ram=2**20, directory=directory, block_tokens=BLOCK, in_place=True, keep=keep
    )


def prompt(tokens: int) -> torch.Tensor:
    return torch.randint(3, 100, (1, tokens), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def llama(tiny: Callable[..., Any]) -> Any:
    model = copy.deepcopy(tiny("llama")).float()
    switch_on(model)
    return model


def kept_by_recency(length: int, had: list[int]) -> list[int]:
    """Places that stay when the newest of ``length`` has come, of those before it."""
    keep = Keep(tokens=TOKENS, block_tokens=BLOCK, importance=Recency)
    places = [*had, *range(had[-1] + 1 if had else 0, length)]
    while columns := keep.candidates(len(places)):
        del places[columns[0] * BLOCK : (columns[0] + 1) * BLOCK]
    return places


def test_logits_are_those_of_a_mask_over_what_has_gone(
    llama: Any, tiny: Callable[..., Any], tmp_path: Path
) -> None:
    """Kept keys stay at their places: a resident model that sees the same tokens agrees."""
    ids, plain = prompt(150), copy.deepcopy(tiny("llama")).float()
    plain.set_attn_implementation("eager")
    kv, whole, kept = tiers(llama, tmp_path, Recency), DynamicCache(), []
    try:
        cache, layer = kv.new_cache(), None
        with torch.no_grad():
            for at in range(150):
                got = llama(ids[:, at : at + 1], past_key_values=cache).logits
                seen = torch.full((1, 1, 1, at + 1), torch.finfo(torch.float32).min)
                seen[..., [*kept, at]] = 0
                want = plain(ids[:, at : at + 1], past_key_values=whole, attention_mask=seen).logits
                assert torch.allclose(got, want, atol=2e-4), at
                kept = kept_by_recency(at + 1, kept)
                layer = cache.layers[0]
                assert layer.get_seq_length() == at + 1
                assert layer.table.length == len(kept) <= TOKENS
        assert kv.stats()["evicted_tokens"] == 150 - len(kept)
        assert not layer.is_croppable
        layer.crop(-3)
        assert layer.get_seq_length() == 147
        with pytest.raises(OffloadError, match="--kv-keep"):
            layer.crop(-60)
    finally:
        kv.close()


def test_what_is_cropped_is_forgotten(llama: Any, tmp_path: Path) -> None:
    """What attention went to says nothing of the tokens that come in its place."""
    kv = tiers(llama, tmp_path, AttentionMass)
    try:
        cache = kv.new_cache()
        with torch.no_grad():
            llama(prompt(60), past_key_values=cache)
        layer = cache.layers[0]
        scores = layer._importance
        kept = [scores.score(c) for c in range(2)]
        assert scores.score(2) > 0
        for each in cache.layers:
            each.crop(-30)
        assert [scores.score(c) for c in range(3)] == [*kept, 0]
        with torch.no_grad():
            llama(prompt(60), past_key_values=cache)
        assert not layer.is_croppable
        layer.crop(-layer.get_seq_length())
        assert layer.get_seq_length() == 0
        assert layer.is_croppable, "as an empty one"
    finally:
        kv.close()


def test_memory_is_bounded_over_a_long_answer(llama: Any, tmp_path: Path) -> None:
    """Behind a prompt that is longer than what stays, too, which is read in parts."""
    kv = tiers(llama, tmp_path, AttentionMass)
    most = 0

    def watch(*_: Any, **__: Any) -> None:
        nonlocal most
        most = max(most, sum(kv.store.counts()) if kv.store is not None else 0)

    llama.register_forward_hook(watch)
    undo: list[Callable[[], None]] = []
    kv.serve(llama, undo.append)
    try:
        out = llama.generate(prompt(200), max_new_tokens=120, do_sample=False)
        layers = llama.config.num_hidden_layers
        assert out.shape[1] == 320
        assert kv.stats()["evicted_tokens"] >= 320 - TOKENS - 1
        pass_tokens = Keep(tokens=TOKENS, block_tokens=BLOCK).pass_tokens
        assert most <= layers * ((TOKENS + pass_tokens) // BLOCK + 1)
        kv.store.validate()
    finally:
        undo[0]()
        kv.close()


def test_nothing_changes_as_long_as_all_fits(llama: Any, tmp_path: Path) -> None:
    found = []
    for importance in (None, AttentionMass):
        kv = tiers(llama, tmp_path, importance)
        try:
            found.append(
                llama.generate(
                    prompt(40),
                    max_new_tokens=TOKENS - 40,
                    past_key_values=kv.new_cache(),
                    do_sample=False,
                    output_logits=True,
                    return_dict_in_generate=True,
                )
            )
        finally:
            kv.close()
    without, with_ = found
    assert torch.equal(without.sequences, with_.sequences)
    for a, b in zip(without.logits, with_.logits, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("drafts", ["assistant_model", "prompt_lookup_num_tokens"])
def test_drafts_are_refused(drafts: str, llama: Any, tmp_path: Path) -> None:
    """transformers said after the prompt that the cache cannot be cropped."""
    kv = tiers(llama, tmp_path, AttentionMass)
    undo: list[Callable[[], None]] = []
    kv.serve(llama, undo.append)
    value = llama if drafts == "assistant_model" else 3
    try:
        with pytest.raises(OffloadError, match=rf"{drafts} takes .* 64 tokens .* without kv_keep"):
            llama.generate(prompt(20), max_new_tokens=4, do_sample=False, **{drafts: value})
    finally:
        undo[0]()
        kv.close()


def test_padding_is_refused(llama: Any, tmp_path: Path) -> None:
    kv = tiers(llama, tmp_path, AttentionMass)
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[0, :5] = 0
    try:
        with pytest.raises(UnsupportedModelError, match="--kv-keep"), torch.no_grad():
            llama(prompt(20).repeat(2, 1), attention_mask=mask, past_key_values=kv.new_cache())
    finally:
        kv.close()
