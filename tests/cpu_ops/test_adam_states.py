"""Optimizer states in bfloat16 and 8 bits: generator, rounding, codes, steps."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_support import ISAS
from optimizer_support import dice, from_bf16, gradients, philox, to_bf16

from offload.cpu_ops import counter_rng, isa
from offload.cpu_ops.adam import AdamStep, adam_fp32
from offload.cpu_ops.adam_states import BLOCK, adam_8bit, adam_bf16, blocks
from offload.cpu_ops.dynamic_map import SIGNED, UNSIGNED, code_values
from offload.errors import OffloadError

ROOT = Path(__file__).resolve().parents[2]
STILL = AdamStep(lr=0.0, step=9, beta1=0.0, beta2=0.0, weight_decay=0.0)
"""Leaves p, and m becomes the gradient, v its square."""


def test_philox_is_the_papers() -> None:
    """Known answers that come with the authors' Random123 library."""
    zeros, ones = np.zeros((1, 4), np.uint64), np.full((1, 4), 0xFFFFFFFF, np.uint64)
    assert [hex(w) for w in philox(zeros, (0, 0), 7)[0]] == [
        "0x5f6fb709", "0xd893f64", "0x4f121f81", "0x4f730a48",
    ]  # fmt: skip
    assert [hex(w) for w in philox(zeros, (0, 0), 10)[0]] == [
        "0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8",
    ]  # fmt: skip
    full = philox(ones, (0xFFFFFFFF, 0xFFFFFFFF), 10)[0]
    assert [hex(w) for w in full] == ["0x408f276d", "0x41c83b0e", "0xa20bc7c6", "0x6d5451fd"]


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 5])
@pytest.mark.parametrize(("step", "first"), [(1, 0), (2**33 + 1, 64), (7, 2**36 - 64)])
def test_rounding_adds_the_generators_bits(seed: int, step: int, first: int) -> None:
    """m takes the upper half of each element's word, whatever the seed's sign and the carries."""
    g = gradients("ordinary", 200, np.random.default_rng(0))
    p, m, v = (np.zeros(200, np.uint16) for _ in range(3))
    frozen = AdamStep(lr=0.0, step=step, beta1=0.0, beta2=0.0, weight_decay=0.0)
    adam_bf16(frozen, g, p, m, v, seed=seed, first=first)
    word = dice(seed, step, first, 200, counter_rng.ROUNDS)
    want = (g.view(np.uint32) + (word >> np.uint32(16))) >> np.uint32(16)
    np.testing.assert_array_equal(m, want.astype(np.uint16))


def test_rounding_is_unbiased_and_to_a_neighbour() -> None:
    """65,536 roundings of one value: the mean within 4 standard errors, for several values."""
    n = 1 << 16
    for i, value in enumerate([1.001, -3.14159, 1e-30, -0.7531, 1.0078124]):
        g = np.full(n, value, np.float32)
        p, m, v = (np.zeros(n, np.uint16) for _ in range(3))
        adam_bf16(STILL, g, p, m, v, seed=i, first=0)
        found, x = from_bf16(m).astype(np.float64), float(g[0])
        low = float(from_bf16(np.array([g.view(np.uint32)[0] >> 16], np.uint16))[0])
        high = float(from_bf16(np.array([(g.view(np.uint32)[0] >> 16) + 1], np.uint16))[0])
        assert set(found) == {low, high}
        share = (x - low) / (high - low)
        error = abs(found.mean() - x) / abs(high - low)
        assert error < 4 * (share * (1 - share) / n) ** 0.5


def test_exact_values_and_what_is_not_finite() -> None:
    special = [0.0, -0.0, 1.0, -2.5, 1e-40, np.inf, -np.inf, 3e38]
    g = from_bf16(to_bf16(np.array(special * 8, np.float32)))
    p, m, v = (np.zeros(64, np.uint16) for _ in range(3))
    adam_bf16(STILL, g, p, m, v, seed=0, first=0)
    finite = np.isfinite(g)
    np.testing.assert_array_equal(from_bf16(m)[finite], g[finite])
    g[:] = np.uint32(0x7F800001).view(np.float32)  # a NaN whose upper half is an infinity's
    adam_bf16(STILL, g, p, m, v, seed=0, first=0)
    assert np.isnan(from_bf16(m)).all()
    assert np.isnan(from_bf16(p)).all()


def test_small_moves_arrive_on_average() -> None:
    """1,000 steps of 2^-12 each, a thirty-second of p's last place: lost if rounded to nearest."""
    n, steps = 4096, 500
    p, m, v = to_bf16(np.full(n, 1.0, np.float32)), np.zeros(n, np.uint16), np.zeros(n, np.uint16)
    for i in range(1, steps + 1):
        step = AdamStep(lr=2.0**-12, step=i, eps=0.0, weight_decay=0.0)
        adam_bf16(step, np.full(n, -1.0, np.float32), p, m, v, seed=3, first=0)
    assert abs(from_bf16(p).mean() - (1 + steps * 2.0**-12)) < 0.01
    # a moment whose steps are 2^-10 of it converges, too
    assert abs(from_bf16(v).mean() - (1 - 0.999**steps)) < 0.01


def run_bf16(count: int, cut: int, workers: int | None) -> bytes:
    g = to_bf16(gradients("ordinary", count, np.random.default_rng(0)))
    p = to_bf16(gradients("ordinary", count, np.random.default_rng(1)))
    m, v = np.zeros(count, np.uint16), np.zeros(count, np.uint16)
    for i in range(1, 4):
        for at in range(0, count, cut):
            tile = slice(at, at + cut)
            adam_bf16(
                AdamStep(lr=1e-3, step=i), g[tile], p[tile], m[tile], v[tile],
                seed=5, first=at, workers=workers,
            )  # fmt: skip
    return p.tobytes() + m.tobytes() + v.tobytes()


def test_bf16_tiles_and_threads_change_nothing() -> None:
    count = 70_003
    found = {run_bf16(count, *how) for how in ((count, 1), (count, 2), (count, 3), (4096, 2))}
    assert len(found) == 1


def test_bf16_must_begin_on_a_group() -> None:
    p = np.zeros(64, np.uint16)
    with pytest.raises(OffloadError, match="multiple of 64 elements, not at 32"):
        adam_bf16(STILL, p, p.copy(), p.copy(), p.copy(), seed=0, first=32)


@pytest.mark.parametrize("bits", [SIGNED, UNSIGNED])
def test_the_map(bits: int) -> None:
    """Monotone, from 0 to 1, and in the upper decades close to everything."""
    values = code_values(bits).astype(np.float64)
    assert values[0] == 0
    assert values[-1] == 1
    assert np.all(np.diff(values) > 0)
    for decade in range(bits - 1):  # the last one is 0 and its end
        top = 10.0**-decade
        x = np.linspace(top / 10, top, 999)[1:]
        nearest = values[np.abs(x[:, None] - values).argmin(axis=1)]
        steps = 2 ** (bits - 1 - decade)
        assert np.abs(nearest - x).max() <= 0.45 * top / steps * (1 + 1e-6)


def moments_of(g: Any, name: str) -> tuple[Any, ...]:
    """Codes and scales of m = g and v = g^2."""
    n = g.size
    p, m, v = np.zeros(n, np.float32), np.zeros(n, np.uint8), np.zeros(n, np.uint8)
    scales = np.zeros((2, blocks(n)), np.float32)
    adam_8bit(STILL, g, p, m, v, *scales, isa=name)
    return m, v, *scales


@pytest.mark.parametrize("name", ISAS)
def test_codes_are_the_nearest(name: str) -> None:
    rng = np.random.default_rng(0)
    n = BLOCK * 64
    g = (rng.standard_normal(n) * 10.0 ** rng.uniform(-8, 0, n)).astype(np.float32)
    m, v, m_scales, v_scales = moments_of(g, name)
    x, square = g.reshape(-1, BLOCK), np.square(g).reshape(-1, BLOCK)
    np.testing.assert_array_equal(m_scales, np.abs(x).max(axis=1))
    np.testing.assert_array_equal(v_scales, square.max(axis=1))
    for bits, codes, whole in ((SIGNED, m & 127, np.abs(x)), (UNSIGNED, v, square)):
        values = code_values(bits).astype(np.float64)
        want = whole.astype(np.float64) / whole.max(axis=1, keepdims=True)
        best = np.abs(want.reshape(-1, 1) - values).min(axis=1)
        error = np.abs(want.reshape(-1) - values[codes])
        floor = values[1] if bits == UNSIGNED else 0.0  # v is not rounded down to 0
        assert np.all((error <= best * (1 + 1e-5) + 1e-7 * want.reshape(-1)) | (error < floor))
    np.testing.assert_array_equal((m >> 7).astype(bool), np.signbit(g))
    assert np.all((v > 0) | (square.reshape(-1) == 0))


@pytest.mark.parametrize("name", ISAS)
def test_all_codes_survive(name: str) -> None:
    """Decoding and encoding again without a change of value gives every code back."""
    codes = np.arange(256, dtype=np.uint8)
    m, v = codes.copy(), codes.copy()
    scales = np.ones((2, 1), np.float32)
    same = AdamStep(lr=0.0, step=1, beta1=0.9999999999, beta2=0.9999999999, weight_decay=0.0)
    adam_8bit(same, np.zeros(256, np.float32), np.zeros(256, np.float32), m, v, *scales, isa=name)
    codes[128] = 0  # -0 is read, and not written
    np.testing.assert_array_equal(m, codes)
    np.testing.assert_array_equal(v, np.arange(256))


@pytest.mark.parametrize("count", [1, 255, 256, 257, 1000])
def test_8bit_step_is_adam_on_decoded_moments(count: int) -> None:
    """From zero states the first step is float32's to rounding, copies included; tails too."""
    g = gradients("ordinary", count, np.random.default_rng(0))
    p = gradients("ordinary", count, np.random.default_rng(1))
    q, mq, vq = p.copy(), np.zeros(count, np.float32), np.zeros(count, np.float32)
    m, v = np.zeros(count, np.uint8), np.zeros(count, np.uint8)
    scales = np.zeros((2, blocks(count)), np.float32)
    copy, step = np.zeros(count, np.uint16), AdamStep(lr=1e-3, step=1, clip=0.5)
    adam_8bit(step, g, p, m, v, *scales, copy)
    adam_fp32(step, g, q, mq, vq)
    np.testing.assert_allclose(p, q, rtol=1e-6, atol=1e-9)
    np.testing.assert_array_equal(copy, to_bf16(p))
    signed = code_values(SIGNED)[m & 127] * np.where(m & 128, -1, 1).astype(np.float32)
    decoded = signed * np.repeat(scales[0], BLOCK)[:count]
    assert np.abs(decoded - mq).max() <= 0.45 / 64 * np.abs(mq).max() * 1.0001


def test_8bit_trains_like_fp32() -> None:
    """A noisy quadratic: 300 steps end as near to the minimum as with float32 moments."""
    n, rng = 1024, np.random.default_rng(0)
    goal = rng.standard_normal(n).astype(np.float32)
    curve = 10.0 ** rng.uniform(-1, 1, n).astype(np.float32)
    p, q = np.zeros(n, np.float32), np.zeros(n, np.float32)
    mq, vq = np.zeros(n, np.float32), np.zeros(n, np.float32)
    m, v, scales = np.zeros(n, np.uint8), np.zeros(n, np.uint8), np.zeros((2, 4), np.float32)
    for i in range(1, 301):
        step = AdamStep(lr=0.02, step=i, weight_decay=0.0)
        noise = rng.standard_normal(n).astype(np.float32) * 0.01
        adam_8bit(step, curve * (p - goal + noise), p, m, v, *scales)
        adam_fp32(step, curve * (q - goal + noise), q, mq, vq)
    assert np.abs(p - goal).mean() < 1.5 * np.abs(q - goal).mean() + 0.01
    assert np.abs(p - goal).mean() < 0.1


def test_a_nan_stays_in_its_block() -> None:
    n = 3 * BLOCK
    g = gradients("ordinary", n, np.random.default_rng(0))
    g[300] = np.nan
    _, _, m_scales, v_scales = moments_of(g, ISAS[0])
    assert list(np.isnan(m_scales)) == [False, True, False]
    assert list(np.isnan(v_scales)) == [False, True, False]


def run_8bit(count: int, cut: int, workers: int | None, name: str | None) -> bytes:
    g = to_bf16(gradients("mixed", count, np.random.default_rng(0)))
    p = gradients("ordinary", count, np.random.default_rng(1))
    m, v = np.zeros(count, np.uint8), np.zeros(count, np.uint8)
    scales = np.zeros((2, blocks(count)), np.float32)
    for i in range(1, 4):
        for at in range(0, count, cut):
            t, b = slice(at, at + cut), slice(at // BLOCK, (at + cut + BLOCK - 1) // BLOCK)
            adam_8bit(
                AdamStep(lr=1e-3, step=i), g[t], p[t], m[t], v[t], scales[0, b], scales[1, b],
                isa=name, workers=workers,
            )  # fmt: skip
    return p.tobytes() + m.tobytes() + v.tobytes() + scales.tobytes()


def test_8bit_tiles_threads_and_instructions_change_nothing() -> None:
    n = 70_003
    found = {run_8bit(n, n, 1, name) for name in ISAS}
    found |= {run_8bit(n, n, 2, None), run_8bit(n, n, 3, None), run_8bit(n, 4096, 2, None)}
    assert len(found) == 1


ELSEWHERE = """
import hashlib, sys
sys.path.insert(0, "tests/cpu_ops")
import numpy as np
import test_adam_states as t
from offload.cpu_ops import grad_norm
from offload.cpu_ops.adam import AdamStep, adam_fp32
rng = np.random.default_rng(0)
g, p, m = (t.gradients("mixed", 1003, rng) for _ in range(3))
v, c, s = np.square(m), np.zeros(1003, np.uint16), np.zeros(1)
adam_fp32(AdamStep(lr=1e-3, step=3, weight_decay=0.1, decoupled=False), t.to_bf16(g), p, m, v, c)
grad_norm.squares(g, s)
grad_norm.accumulate(m, t.to_bf16(g))
parts = [p, m, v, c, s]
found = [b"".join(x.tobytes() for x in parts)]
found += [t.run_bf16(1003, 1003, 1), t.run_8bit(1003, 1003, 1, None)]
print([hashlib.sha256(x).hexdigest() for x in found])
"""


@pytest.mark.slow
def test_other_processors_compute_the_same(tmp_path: Path) -> None:
    """Compiled for this processor, for one without vectors of 512 bits, and for bare x86-64."""
    if "avx2" not in isa.features():
        pytest.skip("the other processors of this test are x86-64")
    new = {"NUMBA_CACHE_DIR": str(tmp_path)}
    machines: list[dict[str, str]] = [
        {},  # what other tests have compiled serves this one, too
        {**new, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""},
        {
            **new,
            "NUMBA_CPU_NAME": "haswell",
            "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+f16c,+sse4.2,+ssse3,+popcnt",
        },
    ]
    found = []
    for machine in machines:
        done = subprocess.run(
            [sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, check=True, cwd=ROOT,
            env={**os.environ, **machine},
        )  # fmt: skip
        found.append(ast.literal_eval(done.stdout))
    assert found[0] == found[1] == found[2]
