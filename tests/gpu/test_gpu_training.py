"""Training with layers on the device: the bits of a resident model whose layers compute there.

What is not a layer is the CPU's on both sides; so are the optimizer's arithmetic and its states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from device_support import engine_on_device
from engine_support import assert_equal_weights, batch, group_at, oracle_of
from families import write
from torch import nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from offload.runtime.choice import choose, make_device
from offload.runtime.device import Device


@pytest.fixture(autouse=True)
def _repeatable(place: torch.device) -> Iterator[None]:
    """A card's fused attention adds gradients in any order, and its products may share sums."""
    if place.type == "cpu":
        yield
        return
    with sdpa_kernel(SDPBackend.MATH):
        yield


def computes_on(place: torch.device, layer: nn.Module) -> None:
    """Have a layer compute there, its weights brought and its gradients taken back by autograd."""
    inner = layer.forward

    def there(*args: Any, **kwargs: Any) -> Any:
        own = {n: t.to(place) for n, t in (*layer.named_parameters(), *layer.named_buffers())}
        layer.__dict__["forward"] = inner
        try:
            out = functional_call(layer, own, moved(args, place), moved(kwargs, place))
        finally:
            layer.__dict__["forward"] = there
        return moved(out, torch.device("cpu"))

    layer.__dict__["forward"] = there


def moved(value: Any, place: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(place)
    if isinstance(value, (tuple, list)):
        return type(value)(moved(v, place) for v in value)
    if isinstance(value, dict):
        return {k: moved(v, place) for k, v in value.items()}
    return value


@pytest.fixture
def make(device: str) -> Callable[[int], Device]:
    return lambda capacity: make_device(choose(device, 1 << 30), capacity)


@pytest.mark.parametrize("clip", [0.5, 0.0])
@pytest.mark.parametrize("room", ["all", "least"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_weights_and_losses_are_equal(
    tmp_path: Path, make: Callable[[int], Device], place: torch.device,
    family: str, room: str, clip: float,
) -> None:  # fmt: skip
    write(family, tmp_path / "m", torch.bfloat16)
    with engine_on_device(tmp_path / "m", "disk", room, make=make) as (engine, card):
        oracle = oracle_of(tmp_path / "m", engine.layout)
        tier = engine.homes.tier
        assert tier is not None
        names = {id(m): n for n, m in engine.model.named_modules()}
        for unit in tier.placement.units:
            name = names[id(engine.layout.units[unit].module)]
            computes_on(place, oracle.model.get_submodule(name))
        for step in range(3):
            ids = batch(step, 0)
            engine.begin_forward()
            if not clip:
                engine.in_backward = group_at(step)
            ours = engine.model(input_ids=ids, labels=ids).loss
            wanted = oracle.model(input_ids=ids, labels=ids, use_cache=False).loss
            assert torch.equal(ours, wanted), step
            ours.backward()
            wanted.backward()
            engine.end_backward()
            result = engine.step(group_at(step), clip)
            assert result.norm == oracle.step(group_at(step), clip), step
        engine.drain()
        assert tier.weights.up_bytes
        peak = card.peak_memory()
        assert peak is None or peak >= tier.placement.arena_bytes
        assert_equal_weights(engine, oracle)
