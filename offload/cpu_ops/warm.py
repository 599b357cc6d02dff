"""Compiling ahead: which kernels something needs, which of them are missing, and getting them.

A kernel compiles for 1 to 25 s. Whoever is about to need some names them here first, so that a
user is told before and not left to wait. One after the other: Numba compiles under one lock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from offload.cpu_ops.block_attention import kernels_for
from offload.cpu_ops.block_quantise import quantise_kernel
from offload.cpu_ops.entries import Kernel, ffn_kernel, gemm_kernel
from offload.cpu_ops.formats import FORMATS, Format
from offload.cpu_ops.isa import choose
from offload.cpu_ops.kv_cache import PLAIN, KvType
from offload.cpu_ops.kv_quantised import quantised_layout, tail_layout
from offload.cpu_ops.layer_entries import (
    attend_kernel,
    attention_in_kernel,
    attention_kernels,
    attention_out_kernel,
    mlp_kernel,
    router_kernel,
)
from offload.cpu_ops.layer_plan import LayerPlan
from offload.cpu_ops.prefill import crossover, slab_kind
from offload.cpu_ops.prefill_kernels import (
    accumulate_kernel,
    activate_kernel,
    dequantize_kernel,
)
from offload.cpu_ops.program import program_kernels
from offload.cpu_ops.prompt import fits, prompt_kernels

log = logging.getLogger(__name__)

MIXES = (
    ("q4_k", "q6_k"), ("q5_k", "q6_k"), ("q4_k", "q8_0"), ("q4_k", "q5_0"), ("q5_k", "q5_1"),
    ("q6_k", "q8_0"), ("q4_0", "q4_1"),
)  # fmt: skip
"""(gate and up, down) as GGUF files mix them: better for some layers' down, or a format with small
blocks where columns are no multiple of 256."""

ATTENTION_MIXES = (
    ("q4_k", "q4_k", "q6_k", "q4_k"), ("q5_k", "q5_k", "q6_k", "q5_k"),
    ("q4_k", "q8_0", "q8_0", "q4_k"), ("q5_k", "q8_0", "q8_0", "q5_k"),
)  # fmt: skip
"""(q, k, v, o) of the same files."""


_WHOLE_DIM = 64
"""Heads in multiples of it have the fastest kernels of a processor, for all of them the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiling:
    """How far compiling is: ``done`` of ``total`` kernels, ``left_s`` to go by estimate,
    ``seconds`` gone; ``next``: the kernel that is compiled now, empty at the end."""

    done: int
    total: int
    next: str
    seconds: float
    left_s: float


Report = Callable[[Compiling], None]


def missing(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Those that would have to be compiled, each once, in order."""
    return [kernel for kernel in dict.fromkeys(kernels) if not kernel.ready]


def compile_ahead(kernels: Iterable[Kernel], report: Report | None = None) -> int:
    """Compile what is missing and load the rest; returns how many were compiled.

    ``report`` is called before each and at the end, never if nothing is missing. Without one the
    wait is announced by a warning in the log.
    """
    kernels = list(dict.fromkeys(kernels))
    todo = missing(kernels)
    if todo:
        _compile(todo, report)
    for kernel in kernels:
        kernel.entry()
    return len(todo)


def _compile(todo: list[Kernel], report: Report | None) -> None:
    total = sum(kernel.seconds for kernel in todo)
    level = logging.WARNING if report is None else logging.INFO
    log.log(
        level,
        "compiling %d CPU kernels for %s (first use on this machine, about %.0f s)",
        len(todo),
        choose().value,
        total,
    )
    began = time.perf_counter()
    gone = expected = 0.0
    for done, kernel in enumerate(todo):
        # Estimates are of one processor: what was compiled tells how fast this one is.
        pace = gone / expected if expected else 1.0
        if report is not None:
            left_s = pace * (total - expected)
            report(
                Compiling(done=done, total=len(todo), next=kernel.what, seconds=gone, left_s=left_s)
            )
        kernel.entry()
        expected += kernel.seconds
        gone = time.perf_counter() - began
    if report is not None:
        report(Compiling(done=len(todo), total=len(todo), next="", seconds=gone, left_s=0.0))
    log.log(level, "compiled %d CPU kernels in %.1f s", len(todo), gone)


def matrix_kernels(formats: Iterable[Format]) -> list[Kernel]:
    """For products with matrices in ``formats``, few tokens and many."""
    isa = choose()
    found = []
    for fmt in formats:
        found.append(gemm_kernel(fmt.name, isa))
        if crossover(fmt) is not None:
            found.append(dequantize_kernel(fmt.name, slab_kind(fmt), isa))
    return found


def expert_kernels(pairs: Iterable[tuple[str, str]]) -> list[Kernel]:
    """For routed experts in (gate and up, down) formats."""
    return [ffn_kernel(gate_up, down, choose()) for gate_up, down in pairs]


def layer_kernels(plan: LayerPlan, kv: KvType = KvType.F32) -> list[Kernel]:
    """For one sequence through a decoder layer, without its routed experts."""
    isa, attention = choose(), plan.attention
    q, k, v, o = (m.format.name for m in (attention.q, attention.k, attention.v, attention.o))
    found = attention_kernels(q, k, v, o, kv, isa)
    if kv.quantised:
        found += quantised_kernels(attention.dim, kv)
    if plan.router is not None:
        found.append(router_kernel(plan.router.gate.format.name, isa))
    found += [
        mlp_kernel(mlp.gate.format.name, mlp.down.format.name, isa)
        for mlp in (plan.mlp, plan.shared)
        if mlp is not None
    ]
    if fits(plan):
        if plan.router is not None:
            found.append(gemm_kernel(plan.router.gate.format.name, isa))
        found += prompt_kernels(kv)
    return found


def quantised_kernels(dim: int, kv: KvType) -> list[Kernel]:
    """For attention of heads of that size over a cache in 8 or 4 bits."""
    layouts = quantised_layout(1, dim, 1, kv), tail_layout(1, dim)
    blocks = [k for layout in layouts for k in kernels_for(layout, half_queries=False)]
    return [*dict.fromkeys(blocks), quantise_kernel(kv.value, KvType.F32.value)]


def every_kernel() -> list[Kernel]:
    """What any model can need on this machine, cheapest first: all formats by themselves and in
    the mixes that files have. What is in none of them is compiled when a model brings it."""
    isa = choose()
    pairs = [*((name, name) for name in FORMATS), *MIXES]
    attention = [*((name,) * 4 for name in FORMATS), *ATTENTION_MIXES]
    found = [
        activate_kernel(),
        accumulate_kernel(),
        *matrix_kernels(FORMATS.values()),
        router_kernel("f32", isa),
        *program_kernels(),
        *(kernel for kv in KvType for kernel in prompt_kernels(kv)),
        *(attend_kernel(kv.value) for kv in PLAIN),
        *(k for kv in KvType if kv.quantised for k in quantised_kernels(_WHOLE_DIM, kv)),
        *(ffn_kernel(*pair, isa) for pair in pairs),
        *(mlp_kernel(*pair, isa) for pair in pairs),
        *(attention_in_kernel(*names[:3], isa) for names in attention),
        *(attention_out_kernel(names[3], isa) for names in attention),
    ]
    return sorted(dict.fromkeys(found), key=lambda kernel: kernel.seconds)
