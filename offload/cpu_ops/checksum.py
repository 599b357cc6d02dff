"""XXH64: a 64-bit checksum at the speed of memory.

Yann Collet, "xxHash fast digest algorithm", version 0.1.1, section XXH64. Four chains of 8 bytes
each run through the data; a chain is one multiplication deep per 32 bytes, and all four together
keep a core's multiplier busy. It finds accidents, not adversaries.

Why not XXH3: it is faster only from the cache, and its 300 lines of special cases for short inputs
serve nobody here. Why not NumPy sums (``io/pack_sums.py``): they read the data twice and hold the
interpreter's lock between the passes, and optimizer states are checked while kernels compute.

All values are ``np.uint64``, the constants too: Numba adds a signed to an unsigned 64-bit integer
as float64, which silently loses the low bits.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np

from offload.cpu_ops.entries import Entry, Kernel
from offload.cpu_ops.lanes import store_int
from offload.cpu_ops.tags import inline, tag
from offload.cpu_ops.tiles import field
from offload.cpu_ops.vectors import load_int, stack
from offload.cpu_ops.wide import clear_bytes, copy_bytes

__all__ = ["xxh64"]

# Places in the argument array.
_AT, _COUNT, _SEED, _OUT, _SIZE = 0, 1, 2, 3, 4

_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)
_BITS = np.uint64(64)
_LOW_32, _LOW_8 = np.uint64(0xFFFFFFFF), np.uint64(0xFF)
_1, _7, _8, _11, _12, _18, _23, _27, _29, _31, _32, _33 = (
    np.uint64(n) for n in (1, 7, 8, 11, 12, 18, 23, 27, 29, 31, 32, 33)
)

_room = stack(8)


@inline
def _word(at: int) -> Any:
    return np.uint64(load_int(at))


@inline
def _rotated(x: Any, by: Any) -> Any:
    return (x << by) | (x >> (_BITS - by))


@inline
def _round(lane: Any, word: Any) -> Any:
    return _rotated(lane + word * _P2, _31) * _P1


@inline
def _merged(digest: Any, lane: Any) -> Any:
    return (digest ^ _round(np.uint64(0), lane)) * _P1 + _P4


@inline
def _digest(at: int, count: int, seed: Any) -> Any:
    end = at + count
    if count >= 32:
        a, b, c, d = seed + _P1 + _P2, seed + _P2, seed, seed - _P1
        for _ in range(count // 32):
            a, b = _round(a, _word(at)), _round(b, _word(at + 8))
            c, d = _round(c, _word(at + 16)), _round(d, _word(at + 24))
            at += 32
        digest = _rotated(a, _1) + _rotated(b, _7) + _rotated(c, _12) + _rotated(d, _18)
        digest = _merged(_merged(_merged(_merged(digest, a), b), c), d)
    else:
        digest = seed + _P5
    digest += np.uint64(count)
    while end - at >= 8:
        digest = _rotated(digest ^ _round(np.uint64(0), _word(at)), _27) * _P1 + _P4
        at += 8
    # What is left is less than a word, and no byte behind the end may be read.
    left, room = end - at, _room()
    clear_bytes(room, 8)
    copy_bytes(room, at, left)
    tail = _word(room)
    if left >= 4:
        digest = _rotated(digest ^ ((tail & _LOW_32) * _P1), _23) * _P2 + _P3
        tail >>= _32
        left -= 4
    for _ in range(left):
        digest = _rotated(digest ^ ((tail & _LOW_8) * _P5), _11) * _P1
        tail >>= _8
    digest = (digest ^ (digest >> _33)) * _P2
    digest = (digest ^ (digest >> _29)) * _P3
    return digest ^ (digest >> _32)


@inline
def _checksum(_sources: Any, a: int) -> None:
    digest = _digest(field(a, _AT), field(a, _COUNT), np.uint64(field(a, _SEED)))
    store_int(field(a, _OUT), np.int64(digest))


@functools.cache
def _kernel() -> Kernel:
    sources = tag("number", "u64")

    def xxh64_body(arguments: int) -> None:
        _checksum(sources, arguments)

    return Kernel(xxh64_body, "XXH64", 0.5)


_loading = threading.Lock()


def _entry() -> Entry:
    # I/O workers arrive together, and each would compile.
    with _loading:
        return _kernel().entry()


def xxh64(view: memoryview, seed: int = 0) -> int:
    """The XXH64 of all bytes of ``view`` (C-contiguous, read-only or not): 0 .. 2**64 - 1.

    ``seed``: 0 .. 2**64 - 1. One thread, without the interpreter's lock; any thread may call it.

    Raises:
        ValueError: not contiguous, or a seed out of range.
    """
    if not view.c_contiguous:
        raise ValueError("the bytes to checksum must be contiguous")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"the seed must be from 0 to 2**64 - 1, not {seed}")
    # NumPy refuses an empty buffer's address, and none is needed.
    data = np.frombuffer(view, np.uint8) if view.nbytes else np.zeros(1, np.uint8)
    a = np.zeros(_SIZE, np.uint64)
    a[_AT], a[_COUNT], a[_SEED] = data.ctypes.data, view.nbytes, seed
    a[_OUT] = a.ctypes.data + 8 * _OUT
    _entry().call(a.ctypes.data)
    return int(a[_OUT])
