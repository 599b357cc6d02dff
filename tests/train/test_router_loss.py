"""The load-balancing loss, a layer at a time, against transformers' own over all layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import batch, engine_of
from equivalence import reference
from families import write

from offload.train.router_loss import RouterLoss


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
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
        engine.model.eval()
        router = RouterLoss(engine.model, 0.5, lambda: 0)
        engine.extra = lambda: [(t, torch.full_like(t, 0.5)) for t in router.take_terms()]
        router.begin(mask)
        hidden = engine.model.model(input_ids=ids, attention_mask=mask).last_hidden_state
        assert router.value() == pytest.approx(float(wanted.detach()), rel=1e-5)
        hidden.backward(torch.zeros_like(hidden))
        engine.end_backward()
        for name, parameter in resident.named_parameters():
            if "experts" in name or "lm_head" in name or parameter.grad is None:
                continue
            block, piece = engine.piece_of(name)
            engine.gradients.settle(block)
            held = engine.gradients._held[block]
            if held.spilled:
                engine.gradients._fetch(engine.layout.blocks[block], held)
            ours = held.pieces[piece].view(parameter.shape)
            torch.testing.assert_close(ours, 0.5 * parameter.grad, rtol=1e-4, atol=1e-7)
        router.close()
