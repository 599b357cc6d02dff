"""``offload probe``: measure this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offload.cli import flags, output
from offload.cli.signals import signals_wait
from offload.errors import StoreError

if TYPE_CHECKING:
    from offload.scheduler.hardware import Hardware, Rate


def probe(
    disk: Annotated[
        Path, typer.Option(metavar="DIR", help="A directory on the disk to measure.")
    ] = Path("."),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter samples.")] = False,
    threads: flags.Threads = None,
    json_file: flags.JsonFile = None,
    verbose: flags.Verbose = False,
) -> None:
    """Measure the disk, the memory and the CPU, and keep the rates for predictions.

    Takes up to 1 GiB of memory and disk for half a minute and leaves nothing behind. Nothing else
    should run meanwhile: the spread shows if something did.
    """
    output.check_json_target(json_file)
    from offload.cli import libraries

    libraries.set_up(verbose=verbose)
    from offload.cli import console
    from offload.runtime.hardware_cache import default_threads, save
    from offload.runtime.probe import probe as measure
    from offload.scheduler.hardware_file import document

    threads = threads or default_threads()
    with signals_wait(), console.share_progress("probing") as report:
        found = measure(disk, quick=quick, threads=threads, progress=report)
    out = console.out()
    out.print(f"{found.name}, {threads} thread{'s' if threads > 1 else ''}", style="bold")
    out.print(console.rows(_lines(found), heads=("", "median", "lowest", "highest", "samples")))
    output.write_json(json_file, document(found))  # measured it is, whether it can be kept or not
    try:
        kept = save(disk, found, threads=threads)
    except OSError as error:
        raise StoreError(
            f"the rates cannot be kept: {error}; set XDG_CACHE_HOME to a writable directory"
        ) from error
    console.note(f"kept in {kept}")


def _lines(found: Hardware) -> list[tuple[str, ...]]:
    named = [
        ("disk read", found.ssd_read),
        ("disk write", found.ssd_write),
        ("disk read and write", found.ssd_mixed),
        ("RAM read", found.ram_read),
        ("RAM copy", found.memcpy),
        *((f"GEMV {dtype}", rate) for dtype, rate in found.gemv.items()),
        *((f"matmul {dtype}", rate) for dtype, rate in found.matmul.items()),
    ]
    return [(name, *_cells(rate)) for name, rate in named]


def _cells(rate: Rate) -> tuple[str, ...]:
    scale, unit = (1e9, "GB/s") if rate.unit == "B/s" else (1e9, "GFLOP/s")
    values = [f"{value / scale:.3g} {unit}" for value in (rate.median, rate.low, rate.high)]
    return (*values, str(rate.n))
