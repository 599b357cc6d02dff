"""What a product that the CPU computes beside a device costs besides the product: measured.

Python, a hidden state on its way down, threads that wake each other, a result on its way up: all of
it on the road that real products take, with nothing to multiply. A tenth of a millisecond on one
machine, several times that on another, and different again on a card.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from functools import lru_cache

import torch

from offload.blocks import BlockKind, Tier, layout
from offload.io.stores import MemoryStore
from offload.runtime.choice import Choice, make_device
from offload.runtime.executor import Executor
from offload.scheduler.plan import SITE_ACTIVATIONS, DenseSites, Plan
from offload.scheduler.planner import PlanRequest, make_plan, minimum_budgets
from offload.scheduler.trace import Step, Trace

SAMPLES = 48
"""Products; the first third does not count: it makes what is made once."""

BYTES = 4096
"""Of a block, of which nothing is computed."""

ACTIVATIONS = 1 << 16
DEVICE_BYTES = 1 << 22


@lru_cache(maxsize=4)
def product_overhead_s(choice: Choice) -> float:
    """Seconds of an empty product on the CPU, for a row of 1024 numbers that is on the device and
    whose result is needed there.

    Raises:
        OffloadError: the device cannot be had.
    """
    plan = _plan()
    stay = sorted(plan.sites.blocks) if plan.sites is not None else []
    store = MemoryStore(plan.blocks.values(), {b: bytes(s.nbytes) for b, s in plan.blocks.items()})
    device = make_device(choice, DEVICE_BYTES)
    executor = Executor(plan, store, device)
    times: list[float] = []
    try:
        executor.start()
        x = torch.zeros(1, 1024, device=device.torch_device)
        while len(times) < SAMPLES:
            for block in stay:
                unit = f"u{block}"
                ticket = executor.enter(unit, ())
                began = time.perf_counter()
                executor.compute_below(block, [x], lambda _, below: below, x.shape).clone()
                times.append(time.perf_counter() - began)
                executor.leave(ticket, ())
    finally:
        executor.close()
    return statistics.median(times[SAMPLES // 3 :])


def _plan() -> Plan:
    """Four blocks in RAM of which the device holds less than all, computed below."""
    blocks = {b: layout(b, BlockKind.WEIGHT, [("w", "uint8", (BYTES,))]) for b in "abcd"}
    aside = {tier: {SITE_ACTIVATIONS: ACTIVATIONS} for tier in (Tier.RAM, Tier.DEVICE)}

    def ask(ram: int, device: int) -> PlanRequest:
        return PlanRequest(
            blocks=blocks, trace=Trace([Step(unit=f"u{b}", blocks=(b,)) for b in blocks]),
            budgets={Tier.RAM: ram, Tier.DEVICE: device}, reserves=aside,
            compute_tier=Tier.DEVICE,
        )  # fmt: skip

    plan = make_plan(ask(1 << 24, minimum_budgets(ask(1 << 24, 1 << 24))[Tier.DEVICE]))
    stay = frozenset(plan.tiers[Tier.RAM].pinned) - plan.tiers[Tier.DEVICE].pinned.keys()
    return replace(plan, sites=DenseSites(blocks=stay, rows=1))


__all__ = ["product_overhead_s"]
