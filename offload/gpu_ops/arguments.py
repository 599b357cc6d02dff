"""What kernels are given: one structure each, by value: a launch copies nothing to the card.

The fields are those of the sources in ``kernels/``; tests compare the sizes.
"""

from __future__ import annotations

import ctypes

_i32, _i64, _u64, _f32 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_float

MOST_EXPERTS = 64
MOST_SLOTS = 256
"""Experts, and pairs of a token and an expert, of one launch (``experts.cuh``)."""


class Records(ctypes.Structure):
    """Addresses of quantised activations; see ``records.py``."""

    _fields_ = (("q", _u64), ("scale", _u64), ("sums", _u64))


class QuantizeArgs(ctypes.Structure):
    _fields_ = (
        ("x", _u64), ("q", _u64), ("scale", _u64), ("sums", _u64),
        ("columns", _i32), ("tokens", _i32), ("per_scale", _i32), ("unused", _i32),
    )  # fmt: skip


class LinearArgs(ctypes.Structure):
    _fields_ = (
        ("packed", _u64), ("records", Records), ("x", _u64), ("bias", _u64), ("out", _u64),
        ("rows", _i32), ("columns", _i32), ("tokens", _i32), ("unused", _i32),
    )  # fmt: skip


class ExpertArgs(ctypes.Structure):
    _fields_ = (
        ("bases", _u64 * MOST_EXPERTS),
        ("starts", _i32 * (MOST_EXPERTS + 2)),
        ("slots", _i32 * MOST_SLOTS),
        ("gate", _i64), ("up", _i64), ("down", _i64),
        ("gate_bias", _i64), ("up_bias", _i64), ("down_bias", _i64),
        ("x_records", Records), ("x", _u64), ("h", _u64), ("h_records", Records), ("y", _u64),
        ("weights", _u64), ("out", _u64),
        ("hidden", _i32), ("inner", _i32), ("experts", _i32), ("tokens", _i32), ("top_k", _i32),
        ("kind", _i32), ("alpha", _f32), ("limit", _f32), ("add", _i32), ("unused", _i32),
    )  # fmt: skip


class DequantizeArgs(ctypes.Structure):
    _fields_ = (
        ("packed", _u64), ("out", _u64),
        ("rows", _i32), ("columns", _i32), ("into", _i32), ("unused", _i32),
    )  # fmt: skip


class AdamArgs(ctypes.Structure):
    _fields_ = (
        ("gradient", _u64), ("p", _u64), ("m", _u64), ("v", _u64), ("copy", _u64),
        ("m_scales", _u64), ("v_scales", _u64),
        ("seed", _u64), ("step", _u64), ("first", _u64), ("count", _i64),
        ("constants", _f32 * 10), ("lines", _f32 * 80),
        ("wide_gradient", _i32), ("wide_copy", _i32), ("l2", _i32), ("from_gradient", _i32),
    )  # fmt: skip


Arguments = QuantizeArgs | LinearArgs | ExpertArgs | DequantizeArgs | AdamArgs
