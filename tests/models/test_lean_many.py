"""Tokens of several sequences at once: each gets to the bit what it gets alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_lean import CONFIGS, LeanModel, model_of
from test_packed_run import IDS, LEAN, least, load, packed

from offload.batch.conductor import Conductor
from offload.cpu_ops.attention import BLOCK
from offload.cpu_ops.kv_cache import KvCache
from offload.errors import OffloadError
from offload.models.lean_many import RowLayers

LENGTHS = (0, 1, 5, BLOCK - 1, BLOCK, 2 * BLOCK + 7)


def grown(model: Any, length: int) -> LeanModel:
    """With ``length`` tokens of its own behind it."""
    lean = LeanModel(model, max(LENGTHS) + 2)
    x_TH = torch.randn(length, model.config.hidden_size).numpy()
    for layer in lean.layers if length else ():
        x_TH = layer.prompt(x_TH, 64)
    return lean


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "window"), [(name, 0) for name in CONFIGS] + [("gpt_oss", 9), ("mistral", 257)]
)
@pytest.mark.parametrize("rows", [4, 64])
def test_rows_are_the_tokens_alone(name: str, window: int, rows: int) -> None:
    model = model_of(name, **({"sliding_window": window} if window else {}))
    sequences = [grown(model, length) for length in LENGTHS]
    x_TH = torch.randn(len(LENGTHS), model.config.hidden_size).numpy()
    expected = np.stack([lean(x)[-1] for lean, x in zip(sequences, x_TH, strict=True)])
    kept = [[lean.cache.keys(i).copy() for i in range(len(lean.layers))] for lean in sequences]
    caches = [lean.cache for lean in sequences]
    for cache in caches:
        cache.crop(-1)
    for layer in sequences[2].layers:
        x_TH = layer.prompt(x_TH, rows, caches)
    assert np.array_equal(x_TH, expected)
    for cache, keys in zip(caches, kept, strict=True):
        for i, key in enumerate(keys):
            assert np.array_equal(cache.keys(i), key)


def test_a_full_cache_or_one_of_another_shape_stores_nothing() -> None:
    model = model_of("llama")
    sequences = [grown(model, 3), grown(model, 4)]
    caches = [lean.cache for lean in sequences]
    layer = sequences[0].layers[0]
    x_TH = torch.randn(2, model.config.hidden_size).numpy()
    shape = caches[0].layers, caches[0].heads, caches[0].dim
    for other, error in (
        (KvCache(*shape, caches[0].capacity + 1), "reads caches of"),
        (KvCache(*shape, caches[0].capacity), "do not fit"),
    ):
        while error == "do not fit" and other.length(0) < other.capacity:
            other.advance(0)
        with pytest.raises(OffloadError, match=error):
            layer.prompt(x_TH, 64, [caches[0], other])
        assert caches[0].length(0) == 3


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Where rows were computed together, and how many."""
    found: list[tuple[str, int]] = []
    inner = RowLayers.multiply

    def noted(self: RowLayers, rows: Any) -> Any:
        found.append((self.name, len(rows)))
        return inner(self, rows)

    monkeypatch.setattr(RowLayers, "multiply", noted)
    return found


PROMPTS = [IDS, IDS[:, :1], IDS.flip(1).repeat(1, 2), IDS[:, 2:5]]
NEW = (6, 9, 4, 9)
KW: dict[str, Any] = {
    "do_sample": False, "pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True,
}  # fmt: skip


def same(a: Any, b: Any) -> bool:
    logits = zip(a.logits, b.logits, strict=True)
    return torch.equal(a.sequences, b.sequences) and all(torch.equal(x, y) for x, y in logits)


def works(model: Any) -> list[Callable[[], Any]]:
    return [
        partial(model.generate, ids, max_new_tokens=n, **KW)
        for ids, n in zip(PROMPTS, NEW, strict=True)
    ]


@pytest.mark.parametrize(
    ("family", "quant"),
    [(f, "q4") for f in LEAN]
    + [("qwen2_moe", "none"), pytest.param("llama", "q8", marks=pytest.mark.sweep)],
)
def test_sequences_together(
    family: str, quant: str, tmp_path: Path, together: list[tuple[str, int]]
) -> None:
    """Where all stays they wait for each other once per token, else at every layer."""
    _, pack_dir = packed(family, tmp_path, quant)
    model = load(pack_dir)
    expected = [one() for one in works(model)]
    layers = len(model.base_model.layers)
    model.offload.close()
    for ram in (2**30, least(pack_dir) + (200 << 10)):
        del together[:]
        model = load(pack_dir, ram, sequences=len(PROMPTS))
        try:
            work = works(model)
            assert all(map(same, (one() for one in work), expected))
            assert not together
            with Conductor(model) as conductor:
                running = [conductor.start(one) for one in work]
                conductor.run()
            assert [s.error for s in running] == [None] * len(PROMPTS)
            assert all(map(same, (s.result for s in running), expected))
            places, most = {name for name, _ in together}, max(n for _, n in together)
            assert most == len(PROMPTS)
            if ram == 2**30:
                # The prompt of a single token, and every pass behind the prompts.
                assert places == {"all layers"}
                assert [n for _, n in together] == [1] + [4] * 3 + [3] * 2 + [2] * 3
                assert conductor.counters.joined >= sum(n for _, n in together)
            else:
                stays = model.offload.lean.program is not None
                assert len(places) == (1 if stays else layers)
            assert not model.offload.executor.held()
            after = model.generate(PROMPTS[0], max_new_tokens=NEW[0], **KW)
            assert same(after, expected[0]), "the model is as it was"
        finally:
            model.offload.close()
