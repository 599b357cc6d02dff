"""GGUF types that there are no kernels for: their values, and what they become in a pack.

The values are the reference package's (``gguf``, an optional dependency): these types are code
books of hundreds of entries, and rare. Nothing here is done without the user's leave.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.cpu_ops.formats import FORMATS, get_format
from offload.errors import OffloadError
from offload.io.gguf_types import BY_NAME
from offload.io.pack_manifest import Kind

REQUANTISED = frozenset(
    "q2_k q3_k iq1_s iq1_m iq2_xxs iq2_xs iq2_s iq3_xxs iq3_s iq4_xs tq1_0 tq2_0 nvfp4".split()
)
"""Types without kernels whose values can be had."""

INSTALL = "pip install 'gguf>=0.17'"

_CHUNK_VALUES = 2**18
"""Values at a time: the reference makes a dozen temporaries of their size."""


def requantised_format(type: str, kind: Kind) -> str:
    """The format that a matrix of ``type`` is packed in: of those that can be made, the smallest
    with as many bits. The first and the last matrix decide most of the error: q8_0."""
    bits = 8 * BY_NAME[type].nbytes / BY_NAME[type].elements
    if kind not in (Kind.HEAD, Kind.ROWS) and bits <= get_format("q4_0").bits_per_weight:
        return "q4_0"
    return "q8_0"


def require_kernels(types: Iterable[str], name: str, *, allow_requant: bool) -> None:
    """Refuse a model whose tensors are in ``types`` (one for each tensor) if it cannot be packed.

    Raises:
        OffloadError: a type has no kernels and that is not allowed, or it has no values either,
            or the package that knows them is missing.
    """
    counts: dict[str, int] = {}
    for type in types:
        if type not in FORMATS:
            counts[type] = counts.get(type, 0) + 1
    if not counts:
        return
    shown = ", ".join(f"{n} in {type.upper()}" for type, n in sorted(counts.items()))
    missing = f"{name}: {sum(counts.values())} tensors are of types without kernels ({shown})"
    if hopeless := sorted(counts.keys() - REQUANTISED):
        raise OffloadError(
            f"{missing}, and {hopeless[0].upper()} cannot be converted either; get the model in "
            f"another type, for example Q4_K_M or Q8_0"
        )
    if not allow_requant:
        raise OffloadError(
            f"{missing}; get the model in a type that has kernels (Q4_0, Q4_K_M, Q6_K, Q8_0, ...), "
            "or have them requantised to q4_0 and q8_0 by 'offload pack … --allow-requant', at a "
            "loss that is measured"
        )
    gguf = _reference()
    known = {type.name.lower() for type in gguf.GGMLQuantizationType}
    if newer := sorted(counts.keys() - known):
        raise OffloadError(
            f"{missing}, and the gguf package here does not know {newer[0].upper()} yet; "
            "get a newer one: pip install -U gguf"
        )


def _reference() -> Any:
    try:
        import gguf
    except ImportError as e:
        raise OffloadError(
            f"--allow-requant needs the gguf package ({e}); install it: {INSTALL}"
        ) from e
    return gguf


def dequantize_rows(type: str, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Values ``float32 [n, columns]`` of GGUF rows ``uint8 [n, row_bytes]`` of a type that is in
    ``REQUANTISED``."""
    gguf = _reference()
    kind = BY_NAME[type]
    code = gguf.GGMLQuantizationType[type.upper()]
    blocks = rows.reshape(-1, kind.nbytes)
    out = np.empty((len(blocks), kind.elements), np.float32)
    step = _CHUNK_VALUES // kind.elements
    with np.errstate(all="ignore"):  # what a damaged scale gives is refused by who takes it
        for first in range(0, len(blocks), step):
            out[first : first + step] = gguf.quants.dequantize(blocks[first : first + step], code)
    return out.reshape(len(rows), -1)
