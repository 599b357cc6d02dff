"""XXH64 against published digests and against the specification in plain integers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.cpu_ops import checksum
from offload.cpu_ops.checksum import xxh64
from offload.cpu_ops.entries import Entry, Kernel

MASK = 2**64 - 1
PRIME32 = 2654435761
P1, P2, P3 = 11400714785074694791, 14029467366897019727, 1609587929392839161
P4, P5 = 9650029242287828579, 2870177450012600261


def rotl(x: int, by: int) -> int:
    return ((x << by) | (x >> (64 - by))) & MASK


def step(acc: int, lane: int) -> int:
    return rotl((acc + lane * P2) & MASK, 31) * P1 & MASK


def reference(data: bytes, seed: int = 0) -> int:
    """The specification's steps 1 to 6, a number at a time."""

    def number(at: int, nbytes: int) -> int:
        return int.from_bytes(data[at : at + nbytes], "little")

    at = 0
    if len(data) < 32:
        acc = (seed + P5) & MASK
    else:
        lanes = [(seed + P1 + P2) & MASK, (seed + P2) & MASK, seed, (seed - P1) & MASK]
        while len(data) - at >= 32:
            lanes = [step(lane, number(at + 8 * i, 8)) for i, lane in enumerate(lanes)]
            at += 32
        acc = sum(rotl(v, by) for v, by in zip(lanes, (1, 7, 12, 18), strict=True)) & MASK
        for lane in lanes:
            acc = ((acc ^ step(0, lane)) * P1 + P4) & MASK
    acc = (acc + len(data)) & MASK
    while len(data) - at >= 8:
        acc = (rotl(acc ^ step(0, number(at, 8)), 27) * P1 + P4) & MASK
        at += 8
    if len(data) - at >= 4:
        acc = (rotl(acc ^ (number(at, 4) * P1 & MASK), 23) * P2 + P3) & MASK
        at += 4
    for byte in data[at:]:
        acc = rotl(acc ^ (byte * P5 & MASK), 11) * P1 & MASK
    acc = (acc ^ (acc >> 33)) * P2 & MASK
    acc = (acc ^ (acc >> 29)) * P3 & MASK
    return acc ^ (acc >> 32)


def sanity_buffer(count: int) -> bytes:
    """As xxHash's own sanity check fills it."""
    out, generator = bytearray(), PRIME32
    for _ in range(count):
        out.append(generator >> 56)
        generator = generator * 11400714785074694797 & MASK
    return bytes(out)


PUBLISHED = [  # of xxHash's sanity check: bytes of its buffer, seed, digest
    (0, 0, 0xEF46DB3751D8E999),
    (0, PRIME32, 0xAC75FDA2929B17EF),
    (1, 0, 0xE934A84ADB052768),
    (1, PRIME32, 0x5014607643A9B4C3),
    (14, 0, 0x8282DCC4994E35C8),
    (14, PRIME32, 0xC3BD6BF63DEB6DF0),
    (222, 0, 0xB641AE8CB691C174),
    (222, PRIME32, 0x20CB8AB7AE10C14A),
]
WORDS = [(b"a", 0xD24EC4F1A98C6E5B), (b"abc", 0x44BC2CF5AD770999)]


@pytest.mark.parametrize(("count", "seed", "digest"), PUBLISHED)
def test_published_digests(count: int, seed: int, digest: int) -> None:
    data = sanity_buffer(count)
    assert reference(data, seed) == digest
    assert xxh64(memoryview(data), seed) == digest


@pytest.mark.parametrize(("data", "digest"), WORDS)
def test_published_words(data: bytes, digest: int) -> None:
    assert xxh64(memoryview(data)) == digest == reference(data)


@pytest.mark.parametrize("fill", [0, 0x80, 0xFF, None])
def test_every_length(fill: int | None) -> None:
    """All tails behind none, one and two stripes; high bits set, where signs could creep in."""
    for count in range(100):
        data = sanity_buffer(count) if fill is None else bytes([fill]) * count
        assert xxh64(memoryview(data)) == reference(data), count


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=600),
    st.integers(0, MASK) | st.sampled_from([MASK, 2**63, 2**63 - 1]),
    st.integers(0, 17),
)
def test_any_bytes_seed_and_alignment(data: bytes, seed: int, shift: int) -> None:
    moved = memoryview(b"\xee" * shift + data + b"\xdd")[shift:-1]
    assert xxh64(moved, seed) == reference(data, seed)


def test_large_buffers_of_any_shape_and_dtype() -> None:
    # numpy's annotations lack the buffer protocol before Python 3.12
    a: Any = np.random.default_rng(0).standard_normal((33, 1001)).astype(np.float32)
    want = reference(a.tobytes())
    assert xxh64(memoryview(a)) == want
    a.flags.writeable = False
    assert xxh64(memoryview(a)) == want
    assert xxh64(memoryview(a.tobytes())) == want


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 8 * 5000 - 1))
def test_a_flipped_bit_shows(bit: int) -> None:
    data = bytearray(sanity_buffer(5000))
    before = xxh64(memoryview(data))
    data[bit // 8] ^= 1 << bit % 8
    assert xxh64(memoryview(data)) != before


def test_refusals() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        xxh64(memoryview(bytes(10))[::2])
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match="seed"):
            xxh64(memoryview(b""), seed)


def test_threads_share_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    checksum._kernel.cache_clear()
    compiled, real = [], Kernel.entry

    def entry(kernel: Kernel) -> Entry:
        if kernel._entry is None:
            compiled.append(threading.get_ident())
        return real(kernel)

    monkeypatch.setattr(Kernel, "entry", entry)
    data = memoryview(sanity_buffer(100_000))
    together = threading.Barrier(4)

    def one(_: int) -> int:
        together.wait(timeout=30)
        return xxh64(data)

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(one, range(4))) == {reference(bytes(data))}
    assert len(compiled) == 1
