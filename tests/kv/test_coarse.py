"""Quantised blocks: the same bits wherever they are, and near what was not quantised."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_in_place import BLOCK, PROMPT, ROWS, WAYS, generate

from offload.errors import OffloadError
from offload.kv.coarse import WRITTEN
from offload.kv.homes import LEAST_WINDOW
from offload.kv.table import LayerTable
from offload.kv.tiers import KvTiers
from offload.models.block_attention import switch_on
from offload.units import parse_bytes

KINDS = {"q8": 0.02, "q4": 0.3, "bf16": 0.02}
"""And by what part of the largest logit they may differ, in a model of random weights."""


def tiers(model: Any, directory: Path, kind: str | None, spare: int) -> KvTiers:
    """With so many slots for full blocks more than are needed at least."""
    kv = KvTiers(model.config, ram=2**28, directory=directory, block_tokens=BLOCK,
                 in_place=True, kind=kind, sequences=ROWS)  # fmt: skip
    with torch.no_grad():
        model(torch.ones(ROWS, 3, dtype=torch.int64), past_key_values=kv.new_cache())
    assert kv.pool is not None
    ram = (WRITTEN + LEAST_WINDOW + spare) * kv.pool.slot_bytes
    tails = ROWS * model.config.num_hidden_layers
    ram += tails * (kv.tails.pool if kv.tails else kv.pool).slot_bytes
    kv.close()
    return KvTiers(model.config, ram=ram, directory=directory, block_tokens=BLOCK,
                   in_place=True, kind=kind, sequences=ROWS)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_for_any_budget(kind: str, tiny: Callable[..., Any], tmp_path: Path) -> None:
    model = copy.deepcopy(tiny("llama", head_dim=32)).float()
    switch_on(model)
    ways = {**WAYS, "few": {"inputs": torch.ones(ROWS, BLOCK - 9, dtype=torch.int64)}}
    found: list[list[Any]] = []
    for spare in (0, 7, 1000):
        kv = tiers(model, tmp_path, kind, spare)
        found.append([generate(model, kv.new_cache(), **dict(how)) for how in ways.values()])
        figures = kv.stats()
        assert (figures["read_bytes"] > 0) == (spare < 1000)
        for store in filter(None, (kv.store, kv.tails)):
            store.validate()
        if kind != "bf16":
            assert 0 < figures["attention_error"] < KINDS[kind]
        kv.close()
    for outs in zip(*found, strict=True):
        for other in outs[:-1]:
            assert torch.equal(other.sequences, outs[-1].sequences)
            assert all(map(torch.equal, other.logits, outs[-1].logits))
    kv = tiers(model, tmp_path, None, 1000)
    for got, how in zip(found[0], ways.values(), strict=True):
        want = generate(model, kv.new_cache(), **dict(how))
        first, right = got.logits[0], want.logits[0]
        far = (first - right).abs().max() / right.abs().max()
        assert far < KINDS[kind]
        exact = how.get("inputs") is not None and len(how) == 1 and kind != "bf16"
        assert torch.equal(first, right) == exact, "what is not in a full block is as it was"
    kv.close()


def test_what_was_not_measured_is_not_said(tiny: Callable[..., Any], tmp_path: Path) -> None:
    """Of a prompt that fills no block nothing is rounded, and later nobody has the right ones."""
    model = copy.deepcopy(tiny("llama", head_dim=32)).float()
    switch_on(model)
    kv = tiers(model, tmp_path, "q8", 1000)
    generate(model, kv.new_cache(), inputs=torch.ones(ROWS, BLOCK - 2, dtype=torch.int64))
    assert kv.stats()["attention_error"] is None
    generate(model, kv.new_cache(), inputs=torch.ones(ROWS, BLOCK, dtype=torch.int64))
    assert kv.stats()["attention_error"] > 0
    kv.close()


@torch.no_grad()
def test_a_column_that_was_quantised_in_part(
    tiny: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence's block was rounded when there was no room for the other's."""
    model = copy.deepcopy(tiny("llama", head_dim=32)).float()
    switch_on(model)
    kv = tiers(model, tmp_path, "q8", 1000)
    cache = kv.new_cache()
    ids = torch.randint(3, 100, (ROWS, BLOCK + 1))
    model(ids[:, : BLOCK - 1], past_key_values=cache)
    quantised, calls = LayerTable._quantised, []

    def once(table: LayerTable, *args: Any) -> Any:
        calls.append(table)
        if len(calls) == 2:
            raise OffloadError("no room (injected)")
        return quantised(table, *args)

    with monkeypatch.context() as patch:
        patch.setattr(LayerTable, "_quantised", once)
        with pytest.raises(OffloadError, match="injected"):
            model(ids[:, BLOCK - 1 : BLOCK], past_key_values=cache)
    assert calls[0] is calls[1]
    table = calls[0]
    assert {u.block.owner for u in table.uses()} == {kv.tails}
    shape = table.layout.shape
    one = torch.rand(ROWS, shape.key_heads, 1, shape.key_dim)
    table.append(one, torch.rand(ROWS, shape.value_heads, 1, shape.value_dim))
    assert table.length == BLOCK
    assert {u.block.owner for u in table.uses()} == {kv.store}
    for store in filter(None, (kv.store, kv.tails)):
        store.validate()
    kv.close()


@torch.no_grad()
def test_tokens_taken_back(tiny: Callable[..., Any], tmp_path: Path) -> None:
    """A block that is cut is read back; what stays and what comes then is at its place."""
    model = copy.deepcopy(tiny("llama", head_dim=32)).float()
    switch_on(model)
    ids = torch.randint(3, 100, (1, PROMPT))
    for spare in (0, 1000):
        kv = tiers(model, tmp_path, "q8", spare)
        cache = kv.new_cache()
        model(ids, past_key_values=cache)
        for length in (PROMPT - 1, 48, 39, 39, 32, 5):
            cache.crop(length - cache.get_seq_length())
            if length < PROMPT - 1:
                model(ids[:, length : length + 20], past_key_values=cache)
                got = model(ids[:, length + 20 : length + 21], past_key_values=cache).logits
                plain = tiers(model, tmp_path, None, 1000)
                want = model(ids[:, : length + 21], past_key_values=plain.new_cache()).logits
                torch.testing.assert_close(
                    got[:, -1], want[:, -1], rtol=0, atol=0.02 * float(want.abs().max())
                )
                plain.close()
        for store in filter(None, (kv.store, kv.tails)):
            store.validate()
        cache.life.release()
        assert kv.store is not None
        assert kv.tails is not None
        kv.store.settle()
        assert kv.store.counts()[1] == kv.tails.counts()[0] == 0
        kv.close()


@torch.no_grad()
def test_refusals(tiny: Callable[..., Any], tmp_path: Path) -> None:
    some = torch.zeros(1, 2, 3, 16)
    model = tiny("llama")
    with pytest.raises(OffloadError, match="multiples of 32"):
        KvTiers(
            model.config, ram=2**24, directory=tmp_path, in_place=True, kind="q4"
        ).new_cache().update(some, some, 0)
    with pytest.raises(OffloadError, match="beside the newest ones") as refusal:
        KvTiers(
            model.config, ram=2**16, directory=tmp_path, in_place=True, kind="q8"
        ).new_cache().update(some, some, 0)
    # What it says is enough: the newest ones are counted.
    said = re.search(r"--kv-ram\) to (\d+[KM]iB)", str(refusal.value))
    assert said is not None
    enough = KvTiers(
        model.config, ram=parse_bytes(said[1]), directory=tmp_path, in_place=True, kind="q8"
    )
    enough.new_cache().update(some, some, 0)
    enough.close()
