"""Values of GGUF rows, and GGUF rows of values: the formats' definition in numpy.

Decoding follows ggml's reference (``dequantize_row_*`` in ``ggml-quants.c``) operation by operation
in float32, so the values are equal to the bit. This is the slow, plain statement of what the
kernels compute; it is used for conversion, for embedding rows and as the tests' oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.cpu_ops.formats import Format
from offload.errors import OffloadError

Array = npt.NDArray[Any]

IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The 16 levels of iq4_nl."""
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The 16 values of FP4 E2M1, doubled; the scale is halved in exchange."""

Q4_0_EXTREMES = (-8.0, -7.0, -6.0, -5.0, -4.0, -7.5, -8.5, -9.0)
"""Levels that the search for a scale of q4_0 makes of a block's largest weight.

The reference's first. The integers make whatever is exact in q4_0 come back exactly: a block whose
largest level is 3 has 6 with half the scale, 2 and 1 have 4. Beyond -8 the largest weight is cut
off a little. Positive ones gain nothing: up to 7 they mirror the negative.
"""

_CHUNK_ELEMENTS = 1 << 20


def decode_rows(fmt: Format, gguf_rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """float32 [N, K] of uint8 [N, row_bytes]."""
    rows = np.ascontiguousarray(gguf_rows)
    n, nbytes = rows.shape
    if nbytes % fmt.block_bytes:
        raise OffloadError(f"rows of {nbytes} bytes are not blocks of {fmt.block_bytes} bytes")
    columns = nbytes // fmt.block_bytes * fmt.block
    out = np.empty((n, columns), np.float32)
    step = max(1, _CHUNK_ELEMENTS // max(columns, 1))
    for first in range(0, n, step):
        blocks = rows[first : first + step].reshape(-1, fmt.block_bytes)
        parts = {
            s.name: np.ascontiguousarray(blocks[:, s.offset : s.offset + s.nbytes])
            for s in fmt.sections
        }
        out[first : first + step] = _DECODERS[fmt.name](parts).reshape(-1, columns)
    return out


def encode_rows(
    fmt: Format, weights: npt.NDArray[np.float32], *, search: bool = False
) -> npt.NDArray[np.uint8]:
    """uint8 [N, row_bytes] of float32 [N, K]: q4_0, q8_0, f16, bf16 and f32.

    ``search`` (q4_0): per block, of a few scales take the one with the smallest squared error; the
    reference's is among them, and q4_0 values come back exactly.

    Raises:
        OffloadError: a weight is NaN or infinite, or too large for a float16 scale; or there is
            no encoder for the format.
    """
    if fmt.name not in _ENCODERS:
        known = ", ".join(_ENCODERS)
        raise OffloadError(f"cannot quantise to {fmt.name}, only to {known}; pick one of them")
    if search and fmt.name != "q4_0":
        raise OffloadError(f"there is no search for scales of {fmt.name}; only of q4_0")
    weights = np.ascontiguousarray(weights, np.float32)
    n, columns = weights.shape
    out = np.empty((n, fmt.row_bytes(columns)), np.uint8)
    step = max(1, _CHUNK_ELEMENTS // columns)
    for first in range(0, n, step):
        part = weights[first : first + step]
        finite = np.isfinite(part)
        if not finite.all():
            row, column = np.argwhere(~finite)[0]
            raise OffloadError(
                f"cannot quantise: the weight at row {first + row}, column {column} is "
                f"{part[row, column]} ({int((~finite).sum())} such weights near it); "
                f"the checkpoint is damaged"
            )
        blocks = _ENCODERS[fmt.name](part.reshape(-1, fmt.block), search)
        out[first : first + step] = blocks.reshape(len(part), -1)
    return out


# ---- decoding: parts are the sections of blocks, uint8 [blocks, nbytes]; returns [blocks, block]


def _half(part: Array) -> Array:
    return part.view(np.float16).astype(np.float32)


def _nibbles(qs: Array) -> Array:
    """Columns 0..15 in the low, 16..31 in the high halves of 16 bytes."""
    return np.concatenate([qs & 15, qs >> 4], axis=1)


def _fifth(qh: Array) -> Array:
    return np.unpackbits(qh, axis=1, bitorder="little") << 4


def _float(q: Array) -> Array:
    return q.astype(np.float32)


def _signed(q: Array, zero: int) -> Array:
    return (q.astype(np.int16) - zero).astype(np.float32)


def _table(values: tuple[int, ...], qs: Array) -> Array:
    return np.array(values, np.float32)[_nibbles(qs)]


def e8m0_half(e: Array) -> Array:
    """2^(e - 128) as float32, subnormal for e < 2: half an E8M0 scale."""
    e32 = e.astype(np.uint32)
    small = np.uint32(0x00200000) << e32.clip(0, 1)
    bits: Array = np.where(e32 < 2, small, (e32.clip(1) - 1) << 23).astype(np.uint32)
    return bits.view(np.float32)


def _k_scales(scales: Array) -> tuple[Array, Array]:
    """The eight 6-bit scales and minima in 12 bytes, float32 [blocks, 8] each."""
    low, high, both = scales[:, 0:4], scales[:, 4:8], scales[:, 8:12]
    d = np.concatenate([low & 63, (both & 15) | ((low >> 2) & 0x30)], axis=1)
    m = np.concatenate([high & 63, (both >> 4) | ((high >> 2) & 0x30)], axis=1)
    return _float(d), _float(m)


def _k_nibbles(qs: Array) -> Array:
    """[blocks, 8, 32]: 32 bytes hold sub-block 2c in their low, 2c + 1 in their high halves."""
    q = qs.reshape(-1, 4, 1, 32)
    return np.concatenate([q & 15, q >> 4], axis=2).reshape(-1, 8, 32)


def _k_affine(p: dict[str, Array], q: Array) -> Array:
    sc, m = _k_scales(p["scales"])
    d, dmin = _half(p["d"]) * sc, _half(p["dmin"]) * m
    values: Array = d[..., None] * _float(q) - dmin[..., None]
    return values


def _q5_k(p: dict[str, Array]) -> Array:
    high = np.unpackbits(p["qh"][:, None, :], axis=1, bitorder="little")
    return _k_affine(p, _k_nibbles(p["qs"]) | (high << 4))


def _q6_k(p: dict[str, Array]) -> Array:
    ql = np.stack([p["ql0"], p["ql1"]], axis=1)[:, :, None]
    ql = np.concatenate([ql & 15, ql >> 4], axis=2).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    qh = (np.stack([p["qh0"], p["qh1"]], axis=1)[:, :, None] >> shifts) & 3
    q = _signed(ql | (qh << 4), 32).reshape(-1, 16, 16)
    return (_half(p["d"]) * p["scales"].view(np.int8).astype(np.float32))[..., None] * q


_DECODERS: dict[str, Callable[[dict[str, Array]], Array]] = {
    "f32": lambda p: p["x"].view(np.float32),
    "f16": lambda p: _half(p["x"]),
    "bf16": lambda p: (p["x"].view(np.uint16).astype(np.uint32) << 16).view(np.float32),
    "q4_0": lambda p: _half(p["d"]) * _signed(_nibbles(p["qs"]), 8),
    "q4_1": lambda p: _half(p["d"]) * _float(_nibbles(p["qs"])) + _half(p["m"]),
    "q5_0": lambda p: _half(p["d"]) * _signed(_nibbles(p["qs"]) | _fifth(p["qh"]), 16),
    "q5_1": lambda p: _half(p["d"]) * _float(_nibbles(p["qs"]) | _fifth(p["qh"])) + _half(p["m"]),
    "q8_0": lambda p: p["qs"].view(np.int8).astype(np.float32) * _half(p["d"]),
    "iq4_nl": lambda p: _half(p["d"]) * _table(IQ4_NL_VALUES, p["qs"]),
    "mxfp4": lambda p: e8m0_half(p["e"]) * _table(MXFP4_VALUES, p["qs"]),
    "q4_k": lambda p: _k_affine(p, _k_nibbles(p["qs"])),
    "q5_k": _q5_k,
    "q6_k": _q6_k,
}


# ---- encoding: x float32 [blocks, block]; returns uint8 [blocks, block_bytes]


def _half_scale(d: Array, what: str) -> Array:
    with np.errstate(over="ignore"):
        half = d.astype(np.float16)
    if not np.isfinite(half).all():
        raise OffloadError(
            f"cannot quantise to {what}: weights up to {np.abs(d).max():.3g} x the levels need a "
            f"scale beyond float16's 65504; keep this tensor in bf16"
        )
    return half


def _levels_q4_0(x: Array, inverse: Array) -> Array:
    return (x * inverse + np.float32(8.5)).clip(0, 15).astype(np.uint8)


def _encode_q4_0(x: Array, search: bool) -> Array:
    """Reference: the weight of the largest magnitude becomes level -8."""
    at = np.abs(x).argmax(axis=1, keepdims=True)
    largest = np.take_along_axis(x, at, axis=1)
    if search:
        best, q = _search_q4_0(x, largest)
    else:
        best = _half_scale(largest / -8, "q4_0")
        q = _levels_q4_0(x, _inverse(largest / -8))
    return np.concatenate([best.view(np.uint8), q[:, :16] | (q[:, 16:] << 4)], axis=1)


def _search_q4_0(x: Array, largest: Array) -> tuple[Array, Array]:
    """Scales [blocks, 1] and levels [blocks, 32] of the smallest squared error found.

    The idea of ``make_qx_quants`` in ggml-quants.c: try a few scales, then the one that is best for
    the levels they give, sum(x level) / sum(level^2). Unweighted. On a trained model this took a
    tenth off the squared error and 8 % off the KL divergence; 80 finer steps gained nothing more,
    weighting errors by |x|, towards the x^2 that is used there, lost what was gained.

    Sums are float32 in the order of the columns, which is what the compiled twin of this does.
    """

    def in_order(terms: Array) -> Array:
        total: Array = np.add.accumulate(terms, axis=1, dtype=np.float32)[:, -1:]
        return total

    def tried(half: Array) -> tuple[Array, Array]:
        d = half.astype(np.float32)
        q = _levels_q4_0(x, _inverse(d))
        return in_order(np.square(x - d * _signed(q, 8))), q

    best = _half_scale(largest / np.float32(Q4_0_EXTREMES[0]), "q4_0")
    error, q = tried(best)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for level in (*Q4_0_EXTREMES[1:], None):
            if level is None:
                signed = _signed(q, 8)
                below = in_order(np.square(signed))
                raw = np.where(below > 0, in_order(x * signed) / below, best.astype(np.float32))
            else:
                raw = largest / np.float32(level)
            half = raw.astype(np.float16)
            error_now, q_now = tried(half)
            better = error_now < error
            best, q = np.where(better, half, best), np.where(better, q_now, q)
            error = np.where(better, error_now, error)
    return best, q


def _encode_q8_0(x: Array, search: bool) -> Array:
    d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    scaled = x * _inverse(d)
    q = (np.sign(scaled) * np.floor(np.abs(scaled) + np.float32(0.5))).astype(np.int8)
    return np.concatenate([_half_scale(d, "q8_0").view(np.uint8), q.view(np.uint8)], axis=1)


def _inverse(d: Array) -> Array:
    """1 / d, 0 where d is 0 or so small that its inverse is infinite."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / d
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _encode_bf16(x: Array, search: bool) -> Array:
    bits = np.ascontiguousarray(x).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16).view(np.uint8)


_ENCODERS: dict[str, Callable[[Array, bool], Array]] = {
    "q4_0": _encode_q4_0,
    "q8_0": _encode_q8_0,
    "f16": lambda x, _: _half_scale(x, "f16").view(np.uint8),
    "bf16": _encode_bf16,
    "f32": lambda x, _: np.ascontiguousarray(x).view(np.uint8),
}
