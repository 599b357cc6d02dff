"""Experts of several sequences' tokens at once: each token gets the bits it gets alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_one_token import OTHERWISE, Config, Plain, classes, filled, group_of
from torch.nn import functional as F

from offload.batch.row_functions import RowFunctions
from offload.models import one_token
from offload.models.hybrid import width_in
from offload.models.one_token import IN_FORCE, OneToken, Tried

EXPERTS, TOKENS = 4, 9


def by_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """Products as they are of single rows."""
    return torch.cat([F.linear(row[None].clone(), weight, bias) for row in x])


def call(module: Any, dtype: torch.dtype, weighed: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, width_in(group_of(module)), generator=generator).to(dtype)
    index = torch.stack([torch.randperm(EXPERTS, generator=generator)[:3] for _ in range(TOKENS)])
    return hidden, index, torch.rand(TOKENS, 3, generator=generator).to(weighed)


def alone(found: OneToken, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    parts = [tuple(a[i : i + 1].clone() for a in args) for i in range(TOKENS)]
    return torch.cat([found.forward(*part) for part in parts])


class Wide(Config):
    """Experts as wide as two vectors."""

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return 64 if found == 32 else found


@pytest.mark.parametrize("config", [Config, Wide])
def test_every_familys_experts(config: type[Config]) -> None:
    joined = pointwise = 0
    for kind in classes():
        module: Any = filled(kind(config()), torch.bfloat16)
        found = Tried()(group_of(module))
        if found is None:
            assert kind.__name__ in OTHERWISE
            continue
        if module.is_transposed:
            continue  # computed by the loop, see below
        joined += 1
        pointwise += found.pointwise

        def loop(*args: Any) -> None:
            raise AssertionError("the loop was asked")

        found._inner = loop
        for weighed in (torch.bfloat16, torch.float32):
            args = call(module, torch.bfloat16, weighed)
            with torch.no_grad():
                want = alone(found, args)
                with RowFunctions(by_rows):
                    got = found.forward(*args)
            assert got.dtype == want.dtype
            assert torch.equal(got, want), kind
    assert joined >= 40
    assert 30 <= pointwise < joined


def test_the_loop_is_asked_for_what_is_not_known() -> None:
    module: Any = filled(Plain(), torch.bfloat16)
    found = Tried()(group_of(module))
    assert found is not None
    asked: list[Any] = []
    found._inner = lambda *args, **_: asked.append(args)
    hidden, index, weights = call(module, torch.bfloat16, torch.bfloat16)
    with torch.no_grad():
        found.forward(hidden, index, weights)  # nobody says that these are several sequences'
        with RowFunctions(lambda *_: None):
            found.forward(hidden, index, weights)
        twice = index.clone()
        twice[4, 1] = twice[4, 0]
        with RowFunctions(by_rows):
            found.forward(hidden, twice, weights)
        with RowFunctions(by_rows):
            found.forward(hidden_states=hidden)  # called otherwise than transformers does
        found._transposed = True
        with RowFunctions(by_rows):
            found.forward(hidden, index, weights)
    assert len(asked) == 5


def test_a_gate_with_weights_of_its_own_is_watched() -> None:
    """They are on meta when classes are tried, and of another width than what they are tried on."""
    module: Any = filled(Plain(), torch.bfloat16)
    group = group_of(module)
    assert one_token._is_pointwise(group)
    scale = torch.ones(32, device="meta", dtype=torch.bfloat16)
    module._apply_gate = lambda x: x[:, :32] * scale
    assert not one_token._is_pointwise(group)


def test_a_gate_is_looked_at() -> None:
    """Whatever an activation calls is no less unknown than anywhere else in the layer."""
    module: Any = filled(Plain(), torch.bfloat16)
    found = Tried()(group_of(module))
    assert found is not None
    module._apply_gate = lambda x: torch.fft.fft(x.float()).real[:, :32].to(x.dtype)
    with torch.no_grad(), RowFunctions(by_rows), pytest.raises(Exception, match="fft"):
        found.forward(*call(module, torch.bfloat16, torch.bfloat16))
    assert IN_FORCE.rows is None


@pytest.mark.parametrize("function", [F.silu, torch.sigmoid])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("width", [64, 192, 768, 8256, 72, 100])
@pytest.mark.parametrize("apart", [False, True])
def test_rows_of_a_pointwise_function(
    function: Any, dtype: torch.dtype, width: int, apart: bool
) -> None:
    """``apart``: each row is a part of a longer one, as a gate is."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = torch.randn(67, 2 * width, generator=torch.Generator().manual_seed(4)).to(dtype)
        x = x[:, :width] if apart else x[:, :width].contiguous()
        want = torch.cat([function(x[i : i + 1]) for i in range(len(x))])
        with RowFunctions(by_rows):
            assert torch.equal(function(x), want)
    finally:
        torch.set_num_threads(threads)
