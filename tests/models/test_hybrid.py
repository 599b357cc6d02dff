"""Experts on two sites at once: the bits of unmodified transformers, whoever computed what."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from equivalence import Golden, budgets, check_logits, opened, options

from offload.models.load import prepare

pytestmark = pytest.mark.usefixtures("cut_small")

Checkpoint = Callable[..., Golden]


@pytest.mark.parametrize("budget", ["minimum", "half"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_bits(checkpoint: Checkpoint, family: str, budget: str) -> None:
    want = checkpoint(family)
    prepared = prepare(want.directory, options("sim", **budgets(want.directory, "sim")[budget]))
    assert prepared.plan.split is not None
    with opened(prepared) as model:
        check_logits(model, want)
        assert model.offload.executor.stats.cpu_experts > 0
