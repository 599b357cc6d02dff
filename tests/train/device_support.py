"""Training engines whose layers run on a device, from the most room on it to the least."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine_support import engine_of, placements

from offload.runtime.device import Device
from offload.runtime.sim_device import SimDevice
from offload.train.device_plan import DevicePlacement, device_units, plan_device
from offload.train.engine import Engine
from offload.train.layout import TrainLayout
from offload.train.opening import Placement
from offload.train.row_grads import lookup_tables

ARGUMENTS, RESULTS = 512 << 10, 256 << 10
"""Bytes: more than tiny units take."""


def on_device(layout: TrainLayout, room: str) -> DevicePlacement:
    """``room``: "all" (every layer's weights stay), "some" or "least"."""
    units = device_units(layout, frozenset(lookup_tables(layout)))

    def plan(budget: int) -> DevicePlacement:
        return plan_device(layout, budget, units, up=ARGUMENTS, down=RESULTS, work=0)

    most = plan(1 << 40)
    if room == "all":
        return most
    least = replace(most, slots=1, expert_slots=min(1, most.expert_slots), gradients=1)
    assert plan(least.nbytes) == replace(least, budget=least.nbytes)
    if room == "least":
        return least
    two = replace(most, slots=2, expert_slots=min(2, most.expert_slots), gradients=2)
    return plan(two.nbytes)


@contextlib.contextmanager
def engine_on_device(
    directory: Path, place: str, room: str, *, make: Callable[[int], Device] | None = None,
    seed: int = 0, **options: Any,
) -> Iterator[tuple[Engine, Any]]:  # fmt: skip
    """As ``engine_of``, with the layers on a device; ends with its ``check``."""
    devices: list[Device] = []

    def where(layout: TrainLayout) -> Placement:
        return replace(placements(layout)[place], device=on_device(layout, room))

    with contextlib.ExitStack() as stack:
        device = (make or (lambda n: SimDevice(n, seed=seed, watchdog_s=20.0)))(1 << 30)
        devices.append(device)
        stack.callback(device.close)
        with engine_of(directory, where, device=device, **options) as (engine, _):
            yield engine, device
            engine.drain()
            device.check()
