"""Dense weights that stay in RAM at decode: the bits of unmodified transformers, whoever
multiplied."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from equivalence import Golden, budgets, check_logits, greedy, opened, options
from torch import nn

from offload.blocks import Tier
from offload.errors import OffloadError, PlanError
from offload.models.host_products import ROWS, apart_layers, tokens_of
from offload.models.load import Prepared, prepare
from offload.models.meta import build
from offload.models.units import unit_modules
from offload.scheduler.plan import DenseSites
from offload.scheduler.plan_file import Identity, document, restore

pytestmark = pytest.mark.usefixtures("cut_small")

Checkpoint = Callable[..., Golden]


def planned(want: Golden, **more: Any) -> Prepared:
    """On the least of device memory, with all weights in RAM."""
    sizes = {name: more[name] for name in more if name == "batch"}
    least = budgets(want.directory, "sim", hybrid=True, **sizes)["minimum"]
    return prepare(want.directory, options("sim", hybrid=True, gpu=least["gpu"], **more))


def apart(prepared: Prepared) -> list[str]:
    """What the CPU may compute."""
    plan = prepared.plan
    kept = plan.tiers[Tier.RAM].pinned
    streamed = {b for b, _ in plan.trace.uses} - plan.tiers[Tier.DEVICE].pinned.keys()
    return sorted(b for b in prepared.request.apart if b in kept and b in streamed)


def with_sites(prepared: Prepared, blocks: list[str], rows: int = ROWS) -> Prepared:
    sites = DenseSites(blocks=frozenset(blocks), rows=rows)
    prepared.plan = replace(prepared.plan, sites=sites)
    return prepared


FAMILIES = ["llama", "qwen2", "gemma", "gpt_oss", "deepseek_v3", "qwen2_moe", "opt", "gpt_neox",
            "granitemoehybrid", "phi3"]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_bits(checkpoint: Checkpoint, family: str) -> None:
    """Biases, tied and sliced heads, shared experts beside routed ones, scans."""
    want = checkpoint(family)
    prepared = planned(want)
    assert prepared.plan.sites is not None
    assert prepared.plan.sites.blocks
    with opened(with_sites(prepared, apart(prepared))) as model:
        check_logits(model, want)
        assert model.offload.stats()["cpu_products"] > 0


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_bits_of_projections(checkpoint: Checkpoint, split_layers: None, family: str) -> None:
    """Units that are linear layers themselves."""
    want = checkpoint(family)
    prepared = planned(want)
    names = {u.name for u in prepared.cut.units}
    assert any(name.endswith("up_proj") for name in names)
    with opened(with_sites(prepared, apart(prepared), rows=4)) as model:
        check_logits(model, want)
        assert model.offload.stats()["cpu_products"] > 0


def test_float32(checkpoint: Checkpoint) -> None:
    """Where the sums' order depends on where a tensor starts."""
    want = checkpoint("qwen2", torch.float32)
    prepared = planned(want)
    with opened(with_sites(prepared, apart(prepared))) as model:
        check_logits(model, want)


@pytest.mark.parametrize("seed", range(5))
def test_bits_at_every_interleaving_and_choice(checkpoint: Checkpoint, seed: int) -> None:
    """Prompts go up and tokens do not, some blocks never stay, copies take other times."""
    want = checkpoint(("llama", "qwen3_moe")[seed % 2])
    prepared = planned(want, seed=seed)
    rng = random.Random(seed)
    some = [b for b in apart(prepared) if rng.random() < 0.6]
    with opened(with_sites(prepared, some, rows=rng.choice((1, 4)))) as model:
        for _ in range(2):
            check_logits(model, want)
        assert model.offload.stats()["cpu_products"] > 0


def test_a_token_leaves_in_ram_what_a_prompt_moves(checkpoint: Checkpoint) -> None:
    want = checkpoint("llama")

    def moved(blocks: list[str] | None) -> tuple[int, int]:
        prepared = planned(want)
        with opened(with_sites(prepared, apart(prepared) if blocks is None else blocks, 4)) as m:
            executor = m.offload.executor
            found = []
            for tokens in (want.ids_BL, want.ids_BL[:, :1], want.ids_BL[:, :1]):
                executor.settle()
                before = executor.stats.h2d_bytes
                with torch.no_grad():
                    m(tokens)
                found.append(executor.stats.h2d_bytes - before)
            return found[0], found[2]

    prompt, token = moved(None)
    prompt_all, token_all = moved([])
    prepared = planned(want)
    stay = sum(prepared.plan.blocks[b].slot_nbytes for b in apart(prepared))
    assert stay > 0
    assert token == token_all - stay
    assert prompt >= prompt_all


def test_a_frozen_plan_has_the_same_sites(checkpoint: Checkpoint) -> None:
    want = checkpoint("llama")
    who = Identity(model="m", config="c", machine="k", context=64, prompt_tokens=64)
    prepared = planned(want)
    few = with_sites(planned(want), apart(prepared)[:2], rows=2).plan
    data = json.loads(json.dumps(document(few, who)))
    assert restore(data, prepared.plan, who, "--plan p").sites == few.sites
    least = budgets(want.directory, "sim", hybrid=True)["minimum"]
    alone = prepare(want.directory, options("sim", gpu=least["gpu"])).plan
    assert alone.sites is None
    with pytest.raises(PlanError, match=r"made with a part for the CPU .* without"):
        restore(data, alone, who, "--plan p")


def test_the_plan_says_who_computes_and_why(checkpoint: Checkpoint) -> None:
    plan = planned(checkpoint("llama")).plan
    assert any("computed there by the CPU in passes of up to 32 tokens" in r for r in plan.reasons)
    whole = prepare(checkpoint("llama").directory, options("sim", hybrid=True)).plan
    assert whole.sites == DenseSites(blocks=frozenset(), rows=ROWS)
    assert any("nothing for the CPU to compute" in r for r in whole.reasons)


def test_a_layer_out_of_its_unit_has_few_tokens_or_is_refused(checkpoint: Checkpoint) -> None:
    """Called by somebody else the layer answers all the same; for many tokens nothing is set
    aside."""
    want = checkpoint("llama")
    prepared = planned(want)
    blocks = apart(prepared)
    with opened(with_sites(prepared, blocks, rows=4)) as model, torch.no_grad():
        layer = model.model.layers[1].mlp.up_proj
        assert layer(torch.ones(4, layer.in_features, dtype=torch.bfloat16)).shape[0] == 4
        with pytest.raises(OffloadError, match=r"called with 5 tokens by a unit .* at most 4"):
            layer(torch.ones(5, layer.in_features, dtype=torch.bfloat16))


class TestApartLayers:
    """Which layers can do with their weights elsewhere."""

    def test_all_of_a_llama(self, checkpoint: Checkpoint) -> None:
        model = build(checkpoint("llama").directory, None).model
        before = dict(model.named_parameters())
        found = apart_layers(model, unit_modules(model))
        layers = {p for p, m in model.model.layers.named_modules() if isinstance(m, nn.Linear)}
        assert found == {f"model.layers.{p}" for p in layers}
        assert dict(model.named_parameters()) == before
        assert "forward" not in model.model.layers[0].mlp.up_proj.__dict__

    def test_none_where_a_weight_is_read_by_somebody_else(self, checkpoint: Checkpoint) -> None:
        model = build(checkpoint("llama").directory, None).model
        mlp = model.model.layers[0].mlp
        mlp.forward = lambda x: nn.functional.linear(x, mlp.up_proj.weight)[..., : x.shape[-1]]
        assert apart_layers(model, unit_modules(model)) == frozenset()

    def test_not_one_with_more_tokens_than_its_unit(self, checkpoint: Checkpoint) -> None:
        model = build(checkpoint("llama").directory, None).model
        mlp = model.model.layers[0].mlp
        inner = mlp.forward
        mlp.forward = lambda x: inner(torch.cat([x, x]))[: len(x)]
        found = apart_layers(model, unit_modules(model))
        assert "model.layers.0.self_attn.q_proj" in found
        assert "model.layers.0.mlp.up_proj" not in found
        assert "model.layers.1.mlp.up_proj" in found


def test_tokens_are_those_of_the_widest_input() -> None:
    hidden = torch.zeros(2, 3, 8)
    assert tokens_of((hidden, None, "x", torch.zeros(5))) == 6
    assert tokens_of((hidden, (torch.zeros(1, 9, 4), torch.zeros(1, 9, 4)))) == 9
    assert tokens_of((torch.zeros(2, 3, dtype=torch.int64),)) == 0


def test_bits_of_a_batch(checkpoint: Checkpoint) -> None:
    want = checkpoint("llama")
    prepared = planned(want, batch=3)
    ids = torch.randint(3, 100, (3, 6), generator=torch.Generator().manual_seed(4))
    with opened(planned(want, batch=3)) as model:
        model.offload.executor.settle()
        plain = greedy(model, ids).sequences
    with opened(with_sites(prepared, apart(prepared))) as model:
        assert torch.equal(greedy(model, ids).sequences, plain)
