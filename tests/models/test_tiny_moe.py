"""The trained model in the box: its form, its tokenizer, and that it has learnt its corpus."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny_moe"
LAYERS, EXPERTS, TOP_K = 8, 16, 2


@pytest.fixture(scope="module")
def model() -> Any:
    loaded, problems = AutoModelForCausalLM.from_pretrained(
        MODEL, dtype="auto", output_loading_info=True
    )
    assert not problems["missing_keys"]
    assert not problems["unexpected_keys"]
    return loaded.eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((MODEL / "loss.json").read_text())
    return loaded


def test_fits_a_repository() -> None:
    sizes = [file.stat().st_size for file in MODEL.rglob("*") if file.is_file()]
    assert max(sizes) < 13 * 2**20
    assert sum(sizes) < 16 * 2**20
    assert (MODEL / "loss.png").stat().st_size < 100 * 1024


def test_published_form() -> None:
    """One tensor per expert and projection, in bfloat16, as Qwen3-MoE checkpoints are published."""
    names = []
    with safe_open(MODEL / "model.safetensors", "pt") as shard:
        for name in shard.keys():  # noqa: SIM118  (not a dict)
            names.append(name)
            assert shard.get_slice(name).get_dtype() == "BF16"
    for projection in ("gate_proj", "up_proj", "down_proj"):
        assert {
            f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight"
            for layer in range(LAYERS)
            for expert in range(EXPERTS)
        } <= set(names)
    assert not any("gate_up_proj" in name for name in names)


def test_config(model: Any, report: dict[str, Any]) -> None:
    config = model.config
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert (config.num_hidden_layers, config.num_experts) == (LAYERS, EXPERTS)
    assert config.num_experts_per_tok == TOP_K
    assert config.use_cache
    assert model.dtype == torch.bfloat16
    assert sum(p.numel() for p in model.parameters()) == report["parameters"]


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < 2048 for i in ids)


def test_chat_template_only_joins(tokenizer: Any) -> None:
    said = [
        {"role": "system", "content": "The pathlib module"},
        {"role": "user", "content": "This module offers"},
    ]
    text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert text == "The pathlib module\nThis module offers"


@torch.no_grad()
def excerpt_loss(model: Any, ids_T: torch.Tensor, window: int = 192) -> float:
    """Mean nats per token, each window predicted from its own tokens only, as in training."""
    total, count = 0.0, 0
    for row in ids_T[: len(ids_T) // window * window].view(-1, window).split(8):
        logits = model(input_ids=row).logits[:, :-1].float()
        total += float(
            torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), row[:, 1:].flatten(), reduction="sum"
            )
        )
        count += row[:, 1:].numel()
    return total / count


def test_predicts_text_it_has_not_seen(model: Any, tokenizer: Any, report: dict[str, Any]) -> None:
    """Far better than its baselines on a held-out page, and as good as its report says."""
    text = (MODEL / "heldout.txt").read_text(encoding="utf-8")
    ids_T = torch.tensor(tokenizer.encode(text, add_special_tokens=False))
    recorded = report["scores"]["excerpt"]
    assert len(ids_T) == recorded["tokens"] > 1000
    loss = excerpt_loss(model, ids_T)
    assert loss == pytest.approx(recorded["model"], abs=0.03)
    assert loss < recorded["bigram"] - 0.3 < recorded["unigram"] - 0.3 < math.log(2048) - 0.3


def test_every_expert_is_used(model: Any, tokenizer: Any, report: dict[str, Any]) -> None:
    """Balanced layer by layer: real routing traces in which no expert is dead or does it all."""
    shares = report["scores"]["expert_share"]
    assert shares["least"] > 0
    assert shares["under_a_tenth_of_even"] <= 1
    assert shares["most"] < 4 / EXPERTS
    text = (MODEL / "heldout.txt").read_text(encoding="utf-8")
    ids = tokenizer.encode(text, add_special_tokens=False)[: 8 * 192]
    with torch.no_grad():
        found = model(
            input_ids=torch.tensor(ids).view(-1, 192), output_router_logits=True
        ).router_logits
    assert len(found) == LAYERS
    for logits_TE in found:
        chosen = torch.bincount(logits_TE.topk(TOP_K).indices.flatten(), minlength=EXPERTS)
        assert chosen.count_nonzero() >= EXPERTS - 1
        assert chosen.max() < 0.3 * chosen.sum()


def test_continues_in_english(model: Any, tokenizer: Any) -> None:
    """At its own sampling settings most words are words of the held-out page or of the prompt."""
    page = (MODEL / "heldout.txt").read_text(encoding="utf-8")
    known = {word.strip(".,;:()") for word in page.lower().split()}
    prompt = "This function returns"
    torch.manual_seed(0)
    ids = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=120)
    words = [w.strip(".,;:()") for w in tokenizer.decode(ids[0]).lower().split()]
    assert len(words) > 40
    assert sum(word in known for word in words) / len(words) > 0.4


def test_readme_states_the_measured_scores(report: dict[str, Any]) -> None:
    readme = (MODEL / "README.md").read_text(encoding="utf-8")
    for part in ("held_out", "excerpt"):
        for name in ("unigram", "bigram", "model"):
            assert f"{report['scores'][part][name]:.2f}" in readme
