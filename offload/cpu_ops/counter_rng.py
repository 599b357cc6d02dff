"""Random bits as a pure function of (seed, step, element): Philox4x32-7.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3
and table 2. There is no state: how a range is tiled, and who computes which part on what, cannot
change a bit. Squares (Widynski 2020) needs fewer operations where 64-bit lanes multiply fast, but
its keys must be chosen with care, while Philox takes any seed.

Element i takes word (i / 16) mod 4 of block 16 (i / 64) + i mod 16, so that 16 neighbouring lanes
compute 16 blocks and every vector of words belongs to 16 neighbouring elements. A block's counter
is (block, step), 64 bits each, its key the seed.
"""

from __future__ import annotations

from typing import Any

from offload.cpu_ops.tags import inline
from offload.cpu_ops.wide import (
    count_from,
    differ,
    high_half,
    long_splat,
    low_words,
    product_32,
)

ROUNDS = 7
"""The fewest that pass all of BigCrush (table 2). 10 is the paper's default, for
a margin that rounding does not need."""

MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
GROUP = 64
"""Elements per call of ``words``: the first one of a call is a multiple of it."""


@inline
def words(seed: int, step: int, first: int) -> Any:
    """Four vectors of 16 random words: for elements first .. first + 63, in order."""
    c0 = count_from(first // 4)
    c1 = high_half(c0)
    c2, c3 = long_splat(step), long_splat(step >> 32)
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    # The high halves of all these lanes are garbage that no product reads.
    for _ in range(ROUNDS):
        p0, p1 = product_32(c0, MULTIPLIER_0), product_32(c2, MULTIPLIER_1)
        c0 = differ(differ(high_half(p1), c1), long_splat(k0))
        c2 = differ(differ(high_half(p0), c3), long_splat(k1))
        c1, c3 = p1, p0
        k0, k1 = k0 + WEYL_0, k1 + WEYL_1
    return low_words(c0), low_words(c1), low_words(c2), low_words(c3)
