"""How fast a card computes and its link copies: measured with what will run, in about a second.

Copies go through the device's own arenas, so memory that the system does not pin is measured, and
planned for, at the rate of its staged copies.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

from offload.runtime.cuda_device import CudaDevice
from offload.runtime.device import Region
from offload.scheduler.hardware import BYTES_PER_S, FLOP_PER_S, Card, Hardware, Rate

DTYPES = ("float32", "bfloat16")
LINK_BYTES = 256 << 20
MEMORY_BYTES = 512 << 20
SIDE = 4096
"""Of the matrices that are multiplied with: a layer's size."""

SAMPLES, REPEATS = 5, 10


def on_card(
    hardware: Hardware,
    device: CudaDevice,
    *,
    link_bytes: int = LINK_BYTES,
    memory_bytes: int = MEMORY_BYTES,
    side: int = SIDE,
) -> Hardware:
    """The same machine with ``device``'s card in it, and the rates of its link.

    Takes ``link_bytes`` of RAM and of the card for a moment, then ``memory_bytes`` of the card.

    Raises:
        PlanError: the card has not so much memory free.
        DeviceError: it failed.
    """
    up, down = _link(device, link_bytes)
    compute = _compute(device, memory_bytes, side)
    device.api.release_cached()
    return dataclasses.replace(hardware, card=compute, h2d=up, d2h=down)


def _link(device: CudaDevice, nbytes: int) -> tuple[Rate, Rate]:
    host = device.host_memory(nbytes, "link probe")
    slot = device.device_memory(nbytes, "link probe")
    try:
        here, there = Region(host, 0, nbytes), Region(slot, 0, nbytes)
        host.tensor().fill_(1)  # pages exist
        up = _timed(lambda: device.copy(there, here, device.h2d).wait(), nbytes)
        down = _timed(lambda: device.copy(here, there, device.d2h).wait(), nbytes)
    finally:
        host.close()
        slot.close()
    return Rate.of(up, BYTES_PER_S), Rate.of(down, BYTES_PER_S)


def _compute(device: CudaDevice, nbytes: int, side: int) -> Card:
    place = device.torch_device

    def run(work: Callable[[], object], amount: float, unit: str = BYTES_PER_S) -> Rate:
        def all_of_it() -> None:
            for _ in range(REPEATS):
                work()
            device.compute.record().wait()

        return Rate.of(_timed(all_of_it, amount * REPEATS), unit)

    memory = device.device_memory(nbytes, "card probe")
    try:
        words = memory.tensor()[: nbytes // 8 * 8].view(torch.int64)
        words.fill_(1)
        read = run(lambda: words.sum(), words.nbytes)
        gemv, matmul = {}, {}
        with torch.inference_mode():
            for name in DTYPES:
                dtype: torch.dtype = getattr(torch, name)
                weights = memory.tensor()[: nbytes // (4 * side) * (4 * side)].view(dtype)
                weights = weights.view(-1, side)
                x = torch.ones((1, side), dtype=dtype, device=place)
                gemv[name] = run(partial(F.linear, x, weights), weights.nbytes)
                a = torch.full((side, side), 2.0**-8, dtype=dtype, device=place)
                matmul[name] = run(partial(F.linear, a, a), 2.0 * side**3, FLOP_PER_S)
            small = torch.ones((64, 64), device=place)
            launches = run(partial(F.linear, small[:1], small), small.nbytes)
    finally:
        memory.close()
    return Card(
        name=device.api.name,
        memory_bytes=device.api.room().total,
        read=read,
        matmul=matmul,
        gemv=gemv,
        launch_s=small.nbytes / launches.median,
    )


def _timed(work: Callable[[], object], amount: float) -> list[float]:
    """Rates of ``work``, which does ``amount``, without its first run."""
    rates = []
    for i in range(SAMPLES + 1):
        began = time.perf_counter()
        work()
        if i:
            rates.append(amount / max(time.perf_counter() - began, 1e-9))
    return rates


__all__ = ["on_card"]
