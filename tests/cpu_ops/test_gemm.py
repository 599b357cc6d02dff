"""Matrix kernels against float64, on every instruction set this machine has."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_support import (
    EVERY,
    ISAS,
    SAMPLE,
    restore_threads,
    rounded,
    sets_in_ci,
    tolerance,
)
from random_rows import random_rows

from offload.cpu_ops import threads
from offload.cpu_ops.codecs import decode_rows
from offload.cpu_ops.formats import FORMATS
from offload.cpu_ops.kernels import gemm, gemv, workspace
from offload.cpu_ops.packing import pack_rows
from offload.errors import OffloadError

__all__ = ["restore_threads"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(("rows", "blocks", "tokens"), [(1, 1, 1), (83, 3, 7), (64, 5, 11)])
def test_products(name: str, rows: int, blocks: int, tokens: int) -> None:
    """Within float32 rounding of the oracle, equal on all instruction sets, and each token's
    result is what it is alone."""
    # Each set compiles for seconds.
    check_products(name, rows, blocks, tokens, sets_in_ci(name))


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in SAMPLE])
def test_products_on_every_set(name: str) -> None:
    check_products(name, 83, 3, 7, ISAS)


def check_products(name: str, rows: int, blocks: int, tokens: int, isas: list[str]) -> None:
    fmt = FORMATS[name]
    columns = blocks * max(fmt.block, 32)
    gguf = random_rows(fmt, rows, columns, seed=rows)
    packed = pack_rows(fmt, gguf, columns)
    x = np.random.default_rng(2).standard_normal((tokens, columns)).astype(np.float32)
    w64, x64 = decode_rows(fmt, gguf).astype(np.float64), rounded(fmt, x)
    outs = []
    for isa in isas:
        out = np.full((tokens, rows), np.nan, np.float32)
        assert gemm(fmt, packed, rows, columns, x, out, isa=isa) is out
        outs.append(out)
        assert (np.abs(out - x64 @ w64.T) <= tolerance(fmt, w64, x64)).all()
        alone = np.full(rows, np.nan, np.float32)
        gemv(fmt, packed, rows, columns, x[-1], alone, isa=isa)
        assert np.array_equal(alone, out[-1])
    assert all(np.array_equal(outs[0], out) for out in outs[1:])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", EVERY)
def test_many_tokens(name: str) -> None:
    check_many_tokens(name)


@pytest.mark.parametrize("name", ["q4_0", "q4_k", "q6_k", "q8_0"])
def test_many_tokens_of_the_formats_that_people_have(name: str) -> None:
    check_many_tokens(name)


def check_many_tokens(name: str) -> None:
    """The bits of four at a time, which are unpacked otherwise; several panels in a row and in a
    column, an odd number of tiles and an end of one."""
    fmt = FORMATS[name]
    rows, columns, tokens = 16 * 6 + 3, 41 * 32 if fmt.block < 256 else 5 * 256, 131
    packed = pack_rows(fmt, random_rows(fmt, rows, columns, seed=3), columns)
    x = np.random.default_rng(4).standard_normal((tokens, columns)).astype(np.float32)
    x[7], x[40, 3], x[41, 5] = 0, np.nan, np.inf
    few = np.full((tokens, rows), 7, np.float32)
    for first in range(0, tokens, 4):
        some = slice(first, first + 4)
        gemm(fmt, packed, rows, columns, x[some], few[some])
    for n in (5, 8, 64, 65, 131):
        out = np.full((n, rows), 7, np.float32)
        gemm(fmt, packed, rows, columns, x[:n], out)
        assert np.array_equal(out, few[:n], equal_nan=True), n
    assert not np.isfinite(few[40:42]).any()
    assert np.isfinite(np.delete(few, [40, 41], axis=0)).all()


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "bf16"])
def test_integer_activations_are_close_to_exact(name: str) -> None:
    """Half a step of each activation's integer, times the weights."""
    fmt = FORMATS[name]
    gguf = random_rows(fmt, 48, 2048)
    x = np.random.default_rng(0).standard_normal(2048).astype(np.float32)
    out = np.empty(48, np.float32)
    gemv(fmt, pack_rows(fmt, gguf, 2048), 48, 2048, x, out)
    w = decode_rows(fmt, gguf).astype(np.float64)
    exact = w @ x.astype(np.float64)
    assert np.linalg.norm(out - exact) <= 0.01 * np.linalg.norm(exact)


@pytest.mark.parametrize("name", ["q4_0", "bf16", "q4_k"])
@pytest.mark.usefixtures("restore_threads")
def test_threads_do_not_show(name: str) -> None:
    fmt = FORMATS[name]
    columns, rows = 4 * max(fmt.block, 32), 16 * 40 + 5
    packed = pack_rows(fmt, random_rows(fmt, rows, columns), columns)
    x = np.random.default_rng(0).standard_normal((2, columns)).astype(np.float32)
    outs = []
    for n in (1, 2, 3, 5):
        assert threads.setup(n) in (1, n)
        out = np.full((2, rows), np.nan, np.float32)
        gemm(fmt, packed, rows, columns, x, out)
        outs.append(out)
    assert all(np.array_equal(outs[0], out) for out in outs[1:])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["q4_0", "q8_0", "q4_k", "bf16"])
def test_extremes(name: str, isa: str) -> None:
    fmt = FORMATS[name]
    columns = 2 * max(fmt.block, 32)
    gguf = random_rows(fmt, 20, columns)
    packed = pack_rows(fmt, gguf, columns)
    w64 = decode_rows(fmt, gguf).astype(np.float64)
    rng = np.random.default_rng(0)
    for scale in (0.0, 1e-38, 1e-30, 1e30):
        x = (rng.standard_normal((1, columns)) * scale).astype(np.float32)
        out = np.full((1, 20), np.nan, np.float32)
        gemm(fmt, packed, 20, columns, x, out, isa=isa)
        x64 = rounded(fmt, x)
        slack = tolerance(fmt, w64, x64) + columns * 2.0**-126  # of subnormal results
        assert (np.abs(out - x64 @ w64.T) <= slack).all()
    for bad in (np.nan, np.inf):
        x = np.ones((2, columns), np.float32)
        x[0, 3] = bad
        out = np.zeros((2, 20), np.float32)
        gemm(fmt, packed, 20, columns, x, out, isa=isa)
        assert not np.isfinite(out[0]).any()
        assert np.isfinite(out[1]).all()


@pytest.mark.parametrize("isa", ISAS)
def test_every_scale_of_float16_and_mxfp4(isa: str) -> None:
    """The kernels' own conversions: each finite float16, and each E8M0 exponent whose values are
    finite, as a scale of a block with one weight of 1 (or 0.5)."""
    halves = np.arange(2**16, dtype=np.uint16)
    halves = halves[(halves & 0x7C00) != 0x7C00]
    fmt = FORMATS["f16"]
    rows = np.stack([halves, halves], axis=1).view(np.uint8)
    x = np.array([1, 0], np.float32)
    out = np.empty(len(halves), np.float32)
    gemv(fmt, pack_rows(fmt, rows, 2), len(halves), 2, x, out, isa=isa)
    assert np.array_equal(out, halves.view(np.float16).astype(np.float32))
    fmt = FORMATS["mxfp4"]
    blocks = np.zeros((249, 17), np.uint8)
    blocks[:, 0] = np.arange(249)
    blocks[:, 1] = 1  # column 0 is 0.5
    one = np.zeros(32, np.float32)
    one[0] = 127.0  # its integer is 127, its scale 1
    out = np.empty(249, np.float32)
    gemv(fmt, pack_rows(fmt, blocks, 32), 249, 32, one, out, isa=isa)
    expected = 127.0 * 2.0 ** (np.arange(249) - 128.0)
    assert np.array_equal(out, expected.astype(np.float32))


def test_nothing_to_do() -> None:
    fmt = FORMATS["q4_0"]
    x, nothing = np.ones((2, 64), np.float32), np.empty(0, np.uint8)
    assert gemm(fmt, nothing, 0, 64, x, np.empty((2, 0), np.float32)).shape == (2, 0)
    packed = pack_rows(fmt, random_rows(fmt, 3, 64), 64)
    assert gemm(fmt, packed, 3, 64, x[:0], np.empty((0, 3), np.float32)).shape == (0, 3)


def test_what_does_not_fit_is_refused() -> None:
    fmt = FORMATS["q4_0"]
    packed = pack_rows(fmt, random_rows(fmt, 3, 64), 64)
    x, out = np.ones(64, np.float32), np.empty(3, np.float32)
    with pytest.raises(OffloadError, match=r"x must be contiguous float32 \[64\], got float64"):
        gemv(fmt, packed, 3, 64, x.astype(np.float64), out)  # type: ignore[arg-type]
    with pytest.raises(OffloadError, match="not contiguous"):
        gemv(fmt, packed, 3, 64, np.ones(128, np.float32)[::2], out)
    with pytest.raises(OffloadError, match=r"out must be contiguous float32 \[3\]"):
        gemv(fmt, packed, 3, 64, x, np.empty(4, np.float32))
    with pytest.raises(OffloadError, match=r"3 x 64 weights in q4_0 are contiguous uint8 \[576\]"):
        gemv(fmt, packed[:-1], 3, 64, x, out)
    out.flags.writeable = False
    with pytest.raises(OffloadError, match="out is read-only"):
        gemv(fmt, packed, 3, 64, x, out)


def test_an_address_is_enough_and_scratch_is_kept() -> None:
    fmt = FORMATS["q4_0"]
    packed = pack_rows(fmt, random_rows(fmt, 32, 64), 64)
    x = np.ones(64, np.float32)
    expected, found = np.empty(32, np.float32), np.empty(32, np.float32)
    gemv(fmt, packed, 32, 64, x, expected)
    held = workspace.nbytes
    gemv(fmt, packed.ctypes.data, 32, 64, x, found)
    assert np.array_equal(found, expected)
    assert workspace.nbytes == held
