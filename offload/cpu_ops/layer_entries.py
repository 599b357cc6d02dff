"""Compiled entry points of a decoder layer's regions; see ``entries.py``."""

from __future__ import annotations

import functools

from offload.cpu_ops import layer_bodies
from offload.cpu_ops.entries import Entry, compile_body
from offload.cpu_ops.formats import get_format
from offload.cpu_ops.isa import Isa
from offload.cpu_ops.tags import Tag, tag


def _format(name: str) -> Tag:
    return tag("format", get_format(name).name)


@functools.cache
def attention_entry(q: str, k: str, v: str, o: str, kv: str, isa: Isa) -> Entry:
    """``kv``: "f32" or "bf16", how keys and values are cached."""
    qf, kf, vf, of = (_format(name) for name in (q, k, v, o))
    kind, instructions = tag("kv", kv), tag("isa", isa.value)

    def attention_body(arguments: int) -> None:
        layer_bodies.attention_half(qf, kf, vf, of, kind, instructions, arguments)

    return compile_body(attention_body, f"attention {q}/{k}/{v}/{o}, {kv} cache, for {isa.value}")


@functools.cache
def router_entry(name: str, isa: Isa) -> Entry:
    fmt, instructions = _format(name), tag("isa", isa.value)

    def router_body(arguments: int) -> None:
        layer_bodies.router(fmt, instructions, arguments)

    return compile_body(router_body, f"router {name} for {isa.value}")


@functools.cache
def mlp_entry(gate_up: str, down: str, isa: Isa) -> Entry:
    fmt, down_fmt, instructions = _format(gate_up), _format(down), tag("isa", isa.value)

    def mlp_body(arguments: int) -> None:
        layer_bodies.dense_mlp(fmt, down_fmt, instructions, arguments)

    return compile_body(mlp_body, f"feed-forward {gate_up}/{down} for {isa.value}")
