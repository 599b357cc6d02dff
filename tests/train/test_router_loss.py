"""The load-balancing loss, a layer at a time, against transformers' own over all layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from device_support import engine_on_device
from engine_support import batch, engine_of
from equivalence import reference
from fake_card import FakeCard
from families import write
from run_support import (
    everything_else_on_disk,
    options_for,
    planned_once,
    train,
    weights_of,
    write_data,
    write_model,
)

from offload.errors import OffloadError
from offload.runtime.cuda_device import CudaDevice
from offload.runtime.device import Device
from offload.train.router_loss import RouterLoss

SWEEP = pytest.mark.sweep


def gradients_of(engine: Any) -> dict[tuple[str, int | None], torch.Tensor]:
    """All that backward has made, by parameter and expert; copies."""
    found = {}
    for block in sorted(engine.gradients.blocks()):
        spec = engine.layout.blocks[block]
        engine.gradients.settle(block)
        held = engine.gradients._held[block]
        if held.spilled:
            engine.gradients._fetch(spec, held)
        for i, value in held.pieces.items():
            found[spec.pieces[i].param, spec.pieces[i].expert] = value.clone()
    return found


def loss_and_gradients(engine: Any, ids: torch.Tensor, mask: torch.Tensor) -> Any:
    """(value, gradients) of the load-balancing loss times 0.5 alone."""
    engine.model.eval()
    router = RouterLoss(engine.model, 0.5, lambda: 0, lambda: engine.visit)
    engine.extra = lambda: [(t, torch.full_like(t, 0.5)) for t in router.take_terms()]
    router.begin(mask)
    engine.begin_forward()
    hidden = engine.model.model(input_ids=ids, attention_mask=mask).last_hidden_state
    value = router.value()
    hidden.backward(torch.zeros_like(hidden))
    engine.end_backward()
    router.close()
    return value, gradients_of(engine)


def padded_batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = batch(0, 0)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    return ids, mask


# Of deepseek_v4 the first routers look experts up by token; transformers' loss leaves them out.
FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v4"]
MORE = [
    "ernie4_5_moe", "flex_olmo", "gpt_oss", "granitemoe", "granitemoehybrid", "granitemoeshared",
    "jamba", "minimax", "minimax_m2", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text",
    "qwen3_next",
]  # fmt: skip


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(f, marks=SWEEP) for f in MORE)])
@pytest.mark.parametrize("padded", [False, True])
def test_value_and_gradients_are_those_of_transformers(
    tmp_path: Path, family: str, padded: bool
) -> None:
    write(family, tmp_path / "model", torch.float32)
    ids = batch(0, 0)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 7:] = 0
    resident: Any = reference(tmp_path / "model", torch.float32)
    out = resident(input_ids=ids, attention_mask=mask, output_router_logits=True)
    wanted = out.aux_loss
    wanted.backward()
    with engine_of(tmp_path / "model", "disk", dtype="float32") as (engine, _):
        value, gradients = loss_and_gradients(engine, ids, mask)
        assert value == pytest.approx(float(wanted.detach()), rel=1e-5)
        for name, parameter in resident.named_parameters():
            if "experts" in name or "lm_head" in name or parameter.grad is None:
                continue
            if (name, None) not in gradients:
                # Of a router that only looks up: transformers' zero.
                assert not parameter.grad.any()
                continue
            ours = gradients[name, None].view(parameter.shape)
            torch.testing.assert_close(ours, 0.5 * parameter.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "llama"])
def test_models_without_such_a_loss_are_refused(tmp_path: Path, family: str) -> None:
    """Their routers are balanced otherwise, and choose by other numbers."""
    model, data = write_model(tmp_path / "model", family), write_data(tmp_path / "data.jsonl")
    said = "no experts" if family == "llama" else "transformers has no load-balancing loss for"
    options = options_for(model, data, tmp_path, router_aux_loss=0.1)
    with pytest.raises(OffloadError, match=f"--router-aux-loss 0.1 cannot take effect: .*{said}"):
        train(options)


@pytest.mark.parametrize("room", ["all", "least"])
@pytest.mark.parametrize("card", [False, True])
def test_on_a_device_it_has_the_bits_of_the_cpu(tmp_path: Path, room: str, card: bool) -> None:
    """The simulated one, and the device of a card on a card of paper whose streams lag."""
    write("qwen3_moe", tmp_path / "model", torch.bfloat16)
    with engine_of(tmp_path / "model", "disk") as (engine, _):
        value, wanted = loss_and_gradients(engine, *padded_batch())
    paper = FakeCard(seed=2)

    def make(nbytes: int) -> Device:
        return CudaDevice(nbytes, api=paper, watchdog_s=30)

    how: dict[str, Any] = {"make": make} if card else {}
    with engine_on_device(tmp_path / "model", "disk", room, **how) as (engine, _):
        again, found = loss_and_gradients(engine, *padded_batch())
    paper.end()
    assert again == value > 0
    assert found.keys() == wanted.keys()
    assert any(name.endswith("mlp.gate.weight") and g.any() for (name, _), g in wanted.items())
    for at, gradient in wanted.items():
        assert torch.equal(found[at], gradient), at


def test_a_run_warns_of_no_hook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is ours, and does train."""
    planned_once(monkeypatch)
    model = write_model(tmp_path / "model", "qwen3_moe")
    data = write_data(tmp_path / "data.jsonl")
    train(options_for(model, data, tmp_path, router_aux_loss=0.5, max_steps=2))
    assert "hook" not in caplog.text


LORA = {"method": "lora", "lora_r": 4, "lora_targets": ("q_proj", "gate_up_proj", "down_proj")}
ONE_LAYER = {**LORA, "lora_targets": r"model\.layers\.1\.mlp\.experts\..*"}
"""The logits of its router have no gradient, those of the layers above it have."""


@pytest.mark.parametrize(
    "more",
    [
        {"grad_accum": 3},
        pytest.param({"max_grad_norm": 0.0}, marks=pytest.mark.sweep),
        pytest.param({"grad_accum": 2, **LORA}, marks=pytest.mark.sweep),
        ONE_LAYER,
    ],
)
def test_a_run_on_a_device_is_the_run_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    planned_once(monkeypatch)
    model = write_model(tmp_path / "model", "qwen3_moe")
    data = write_data(tmp_path / "data.jsonl")
    found = []
    for aux, where in ((0.5, {}), (0.5, {"gpu": 1 << 30, "device": "sim"}), (None, {})):
        place = tmp_path / str(len(found))
        options = options_for(model, data, place, router_aux_loss=aux, **more, **where)
        log = train(options, change=everything_else_on_disk)
        found.append((log.losses, log.norms, weights_of(place / "out")))
    assert found[0] == found[1]
    assert found[0][1] != found[2][1]
