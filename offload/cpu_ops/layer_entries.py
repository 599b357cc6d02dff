"""Compiled entry points of a decoder layer's regions; see ``entries.py``."""

from __future__ import annotations

import functools

from offload.cpu_ops import layer_bodies
from offload.cpu_ops.entries import Entry, Kernel, compile_seconds
from offload.cpu_ops.formats import get_format
from offload.cpu_ops.isa import Isa
from offload.cpu_ops.tags import Tag, tag


def _format(name: str) -> Tag:
    return tag("format", get_format(name).name)


@functools.cache
def attention_kernel(q: str, k: str, v: str, o: str, kv: str, isa: Isa) -> Kernel:
    """``kv``: "f32" or "bf16", how keys and values are cached."""
    qf, kf, vf, of = (_format(name) for name in (q, k, v, o))
    kind, instructions = tag("kv", kv), tag("isa", isa.value)

    def attention_body(arguments: int) -> None:
        layer_bodies.attention_half(qf, kf, vf, of, kind, instructions, arguments)

    what = f"attention {q}/{k}/{v}/{o}, {kv} cache, for {isa.value}"
    return Kernel(attention_body, what, compile_seconds(8.0, q, k, v, o))


@functools.cache
def attention_entry(q: str, k: str, v: str, o: str, kv: str, isa: Isa) -> Entry:
    return attention_kernel(q, k, v, o, kv, isa).entry()


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
