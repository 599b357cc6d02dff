"""Compiled entry points: C functions of one address, cached on disk.

Numba's cache is keyed by the signature, the compiler's target (processor name and flags, so a
cache on a shared disk is safe), the bytecode and the closure of the entry. The closure holds tags:
format, instruction set and the digest of our sources.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from numba import cfunc
from numba.core import types

from offload.cpu_ops.ffn import expert_ffn
from offload.cpu_ops.formats import get_format
from offload.cpu_ops.isa import Isa, choose
from offload.cpu_ops.tags import tag
from offload.cpu_ops.tiles import gemm

log = logging.getLogger(__name__)

_SIGNATURE = types.void(types.int64)


@dataclass(frozen=True, slots=True)
class Entry:
    """A compiled kernel."""

    address: int
    call: Callable[[int], None]
    """The same as a Python callable; it releases the GIL."""
    cached: bool
    """Whether it came from the disk."""
    keep: Any
    """What owns the code."""


def compile_entry(body: Callable[[int], None], what: str) -> Entry:
    """A C function of ``body``, from the disk if it is there; ``what`` is for the log."""
    began = time.perf_counter()
    compiled: Any = cfunc(_SIGNATURE, cache=True, error_model="numpy")(body)
    cached = compiled.cache_hits > 0
    seconds = time.perf_counter() - began
    log.debug("%s %s in %.2f s", "loaded" if cached else "compiled", what, seconds)
    return Entry(compiled.address, compiled.ctypes, cached, compiled)


@functools.cache
def gemm_entry(format_name: str, isa: Isa) -> Entry:
    fmt, instructions = tag("format", get_format(format_name).name), tag("isa", isa.value)

    def gemm_body(arguments: int) -> None:
        gemm(fmt, instructions, arguments)

    return compile_entry(gemm_body, f"gemm {format_name} for {isa.value}")


@functools.cache
def ffn_entry(gate_up_name: str, down_name: str, isa: Isa) -> Entry:
    gate_up, down = (tag("format", get_format(n).name) for n in (gate_up_name, down_name))
    instructions = tag("isa", isa.value)

    def ffn_body(arguments: int) -> None:
        expert_ffn(gate_up, down, instructions, arguments)

    return compile_entry(ffn_body, f"expert ffn {gate_up_name}/{down_name} for {isa.value}")


def warm(
    formats: Iterable[str] = (),
    experts: Iterable[tuple[str, str]] = (),
    *,
    isa: str | None = None,
) -> dict[str, bool]:
    """Compile ahead of use, or load from disk: matrix kernels of ``formats``, expert kernels of
    (gate and up, down) pairs. Returns which of them came from the disk."""
    chosen = choose(isa)
    found = {name: gemm_entry(name, chosen).cached for name in formats}
    for gate_up, down in experts:
        found[f"{gate_up}/{down}"] = ffn_entry(gate_up, down, chosen).cached
    return found
