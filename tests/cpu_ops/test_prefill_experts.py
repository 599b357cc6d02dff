"""Experts of a prompt against float64 and against the decode kernels."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from kernel_support import restore_threads
from test_experts import Bundles, inputs

from offload.cpu_ops import prefill, threads
from offload.cpu_ops.experts import expert_ffn, expert_layout
from offload.cpu_ops.formats import FORMATS
from offload.cpu_ops.functions import Glu
from offload.cpu_ops.kernels import workspace
from offload.cpu_ops.prefill_experts import (
    ExpertSum,
    add_weighted,
    experts_matmul,
    experts_scratch_bytes,
)
from offload.errors import OffloadError

__all__ = ["restore_threads"]


def lists(routing: np.ndarray) -> list[tuple[Any, Any]]:
    """[T, E] weights to each expert's tokens and weights."""
    chosen = [np.flatnonzero(routing[:, e]) for e in range(routing.shape[1])]
    return [(t, np.ascontiguousarray(routing[t, e])) for e, t in enumerate(chosen)]


@pytest.mark.parametrize("kind", list(Glu))
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("name", ["f32", "bf16"])
def test_slabs_are_within_rounding(
    name: str, kind: Glu, biases: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "SLAB_BYTES", 16 * prefill.row_stride("f32", 70))
    fmt = FORMATS[name]
    layout = expert_layout(fmt, fmt, 70, 38, biases=biases, glu=kind)  # 38 = 2 tiles and 6 rows
    bundles = Bundles(layout, 5, 1.0)
    x, routing = inputs(layout, 21, 5)
    routing[:, 3] = 0  # an expert without tokens
    expected = bundles.reference(x, routing)
    out = np.full(x.shape, np.nan, np.float32)
    assert experts_matmul(layout, bundles.bases, x, lists(routing), out, slabs=True) is out
    bound = 1e-5 if prefill.slab_kind(fmt) == "f32" else 0.012
    assert np.linalg.norm(out - expected) <= bound * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("gate_up", "down"),
    [("q4_0", "q4_0"), ("q8_0", "bf16"), pytest.param("q4_k", "q6_k", marks=pytest.mark.slow)],
)
def test_quantised_slabs(gate_up: str, down: str) -> None:
    layout = expert_layout(FORMATS[gate_up], FORMATS[down], 512, 256, biases=True)
    bundles = Bundles(layout, 4, 0.002)
    x, routing = inputs(layout, 33, 4)
    expected = bundles.reference(x, routing)
    out = np.full(x.shape, np.nan, np.float32)
    experts_matmul(layout, bundles.bases, x, lists(routing), out, slabs=True)
    assert np.linalg.norm(out - expected) <= 0.012 * np.linalg.norm(expected)


def test_the_decode_kernels_way_is_theirs_to_the_bit() -> None:
    fmt = FORMATS["q4_0"]
    layout = expert_layout(fmt, fmt, 512, 384, biases=True)
    bundles = Bundles(layout, 6, 0.02)
    x, routing = inputs(layout, 19, 6)
    together, streamed = (np.full(x.shape, np.nan, np.float32) for _ in range(2))
    expert_ffn(layout, bundles.bases, x, routing, together)
    experts_matmul(layout, bundles.bases, x, lists(routing), streamed, slabs=False)
    assert np.array_equal(together, streamed)


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
    for e, (tokens, weights) in enumerate(lists(routing)):
        add_weighted(parts[e], tokens, weights, apart)
    assert np.array_equal(together, apart)
    with pytest.raises(OffloadError, match="weights"):
        add_weighted(parts[0], np.zeros(1, np.int64), np.ones(9, np.float32), apart)


@pytest.mark.parametrize("slabs", [False, True])
@pytest.mark.usefixtures("restore_threads")
def test_threads_do_not_show(slabs: bool) -> None:
    before = torch.get_num_threads()
    fmt = FORMATS["q4_0"]
    layout = expert_layout(fmt, fmt, 512, 384)
    bundles = Bundles(layout, 3, 0.02)
    x, routing = inputs(layout, 40, 3)
    outs = []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            threads.setup(n)
            out = np.full(x.shape, np.nan, np.float32)
            experts_matmul(layout, bundles.bases, x, lists(routing), out, slabs=slabs)
            outs.append(out)
    finally:
        torch.set_num_threads(before)
    assert all(np.array_equal(outs[0], out) for out in outs[1:])


def test_each_expert_takes_the_path_of_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    from offload.cpu_ops import prefill_experts

    monkeypatch.setattr(prefill_experts, "crossover", lambda fmt, isa=None: 10)
    fmt = FORMATS["q4_0"]
    layout = expert_layout(fmt, fmt, 256, 128)
    bundles = Bundles(layout, 1, 0.02)
    x, _ = inputs(layout, 12, 1)
    for n, slabs in ((9, False), (10, True)):
        routing = [(np.arange(n), np.ones(n, np.float32))]
        chosen, forced = (np.empty(x.shape, np.float32) for _ in range(2))
        experts_matmul(layout, bundles.bases, x, routing, chosen)
        experts_matmul(layout, bundles.bases, x, routing, forced, slabs=slabs)
        assert np.array_equal(chosen, forced)
        other = experts_matmul(layout, bundles.bases, x, routing, forced, slabs=not slabs)
        assert not np.array_equal(chosen, other)


@pytest.mark.parametrize("least", [1, None])
def test_scratch_is_bounded(least: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from offload.cpu_ops import prefill_experts

    monkeypatch.setattr(prefill_experts, "crossover", lambda fmt, isa=None: least)
    fmt = FORMATS["q4_0"]
    layout = expert_layout(fmt, fmt, 512, 384)
    bundles = Bundles(layout, 2, 0.02)
    x, routing = inputs(layout, 30, 2)
    most = int((routing != 0).sum(axis=0).max())
    held: list[int] = []

    def alone() -> None:  # workspaces belong to threads: this one has an empty one
        experts_matmul(layout, bundles.bases, x, lists(routing), np.empty(x.shape, np.float32))
        held.append(workspace.nbytes)

    thread = threading.Thread(target=alone)
    thread.start()
    thread.join()
    bound = experts_scratch_bytes(layout, most)
    assert 0.9 * bound <= held[0] <= bound


def test_what_does_not_fit_is_refused() -> None:
    fmt = FORMATS["q4_0"]
    layout = expert_layout(fmt, fmt, 64, 32)
    x, out = np.ones((3, 64), np.float32), np.full((3, 64), np.nan, np.float32)
    moe = ExpertSum(layout, x, out)
    assert (out == 0).all()
    moe.add(0, np.zeros(0, np.int64), np.zeros(0, np.float32))
    with pytest.raises(OffloadError, match=r"tokens 1\.\.3 of an expert, but there are 3"):
        moe.add(0, np.array([1, 3]), np.ones(2, np.float32))
    with pytest.raises(OffloadError, match="tokens must be contiguous int64"):
        moe.add(0, np.array([1, 2], np.int32), np.ones(2, np.float32))
    with pytest.raises(OffloadError, match=r"weights must be contiguous float32 \[2\]"):
        moe.add(0, np.array([1, 2]), np.ones(3, np.float32))
