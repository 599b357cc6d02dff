"""Compiled entry points of a decoder layer's regions; see ``entries.py``."""

from __future__ import annotations

import functools

from offload.cpu_ops import layer_bodies
from offload.cpu_ops.entries import Entry, Kernel, compile_seconds
from offload.cpu_ops.formats import get_format
from offload.cpu_ops.isa import Isa
from offload.cpu_ops.kv_cache import KvType
from offload.cpu_ops.tags import Tag, tag


def _format(name: str) -> Tag:
    return tag("format", get_format(name).name)


@functools.cache
def attention_in_kernel(q: str, k: str, v: str, isa: Isa) -> Kernel:
    qf, kf, vf = (_format(name) for name in (q, k, v))
    instructions = tag("isa", isa.value)

    def attention_in_body(arguments: int) -> None:
        layer_bodies.attention_in(qf, kf, vf, instructions, arguments)

    what = f"queries, keys, values {q}/{k}/{v} for {isa.value}"
    return Kernel(attention_in_body, what, compile_seconds(4.0, q, k, v))


@functools.cache
def attend_kernel(kv: str) -> Kernel:
    """``kv``: "f32" or "bf16", how keys and values are cached."""
    kind = tag("kv", kv)

    def attend_body(arguments: int) -> None:
        layer_bodies.attend_cached(kind, arguments)

    return Kernel(attend_body, f"attention over a cache in {kv}", 3.0)


@functools.cache
def attention_out_kernel(o: str, isa: Isa) -> Kernel:
    of, instructions = _format(o), tag("isa", isa.value)

    def attention_out_body(arguments: int) -> None:
        layer_bodies.attention_out(of, instructions, arguments)

    return Kernel(
        attention_out_body, f"attention's output {o} for {isa.value}", compile_seconds(2.0, o)
    )


def attention_kernels(q: str, k: str, v: str, o: str, kv: KvType, isa: Isa) -> list[Kernel]:
    """Of a layer's attention, in their order; what attends over a quantised cache aside."""
    attend = [] if kv.quantised else [attend_kernel(kv.value)]
    return [attention_in_kernel(q, k, v, isa), *attend, attention_out_kernel(o, isa)]


@functools.cache
def router_kernel(name: str, isa: Isa) -> Kernel:
    fmt, instructions = _format(name), tag("isa", isa.value)

    def router_body(arguments: int) -> None:
        layer_bodies.router(fmt, instructions, arguments)

    what = f"router {name} for {isa.value}"
    return Kernel(router_body, what, compile_seconds(3.3, name))


@functools.cache
def router_entry(name: str, isa: Isa) -> Entry:
    return router_kernel(name, isa).entry()


@functools.cache
def mlp_kernel(gate_up: str, down: str, isa: Isa) -> Kernel:
    fmt, down_fmt, instructions = _format(gate_up), _format(down), tag("isa", isa.value)

    def mlp_body(arguments: int) -> None:
        layer_bodies.dense_mlp(fmt, down_fmt, instructions, arguments)

    what = f"feed-forward {gate_up}/{down} for {isa.value}"
    return Kernel(mlp_body, what, compile_seconds(3.0, gate_up, down))


@functools.cache
def mlp_entry(gate_up: str, down: str, isa: Isa) -> Entry:
    return mlp_kernel(gate_up, down, isa).entry()
