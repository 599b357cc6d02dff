"""The promise: whatever the budget, the very bits of unmodified transformers.

Every family × budget × device: logits of the prompt, greedy tokens and the logits of every
decode step. On the simulated device the race detector watches, and memory that nobody has
written is poisoned, so a missing wait shows even when the bytes came out right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from equivalence import Golden, budgets, check_logits, opened, options
from families import CORE, FLOAT32_ONLY, tail

from offload.errors import OffloadError
from offload.models import load
from offload.models.footprint import measure
from offload.models.load import prepare

pytestmark = pytest.mark.usefixtures("cut_small")

Checkpoint = Callable[..., Golden]


EVERYWHERE = ["llama", "gemma2", "gpt2", "qwen3_moe", "deepseek_v3", "bamba"]
"""One of each kind: dense, capped, old, with experts, with compressed keys, with a state."""

RUNS = [("sim", "minimum"), ("cpu", "half"), ("cpu", "minimum"), ("sim", "half")]


def in_ci(family: str, run: tuple[str, str]) -> bool:
    """Each device once for every family, both with as little as possible: ``in_fine_steps`` is the
    CPU. What half of the weights' memory adds does not depend on the family: one of each kind."""
    return run == RUNS[0] or family in EVERYWHERE


def _check(want: Golden, device: str, budget: str) -> None:
    prepared = prepare(want.directory, options(device, **budgets(want.directory, device)[budget]))
    if budget == "minimum":
        assert prepared.plan.streamed_bytes_per_pass > 0
    with opened(prepared) as model:
        check_logits(model, want)


def every_other(families: Sequence[str]) -> list[Any]:
    """The rest of them before a release."""
    return [
        pytest.param(family, marks=[pytest.mark.sweep] * (i % 2))
        for i, family in enumerate(families)
    ]


@pytest.mark.parametrize(
    ("family", "device", "budget"),
    [
        pytest.param(family, *run, marks=[pytest.mark.sweep] * (not in_ci(family, run)))
        for family in CORE
        for run in RUNS
    ],
)
def test_family(checkpoint: Checkpoint, family: str, device: str, budget: str) -> None:
    _check(checkpoint(family), device, budget)


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("family", EVERYWHERE)
def test_everything_fits(checkpoint: Checkpoint, family: str, device: str) -> None:
    """Nothing streams: what is pinned passes RAM on its way up, once."""
    _check(checkpoint(family), device, "all")


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.usefixtures("split_layers")
@pytest.mark.parametrize("family", every_other(CORE))
def test_family_in_fine_steps(checkpoint: Checkpoint, family: str) -> None:
    """Large layers are split into their projections where nothing reads one from outside."""
    _check(checkpoint(family), "cpu", "minimum")


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize("family", every_other(tail()))
def test_rare_family(checkpoint: Checkpoint, family: str) -> None:
    """One streamed run each: the device with all tiers, as little memory as possible."""
    dtype = torch.float32 if family in FLOAT32_ONLY else torch.bfloat16
    _check(checkpoint(family, dtype), "sim", "minimum")


def test_a_forward_that_changes_weights(checkpoint: Checkpoint) -> None:
    """RWKV divides weights of every second layer here, at its first forward. What was measured on
    meta must not pass for that, and weights that come and go cannot be divided."""
    want = checkpoint("rwkv", overrides={"num_hidden_layers": 4, "rescale_every": 2})
    _check(want, "cpu", "all")
    least = budgets(want.directory, "cpu")["minimum"]
    with (
        opened(prepare(want.directory, options("cpu", **least))) as model,
        pytest.raises(OffloadError, match=r"attention\.output\.weight is streamed .*div_"),
    ):
        model(want.ids_BL)


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 11,
    "short_factor": [1 + i / 7 for i in range(8)], "long_factor": [2 + i / 3 for i in range(8)],
}  # fmt: skip


@pytest.mark.parametrize("family", ["phi3", "qwen3_moe"])
@pytest.mark.parametrize("budget", ["all", "minimum"])
def test_frequencies_that_change_with_the_length(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, family: str, budget: str
) -> None:
    """LongRoPE keeps the frequencies of long texts as it first needs them: those that it made on
    meta, where memory is measured, have no values."""
    monkeypatch.setattr(load, "measure", measure)  # each model, not one of a kind
    overrides = {"rope_parameters": LONGROPE, "max_position_embeddings": 64}
    _check(checkpoint(family, overrides=overrides), "cpu", budget)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_moe", "mamba2"])
def test_the_comparison_can_fail(checkpoint: Checkpoint, family: str) -> None:
    """Logits differ by position, by step and by prompt: equal ones mean something."""
    want = checkpoint(family)
    tops = [*want.logits_BLV[0].argmax(-1).tolist(), *(s.argmax().item() for s in want.steps_BV)]
    assert len(set(tops)) > 3
    assert len({s.float().numpy().tobytes() for s in want.steps_BV}) == len(want.steps_BV)
