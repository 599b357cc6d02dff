"""Training engines whose layers run on a device, from the most room on it to the least."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from engine_support import engine_of, placements
from lora_support import adapted_engine, pinned

from offload.runtime.cuda_device import CudaDevice
from offload.runtime.device import Device, Event
from offload.runtime.sim_device import SimDevice
from offload.runtime.sim_event import SimEvent
from offload.train import card_values
from offload.train.device_plan import DevicePlacement, HandOver, device_units, plan_device
from offload.train.device_weights import _Cargo
from offload.train.engine import Engine
from offload.train.layout import TrainLayout
from offload.train.lora import Adapters
from offload.train.marks import Marks
from offload.train.opening import Placement
from offload.train.row_grads import lookup_tables
from offload.train.update_place import place_updates
from offload.train.updates import Updater

ROOMS = ["all", pytest.param("some", marks=pytest.mark.sweep), "least"]
"""On the device; see ``on_device``. Between the two ends only before a release."""

ARGUMENTS, RESULTS = 512 << 10, 256 << 10
"""Bytes: more than tiny units take."""
LEAST_RESULTS = 16 << 10
"""Where a few take each other's places."""


def on_device(layout: TrainLayout, room: str) -> DevicePlacement:
    """``room``: "all" (every layer's weights stay), "some" or "least"."""
    units = device_units(layout, frozenset(lookup_tables(layout)))

    def plan(budget: int) -> DevicePlacement:
        most, down = room == "all", LEAST_RESULTS if room == "least" else RESULTS
        return plan_device(
            layout,
            budget,
            units,
            up=ARGUMENTS,
            down=down,
            work=0,
            hand_over=HandOver(same=most * ARGUMENTS),
        )

    most = plan(1 << 40)
    if room == "all":
        return most
    least = replace(most, slots=1, expert_slots=min(1, most.expert_slots), gradients=1)
    assert plan(least.nbytes) == replace(least, budget=least.nbytes)
    if room == "least":
        return least
    two = replace(most, slots=2, expert_slots=min(2, most.expert_slots), gradients=2)
    return plan(two.nbytes)


STRICT = os.environ.get("OFFLOAD_TEST_CARD") == "strict"
"""Instead of simulated devices a card's, on a fake that is of a device of its own to torch."""


def strict_device(capacity: int) -> Device:
    import strict_card

    card_values.make_launcher = strict_card.launcher
    return CudaDevice(capacity, api=strict_card.StrictCard(), watchdog_s=30)


@contextlib.contextmanager
def simulated(make: Callable[[int], Device] | None = None, seed: int = 0) -> Iterator[Device]:
    """A device; behind the block it has been checked, if nothing else went wrong."""
    make = make or (strict_device if STRICT else partial(SimDevice, seed=seed, watchdog_s=20.0))
    device = make(1 << 30)
    with contextlib.closing(device):
        yield device
        device.check()


@contextlib.contextmanager
def engine_on_device(
    directory: Path, place: str, room: str, *, make: Callable[[int], Device] | None = None,
    seed: int = 0, every: int = 0, **options: Any,
) -> Iterator[tuple[Engine, Any]]:  # fmt: skip
    """As ``engine_of``, with the layers on a device; ends with its ``check``. ``every``: of so many
    tiles of a block one is updated there; 0: none is."""

    def where(layout: TrainLayout) -> Placement:
        device = on_device(layout, room)
        if every:
            kinds = Updater.kinds(layout, options.get("states", "fp32"))
            updates = place_updates(layout, kinds, options.get("grad_dtype"), every)
            assert updates is not None
            device = replace(device, updates=updates)
        return replace(placements(layout)[place], device=device)

    with (
        simulated(make, seed) as device,
        engine_of(directory, where, device=device, **options) as (engine, _),
    ):
        yield engine, device
        engine.drain()


@contextlib.contextmanager
def adapters_on_device(
    directory: Path, place: str, room: str, *, make: Callable[[int], Device] | None = None,
    seed: int = 0, **how: Any,
) -> Iterator[tuple[Engine, Adapters]]:  # fmt: skip
    """As ``adapted_engine`` with pinned adapters and the layers on a device."""

    def where(layout: TrainLayout) -> Placement:
        return replace(pinned(place)(layout), device=on_device(layout, room))

    with (
        simulated(make, seed) as device,
        adapted_engine(directory, where, options={"device": device}, **how) as (
            engine, adapters, _,
        ),
    ):  # fmt: skip
        yield engine, adapters
        engine.drain()


def races_without(
    who: str, caller: str, monkeypatch: pytest.MonkeyPatch, run: Callable[[Device], None],
    memory: str = "",
) -> tuple[str, ...]:  # fmt: skip
    """The races that ``run`` has where ``who`` (a stream, or the host) does not wait in the
    functions of the package named ``caller``.

    ``who`` "guards": a slot is free when its copy is over; "copied": updates know of no copy (that
    ``caller`` makes, if one is named). ``memory``: only for slots in the memory of that name.
    """
    skipped = []

    def in_it(names: Mapping[str, Any]) -> bool:
        slot = names["slot"] if "slot" in names else names["cargo"].slot
        return bool(slot.region.memory.name == memory)

    def guards(cargo: _Cargo) -> tuple[Event, ...]:
        if memory and not in_it({"cargo": cargo}):
            return kept(cargo)
        return (cargo.ready,)

    kept = cast(Any, _Cargo.guards).fget

    def unless_called_by(wait: Any) -> Any:
        def maybe(*args: Any) -> None:
            frame = sys._getframe(1)
            code = frame.f_code
            mine = code.co_name == caller and Path(code.co_filename).parent.name == "train"
            if mine and (not memory or in_it(frame.f_locals)):
                skipped.append(caller)
            else:
                wait(*args)

        return maybe

    device = SimDevice(1 << 30, watchdog_s=20.0)
    if who == "host":
        monkeypatch.setattr(SimEvent, "wait", unless_called_by(SimEvent.wait))
    elif who == "guards":
        monkeypatch.setattr(_Cargo, "guards", property(guards))
    elif who == "copied":
        copied = unless_called_by(Marks.copied) if caller else lambda *_: None
        monkeypatch.setattr(Marks, "copied", copied)
    else:
        stream = getattr(device, who)
        monkeypatch.setattr(stream, "wait", unless_called_by(stream.wait))
    with contextlib.suppress(Exception):  # wrong numbers, or the race, whichever is seen first
        run(device)
    assert skipped or not caller
    return device.races()
