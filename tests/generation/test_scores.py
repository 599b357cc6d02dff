"""Logits processors: the bits of transformers' own, whatever the scores."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from offload.generation import scores
from offload.generation.scores import faster

IDS = torch.tensor([[1, 2, 1]])


def rows(count: int) -> dict[str, torch.Tensor]:
    """Scores of ``count`` tokens of many kinds, [1, V]."""
    torch.manual_seed(count)
    plain = 3 * torch.randn(1, count)
    few, gap = torch.full((1, count), -math.inf), plain.clone()
    few[0, :: max(1, count // 7)] = 2.0
    few[0, 0] = 3.0
    gap[torch.rand(1, count) < 0.9] = -math.inf
    gap[0, -1] = 0.5
    nan, large = plain.clone(), plain.clone()
    nan[0, count // 2], large[0, count // 3] = math.nan, math.inf
    return {
        "plain": plain, "flat": torch.zeros(1, count), "ties": (2 * plain).round() / 2,
        "bfloat16": plain.bfloat16().float(), "steep": 40 * plain, "few": few, "gap": gap,
        "nan": nan, "infinite": large,
    }  # fmt: skip


def chains() -> list[list[Any]]:
    return [
        [TopKLogitsWarper(1)], [TopKLogitsWarper(50)], [TopKLogitsWarper(10**6)],
        [TopPLogitsWarper(0.0)], [TopPLogitsWarper(0.9)], [TopPLogitsWarper(1.0)],
        [TopPLogitsWarper(0.5, min_tokens_to_keep=3)], [TopPLogitsWarper(0.9, filter_value=-9.0)],
        [TopKLogitsWarper(20, filter_value=-7.0), TopPLogitsWarper(0.9)],
        [TemperatureLogitsWarper(0.6), TopKLogitsWarper(20), TopPLogitsWarper(0.95)],
        [MinPLogitsWarper(0.1)], [MinPLogitsWarper(1.0, min_tokens_to_keep=2)],
        [TopKLogitsWarper(40), TopPLogitsWarper(0.99), MinPLogitsWarper(0.02)],
    ]  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, 63, 65, 129, 1000, 4099, 20_011])
def test_every_chain_gives_the_bits_of_transformers(count: int) -> None:
    for kind, row in rows(count).items():
        for chain in chains():
            stock, ours = LogitsProcessorList(chain), faster(chain)
            try:
                want = stock(IDS, row.clone())
            except RuntimeError:
                continue  # asks for more than there is
            got = row.clone()
            for step in ours:
                got = step(IDS, got)
            said = f"{kind}, {[vars(p) for p in chain]}"
            assert torch.equal(torch.isnan(got), torch.isnan(want)), said
            assert torch.equal(got.nan_to_num(0, 1e9, -1e9), want.nan_to_num(0, 1e9, -1e9)), said


def test_the_known_ones_do_not_ask_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = [TemperatureLogitsWarper(0.6), TopKLogitsWarper(20), TopPLogitsWarper(0.95)]
    steps, row = faster(chain), 3 * torch.randn(1, 5000)
    for kind in (TopKLogitsWarper, TopPLogitsWarper):
        monkeypatch.setattr(kind, "__call__", lambda *_: pytest.fail("asked"))
    for step in steps:
        row = step(IDS, row)
    assert 1 <= int((row > -math.inf).sum()) <= 20


def test_where_torch_sums_otherwise_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "_has_lanes", lambda _: False)
    chain = [TopKLogitsWarper(20), TopPLogitsWarper(0.9)]
    row = 3 * torch.randn(1, 5000)
    got = row
    for step in faster(chain):
        got = step(IDS, got)
    assert torch.equal(got, LogitsProcessorList(chain)(IDS, row))


def test_others_run_as_they_are() -> None:
    class Halved(TopPLogitsWarper):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores / 2

    newer = TopPLogitsWarper(0.5)
    newer.twist = 3
    given = [NoRepeatNGramLogitsProcessor(2), Halved(0.5), newer]
    assert faster(given) == given


def test_an_argument_that_is_missing_is_transformers_error() -> None:
    class Wants:
        def __call__(self, input_ids: Any, scores: Any, more: Any) -> Any:
            return scores

    for call in (lambda: faster([Wants()]), lambda: LogitsProcessorList([Wants()])(IDS, IDS)):
        with pytest.raises(ValueError, match="required parameters"):
            call()
