"""What quantising costs on text that the model in the box has never seen.

``benchmarks/quality.py`` measures it on more text; here a broken kernel or packer has to fail.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import offload

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny_moe"
WINDOW, WINDOWS = 192, 6


@pytest.fixture(scope="module")
def ids_NT() -> torch.Tensor:
    text = (MODEL / "heldout.txt").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(MODEL).encode(text, add_special_tokens=False)
    return torch.tensor(ids[: WINDOWS * WINDOW]).view(WINDOWS, WINDOW)


@torch.no_grad()
def perplexity(model: Any, ids_NT: torch.Tensor) -> float:
    nats = [
        torch.nn.functional.cross_entropy(
            model(input_ids=row[None], use_cache=False).logits[0, :-1].float(), row[1:]
        )
        for row in ids_NT
    ]
    return math.exp(torch.stack(nats).mean())


@pytest.fixture(scope="module")
def reference(ids_NT: torch.Tensor) -> float:
    return perplexity(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32), ids_NT)


@pytest.mark.parametrize(("quant", "most"), [("none", 0.002), ("q8", 0.005), ("q4", 0.04)])
def test_perplexity_of_a_pack(
    quant: str,
    most: float,
    ids_NT: torch.Tensor,
    reference: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Relative to the checkpoint's weights in float32."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = offload.load(MODEL, quant=quant, ram="256MiB", context=WINDOW)
    try:
        assert perplexity(model, ids_NT) == pytest.approx(reference, rel=most)
    finally:
        model.offload.close()
