"""Which products of single rows are joined, and what their rows are then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.batch.joined import Joins, LinearProduct, SliceProduct
from offload.cpu_ops import row_products


class PackedLinear(nn.Module):
    """As much of one as is joined: by its name, and by its rows."""

    in_features, out_features = 4, 8
    product: Any = None

    def rows(self, x_TK: torch.Tensor) -> torch.Tensor:
        return x_TK.repeat(1, 2)


def layer(weight: torch.Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


@pytest.fixture(autouse=True)
def _known_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of every matrix that lies as the kernel reads it."""
    monkeypatch.setattr(
        row_products, "find_block", lambda weight, *_: 64 if weight.is_contiguous() else None
    )
    with torch.no_grad():
        yield


def test_what_torch_would_not_multiply_as_it_lies_is_not_joined() -> None:
    weight = torch.ones(64, 64, dtype=torch.bfloat16)
    plain, turned = layer(weight), layer(weight.clone().T)
    blocks: dict[tuple[Any, ...], int | None] = {}
    upright, other = LinearProduct("a", plain, blocks), LinearProduct("b", turned, blocks)
    row = torch.ones(1, 64, dtype=torch.bfloat16)
    assert upright.takes(row)
    assert not other.takes(row), "of the same shape, and read along the other side"
    assert not upright.takes(row.float())
    assert not upright.takes(row.repeat(2, 1)), "a prompt"
    with torch.autocast("cpu", torch.bfloat16):
        assert not upright.takes(row)


def test_weights_are_looked_at_again_when_they_are_others() -> None:
    """All sequences ask about the same ones, so the answer is kept as long as those are there."""
    plain = layer(torch.ones(64, 64, dtype=torch.bfloat16))
    product, row = LinearProduct("a", plain, {}), torch.ones(1, 1, 64, dtype=torch.bfloat16)
    assert product.takes(row)
    assert product.takes(row)
    plain.weight = nn.Parameter(plain.weight.clone().T, requires_grad=False)
    assert not product.takes(row)
    plain.weight = nn.Parameter(plain.weight.clone(memory_format=torch.contiguous_format), False)
    assert product.takes(row)
    plain.weight.data = plain.weight.data.clone().T
    assert not product.takes(row)


def test_rows_of_other_shapes_are_joined_as_well() -> None:
    weight = torch.randn(64, 64).bfloat16()
    rows = [torch.randn(*shape, 64).bfloat16() for shape in ((1, 1), (1,), (1, 1, 1), ())]
    product = SliceProduct("head#0", weight, None, {})
    assert all(product.takes(row) for row in rows)
    for some in (rows, rows[:1] * 3, rows[-1:] * 3):
        for found, row in zip(product.multiply(some), some, strict=True):
            want = nn.functional.linear(row, weight)
            assert found.shape == want.shape
            torch.testing.assert_close(found, want)
    assert not product.takes(torch.ones(2, 64, dtype=torch.bfloat16))
    assert product.at_once(16) >= 16
    assert SliceProduct("head#0", torch.ones(100_000, 4), None, {}).at_once(16) == 2


def test_logits_of_all_are_computed_together() -> None:
    wide = layer(torch.ones(100_000, 4))
    assert LinearProduct("up", wide, {}).at_once(16) == 2
    assert LinearProduct("head", wide, {}, is_head=True).at_once(16) == 16


def test_a_layer_takes_its_input_by_name_as_ever() -> None:
    plain = layer(torch.ones(64, 64, dtype=torch.bfloat16))
    row = torch.ones(1, 64, dtype=torch.bfloat16)
    joins = Joins(nn.Sequential(plain), lambda *_: None)
    assert torch.equal(plain(input=row), torch.full((1, 64), 64.0, dtype=torch.bfloat16))
    joins.close()
    assert "forward" not in plain.__dict__


def test_layers_that_stream_by_themselves_are_asked_for(tmp_path: Path) -> None:
    """Their forward is a wrapper around what brings their weights, and that around torch's."""
    torch.manual_seed(0)
    model: Any = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))
    row = torch.ones(1, 64)
    want = model[3](row)
    offload.wrap(model, ram=2**16 + 2**15, disk=tmp_path)
    assert model.offload.plan.streamed_bytes_per_pass > 0
    asked: list[str] = []
    joins = Joins(model, lambda product, _: asked.append(product.name))
    assert torch.equal(model[3](row), want)
    assert asked == ["3"]
    joins.close()
    offload.unwrap(model)


def test_rows_begin_where_tensors_of_their_own_would() -> None:
    rows = [torch.full((1, 1, 4), float(i)) for i in range(5)]
    found = LinearProduct("up", PackedLinear(), {}).multiply(rows)
    for i, one in enumerate(found):
        assert torch.equal(one, torch.full((1, 1, 8), float(i)))
        assert one.data_ptr() % 64 == 0


def test_what_a_card_computes_is_not_joined() -> None:
    """Its weights are where the CPU's kernels cannot read."""
    packed = PackedLinear()
    product, row = LinearProduct("up", packed, {}), torch.ones(1, 1, 4)
    assert product.takes(row)
    packed.product = lambda *_: None
    assert not product.takes(row)
