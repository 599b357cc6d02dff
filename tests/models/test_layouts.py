"""Layouts for the disk and for the cores: other places, the same bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.blocks import ALIGN, DTYPE_BYTES, BlockKind, BlockSpec, layout
from offload.io.ranges import Piece
from offload.models import layouts
from offload.models.layouts import lay_as_in_file, lay_on_lines

FILE = random.Random(0).randbytes(1 << 18)
HALVES = ("bfloat16", "float16")


def arrived(spec: BlockSpec, pieces: Sequence[Piece]) -> list[bytes]:
    """The bytes of each tensor after the pieces have been copied; all of them in the block."""
    slot = bytearray(spec.nbytes)
    for p in pieces:
        slot[p.dst : p.dst + p.nbytes] = FILE[p.src : p.src + p.nbytes]
    assert len(slot) == spec.nbytes
    return [bytes(slot[t.offset : t.offset + t.nbytes]) for t in spec.tensors]


@st.composite
def in_pages(draw: st.DrawFn) -> tuple[BlockSpec, list[Piece]]:
    """A block as ``make_recipes`` lays it: tensors of one or two pieces of a file."""
    tensors, phases, found = [], [], []
    for i in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from([*HALVES, "float32", "float64", "int32"]))
        size = DTYPE_BYTES[dtype]
        count = draw(st.integers(0, 40) | st.integers(4000, 6000).map(lambda n: n // 8 * 8))
        src = draw(st.integers(0, 2000)) * 8 + i * 50_000
        first = draw(st.sampled_from([count, count // 2])) * size
        pieces = [Piece(0, src, 0, first)]
        if first < count * size:
            second = draw(st.sampled_from([src + first, src + first + 808]))
            pieces.append(Piece(0, second, first, count * size - first))
        tensors.append((str(i), dtype, (count,)))
        phases.append(src % 64 if dtype in ("float32", "float64") else 0)
        found.append(pieces)
    spec = lay_as_in_file(layout("b", BlockKind.WEIGHT, tensors, phases=phases), found)
    offsets = [t.offset for t in spec.tensors]
    return spec, [
        p._replace(dst=at + p.dst) for at, of in zip(offsets, found, strict=True) for p in of
    ]


@pytest.fixture(autouse=True, scope="module")
def _pages_for_small_tensors() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "IN_PAGES_FROM", 4096)
        yield


@settings(deadline=None, max_examples=300)
@given(case=in_pages())
def test_the_same_bytes_on_cache_lines(case: tuple[BlockSpec, list[Piece]]) -> None:
    spec, pieces = case
    moved, onto = lay_on_lines(spec, pieces)
    assert arrived(moved, onto) == arrived(spec, pieces)
    assert moved.nbytes == spec.nbytes
    assert [p._replace(dst=0) for p in onto] == [p._replace(dst=0) for p in pieces]
    assert [replace(t, offset=0) for t in moved.tensors] == [
        replace(t, offset=0) for t in spec.tensors
    ]
    if moved is spec:  # it would not have fitted
        return
    for new, old in zip(moved.tensors, spec.tensors, strict=True):
        assert new.offset % 64 == (0 if new.dtype in HALVES else old.offset % 64)


def test_a_matrix_in_its_page_moves_to_the_start_of_its_slot() -> None:
    tensors = [("w", "bfloat16", (64, 64)), ("f", "float32", (2048,)), ("v", "float16", (64, 32))]
    spec = layout("b", BlockKind.WEIGHT, tensors, phases=[0, 24, 0])
    spec = lay_as_in_file(
        spec, [[Piece(0, 4104, 0, 8192)], [Piece(0, 20_504, 0, 8192)], [Piece(0, 72, 0, 4096)]]
    )
    assert [t.offset % ALIGN for t in spec.tensors] == [8, 24, 72]
    pieces = [
        Piece(0, 4104, 8, 8192),
        Piece(0, 20_504, spec.tensors[1].offset, 5000),
        Piece(0, 60_000, spec.tensors[1].offset + 5000, 3192),
        Piece(0, 72, spec.tensors[2].offset, 4096),
    ]
    moved, onto = lay_on_lines(spec, pieces)
    assert [t.offset for t in moved.tensors] == [0, 8216, 16_448]
    assert [p.dst for p in onto] == [0, 8216, 13_216, 16_448]


def test_what_would_not_fit_stays() -> None:
    """Two odd lengths that touch in the file leave no room for a gap between them."""
    tensors = [("a", "bfloat16", (2052,)), ("b", "bfloat16", (2052,))]
    found = [[Piece(0, 8, 0, 4104)], [Piece(0, 4112, 0, 4104)]]
    spec = lay_as_in_file(layout("b", BlockKind.WEIGHT, tensors), found)
    assert [t.offset for t in spec.tensors] == [8, 4112]
    pieces = [Piece(0, 8, 8, 4104), Piece(0, 4112, 4112, 4104)]
    assert lay_on_lines(spec, pieces) == (spec, tuple(pieces))
