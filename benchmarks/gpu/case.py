"""One measurement in a process of its own: ``case.py JOB`` with a job as JSON; prints a result.

A process each, because a cap of the device's memory, its peak, and an error are a process's.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kernels
import machine
import torch
import training

GIB = 1 << 30
BLOCK = 64 << 20
"""Bytes of one copy, about what a layer's projection has."""

SPARE = 256 << 20
"""Beyond the budget, of a process's hard cap: the allocator's segments are of 2 and 20 MiB, and
what is left of one counts."""


def main() -> None:
    job = json.loads(sys.argv[1])
    cases: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "machine": machine.look, "link": link, "stream": stream, "resident": resident,
        "accelerate": accelerate,
        "kernels": kernels.rates, "kernels agree": kernels.agree,
        "train resident": training.resident, "train offload": training.offload,
    }  # fmt: skip
    print(json.dumps(cases[job["kind"]](job)))


# -- the link ---------------------------------------------------------------------------------


def link(job: dict[str, Any]) -> dict[str, Any]:
    """Bytes per second of our arenas' copies, and of torch's with its own pinned memory."""
    from offload.runtime.cuda_api import TorchCard
    from offload.runtime.cuda_device import CudaDevice
    from offload.runtime.sim_device import SimDevice

    nbytes = int(job["nbytes"])
    block = min(BLOCK, nbytes // 4)
    found: dict[str, Any] = {}
    if job["device"] == "sim":
        rate = 2.0e9
        sim = SimDevice(2 * nbytes, rate, rate, seed=None, poison=False, check_races=False)
        found["simulated_bytes_per_s"] = rate
        found["arena"] = arena_rates(sim, nbytes, block)
        return found
    found["arena"] = arena_rates(CudaDevice(2 * nbytes), nbytes, block)
    pin, TorchCard.pin = TorchCard.pin, lambda *_: "refused for the measurement"  # type: ignore[method-assign]
    try:
        found["staged"] = arena_rates(CudaDevice(2 * nbytes), nbytes, block)
    finally:
        TorchCard.pin = pin  # type: ignore[method-assign]
    found["torch_pinned"] = torch_rates(nbytes, block, pinned=True)
    found["torch_pageable"] = torch_rates(nbytes, block, pinned=False)
    return found


def arena_rates(device: Any, nbytes: int, block: int) -> dict[str, float]:
    """Both directions, one after the other, in copies of ``block``; and both at once."""
    from offload.runtime.device import Region

    began = time.perf_counter()
    host = device.host_memory(nbytes, "host")
    made_s = time.perf_counter() - began
    slots = device.device_memory(nbytes, "slots")
    host.tensor().fill_(1)
    device.touch("host", Region(host, 0, nbytes), "w")
    device.h2d.wait(device.compute.record())

    def copies(up: bool) -> Any:
        event = None
        for at in range(0, nbytes - block + 1, block):
            a, b = Region(slots, at, block), Region(host, at, block)
            event = device.copy(a, b, device.h2d) if up else device.copy(b, a, device.d2h)
        return event

    moved = nbytes // block * block

    def timed(*ups: bool) -> float:
        rates = []
        for _ in range(4):
            began = time.perf_counter()
            for event in [copies(up) for up in ups]:
                event.wait()
            rates.append(len(ups) * moved / (time.perf_counter() - began))
        return sorted(rates[1:])[1]

    found = {
        "pin_s": made_s,
        "h2d_bytes_per_s": timed(True),
        "d2h_bytes_per_s": timed(False),
        "both_bytes_per_s": timed(True, False),
    }
    device.close()
    return found


def torch_rates(nbytes: int, block: int, *, pinned: bool) -> dict[str, float]:
    """The same copies of torch's own memory, as the link's reference."""
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=pinned)
    slots = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    found = {}
    for name, into, out_of in (("h2d", slots, host), ("d2h", host, slots)):
        rates = []
        for _ in range(4):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for at in range(0, nbytes - block + 1, block):
                into[at : at + block].copy_(out_of[at : at + block], non_blocking=True)
            torch.cuda.synchronize()
            rates.append(nbytes // block * block / (time.perf_counter() - began))
        found[f"{name}_bytes_per_s"] = sorted(rates[1:])[1]
    return found


# -- models -----------------------------------------------------------------------------------


def stream(job: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint through ``offload.load``, its device memory capped, against its bound."""
    from offload.blocks import Tier
    from offload.models.load import Options, prepare

    name = "cuda" if job["device"] == "cuda" else "sim"
    prompt = max(job["prompts"])
    base: dict[str, Any] = {
        "device": name, "context": prompt + job["tokens"] + 8, "prompt_tokens": prompt,
        "ram": job["ram"],
    }  # fmt: skip
    room = device_room(name)
    whole = prepare(job["model"], Options(**base, gpu=room))
    weights = sum(s.slot_nbytes for s in whole.cut.blocks.values())
    routed = [b for g in whole.cut.groups for b in g.blocks]
    experts = sum(whole.cut.blocks[b].slot_nbytes for b in routed)
    # Cut as a small budget is cut: the head may then be in slices.
    small = prepare(job["model"], Options(**base, gpu=whole.plan.resident_bytes(Tier.DEVICE) - 1))
    least = small.minimum[Tier.DEVICE]
    ratio = job.get("ratio")
    wanted = weights // ratio if ratio else least + int(job["share"] * experts)
    gpu = min(room, max(least, wanted))
    with capped(name, gpu):
        prepared = prepare(job["model"], Options(**base, gpu=gpu))
        began = time.perf_counter()
        model = prepared.open()
        load_s = time.perf_counter() - began
        figures = speed(model, job, model.offload.stats)
        stats = model.offload.stats()
        handle = model.offload
        repeated = handle.executor.repeated
        handle.close()
    copied = figures.pop("h2d_bytes_per_token")
    rate = job.get("link_bytes_per_s")
    bound_s = copied / rate if rate and copied else None
    seconds = 1 / figures["decode_tok_s"]
    return {
        **figures,
        "load_s": load_s,
        "weight_bytes": weights,
        "gpu_budget_bytes": gpu,
        "least_gpu_bytes": least,
        "device_peak_bytes": stats["device_peak_bytes"],
        "within_budget": stats["device_peak_bytes"] is None or stats["device_peak_bytes"] <= gpu,
        "hit_rate": stats["hit_rate"],
        "host_waits": stats["host_waits"],
        "repeated_units": repeated,
        "disk_read_bytes": stats["disk_read_bytes"],
        "h2d_bytes_per_token": copied,
        "link_bound_s": bound_s,
        "of_link_bound": None if bound_s is None else bound_s / seconds,
        "notes": list(handle.notes),
    }


def resident(job: dict[str, Any]) -> dict[str, Any]:
    """Unmodified transformers with everything on the device."""
    from transformers import AutoModelForCausalLM

    kwargs = {"experts_implementation": "eager"} if job.get("moe") else {}
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto", **kwargs).eval()
    return speed(model.to(torch_name(job)), job)


def accelerate(job: dict[str, Any]) -> dict[str, Any]:
    """The peer: ``device_map="auto"`` with the same budget of device memory, the rest in RAM."""
    from transformers import AutoModelForCausalLM

    if job["device"] != "cuda":
        return {"skipped": "accelerate has no simulated device"}
    # What is not weights comes out of the same budget in ours.
    limit = max(job["gpu"] - (GIB if job["gpu"] > 2 * GIB else job["gpu"] // 2), 1 << 20)
    with capped("cuda", job["gpu"]):
        model = AutoModelForCausalLM.from_pretrained(
            job["model"], dtype="auto", device_map="auto", max_memory={0: limit, "cpu": job["ram"]}
        )
        return {**speed(model.eval(), job), "device_peak_bytes": torch.cuda.max_memory_allocated()}


def speed(
    model: Any, job: dict[str, Any], stats: Callable[[], dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Prefill of each prompt's length and greedy decode after the first, in tokens per second."""
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Any] = {"prefill": {}}
    place = torch_name(job)
    for tokens in job["prompts"]:
        ids_BL = torch.randint(3, vocabulary, (1, tokens), generator=generator).to(place)
        times: list[float] = []
        for _ in range(2):  # the first warms up
            began = time.perf_counter()
            with torch.no_grad():
                float(model(ids_BL, logits_to_keep=1).logits.flatten()[0])
            times.append(time.perf_counter() - began)
        found["prefill"][str(tokens)] = {"seconds": times[-1], "tok_s": tokens / times[-1]}
    clock = Clock(stats)
    ids_BL = torch.randint(3, vocabulary, (1, min(job["prompts"])), generator=generator).to(place)
    n = job["tokens"]
    model.generate(
        ids_BL, max_new_tokens=n, min_new_tokens=n, do_sample=False, streamer=clock, pad_token_id=0
    )
    steps = [b - a for a, b in itertools.pairwise(clock.times[1:])]
    found["decode_tok_s"] = len(steps) / sum(steps)
    found["decode_s"] = {"median": sorted(steps)[len(steps) // 2], "most": max(steps)}
    if stats is not None:
        found["h2d_bytes_per_token"] = (clock.bytes[-1] - clock.bytes[1]) / len(steps)
    return found


class Clock:
    """A streamer that notes when each token came, and what had been copied by then."""

    def __init__(self, stats: Callable[[], dict[str, Any]] | None) -> None:
        self.times: list[float] = []
        self.bytes: list[int] = []
        self._stats = stats

    def put(self, _: Any) -> None:
        self.times.append(time.perf_counter())
        self.bytes.append(self._stats()["h2d_bytes"] if self._stats else 0)

    def end(self) -> None:
        """Nothing is left to do."""


def torch_name(job: dict[str, Any]) -> str:
    return "cuda" if job["device"] == "cuda" else "cpu"


def device_room(name: str) -> int:
    if name != "cuda":
        return 64 * GIB
    free, _ = torch.cuda.mem_get_info()
    return math.floor(free * 0.95)


@contextlib.contextmanager
def capped(name: str, nbytes: int) -> Iterator[None]:
    """A hard cap of this process's device memory a little above the budget."""
    if name != "cuda":
        yield
        return
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (nbytes + SPARE) / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def pack_model(model: Path, out: Path, quant: str) -> None:
    """A pack of a checkpoint, once."""
    if not (out / "pack.json").is_file():
        done = subprocess.run(
            [sys.executable, "-m", "offload", "pack", str(model), str(out), "--quant", quant],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stderr.strip()[-2000:])


def make_model(config: Path, out: Path) -> None:
    """A random checkpoint of ``config``, once."""
    if not (out / "config.json").is_file():
        from offload.models.synth import synth

        synth(config, out, seed=0)


if __name__ == "__main__":
    main()
