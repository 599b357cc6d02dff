"""Gradients by rows of tables and by slices of a head: the bits of the dense ones."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engine_support import batch, engine_of, group_at, oracle_of
from families import write
from torch import nn

from offload.cpu_ops import grad_norm
from offload.io.engines import make_engine
from offload.io.files import DirectFile
from offload.runtime.memory import HostMemory
from offload.train.grad_spill import spill_offsets
from offload.train.grads import Gradients
from offload.train.layout import TrainLayout, lay_out
from offload.train.row_grads import RowGradient, lookup_tables, rows_of, taking_rows
from offload.train.weights import Shared, as_numbers

WIDTH = 72
"""Rows neither begin nor end with chunks of 4096 elements, nor with tiles."""
ROWS = 700
TILE = 3 * 4096


def looked_up(dtype: torch.dtype, padding: int | None = None, seed: int = 0) -> Any:
    """(dense gradient, the same by rows) of a table after a lookup with many repeated ids."""
    generator = torch.Generator().manual_seed(seed)
    table = nn.Embedding(ROWS, WIDTH, padding_idx=padding, dtype=dtype)
    ids = torch.randint(0, ROWS, (2, 40), generator=generator)
    ids[0, :20] = ids[1, :20] % 7
    upstream = torch.randn((2, 40, WIDTH), generator=generator).to(dtype)
    table(ids).backward(upstream)
    got: list[RowGradient] = []
    with taking_rows({id(table.weight): got.append}):
        out = table(ids)
    dense, table.weight.grad = table.weight.grad, None
    out.backward(upstream)
    assert table.weight.grad is None
    assert len(got) == 1
    return dense.reshape(-1), got[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("padding", [None, 3, -695])
def test_rows_are_the_dense_gradient(dtype: torch.dtype, padding: int | None) -> None:
    dense, rows = looked_up(dtype, padding)
    assert torch.equal(rows.dense(dense.numel()), dense)
    assert rows.nbytes < dense.nbytes / 4
    sums = np.empty(grad_norm.chunks(dense.numel()), np.float64)
    grad_norm.squares(as_numbers(dense), sums)
    assert np.array_equal(rows.squares(dense.numel()), sums)
    whole = np.zeros_like(as_numbers(dense))
    for low in range(0, len(whole), 1000):
        for at, part in rows.parts(low, min(low + 1000, len(whole))):
            whole[at : at + len(part)] = part
    assert np.array_equal(whole, as_numbers(dense))


@pytest.mark.parametrize("total", [torch.bfloat16, torch.float32])
def test_sums_of_rows_are_sums_of_dense_gradients(total: torch.dtype) -> None:
    (a, rows_a), (b, rows_b) = looked_up(torch.bfloat16), looked_up(torch.bfloat16, seed=1)
    wanted = a.to(total).add_(b)
    assert torch.equal(rows_a.to(total).plus(rows_b).dense(len(a)), wanted)
    into = a.to(total)
    rows_b.add_to(into)
    assert torch.equal(into, wanted)


def test_what_asks_for_more_than_a_sum_is_left_to_torch() -> None:
    table = nn.Embedding(10, 4, scale_grad_by_freq=True)
    with taking_rows({id(table.weight): lambda _: pytest.fail("by rows")}):
        table(torch.tensor([1, 1])).sum().backward()
        F.embedding(torch.tensor([1]), table.weight.detach())  # nobody's gradient
    assert table.weight.grad is not None


class Head(nn.Module):
    """A table that is only looked up, and a head with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, dtype=torch.bfloat16, device="meta")
        self.head = nn.Linear(WIDTH, 2048, dtype=torch.bfloat16, device="meta")


@pytest.fixture
def sums(tmp_path: Path) -> Iterator[Any]:
    """Two ``Gradients`` of one layout: all in RAM, all spilled."""
    layout = lay_out(Head(), tile=TILE)
    engine = make_engine(queue_depth=2)
    every = [b.index for b in layout.trained]
    size = spill_offsets(layout, every, None)[-1]
    path = tmp_path / "gradients"
    path.touch()
    os.truncate(path, size)
    made = [
        Gradients(layout, Shared(), engine, dtype=None, spill=spill, file=file)
        for spill, file in (([], None), (every, DirectFile.open(path, writable=True)))
    ]
    yield layout, made
    for gradients in made:
        for b in every:
            gradients.settle(b)
        gradients.close()
    engine.close()


def place(layout: TrainLayout, name: str) -> tuple[int, int]:
    return next(
        (b.index, i) for b in layout.blocks for i, p in enumerate(b.pieces) if p.param == name
    )


def tiles_of(layout: TrainLayout, gradients: Gradients, block: int) -> dict[Any, Any]:
    """What updates get of a block: by piece and tile."""
    out = {}
    spec = layout.blocks[block]
    gradients.hand_over(block)
    for tile in spec.tiles:
        nbytes = gradients.tile_bytes(spec, layout.tiles[tile].count)
        buffer = None
        if nbytes:
            memory = HostMemory(nbytes, "a tile")
            buffer = memory.tensor().numpy()
            gradients.settle(block)
            read = gradients.read_tile(spec, tile, memory.view())
            if read is not None:
                read.result()
        for i, _, start, count, gradient in gradients.of_tile(spec, tile, buffer):
            assert gradient is not None
            out[i, tile] = start, gradient[:count].copy()
    return out


@pytest.mark.parametrize("step", [256, 512, 2048])
@pytest.mark.parametrize("again", [False, True])
def test_a_head_in_slices(sums: Any, step: int, again: bool) -> None:
    layout, made = sums
    block, weight = place(layout, "head.weight")
    _, bias = place(layout, "head.bias")
    generator = torch.Generator().manual_seed(step)
    slopes = torch.randn((2048, WIDTH), generator=generator).bfloat16()
    more = torch.randn((2048, WIDTH), generator=generator).bfloat16()
    ends = torch.randn(2048, generator=generator).bfloat16()
    norms, given = [], []
    for gradients in made:
        for first in reversed(range(0, 2048, step)):
            rows = slice(first, first + step)
            gradients.add_slice(block, weight, slopes[rows], rows)
            gradients.add(block, bias, ends[rows], rows)
        if again:  # nobody is told that these were not the last
            gradients.add(block, weight, more)
        gradients.seal(block)
        value = gradients.value(block, weight)
        assert value is not None
        assert torch.equal(value.view(2048, WIDTH), slopes + more if again else slopes)
        norms.append(gradients.norm())
        given.append(tiles_of(layout, gradients, block))
    assert norms[0] == norms[1]
    assert given[0].keys() == given[1].keys()
    for key, (start, values) in given[0].items():
        assert start == given[1][key][0]
        assert np.array_equal(values, given[1][key][1]), key
    assert made[1].file.read_bytes
    assert not made[0].file.written_bytes


def test_a_table_by_rows_in_ram_and_spilled(sums: Any) -> None:
    layout, made = sums
    block, piece = place(layout, "table.weight")
    _, rows = looked_up(torch.bfloat16)
    _, more = looked_up(torch.bfloat16, seed=1)
    dense = rows.dense(ROWS * WIDTH)
    for gradients in made:
        gradients.add_rows(block, piece, rows)
        gradients.park(block)
        gradients.add_rows(block, piece, more)
        gradients.multiply(block, piece, 0.5)
        gradients.add_rows(block, piece, rows)
        gradients.seal(block)
    wanted = (dense + more.dense(len(dense))) * 0.5 + dense
    given = []
    for gradients in made:
        value = gradients.value(block, piece)
        assert value is not None
        assert torch.equal(value, wanted)
        given.append(tiles_of(layout, gradients, block))
    assert made[0].norm() == made[1].norm()
    for key, (_, values) in given[0].items():
        assert np.array_equal(values, given[1][key][1]), key
    whole = np.concatenate([values for _, values in given[0].values()])
    assert np.array_equal(whole, as_numbers(wanted))
    # The array that rows are spread out in is clean again.
    assert all(not zeros.any() for zeros in made[0]._zeros.values())


def test_rows_of_random_lookups() -> None:
    """torch adds a row's tokens in their order, in whatever table."""
    chance = random.Random(0)
    for _ in range(20):
        vocabulary, width, tokens = (chance.randint(1, n) for n in (3000, 70, 90))
        ids = torch.tensor([chance.randrange(vocabulary) for _ in range(tokens)])
        gradient = torch.randn(tokens, width).bfloat16()
        dense = torch.ops.aten.embedding_dense_backward(gradient, ids, vocabulary, -1, False)
        rows = rows_of(gradient, ids, None)
        assert torch.equal(rows.dense(vocabulary * width), dense.reshape(-1))


@pytest.mark.parametrize("place", ["disk", "half"])
@pytest.mark.parametrize("tied", [False, True])
def test_an_engine_with_and_without_rows(tmp_path: Path, place: str, tied: bool) -> None:
    """The engine's other tests all have rows on."""
    write("llama", tmp_path / "model", torch.bfloat16, tie_word_embeddings=tied)
    norms = []
    for tables in (lookup_tables, lambda _: ()):
        with engine_of(
            tmp_path / "model", place, row_tables=frozenset(tables(lay_out_of(tmp_path / "model")))
        ) as (engine, _):
            oracle = oracle_of(tmp_path / "model", engine.layout)
            for step in range(2):
                for model in (engine.model, oracle.model):
                    engine.begin_forward()
                    ids = batch(step, 0)
                    model(input_ids=ids, labels=ids).loss.backward()
                engine.end_backward()
                norm = engine.step(group_at(step), 0.5).norm
                assert norm == oracle.step(group_at(step), 0.5)
                norms.append(norm)
    assert norms[:2] == norms[2:]


def lay_out_of(directory: Path) -> TrainLayout:
    from offload.models.meta import build

    return lay_out(build(directory, None).model)
