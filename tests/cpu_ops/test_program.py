"""Several kernels in one region: the bits of the same kernels one by one."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_support import restore_threads
from test_decode import Weights, attention_plan, filled, mlp_plan, rope_for, router_plan
from test_experts import Bundles

from offload.cpu_ops import threads
from offload.cpu_ops.decode import AttentionHalf, DenseMlp, Scratch, TokenRouter
from offload.cpu_ops.experts import TokenExperts, expert_layout
from offload.cpu_ops.formats import FORMATS
from offload.cpu_ops.kv_cache import KvType, aligned
from offload.cpu_ops.layer_plan import LayerPlan
from offload.cpu_ops.program import Program, add_step, pick_step
from offload.errors import OffloadError

__all__ = ["restore_threads"]

Array = npt.NDArray[Any]
HIDDEN = 256


class Layers:
    """Attention, routed experts, a shared one, then a dense layer; twice the same kinds."""

    def __init__(self, name: str) -> None:
        plan, mlp = attention_plan(name), mlp_plan(name)
        router, shared = router_plan(hidden=HIDDEN), mlp_plan(name, norm=None)
        fmt = FORMATS[name]
        layout = expert_layout(fmt, fmt, HIDDEN, 96)
        self.bundles = Bundles(layout, router.gate.rows, 0.05)
        self.cache = filled(plan, 270, 300, KvType.F32)
        whole = LayerPlan(attention=plan, router=router, shared=shared)
        scratch = Scratch.of([whole, LayerPlan(attention=plan, mlp=mlp)], 300)
        rope = rope_for(plan)
        self.keep: list[Any] = []
        self.parts: list[Any] = []
        for part, its in (
            (AttentionHalf(plan, rope, self.cache, 0, scratch), plan),
            (TokenRouter(router, scratch), router),
            (DenseMlp(shared, scratch), shared),
            (DenseMlp(mlp, scratch), mlp),
        ):
            weights = Weights(its, seed=len(self.parts))
            self.keep.append(weights)
            part.place(**weights.places)
            self.parts.append(part)
        self.experts = TokenExperts(layout, router.top_k)
        self.x, self.out = aligned((HIDDEN,), np.float32), aligned((HIDDEN,), np.float32)

    def alone(self, x: Array) -> Array:
        """One after the other, with Python between; on the cache as it is."""
        attention, router, shared, dense = self.parts
        x = x.copy()
        attention(x)
        ids, weights, normed = router(x)
        order = np.argsort(ids)
        out = np.empty_like(x)
        self.experts(self.bundles.bases[ids[order]], normed, weights[order], out)
        shared(normed, out)
        x += out
        return np.asarray(dense(x))

    def program(self) -> Program:
        attention, router, shared, dense = self.parts
        k = len(router.ids)
        bases, weights = np.zeros(k, np.int64), np.zeros(k, np.float32)
        call = TokenExperts(self.experts.layout, k, share=self.experts)
        return Program(
            [
                *attention.steps(self.x),
                router.step(self.x),
                pick_step(router.ids, router.weights, self.bundles.bases, bases, weights),
                call.step(bases, router.normed, weights, self.out),
                shared.step(router.normed, self.out),
                add_step(self.x, self.out),
                dense.step(self.x),
            ]
        )

    def run(self, program: Program, x: Array, *cuts: int) -> Array:
        attention = self.parts[0]
        attention.begin(None)
        self.x[:] = x
        ends = [0, *cuts, len(program.steps)]
        for first, last in itertools.pairwise(ends):
            program.run(first, last)
        attention.finish()
        return self.x.copy()


def tokens(n: int) -> Array:
    return np.random.default_rng(3).standard_normal((n, HIDDEN)).astype(np.float32)


@pytest.mark.parametrize("name", ["q4_0", "f32"])
@pytest.mark.usefixtures("restore_threads")
def test_bits_of_one_by_one_with_any_threads(name: str) -> None:
    """The number of threads changes between tokens of one program, too."""
    threads.setup(2)
    layers = Layers(name)
    expected = [layers.alone(x) for x in tokens(6)]
    layers.cache.truncate(0, 270)
    program = layers.program()
    for x, e, (n, cuts) in zip(
        tokens(6), expected, [(1, ()), (2, ()), (3, (2,)), (2, (1, 1, 6)), (1, (5,)), (3, ())],
        strict=True,
    ):  # fmt: skip
        threads.setup(n)
        assert np.array_equal(layers.run(program, x, *cuts), e)
    assert layers.cache.length(0) == 276


@pytest.mark.usefixtures("restore_threads")
def test_a_part_called_by_itself_leaves_a_program_alone() -> None:
    """Both ways have arguments of their own: the other's vector is gone after its call."""
    threads.setup(2)
    layers = Layers("q4_0")
    program = layers.program()
    by_program = layers.run(program, tokens(2)[0])
    layers.cache.truncate(0, 270)
    assert np.array_equal(layers.alone(tokens(2)[0]), by_program)
    expected = layers.alone(tokens(2)[1])
    layers.cache.truncate(0, 271)
    assert np.array_equal(layers.run(program, tokens(2)[1]), expected)


def test_another_cache_and_weights_elsewhere_reach_steps() -> None:
    layers = Layers("q4_0")
    program, attention = layers.program(), layers.parts[0]
    other = filled(attention_plan("q4_0"), 30, 300, KvType.F32)
    attention.read(other)
    moved = layers.keep[0].keep["q"].copy()
    layers.keep[0].keep["q"][:] = 255
    attention.place(q=moved.ctypes.data)
    got = layers.run(program, tokens(1)[0])
    assert (layers.cache.length(0), other.length(0)) == (270, 31)
    other.truncate(0, 30)
    assert np.array_equal(got, layers.alone(tokens(1)[0]))


def test_a_full_cache_is_found_before_anything_runs() -> None:
    layers = Layers("q4_0")
    layers.cache.append(0, *(np.zeros((2, 30, 64), np.float32) for _ in range(2)))
    program = layers.program()
    with pytest.raises(OffloadError, match="holds 300 of 300 tokens"):
        layers.run(program, tokens(1)[0])


def test_what_has_no_address_makes_no_step() -> None:
    plan = mlp_plan()
    x = np.zeros(HIDDEN, np.float32)
    part = DenseMlp(plan, Scratch(1 << 20))
    part.place(gate=64, down=64)
    with pytest.raises(OffloadError, match="no address for norm, up"):
        part.step(x)
    fmt = FORMATS["q4_0"]
    layout = expert_layout(fmt, fmt, HIDDEN, 96)
    other = TokenExperts(layout, 4)
    with pytest.raises(OffloadError, match="shared by calls of one layout"):
        TokenExperts(layout, 3, share=other)


@given(st.data())
def test_picks_by_ascending_number(data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 40))
    ids = np.array(data.draw(st.permutations(range(experts))), np.int64)
    ids = ids[: data.draw(st.integers(1, experts))].copy()
    weights = np.arange(len(ids), dtype=np.float32)
    table = 1000 - 7 * np.arange(experts, dtype=np.int64)
    bases, in_order = np.zeros(len(ids), np.int64), np.zeros(len(ids), np.float32)
    program = Program([pick_step(ids, weights, table, bases, in_order)])
    for _ in range(2):
        program.run()
        order = np.argsort(ids)
        assert np.array_equal(bases, table[ids[order]])
        assert np.array_equal(in_order, weights[order])
        ids[:] = ids[::-1].copy()


@given(st.integers(1, 200), st.integers(1, 3))
def test_adds_every_column_once(vectors: int, threads_: int) -> None:
    before = threads._threads
    threads.setup(threads_)
    try:
        x, out = aligned((16 * vectors,), np.float32), aligned((16 * vectors,), np.float32)
        x[:], out[:] = np.arange(16 * vectors), 0.5
        Program([add_step(x, out), add_step(x, out)]).run()
    finally:
        threads._threads = before
    assert np.array_equal(x, np.arange(16 * vectors) + 1)
