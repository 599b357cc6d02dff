"""What optimizer kernels must compute, in NumPy and by other means than theirs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def to_bf16(x: Floats) -> npt.NDArray[np.uint16]:
    """Bits, rounded to nearest, ties to even, by torch."""
    import torch

    words: Any = torch.from_numpy(np.ascontiguousarray(x)).to(torch.bfloat16).view(torch.uint16)
    return np.asarray(words.numpy())


def from_bf16(bits: npt.NDArray[np.uint16]) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def philox(
    counter: npt.NDArray[np.uint64], key: tuple[int, int], rounds: int
) -> npt.NDArray[np.uint64]:
    """Philox4x32 of counters [n, 4]: words [n, 4], as the paper writes it."""
    c, (k0, k1), low = counter.copy(), key, np.uint64(0xFFFFFFFF)
    for _ in range(rounds):
        p0, p1 = c[:, 0] * np.uint64(0xD2511F53), c[:, 2] * np.uint64(0xCD9E8D57)
        c = np.stack(
            [
                (p1 >> np.uint64(32)) ^ c[:, 1] ^ np.uint64(k0),
                p1 & low,
                (p0 >> np.uint64(32)) ^ c[:, 3] ^ np.uint64(k1),
                p0 & low,
            ],
            axis=1,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def dice(seed: int, step: int, first: int, count: int, rounds: int) -> npt.NDArray[np.uint32]:
    """The word of each of ``count`` elements, as ``counter_rng`` numbers them."""
    i = np.arange(first, first + count, dtype=np.uint64)
    block = np.uint64(16) * (i // np.uint64(64)) + i % np.uint64(16)
    counter = np.zeros((count, 4), np.uint64)
    counter[:, 0], counter[:, 1] = block & np.uint64(0xFFFFFFFF), block >> np.uint64(32)
    counter[:, 2], counter[:, 3] = step & 0xFFFFFFFF, step >> 32
    found = philox(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF), rounds)
    word = (i // np.uint64(16) % np.uint64(4)).astype(np.int64)
    return found[np.arange(count), word].astype(np.uint32)


def gradients(kind: str, count: int, rng: np.random.Generator) -> Floats:
    """Of one kind of size."""
    x = rng.standard_normal(count)
    scale = {
        "ordinary": 1e-3,
        "mixed": 10.0 ** rng.uniform(-12, 3, count),
        "tiny": 1e-20,
        "huge": 1e18,
        "denormal": 1e-39,
        "zero": 0.0,
    }[kind]
    return np.asarray(x * scale, np.float32)
