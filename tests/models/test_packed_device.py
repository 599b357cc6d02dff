"""Packed models with a device tier: the same bits as without one, whatever the budgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_packed_run import IDS, packed

import offload
from offload.blocks import Tier
from offload.errors import OffloadError, PlanError
from offload.models.meta import read_config
from offload.models.options import Options
from offload.models.pack_reader import PackedModel
from offload.models.packed_load import PackedPrepared, plan_packed
from offload.models.toy import Warm

FAMILIES = ["qwen3_moe", "gpt_oss", "gemma"]
"""Experts; with biases, clamped; no experts and a tied embedding."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    found: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in found:
            found[family] = packed(family, tmp_path_factory.mktemp(family), "q4")[1]
        return found[family]

    return make


def planned(
    pack_dir: Path,
    ram: int = 2**30,
    gpu: int | None = 2**30,
    hybrid: bool | None = None,
    **more: Any,
) -> PackedPrepared:
    device = "cpu" if gpu is None else "sim"
    chosen = Options(
        ram=ram, gpu=gpu, device=device, context=64, overhead_bytes=0, hybrid=hybrid,
        **{"seed": 7, **more},
    )  # fmt: skip
    pack = PackedModel.open(pack_dir)
    return plan_packed(pack, read_config(pack_dir), chosen, Warm(baseline_rss=0))


def answers(prepared: PackedPrepared) -> tuple[torch.Tensor, torch.Tensor, Any]:
    model = prepared.open()
    try:
        with torch.no_grad():
            logits = model(IDS).logits
            cache: dict[str, Any] = {"use_cache": True}
            tokens = model.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0, **cache)
        model.offload.executor.settle()
        model.offload.executor.validate()
        assert model.offload.executor.held() == []
        return logits, tokens, model.offload.stats()
    finally:
        model.offload.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_budgets_of_the_device_change_no_bit(made: Callable[[str], Path], family: str) -> None:
    least = planned(made(family)).minimum
    small = planned(made(family), ram=least[Tier.RAM], gpu=least[Tier.DEVICE])
    runs = [answers(planned(made(family))), answers(small)]
    on_cpu, _, _ = answers(planned(made(family), gpu=None))
    for logits, tokens, stats in runs:
        assert stats["h2d_bytes"] > 0
        # A prompt runs through the same modules with and without a device.
        assert torch.equal(logits, on_cpu)
        assert torch.equal(tokens, runs[0][1])
    assert runs[1][2]["h2d_bytes"] > runs[0][2]["h2d_bytes"]
    if family != "gemma":
        assert runs[1][2]["misses"] > runs[0][2]["misses"] == 0


@pytest.mark.parametrize("family", ["gemma", "qwen2"])
def test_who_multiplies_changes_no_bit(made: Callable[[str], Path], family: str) -> None:
    """Tokens' products with packed weights in RAM; biases are added on the device."""
    least = planned(made(family), hybrid=True).minimum
    alone = answers(planned(made(family), gpu=least[Tier.DEVICE]))
    shared = planned(made(family), gpu=least[Tier.DEVICE], hybrid=True)
    assert shared.plan.sites is not None
    assert len(shared.plan.sites.blocks) > 2
    some = replace(shared.plan.sites, rows=1)
    for sites in (shared.plan.sites, some):
        shared.plan = replace(shared.plan, sites=sites)
        logits, tokens, stats = answers(shared)
        assert stats["cpu_products"] > 0
        assert torch.equal(logits, alone[0])
        assert torch.equal(tokens, alone[1])
        shared = planned(made(family), gpu=least[Tier.DEVICE], hybrid=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("budget", ["minimum", "more", "ram"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_who_computes_an_expert_changes_no_bit(
    made: Callable[[str], Path], family: str, budget: str
) -> None:
    """Biases, shared experts and dense layers beside them; from disk, and all in RAM."""
    least = planned(made(family), hybrid=True).minimum
    extra = {"minimum": 0, "more": 30_000, "ram": 0}[budget]
    ram = 2**30 if budget == "ram" else least[Tier.RAM] + extra
    gpu = least[Tier.DEVICE] + extra
    alone = answers(planned(made(family), gpu=gpu))
    for seed in range(2):
        shared = planned(made(family), ram=ram, gpu=gpu, hybrid=True, seed=seed)
        assert shared.plan.split is not None
        # A disk so fast that moving is no bargain beside it.
        split = replace(shared.plan.split, read_s=0.5)
        shared.plan = replace(shared.plan, split=split)
        logits, tokens, stats = answers(shared)
        assert stats["cpu_experts"] > 0
        assert torch.equal(logits, alone[0])
        assert torch.equal(tokens, alone[1])


def test_a_long_prompt_is_the_devices(made: Callable[[str], Path]) -> None:
    least = planned(made("qwen3_moe"), hybrid=True).minimum
    ids = torch.randint(3, 100, (1, 40), generator=torch.Generator().manual_seed(3))
    found = []
    for hybrid in (None, True):
        model = planned(made("qwen3_moe"), gpu=least[Tier.DEVICE], hybrid=hybrid).open()
        try:
            with torch.no_grad():
                found.append(model(ids).logits)
            assert model.offload.stats()["cpu_experts"] == 0
        finally:
            model.offload.close()
    assert torch.equal(*found)


def test_a_plan_says_what_each_tier_is_for(made: Callable[[str], Path]) -> None:
    plan = planned(made("qwen3_moe")).plan
    assert plan.compute_tier is Tier.DEVICE
    assert {"KV cache", "activations", "norms, routers, biases"} <= plan.reserves[
        Tier.DEVICE
    ].keys()
    assert {"I/O staging", "embedding rows"} <= plan.reserves[Tier.RAM].keys()
    with pytest.raises(PlanError, match="the DEVICE budget of 4096 bytes"):
        planned(made("qwen3_moe"), gpu=2**12)


def test_what_cannot_be_on_a_device(made: Callable[[str], Path]) -> None:
    with pytest.raises(OffloadError, match="kernels fast compares the CPU's kernels"):
        offload.load(made("gemma"), ram="1GiB", device="sim", kernels="fast")
