"""Routed experts against float64; their order, places and tokens."""

from __future__ import annotations

from math import erf
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kernel_support import ISAS, restore_threads
from random_rows import random_rows

from offload.cpu_ops import threads
from offload.cpu_ops.codecs import decode_rows
from offload.cpu_ops.experts import (
    ExpertLayout,
    TokenExperts,
    add_weighted,
    expert_ffn,
    expert_layout,
)
from offload.cpu_ops.formats import FORMATS
from offload.cpu_ops.functions import Glu
from offload.cpu_ops.packing import pack_rows, packed_bytes
from offload.errors import OffloadError

__all__ = ["restore_threads"]

Array = npt.NDArray[Any]


class Bundles:
    """Random experts: bundles far from each other, and their weights in float64."""

    def __init__(self, layout: ExpertLayout, experts: int, scale: float) -> None:
        self.layout = layout
        self.memory, self.weights = [], []
        rng = np.random.default_rng(7)
        for e in range(experts):
            bundle = np.full(layout.nbytes, 255, np.uint8)
            found: list[Array] = []
            for i, (offset, fmt, n, k) in enumerate(
                (
                    (layout.gate_offset, layout.gate_up, layout.inner, layout.hidden),
                    (layout.up_offset, layout.gate_up, layout.inner, layout.hidden),
                    (layout.down_offset, layout.down, layout.hidden, layout.inner),
                )
            ):
                rows = random_rows(fmt, n, k, seed=10 * e + i, scale=scale)
                pack_rows(fmt, rows, k, bundle[offset : offset + packed_bytes(fmt, n, k)])
                found.append(decode_rows(fmt, rows).astype(np.float64))
            for offset, n in (
                (layout.gate_bias_offset, layout.inner),
                (layout.up_bias_offset, layout.inner),
                (layout.down_bias_offset, layout.hidden),
            ):
                bias = rng.standard_normal(n).astype(np.float32)
                if offset >= 0:
                    bundle[offset : offset + 4 * n] = bias.view(np.uint8)
                found.append(bias.astype(np.float64) * (offset >= 0))
            self.memory.append(bundle)
            self.weights.append(found)
        self.bases = np.array([b.ctypes.data for b in self.memory])

    def reference(self, x: Array, routing: Array) -> Array:
        out = np.zeros(x.shape)
        for e, (gate, up, down, gate_bias, up_bias, down_bias) in enumerate(self.weights):
            h = glu(self.layout, x @ gate.T + gate_bias, x @ up.T + up_bias)
            out += routing[:, e : e + 1] * (h @ down.T + down_bias)
        return out


def glu(layout: ExpertLayout, g: Array, u: Array) -> Array:
    if layout.glu is Glu.SILU:
        return g / (1 + np.exp(-g)) * u
    if layout.glu is Glu.GELU:
        return g / 2 * (1 + np.vectorize(erf)(g / 2**0.5)) * u
    if layout.glu is Glu.GELU_TANH:
        return g / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (g + 0.044715 * g**3))) * u
    g, u = np.minimum(g, layout.limit), np.clip(u, -layout.limit, layout.limit)
    return g / (1 + np.exp(-layout.alpha * g)) * (u + 1)


def inputs(layout: ExpertLayout, tokens: int, experts: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((tokens, layout.hidden)).astype(np.float32)
    routing = rng.random((tokens, experts)).astype(np.float32)
    routing[rng.random(routing.shape) < 0.4] = 0
    return x, routing


@pytest.mark.parametrize("kind", list(Glu))
@pytest.mark.parametrize("biases", [False, True])
def test_float_weights_are_within_rounding(kind: Glu, biases: bool) -> None:
    bf16 = FORMATS["bf16"]
    layout = expert_layout(bf16, bf16, 70, 38, biases=biases, glu=kind)  # 38 = 2 tiles and 6 rows
    bundles = Bundles(layout, 5, 1.0)
    x, routing = inputs(layout, 11, 5)
    x[0] *= 4  # reaches the clamp and the far ends of exp
    expected = bundles.reference(x, routing)
    for isa in ISAS:
        out = np.full(x.shape, np.nan, np.float32)
        assert expert_ffn(layout, bundles.bases, x, routing, out, isa=isa) is out
        assert np.abs(out - expected).max() <= 4e-6 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("gate_up", "down", "isas"),
    [
        ("q4_0", "q4_0", ISAS),
        # Their products on other instruction sets are test_gemm's: these compile for a minute.
        ("q8_0", "q8_0", ISAS[:1]),
        pytest.param("q8_0", "q8_0", ISAS, marks=pytest.mark.sweep),
        pytest.param("q4_k", "q6_k", ISAS[:1], marks=pytest.mark.sweep),
        pytest.param("mxfp4", "mxfp4", ISAS[:1], marks=pytest.mark.slow),
        pytest.param("q4_k", "q6_k", ISAS, marks=pytest.mark.sweep),
        pytest.param("mxfp4", "mxfp4", ISAS, marks=pytest.mark.sweep),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} sets",
)
def test_quantised_weights(gate_up: str, down: str, isas: list[str]) -> None:
    layout = expert_layout(FORMATS[gate_up], FORMATS[down], 512, 256, biases=True)
    bundles = Bundles(layout, 4, 0.002)
    x, routing = inputs(layout, 3, 4)
    expected = bundles.reference(x, routing)
    outs = []
    for isa in isas:
        out = np.full(x.shape, np.nan, np.float32)
        expert_ffn(layout, bundles.bases, x, routing, out, isa=isa)
        outs.append(out)
        # The activations' int8, twice: about 0.6 % of each product, uncorrelated.
        assert np.linalg.norm(out - expected) <= 0.03 * np.linalg.norm(expected)
    assert all(np.array_equal(outs[0], out) for out in outs[1:])


@pytest.mark.parametrize("name", ["q4_0", "bf16"])
@pytest.mark.usefixtures("restore_threads")
def test_threads_and_company_do_not_show(name: str) -> None:
    fmt = FORMATS[name]
    layout = expert_layout(fmt, fmt, 512, 384)
    bundles = Bundles(layout, 6, 0.02)
    x, routing = inputs(layout, 10, 6)
    outs = []
    for n in (1, 2, 3):
        threads.setup(n)
        out = np.full(x.shape, np.nan, np.float32)
        expert_ffn(layout, bundles.bases, x, routing, out)
        outs.append(out)
    assert all(np.array_equal(outs[0], out) for out in outs[1:])
    for t in range(len(x)):
        chosen = routing[t] != 0
        alone = np.full(layout.hidden, np.nan, np.float32)
        bases = bundles.bases[chosen].astype(np.uint64)
        expert_ffn(layout, bases, x[t], np.ascontiguousarray(routing[t, chosen]), alone)
        assert np.array_equal(alone, outs[0][t])


@pytest.mark.parametrize("biases", [False, True])
def test_many_tokens_of_an_expert_have_the_bits_of_each_alone(biases: bool) -> None:
    """One expert has all tokens, the others few or none."""
    q8 = FORMATS["q8_0"]
    layout = expert_layout(q8, q8, 16 * 6, 16 * 4, biases=biases)
    wide = expert_layout(q8, q8, 16 * 2, 16 * 6, biases=biases)
    for some in (layout, wide):
        bundles = Bundles(some, 5, 0.02)
        x, routing = inputs(some, 75, 5)
        routing[:, 0] = 0.5
        routing[3:, 1], routing[4:, 2], routing[6:, 3], routing[0, 4] = 0, 0, 0, 0
        out = np.full(x.shape, np.nan, np.float32)
        expert_ffn(some, bundles.bases, x, routing, out)
        onto = np.ones_like(x)
        expert_ffn(some, bundles.bases, x, routing, onto, add=True)
        for t in range(len(x)):
            chosen = routing[t] != 0
            alone = np.full(some.hidden, np.nan, np.float32)
            weights = np.ascontiguousarray(routing[t, chosen])
            expert_ffn(some, bundles.bases[chosen], x[t], weights, alone)
            assert np.array_equal(alone, out[t])
            alone[:] = 1
            expert_ffn(some, bundles.bases[chosen], x[t], weights, alone, add=True)
            assert np.array_equal(alone, onto[t])


@pytest.mark.parametrize("names", [("q4_0", "q4_0"), ("bf16", "q8_0"), ("q8_0", "f32")])
def test_prepared_calls_have_the_same_bits(names: tuple[str, str]) -> None:
    layout = expert_layout(FORMATS[names[0]], FORMATS[names[1]], 512, 384, biases=True)
    bundles = Bundles(layout, 6, 0.02)
    x, _ = inputs(layout, 4, 6)
    call = TokenExperts(layout, 5)
    weights = np.linspace(0.1, 1, 5, dtype=np.float32)
    for t, n in enumerate((5, 1, 3, 5)):
        first, second = np.empty(layout.hidden, np.float32), np.empty(layout.hidden, np.float32)
        expert_ffn(layout, bundles.bases[t % 2 :][:n], x[t], weights[:n], first)
        assert call(bundles.bases[t % 2 :][:n], x[t], weights[:n], second) is second
        assert np.array_equal(first, second)
        expert_ffn(layout, bundles.bases[:1], x[t], weights[:1], first, add=True)
        call(bundles.bases[:1], x[t], weights[:1], second, add=True)
        assert np.array_equal(first, second)
    for bases in (bundles.bases, bundles.bases[:0], bundles.bases[:2].astype(np.int32)):
        with pytest.raises(OffloadError, match="bases must be int64"):
            call(bases, x[0], weights[: len(bases)], np.empty(layout.hidden, np.float32))


def test_experts_are_added_in_the_given_order() -> None:
    """1e8 + 1 - 1e8 is 0 or 1 in float32, as the order has it."""
    f32 = FORMATS["f32"]
    layout = expert_layout(f32, f32, 16, 16, biases=True)
    bundles = Bundles(layout, 3, 0.0)
    for bundle, value in zip(bundles.memory, (1e8, 1.0, -1e8), strict=True):
        bundle[: layout.gate_bias_offset] = 0
        bias = np.full(16, value, np.float32).view(np.uint8)
        bundle[layout.down_bias_offset : layout.down_bias_offset + 64] = bias
    x, routing = np.zeros(16, np.float32), np.ones(3, np.float32)
    for order, expected in (([0, 1, 2], 0.0), ([0, 2, 1], 1.0)):
        out = np.empty(16, np.float32)
        expert_ffn(layout, bundles.bases[order], x, routing, out)
        assert (out == expected).all()


@pytest.mark.parametrize("hidden", [512, 96, 32])
def test_experts_by_themselves_add_up_to_the_same_bits(hidden: int) -> None:
    """Each without its weights, computed in any order, then added in theirs."""
    fmt = FORMATS["q4_0"]
    layout = expert_layout(fmt, fmt, hidden, 64, biases=True)
    bundles = Bundles(layout, 6, 0.02)
    x, routing = inputs(layout, 5, 6)
    together = np.full(x.shape, np.nan, np.float32)
    expert_ffn(layout, bundles.bases, x, routing, together)
    parts: dict[int, Any] = {}
    for e in (3, 0, 5, 4, 1, 2):
        tokens = np.flatnonzero(routing[:, e])
        ones = np.ones((len(tokens), 1), np.float32)
        mine = np.ascontiguousarray(x[tokens])
        parts[e] = expert_ffn(layout, bundles.bases[[e]], mine, ones, np.empty_like(mine))
    apart = np.zeros_like(together)
    for e in range(6):
        tokens = np.flatnonzero(routing[:, e])
        add_weighted(parts[e], tokens, np.ascontiguousarray(routing[tokens, e]), apart)
    assert np.array_equal(together, apart)
    with pytest.raises(OffloadError, match="weights"):
        add_weighted(parts[0], np.zeros(1, np.int64), np.ones(9, np.float32), apart)


def test_no_expert_and_no_token() -> None:
    fmt = FORMATS["q4_0"]
    layout = expert_layout(fmt, fmt, 64, 32)
    bundles = Bundles(layout, 2, 0.02)
    x, out = np.ones((3, 64), np.float32), np.full((3, 64), np.nan, np.float32)
    routing = np.array([[1, 0], [0, 0], [0, 1]], np.float32)
    expert_ffn(layout, bundles.bases, x, routing, out)
    assert (out[1] == 0).all()
    assert np.isfinite(out).all()
    out[:] = np.nan
    expert_ffn(layout, bundles.bases[:0], x, routing[:, :0], out)
    assert (out == 0).all()
    assert expert_ffn(layout, bundles.bases, x[:0], routing[:0], out[:0]).shape == (0, 64)


def test_what_does_not_fit_is_refused() -> None:
    fmt = FORMATS["q4_0"]
    layout = expert_layout(fmt, fmt, 64, 32)
    x, out = np.ones(64, np.float32), np.empty(64, np.float32)
    with pytest.raises(OffloadError, match=r"weights must be contiguous float32 \[2\]"):
        expert_ffn(layout, np.zeros(2, np.int64), x, np.ones(3, np.float32), out)
    with pytest.raises(OffloadError, match="bases must be int64"):
        expert_ffn(layout, np.zeros(2, np.int32), x, np.ones(2, np.float32), out)
    with pytest.raises(OffloadError, match="overlap or do not fit"):
        ExpertLayout(
            gate_up=fmt, down=fmt, hidden=64, inner=32,
            gate_offset=0, up_offset=64, down_offset=4096, nbytes=9999,
        )  # fmt: skip
