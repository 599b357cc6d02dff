"""The kernels' arithmetic, run on the CPU from the very source that a card runs."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from cpu_card import CpuCard
from kernel_support import rounded, tolerance
from random_rows import random_rows

from offload.cpu_ops.codecs import decode_rows
from offload.cpu_ops.formats import FORMATS, Activation, Format, get_format
from offload.cpu_ops.packing import pack_rows
from offload.errors import OffloadError
from offload.gpu_ops import arguments
from offload.gpu_ops.linear import MANY, dequantize, linear, scratch_bytes
from offload.gpu_ops.records import Scratch, make_records, records_bytes

ROWS = 37
"""Two tiles and five rows of a third."""

QUANTIZED = [n for n, f in FORMATS.items() if f.activation is not Activation.FLOAT32]


def columns_of(fmt: Format) -> int:
    """No whole number of what a warp takes at once, where that can be."""
    return {1: 39, 2: 70, 32: 11 * 32, 256: 3 * 256}[fmt.block]


def aligned(packed: npt.NDArray[np.uint8]) -> torch.Tensor:
    """Packed weights between two lines of other bytes, 64-aligned."""
    memory = torch.full((len(packed) + 192,), 0xEE, dtype=torch.uint8)
    skip = 64 + -memory.data_ptr() % 64
    memory[skip : skip + len(packed)] = torch.from_numpy(packed)
    return memory[skip : skip + len(packed)]


class Case:
    """Random weights of a format, packed and given to the card, and their values in float64."""

    def __init__(self, card: CpuCard, fmt: Format, rows: int = ROWS, columns: int = 0) -> None:
        self.fmt, self.rows, self.columns = fmt, rows, columns or columns_of(fmt)
        self.gguf = random_rows(fmt, rows, self.columns, seed=rows)
        self.values = decode_rows(fmt, self.gguf)
        self.packed = aligned(pack_rows(fmt, self.gguf, self.columns))
        card.give(self.packed)

    def x(self, card: CpuCard, tokens: int, seed: int = 1) -> torch.Tensor:
        made = (
            torch.randn((tokens, self.columns), generator=torch.Generator().manual_seed(seed))
            * torch.logspace(-3, 3, tokens)[:, None]
        )
        card.give(made)
        return made

    def run(self, card: CpuCard, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        scratch = Scratch(scratch_bytes(self.fmt, self.rows, self.columns, len(x)), card.device)
        card.give(scratch._memory)
        out = torch.full((len(x), self.rows), -1.0)
        return linear(card, scratch, self.fmt, self.packed.data_ptr(), x, out, bias)


def test_structures_are_those_of_the_source(card: CpuCard) -> None:
    for name in ("Records", "QuantizeArgs", "LinearArgs", "ExpertArgs", "DequantizeArgs"):
        assert ctypes.sizeof(getattr(arguments, name)) == card.size_of(name), name


def values_of(fmt: Format, memory: torch.Tensor, tokens: int, columns: int) -> Any:
    """(integers, scales, sums) of records at the start of ``memory``."""
    q, per, each = tokens * columns, fmt.activation.columns, 32 if fmt.block == 32 else 16
    raw = memory.numpy()
    at_scale = -(-q // 64) * 64
    scales = raw[at_scale : at_scale + 4 * q // per].view(np.float32)
    at_sums = at_scale + -(-(4 * q // per) // 64) * 64
    return raw[:q].view(np.int8), scales, raw[at_sums : at_sums + 4 * q // each].view(np.int32)


@pytest.mark.parametrize("name", ["q4_0", "q4_k"])
def test_records_are_those_of_the_cpu(card: CpuCard, name: str) -> None:
    fmt, tokens = get_format(name), 5
    columns = columns_of(fmt)
    x = torch.randn((tokens, columns), generator=torch.Generator().manual_seed(0))
    x[1] *= 1e-38  # subnormal, and scales whose inverse is not finite
    x[2] *= 1e37
    x[3] = 0
    x[4, 7] = float("nan")
    x[4, -1] = float("-inf")
    memory = torch.zeros(records_bytes(fmt, tokens, columns) + 64, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 64 :]
    card.give(x)
    made = make_records(card, fmt, x.data_ptr(), tokens, columns, memory.data_ptr())
    assert made.q == memory.data_ptr()
    q, scales, sums = values_of(fmt, memory, tokens, columns)
    per = fmt.activation.columns
    got = q.reshape(-1, per).astype(np.float64) * scales[:, None].astype(np.float64)
    finite = slice(0, 4 * columns)
    assert np.array_equal(got.reshape(-1)[finite], rounded(fmt, x[:4].numpy()).reshape(-1))
    each = 32 if per == 32 else 16
    assert np.array_equal(sums, q.reshape(-1, each).astype(np.int32).sum(axis=1))
    blocks = scales.reshape(tokens, -1)
    assert np.isnan(blocks[4, 0])
    assert np.isnan(blocks[4, -1])
    assert np.isfinite(blocks[:4]).all()


@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_the_values(card: CpuCard, name: str) -> None:
    """Five tokens: one launch for four, one for one, and the unused ones of that change nothing."""
    case = Case(card, get_format(name))
    x = case.x(card, 5)
    bias = torch.randn(ROWS)
    out = case.run(card, x, bias).numpy()
    exact = rounded(case.fmt, x.numpy())
    want = exact @ case.values.T.astype(np.float64) + bias.numpy()
    bound = tolerance(case.fmt, case.values, exact) + 1e-6 * np.abs(want)
    assert (np.abs(out - want) <= bound).all(), np.abs(out - want).max()


@pytest.mark.parametrize("name", FORMATS)
def test_a_result_depends_on_nothing_else(card: CpuCard, name: str) -> None:
    """Not on the tokens beside it, nor on the order in which blocks and warps run."""
    case = Case(card, get_format(name), rows=20)
    x = case.x(card, 3)
    together = case.run(card, x)
    card.backwards = True
    alone = torch.cat([case.run(card, x[i : i + 1]) for i in range(3)])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("name", ["q4_0", "q4_k"])
def test_a_warp_takes_several_chunks(card: CpuCard, name: str) -> None:
    case = Case(card, get_format(name), rows=16, columns=19 * 256)
    x = case.x(card, 1)
    exact = rounded(case.fmt, x.numpy())
    want = exact @ case.values.T.astype(np.float64)
    assert (
        np.abs(case.run(card, x).numpy() - want) <= tolerance(case.fmt, case.values, exact)
    ).all()


@pytest.mark.parametrize("name", QUANTIZED)
def test_what_is_not_finite_reaches_the_output(card: CpuCard, name: str) -> None:
    case = Case(card, get_format(name), rows=16)
    x = case.x(card, 2)
    x[0, 3] = float("inf")
    out = case.run(card, x)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("name", FORMATS)
def test_dequantised_values_are_exact(card: CpuCard, name: str) -> None:
    """Every row's bits; the rows that fill up a tile are not written."""
    case = Case(card, get_format(name))
    want = torch.from_numpy(case.values)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out = torch.full((ROWS + 3, case.columns), -7.0, dtype=dtype)
        dequantize(card, case.fmt, case.packed.data_ptr(), out[:ROWS])
        assert torch.equal(out[:ROWS], want.to(dtype)), dtype
        assert out[ROWS:].eq(-7.0).all()


def test_every_scale_of_mxfp4(card: CpuCard) -> None:
    """2^-128 and 2^-127 are subnormal in float32."""
    fmt = get_format("mxfp4")
    rows = random_rows(fmt, 16, 16 * 32)
    rows.reshape(256, 17)[:, 0] = np.minimum(np.arange(256), 250)
    packed = aligned(pack_rows(fmt, rows, 16 * 32))
    card.give(packed)
    out = torch.empty((16, 16 * 32))
    dequantize(card, fmt, packed.data_ptr(), out)
    assert np.array_equal(out.numpy(), decode_rows(fmt, rows))


@pytest.mark.parametrize("name", ["f32", "q4_0", "q6_k"])
def test_many_tokens_go_through_slabs(
    card: CpuCard, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(card, get_format(name), rows=100)
    monkeypatch.setattr("offload.gpu_ops.linear.SLAB_BYTES", 48 * 2 * case.columns)
    x, bias = case.x(card, MANY), torch.randn(100)
    out = case.run(card, x, bias)
    assert {k.name for k in card.launched} == {"dequantize"}
    assert len(card.launched) == 3
    want = x.double() @ torch.from_numpy(case.values).double().T + bias
    error = (out - want).norm() / want.norm()
    assert error < (1e-6 if name == "f32" else 6e-3)


def test_arguments_that_do_not_fit(card: CpuCard) -> None:
    case = Case(card, get_format("q4_0"))
    x = case.x(card, 2)
    with pytest.raises(OffloadError, match="x must be contiguous float32"):
        case.run(card, x.double())
    with pytest.raises(OffloadError, match="x must be contiguous"):
        case.run(card, torch.randn(case.columns, 2).T)
    with pytest.raises(OffloadError, match="blocks of 32 elements"):
        case.run(card, torch.randn(2, 40))
    with pytest.raises(OffloadError, match="bytes of scratch on the device"):
        linear(
            card, Scratch(64, card.device), case.fmt, case.packed.data_ptr(), x,
            torch.empty(2, ROWS),
        )  # fmt: skip


def test_the_harness_notices_a_load_from_elsewhere(card: CpuCard) -> None:
    """What the others rely on."""
    case = Case(card, get_format("q4_0"))
    x = torch.randn(1, case.columns)  # not given
    with pytest.raises(AssertionError, match="memory that was not given"):
        case.run(card, x)
