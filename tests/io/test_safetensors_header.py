"""Headers and indexes: what the reference writes is read alike, what is damaged is named."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.blocks import DTYPE_BYTES
from offload.errors import CheckpointError
from offload.io.safetensors import DTYPES, CheckpointIndex, TensorRange, read_header


def raw(header: bytes | dict[str, Any], data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(start: int, end: int, shape: list[Any] | None = None, dtype: str = "U8") -> Any:
    return {
        "dtype": dtype,
        "shape": [end - start] if shape is None else shape,
        "data_offsets": [start, end],
    }


def save(folder: Path, name: str, **tensors: Any) -> None:
    safetensors.numpy.save_file({k: np.asarray(v) for k, v in tensors.items()}, folder / name)


NUMPY = ["float64", "float32", "float16", "int64", "int32", "int16", "int8",
         "uint64", "uint32", "uint16", "uint8", "bool", "complex64"]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    tensors=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
            lambda s: s != "__metadata__"
        ),
        st.tuples(st.sampled_from(NUMPY), st.lists(st.integers(0, 4), max_size=3)),
        max_size=6,
    ),
    # Not empty: the reference writes invalid JSON for metadata {} of no tensors.
    metadata=st.none()
    | st.dictionaries(st.text(max_size=5), st.text(max_size=5), min_size=1, max_size=3),
)
def test_agrees_with_the_reference_writer(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: dict[str, tuple[str, list[int]]],
    metadata: dict[str, str] | None,
) -> None:
    path = tmp_path_factory.mktemp("st") / "f"
    rng = np.random.default_rng(0)
    arrays = {k: rng.integers(0, 2, shape).astype(dtype) for k, (dtype, shape) in tensors.items()}
    try:
        path.write_bytes(safetensors.numpy.save(arrays, metadata))
    except (TypeError, safetensors.SafetensorError):
        return  # a name or dtype this version of the reference cannot write
    header = read_header(path)
    content = path.read_bytes()
    assert header.metadata == (metadata or {})
    assert header.tensors.keys() == arrays.keys()
    for name, a in arrays.items():
        t = header.tensors[name]
        assert (t.dtype, t.shape, t.nbytes) == (str(a.dtype), a.shape, a.nbytes)
        assert content[t.offset : t.offset + t.nbytes] == a.tobytes()


def test_all_dtypes_have_a_size() -> None:
    assert set(DTYPES.values()) == set(DTYPE_BYTES)


def test_a_header(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "b": entry(4, 4, [0, 3], "BF16"),
              "a": entry(0, 4, [2], "BF16")}  # fmt: skip
    text = json.dumps(header).encode() + b"    "
    (tmp_path / "f").write_bytes(raw(text, bytes(4)))
    got = read_header(tmp_path / "f")
    assert got.metadata == {"format": "pt"}
    assert (got.data_start, got.file_size) == (8 + len(text), 12 + len(text))
    assert got.tensors["a"] == TensorRange("bfloat16", (2,), got.data_start, 4)
    assert got.tensors["b"] == TensorRange("bfloat16", (0, 3), got.data_start + 4, 0)
    assert read_header(tmp_path / "f").digest == got.digest


def test_scalar_and_empty(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(raw({"s": entry(0, 4, [], "F32")}, bytes(4)))
    assert read_header(tmp_path / "f").tensors["s"].shape == ()
    (tmp_path / "f").write_bytes(raw({}))
    assert read_header(tmp_path / "f").tensors == {}


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes are too few"),
    "short": (b"1234567", "7 bytes are too few"),
    "longer than the file": (struct.pack("<Q", 500) + b"{}", r"500 bytes long.*ends after 10"),
    "over the limit": (struct.pack("<Q", 2**63) + b"{}", "over the limit of 100000000"),
    "not JSON": (raw(b"{'a': 1}"), "not valid JSON"),
    "not UTF-8": (raw(b'{"\xff": 1}'), "not valid JSON"),
    "deep": (raw(b"[" * 200_000), "not valid JSON"),
    "a list": (raw(b"[]"), "list, not an object"),
    "a number": (raw(b"3"), "int, not an object"),
    "twice": (raw(b'{"a": {}, "a": {}}'), "'a' is there twice"),
    "twice inside": (raw(b'{"a": {"dtype": "U8", "dtype": "I8"}}'), "'dtype' is there twice"),
    "metadata twice": (raw(b'{"__metadata__": {"x": "1", "x": "2"}}'), "'x' is there twice"),
    "metadata list": (raw({"__metadata__": []}), "__metadata__ is a list"),
    "metadata number": (raw({"__metadata__": {"a": 1}}), "'a' is a int, not a string"),
    "no entry": (raw({"a": 1}), "tensor a: needs dtype"),
    "no dtype": (raw({"a": {"shape": [], "data_offsets": [0, 1]}}), "tensor a: needs dtype"),
    "one offset": (raw({"a": {"dtype": "U8", "shape": [], "data_offsets": [0]}}), "needs dtype"),
    "unknown dtype": (raw({"a": entry(0, 1, dtype="Q8")}, b"1"), "tensor a: unknown dtype 'Q8'"),
    "dtype list": (raw({"a": entry(0, 1, dtype=[])}, b"1"), "unknown dtype"),  # type: ignore[arg-type]
    "F4": (raw({"a": entry(0, 1, [2], "F4")}, b"1"), "F4 has less than a byte per element"),
    "F6": (raw({"a": entry(0, 3, [4], "F6_E2M3")}, b"123"), "less than a byte per element"),
    "negative size": (raw({"a": entry(0, 1, [-1])}, b"1"), r"shape \[-1\] is not"),
    "size of text": (raw({"a": entry(0, 1, ["1"])}, b"1"), "is not a list of sizes"),
    "size of truth": (raw({"a": entry(0, 1, [True])}, b"1"), "is not a list of sizes"),
    "size of floats": (raw({"a": entry(0, 1, [1.0])}, b"1"), "is not a list of sizes"),
    "backwards": (raw({"a": entry(4, 0, [4])}, bytes(4)), "4 to 0 are not a range"),
    "negative offset": (raw({"a": entry(-1, 0, [1])}, b"1"), "-1 to 0 are not a range"),
    "wrong length": (
        raw({"a": entry(0, 8, [3], "F32")}, bytes(8)),
        r"tensor a: F32 \[3\] takes 12 bytes, but data_offsets 0 to 8 are 8",
    ),
    "huge": (raw({"a": entry(0, 1, [2**70])}, b"1"), f"takes {2**70} bytes"),
    "overlap": (raw({"a": entry(0, 4), "b": entry(3, 6)}, bytes(6)), "tensor b starts .* inside"),
    "same place": (raw({"a": entry(0, 4), "b": entry(0, 4)}, bytes(4)), "inside tensor a"),
    "hole": (raw({"a": entry(0, 4), "b": entry(6, 8)}, bytes(8)), "a hole of 2 bytes"),
    "hole at the start": (raw({"a": entry(2, 4)}, bytes(4)), "hole of 2 bytes between the header"),
    "truncated": (raw({"a": entry(0, 100)}, bytes(60)), "truncated: .* 40 are missing"),
    "trailing": (raw({"a": entry(0, 4)}, bytes(10)), "6 bytes behind the last tensor"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_headers(tmp_path: Path, what: str) -> None:
    content, message = BAD[what]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_noise_is_refused_or_sound(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """A flipped byte anywhere in a header: an error, or ranges that are still inside the file."""
    path = tmp_path_factory.mktemp("st") / "f"
    body = bytearray(raw({"a": entry(0, 4), "b": entry(4, 12, [2], "F32")}, bytes(12)))
    body[data.draw(st.integers(0, len(body) - 13))] = data.draw(st.integers(0, 255))
    path.write_bytes(body)
    try:
        header = read_header(path)
    except CheckpointError:
        return
    for t in header.tensors.values():
        assert header.data_start <= t.offset <= t.offset + t.nbytes <= len(body)


def test_many_tensors(tmp_path: Path) -> None:
    n = 100_000
    header = {f"model.layers.{i}.w": entry(i * 2, i * 2 + 2, [1], "BF16") for i in range(n)}
    (tmp_path / "f").write_bytes(raw(header, bytes(2 * n)))
    got = read_header(tmp_path / "f")
    assert len(got.tensors) == n
    assert got.tensors[f"model.layers.{n - 1}.w"].offset == got.file_size - 2


# Directories


def sharded(folder: Path) -> dict[str, Any]:
    save(folder, "s1.safetensors", a=[1.0, 2.0], b=[3])
    save(folder, "s2.safetensors", c=[4.0])
    index = {
        "metadata": {},
        "weight_map": {"a": "s1.safetensors", "b": "s1.safetensors", "c": "s2.safetensors"},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


def test_single_file(tmp_path: Path) -> None:
    save(tmp_path, "model.safetensors", a=[1.0, 2.0])
    save(tmp_path, "model.fp16.safetensors", a=np.float16([1.0]))
    index = CheckpointIndex.open(tmp_path)
    assert [f.name for f in index.files] == ["model.safetensors"]
    assert index.tensors["a"][1].dtype == "float64"
    assert index.total_bytes == 16
    assert CheckpointIndex.open(tmp_path, variant="fp16").tensors["a"][1].dtype == "float16"
    with pytest.raises(CheckpointError, match=r"neither model.bf16.safetensors nor.*variant"):
        CheckpointIndex.open(tmp_path, variant="bf16")


def test_shards(tmp_path: Path) -> None:
    sharded(tmp_path)
    index = CheckpointIndex.open(tmp_path)
    assert [f.name for f in index.files] == ["s1.safetensors", "s2.safetensors"]
    assert {k: i for k, (i, _) in index.tensors.items()} == {"a": 0, "b": 0, "c": 1}
    assert index.total_bytes == 16 + 8 + 8
    number, where = index.tensors["c"]
    with open(index.files[number], "rb") as f:
        f.seek(where.offset)
        assert np.frombuffer(f.read(where.nbytes)) == [4.0]


def test_shards_of_a_variant(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").rename(
        tmp_path / "model.safetensors.index.fp16.json"
    )
    assert len(CheckpointIndex.open(tmp_path, variant="fp16").files) == 2


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save(tmp_path / "blobs", "deadbeef", a=[1])
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/deadbeef")
    assert "a" in CheckpointIndex.open(tmp_path / "snapshot").tensors


def test_fingerprint(tmp_path: Path) -> None:
    sharded(tmp_path)
    before = CheckpointIndex.open(tmp_path).fingerprint()
    assert CheckpointIndex.open(tmp_path).fingerprint() == before
    os.utime(tmp_path / "s2.safetensors", ns=(1, 1))
    touched = CheckpointIndex.open(tmp_path).fingerprint()
    save(tmp_path, "s2.safetensors", c=[[4.0]])
    os.utime(tmp_path / "s2.safetensors", ns=(1, 1))
    other_shape = CheckpointIndex.open(tmp_path).fingerprint()
    assert len({before, touched, other_shape}) == 3


def test_an_unlisted_tensor_is_used(tmp_path: Path) -> None:
    index = sharded(tmp_path)
    del index["weight_map"]["b"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "b" in CheckpointIndex.open(tmp_path).tensors


def change_index(folder: Path, **weight_map: Any) -> None:
    index = sharded(folder)
    index["weight_map"].update(weight_map)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "s2.safetensors"}, r"tensor a is in s2.safetensors, it is in s1"),
        ({"z": "s1.safetensors"}, r"tensor z is in s1.safetensors, it is in none"),
        ({"z": "s3.safetensors"}, r"1 of 3 shards are missing, s3.safetensors first"),
        ({"z": "../s1.safetensors"}, "outside the checkpoint"),
        ({"z": "x/../../s1.safetensors"}, "outside the checkpoint"),
        ({"z": "/etc/passwd"}, "outside the checkpoint"),
        ({"z": "x" * 5000}, "cannot read .*/xxx.*: File name too long"),
        ({"z": 3}, "mapped to 3, not to a file name"),
        ({"z": ""}, "mapped to '', not to a file name"),
    ],
)
def test_bad_weight_maps(tmp_path: Path, weight_map: dict[str, Any], message: str) -> None:
    change_index(tmp_path, **weight_map)
    with pytest.raises(CheckpointError, match=message):
        CheckpointIndex.open(tmp_path)


def test_shards_by_two_spellings_are_one_file(tmp_path: Path) -> None:
    change_index(tmp_path, a="./s1.safetensors")
    index = CheckpointIndex.open(tmp_path)
    assert [f.name for f in index.files] == ["s1.safetensors", "s2.safetensors"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_bad_indexes(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        CheckpointIndex.open(tmp_path)


def test_one_tensor_in_two_shards(tmp_path: Path) -> None:
    sharded(tmp_path)
    save(tmp_path, "s2.safetensors", c=[4.0], a=[1.0])
    with pytest.raises(CheckpointError, match=r"a is both in s1.safetensors and in s2"):
        CheckpointIndex.open(tmp_path)


def test_a_truncated_shard(tmp_path: Path) -> None:
    sharded(tmp_path)
    size = (tmp_path / "s1.safetensors").stat().st_size
    os.truncate(tmp_path / "s1.safetensors", size - 5)
    with pytest.raises(
        CheckpointError, match=rf"s1.safetensors: truncated.*{size} bytes.*{size - 5}, 5 are"
    ):
        CheckpointIndex.open(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt"])
def test_pickles_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match=rf"pickled weights \({name}\).*save_pretrained"):
        CheckpointIndex.open(tmp_path)
    save(tmp_path, "model.safetensors", a=[1])
    assert "a" in CheckpointIndex.open(tmp_path).tensors


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no weights: .* download them"):
        CheckpointIndex.open(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        CheckpointIndex.open(tmp_path / "x")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is not a directory"):
        CheckpointIndex.open(tmp_path / "file")
    save(tmp_path, "model-00001-of-00002.safetensors", a=[1])
    with pytest.raises(CheckpointError, match=r"but model-00001.*download the index"):
        CheckpointIndex.open(tmp_path)
    with pytest.raises(CheckpointError, match="cannot read"):
        read_header(tmp_path)


def test_a_pack_without_its_manifest_is_not_called_pickled(tmp_path: Path) -> None:
    (tmp_path / "bundle-00001.bin").write_bytes(bytes(4096))
    with pytest.raises(CheckpointError, match=r"was a packed model, but its pack\.json is missing"):
        CheckpointIndex.open(tmp_path)
    (tmp_path / "pack.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"is a packed model, .* give the checkpoint"):
        CheckpointIndex.open(tmp_path)
    (tmp_path / "pack.journal").write_text("{}")
    with pytest.raises(CheckpointError, match="is an unfinished pack; run 'offload pack'"):
        CheckpointIndex.open(tmp_path)


def test_a_named_pipe_is_no_file_to_wait_for(tmp_path: Path) -> None:
    pipe = tmp_path / "model.safetensors"
    os.mkfifo(pipe)
    with pytest.raises(CheckpointError, match="0 bytes are too few for a safetensors file"):
        read_header(pipe)
