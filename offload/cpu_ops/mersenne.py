"""Which token wins when every one draws a waiting time: torch's own draw, without its detours.

    V tokens with probabilities p

``torch.multinomial`` gives each token an exponential waiting time q of rate 1 and takes the largest
p / q (Gumbel-max: Maddison, Tarlow and Minka, "A* Sampling", NeurIPS 2014, section 2). On the CPU
every q is a logarithm of two words of the Mersenne twister (Matsumoto and Nishimura, ACM TOMACS
8(1), 1998), one after the other: 22 ns a token, 3.6 ms for 152,000. Here the same words come 16 at
a time, and with u the uniform number behind q = -log(1 - u),

    u <= q <= u / (1 - u)

says of nearly all tokens that they have lost before a logarithm is taken. What is left, some ten
tokens, is the caller's to decide as torch does (``offload.generation.draw``).
"""

from __future__ import annotations

import enum
import functools
from typing import Any

import numpy as np

from offload.cpu_ops.entries import Kernel
from offload.cpu_ops.lanes import differ_i32, store_i32, store_int
from offload.cpu_ops.tags import inline, tag
from offload.cpu_ops.tiles import field
from offload.cpu_ops.vectors import (
    both,
    either,
    imul,
    int_splat,
    left,
    load_float,
    load_i32,
    load_int,
    load_int32,
    max_lanes,
    right,
    store_int32,
)

STATE_WORDS = 624
"""Of the twister."""
_MIDDLE = 397
_UPPER, _LOWER, _MATRIX = 0x80000000, 0x7FFFFFFF, 0x9908B0DF
_WORD = 0xFFFFFFFF
_DIGITS = (1 << 53) - 1
_UNIT = 2.0**-53
_MARGIN = 1 - 1e-5
"""More than float32 rounds away in p, q and their ratio."""
_LARGEST = 3e38

CAPACITY = 256
"""Tokens that a race keeps at a time."""


class Race(enum.IntEnum):
    """Places in a race's arguments."""

    BARRIER = 0
    STATE = 1
    """int32 [624]: changed as torch would leave it."""
    POSITION = 2
    """How many of the state's words have been used, at most 624; changed."""
    COUNT = 3
    """V"""
    PROBABILITIES = 4
    """float32 [V]"""
    WORDS = 5
    """int32 [624]: scratch."""
    TOKENS = 6
    """int64 [CAPACITY]: gets those that may have won, ascending."""
    DIGITS = 7
    """int64 [CAPACITY]: gets 2^53 u of each."""
    FOUND = 8
    """Gets how many; -1: there is a probability that is none; -2: more than there is room for."""
    SIZE = 16


@inline
def _twist_one(state: int, k: int, following: int, middle: int) -> None:
    y = (load_int32(state + 4 * k) & _UPPER) | (load_int32(state + 4 * following) & _LOWER)
    new = (load_int32(state + 4 * middle) & _WORD) ^ (y >> 1) ^ ((y & 1) * _MATRIX)
    store_int32(state + 4 * k, new)


@inline
def _twist_16(state: int, k: int, middle: int) -> None:
    high = both(load_i32(state + 4 * k), _UPPER)
    y = either(high, both(load_i32(state + 4 * k + 4), _LOWER))
    odd = imul(both(y, 1), int_splat(_MATRIX))
    store_i32(state + 4 * k, differ_i32(differ_i32(load_i32(state + 4 * middle), right(y, 1)), odd))


@inline
def _twist(state: int) -> None:
    """The next 624 words. Each reads words that the 16 before it have not touched."""
    k = 0
    while k + 16 <= STATE_WORDS - _MIDDLE:
        _twist_16(state, k, k + _MIDDLE)
        k += 16
    while k < STATE_WORDS - _MIDDLE:
        _twist_one(state, k, k + 1, k + _MIDDLE)
        k += 1
    while k + 16 <= STATE_WORDS - 1:
        _twist_16(state, k, k + _MIDDLE - STATE_WORDS)
        k += 16
    while k < STATE_WORDS - 1:
        _twist_one(state, k, k + 1, k + _MIDDLE - STATE_WORDS)
        k += 1
    _twist_one(state, k, 0, k + _MIDDLE - STATE_WORDS)


@inline
def _temper(state: int, words: int) -> None:
    for k in range(0, STATE_WORDS, 16):
        y = load_i32(state + 4 * k)
        y = differ_i32(y, right(y, 11))
        y = differ_i32(y, both(left(y, 7), 0x9D2C5680))
        y = differ_i32(y, both(left(y, 15), 0xEFC60000))
        store_i32(words + 4 * k, differ_i32(y, right(y, 18)))


@inline
def _are_zero(floats: int) -> bool:
    """Whether 16 of them are."""
    return max_lanes(both(load_i32(floats), 0x7FFFFFFF)) == 0


@inline
def _drop_losers(a: int, found: int, least: float) -> int:
    """Of the tokens that are kept, those that cannot win any more; returns how many are left."""
    tokens, digits = field(a, Race.TOKENS), field(a, Race.DIGITS)
    kept = 0
    for i in range(found):
        token, drawn = load_int(tokens + 8 * i), load_int(digits + 8 * i)
        p = np.float64(load_float(field(a, Race.PROBABILITIES) + 4 * token))
        if p >= least * (drawn * _UNIT):
            store_int(tokens + 8 * kept, token)
            store_int(digits + 8 * kept, drawn)
            kept += 1
    return kept


@inline
def race(_: Any, a: int) -> None:
    """For one thread. The first argument, a tag, names the sources in the disk cache's key."""
    state, words, position = field(a, Race.STATE), field(a, Race.WORDS), field(a, Race.POSITION)
    probabilities = field(a, Race.PROBABILITIES)
    tokens, digits = field(a, Race.TOKENS), field(a, Race.DIGITS)
    count, least, found = field(a, Race.COUNT), 0.0, 0
    fresh = False  # whether the words are those of the state
    i = -1
    while i + 1 < count:
        i += 1
        # Behind a top-k nearly all are 0: their numbers are passed over 16 tokens at a time.
        while i % 16 == 0 and i + 16 <= count and _are_zero(probabilities + 4 * i):
            i += 16
            position += 32
            if position > STATE_WORDS:
                _twist(state)
                fresh = False
                position -= STATE_WORDS
        if i == count:
            break
        if position >= STATE_WORDS:
            _twist(state)
            fresh = False
            position -= STATE_WORDS
        if not fresh:
            _temper(state, words)
            fresh = True
        first = load_int32(words + 4 * position)
        if position + 1 == STATE_WORDS:  # the two words lie on both sides of a twist
            _twist(state)
            _temper(state, words)
            position = -1
        second = load_int32(words + 4 * (position + 1)) & _WORD
        position += 2
        p = np.float64(load_float(probabilities + 4 * i))
        if p == 0.0 or found < 0:
            continue
        if not 0.0 < p < _LARGEST:  # a NaN, too
            found = -1
            continue
        drawn = ((first << 32) | second) & _DIGITS
        u = drawn * _UNIT
        if p < least * u:
            continue
        if found == CAPACITY:
            found = _drop_losers(a, found, least)
            if found == CAPACITY:
                found = -2
                continue
        store_int(tokens + 8 * found, i)
        store_int(digits + 8 * found, drawn)
        found += 1
        if drawn != 0:
            sure = p * (1.0 - u) / u * _MARGIN
            if sure > least:
                least = sure
    if found > 0:
        found = _drop_losers(a, found, least)
    store_int(a + 8 * Race.POSITION, position)
    store_int(a + 8 * Race.FOUND, found)


@functools.cache
def race_kernel() -> Kernel:
    """One for all instruction sets."""
    sources = tag("mersenne", "race")

    def race_body(arguments: int) -> None:
        race(sources, arguments)

    return Kernel(race_body, "drawing of tokens", 1.5)


__all__ = ["CAPACITY", "STATE_WORDS", "Race", "race", "race_kernel"]
