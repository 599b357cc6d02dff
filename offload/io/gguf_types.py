"""The tensor types of GGML: their codes in GGUF files, block sizes and names.

Source: ``ggml_type`` and the block structures of github.com/ggml-org/llama.cpp (``ggml.h``,
``ggml-common.h``). A type stores a row in blocks of ``elements`` values in ``nbytes`` bytes; rows
are contiguous and never share a block.
"""

from __future__ import annotations

from typing import NamedTuple


class GGMLType(NamedTuple):
    """A tensor type: ``elements`` consecutive values of a row take ``nbytes`` bytes."""

    name: str
    elements: int
    nbytes: int


TYPES = {
    code: GGMLType(name, elements, nbytes)
    for code, name, elements, nbytes in (
        (0, "f32", 1, 4), (1, "f16", 1, 2), (28, "f64", 1, 8), (30, "bf16", 1, 2),
        (24, "i8", 1, 1), (25, "i16", 1, 2), (26, "i32", 1, 4), (27, "i64", 1, 8),
        (2, "q4_0", 32, 18), (3, "q4_1", 32, 20), (6, "q5_0", 32, 22), (7, "q5_1", 32, 24),
        (8, "q8_0", 32, 34), (9, "q8_1", 32, 40),
        (10, "q2_k", 256, 84), (11, "q3_k", 256, 110), (12, "q4_k", 256, 144),
        (13, "q5_k", 256, 176), (14, "q6_k", 256, 210), (15, "q8_k", 256, 292),
        (16, "iq2_xxs", 256, 66), (17, "iq2_xs", 256, 74), (18, "iq3_xxs", 256, 98),
        (19, "iq1_s", 256, 50), (20, "iq4_nl", 32, 18), (21, "iq3_s", 256, 110),
        (22, "iq2_s", 256, 82), (23, "iq4_xs", 256, 136), (29, "iq1_m", 256, 56),
        (34, "tq1_0", 256, 54), (35, "tq2_0", 256, 66), (39, "mxfp4", 32, 17),
        (40, "nvfp4", 64, 36), (41, "q1_0", 128, 18),
    )
}  # fmt: skip
"""Code in the file -> type."""

BY_NAME = {t.name: t for t in TYPES.values()}

REMOVED = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8",
    36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip
"""Codes that llama.cpp itself has given up: named in the error, never read."""
