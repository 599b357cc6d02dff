"""Manifests that somebody edited, checksum and all: refused with one error, whatever they say."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pack_directory import fill, table_job

from offload.errors import CheckpointError, StoreError
from offload.io.pack_manifest import MANIFEST, bundle_name, digest, read_manifest
from offload.io.pack_writer import PackDirectory
from offload.io.safetensors import CheckpointIndex

ODD: list[Any] = [
    -1, 0, -4096, 2**31, 2**62, 2**64, 10**30, 1.5, "x", "", None, True, [], {}, [[]], "../x",
]  # fmt: skip


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("edited") / "p"
    with PackDirectory(path, table_job()) as directory:
        fill(directory)
        directory.commit({})
    return path


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def edited(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    out = copy.deepcopy(body)
    at = out
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return out


def reread(packed: Path, body: Any) -> None:
    """Give the pack another manifest, sealed as ours are, and read it."""
    path = packed / MANIFEST
    before = path.read_bytes()
    whole = json.loads(before)
    whole["pack"], whole["sha256"] = body, digest(body)
    path.write_text(json.dumps(whole))
    try:
        read_manifest(packed)
    finally:
        path.write_bytes(before)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_an_edited_field_is_accepted_or_refused(packed: Path, data: st.DataObject) -> None:
    body = json.loads((packed / MANIFEST).read_bytes())["pack"]
    path = data.draw(st.sampled_from(list(places(body))))
    value = data.draw(st.sampled_from(ODD))
    with contextlib.suppress(StoreError):  # anything else is a crash, or runs what was edited
        reread(packed, edited(body, path, value))


# The columns of a block: name, kind, group, file, offset, bytes, checksum, layout.
@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        (("blocks", 0, 3), -1, r"the file of b0 is -1, not a count"),
        (("blocks", 1, 4), -4096, "the offset of b1 is -4096"),
        (("blocks", 1, 4), 0, "impossible place"),
        (("blocks", 1, 5), 2**62, "past their bundles|impossible place"),
        (("blocks", 1, 6), "x", "the checksum of b1 is 'x'"),
        (("blocks", 1, 2), [], r"the group of b1 is \[\], not text"),
        (("blocks", 1, 2), "", "an expert of no layer"),
        (("blocks", 0, 7), -1, "the layout of b0 is -1"),
        (("layouts", 0, 0, 3), [2**40, 2**40], "shape of gate is"),
        (("layouts", 0), [], "has no parts"),
        (("page_crcs",), [], "page_crcs is"),
        (("page_crcs", "b2"), "AAAA", "checksums of pages"),
        (("model",), {"dtype": 1}, "model of dtype is 1"),
        (("source", "unknown"), "x", "unexpected keyword"),
        (("errors",), {"expert": {"relative_rms": "x", "rows": 1}}, "the error of expert"),
    ],
)
def test_what_is_wrong_is_named(packed: Path, path: tuple[Any, ...], value: Any, why: str) -> None:
    body = json.loads((packed / MANIFEST).read_bytes())["pack"]
    with pytest.raises(StoreError, match=why):
        reread(packed, edited(body, path, value))


def test_a_manifest_that_nests_without_end_is_refused(packed: Path) -> None:
    path = packed / MANIFEST
    before = path.read_bytes()
    path.write_text("[" * 100_000)
    with pytest.raises(StoreError, match="is not the manifest"):
        read_manifest(packed)
    path.write_bytes(before)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "of its 0 bytes no JSON object can be made"),
        (b"[" * 100_000, "of its 100000 bytes no JSON object"),
        (b"\xff\xfe{}", "of its 4 bytes no JSON object"),
        (b"[1]", r"it is \[1\], not an object"),
        (b'{"format": ["x"]}', r"its format is \['x'\], not 'offload-pack'"),
    ],
)
def test_what_is_no_manifest_says_why_and_the_way_out(
    packed: Path, tmp_path: Path, content: bytes, why: str
) -> None:
    folder = tmp_path / "p"
    shutil.copytree(packed, folder)
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(StoreError, match=f"{why}.*delete {folder} and pack the model again"):
        read_manifest(folder)
    (folder / bundle_name(0)).unlink()  # then it may be anybody's directory
    with pytest.raises(StoreError, match=f"{why}.*move it away, or give another directory"):
        read_manifest(folder)


@pytest.mark.parametrize("version", [True, 1.0, "1", None, 2, 10**80])
def test_a_version_that_is_not_ours_is_named(packed: Path, version: object) -> None:
    path = packed / MANIFEST
    before = path.read_bytes()
    path.write_text(json.dumps(json.loads(before) | {"version": version}))
    with pytest.raises(StoreError, match=r"is of pack format .*, this offload reads format 1"):
        read_manifest(packed)
    path.write_bytes(before)


@pytest.mark.parametrize("time", [True, "12", 1.5, None, 2**64])
def test_a_source_file_has_a_time(packed: Path, time: object) -> None:
    body = json.loads((packed / MANIFEST).read_bytes())["pack"]
    body["source"]["files"] = [["a.safetensors", 10, time, "0" * 64]]
    with pytest.raises(StoreError, match=r"the time of a.safetensors is .*, not a time"):
        reread(packed, body)


def test_a_pipe_in_the_place_of_the_manifest_is_not_waited_for(
    packed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "p"
    shutil.copytree(packed, folder)
    (folder / MANIFEST).unlink()
    os.mkfifo(folder / MANIFEST)
    with pytest.raises(StoreError, match=r"pack\.json is no file; delete"):
        read_manifest(folder)


def test_a_damaged_pack_is_made_anew_as_it_says(tmp_path: Path) -> None:
    """By itself packing again does nothing: what has a manifest is complete, or in the way."""
    path = tmp_path / "p"

    def make() -> None:
        with PackDirectory(path, table_job()) as directory:
            fill(directory)
            directory.commit({})

    make()
    bundle = path / bundle_name(0)
    os.truncate(bundle, bundle.stat().st_size - 4096)
    for attempt in (make, lambda: read_manifest(path)):
        with pytest.raises(StoreError, match=f"truncated: .*; delete {path} and pack the model"):
            attempt()
    (path / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=f"is missing; delete {path} and pack the model"):
        CheckpointIndex.open(path)
    with pytest.raises(StoreError, match="exists and is not a packed model"):
        make()
    shutil.rmtree(path)
    make()
    read_manifest(path)
