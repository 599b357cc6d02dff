"""A shuffle of any number of things in no memory: a keyed bijection of 0 .. n - 1.

A balanced Feistel network over the next power of four, walked until the value is below n (Black
and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, sections 3 and 4). Its rounds
are the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). Where an element goes depends
on (n, seed, stream) alone: no generator whose state a checkpoint would have to carry, and no list
that grows with the data.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ROUNDS = 8
"""Four make a strong permutation of a large domain; small domains want more."""

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Permutation:
    """A bijection of 0 .. n - 1.

    Args:
        n: at least 1, at most 2**62.
        seed: any integer; its low 64 bits count.
        stream: tells permutations of one seed apart (epochs, the split).
    """

    def __init__(self, n: int, seed: int, stream: int) -> None:
        self.n = n
        self._half = max(1, ((n - 1).bit_length() + 1) // 2)
        keys = np.array([seed & _MASK], dtype=np.uint64)
        keys = _mix(_mix(keys + np.uint64(_GOLDEN)) ^ np.uint64(stream & _MASK))
        steps = np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        self._keys = _mix(keys + steps)

    def __call__(self, index: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Where ``index`` (integers below n, any shape) go; int64 of the same shape."""
        given = np.asarray(index, dtype=np.uint64)
        # One dimension at least: numpy warns of wrap-around in scalars, which is meant here.
        x = self._round_trip(np.atleast_1d(given))
        # The walk starts and ends below n, so it returns: less than four trips on average.
        while (outside := x >= np.uint64(self.n)).any():
            x = np.where(outside, self._round_trip(x), x)
        return x.astype(np.int64).reshape(given.shape)

    def _round_trip(self, x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        half, mask = np.uint64(self._half), np.uint64((1 << self._half) - 1)
        left, right = x >> half, x & mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        return (left << half) | right
