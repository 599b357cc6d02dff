"""Random numbers at the speed of a disk: normal values cut from one pool, block by block.

Drawing 50 billion normals takes minutes of a core (numpy: about 0.1 G/s). A random checkpoint
needs no independence between far apart weights, only that rows differ, statistics are right and
every tensor is its own. So 2 Mi values are drawn once; a tensor is a row of blocks, each a slice
of that pool at an offset and with a sign of its own, both derived from ``(seed, name)`` alone.
Writing a block is then one copy into the page cache, faster than any SSD this writes to.

Road not taken: a counter-based generator over all elements (Philox) gives independent values and
random access, at a tenth of the rate.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

POOL_VALUES = 1 << 21
"""Distinct values of one distribution; tensors longer than this repeat slices of them."""

BLOCK_VALUES = 1 << 17
"""Values taken from one place of the pool before jumping to the next."""

_POOLS_KEPT = 6


def derive_key(seed: int, name: str) -> int:
    """A 64-bit key for one tensor or module, the same on every machine and in every process."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class ValueSource:
    """Deterministic normal values; everything it yields depends on ``(seed, name, std, dtype)``.

    Holds at most ``2 * 4 * POOL_VALUES`` bytes per pool and six pools (about 100 MiB at float32,
    half of it at bfloat16), however large the tensors are. The bit streams of ``SFC64`` are stable
    across numpy versions, its ``standard_normal`` may change with one: bytes are reproducible
    for a given numpy version.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        bits = np.random.SFC64(derive_key(seed, "pool"))
        self._normal = np.random.Generator(bits).standard_normal(POOL_VALUES, dtype=np.float32)
        self._pools: OrderedDict[tuple[str, float], npt.NDArray[np.uint8]] = OrderedDict()

    def normal(self, name: str, count: int, dtype: str, std: float) -> Iterator[memoryview]:
        """The ``count`` values of tensor ``name``, in order, as little-endian bytes.

        Each item is a read-only view of at most ``BLOCK_VALUES`` values, valid until the next one
        is asked for. ``dtype``: float32, float16 or bfloat16.
        """
        pool = self._pool(dtype, std)
        width = len(pool) // (2 * POOL_VALUES)
        view = pool.data.toreadonly()
        draws = np.random.SFC64(derive_key(self._seed, name))
        for start in range(0, count, BLOCK_VALUES):
            n = min(BLOCK_VALUES, count - start)
            draw = int(draws.random_raw())
            # The second half of the pool is the first one negated: a sign costs no arithmetic.
            first = (draw >> 1) % (POOL_VALUES - n + 1) + (draw & 1) * POOL_VALUES
            yield view[first * width : (first + n) * width]

    def _pool(self, dtype: str, std: float) -> npt.NDArray[np.uint8]:
        key = (dtype, std)
        found = self._pools.get(key)
        if found is None:
            found = self._make_pool(dtype, std)
            while len(self._pools) >= _POOLS_KEPT:
                self._pools.popitem(last=False)
            self._pools[key] = found
        self._pools.move_to_end(key)
        return found

    def _make_pool(self, dtype: str, std: float) -> npt.NDArray[np.uint8]:
        import torch

        values = torch.from_numpy(self._normal).mul(std).to(getattr(torch, dtype))
        both = torch.cat([values, -values])
        made: npt.NDArray[np.uint8] = both.view(torch.uint8).numpy()
        return made
