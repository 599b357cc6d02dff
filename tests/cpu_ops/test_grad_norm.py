"""Norms, accumulation and scaling of gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from optimizer_support import from_bf16, gradients, to_bf16

from offload.cpu_ops import grad_norm
from offload.cpu_ops.grad_norm import CHUNK
from offload.errors import OffloadError


def sums_of(g: Any, cut: int | None = None, workers: int | None = 1) -> list[Any]:
    """Per tile of ``cut`` elements."""
    found = []
    for at in range(0, g.size, cut or g.size):
        tile = g[at : at + (cut or g.size)]
        found.append(np.full(grad_norm.chunks(tile.size), -1.0))
        grad_norm.squares(tile, found[-1], workers=workers)
    return found


@pytest.mark.parametrize("kind", ["ordinary", "mixed", "tiny", "huge", "denormal", "zero"])
@pytest.mark.parametrize("bf16", [False, True])
def test_norm_is_exact(kind: str, bf16: bool) -> None:
    g = gradients(kind, 3 * CHUNK + 77, np.random.default_rng(0))
    given: Any = to_bf16(g) if bf16 else g
    exact = from_bf16(given) if bf16 else g
    want = math.sqrt(math.fsum(x * x for x in exact.astype(np.float64).tolist()))
    assert grad_norm.norm(sums_of(given)) == pytest.approx(want, rel=1e-14, abs=0.0)


def test_the_order_of_additions() -> None:
    """As documented, in float64: so the sums are the same on any machine."""
    g = gradients("mixed", 2 * CHUNK, np.random.default_rng(1))
    want = []
    for chunk in g.astype(np.float64).reshape(2, -1, 4, 16):
        lanes = np.zeros((4, 16))
        for row in chunk:
            lanes = lanes + row * row
        lane = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3])
        for width in (8, 4, 2, 1):
            lane = lane[:width] + lane[width : 2 * width]
        want.append(float(lane[0]))
    assert sums_of(g)[0].tolist() == want


def test_threads_tiles_and_their_order_change_nothing() -> None:
    g = gradients("mixed", 40 * CHUNK + 5, np.random.default_rng(2))
    whole = sums_of(g)
    for workers, cut in ((2, g.size), (3, g.size), (2, CHUNK), (1, 8 * CHUNK)):
        parts = sums_of(g, cut, workers)
        np.testing.assert_array_equal(np.concatenate(parts), whole[0])
        assert grad_norm.norm(reversed(parts)) == grad_norm.norm(whole)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bf16", [False, True])
def test_what_is_not_finite_is_found(value: float, bf16: bool) -> None:
    g = np.full(3 * CHUNK, 3e38, np.float32)  # whose squares no float32 holds
    assert np.isfinite(sums_of(g)[0]).all()
    g[CHUNK + 7] = value
    sums = sums_of(to_bf16(g) if bf16 else g)
    assert np.isfinite(sums[0]).tolist() == [True, False, True]
    assert not math.isfinite(grad_norm.norm(sums))


@pytest.mark.parametrize("count", [0, 1, 63, 64, 100, 5000])
@pytest.mark.parametrize("bf16", [False, True])
def test_accumulate_and_scale(count: int, bf16: bool) -> None:
    rng = np.random.default_rng(3)
    g, total = gradients("mixed", count, rng), gradients("mixed", count, rng)
    given: Any = to_bf16(g) if bf16 else g.copy()
    exact = from_bf16(given) if bf16 else g
    want = total + exact
    grad_norm.accumulate(total, given, workers=2)
    np.testing.assert_array_equal(total, want)
    scaled = exact * np.float32(0.3)
    grad_norm.scale(given, 0.3, workers=2)
    np.testing.assert_array_equal(given, to_bf16(scaled) if bf16 else scaled)


def test_bad_tiles() -> None:
    g = np.zeros(CHUNK + 1, np.float32)
    with pytest.raises(OffloadError, match=r"the sums must be contiguous float64 \[2\], got"):
        grad_norm.squares(g, np.zeros(1))
    with pytest.raises(OffloadError, match=r"the gradient must be contiguous float32 \[2\]"):
        grad_norm.accumulate(np.zeros(2, np.float32), g)
    with pytest.raises(OffloadError, match="not contiguous"):
        grad_norm.scale(g[::2], 2.0)
