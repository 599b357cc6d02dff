"""Whole packed models on the card's kernels: blocks go through the simulated device, and what lies
there is computed by the kernels' own source, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_card import CpuCard
from test_packed_device import planned
from test_packed_run import IDS, packed

from offload.batch.conductor import Conductor
from offload.blocks import Tier
from offload.errors import OffloadError
from offload.models import packed_card, packed_opening
from offload.models.absent import AbsentTensor
from offload.models.meta import place_rest
from offload.models.packed_card import CardExperts, PackedCard, card_scratch
from offload.models.packed_modules import PackedLinear, expert_layout_of


def on_the_card(
    card: CpuCard, pack_dir: Path, monkeypatch: pytest.MonkeyPatch, hybrid: bool | None = None
) -> Any:
    """A packed model on the smallest budgets, computed by the card's kernels."""

    def on_card(_device: Any, pack: Any, plan: Any) -> PackedCard:
        groups = prepared.cut.groups
        layouts = [expert_layout_of(pack.experts[g.name], g.module) for g in groups]
        made = PackedCard(card, card_scratch(pack, layouts, IDS.shape[1], max(plan.top_k.values())))
        made.prepare(pack)
        return made

    monkeypatch.setattr(packed_opening, "open_card", on_card)
    least = planned(pack_dir, hybrid=hybrid).minimum
    ram = 2**30 if hybrid else least[Tier.RAM]
    prepared = planned(pack_dir, ram=ram, gpu=least[Tier.DEVICE], hybrid=hybrid)
    return prepared.open()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_logits_are_those_of_the_cpu(
    family: str, card: CpuCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, pack_dir = packed(family, tmp_path, "q8")
    card.give_everything()
    on_cpu = planned(pack_dir, gpu=None).open()
    with torch.no_grad():
        want = on_cpu(IDS).logits
    on_cpu.offload.close()

    model = on_the_card(card, pack_dir, monkeypatch)
    try:
        linears = [m for m in model.modules() if isinstance(m, PackedLinear)]
        assert linears
        assert all(m.product is not None for m in linears)
        assert any(
            isinstance(getattr(m.__dict__.get("forward"), "__wrapped__", m.forward), CardExperts)
            for m in model.modules()
        )
        with torch.no_grad():
            ours = model(IDS).logits
            step = model(IDS[:, :1], past_key_values=model(IDS, use_cache=True).past_key_values)
        # The same integers; sums of float32 in another order, which may move one now and then.
        assert (ours - want).abs().max() < 0.05 * want.std()
        assert torch.isfinite(step.logits).all()
        assert {k.name for k in card.launched} == {"quantize", "linear", "gate_up", "down", "merge"}
        model.offload.executor.settle()
        model.offload.executor.validate()
    finally:
        model.offload.close()
    assert all(m.product is None for m in linears), "they would keep the card's scratch memory"


def test_the_cpu_takes_its_part_beside_a_card(
    card: CpuCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts and dense weights in RAM: near what the CPU alone says, and the same every time."""
    _, pack_dir = packed("qwen3_moe", tmp_path, "q8")
    card.give_everything()
    on_cpu = planned(pack_dir, gpu=None).open()
    with torch.no_grad():
        want = on_cpu(IDS).logits
    on_cpu.offload.close()
    found = []
    for _ in range(2):
        model = on_the_card(card, pack_dir, monkeypatch, hybrid=True)
        try:
            with torch.no_grad():
                found.append(model(IDS).logits)
            stats = model.offload.stats()
            assert stats["cpu_experts"] > 0
            assert stats["cpu_products"] > 0
            model.offload.executor.settle()
            model.offload.executor.validate()
        finally:
            model.offload.close()
    assert torch.equal(*found)
    assert (found[0] - want).abs().max() < 0.05 * want.std()
    assert {"gate_up", "down", "merge"} <= {k.name for k in card.launched}


def test_sequences_beside_each_other_get_what_each_gets_alone(
    card: CpuCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linear layers that the card computes are not multiplied by the CPU's kernel together."""
    _, pack_dir = packed("qwen3_moe", tmp_path, "q8")
    card.give_everything()
    model = on_the_card(card, pack_dir, monkeypatch)

    def answer(tokens: int) -> Any:
        return model.generate(
            IDS[:1, :tokens], max_new_tokens=3, do_sample=False, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip

    try:
        alone = [answer(n) for n in (3, 4)]
        with Conductor(model) as conductor:
            running = [conductor.start(lambda n=n: answer(n)) for n in (3, 4)]
            conductor.run()
            assert conductor.counters.joined == 0
        for one, want in zip(running, alone, strict=True):
            assert one.error is None
            assert torch.equal(one.result.sequences, want.sequences)
            for a, b in zip(one.result.logits, want.logits, strict=True):
                assert torch.equal(a, b)
    finally:
        model.offload.close()


def test_what_stands_in_is_on_the_device(tmp_path: Path) -> None:
    """Also the experts': moving a model's rest to the device would read them."""
    _, pack_dir = packed("qwen3_moe", tmp_path, "q8")
    prepared = planned(pack_dir)
    model = prepared.meta.model
    meta = torch.device("meta")
    packed_card.stand_in_on(meta, model)
    experts = prepared.cut.groups[0].module
    absent = [t for t in experts._parameters.values() if t is not None]
    assert absent
    assert all(isinstance(t, AbsentTensor) and t.device == meta for t in absent)
    linear = next(m for m in model.modules() if isinstance(m, PackedLinear))
    assert linear.weight.device == meta
    place_rest(model, meta)
    with pytest.raises(OffloadError, match=r"self_attn.* is streamed and not in memory"):
        linear.weight + 1


def test_without_cupy_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(OffloadError, match=r"CuPy is missing; install it with: pip install"):
        packed_card.check_options("cuda", None)


def test_cards_of_another_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    class Card:
        kind = "cuda"

    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(OffloadError, match="CUDA kernels, and this torch is for AMD's cards"):
        packed_card.open_card(Card(), None, None)  # type: ignore[arg-type]
