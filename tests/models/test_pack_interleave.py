"""The compiled packing against the one that states the layout."""

from __future__ import annotations

import numpy as np
import pytest
from numba.core import dispatcher

from offload.cpu_ops import kernel_cache
from offload.cpu_ops.formats import FORMATS, get_format
from offload.cpu_ops.packing import pack_rows, packed_bytes
from offload.errors import OffloadError
from offload.models.pack_interleave import interleave


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 15, 16, 33, 64])
def test_the_same_bytes(name: str, rows: int) -> None:
    format = get_format(name)
    draw = np.random.default_rng(rows)
    for blocks in (1, 3):
        columns = blocks * format.block
        gguf = draw.integers(0, 256, (rows, format.row_bytes(columns)), dtype=np.uint8)
        out = np.full(packed_bytes(format, rows, columns), 0xAA, np.uint8)
        interleave(format, gguf, columns, out)
        np.testing.assert_array_equal(out, pack_rows(format, gguf, columns))


def test_rows_that_are_not_contiguous() -> None:
    format = get_format("q4_0")
    gguf = np.random.default_rng(0).integers(0, 256, (64, 18), dtype=np.uint8)[::2]
    out = np.empty(packed_bytes(format, 32, 32), np.uint8)
    interleave(format, gguf, 32, out)
    np.testing.assert_array_equal(out, pack_rows(format, gguf, 32))


def test_shapes_that_do_not_fit() -> None:
    format = get_format("q4_0")
    rows = np.zeros((16, 18), np.uint8)
    with pytest.raises(OffloadError, match="rows of 64 columns"):
        interleave(format, rows, 64, np.empty(576, np.uint8))
    with pytest.raises(OffloadError, match="16 x 32 weights"):
        interleave(format, rows, 32, np.empty(287, np.uint8))


def test_compiled_code_that_cannot_be_kept_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody without a home, beside an installation that only root may write to."""

    def nowhere(*_: object) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(dispatcher, "FunctionCache", nowhere)

    def twice(x: int) -> int:
        return 2 * x

    assert kernel_cache.kept(twice)(21) == 42
