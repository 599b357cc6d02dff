"""The experts of a MoE layer, run on the CPU from the kernels' source, step by step in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from cpu_card import CpuCard
from kernel_support import rounded, tolerance
from random_rows import random_rows

from offload.cpu_ops.codecs import decode_rows
from offload.cpu_ops.experts import ExpertLayout, expert_layout
from offload.cpu_ops.formats import get_format
from offload.cpu_ops.functions import Glu
from offload.cpu_ops.packing import pack_rows
from offload.errors import OffloadError
from offload.gpu_ops import experts as routed
from offload.gpu_ops.linear import MANY
from offload.gpu_ops.records import Scratch
from offload.gpu_ops.source import Kernel

HIDDEN, INNER, EXPERTS, TOP_K = 512, 256, 6, 2

Floats = npt.NDArray[np.float32]


class Layer:
    """Random experts in bundles of their own, and their matrices in float32."""

    def __init__(
        self, card: CpuCard, gate_up: str = "q4_0", down: str = "q4_0", *,
        hidden: int = HIDDEN, inner: int = INNER, biases: bool = False, glu: Glu = Glu.SILU,
    ) -> None:  # fmt: skip
        up, out = get_format(gate_up), get_format(down)
        self.layout = expert_layout(up, out, hidden, inner, biases=biases, glu=glu)
        self.bundles, self.matrices, self.biases = [], [], []
        rng = np.random.default_rng(3)
        for e in range(EXPERTS):
            memory = torch.zeros(self.layout.nbytes + 64, dtype=torch.uint8)
            bundle = memory[-memory.data_ptr() % 64 :][: self.layout.nbytes]
            found = []
            for i, (fmt, rows, columns, at) in enumerate(
                (
                    (up, inner, hidden, self.layout.gate_offset),
                    (up, inner, hidden, self.layout.up_offset),
                    (out, hidden, inner, self.layout.down_offset),
                )
            ):
                gguf = random_rows(fmt, rows, columns, seed=10 * e + i, scale=0.01)
                packed = pack_rows(fmt, gguf, columns)
                bundle[at : at + len(packed)] = torch.from_numpy(packed)
                found.append(decode_rows(fmt, gguf))
            own = [rng.standard_normal(n).astype(np.float32) for n in (inner, inner, hidden)]
            if biases:
                for values, at in zip(
                    own,
                    (
                        self.layout.gate_bias_offset,
                        self.layout.up_bias_offset,
                        self.layout.down_bias_offset,
                    ),
                    strict=True,
                ):
                    raw = torch.from_numpy(values).view(torch.uint8)
                    bundle[at : at + len(raw)] = raw
            else:
                own = [np.zeros_like(values) for values in own]
            card.give(bundle)
            self.bundles.append(bundle)
            self.matrices.append(found)
            self.biases.append(own)

    def bases(self, experts: list[int]) -> list[int]:
        return [self.bundles[e].data_ptr() for e in experts]


class Run:
    """A call's inputs, and its scratch memory to look into."""

    def __init__(self, card: CpuCard, layer: Layer, tokens: int, experts: int = EXPERTS) -> None:
        generator = torch.Generator().manual_seed(tokens)
        self.card, self.layer, self.tokens = card, layer, tokens
        self.x = torch.randn((tokens, layer.layout.hidden), generator=generator)
        scores = torch.rand((tokens, experts), generator=generator)
        weights, index = scores.topk(TOP_K)
        self.weights, self.index = weights, index.numpy()
        size = routed.scratch_bytes(layer.layout, tokens, TOP_K)
        self.scratch = Scratch(size, card.device)
        card.give(self.x, self.weights, self.scratch._memory)

    def __call__(self, experts: list[int] | None = None, into: Any = None) -> torch.Tensor:
        chosen = list(range(EXPERTS)) if experts is None else experts
        out = torch.full_like(self.x, 7.0) if into is None else into
        return routed.expert_ffn(
            self.card, self.scratch, self.layer.layout, chosen, self.layer.bases(chosen), self.x,
            self.index, self.weights, out, add=into is not None,
        )  # fmt: skip

    def inner(self) -> Floats:
        """What gate and up have left in scratch, [slots, I]."""
        layout, slots = self.layer.layout, self.index.size
        _, at, _, _ = self.scratch.places(*routed._few_bytes(layout, self.tokens, slots))
        h = self.scratch.tensor(at, torch.float32, (slots, layout.inner))
        return h.numpy().copy()


def activated(layout: ExpertLayout, g: Any, u: Any) -> Any:
    gate, up = torch.from_numpy(g), torch.from_numpy(u)
    functions: dict[Glu, Callable[[], torch.Tensor]] = {
        Glu.SILU: lambda: torch.nn.functional.silu(gate) * up,
        Glu.GELU: lambda: torch.nn.functional.gelu(gate) * up,
        Glu.GELU_TANH: lambda: torch.nn.functional.gelu(gate, approximate="tanh") * up,
        Glu.CLAMPED: lambda: (
            gate.clamp(max=layout.limit)
            * torch.sigmoid(layout.alpha * gate.clamp(max=layout.limit))
            * (up.clamp(-layout.limit, layout.limit) + 1)
        ),
    }
    return functions[layout.glu]().numpy()


def product(matrix: Floats, x: Any, bias: Floats) -> Any:
    return x @ matrix.T.astype(np.float64) + bias


CASES = [
    ("q4_0", "q4_0", Glu.SILU, False),
    ("q8_0", "q8_0", Glu.GELU, False),
    ("q4_k", "q6_k", Glu.SILU, False),
    ("mxfp4", "mxfp4", Glu.CLAMPED, True),
    ("iq4_nl", "q5_1", Glu.GELU_TANH, False),
    ("bf16", "bf16", Glu.SILU, True),
]


@pytest.mark.parametrize(("gate_up", "down", "glu", "biases"), CASES)
def test_each_step_is_that_of_the_values(
    card: CpuCard, gate_up: str, down: str, glu: Glu, biases: bool
) -> None:
    layer = Layer(card, gate_up, down, glu=glu, biases=biases)
    run = Run(card, layer, tokens=5)
    out, h = run().numpy(), run.inner()
    layout = layer.layout
    x = rounded(layout.gate_up, run.x.numpy())
    want = np.zeros(out.shape)
    bound = np.zeros(out.shape)
    slot = 0
    for e in range(EXPERTS):
        gate, up, last = layer.matrices[e]
        bg, bu, bd = layer.biases[e]
        for t, place in zip(*np.nonzero(run.index == e), strict=True):
            inner = activated(layout, product(gate, x[t], bg), product(up, x[t], bu))
            # What the products' rounding becomes behind the activation: its slope is at most 1.2,
            # times the other factor.
            slack = sum(
                tolerance(layout.gate_up, m.astype(np.float64), x[t : t + 1])[0]
                * 1.2 * (1 + np.abs(product(o, x[t], b)))
                for m, o, b in ((gate, up, bu), (up, gate, bg))
            )  # fmt: skip
            assert (np.abs(h[slot] - inner) <= slack + 1e-5 * np.abs(inner) + 1e-6).all()
            # From here on from what was found there: one more rounding to int8 would be another.
            own = rounded(layout.down, h[slot : slot + 1])
            weight = float(run.weights[t, place])
            want[t] += weight * product(last, own[0], bd)
            bound[t] += weight * tolerance(layout.down, last.astype(np.float64), own)[0] + 1e-5
            slot += 1
    assert slot == run.index.size
    assert (np.abs(out - want) <= bound).all(), np.abs(out - want).max()


def test_one_call_or_several_and_any_order_of_blocks(card: CpuCard) -> None:
    """The executor gives experts as they arrive; the bits are those of one call."""
    run = Run(card, Layer(card), tokens=3)
    once = run()
    card.backwards = True
    parts = run([0, 1])
    parts = run([2], into=parts)
    parts = run([3, 4, 5], into=parts)
    assert torch.equal(once, parts)


def test_a_token_alone_has_the_same_result(card: CpuCard) -> None:
    layer = Layer(card, "q4_k", "q6_k")
    run = Run(card, layer, tokens=6)
    together = run()
    for t in range(6):
        alone = Run(card, layer, tokens=1)
        alone.x.copy_(run.x[t : t + 1])
        alone.weights.copy_(run.weights[t : t + 1])
        alone.index[:] = run.index[t : t + 1]
        assert torch.equal(alone()[0], together[t])


def test_experts_that_nobody_is_routed_to(card: CpuCard) -> None:
    run = Run(card, Layer(card), tokens=2, experts=3)
    assert run([4, 5]).eq(0).all()
    used = len(card.launched)
    before = run([0, 1, 2])
    assert torch.equal(run([4, 5], into=before.clone()), before)
    assert len(card.launched) > used


def test_more_slots_than_a_launch_takes(card: CpuCard, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(card, Layer(card), tokens=5)
    once = run()
    monkeypatch.setattr(routed, "MOST_SLOTS", 5)
    before = len(card.launched)
    assert torch.equal(run(), once)
    assert sum(k == Kernel("merge") for k in card.launched[before:]) > 1


@pytest.mark.parametrize("biases", [False, True])
def test_an_expert_with_many_tokens_goes_through_slabs(card: CpuCard, biases: bool) -> None:
    layer = Layer(card, "q8_0", "q8_0", biases=biases, glu=Glu.CLAMPED)
    run = Run(card, layer, tokens=MANY + 3)
    run.index[:, 0], run.index[:, 1] = 0, 1 + np.arange(MANY + 3) % 5
    out = run().numpy().astype(np.float64)
    assert {k.name for k in card.launched} == {"quantize", "gate_up", "down", "merge", "dequantize"}
    want = np.zeros(out.shape)
    for t, place in np.ndindex(*run.index.shape):
        e = run.index[t, place]
        gate, up, down = layer.matrices[e]
        bg, bu, bd = layer.biases[e]
        x = run.x[t].numpy().astype(np.float64)
        h = activated(layer.layout, product(gate, x, bg), product(up, x, bu))
        want[t] += float(run.weights[t, place]) * product(down, h, bd)
    assert np.linalg.norm(out - want) < 0.015 * np.linalg.norm(want)


def test_arguments_that_do_not_fit(card: CpuCard) -> None:
    run = Run(card, Layer(card), tokens=2)
    with pytest.raises(OffloadError, match="rows of routing for 2 tokens"):
        routed.expert_ffn(
            card, run.scratch, run.layer.layout, [0], [], run.x, run.index, run.weights, run.x
        )
    with pytest.raises(OffloadError, match="weights must be contiguous float32"):
        routed.expert_ffn(
            card, run.scratch, run.layer.layout, [], [], run.x, run.index, run.x, run.x
        )


def test_a_prompt_of_more_tokens_than_a_grid_is_high() -> None:
    """A card takes 65535 blocks along y: a prompt is longer, and each of its tokens has one."""
    tokens, hidden = 70_000, 64

    class Grids:
        device = torch.device("cpu")

        def __init__(self) -> None:
            self.seen: dict[str, tuple[int, int]] = {}

        def launch(self, kernel: Kernel, grid: tuple[int, int], *_: Any) -> None:
            assert grid[0] < 2**31
            assert grid[1] < 2**16
            self.seen[kernel.name] = grid

    fmt = get_format("q4_0")
    layout = expert_layout(fmt, fmt, hidden, 32, biases=False, glu=Glu.SILU)
    index = np.full((tokens, 1), 1)
    index[[0, 7, tokens - 1]] = 0
    grids: Any = Grids()
    scratch = Scratch(routed.scratch_bytes(layout, tokens, 1), grids.device)
    x = torch.zeros((tokens, hidden))
    routed.expert_ffn(
        grids, scratch, layout, [0], [0], x, index, torch.ones((tokens, 1)), torch.empty_like(x)
    )
    assert set(grids.seen) == {"quantize", "gate_up", "down", "merge"}
    assert grids.seen["merge"][0] == tokens
