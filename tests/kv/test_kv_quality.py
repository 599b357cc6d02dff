"""What rounding and forgetting keys and values costs on text that the model in the box has never
seen. ``benchmarks/quality_kv.py`` measures it on more."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import offload
from offload.kv.keep import AttentionMass, Importance, Recency

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny_moe"
WINDOW, WINDOWS, BLOCK = 192, 6, 16


@pytest.fixture(scope="module", autouse=True)
def _packs_vanish(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def ids_NT() -> torch.Tensor:
    text = (MODEL / "heldout.txt").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(MODEL).encode(text, add_special_tokens=False)
    return torch.tensor(ids[: WINDOWS * WINDOW]).view(WINDOWS, WINDOW)


@torch.no_grad()
def perplexity(ids_NT: torch.Tensor, **how: Any) -> float:
    """Read a block at a time: all but the newest block have been rounded, or have gone."""
    model = offload.load(
        MODEL, quant="none", ram="256MiB", context=WINDOW, attention="offload",
        kv_block_tokens=BLOCK, **how,
    )  # fmt: skip
    try:
        nats = []
        for row in ids_NT:
            cache, some = model.offload.new_cache(), row.split(BLOCK)
            found = [model(part[None], past_key_values=cache).logits[0] for part in some]
            nats.append(torch.nn.functional.cross_entropy(torch.cat(found)[:-1], row[1:]))
        if (keep := how.get("kv_keep")) is not None:
            assert model.offload.stats()["kv"]["evicted_tokens"] == WINDOWS * (WINDOW - keep)
        return math.exp(torch.stack(nats).mean())
    finally:
        model.offload.close()


@pytest.fixture(scope="module")
def whole(ids_NT: torch.Tensor) -> float:
    return perplexity(ids_NT)


@pytest.mark.parametrize(("kind", "most"), [("bf16", 0.001), ("q8", 0.001), ("q4", 0.03)])
def test_rounding(kind: str, most: float, ids_NT: torch.Tensor, whole: float) -> None:
    assert perplexity(ids_NT, kv=kind) == pytest.approx(whole, rel=most)


@pytest.mark.parametrize("importance", [AttentionMass, Recency])
def test_forgetting_half(
    importance: Callable[[], Importance], ids_NT: torch.Tensor, whole: float
) -> None:
    """This model was trained on texts of 192 tokens, and lives of the last few."""
    found = perplexity(ids_NT, kv_keep=96, kv_importance=importance)
    assert found != whole
    assert found == pytest.approx(whole, rel=0.02)
