"""``offload doctor --warm``: every kernel that this machine can need, compiled ahead."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.cli import console
from offload.cli.compiling import compiling_notice
from offload.cpu_ops.isa import choose
from offload.cpu_ops.kernel_cache import VARIABLE
from offload.cpu_ops.warm import compile_ahead, every_kernel, missing
from offload.errors import OffloadError
from offload.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """What is compiled on this machine. ``todo_s``: about how long the rest takes to compile;
    ``as_asked``: whether ``directory`` is in the one that the environment names."""

    isa: str
    total: int
    compiled: int
    todo_s: float
    directory: Path | None
    as_asked: bool

    @property
    def nbytes(self) -> int:
        """Of what Numba keeps in the directory, older versions included."""
        if self.directory is None:
            return 0
        # nbi: an index; nbc: machine code
        return sum(file.stat().st_size for file in self.directory.glob("*.nb[ci]"))

    @property
    def place(self) -> str:
        """The directory and what it holds, for people."""
        return f"{self.directory} ({format_bytes(self.nbytes)})"


def take_stock() -> Stock:
    """Look, and compile nothing.

    Raises:
        OffloadError: OFFLOAD_ISA names what this machine cannot run.
    """
    isa, kernels = choose().value, every_kernel()
    cache = kernels[0].cache()
    todo = missing(kernels)
    return Stock(
        isa=isa,
        total=len(kernels),
        compiled=len(kernels) - len(todo),
        todo_s=sum(kernel.seconds for kernel in todo),
        directory=None if cache is None else Path(cache.cache_path),
        as_asked=cache is None or cache.as_asked,
    )


def warm() -> dict[str, Any]:
    """Compile what is missing and say where it lies; returns the same for ``--json``. What was
    compiled when it is interrupted stays.

    Raises:
        OffloadError: nothing could be kept.
    """
    before = take_stock()
    if before.directory is None or not before.as_asked:
        where = "anywhere" if before.as_asked else f"where {VARIABLE} says"
        raise OffloadError(
            f"compiled kernels cannot be kept {where}: set {VARIABLE} to a directory that can be "
            f"written, here and for every later command"
        )
    out, seconds = console.out(), 0.0
    if before.compiled < before.total:
        with compiling_notice("ahead of use, Ctrl-C keeps what is done") as notice:

            def report(at: Any) -> None:
                nonlocal seconds
                seconds = at.seconds
                notice(at)

            compile_ahead(missing(every_kernel()), report)
    after = take_stock()
    new = after.compiled - before.compiled
    if new:
        said = f"{new} kernels compiled in {seconds:.0f} s: all {after.total} for {after.isa}"
    else:
        said = f"nothing to compile: all {after.total} kernels for {after.isa}"
    out.print(f"{said} are in {after.place}", soft_wrap=True)
    return {
        "isa": after.isa,
        "kernels": after.total,
        "compiled_before": before.compiled,
        "compiled": after.compiled,
        "seconds": seconds,
        "directory": str(after.directory),
        "directory_bytes": after.nbytes,
    }
