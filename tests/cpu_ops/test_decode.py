"""A decoder layer's regions: attention against float64, threads, formats, routing, the cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kernel_support import ISAS, restore_threads

from offload.cpu_ops import threads
from offload.cpu_ops.attention import BLOCK
from offload.cpu_ops.decode import AttentionHalf, DenseMlp, Scratch, TokenRouter
from offload.cpu_ops.formats import FORMATS
from offload.cpu_ops.functions import Glu
from offload.cpu_ops.kernels import address_of
from offload.cpu_ops.kv_cache import PLAIN, KvCache, KvType, from_bf16, to_bf16
from offload.cpu_ops.layer_plan import (
    AttentionPlan,
    LayerPlan,
    MatrixPlan,
    MlpPlan,
    NormPlan,
    QkNorm,
    RouterPlan,
)
from offload.cpu_ops.packing import dequantize, pack_rows, quantize
from offload.cpu_ops.rope import Rope
from offload.cpu_ops.routing_choice import Scoring
from offload.errors import OffloadError

__all__ = ["restore_threads"]

Array = npt.NDArray[Any]
F32 = FORMATS["f32"]
NORM = NormPlan(eps=1e-6)


class Weights:
    """Random weights for a plan's slots; ``exact``: their values in float64."""

    def __init__(self, plan: Any, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.keep: dict[str, Array] = {}
        self.exact: dict[str, Array] = {}
        dim = getattr(plan, "dim", 0)
        lengths = {"q_norm": dim, "k_norm": dim, "sinks": getattr(plan, "heads", 0)}
        if getattr(plan, "qk_norm", None) is QkNorm.WIDE:
            lengths.update(q_norm=plan.heads * dim, k_norm=plan.key_heads * dim)
        for slot in plan.slots:
            matrix = getattr(plan, slot.removesuffix("_bias"), None)
            if isinstance(matrix, MatrixPlan) and not slot.endswith("_bias"):
                w = rng.standard_normal((matrix.rows, matrix.columns)).astype(np.float32)
                packed = pack_rows(matrix.format, quantize(matrix.format, w * 0.1), matrix.columns)
                self.keep[slot] = packed
                values = dequantize(matrix.format, packed, matrix.rows, matrix.columns)
            else:
                rows = matrix.rows if isinstance(matrix, MatrixPlan) else plan.hidden
                rows = plan.gate.rows if slot == "choice_bias" else rows
                values = rng.standard_normal(lengths.get(slot, rows)).astype(np.float32)
                self.keep[slot] = values
            self.exact[slot] = values.astype(np.float64)

    @property
    def places(self) -> dict[str, int]:
        return {slot: address_of(array) for slot, array in self.keep.items()}


def attention_plan(name: str = "f32", **changes: Any) -> AttentionPlan:
    given: dict[str, Any] = {
        "hidden": 256, "heads": 6, "key_heads": 2, "dim": 64, "norm": NORM, "rotary": 64,
        "scaling": 0.125, "bias": False, **changes,
    }  # fmt: skip
    h, q, k = given["hidden"], given["heads"] * given["dim"], given["key_heads"] * given["dim"]
    bias, fmt = given.pop("bias"), FORMATS[name]
    for slot, rows, columns in (("q", q, h), ("k", k, h), ("v", k, h), ("o", h, q)):
        given[slot] = MatrixPlan(format=fmt, rows=rows, columns=columns, bias=bias)
    return AttentionPlan(**given)


def rope_for(plan: AttentionPlan) -> Rope:
    inverse = 1e4 ** -(np.arange(plan.rotary // 2) / max(plan.rotary // 2, 1))
    return Rope(inverse.astype(np.float32), 1.25, pairs=plan.pairs)


def build(
    plan: AttentionPlan, weights: Weights, cache: KvCache, isa: str | None = None
) -> AttentionHalf:
    mlp = mlp_plan(hidden=plan.hidden)
    scratch = Scratch.of([LayerPlan(attention=plan, mlp=mlp)], cache.capacity)
    half = AttentionHalf(plan, rope_for(plan), cache, 0, scratch, isa=isa)
    half.place(**weights.places)
    return half


def norm(x: Array, weight: Array, plan: NormPlan = NORM) -> Array:
    out = x / np.sqrt((x**2).mean(-1, keepdims=True) + plan.eps) * (weight + plan.plus)
    return np.asarray(out)


def rotated(x: Array, plan: AttentionPlan, position: int) -> Array:
    """[heads, dim]"""
    half = plan.rotary // 2
    inverse = (1e4 ** -(np.arange(half) / max(half, 1))).astype(np.float32)
    angle = (np.float32(position) * inverse).astype(np.float64)
    cos, sin = 1.25 * np.cos(angle), 1.25 * np.sin(angle)
    out = x.copy()
    if plan.pairs:
        a, b = x[:, 0 : plan.rotary : 2], x[:, 1 : plan.rotary : 2]
        out[:, 0 : plan.rotary : 2], out[:, 1 : plan.rotary : 2] = (
            a * cos - b * sin,
            b * cos + a * sin,
        )
    else:
        a, b = x[:, :half], x[:, half : plan.rotary]
        out[:, :half], out[:, half : plan.rotary] = a * cos - b * sin, b * cos + a * sin
    return out


def reference(
    plan: AttentionPlan, w: dict[str, Array], x: Array, cache: KvCache, position: int
) -> Array:
    """What one call adds to ``x``, in float64, from the cache as it is after the call."""
    n = norm(x.astype(np.float64), w["norm"], plan.norm)
    q = w["q"] @ n + w.get("q_bias", 0.0)
    if plan.qk_norm is QkNorm.WIDE:
        q = norm(q, w["q_norm"], plan.norm)
    q = q.reshape(plan.heads, plan.dim)
    if plan.qk_norm is QkNorm.HEAD:
        q = norm(q, w["q_norm"], plan.norm)
    q = rotated(q, plan, position)
    keys, values = (
        (from_bf16(a) if cache.kind is KvType.BF16 else a).astype(np.float64)
        for a in (cache.keys(0), cache.values(0))
    )
    start = max(0, keys.shape[1] - plan.window) if plan.window else 0
    outs = []
    for h in range(plan.heads):
        g = h // (plan.heads // plan.key_heads)
        scores = keys[g, start:] @ q[h] * plan.scaling
        if plan.softcap:
            scores = plan.softcap * np.tanh(scores / plan.softcap)
        sink = np.exp(w["sinks"][h] - scores.max()) if plan.sinks else 0.0
        p = np.exp(scores - scores.max())
        outs.append(p / (p.sum() + sink) @ values[g, start:])
    out = w["o"] @ np.concatenate(outs) + w.get("o_bias", 0.0)
    return norm(out, w["post_norm"], plan.norm) if plan.post_norm else np.asarray(out)


PLANS: dict[str, Any] = {
    "plain": {},
    "everything": {
        "bias": True, "qk_norm": QkNorm.HEAD, "window": 300, "softcap": 5.0, "sinks": True,
        "post_norm": True, "norm": NormPlan(eps=1e-5, plus=1.0),
    },
    "wide norm, one query per key": {"qk_norm": QkNorm.WIDE, "heads": 3, "key_heads": 3},
    "interleaved, partial": {"pairs": True, "rotary": 20},
    "rotate-half, partial": {"rotary": 24, "dim": 80, "scaling": 0.1},
    "seven queries per key, long heads": {"heads": 7, "key_heads": 1, "dim": 144, "rotary": 144},
}  # fmt: skip


def filled(plan: AttentionPlan, tokens: int, capacity: int, kind: KvType) -> KvCache:
    cache = KvCache(1, plan.key_heads, plan.dim, capacity, kind)
    rng = np.random.default_rng(3)
    shape = (plan.key_heads, tokens, plan.dim)
    keys, values = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    cache.fill(0, keys, values)
    return cache


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("name", PLANS)
def test_attention(name: str, kind: KvType) -> None:
    plan = attention_plan(**PLANS[name])
    weights = Weights(plan)
    x0 = np.random.default_rng(1).standard_normal(plan.hidden).astype(np.float32)
    for tokens in (0, 1, 6, BLOCK - 1, BLOCK, 2 * BLOCK + 45):
        cache = filled(plan, tokens, 700, kind)
        half, x = build(plan, weights, cache), x0.copy()
        assert half(x, tokens + 3) is x
        added = reference(plan, weights.exact, x0, cache, tokens + 3)
        assert np.abs(x - (x0 + added)).max() <= 2e-5 * np.abs(x).max()
        k = weights.exact["k"] @ norm(x0.astype(np.float64), weights.exact["norm"], plan.norm)
        assert np.isfinite(k).all()
        assert cache.length(0) == tokens + 1


@pytest.mark.parametrize("isa", ISAS)
def test_instruction_sets_agree(isa: str) -> None:
    plan = attention_plan(**PLANS["everything"])
    weights, outs = Weights(plan), []
    for choice in (isa, None):
        cache = filled(plan, 270, 300, KvType.F32)
        x = np.ones(plan.hidden, np.float32)
        outs.append(build(plan, weights, cache, choice)(x))
    assert np.array_equal(outs[0], outs[1])


@pytest.mark.parametrize("name", ["f32", "q4_0"])
@pytest.mark.usefixtures("restore_threads")
def test_threads_do_not_show(name: str) -> None:
    changes = dict(PLANS["everything"], qk_norm=QkNorm.WIDE)
    plan, mlp = attention_plan(name, **changes), mlp_plan(name, post_norm=True)
    router = router_plan(hidden=256)
    w, w_mlp, w_router = Weights(plan), Weights(mlp), Weights(router)
    outs = []
    for n in (1, 2, 3, 5):
        threads.setup(n)
        cache = filled(plan, 530, 600, KvType.BF16)
        half = build(plan, w, cache)
        scratch = Scratch.of([LayerPlan(attention=plan, mlp=mlp)], 600)
        dense, route = DenseMlp(mlp, scratch), TokenRouter(router, scratch)
        dense.place(**w_mlp.places)
        route.place(**w_router.places)
        x = np.random.default_rng(2).standard_normal(256).astype(np.float32)
        for _ in range(4):
            half(x)
            ids, weights, normed = route(x)
            dense(x)
        outs.append([a.copy() for a in (x, ids, weights, normed, cache.keys(0), cache.values(0))])
    for other in outs[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(outs[0], other, strict=True))


def test_mixed_formats_share_what_they_can() -> None:
    """q and k read int8 per 32 columns, v per 256, o floats."""
    plan = attention_plan()
    names = {"q": "q4_0", "k": "q8_0", "v": "q4_0", "o": "bf16"}
    changes: dict[str, Any] = {
        slot: dataclasses.replace(getattr(plan, slot), format=FORMATS[n])
        for slot, n in names.items()
    }
    mixed = dataclasses.replace(plan, **changes)
    weights, cache = Weights(mixed), filled(mixed, 40, 64, KvType.F32)
    x0 = np.random.default_rng(5).standard_normal(256).astype(np.float32)
    x = build(mixed, weights, cache)(x0.copy())
    added = reference(mixed, weights.exact, x0, cache, 40)
    # Activations in int8: about 0.5 % of each product.
    assert np.linalg.norm(x - x0 - added) <= 0.03 * np.linalg.norm(added)


def mlp_plan(name: str = "f32", *, hidden: int = 256, inner: int = 416, **changes: Any) -> MlpPlan:
    fmt, bias = FORMATS[name], changes.pop("bias", False)
    up = MatrixPlan(format=fmt, rows=inner, columns=hidden, bias=bias)
    down = MatrixPlan(format=fmt, rows=hidden, columns=inner, bias=bias)
    given: dict[str, Any] = {"norm": NORM, **changes}
    return MlpPlan(hidden=hidden, gate=up, up=up, down=down, **given)


def mlp_reference(plan: MlpPlan, w: dict[str, Array], x: Array) -> Array:
    n = x.astype(np.float64)
    n = n if plan.norm is None else norm(n, w["norm"])
    g, u = w["gate"] @ n + w.get("gate_bias", 0.0), w["up"] @ n + w.get("up_bias", 0.0)
    out = w["down"] @ (g / (1 + np.exp(-g)) * u) + w.get("down_bias", 0.0)
    if plan.share:
        out = out / (1 + np.exp(-(w["share"] @ n)))
    return norm(out, w["post_norm"]) if plan.post_norm else np.asarray(out)


@pytest.mark.parametrize("inner", [416, 54])
@pytest.mark.parametrize("changes", [{}, {"bias": True, "post_norm": True}])
def test_mlp(changes: dict[str, Any], inner: int) -> None:
    plan = mlp_plan(inner=inner, **changes)
    weights = Weights(plan)
    mlp = DenseMlp(plan, Scratch(1 << 20))
    mlp.place(**weights.places)
    x0 = np.random.default_rng(6).standard_normal(plan.hidden).astype(np.float32)
    x = mlp(x0.copy())
    assert np.abs(x - x0 - mlp_reference(plan, weights.exact, x0)).max() <= 1e-5 * np.abs(x).max()


@pytest.mark.parametrize("name", ["f32", "q4_0"])
def test_shared_expert_adds_its_share(name: str) -> None:
    plan = mlp_plan(name, norm=None, share=True)
    weights = Weights(plan)
    mlp = DenseMlp(plan, Scratch(1 << 20))
    mlp.place(**weights.places)
    x = np.random.default_rng(6).standard_normal(plan.hidden).astype(np.float32) * 0.1
    into, before = np.ones(plan.hidden, np.float32), x.copy()
    assert mlp(x, into) is into
    expected = mlp_reference(plan, weights.exact, x)
    assert np.linalg.norm(into - 1 - expected) <= 0.03 * np.linalg.norm(expected)
    assert np.array_equal(x, before)
    with pytest.raises(OffloadError, match="into is for"):
        mlp(x)


def router_plan(hidden: int = 64, experts: int = 40, **changes: Any) -> RouterPlan:
    given: dict[str, Any] = {"top_k": 5, "scoring": Scoring.SOFTMAX, **changes}
    gate = MatrixPlan(format=F32, rows=experts, columns=hidden, bias=bool(given.pop("bias", False)))
    return RouterPlan(hidden=hidden, gate=gate, norm=NORM, **given)


def routed(plan: RouterPlan, w: dict[str, Array], x: Array) -> tuple[Array, Array]:
    logits = w["gate"] @ norm(x.astype(np.float64), w["norm"]) + w.get("gate_bias", 0.0)
    if plan.scoring is Scoring.SIGMOID:
        scores = 1 / (1 + np.exp(-logits))
        choice = scores + w.get("choice_bias", 0.0)
        groups = choice.reshape(plan.groups, -1)
        best = np.argsort(-np.sort(groups)[:, -2:].sum(1))[: plan.keep_groups]
        dropped = np.setdiff1d(np.arange(plan.groups), best)
        groups[dropped] = -np.inf
    elif plan.scoring is Scoring.SOFTMAX:
        scores = np.exp(logits - logits.max())
        scores /= scores.sum()
        choice = scores
    else:
        scores = choice = logits
    ids = np.argsort(-choice)[: plan.top_k]
    weights = scores[ids]
    if plan.scoring is Scoring.AFTER:
        weights = np.exp(weights - weights.max()) / np.exp(weights - weights.max()).sum()
    if plan.renorm:
        weights = weights / weights.sum()
    return ids, weights * plan.factor


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"renorm": True, "experts": 37},
        {"scoring": Scoring.AFTER, "bias": True},
        {"scoring": Scoring.SIGMOID, "choice_bias": True, "renorm": True, "factor": 2.5},
        {"scoring": Scoring.SIGMOID, "choice_bias": True, "groups": 8, "keep_groups": 3},
    ],
)
def test_router(changes: dict[str, Any]) -> None:
    plan = router_plan(**changes)
    weights = Weights(plan)
    router = TokenRouter(plan, Scratch(1 << 16))
    router.place(**weights.places)
    for seed in range(20):
        x = np.random.default_rng(seed).standard_normal(plan.hidden).astype(np.float32)
        ids, got, normed = router(x)
        expected_ids, expected = routed(plan, weights.exact, x)
        assert ids.tolist() == expected_ids.tolist()
        assert np.allclose(got, expected, rtol=1e-5)
        assert np.allclose(normed, norm(x.astype(np.float64), weights.exact["norm"]), rtol=1e-5)


def test_of_equal_experts_the_first_and_nan_shows() -> None:
    plan = router_plan()
    weights = Weights(plan)
    weights.keep["gate"][:] = 0
    router = TokenRouter(plan, Scratch(1 << 16))
    router.place(**weights.places)
    ids, got, _ = router(np.ones(plan.hidden, np.float32))
    assert ids.tolist() == [0, 1, 2, 3, 4]
    assert np.allclose(got, 1 / 40)
    ids, got, _ = router(np.full(plan.hidden, np.nan, np.float32))
    assert np.isnan(got).all()
    assert len(set(ids.tolist())) == 5
    assert all(0 <= i < 40 for i in ids)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"experts": 48},
        {"scoring": Scoring.AFTER},
        {"scoring": Scoring.SIGMOID},
        {"scoring": Scoring.SIGMOID, "choice_bias": True, "groups": 8, "keep_groups": 3},
    ],
)
def test_whatever_the_scores_are_as_many_experts_that_exist(
    changes: dict[str, Any], sign: float
) -> None:
    """A NaN with a sign is in the order of its bits below the padding behind the scores."""
    plan = router_plan(bias=True, **changes)
    weights = Weights(plan)
    router = TokenRouter(plan, Scratch(1 << 16))
    router.place(**weights.places)
    nothing = np.copysign(np.full(plan.hidden, np.nan, np.float32), sign)
    ids, got, _ = router(nothing)
    assert np.isnan(got).all()
    assert len(set(ids.tolist())) == 5
    assert all(0 <= i < plan.gate.rows for i in ids)
    weights.keep["gate_bias"][17] = np.copysign(np.nan, sign)
    ids, got, _ = router(np.ones(plan.hidden, np.float32))
    assert np.isnan(got).any()
    assert len(set(ids.tolist())) == 5
    assert all(0 <= i < plan.gate.rows for i in ids)


def test_cache() -> None:
    cache = KvCache(2, 2, 16, 8, KvType.BF16)
    x = np.random.default_rng(0).standard_normal((2, 5, 16)).astype(np.float32)
    cache.fill(0, x, -x)
    cache.fill(1, x, -x)
    assert np.array_equal(from_bf16(cache.values(0)), -from_bf16(cache.keys(1)))
    assert np.abs(from_bf16(cache.keys(0)) - x).max() <= np.abs(x).max() / 256
    cache.append(0, x[:, :3], x[:, :3])
    assert (cache.length(0), cache.length(1)) == (8, 5)
    with pytest.raises(OffloadError, match="8 of 8 tokens, 1 more"):
        cache.make_room(0)
    with pytest.raises(OffloadError, match="5 of 8 tokens, 5 more"):
        cache.append(1, x, x)
    cache.crop(-2)
    assert (cache.length(0), cache.length(1)) == (3, 3)
    with pytest.raises(OffloadError, match="crop 3"):
        cache.crop(4)
    with pytest.raises(OffloadError, match=r"float32 \[2, tokens, 16\]"):
        cache.fill(0, x[:1], x[:1])


def test_bf16_rounds_as_torch() -> None:
    import torch

    bits = np.random.default_rng(0).integers(0, 2**32, 4096, np.uint32)
    x = bits.view(np.float32)
    expected = torch.from_numpy(x).to(torch.bfloat16).float().numpy()
    assert np.array_equal(from_bf16(to_bf16(x)), expected, equal_nan=True)


def test_errors_say_what_is_wrong() -> None:
    plan = attention_plan()
    weights = Weights(plan)
    cache = filled(plan, 4, 5, KvType.F32)
    half, x = build(plan, weights, cache), np.ones(256, np.float32)
    half(x)
    before = x.copy()
    with pytest.raises(OffloadError, match="5 of 5 tokens"):
        half(x)
    assert np.array_equal(x, before)
    with pytest.raises(OffloadError, match="no slot 'sinks'"):
        half.place(sinks=1)
    with pytest.raises(OffloadError, match="bytes of scratch"):
        DenseMlp(mlp_plan(), Scratch(64))
    with pytest.raises(OffloadError, match="no address for down, gate, norm, up"):
        DenseMlp(mlp_plan(), Scratch(1 << 20))(x)
    with pytest.raises(OffloadError, match="share"):
        attention_plan(heads=5)
    with pytest.raises(OffloadError, match="multiple of 16, not 40"):
        attention_plan(dim=40)
    assert mlp_plan().glu is Glu.SILU
