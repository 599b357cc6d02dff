"""Packing keeps every bit; values are those of the reference."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_rows import random_rows

from offload.cpu_ops.codecs import MXFP4_VALUES, decode_rows
from offload.cpu_ops.formats import FORMATS, get_format
from offload.cpu_ops.packing import (
    check_scales,
    dequantize,
    pack_rows,
    packed_bytes,
    quantize,
    unpack_rows,
)
from offload.errors import CheckpointError, OffloadError

EVERY = pytest.mark.parametrize("name", list(FORMATS))


@EVERY
@pytest.mark.parametrize("rows", [0, 1, 15, 16, 33])
@pytest.mark.parametrize("blocks", [1, 3])
def test_unpacking_is_the_inverse(name: str, rows: int, blocks: int) -> None:
    fmt = FORMATS[name]
    columns = blocks * fmt.block
    given_rows = np.random.default_rng(1).integers(
        0, 256, (rows, fmt.row_bytes(columns)), dtype=np.uint8
    )
    packed = pack_rows(fmt, given_rows, columns)
    assert packed.shape == (packed_bytes(fmt, rows, columns),)
    assert np.array_equal(unpack_rows(fmt, packed, rows, columns), given_rows)
    into = np.full(len(packed), 255, np.uint8)
    assert pack_rows(fmt, given_rows, columns, into) is into
    assert np.array_equal(into, packed)


@EVERY
def test_chunks_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fmt = FORMATS[name]
    columns = 2 * fmt.block
    rows = random_rows(fmt, 70, columns)
    packed = pack_rows(fmt, rows, columns)
    monkeypatch.setattr("offload.cpu_ops.packing._CHUNK_BYTES", 1)
    monkeypatch.setattr("offload.cpu_ops.codecs._CHUNK_ELEMENTS", 1)
    assert np.array_equal(pack_rows(fmt, rows, columns), packed)
    assert np.array_equal(unpack_rows(fmt, packed, 70, columns), rows)


@EVERY
def test_values_are_those_of_gguf(name: str) -> None:
    """The gguf package, where it is installed and knows the format."""
    if find_spec("gguf") is None:
        pytest.skip("the gguf package is not installed")
    import gguf

    fmt = FORMATS[name]
    columns = 3 * max(fmt.block, 32)
    rows = random_rows(fmt, 21, columns, seed=3)
    found = dequantize(fmt, pack_rows(fmt, rows, columns), 21, columns)
    assert found.dtype == np.float32
    try:
        expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(fmt.ggml_type))
    except (NotImplementedError, ValueError):
        pytest.skip(f"this gguf package does not decode {name}")
    assert np.array_equal(found, expected)


def test_values_of_mxfp4() -> None:
    """From the definition: 2^(e - 127) times E2M1, first 16 columns in the low halves."""
    fmt = FORMATS["mxfp4"]
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 252, (40, fmt.row_bytes(64)), dtype=np.uint8)
    rows[:5, 0] = [0, 1, 2, 3, 251]
    found = decode_rows(fmt, rows)
    e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for r in range(40):
        for block in range(2):
            raw = [int(b) for b in rows[r, 17 * block : 17 * (block + 1)]]
            codes = [b & 15 for b in raw[1:]] + [b >> 4 for b in raw[1:]]
            for k, code in enumerate(codes):
                value = (-1.0 if code & 8 else 1.0) * e2m1[code & 7]
                assert MXFP4_VALUES[code] == 2 * value
                assert found[r, 32 * block + k] == np.float32(value * 2.0 ** (raw[0] - 127))


def test_blocks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(OffloadError, match="blocks of 256 elements; 288 columns"):
        FORMATS["q4_k"].row_bytes(288)
    with pytest.raises(OffloadError, match="no kernels for weights in 'q2_k'"):
        get_format("q2_k")
    fmt = FORMATS["q4_0"]
    with pytest.raises(OffloadError, match=r"uint8 \[N, 36\]"):
        pack_rows(fmt, np.zeros((4, 35), np.uint8), 64)
    with pytest.raises(OffloadError, match=r"uint8 \[576\]"):
        pack_rows(fmt, np.zeros((4, 36), np.uint8), 64, np.zeros(5, np.uint8))


@pytest.mark.parametrize("name", ["q4_0", "q8_0"])
@given(
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([0.0, 1e-38, 1e-6, 1e-2, 1.0, 1e4]),
)
def test_quantising_is_no_worse_than_the_reference(name: str, seed: int, scale: float) -> None:
    fmt = FORMATS[name]
    x = np.random.default_rng(seed).standard_normal((8, 96)).astype(np.float32) * np.float32(scale)
    rows = quantize(fmt, x)
    plain = decode_rows(fmt, rows)
    largest = np.abs(x.reshape(-1, 32)).max(axis=1)
    # Half a step, the end of the range that q4_0 cuts off (+7, not +8), and the scale's rounding:
    # 2^-11 of it, or 2^-25 where it is subnormal, times up to 127.
    step = largest / (8 if name == "q4_0" else 127)
    slack = step * (1.0 if name == "q4_0" else 0.5) + largest * 2.0**-10 + 2.0**-17
    assert (np.abs(plain - x).reshape(-1, 32) <= slack[:, None]).all()
    if name == "q4_0":
        searched = decode_rows(fmt, quantize(fmt, x, search=True))

        def errors(y: np.ndarray) -> np.ndarray:
            return np.square((x - y).astype(np.float64)).reshape(-1, 32).sum(axis=1)

        # The search compares sums in float32.
        assert (errors(searched) <= errors(plain) * (1 + 1e-5)).all()


def test_search_gains_on_normal_weights() -> None:
    x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    fmt = FORMATS["q4_0"]
    plain, searched = (
        np.square(decode_rows(fmt, quantize(fmt, x, search=s)) - x).mean() for s in (False, True)
    )
    assert searched < 0.9 * plain


@given(seed=st.integers(0, 2**32 - 1), most=st.integers(1, 8))
def test_search_reproduces_what_is_exact_in_q4_0(seed: int, most: int) -> None:
    """Whatever the largest level that a block uses: weights that were trained or quantised so."""
    fmt, draw = FORMATS["q4_0"], np.random.default_rng(seed)
    levels = draw.integers(-most, min(most, 7) + 1, (40, 32)).astype(np.float32)
    scales = draw.uniform(1e-3, 2.0, (40, 1)).astype(np.float16).astype(np.float32)
    x = np.concatenate([levels * scales, np.zeros((1, 32), np.float32)])
    assert np.array_equal(decode_rows(fmt, quantize(fmt, x, search=True)), x)


def test_reference_rounding_is_gguf_s() -> None:
    if find_spec("gguf") is None:
        pytest.skip("the gguf package is not installed")
    import gguf

    x = np.random.default_rng(5).standard_normal((32, 128)).astype(np.float32)
    for name in ("q4_0", "q8_0", "bf16", "f16", "f32"):
        fmt = FORMATS[name]
        expected = gguf.quants.quantize(x, gguf.GGMLQuantizationType(fmt.ggml_type))
        found = quantize(fmt, x)
        assert np.mean(found != expected.view(np.uint8).reshape(found.shape)) < 1e-3


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_quantising_refuses_what_is_not_finite(value: float) -> None:
    x = np.zeros((3, 64), np.float32)
    x[2, 33] = value
    with pytest.raises(OffloadError, match="row 2, column 33 is"):
        quantize(FORMATS["q4_0"], x)


def test_quantising_refuses_scales_beyond_float16() -> None:
    x = np.full((1, 32), 1e7, np.float32)
    with pytest.raises(OffloadError, match="beyond float16"):
        quantize(FORMATS["q4_0"], x)
    with pytest.raises(OffloadError, match="cannot quantise to q6_k"):
        quantize(FORMATS["q6_k"], np.zeros((1, 256), np.float32))
    with pytest.raises(OffloadError, match="no search for scales of q8_0"):
        quantize(FORMATS["q8_0"], x, search=True)


@EVERY
def test_damaged_scales_are_found(name: str) -> None:
    fmt = FORMATS[name]
    columns = 2 * fmt.block
    rows = random_rows(fmt, 9, columns)
    check_scales(fmt, rows)
    for section in fmt.sections:
        if section.name not in ("d", "m", "dmin", "e", "x"):
            continue
        broken = rows.copy()
        at = fmt.block_bytes + section.offset
        broken[7, at : at + section.nbytes] = 255  # NaN in every float format
        with pytest.raises(CheckpointError, match=r"w: 1 of 9 rows .* the first is row 7"):
            check_scales(fmt, broken, "w")
