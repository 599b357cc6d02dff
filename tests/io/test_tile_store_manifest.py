"""Manifests of the tile store: nothing that was cut, changed or made up becomes an offset."""

from __future__ import annotations

import json
import shutil
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tile_support import IDENTITY, SHAPES, commit, create, reopen, state_of, write_all

from offload.errors import StoreError
from offload.io import tile_manifest
from offload.io.engines import make_engine
from offload.io.pack_format import normal_meta
from offload.io.tile_manifest import MOST_GENERATIONS, VERSION, VIRGIN, Commit, Layout, dump, load

LAYOUT = Layout(SHAPES)
COMMIT = Commit(
    number=7,
    identity=normal_meta(IDENTITY),
    meta={"step": 3, "loss": 0.1},
    layout=LAYOUT,
    generations=bytes([0, 1, VIRGIN, 2]),
    present=bytes([1, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1]),
    sums=array("Q", [2**64 - 1, 0, 1, 5, 0, 0, 0, 0, 2**63, 9, 10]),
)
RAW = dump(COMMIT)


def fields(commit: Commit) -> tuple[Any, ...]:
    return (
        commit.number, commit.identity, commit.meta, commit.layout.shapes, commit.generations,
        commit.present, list(commit.sums),
    )  # fmt: skip


def seal(body: Any, version: int = VERSION) -> bytes:
    """A manifest as a program of tomorrow, or somebody with an editor, might write it."""
    written = json.dumps(body, separators=(",", ":")).encode()
    return tile_manifest._head(written, version) + written + b"}\n"


def test_there_and_back() -> None:
    assert fields(load(RAW, "it")) == fields(COMMIT)
    assert dump(load(RAW, "it")) == RAW
    assert seal(json.loads(RAW)["commit"]) == RAW


def test_a_manifest_is_compact() -> None:
    tiles, parts = 100_000, 4
    layout = Layout([(2 << 20, 4 << 20, 4 << 20, 4 << 20)] * tiles)
    raw = dump(
        Commit(
            number=1, identity={}, meta={}, layout=layout, generations=bytes(tiles),
            present=b"\1" * (tiles * parts), sums=array("Q", [2**64 - 1]) * (tiles * parts),
        )
    )  # fmt: skip
    assert len(raw) < 55 * tiles
    assert len(load(raw, "it").layout) == tiles


def test_every_cut_is_refused() -> None:
    for n in range(len(RAW)):
        with pytest.raises(ValueError, match=r"cut|checksum|count"):
            load(RAW[:n], "it")


def test_every_changed_byte_is_refused() -> None:
    for at in range(len(RAW)):
        for bit in (0, 1, 5):
            changed = bytearray(RAW)
            changed[at] ^= 1 << bit
            with pytest.raises(ValueError):
                load(bytes(changed), "it")


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(RAW)), st.binary(min_size=1, max_size=4))
def test_inserted_bytes_are_refused(at: int, extra: bytes) -> None:
    with pytest.raises(ValueError):
        load(RAW[:at] + extra + RAW[at:], "it")


def test_of_tomorrow() -> None:
    with pytest.raises(StoreError, match=f"it.json is of version {VERSION + 1}, this offload"):
        load(seal({"anything": 1}, version=VERSION + 1), "it.json")
    with pytest.raises(ValueError, match="cut or no JSON"):
        load(b"[" * 100_000, "it")


BODY: dict[str, Any] = json.loads(RAW)["commit"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
BASE64 = st.binary(max_size=14).map(tile_manifest._encode)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_sealed_nonsense_is_refused_or_harmless(data: st.DataObject) -> None:
    """With a right checksum, too: what is loaded can be used without a look."""
    key = data.draw(st.sampled_from(sorted(BODY)))
    value = data.draw(
        JSON | BASE64 | st.lists(st.integers(-1, 5), max_size=5)
        | st.lists(st.lists(st.integers(-1, 9000), max_size=3), max_size=4)
    )  # fmt: skip
    try:
        found = load(seal({**BODY, key: value}), "it")
    except ValueError:
        return
    layout = found.layout
    assert layout.nbytes > 0
    assert len(found.generations) == len(layout.shapes) == len(layout.first)
    assert len(found.present) == len(found.sums) == layout.parts
    for tile, generation in enumerate(found.generations):
        assert generation < MOST_GENERATIONS or generation == VIRGIN
        if generation != VIRGIN:
            assert layout.offset(tile, generation) % 4096 == 0
    assert isinstance(found.meta, dict)
    assert isinstance(found.identity, dict)
    assert 0 <= found.number < 2**63


@pytest.mark.parametrize("key", sorted(BODY))
def test_a_missing_field(key: str) -> None:
    with pytest.raises(ValueError, match=f"its {key} is missing"):
        load(seal({k: v for k, v in BODY.items() if k != key}), "it")


encode = tile_manifest._encode
WRONG: list[tuple[str, Any, str]] = [
    ("number", -1, "not a count"),
    ("number", True, "not a count"),
    ("number", 1.0, "not a count"),
    ("identity", [], "not an object"),
    ("meta", None, "not an object"),
    ("kinds", [[1, -1]], "not a count"),
    ("kinds", [[], [1], [1], [1]], "parts must be"),
    ("kinds", [], "of kind 3 of 0"),
    ("tiles", [0, 1, 2, 4], "of kind 4 of 4"),
    ("tiles", [0, 1, 2], "generations has 4 bytes, not 3"),
    ("tiles", [], "at least one tile"),
    ("generations", encode(bytes([0, 1, VIRGIN, 200])), "tile 3 is in generation 200"),
    ("generations", encode(bytes([0, 1, VIRGIN, 254])), "tile 3 is in generation 254"),
    ("generations", encode(bytes([0, VIRGIN, VIRGIN, 0])), "tile 1 was never written, but"),
    ("generations", "AAA", "padding"),
    ("generations", "AA==\n", "base64|discarded|excess"),
    ("generations", [0, 1, 2, 3], "not text"),
    ("present", encode(bytes([2] + [0] * 10)), "presence is 2"),
    ("present", encode(bytes([1, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1])), "absent, but has a checksum"),
    ("sums", encode(bytes(87)), "sums has 87 bytes, not 88"),
]


@pytest.mark.parametrize(("key", "value", "why"), WRONG)
def test_values_that_no_store_wrote(key: str, value: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"(?i){why}"):
        load(seal({**BODY, key: value}), "it")


@pytest.fixture(scope="module")
def two_commits() -> Iterator[tuple[Path, dict[int, Any]]]:
    folder = Path(tempfile.mkdtemp(prefix="offload-manifest-"))
    engine = make_engine("threads", 1)
    states = {}
    with create(folder / "s", engine, keep=2) as store:
        for n in (1, 2):
            states[n] = write_all(store, n)
            commit(store, n=n)
    engine.close()
    yield folder / "s", states
    shutil.rmtree(folder)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_damaged_commit_leaves_the_one_before(
    two_commits: tuple[Path, dict[int, Any]], data: st.DataObject
) -> None:
    path, states = two_commits
    manifest = path / "commit-2.json"
    raw = manifest.read_bytes()
    changed = bytearray(raw[: data.draw(st.integers(0, len(raw)))])
    if len(changed) == len(raw):
        changed[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    engine = make_engine("threads", 1)
    try:
        manifest.write_bytes(changed)
        with reopen(path, engine, keep=2) as store:
            assert store.commit_meta == {"n": 1}
            assert state_of(store) == states[1]
    finally:
        manifest.write_bytes(raw)
        engine.close()
    assert sorted(p.name for p in path.iterdir()) == ["commit-1.json", "commit-2.json", "tiles.bin"]


def test_a_commit_under_another_name(tmp_path: Path, two_commits: tuple[Path, Any]) -> None:
    path = tmp_path / "s"
    shutil.copytree(two_commits[0], path)
    shutil.copy(path / "commit-1.json", path / "commit-9.json")
    engine = make_engine("threads", 1)
    with reopen(path, engine, keep=2) as store:
        assert store.commit_meta == {"n": 2}
        assert store.commits() == [1, 2]
        commit(store)
        assert store.commits() == [2, 10]
    engine.close()
