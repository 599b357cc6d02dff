"""A pack's attention on a card: what torch's own says, without a prompt's scores in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_card import FakeCard
from families import tiny_config
from test_packed_run import packed

from offload.blocks import Tier
from offload.models import card_attention, packed_load, toy
from offload.models.load import prepare
from offload.models.meta import model_class
from offload.models.options import Options
from offload.runtime import cuda_api

GIB = 1 << 30


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCard]:
    card = FakeCard()
    monkeypatch.setattr(cuda_api, "card_count", lambda: 1)
    monkeypatch.setattr(cuda_api, "current_card", lambda: 0)
    monkeypatch.setattr(cuda_api, "open_card", lambda index: card)
    monkeypatch.setattr(packed_load, "check_options", lambda *_: None)
    monkeypatch.setattr(packed_load, "compile_for", lambda *_: None)
    monkeypatch.setattr(packed_load, "warm_card", lambda *_: None)
    monkeypatch.setattr(packed_load, "warm_up", lambda *_: toy.Warm(baseline_rss=0))
    yield card
    card.end()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "olmo2", "mistral"])
@pytest.mark.parametrize("rows", [1, 2])
def test_it_says_what_torchs_own_says(family: str, rows: int) -> None:
    config = tiny_config(family)
    torch.manual_seed(0)
    model = model_class(config)._from_config(config, attn_implementation="sdpa").eval()
    model.set_experts_implementation("eager")
    ids = torch.randint(3, 100, (rows, 12))
    seen = torch.ones_like(ids)
    seen[-1, :4] = rows == 1  # of several, one is padded

    def ask() -> Any:
        with torch.no_grad():
            first = model(ids, attention_mask=seen, use_cache=True)
            more = torch.cat([seen, torch.ones(rows, 1, dtype=seen.dtype)], 1)
            next_one = model(ids[:, :1], attention_mask=more, past_key_values=first.past_key_values)
        return torch.cat([first.logits[:, 4:], next_one.logits], 1)

    want = ask()
    card_attention.switch_on(model)
    assert model.config._attn_implementation == card_attention.NAME
    torch.testing.assert_close(ask(), want, rtol=1e-4, atol=1e-4)


def test_attention_of_another_kind_stays() -> None:
    config = tiny_config("llama")
    model = model_class(config)._from_config(config, attn_implementation="eager")
    card_attention.switch_on(model)
    assert model.config._attn_implementation == "eager"


def test_a_plan_has_no_room_for_scores(card: FakeCard, tmp_path: Path) -> None:
    _, pack_dir = packed("llama", tmp_path, "q8")
    tokens = 4096
    prepared = prepare(
        pack_dir,
        Options(ram=GIB, gpu=GIB, device="cuda", context=tokens, overhead_bytes=0),
    )
    config = prepared.meta.model.config
    assert config.num_attention_heads > config.num_key_value_heads
    scores = 4 * config.num_attention_heads * tokens**2
    assert prepared.plan.reserves[Tier.DEVICE]["activations"] < scores / 4
