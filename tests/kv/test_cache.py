"""The tiered cache gives the tokens and logits of transformers' DynamicCache, bit for bit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.cpu_ops.kv_cache import KvType
from offload.cpu_ops.kv_quantised import make_kv
from offload.errors import OffloadError
from offload.kv.tiers import KvTiers
from offload.models.lean_cache import LeanCache

BLOCK = 4
PROMPT, NEW = 21, 12

FAMILIES = [
    "llama", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "mixtral", "qwen3_next", "deepseek_v3",
]  # fmt: skip

CONFIG: dict[str, dict[str, Any]] = {"mixtral": {"sliding_window": None}}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "chunked": {"prefill_chunk_size": 7},
    "lookup": {"prompt_lookup_num_tokens": 3},
}


def prompt(rows: int = 1) -> torch.Tensor:
    ids = torch.randint(3, 100, (rows, PROMPT), generator=torch.Generator().manual_seed(1))
    return torch.cat([ids[:, :9], ids[:, :9], ids[:, 18:]], 1)  # something to look up


def padded() -> dict[str, torch.Tensor]:
    ids, mask = prompt(3), torch.ones(3, PROMPT, dtype=torch.int64)
    mask[0, :6], mask[2, :13] = 0, 0
    return {"inputs": ids * mask, "attention_mask": mask}


@contextmanager
def tiers(model: Any, directory: Path, slots: int) -> Iterator[KvTiers]:
    """With room for so many blocks beside one for each layer of three sequences."""
    found = KvTiers(model.config, ram=1, directory=directory, block_tokens=BLOCK)
    probe = KvTiers(model.config, ram=2**28, directory=directory, block_tokens=BLOCK)
    cache = probe.new_cache()
    with torch.no_grad():
        model(prompt(), past_key_values=cache)
    size = probe.pool.slot_bytes if probe.pool else 4096
    layers = len(cache.life.layers)
    probe.close()
    found.ram = size * (3 * layers + slots)
    try:
        yield found
        if found.store is not None:
            found.store.validate()
    finally:
        found.close()


def generate(model: Any, cache: Any, **how: Any) -> Any:
    torch.manual_seed(7)
    inputs = how.pop("inputs", None)
    return model.generate(
        prompt() if inputs is None else inputs,
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        output_logits=True,
        past_key_values=cache,
        **{"do_sample": False, **how},
    )


def check_equal(got: Any, want: Any) -> None:
    assert torch.equal(got.sequences, want.sequences)
    assert len(got.logits) == len(want.logits) > 0
    for a, b in zip(got.logits, want.logits, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("family", FAMILIES)
def test_same_bits_however_generated(family: str, tiny: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny(family, **CONFIG.get(family, {}))
    ways = dict(WAYS, padded=padded())
    if family == "qwen3_next":
        del ways["lookup"]  # a recurrent state cannot be taken back
    else:
        ways["assisted"] = {"assistant_model": tiny(family, seed=3, **CONFIG.get(family, {}))}
    with tiers(model, tmp_path, slots=4) as kv:
        for how in ways.values():
            check_equal(generate(model, kv.new_cache(), **how), generate(model, None, **how))
        figures = kv.stats()
        assert figures["written_bytes"] > 0, "nothing was spilled: the test shows nothing"
        assert figures["read_bytes"] > 0


@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps])
def test_a_cache_is_not_copied(
    how: Callable[[Any], Any], tiny: Callable[..., Any], tmp_path: Path
) -> None:
    """The way of transformers' own caches to go on twice from one prompt. Kernels know a cache by
    its address: a copy's tokens would be stored in the original."""
    model = tiny("llama")
    with tiers(model, tmp_path, slots=4) as kv:
        tiered = kv.new_cache()
        with torch.no_grad():
            before = model(prompt(), past_key_values=tiered).logits
        with pytest.raises(OffloadError, match=r"cannot be\s+copied.*DynamicCache"):
            how(tiered)
        tiered.reset()
        with torch.no_grad():
            assert torch.equal(model(prompt(), past_key_values=tiered).logits, before)
    kinds = [KvType.F32, KvType.BF16, KvType.Q8]
    for lean in (LeanCache(make_kv(1, 1, 32, 8, kind)) for kind in kinds):
        with pytest.raises(OffloadError, match=r"cannot be\s+copied.*DynamicCache"):
            how(lean)
