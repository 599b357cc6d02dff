"""Dequantised slabs: exact values, products against float64, scratch, threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from kernel_support import EVERY, EVERY_ON_EACH, ISAS, restore_threads
from random_rows import random_rows

from offload.cpu_ops import prefill, threads
from offload.cpu_ops.codecs import decode_rows
from offload.cpu_ops.formats import FORMATS
from offload.cpu_ops.kernels import gemm, workspace
from offload.cpu_ops.packing import dequantize, pack_rows
from offload.errors import OffloadError

__all__ = ["restore_threads"]


def dequantized(name: str, rows: int, columns: int, kind: str, isa: str) -> torch.Tensor:
    fmt = FORMATS[name]
    packed = pack_rows(fmt, random_rows(fmt, rows, columns, seed=rows), columns)
    tiles = -(-rows // 16)
    stride = prefill.row_stride(kind, columns)
    memory = np.full(16 * tiles * stride + 64, 0xA5, np.uint8)
    address = (memory.ctypes.data + 63) & ~63
    prefill.dequantize_tiles(fmt, packed.ctypes.data, columns, tiles, address, kind, isa=isa)
    return prefill.tensor_at(address, kind, rows, columns, stride).clone()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("isa", "name"), EVERY_ON_EACH)
def test_values_are_the_references(name: str, isa: str) -> None:
    fmt = FORMATS[name]
    rows, columns = 37, 3 * max(fmt.block, 32)
    exact = torch.from_numpy(decode_rows(fmt, random_rows(fmt, rows, columns, seed=rows)))
    assert torch.equal(dequantized(name, rows, columns, "f32", isa), exact)
    assert torch.equal(dequantized(name, rows, columns, "bf16", isa), exact.bfloat16())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "columns"), [("f32", 45), ("f32", 1), ("bf16", 70), ("f16", 30)])
@pytest.mark.parametrize("isa", ISAS)
def test_rows_of_float_weights_end_anywhere(name: str, columns: int, isa: str) -> None:
    fmt = FORMATS[name]
    exact = torch.from_numpy(decode_rows(fmt, random_rows(fmt, 20, columns, 20)))
    assert torch.equal(dequantized(name, 20, columns, "f32", isa), exact)
    assert torch.equal(dequantized(name, 20, columns, "bf16", isa), exact.bfloat16())


@pytest.mark.parametrize("isa", ISAS)
def test_rounding_of_extremes(isa: str) -> None:
    """Ties, the largest values, infinities and NaN as torch has them; subnormals are 0."""
    bits = np.array(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FFFFFFF,
         0xFFFFFFFF, 0x7F800001, 0x80000000, 0x00800000, 0x007FFFFF, 0x80000001, 0x00000001],
        np.uint32,
    )  # fmt: skip
    weights = np.zeros((16, 32), np.float32)
    weights[0, : len(bits)] = bits.view(np.float32)
    packed = pack_rows(FORMATS["f32"], weights.view(np.uint8), 32)
    memory = np.zeros(16 * prefill.row_stride("bf16", 32), np.uint8)
    prefill.dequantize_tiles(
        FORMATS["f32"], packed.ctypes.data, 32, 1, memory.ctypes.data, "bf16", isa=isa
    )
    found = memory.view(np.uint16)[: len(bits)]
    wanted = torch.from_numpy(weights[0, : len(bits)]).bfloat16()
    wanted = torch.where(wanted.abs() < 2.0**-126, wanted * 0, wanted)
    wanted[-3] = 0.0  # the largest subnormal rounds to 2^-126, but counts as 0
    nan = wanted.isnan().numpy()
    assert ((found[nan] & 0x7FFF) > 0x7F80).all()
    assert np.array_equal(found[~nan], wanted.view(torch.int16).numpy().view(np.uint16)[~nan])


def problem(name: str, rows: int, columns: int, tokens: int) -> tuple[np.ndarray, ...]:
    fmt = FORMATS[name]
    gguf = random_rows(fmt, rows, columns, seed=3)
    x = np.random.default_rng(4).standard_normal((tokens, columns)).astype(np.float32)
    exact = x.astype(np.float64) @ decode_rows(fmt, gguf).astype(np.float64).T
    return pack_rows(fmt, gguf, columns), x, exact


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("kind", ["bf16", "f32"])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (83, 5), (200, 40)])
def test_products(
    name: str, kind: str, rows: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "SLAB_BYTES", 1 << 16)
    monkeypatch.setattr(prefill, "slab_kind", lambda fmt: kind)
    packed, x, exact = problem(name, rows, 512, tokens)
    out = np.full((tokens, rows), np.nan, np.float32)
    assert prefill.matmul(FORMATS[name], packed, rows, 512, x, out) is out
    # bfloat16: weights, activations and the result are each off by up to 2^-9 of themselves.
    bound = 0.004 if kind == "bf16" else 2e-6
    # A product of two random vectors is about as large as one of them, but may cancel to nothing.
    weights = dequantize(FORMATS[name], packed, rows, 512)
    size = max(np.linalg.norm(exact), np.sqrt(tokens) * np.linalg.norm(weights))
    # One product alone may be three times as far off as many are together.
    assert np.linalg.norm(out - exact) <= bound * size * (3 if rows == 1 else 1)


@pytest.mark.parametrize("name", ["q4_0", "bf16"])
@pytest.mark.usefixtures("restore_threads")
def test_threads_do_not_show(name: str) -> None:
    before = torch.get_num_threads()
    packed, x, _ = problem(name, 300, 1024, 48)
    outs = []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            threads.setup(n)
            out = np.full((48, 300), np.nan, np.float32)
            prefill.matmul(FORMATS[name], packed, 300, 1024, x, out)
            outs.append(out)
    finally:
        torch.set_num_threads(before)
    assert all(np.array_equal(outs[0], out) for out in outs[1:])


@pytest.mark.parametrize(("name", "rows", "columns"), [("q4_0", 300, 1024), ("f32", 70, 45)])
def test_scratch_is_what_was_promised(name: str, rows: int, columns: int) -> None:
    fmt = FORMATS[name]
    packed, x, _ = problem(name, rows, columns, 9)
    held: list[int] = []

    def alone() -> None:  # workspaces belong to threads: this one has an empty one
        prefill.matmul(fmt, packed, rows, columns, x, np.empty((9, rows), np.float32))
        held.append(workspace.nbytes)

    thread = threading.Thread(target=alone)
    thread.start()
    thread.join()
    assert held == [prefill.scratch_bytes(fmt, rows, columns, 9)]


def test_slabs_are_whole_tiles_and_bounded() -> None:
    for rows, columns in ((1, 32), (4096, 4096), (17, 1 << 20), (151936, 2048)):
        step = prefill.slab_rows("bf16", rows, columns)
        assert step % 16 == 0
        size = prefill.slab_bytes("bf16", rows, columns)
        assert step == 16 or size <= prefill.SLAB_BYTES


def test_linear_takes_the_path_of_the_crossover(monkeypatch: pytest.MonkeyPatch) -> None:
    fmt = FORMATS["bf16"]
    packed, x, _ = problem("bf16", 64, 128, 6)
    by_kernel, by_slab = (np.empty((6, 64), np.float32) for _ in range(2))
    gemm(fmt, packed, 64, 128, x, by_kernel)
    prefill.matmul(fmt, packed, 64, 128, x, by_slab)
    assert not np.array_equal(by_kernel, by_slab)
    for least, wanted in ((None, by_kernel), (7, by_kernel), (6, by_slab)):
        monkeypatch.setattr(prefill, "crossover", lambda fmt, isa=None, n=least: n)
        out = np.empty((6, 64), np.float32)
        prefill.linear(fmt, packed, 64, 128, x, out)
        assert np.array_equal(out, wanted)


def test_crossovers_are_positive_or_never() -> None:
    for fmt in FORMATS.values():
        for isa in ISAS:
            least = prefill.crossover(fmt, isa)
            assert least is None or least > 1


def test_nothing_to_do_and_what_does_not_fit() -> None:
    fmt = FORMATS["q4_0"]
    packed, x, _ = problem("q4_0", 20, 64, 2)
    prefill.matmul(fmt, packed, 20, 64, x[:0], np.empty((0, 20), np.float32))
    with pytest.raises(OffloadError, match=r"contiguous uint8 \[1152\]"):
        prefill.matmul(fmt, packed[1:], 20, 64, x, np.empty((2, 20), np.float32))
    with pytest.raises(OffloadError, match=r"out must be contiguous float32 \[2, 20\]"):
        prefill.matmul(fmt, packed, 20, 64, x, np.empty((2, 21), np.float32))
