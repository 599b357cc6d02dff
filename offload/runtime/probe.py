"""Measure this machine and a disk of it: the facts every plan stands on."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from offload.errors import PlanError, StoreError
from offload.io.tune import sample
from offload.runtime.hardware_cache import (
    cpu_name,
    default_threads,
    disk_name,
    load_cached,
    save,
)
from offload.runtime.rss import available_ram, ram_limit
from offload.scheduler.hardware import BYTES_PER_S, Hardware, Rate
from offload.units import format_bytes

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Called with what is measured and the share of the whole probe that is done, 0 to 1."""

DTYPES = ("float32", "bfloat16")
LEAST_RAM = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much to measure. Sizes in bytes, times in seconds."""

    file_bytes: int = 1 << 30
    request_bytes: int = 1 << 20
    depth: int = 8
    ram_bytes: int = 1 << 30
    matmul_side: int = 2048
    samples: int = 7
    sample_s: float = 0.15


FULL = Effort()
QUICK = Effort(file_bytes=256 << 20, matmul_side=1024, samples=3, sample_s=0.05)


def probe(
    directory: str | os.PathLike[str],
    *,
    quick: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    effort: Effort | None = None,
) -> Hardware:
    """Measure the disk of ``directory``, the memory and the CPU; seconds to half a minute.

    The read rate is that of a checkpoint's own files if there is a large one in ``directory``.
    Takes at most 1 GiB of RAM (a quarter of what is available if that is less) and of disk, and
    leaves nothing behind. Nothing else should run meanwhile: the spread tells if something did.

    Args:
        quick: fewer and shorter samples.
        threads: of the CPU measurements; default: one per physical core.
        effort: in place of ``quick``.

    Raises:
        StoreError: the directory cannot be written, or its disk is full.
        PlanError: not even 64 MiB of RAM are left to measure with.
    """
    from offload.runtime import probe_compute as cpu  # torch: not before it is needed
    from offload.runtime.memory import HostMemory
    from offload.runtime.probe_disk import measure_disk

    report = progress or (lambda _what, _share: None)
    effort = effort or (QUICK if quick else FULL)
    threads = threads or default_threads()
    disk_share, steps = 0.5, 2 + 2 * len(DTYPES)
    disk = measure_disk(
        directory,
        file_bytes=effort.file_bytes,
        request_bytes=effort.request_bytes,
        depth=effort.depth,
        samples=effort.samples,
        progress=lambda share: report("disk", share * disk_share),
    )
    done = 0

    def step(what: str) -> None:
        nonlocal done
        done += 1
        report(what, disk_share + (1 - disk_share) * done / steps)

    memory = HostMemory(_ram_to_use(effort.ram_bytes), "memory probe")
    try:
        with cpu.torch_threads(threads):
            ram = cpu.ram_read(memory, samples=effort.samples, sample_s=effort.sample_s)
            step("RAM")
            copy = cpu.memcpy(memory, samples=effort.samples, sample_s=effort.sample_s)
            step("memcpy")
            gemv, matmul = {}, {}
            for dtype in DTYPES:
                gemv[dtype] = cpu.gemv(
                    memory, dtype, samples=effort.samples, sample_s=effort.sample_s
                )
                step(f"GEMV {dtype}")
                matmul[dtype] = cpu.matmul(
                    dtype, effort.matmul_side, samples=effort.samples, sample_s=effort.sample_s
                )
                step(f"matmul {dtype}")
    finally:
        memory.close()
    return Hardware(
        ssd_read=_of_a_checkpoint(directory) or disk.read,
        ssd_write=disk.write,
        ssd_mixed=disk.mixed,
        ram_read=ram,
        memcpy=copy,
        matmul=matmul,
        gemv=gemv,
        cores=threads,
        ram_bytes=ram_limit(),
        name=f"{cpu_name()}, {disk_name(directory)}",
    )


def _of_a_checkpoint(directory: str | os.PathLike[str]) -> Rate | None:
    """The rate at which a checkpoint in ``directory`` is read, if there is a large one: what was
    just written, as the probe's own file, a virtual disk may read from its host's memory."""
    try:
        rates = sample(sorted(Path(directory).glob("*.safetensors")))
    except StoreError as error:
        log.warning("the checkpoint's files in %s are not sampled: %s", directory, error)
        return None
    return Rate.of(rates, BYTES_PER_S) if rates else None


def _ram_to_use(wished: int) -> int:
    room = available_ram() // 4
    if room < LEAST_RAM:
        raise PlanError(
            f"{format_bytes(4 * room)} of RAM are available; measuring needs "
            f"{format_bytes(4 * LEAST_RAM)}: stop something or raise the limit"
        )
    if room < wished:
        log.warning("measuring RAM over %s only: caches may flatter it", format_bytes(room))
    return min(wished, room)


__all__ = ["FULL", "QUICK", "Effort", "Progress", "load_cached", "probe", "save"]
