"""Experts on two sites at once: the bits of unmodified transformers, whoever computed what."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from equivalence import Golden, budgets, check_logits, opened, options
from families import tiny_config

from offload.errors import OffloadError, PlanError
from offload.models.expert_groups import ExpertGroup
from offload.models.hybrid import activation_bytes, check_apart
from offload.models.load import prepare
from offload.models.params import Param, Place
from offload.scheduler.plan_file import Identity, document, restore

pytestmark = pytest.mark.usefixtures("cut_small")

Checkpoint = Callable[..., Golden]


@pytest.mark.parametrize("budget", ["minimum", "half"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_bits(checkpoint: Checkpoint, family: str, budget: str) -> None:
    want = checkpoint(family)
    prepared = prepare(
        want.directory,
        options("sim", hybrid=True, **budgets(want.directory, "sim", hybrid=True)[budget]),
    )
    assert prepared.plan.split is not None
    with opened(prepared) as model:
        check_logits(model, want)
        assert model.offload.executor.stats.cpu_experts > 0


@pytest.mark.parametrize("seed", range(6))
def test_bits_at_every_interleaving_and_policy(checkpoint: Checkpoint, seed: int) -> None:
    """Copies take other times at every seed; plans and policies change who computes what."""
    want = checkpoint(("olmoe", "qwen3_moe", "gpt_oss")[seed % 3])
    policy = ("lru", "mrs", "laps")[seed // 2]
    least = budgets(want.directory, "sim", hybrid=True)["minimum"]
    room = {"ram": least["ram"] + 20_000 * seed, "gpu": least["gpu"] + 10_000 * seed}
    prepared = prepare(
        want.directory, options("sim", hybrid=True, **room, seed=seed, expert_policy=policy)
    )
    # A disk so fast that moving is no bargain beside it.
    assert prepared.plan.split is not None
    split = replace(prepared.plan.split, read_s=0.5)
    prepared.plan = replace(prepared.plan, split=split)
    with opened(prepared) as model:
        check_logits(model, want)
        assert model.offload.executor.stats.cpu_experts > 0


def test_reserves_are_known_of_a_model_that_runs(checkpoint: Checkpoint) -> None:
    """Its biases stream with their layer: between passes there is only their shape."""
    want = checkpoint("gpt_oss")
    room = budgets(want.directory, "sim", hybrid=True)["minimum"]
    prepared = prepare(want.directory, options("sim", hybrid=True, **room))
    top_k, itemsize = 4, 4
    before = activation_bytes(prepared.cut.groups, top_k, itemsize)
    with opened(prepared):
        assert activation_bytes(prepared.cut.groups, top_k, itemsize) == before


def test_float32(checkpoint: Checkpoint) -> None:
    """Where the sums' order depends on where a tensor starts."""
    want = checkpoint("qwen3_moe", torch.float32)
    least = budgets(want.directory, "sim", hybrid=True)["minimum"]
    with opened(prepare(want.directory, options("sim", hybrid=True, **least))) as model:
        check_logits(model, want)
        assert model.offload.executor.stats.cpu_experts > 0


def test_the_device_alone(checkpoint: Checkpoint) -> None:
    want = checkpoint("qwen3_moe")
    least = budgets(want.directory, "sim", hybrid=False)["minimum"]
    prepared = prepare(want.directory, options("sim", **least, hybrid=False))
    assert prepared.plan.split is None
    with opened(prepared) as model:
        check_logits(model, want)
        assert model.offload.executor.stats.cpu_experts == 0


def test_a_frozen_plan_has_the_same_sites(checkpoint: Checkpoint) -> None:
    """What decides about sites is in the plan's document; a run with other sites is refused."""
    want = checkpoint("qwen3_moe")
    least = budgets(want.directory, "sim", hybrid=True)["minimum"]
    prepared = prepare(want.directory, options("sim", hybrid=True, **least))
    who = Identity(model="m", config="c", machine="k", context=64, prompt_tokens=64)
    costly = replace(prepared.plan, split=replace(prepared.plan.split, hand_over_s=1e9))
    data = json.loads(json.dumps(document(costly, who)))
    assert restore(data, prepared.plan, who, "--plan p").split == costly.split
    alone = prepare(want.directory, options("sim", **least, hybrid=False)).plan
    with pytest.raises(PlanError, match=r"made with a part for the CPU .* without"):
        restore(data, alone, who, "--plan p")
    prepared.plan = restore(data, prepared.plan, who, "--plan p")
    with opened(prepared) as model:
        check_logits(model, want)
        assert model.offload.executor.stats.cpu_experts == 0  # too costly, says the plan


def test_where_it_cannot_be(checkpoint: Checkpoint) -> None:
    unknown = checkpoint("bart").directory  # its forward cannot be tried on the meta device
    with pytest.raises(OffloadError, match="here the CPU has all"):
        options("cpu", hybrid=True)
    with pytest.raises(OffloadError, match=r"no experts .* and no linear layers that could do"):
        prepare(unknown, options("sim", hybrid=True))


def test_a_loop_that_is_more_than_a_sum_is_left_to_the_device() -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    class Doubled(Qwen3MoeExperts):
        def forward(self, hidden: Any, index: Any, weights: Any) -> Any:
            raise AssertionError("only its loop is used")

    def loop(self: Any, hidden: Any, index: Any, weights: Any) -> Any:
        return Qwen3MoeExperts.forward.__wrapped__(self, hidden, index, weights) ** 2

    Doubled.forward.__wrapped__ = loop  # type: ignore[attr-defined]
    config = tiny_config("qwen3_moe")
    config._experts_implementation = "eager"
    for kind, reason in ((Qwen3MoeExperts, None), (Doubled, "is more than the sum of its experts")):
        module = kind(config)
        params = [
            Param(f"e.{a}", t, [Place(module, a)], [f"e.{a}"])
            for a, t in module._parameters.items()
            if t is not None
        ]
        group = ExpertGroup("e", module, module.num_experts, params)
        found = check_apart(cast(Any, SimpleNamespace(groups=[group])))
        assert found is None if reason is None else reason in str(found)
