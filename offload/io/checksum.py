"""XXH3: a 64-bit checksum at the speed of memory (Yann Collet, xxHash 0.8, XXH3_64bits).

It finds accidents, not adversaries. Why not XXH64, or sums by NumPy (``pack_sums.py``): one is held
by its multiplications to 9 GB/s where memory streams 24, the other keeps the interpreter's lock
between its passes. Optimizer states are checked, 26 bytes per parameter and step, on the cores that
compute at the same time.
"""

from __future__ import annotations

import xxhash

__all__ = ["xxh3"]


def xxh3(view: memoryview) -> int:
    """The XXH3 of all bytes of ``view`` (C-contiguous): 0 .. 2**64 - 1. Without the interpreter's
    lock; any thread may call it."""
    return xxhash.xxh3_64_intdigest(view)
