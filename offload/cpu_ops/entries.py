"""Compiled entry points: C functions of one address, cached on disk.

Numba's cache is keyed by the signature, the compiler's target (processor name and flags, so a
cache on a shared disk is safe), the bytecode and the closure of the entry. The closure holds tags:
format, instruction set and the digest of our sources. A ``Kernel`` is an entry that may not be
compiled yet, so that whoever knows what will be needed can say so, and how long it takes.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from numba.core import types
from numba.core.ccallback import CFunc
from numba.core.typing import templates

from offload.cpu_ops.ffn import expert_ffn
from offload.cpu_ops.formats import Activation, get_format
from offload.cpu_ops.isa import Isa, choose
from offload.cpu_ops.kernel_cache import KernelCache
from offload.cpu_ops.tags import tag
from offload.cpu_ops.tiles import gemm

log = logging.getLogger(__name__)

# Numba's own annotations are partial and differ between versions.
_signature: Any = templates.signature

_ARGUMENTS, _RESULT = (types.int64,), types.void


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


class Kernel:
    """A kernel of one address that may not be compiled yet.

    Attributes:
        what: says which it is.
        seconds: about how long it compiles on a core of 2023; estimates are scaled by what the
            first ones took.
    """

    def __init__(self, body: Callable[[int], None], what: str, seconds: float) -> None:
        self.what = what
        self.seconds = seconds
        self._body = body
        self._entry: Entry | None = None

    @property
    def ready(self) -> bool:
        """Whether it takes no compiling: it is loaded, or stored on the disk."""
        if self._entry is not None:
            return True
        cache = self.cache()
        return cache is not None and cache.has(_signature(_RESULT, *_ARGUMENTS))

    def cache(self) -> KernelCache | None:
        """Where it is stored, or would be; None if no directory can be written."""
        return KernelCache.of(self._body)

    def entry(self) -> Entry:
        """Load it from the disk, or compile it; once."""
        if self._entry is None:
            self._entry = _compile(self._body, self.what)
        return self._entry


def _compile(body: Callable[[int], None], what: str) -> Entry:
    began = time.perf_counter()
    # What ``numba.cfunc(cache=True)`` does, with our cache.
    compiled: Any = CFunc(body, (_ARGUMENTS, _RESULT), {}, {"error_model": "numpy"})
    cache = KernelCache.of(body)
    if cache is not None:
        compiled._cache = cache
    compiled.compile()
    cached = compiled.cache_hits > 0
    seconds = time.perf_counter() - began
    log.debug("%s %s in %.2f s", "loaded" if cached else "compiled", what, seconds)
    return Entry(compiled.address, compiled.ctypes, cached, compiled)


def compile_seconds(base: float, *formats: str) -> float:
    """``base`` for formats whose scales are simple; blocks of 256 take three times as long."""
    hard = sum(get_format(n).activation is Activation.Q8_256 for n in formats)
    return base * (1 + 2 * hard / max(1, len(formats)))


@functools.cache
def gemm_kernel(format_name: str, isa: Isa) -> Kernel:
    fmt, instructions = tag("format", get_format(format_name).name), tag("isa", isa.value)

    def gemm_body(arguments: int) -> None:
        gemm(fmt, instructions, arguments)

    seconds = compile_seconds(2.0, format_name)
    return Kernel(gemm_body, f"gemm {format_name} for {isa.value}", seconds)


@functools.cache
def gemm_entry(format_name: str, isa: Isa) -> Entry:
    return gemm_kernel(format_name, isa).entry()


@functools.cache
def ffn_kernel(gate_up_name: str, down_name: str, isa: Isa) -> Kernel:
    gate_up, down = (tag("format", get_format(n).name) for n in (gate_up_name, down_name))
    instructions = tag("isa", isa.value)

    def ffn_body(arguments: int) -> None:
        expert_ffn(gate_up, down, instructions, arguments)

    what = f"expert ffn {gate_up_name}/{down_name} for {isa.value}"
    return Kernel(ffn_body, what, compile_seconds(2.7, gate_up_name, down_name))


@functools.cache
def ffn_entry(gate_up_name: str, down_name: str, isa: Isa) -> Entry:
    return ffn_kernel(gate_up_name, down_name, isa).entry()


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
