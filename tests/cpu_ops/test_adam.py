"""The float32 optimizer kernel against torch, and against itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kernel_support import restore_threads
from optimizer_support import from_bf16, gradients, to_bf16

from offload.cpu_ops import threads
from offload.cpu_ops.adam import AdamStep, adam_fp32
from offload.errors import OffloadError

__all__ = ["restore_threads"]

KINDS = ["ordinary", "mixed", "tiny", "huge", "denormal", "zero"]


def state(count: int, kind: str = "ordinary", seed: int = 0) -> tuple[Any, ...]:
    """(gradient, p, m, v) in the middle of a training."""
    rng = np.random.default_rng(seed)
    g, m = gradients(kind, count, rng), gradients(kind, count, rng)
    p = rng.standard_normal(count).astype(np.float32)
    return g, p, m, np.square(m) * np.float32(1.5)  # |m| < sqrt(v), as averages of g and g^2 are


def by_torch(step: AdamStep, g: Any, p: Any, m: Any, v: Any) -> Any:
    """(p, m, v) after torch's step."""
    parameter = torch.nn.Parameter(torch.from_numpy(p.copy()))
    optimizer = (torch.optim.AdamW if step.decoupled else torch.optim.Adam)(
        [parameter], lr=step.lr, betas=(step.beta1, step.beta2), eps=step.eps,
        weight_decay=step.weight_decay, foreach=False, fused=False,
    )  # fmt: skip
    optimizer.state[parameter] = {
        "step": torch.tensor(float(step.step - 1)),
        "exp_avg": torch.from_numpy(m.copy()),
        "exp_avg_sq": torch.from_numpy(v.copy()),
    }
    parameter.grad = torch.from_numpy(g.copy()).mul_(step.clip)
    optimizer.step()
    found = optimizer.state[parameter]
    return parameter.detach().numpy(), found["exp_avg"].numpy(), found["exp_avg_sq"].numpy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "step",
    [
        AdamStep(lr=1e-3, step=1),
        AdamStep(lr=3e-4, step=1000, clip=0.37, weight_decay=0.1, eps=1e-6),
        AdamStep(lr=1e-2, step=7, beta1=0.0, beta2=0.5, weight_decay=0.0),
        AdamStep(lr=1e-3, step=20, beta1=0.3, weight_decay=0.05, decoupled=False),
        AdamStep(lr=1e-3, step=20, weight_decay=0.05, clip=0.5, decoupled=False),
    ],
    ids=["first", "clipped", "beta1=0", "l2, low beta1", "l2"],
)
def test_is_torch(kind: str, step: AdamStep) -> None:
    """From the same state within 2 ulp: of the moments, and of the parameter or, if these are
    larger, its old value and its move."""
    g, p, m, v = state(4099, kind)
    want_p, want_m, want_v = by_torch(step, g, p, m, v)
    old = p.copy()
    adam_fp32(step, g, p, m, v)
    ulp = np.spacing(np.float32(1)) * np.maximum(np.abs(want_m), np.finfo(np.float32).tiny)
    assert np.all(np.abs(m - want_m) <= 2 * ulp)
    ulp = np.spacing(np.maximum(want_v, np.finfo(np.float32).tiny))
    with np.errstate(invalid="ignore"):
        assert np.all((np.abs(v - want_v) <= 2 * ulp) | (v == want_v))
    largest = np.maximum(np.maximum(np.abs(old), np.abs(want_p)), np.abs(want_p - old))
    assert np.all(np.abs(p - want_p) <= 2 * np.spacing(largest))
    assert kind == "zero" or np.any(m != 0)


def test_follows_torch_for_many_steps() -> None:
    g, p, m, v = state(1000, "zero")
    q, mq, vq = p.copy(), m.copy(), v.copy()
    rng = np.random.default_rng(3)
    for i in range(1, 51):
        step = AdamStep(lr=1e-3 / i, step=i, weight_decay=0.1, clip=1 / i)
        g = gradients("ordinary", 1000, rng)
        q, mq, vq = by_torch(step, g, q, mq, vq)
        adam_fp32(step, g, p, m, v)
    np.testing.assert_allclose(p, q, rtol=0, atol=50 * 2.0**-23)
    np.testing.assert_array_equal(m, mq)  # they never see the parameters


@pytest.mark.parametrize("count", [0, 1, 15, 64, 65, 4099])
def test_bf16_gradient_and_copies(count: int) -> None:
    """A bfloat16 gradient is the float32 one with its values; a copy is p as torch rounds it."""
    g, p, m, v = state(count)
    bits, step = to_bf16(g), AdamStep(lr=1e-3, step=5)
    q, mq, vq = p.copy(), m.copy(), v.copy()
    copy16, copy32 = np.zeros(count, np.uint16), np.zeros(count, np.float32)
    adam_fp32(step, bits, p, m, v, copy16)
    adam_fp32(step, from_bf16(bits), q, mq, vq, copy32)
    for ours, other in ((p, q), (m, mq), (v, vq)):
        np.testing.assert_array_equal(ours, other)
    np.testing.assert_array_equal(copy16, to_bf16(p))
    np.testing.assert_array_equal(copy32, p)


@pytest.mark.usefixtures("restore_threads")
def test_tiles_and_threads_change_nothing() -> None:
    g, p, m, v = state(100_003)
    step, found = AdamStep(lr=1e-3, step=5), []
    for workers, cut in ((1, 100_003), (2, 100_003), (3, 100_003), (2, 8192), (None, 4099)):
        q, mq, vq = p.copy(), m.copy(), v.copy()
        for i in range(0, g.size, cut):
            part = slice(i, i + cut)
            adam_fp32(step, g[part], q[part], mq[part], vq[part], workers=workers)
        found.append((q.tobytes(), mq.tobytes(), vq.tobytes()))
    assert len(set(found)) == 1
    assert found[0][0] != p.tobytes()


def test_what_is_beyond_a_tile_stays() -> None:
    """The last elements of a tile are computed elsewhere: nothing around it may be written."""
    arrays = [np.full(200, 7.0, np.float32) for _ in range(5)]
    g, p, m, v, c = (a[64:137] for a in arrays)
    adam_fp32(AdamStep(lr=1e-3, step=1), g, p, m, v, c)
    for array in arrays:
        assert np.all(array[:64] == 7)
        assert np.all(array[137:] == 7)
    assert np.all(p != 7)


def test_not_finite_gradients_reach_the_states() -> None:
    g, p, m, v = state(64)
    g[3], g[5] = np.nan, np.inf
    copy = np.zeros(64, np.uint16)
    adam_fp32(AdamStep(lr=1e-3, step=1), g, p, m, v, copy)
    assert np.isnan(p[3])
    assert np.isnan(from_bf16(copy)[3])
    assert np.isinf(v[5])
    assert np.isfinite(np.delete(p, [3, 5])).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": -1.0}, "lr must be finite and at least 0, not -1.0"),
        ({"clip": float("nan")}, "clip must be finite"),
        ({"beta2": 1.0}, r"beta2 must be in \[0, 1\), not 1.0"),
        ({"step": 0}, "count from 1, not 0"),
    ],
)
def test_bad_steps(change: dict[str, Any], message: str) -> None:
    with pytest.raises(OffloadError, match=message):
        AdamStep(**{"lr": 1e-3, "step": 1, **change})


def test_bad_tiles() -> None:
    g, p, m, v = state(64)
    step = AdamStep(lr=1e-3, step=1)
    with pytest.raises(
        OffloadError, match=r"m must be contiguous float32 \[64\], got float32 \[63"
    ):
        adam_fp32(step, g, p, m[:63], v)
    with pytest.raises(OffloadError, match=r"the gradient must be float32, or .* float64"):
        adam_fp32(step, g.astype(np.float64), p, m, v)
    v.flags.writeable = False
    with pytest.raises(OffloadError, match="v is read-only"):
        adam_fp32(step, g, p, m, v)


@pytest.mark.usefixtures("restore_threads")
def test_one_worker_needs_no_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    threads.setup(1)
    monkeypatch.setattr(threads, "openmp", lambda: pytest.fail("a region was started"))
    g, p, m, v = state(64)
    adam_fp32(AdamStep(lr=1e-3, step=1), g, p, m, v, workers=1)
