"""Training whose layers run on a card: a fake one, as a whole run from its options has it.

In an ordinary process its memory is the CPU's; ``test_strict_card`` runs the same on a card that is
a device of its own to torch, where what belongs to the card and what does not must not meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from device_support import STRICT, engine_on_device, strict_device
from engine_support import batch, group_at, oracle_of
from fake_card import FakeCard
from families import write
from run_support import (
    options_for,
    planned_once,
    train,
    weights_of,
    write_data,
    write_model,
)

from offload.errors import DeviceError, PlanError
from offload.runtime import cuda_api
from offload.runtime.cuda_device import CudaDevice
from offload.runtime.device import Device
from offload.train import card_values
from offload.train.loop import LanguageLoop
from offload.train.preparing import prepare

GPU = 1 << 30


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCard]:
    """The only card that torch sees; what broke its rules is raised behind the test."""
    if STRICT:
        import strict_card

        card: FakeCard = strict_card.StrictCard()
        monkeypatch.setattr(card_values, "make_launcher", strict_card.launcher)
    else:
        card = FakeCard()
    monkeypatch.setattr(cuda_api, "card_count", lambda: 1)
    monkeypatch.setattr(cuda_api, "current_card", lambda: 0)
    monkeypatch.setattr(cuda_api, "open_card", lambda index: card)
    yield card
    card.end()


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {"grad_accum": 3}),
        ("llama", {"head": "cpu", "max_grad_norm": 0.0, "gpu_updates": "1", "states": "8bit"}),
        ("qwen3_moe", {"grad_accum": 2, "order": "usual", "eval_every": 2}),
    ],
)
def test_a_run_on_a_card_is_the_run_without(
    tmp_path: Path, run_of: Any, card: FakeCard, family: str, more: dict[str, Any]
) -> None:
    model = write_model(tmp_path / "model", family)
    if "eval_every" in more:
        more = {**more, "eval_data": write_data(tmp_path / "eval.jsonl")}
    mine = {k: v for k, v in more.items() if k not in ("head", "gpu_updates")}
    wanted = run_of(model, "cpu", **mine)
    assert run_of(model, "card", gpu=GPU, **more) == wanted
    assert "copy" in card.calls


def test_adapters_of_a_run_on_a_card(tmp_path: Path, run_of: Any, card: FakeCard) -> None:
    model = write_model(tmp_path / "model", "qwen3_moe")
    more = {"method": "lora", "lora_r": 4, "merge": True}
    assert run_of(model, "card", gpu=GPU, **more) == run_of(model, "cpu", **more)


def test_weights_go_up_from_pinned_memory(tmp_path: Path, run_of: Any, card: FakeCard) -> None:
    """A fake card says of every copy of pageable memory that it is one: nothing here is staged."""
    model = write_model(tmp_path / "model")
    run_of(model, "card", gpu=GPU)
    assert not card.buffers
    assert not card.pins


def test_where_nothing_is_pinned_copies_are_staged_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: FakeCard
) -> None:
    planned_once(monkeypatch)
    model, data = write_model(tmp_path / "model"), write_data(tmp_path / "data.jsonl")
    options = options_for(model, data, tmp_path / "card", gpu=GPU)
    run = prepare(options)
    run.close()
    assert "staged copies" not in run.plan.ram
    card.refuse = "operation not permitted"
    run = prepare(replace(options, output=tmp_path / "staged" / "out", disk=tmp_path / "s"))
    run.close()
    assert run.plan.ram["staged copies"] > 0
    assert any("pins no host memory (operation not permitted)" in note for note in run.notes)


def test_the_plan_measures_the_card_and_sets_its_kernels_aside(
    tmp_path: Path, card: FakeCard
) -> None:
    """The whole of planning, with its warm-up and its rates."""
    model, data = write_model(tmp_path / "model"), write_data(tmp_path / "data.jsonl")
    options = options_for(model, data, tmp_path / "card", gpu=GPU)
    run = prepare(options)
    run.close()
    place = run.plan.placement.device
    assert place is not None
    assert place.parts["matrix workspace"] == place.kernel_bytes > 0
    assert place.arena_bytes + place.work_bytes + place.kernel_bytes == place.nbytes
    assert run.prediction is not None
    assert run.prediction.seconds > 0
    assert "warm_up" in card.calls
    assert any(line.startswith("device  a card of paper: ") for line in run.describe())
    with pytest.raises(PlanError, match=r"too small by .*matrix workspace.*raise it to"):
        prepare(replace(options, gpu=place.kernel_bytes))


def test_more_than_the_card_has(tmp_path: Path, card: FakeCard) -> None:
    model, data = write_model(tmp_path / "model"), write_data(tmp_path / "data.jsonl")
    with pytest.raises(PlanError, match=r"a GPU budget of .* cannot be had: .*lower it by"):
        prepare(options_for(model, data, tmp_path / "card", gpu=1 << 40))


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), PlanError,
         r"ran out in the middle of a step \(CUDA out of memory.*--resume"),
        (torch.AcceleratorError("CUDA error: an illegal memory access\nand so on"), DeviceError,
         r"the card failed in the middle of a step: CUDA error: an illegal memory access;"),
    ],
)  # fmt: skip
def test_what_the_card_says_in_a_step_is_one_error_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: FakeCard, error: Exception,
    kind: type[Exception], said: str,
) -> None:  # fmt: skip
    planned_once(monkeypatch)
    model, data = write_model(tmp_path / "model"), write_data(tmp_path / "data.jsonl")
    options = options_for(model, data, tmp_path / "card", gpu=GPU, save_every=1)
    wanted = train(options)
    whole = weights_of(tmp_path / "card" / "out")
    step = LanguageLoop.step

    def failing(self: LanguageLoop, number: int, *rest: Any) -> Any:
        if number == 2:
            raise error
        return step(self, number, *rest)

    options = replace(options, output=tmp_path / "again" / "out", disk=tmp_path / "again" / "disk")
    with monkeypatch.context() as patch:
        patch.setattr(LanguageLoop, "step", failing)
        with pytest.raises(kind, match=said):
            train(options)
    went_on = train(replace(options, resume=True))
    assert went_on.losses == {k: v for k, v in wanted.losses.items() if k > 2}
    assert weights_of(tmp_path / "again" / "out") == whole


def made(capacity: int) -> Device:
    return strict_device(capacity) if STRICT else CudaDevice(capacity, api=FakeCard())


@pytest.mark.parametrize("seeded", [False, True])
def test_dropout_is_drawn_again_on_the_card(tmp_path: Path, seeded: bool) -> None:
    """A unit that runs again in backward drops what it dropped before, wherever its numbers come
    from: gradients equal those of a model whose graph was kept."""
    write("gpt2", tmp_path / "m", torch.float32)
    with engine_on_device(tmp_path / "m", "ram", "all", make=made) as (engine, device):
        if seeded:
            engine.random_key = lambda micro, unit: 100 * micro + unit
        ids = batch(0, 0)
        layer = engine.layout.units[sorted(engine.homes.tier.placement.units)[0]]
        seen: list[torch.Tensor] = []
        drop = layer.module.mlp.dropout
        drop.register_forward_hook(lambda m, a, out: seen.append((out == 0).cpu()))
        torch.manual_seed(3)
        engine.begin_forward()
        engine.model(input_ids=ids, labels=ids).loss.backward()
        after = torch.rand(3, device=device.torch_device).cpu()
        engine.end_backward()
        engine.step(group_at(0), 0.5)
        assert len(seen) == 2
        assert seen[0].any()
        assert torch.equal(*seen)
        # What comes next is what would have come without running again.
        if not seeded:
            torch.manual_seed(3)
            engine.begin_forward()
            with torch.no_grad():
                engine.model(input_ids=ids)
            assert torch.equal(torch.rand(3, device=device.torch_device).cpu(), after)
        engine.drain()


def test_what_the_caller_casts_is_cast_on_the_card(tmp_path: Path) -> None:
    write("llama", tmp_path / "m", torch.float32)
    with engine_on_device(tmp_path / "m", "ram", "some", make=made) as (engine, _):
        oracle = oracle_of(tmp_path / "m", engine.layout, dtype=torch.float32)
        ids = batch(0, 0)
        engine.begin_forward()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours = engine.model(input_ids=ids, labels=ids).loss
            wanted = oracle.model(input_ids=ids, labels=ids).loss
        assert torch.equal(ours, wanted)
        ours.backward()
        wanted.backward()
        engine.end_backward()
        assert engine.step(group_at(0), 0.5).norm == oracle.step(group_at(0), 0.5)
        engine.drain()
