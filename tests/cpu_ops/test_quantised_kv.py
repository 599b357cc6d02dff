"""Keys and values in 8 and 4 bits under the kernels that decode: the attention of blocks to the
bit, whatever the way tokens came."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from kernel_support import restore_threads
from test_decode import Array, Weights, attention_plan, mlp_plan, rope_for

from offload.cpu_ops import threads
from offload.cpu_ops.block_attention import BlockAttention
from offload.cpu_ops.block_layout import PART
from offload.cpu_ops.decode import Scratch
from offload.cpu_ops.kv_cache import KvCache, KvType
from offload.cpu_ops.kv_quantised import QuantisedKv, make_kv, quantised_bytes, tail_layout
from offload.cpu_ops.layer_bodies import Attention
from offload.cpu_ops.layer_plan import AttentionPlan, LayerPlan, QkNorm
from offload.cpu_ops.prompt import Room
from offload.cpu_ops.quantised_half import QuantisedHalf, half_for
from offload.cpu_ops.quantised_prompt import prompt_for
from offload.errors import OffloadError

__all__ = ["restore_threads"]

KINDS = [KvType.Q8, KvType.Q4]
CAPACITY = 3 * PART
PLANS: dict[str, AttentionPlan] = {
    "grouped": attention_plan(),
    "everything": attention_plan(
        bias=True, qk_norm=QkNorm.HEAD, window=300, softcap=5.0, sinks=True, post_norm=True
    ),
    "one query per key": attention_plan(heads=3, key_heads=3, window=5),
}


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def cached(plan: AttentionPlan, kind: KvType, tokens: int) -> QuantisedKv:
    cache = QuantisedKv(1, plan.key_heads, plan.dim, CAPACITY, kind)
    shape = plan.key_heads, tokens, plan.dim
    cache.append(0, random(*shape, seed=1), random(*shape, seed=2))
    return cache


def build(plan: AttentionPlan, weights: Weights, cache: KvCache) -> Any:
    mlp = mlp_plan(hidden=plan.hidden)
    scratch = Scratch.of([LayerPlan(attention=plan, mlp=mlp)], cache.capacity)
    half = half_for(plan, rope_for(plan), cache, 0, scratch)
    half.place(**weights.places)
    return half


def floats(address: int, count: int) -> Array:
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address)).copy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.usefixtures("restore_threads")
def test_the_attention_of_blocks(name: str, kind: KvType) -> None:
    """Two threads take a head each or parts of it; five never come out even."""
    plan = PLANS[name]
    weights, heads = Weights(plan), plan.heads * plan.dim
    for tokens in (0, 9, PART - 1, PART, 2 * PART + 45):
        outs = []
        for n in (2, 5):
            threads.setup(n)
            cache = cached(plan, kind, tokens)
            half = build(plan, weights, cache)
            assert isinstance(half, QuantisedHalf)
            outs.append(half(random(plan.hidden)))
            q, got = (floats(int(half._a[at]), heads) for at in (Attention.Q_OUT, Attention.MERGED))
            assert cache.length(0) == tokens + 1
        one = BlockAttention(
            q.reshape(1, plan.heads, 1, plan.dim), key_heads=plan.key_heads, dim=plan.dim,
            positions=[tokens], scale=plan.scaling, cap=plan.softcap, window=plan.window,
        )  # fmt: skip
        # A part that the token itself has filled is rounded behind it.
        done = tokens // PART * PART
        if done:
            one.add(cache.layout, [np.array([(*cache.record(0), done)], np.int64)])
        tail = np.array([(*cache.places(0), tokens + 1 - done)], np.int64)
        one.add(tail_layout(plan.key_heads, plan.dim), [tail])
        want = one.result(weights.keep.get("sinks"))
        assert np.array_equal(got, want.reshape(-1))
        assert np.array_equal(*outs)


def assert_same(a: QuantisedKv, b: QuantisedKv) -> None:
    assert a.length(0) == b.length(0)
    assert a.done(0) == b.done(0)
    assert np.array_equal(a.keys(0), b.keys(0))
    assert np.array_equal(a.values(0), b.values(0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PLANS)
def test_a_prompt_is_its_tokens(name: str, kind: KvType) -> None:
    """However it is cut; each sees its own part as it is, and full ones before it rounded."""
    plan = PLANS[name]
    weights, before, total = Weights(plan), 200, 2 * PART + 70
    x_TH = random(total - before, plan.hidden)
    alone = build(plan, weights, cached(plan, kind, before))
    want = np.stack([alone(x.copy()) for x in x_TH])
    for pieces in ([len(x_TH)], [10, 47, 290, 35]):
        half = build(plan, weights, cached(plan, kind, before))
        prompt = prompt_for(half, alone=True)
        room = Room([LayerPlan(attention=plan, mlp=mlp_plan())], 300, CAPACITY, quantised=True)
        got, at = x_TH[: sum(pieces)].copy(), 0
        for n in pieces:
            prompt(got[at : at + n], np.arange(before + at, before + at + n), room)
            at += n
        assert np.array_equal(got, want[:at])
        if at == len(x_TH):
            assert_same(half.cache, alone.cache)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_several_sequences(kind: KvType) -> None:
    plan = PLANS["everything"]
    weights, lengths = Weights(plan), (0, PART - 1, 2 * PART + 3, 5)
    x_TH = random(len(lengths), plan.hidden)
    halves = [build(plan, weights, cached(plan, kind, n)) for n in lengths]
    want = np.stack([half(x.copy()) for half, x in zip(halves, x_TH, strict=True)])
    caches: Sequence[QuantisedKv] = [cached(plan, kind, n) for n in lengths]
    room = Room([LayerPlan(attention=plan, mlp=mlp_plan())], 3, CAPACITY, quantised=True)
    got = x_TH.copy()
    prompt_for(halves[0], alone=True).of_each(got, np.array(lengths), caches, room)
    assert np.array_equal(got, want)
    for half, cache in zip(halves, caches, strict=True):
        assert_same(half.cache, cache)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_measured(kind: KvType) -> None:
    plan = attention_plan(scaling=0.01)
    weights, found = Weights(plan), []
    for tokens in (PART - 1, PART + 10):
        half = build(plan, weights, cached(plan, kind, 0))
        room = Room([LayerPlan(attention=plan, mlp=mlp_plan())], 300, CAPACITY, quantised=True)
        prompt_for(half)(random(tokens, plan.hidden), np.arange(tokens), room)
        found.append(half.cache.error)
    assert found[0] is None  # no part was full
    assert 0 < found[1] < {KvType.Q8: 0.05, KvType.Q4: 0.5}[kind]


def test_what_is_cut_comes_back_as_far_as_it_is_known() -> None:
    plan = PLANS["grouped"]
    tokens = 2 * PART + 10
    exact = random(plan.key_heads, tokens, plan.dim, seed=1)
    for length in (tokens, tokens - 3, 2 * PART, 2 * PART - 1, PART + 9, PART, 20, 0):
        cache = cached(plan, KvType.Q8, tokens)
        rounded = cache.keys(0)
        assert np.array_equal(rounded[:, 2 * PART :], exact[:, 2 * PART :])
        assert not np.array_equal(rounded[:, PART : 2 * PART], exact[:, PART : 2 * PART])
        cache.crop(length)
        assert cache.done(0) == length // PART * PART
        assert np.array_equal(cache.keys(0), rounded[:, :length])
        # In two cuts as in one, wherever the first one ends: the tail may hold another part's.
        for again in (length - 1, length - PART, 20):
            if 0 <= again < length:
                twice = cached(plan, KvType.Q8, tokens)
                twice.crop(length)
                twice.crop(again)
                assert np.array_equal(twice.keys(0), rounded[:, :again]), (length, again)
    # Nothing has been stored since the part was full: what was there is there.
    cache = cached(plan, KvType.Q8, 2 * PART)
    exact, rounded = random(plan.key_heads, 2 * PART, plan.dim, seed=1), cache.keys(0)
    cache.crop(PART + 9)
    assert np.array_equal(cache.keys(0)[:, :PART], rounded[:, :PART])
    assert np.array_equal(cache.keys(0)[:, PART:], exact[:, PART : PART + 9])
    # But of the part before it, and of one that something was about to be stored behind.
    for between in (lambda c: c.crop(PART), lambda c: c.room(0, 1)[0].fill(7.0)):
        cache = cached(plan, KvType.Q8, 2 * PART)
        between(cache)
        cache.crop(PART - 1)
        assert np.array_equal(cache.keys(0), rounded[:, : PART - 1])
    cache = cached(plan, KvType.Q8, 2 * PART)
    cache.room(0, 1)[0].fill(7.0)  # and the pass is interrupted
    cache.crop(PART + 9)
    assert np.array_equal(cache.keys(0), rounded[:, : PART + 9])


def test_bytes_and_refusals() -> None:
    shape = 2, 4, 64, 8 * PART
    plain = make_kv(*shape, KvType.F32).nbytes
    sizes = [make_kv(*shape, kind).nbytes for kind in KINDS]
    tails = plain // 8
    assert 0.25 < (sizes[0] - tails) / plain < 0.27
    assert 0.125 < (sizes[1] - tails) / plain < 0.145
    assert quantised_bytes(1, 4, 64, 100, KvType.Q4) == 2 * 4 * 64 * 4 * 100
    with pytest.raises(OffloadError, match="multiples of 32"):
        QuantisedKv(1, 2, 48, 64, KvType.Q4)
    with pytest.raises(OffloadError, match="plain cache"):
        QuantisedKv(1, 2, 64, 64, KvType.BF16)
    plan = PLANS["grouped"]
    cache, weights = cached(plan, KvType.Q8, CAPACITY), Weights(plan)
    with pytest.raises(OffloadError, match=f"holds {CAPACITY} of {CAPACITY}"):
        build(plan, weights, cache)(random(plan.hidden))


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_is_cut_whose_tail_has_other_tokens(kind: KvType) -> None:
    """Only the part that was full last is still in the tail as it was: one before it, or one whose
    bytes came from elsewhere, is known as rounding left it."""
    plan = PLANS["grouped"]
    cache, other = cached(plan, kind, 2 * PART), cached(plan, kind, 2 * PART)
    shape = plan.key_heads, 2 * PART, plan.dim
    exact = random(*shape, seed=1)
    rounded = cache.part(0, 0)[0], cache.part(0, 1)[0]
    cache.truncate(0, PART)
    cache.truncate(0, PART - 20)
    assert np.array_equal(cache.keys(0), rounded[0][:, : PART - 20])
    heard: list[tuple[Array, Array]] = []
    other.listen(0, lambda keys, values: heard.append((keys.copy(), values.copy())))
    other.fill(0, exact, random(*shape, seed=2))
    other.listen(0, None)
    other.fill(0, exact[:, ::-1], exact)
    whole = QuantisedKv(1, plan.key_heads, plan.dim, CAPACITY, kind)
    whole.append(0, exact[:, ::-1], exact)
    whole.truncate(0, 0)
    whole.append_parts(0, *(np.concatenate(x, axis=1) for x in zip(*heard, strict=True)))
    assert whole.length(0) == whole.done(0) == 2 * PART
    assert np.array_equal(whole.keys(0), np.concatenate(rounded, axis=1))
    whole.truncate(0, 2 * PART - 30)
    assert np.array_equal(whole.keys(0)[:, PART:], rounded[1][:, : PART - 30])
    with pytest.raises(OffloadError, match="follow one that holds 226"):
        whole.append_parts(0, *heard[0])
    with pytest.raises(OffloadError, match="must be uint8"):
        other.append_parts(0, heard[0][0], heard[0][1][..., :-1])
    with pytest.raises(OffloadError, match="do not fit"):
        other.append_parts(0, *(np.concatenate(x, axis=1) for x in zip(*heard, strict=True)))


def test_what_rounding_costs_is_known_of_each_layer() -> None:
    cache = QuantisedKv(2, 2, 32, CAPACITY, KvType.Q8)
    assert cache.error_of(0) is None
    cache.note_error(0, 0.25)
    cache.note_error(0, 0.125)
    assert (cache.error_of(0), cache.error_of(1), cache.error) == (0.25, None, 0.25)
    cache.crop(0)
    assert (cache.error_of(0), cache.error) == (None, 0.25)
