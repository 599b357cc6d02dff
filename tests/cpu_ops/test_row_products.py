"""Single rows in one product: torch's bits for each, whatever the others and the threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from offload.cpu_ops import row_products, threads
from offload.cpu_ops.row_products import find_block, fits, multiply_groups, multiply_rows

SHAPES = [(64, 96), (128, 512), (96, 2560), (32, 4128)]
"""Rows and columns: less than a block, one, several, several and a rest."""


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = threads._threads
    yield
    threads._threads = before


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=draw).to(torch.bfloat16)


def need_kernel() -> None:
    if not fits(matrix(32, 32)):
        pytest.skip("this processor has no bfloat16 products of 512 bits")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_each_row_is_as_it_is_alone(rows: int, columns: int, biased: bool) -> None:
    need_kernel()
    weight, x = matrix(rows, columns), matrix(70, columns, 1)
    bias = matrix(1, rows, 2)[0] if biased else None
    block = find_block(weight, bias)
    if block is None:
        pytest.skip("torch adds single rows' products here in an order that is not known")
    alone = torch.cat([F.linear(one[None], weight, bias) for one in x])
    for count in (1, 2, 8, 9, 64, 70):
        assert torch.equal(multiply_rows(x[:count], weight, block, bias), alone[:count])


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("count", [1, 2])
def test_groups_are_as_each_is_alone(rows: int, columns: int, count: int) -> None:
    """Whichever threads take which panels, of matrices with many rows and with none."""
    need_kernel()
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        weights = [matrix(rows, columns, seed) for seed in range(7)]
        at = [weight.data_ptr() for weight in weights]
        counts = [1, 3, 0, 70, 8, 2, 5]
        x = matrix(sum(counts), columns, 8)
        found = multiply_groups(x, at, counts, rows, 512)
        parts = zip(x.split(counts), weights, strict=True)
        assert torch.equal(found, torch.cat([multiply_rows(some, w, 512) for some, w in parts]))
        found = multiply_groups(x[:1], at, [1] * 7, rows, 512)
        assert torch.equal(found, torch.cat([multiply_rows(x[:1], w, 512) for w in weights]))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_sums_are_right_and_depend_on_nothing_else(rows: int, columns: int) -> None:
    need_kernel()
    weight, x = matrix(rows, columns), matrix(11, columns, 1)
    exact = x.double() @ weight.double().T
    for block in (64, 512, 1024):
        threads.setup(1)
        one = multiply_rows(x, weight, block)
        assert torch.allclose(one.double(), exact, rtol=2**-7, atol=1e-3 * columns**0.5)
        if torch.get_num_threads() > 1:
            threads.setup(torch.get_num_threads())
        assert torch.equal(multiply_rows(x, weight, block), one)
        assert torch.equal(multiply_rows(x[4:5], weight, block), one[4:5])


def test_another_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 columns are nobody's order: one output in thousands differs."""
    need_kernel()
    weight = matrix(128, 4096)
    if find_block(weight) in (None, 64):
        pytest.skip("torch's order here is not known, or is the one that is tried")
    monkeypatch.setattr(row_products, "BLOCKS", (64,))
    assert find_block(weight) is None


@pytest.mark.parametrize(
    "weight",
    [torch.zeros(64, 64), matrix(65, 64), matrix(64, 40), matrix(64, 128)[:, :64], matrix(0, 64)],
)
def test_what_there_is_no_kernel_for(weight: torch.Tensor) -> None:
    assert not fits(weight)
    assert find_block(weight) is None
