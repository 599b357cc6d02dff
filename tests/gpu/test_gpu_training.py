"""Training with layers on the device: the bits of a resident model whose layers compute there.

What is not a layer is the CPU's on both sides; so are the optimizer's arithmetic and its states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device_support import engine_on_device
from engine_support import assert_equal_weights, batch, group_at, oracle_of
from families import write
from torch import nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from offload.cpu_ops.adam_step import AdamStep
from offload.runtime.choice import choose, make_device
from offload.runtime.device import Device
from offload.train.device_updates import Part, site_for
from offload.train.tiles import Slot, SlotKind, narrow

FAMILIES = ("llama", "qwen3_moe")


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


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "room", "clip", "every"),
    [
        *((f, r, c, 0) for f in FAMILIES for r in ("all", "least") for c in (0.5, 0.0)),
        ("llama", "least", 0.5, 2),
        ("qwen3_moe", "all", 0.0, 1),
    ],
)
def test_weights_and_losses_are_equal(
    tmp_path: Path, make: Callable[[int], Device], place: torch.device,
    family: str, room: str, clip: float, every: int,
) -> None:  # fmt: skip
    """``every``: of so many tiles of states the device updates one."""
    if every and place.type == "cuda":
        pytest.importorskip("cupy")
    write(family, tmp_path / "m", torch.bfloat16)
    how: dict[str, Any] = {"make": make, "every": every}
    with engine_on_device(tmp_path / "m", "disk", room, **how) as (engine, card):
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
        assert not every or engine.updater.away.tiles
        peak = card.peak_memory()
        assert peak is None or peak >= tier.placement.arena_bytes
        assert_equal_weights(engine, oracle)


@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
def test_a_tile_takes_the_cpus_step(
    make: Callable[[int], Device], place: torch.device, states: str
) -> None:
    """Two million elements, some of them subnormal, three steps, in two parts."""
    if place.type == "cuda":
        pytest.importorskip("cupy")
    n, kind = 2 << 20, SlotKind(states, "bfloat16")
    rng = np.random.default_rng(0)
    gradient = (rng.standard_normal(n) * 10.0 ** rng.uniform(-12, 0, n)).astype(np.float32)
    gradient[::97] = 1e-40
    memory = np.zeros(kind.offsets(n)[-1], np.uint8)
    ours = Slot(kind, n, memory)
    narrow(rng.standard_normal(n).astype(np.float32), ours.copy)
    ours.start(ours.copy.copy())
    with contextlib.closing(make(1 << 30)) as device:
        site = site_for(device, 7, None, [kind])
        slot = torch.from_numpy(memory.copy()).to(place)
        there = torch.from_numpy(gradient.view(np.uint8)).to(place)
        for k in range(1, 4):
            parts = [
                Part(
                    step=AdamStep(lr=1e-3 * k, step=k, clip=0.3), start=at, count=n // 2, first=at,
                    gradient=gradient[at : at + n // 2],
                )
                for at in (0, n // 2)
            ]  # fmt: skip
            site.update(kind, n, slot, there, "float32", parts)
            for part in parts:
                assert part.gradient is not None
                ours.update(
                    part.step, part.gradient, part.start, part.count, seed=7, first=part.first,
                    workers=None,
                )  # fmt: skip
            found = Slot(kind, n, slot.cpu().numpy())
            for name in kind.names:
                np.testing.assert_array_equal(found.part(name), ours.part(name), f"{name}, {k}")
