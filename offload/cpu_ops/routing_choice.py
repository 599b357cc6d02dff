"""Which experts a token goes to: router scores to the best k and their weights.

Of equal scores the lower expert is chosen. A NaN among the scores is the best of all, as for torch,
and makes the weights NaN. Whatever the scores are, k different experts are chosen.
"""

from __future__ import annotations

import enum
from typing import Any

from numba import float32

from offload.cpu_ops.functions import exp
from offload.cpu_ops.lanes import first_lanes, fmax, fsub, order_keys, store_int, sum_floats
from offload.cpu_ops.tags import inline, outline
from offload.cpu_ops.vectors import (
    fadd,
    fdiv,
    fmul,
    imax,
    int_splat,
    lane,
    load_f32,
    load_float,
    max_lanes,
    splat,
    store_f32,
    store_float,
    sum_lanes,
    where_less,
)

_LOWEST = float("-inf")
"""Of places that cannot be chosen: padding, and what has been chosen."""
_LEAST = -3.4028234663852886e38
"""The least finite float32: what can be chosen is at least that."""
_LEAST_KEY = -(2**31)
MOST_GROUPS = 64


class Scoring(enum.IntEnum):
    """How a router's logits become weights."""

    SOFTMAX = 0
    """Softmax over all experts, then the best k: Qwen, Mixtral, OLMoE."""
    SIGMOID = 1
    """Sigmoid; chosen by score plus bias, weighted by the score alone: DeepSeek-V3, GLM-4-MoE."""
    AFTER = 2
    """The best k, then softmax over those: gpt-oss."""


@inline
def _top(scores: int, n: int) -> int:
    """The first place of the largest of ``n`` floats (padded to 16 with minus infinity)."""
    best = int_splat(_LEAST_KEY)
    for i in range(0, n, 16):
        best = imax(best, order_keys(load_f32(scores + 4 * i)))
    key = max_lanes(best)
    for i in range(0, n, 16):
        keys = order_keys(load_f32(scores + 4 * i))
        hits = where_less(keys, key, int_splat(0), int_splat(1))
        if sum_lanes(hits) > 0:
            for j in range(16):
                one = order_keys(splat(load_float(scores + 4 * (i + j))))
                if max_lanes(one) == key:
                    return i + j
    return 0


@inline
def _pad(scores: int, n: int) -> None:
    for i in range(n, (n + 15) // 16 * 16):
        store_float(scores + 4 * i, float32(_LOWEST))


@inline
def _largest(scores: int, n: int) -> Any:
    top = splat(float32(_LOWEST))
    for i in range(0, n, 16):
        top = fmax(load_f32(scores + 4 * i), top)
    best = lane(top, 0)
    for i in range(1, 16):
        best = max(best, lane(top, i))
    return best


@inline
def _softmax(scores: int, n: int) -> None:
    """In place; what is beyond ``n`` becomes 0."""
    top, total = splat(_largest(scores, n)), splat(float32(0.0))
    for i in range(0, n, 16):
        p = exp(fsub(load_f32(scores + 4 * i), top))
        p = first_lanes(p, n - i, float32(0.0))
        store_f32(scores + 4 * i, p)
        total = fadd(total, p)
    by = splat(sum_floats(total))
    for i in range(0, n, 16):
        store_f32(scores + 4 * i, fdiv(load_f32(scores + 4 * i), by))


@inline
def _sigmoid(scores: int, n: int, out: int, bias: int) -> None:
    """Scores in place, scores plus ``bias`` (an address, 0: none) to ``out``."""
    one = splat(float32(1.0))
    for i in range(0, n, 16):
        minus = fmul(load_f32(scores + 4 * i), splat(float32(-1.0)))
        p = fdiv(one, fadd(one, exp(minus)))
        store_f32(scores + 4 * i, p)
        store_f32(out + 4 * i, p)
    if bias != 0:
        for i in range(n):
            with_bias = load_float(scores + 4 * i) + load_float(bias + 4 * i)
            store_float(out + 4 * i, with_bias)


@inline
def _copy(x: int, n: int, out: int) -> None:
    for i in range(0, n, 16):
        store_f32(out + 4 * i, load_f32(x + 4 * i))


@inline
def _bound(choice: int, n: int) -> None:
    """In place: NaN becomes infinity, and minus infinity the least finite number. As order keys
    NaNs with a sign are below the padding, and what is below the padding is never found."""
    minus, lowest, least = splat(float32(-1.0)), splat(float32(_LOWEST)), splat(float32(_LEAST))
    for i in range(0, n, 16):
        opposite = fmul(load_f32(choice + 4 * i), minus)
        x = fmul(fmax(opposite, lowest), minus)  # of NaN and another fmax gives the other
        store_f32(choice + 4 * i, fmax(x, least))


@inline
def _keep_groups(choice: int, n: int, groups: int, keep: int, ranks: int) -> None:
    """Set all but the best ``keep`` groups to the least number. A group's rank is the sum of its
    two best. Scratch ``ranks``: MOST_GROUPS floats."""
    size = n // groups
    for g in range(groups):
        first, second = float32(_LOWEST), float32(_LOWEST)
        for i in range(g * size, (g + 1) * size):
            x = load_float(choice + 4 * i)
            if x > first:
                first, second = x, first
            elif x > second:
                second = x
        store_float(ranks + 4 * g, first + second)
    _pad(ranks, groups)
    for _ in range(groups - keep):  # drop the worst, of equal ones the last
        worst, at = float32(float("inf")), 0
        for g in range(groups):
            rank = load_float(ranks + 4 * g)
            if rank <= worst:
                worst, at = rank, g
        store_float(ranks + 4 * at, float32(float("nan")))
        for i in range(at * size, (at + 1) * size):
            store_float(choice + 4 * i, float32(_LEAST))


@outline
def choose_experts(
    scoring: int, logits: int, n: int, k: int, norm: int, factor: Any, bias: int, groups: int,
    keep: int, scratch: int, ids: int, weights: int,
) -> None:  # fmt: skip
    """int64 ``ids`` [k], best first, and float32 ``weights`` [k], from ``logits`` [n].

    ``logits`` and ``scratch`` have room for n rounded up to 16, ``scratch`` for MOST_GROUPS more;
    ``logits`` are overwritten. ``norm``: weights are divided by their sum; then come times
    ``factor``. ``bias``, ``groups`` and ``keep``: of ``Scoring.SIGMOID``.
    """
    _pad(logits, n)
    if scoring == 0:
        _softmax(logits, n)
        _copy(logits, n, scratch)
    elif scoring == 1:
        _sigmoid(logits, n, scratch, bias)
    else:
        _copy(logits, n, scratch)
    _bound(scratch, n)
    if scoring == 1 and groups > 1:
        _keep_groups(scratch, n, groups, keep, scratch + 4 * ((n + 15) // 16 * 16))
    _pad(scratch, n)
    for i in range(k):
        best = _top(scratch, n)
        store_int(ids + 8 * i, best)
        store_float(weights + 4 * i, load_float(logits + 4 * best))
        store_float(scratch + 4 * best, float32(_LOWEST))
    if scoring == 2:
        _softmax_few(weights, k)
    if norm != 0:
        total = float32(0.0)
        for i in range(k):
            total += load_float(weights + 4 * i)
        if scoring == 1:
            total += float32(1e-20)
        for i in range(k):
            store_float(weights + 4 * i, load_float(weights + 4 * i) / total)
    for i in range(k):
        store_float(weights + 4 * i, load_float(weights + 4 * i) * factor)


@inline
def _softmax_few(x: int, n: int) -> None:
    """In place, of ``n`` floats without padding."""
    top, total = load_float(x), float32(0.0)  # the first is the best
    for i in range(n):
        p = lane(exp(splat(load_float(x + 4 * i) - top)), 0)
        store_float(x + 4 * i, p)
        total += p
    for i in range(n):
        store_float(x + 4 * i, load_float(x + 4 * i) / total)
