"""Attention that reads blocks where they are: the same bits wherever that is, near torch's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from offload.errors import OffloadError, UnsupportedModelError
from offload.kv.homes import LEAST_WINDOW
from offload.kv.tiers import KvTiers
from offload.models.block_attention import offload_attention, switch_on

BLOCK, PROMPT, NEW, ROWS = 16, 70, 6, 3
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"attn_logit_softcapping": 2.0, "sliding_window": 24},
    "gpt_oss": {"sliding_window": 24},
    "deepseek_v3": {"qk_nope_head_dim": 24},
}


def inputs(rows: int = 1) -> torch.Tensor:
    ids = torch.randint(3, 100, (rows, PROMPT), generator=torch.Generator().manual_seed(1))
    return torch.cat([ids[:, :30], ids[:, :30], ids[:, 60:]], 1)  # something to look up


def padding() -> dict[str, Any]:
    mask = torch.ones(ROWS, PROMPT, dtype=torch.int64)
    mask[0, :40], mask[2, :17] = 0, 0
    return {"inputs": inputs(ROWS) * mask, "attention_mask": mask}


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "padded": padding(),
    "beams": {"num_beams": ROWS},
    "chunked": {"prefill_chunk_size": 32},
    "lookup": {"prompt_lookup_num_tokens": 3},
}


@contextmanager
def tiers(model: Any, directory: Path, spare: int) -> Iterator[KvTiers]:
    """With so many slots more than three sequences need at least."""
    with_one = KvTiers(
        model.config, ram=2**28, directory=directory, block_tokens=BLOCK, in_place=True
    )
    with torch.no_grad():
        model(inputs(), past_key_values=with_one.new_cache())
    assert with_one.pool is not None
    assert with_one.homes is not None
    size, layers = with_one.pool.slot_bytes, with_one.homes.layers
    with_one.close()
    kv = KvTiers(
        model.config,
        ram=size * (ROWS * layers + LEAST_WINDOW + spare),
        directory=directory,
        block_tokens=BLOCK,
        in_place=True,
    )
    try:
        yield kv
        if kv.store is not None:
            kv.store.validate()
    finally:
        kv.close()


def generate(model: Any, cache: Any, **how: Any) -> Any:
    return model.generate(
        how.pop("inputs") if "inputs" in how else inputs(),
        max_new_tokens=NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        past_key_values=cache,
        **how,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_same_bits_for_any_budget(family: str, tiny: Callable[..., Any], tmp_path: Path) -> None:
    """And near the model's own attention, in float32 with the same tokens."""
    plain = tiny(family, **FAMILIES[family])
    model = copy.deepcopy(plain).float()
    switch_on(model)
    found: list[list[Any]] = []
    for spare in (0, 5, 1000):
        with tiers(model, tmp_path, spare) as kv:
            found.append([generate(model, kv.new_cache(), **dict(h)) for h in WAYS.values()])
            figures = kv.stats()
            assert (figures["read_bytes"] > 0) == (spare < 1000)
    for outs in zip(*found, strict=True):
        for other in outs[:-1]:
            assert torch.equal(other.sequences, outs[-1].sequences)
            assert all(map(torch.equal, other.logits, outs[-1].logits))
    exact = copy.deepcopy(plain).float()
    for got, how in zip(found[0], WAYS.values(), strict=True):
        want = generate(exact, DynamicCache(config=exact.config), **dict(how))
        assert torch.equal(got.sequences, want.sequences)
        for a, b in zip(got.logits, want.logits, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)


def test_nothing_is_gathered(tiny: Callable[..., Any], tmp_path: Path) -> None:
    """In bfloat16: only a latent cache, which the model expands, is put in one piece."""
    for family, gathers in (("llama", False), ("deepseek_v3", True)):
        model = copy.deepcopy(tiny(family, **FAMILIES[family]))
        switch_on(model)
        with tiers(model, tmp_path, 0) as kv:
            generate(model, kv.new_cache())
            assert (kv._buffer is not None) == gathers
            model.set_attn_implementation("sdpa")  # which knows nothing of blocks
            if not gathers:
                with pytest.raises(
                    UnsupportedModelError, match=r"drop that \(--attention offload\)"
                ):
                    generate(model, kv.new_cache())


@torch.no_grad()
def test_blocks_before_a_window_are_not_fetched(tiny: Callable[..., Any], tmp_path: Path) -> None:
    """Nor read ahead; and what is attended to is the same."""
    layers, tokens, steps = 4, 160, 5
    module, model = SimpleNamespace(is_causal=True), copy.deepcopy(tiny("llama")).float()
    switch_on(model)
    keys, values = torch.randn(2, layers, 1, 2, tokens + steps, 16)
    q = torch.randn(layers, 1, 4, steps, 16)
    read, found = [], []
    for window, spare in ((24, 0), (24, 1000), (None, 0)):
        with tiers(model, tmp_path, spare) as kv:
            cache = kv.new_cache()
            for start, stop in [(0, tokens), *((tokens + i, tokens + i + 1) for i in range(steps))]:
                for layer in range(layers):
                    new = (x[layer, :, :, start:stop] for x in (keys, values))
                    k, v = cache.update(*new, layer)
                    if start == 0:
                        list(k._tier.groups())
                        kv.store.settle()  # type: ignore[union-attr]
                        continue
                    one = q[layer, :, :, start - tokens : stop - tokens]
                    found.append(offload_attention(module, one, k, v, None, sliding_window=window))
            read.append(kv.stats()["read_bytes"] // kv.stats()["slot_bytes"])
    each = layers * steps
    far, near, all_seen = (found[i * each : (i + 1) * each] for i in range(3))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(far, near, strict=True))
    assert not any(torch.equal(a, b) for (a, _), (b, _) in zip(far, all_seen, strict=True))
    before = tokens // BLOCK * layers  # by the prompt itself
    assert read[1] == 0
    assert read[0] - before < each * 3 < (read[2] - before) // 2


@torch.no_grad()
def test_refusals(tiny: Callable[..., Any], tmp_path: Path) -> None:
    """A model that goes past the handle must not compute on the newest tokens alone."""
    model = copy.deepcopy(tiny("llama"))
    switch_on(model)
    with tiers(model, tmp_path, 0) as kv:
        cache = kv.new_cache()
        some = torch.zeros(1, 2, 3, 16, dtype=torch.bfloat16)
        keys, _ = cache.update(some, some, 0)
        with pytest.raises(UnsupportedModelError, match=r"drop that \(--attention offload\)"):
            cache.update(some, some, 1)
        cache = kv.new_cache()
        keys, _ = cache.update(some, some, 0)
        list(keys._tier.groups())
        cache.update(some, some, 1)
        cache.layers[0].table.append(some, some)
        with pytest.raises(OffloadError, match=r"3 tokens .* has 6 now"):
            list(keys._tier.groups())
    with pytest.raises(UnsupportedModelError, match="float16"):
        KvTiers(model.config, ram=2**24, directory=tmp_path, in_place=True).new_cache().update(
            some.half(), some.half(), 0
        )
    odd = KvTiers(model.config, ram=2**24, directory=tmp_path, block_tokens=4, in_place=True)
    with pytest.raises(OffloadError, match="multiple of 16 tokens"):
        odd.new_cache().update(some, some, 0)
    odd.close()
