"""The checksum of tiles is XXH3 as others compute it, and sees a flipped bit anywhere."""

from __future__ import annotations

import random

import pytest

from offload.io.checksum import xxh3


def test_digests_that_are_published() -> None:
    assert xxh3(memoryview(b"")) == 0x2D06800538D394C2
    assert xxh3(memoryview(b"a")) == 0xE6C632B61E964E1F
    assert xxh3(memoryview(b"abc")) == 0x78AF5F94892F3950


@pytest.mark.parametrize("count", [1, 4096, (1 << 20) + 4096])
def test_any_flipped_bit_changes_it(count: int) -> None:
    rng = random.Random(count)
    data = bytearray(rng.randbytes(count))
    before = xxh3(memoryview(data))
    for _ in range(20):
        at, bit = rng.randrange(count), 1 << rng.randrange(8)
        data[at] ^= bit
        assert xxh3(memoryview(data)) != before
        data[at] ^= bit
    assert xxh3(memoryview(bytes(data))) == before
