"""Guessing the next layer's experts: found gates, the same bits, and what is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equivalence import Golden, budgets, check_logits, opened, options

from offload.blocks import Tier
from offload.models import experts
from offload.models.experts import GUESS_ROWS, guess
from offload.models.load import prepare
from offload.scheduler.guesses import spare_slots
from offload.scheduler.plan import Home

pytestmark = pytest.mark.usefixtures("cut_small")

Checkpoint = Callable[..., Golden]


def cached(want: Golden, **more: Any) -> Any:
    """At the smallest budget that keeps all dense weights and has slots to spare for guesses."""
    found = budgets(want.directory, "cpu")
    ram = found["minimum"]["ram"]
    step = (found["half"]["ram"] - ram) // 12
    for _ in range(30):
        prepared = prepare(want.directory, options("cpu", ram=ram, **more))
        plan = prepared.plan
        slots = plan.tiers[plan.compute_tier].slots
        if Home.STREAMED not in plan.homes.values() and spare_slots(slots, plan.top_k):
            return prepared
        ram += step
    raise AssertionError("no budget has slots to spare")


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3", "glm4_moe", "qwen2_moe"]
)
def test_gates_are_found_and_stay(checkpoint: Checkpoint, family: str) -> None:
    prepared = cached(checkpoint(family))
    assert prepared.cut.groups
    pinned = prepared.plan.tiers[prepared.plan.compute_tier].pinned
    for group in prepared.cut.groups:
        assert group.gate is not None
        blocks = [b for b, ps in prepared.cut.params.items() if group.gate in ps]
        assert blocks
        assert all(b in pinned for b in blocks)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_the_guess_is_the_gate_applied_early(checkpoint: Checkpoint, family: str) -> None:
    with opened(cached(checkpoint(family))) as model:
        group = model.offload.attachment.cut.groups[-1]
        place = group.gate.places[0]
        weight_EH = place.module._parameters[place.attr]
        hidden_TH = torch.randn(GUESS_ROWS + 1, weight_EH.shape[1]).to(weight_EH.dtype)
        for row_1H in hidden_TH[:, None]:
            scores_E = (row_1H @ weight_EH.T).float()[0]
            for name, bias_E in (*place.module.named_parameters(), *place.module.named_buffers()):
                if bias_E.shape == scores_E.shape:
                    scores_E = (scores_E.sigmoid() if "correction" in name else scores_E) + bias_E
            best = guess(group, row_1H, 2)
            assert len(best) == 2
            assert scores_E[best].min() >= scores_E.sort().values[-2]
        assert guess(group, hidden_TH, 2) == []  # a prompt
        assert guess(group, hidden_TH[:1, :-1], 2) == []  # another width


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
def test_small_gates_in_numpy_guess_the_same(
    checkpoint: Checkpoint, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32 gates, by NumPy or by torch (too large a gate), from an array or a tensor."""
    prepared = prepare(checkpoint(family).directory, options("cpu", dtype="float32"))
    with opened(prepared) as model:
        group = model.offload.attachment.cut.groups[-1]
        place = group.gate.places[0]
        weight_EH = place.module._parameters[place.attr]
        x_BLH = torch.randn(1, 1, weight_EH.shape[1], generator=torch.Generator().manual_seed(2))
        (scores_E,) = (x_BLH @ weight_EH.T)[0]
        right = scores_E.sort(descending=True).indices[:3].tolist()
        found = []
        for most in (experts.IN_NUMPY, 0):
            monkeypatch.setattr(experts, "IN_NUMPY", most)
            inputs = (x_BLH, x_BLH.numpy(), x_BLH.numpy().reshape(-1), x_BLH.double())
            found += [guess(group, x, 3) for x in inputs]
        assert found == [right] * 8


def test_two_layers_ahead(checkpoint: Checkpoint) -> None:
    """All but the first two layers are guessed from both."""
    want = checkpoint("qwen3_moe")
    with opened(cached(want)) as model:
        check_logits(model, want)
        layers = [group.name for group in model.offload.attachment.cut.groups]
        guesses = model.offload.executor._residency._routes.guesses
        assert sorted(guesses._trust) == sorted(layers[1:])
        assert sorted(guesses._far_trust) == sorted(layers[2:])
        assert layers[2:]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_guesses_read_ahead_and_change_nothing(checkpoint: Checkpoint, family: str) -> None:
    want = checkpoint(family)
    with opened(cached(want)) as model:
        check_logits(model, want)
        stats = model.offload.stats()
        assert len(model.offload.attachment.cut.groups) > 1
        assert stats["guessed"] > 0
        assert stats["guessed_right"] <= min(stats["guessed"], stats["misses"])


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_guesses_go_up_ahead_and_change_nothing(checkpoint: Checkpoint, family: str) -> None:
    """On the simulated device, all experts in RAM: copies come in other orders at every seed."""
    want = checkpoint(family)
    found = budgets(want.directory, "sim")
    gpu = (2 * found["minimum"]["gpu"] + found["half"]["gpu"]) // 3
    for seed in range(2):
        prepared = prepare(want.directory, options("sim", gpu=gpu, seed=seed))
        device = prepared.plan.tiers[Tier.DEVICE]
        assert device.slots
        with opened(prepared) as model:
            check_logits(model, want)
            stats = model.offload.stats()
            assert stats["guessed"] >= stats["guessed_right"] > 0
            assert stats["misses"] == 0
    alone = prepare(want.directory, options("sim", gpu=gpu, guess=False))
    with opened(alone) as model:
        check_logits(model, want)
        assert model.offload.stats()["guessed"] == 0


def test_without_guesses_only_routed_experts_are_read(checkpoint: Checkpoint) -> None:
    want = checkpoint("qwen3_moe")
    with opened(cached(want, guess=False)) as model:
        executor = model.offload.executor
        before = executor.stats.payload_read_bytes
        check_logits(model, want)
        stats = executor.stats
        size = {s.payload_nbytes for s in executor.plan.blocks.values() if s.group}
        assert len(size) == 1
        rows = stats.row_reads * 64 * 2
        read = stats.payload_read_bytes - before - rows
        assert (stats.guessed, read) == (0, stats.misses * size.pop())
