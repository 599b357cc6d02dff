"""Compiled entry points of the optimizer kernels; see ``entries.py``."""

from __future__ import annotations

import functools

from offload.cpu_ops import adam_bodies, grad_bodies
from offload.cpu_ops.entries import Entry, Kernel
from offload.cpu_ops.isa import Isa
from offload.cpu_ops.tags import Tag, tag


def _kind(name: str) -> Tag:
    return tag("number", name)


@functools.cache
def fp32_entry(rule: str, gradient: str, copy: str) -> Entry:
    """``rule``: of ``AdamStep``; ``gradient``: "f32" or "bf16"; ``copy``: these or "none"."""
    how, kind, copied = tag("rule", rule), _kind(gradient), _kind(copy)

    def adam_fp32_body(arguments: int) -> None:
        adam_bodies.fp32(how, kind, copied, arguments)

    what = f"Adam fp32 ({rule}), gradient {gradient}, copy {copy}"
    return Kernel(adam_fp32_body, what, 1.5).entry()


@functools.cache
def bf16_entry(rule: str, gradient: str) -> Entry:
    how, kind = tag("rule", rule), _kind(gradient)

    def adam_bf16_body(arguments: int) -> None:
        adam_bodies.bf16(how, kind, arguments)

    return Kernel(adam_bf16_body, f"Adam bf16 ({rule}), gradient {gradient}", 1.0).entry()


@functools.cache
def eight_bit_entry(rule: str, gradient: str, copy: str, isa: Isa) -> Entry:
    how, instructions = tag("rule", rule), tag("isa", isa.value)
    kind, copied = _kind(gradient), _kind(copy)

    def adam_8bit_body(arguments: int) -> None:
        adam_bodies.eight_bit(how, kind, copied, instructions, arguments)

    what = f"Adam 8-bit ({rule}), gradient {gradient}, copy {copy}, for {isa.value}"
    return Kernel(adam_8bit_body, what, 4.0).entry()


@functools.cache
def squares_entry(gradient: str) -> Entry:
    kind = _kind(gradient)

    def squares_body(arguments: int) -> None:
        grad_bodies.squares(kind, arguments)

    return Kernel(squares_body, f"squares of {gradient}", 1.0).entry()


@functools.cache
def accumulate_entry(gradient: str) -> Entry:
    kind = _kind(gradient)

    def accumulate_body(arguments: int) -> None:
        grad_bodies.accumulate(kind, arguments)

    return Kernel(accumulate_body, f"accumulation of {gradient}", 1.0).entry()


@functools.cache
def scale_entry(gradient: str) -> Entry:
    kind = _kind(gradient)

    def scale_body(arguments: int) -> None:
        grad_bodies.scale(kind, arguments)

    return Kernel(scale_body, f"scaling of {gradient}", 1.0).entry()
