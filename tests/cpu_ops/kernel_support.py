"""What kernels must compute, in float64: weights as decoded, activations as the kernels round."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from offload.cpu_ops.formats import FORMATS, Activation, Format
from offload.cpu_ops.isa import NEEDS, Isa, features

FAST = ("q4_0", "q8_0", "bf16", "q4_k")
"""Compiled in the quick runs; the other formats take a few seconds each."""

EVERY = [pytest.param(n, marks=() if n in FAST else pytest.mark.slow, id=n) for n in FORMATS]
ISAS = [i.value for i in Isa if features().issuperset(NEEDS[i])]
"""Those of this machine, the best one first."""

SAMPLE = (*FAST, "f16", "iq4_nl")
"""What sets differ in: dot products, float16, a table."""

EVERY_ON_EACH = [
    pytest.param(
        isa, *param.values, id=f"{isa}-{param.id}",
        marks=param.marks if isa == ISAS[0] or param.values[0] in SAMPLE else pytest.mark.sweep,
    )
    for isa in ISAS
    for param in EVERY
]  # fmt: skip
"""(instruction set, format): all formats on the best one, and a sample on the others. Compiling is
what takes the time; ``test_gemm`` has more of them, both have the whole product in the sweep."""


def sets_in_ci(name: str) -> list[str]:
    """The best set for every format; the others for a sample, and for the rest one, in turns."""
    turn = list(FORMATS).index(name)
    if name in ("q5_k", "q6_k"):  # for the portable set these compile for half a minute
        turn = 0
    others = ISAS[1:]
    if name not in SAMPLE and others:
        others = [others[turn % len(others)]]
    return ISAS[:1] + others


def rounded(fmt: Format, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """float32 [T, K] to the values the kernels multiply with."""
    if fmt.activation is Activation.FLOAT32:
        return x.astype(np.float64)
    blocks = x.reshape(-1, fmt.activation.columns)
    top = np.abs(blocks).max(axis=1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(top < np.float32(4e-37), np.float32(0), np.float32(127) / top)
    scale = np.where(inverse == 0, np.float32(0), top / np.float32(127))
    if fmt.activation is Activation.Q8_32:  # to the 11 bits of a float16
        bits = scale.astype(np.float32).view(np.uint32).astype(np.int64)
        bits = (bits + 0xFFF + ((bits >> 13) & 1)) & 0x7FFFE000
        scale = bits.astype(np.uint32).view(np.float32)
    q = np.rint(blocks * inverse)
    return (q.astype(np.float64) * scale.astype(np.float64)).reshape(x.shape)


def tolerance(
    fmt: Format, w: npt.NDArray[np.float64], x: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """[T, N]: float32 rounding of one sum per block, in order, of terms no larger than 4 times
    the row's largest weight (scale and minimum of a block may cancel in its weights)."""
    largest = np.abs(w).max(axis=1)
    terms = 4 * np.abs(x).sum(axis=1)[:, None] * largest[None]
    return (w.shape[1] / min(fmt.block, 32) + 8) * 2.0**-24 * terms


@pytest.fixture
def restore_threads() -> Iterator[None]:
    from offload.cpu_ops import threads

    before = threads._threads
    yield
    threads._threads = before
