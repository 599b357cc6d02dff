"""GGUF headers: what the reference writes is read alike, what is damaged is named."""

from __future__ import annotations

import hashlib
import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import CheckpointError
from offload.io import gguf_header
from offload.io.gguf import GGUFTensor, read_gguf
from offload.io.gguf_types import BY_NAME, TYPES

U8, U32, I32, F32, BOOL, STR, ARR, U64 = 0, 4, 5, 6, 7, 8, 9, 10


def text(s: str | bytes) -> bytes:
    raw = s.encode() if isinstance(s, str) else s
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, code: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", code) + value


def u32(n: int) -> bytes:
    return struct.pack("<I", n)


def array(code: int, n: int, body: bytes) -> bytes:
    return struct.pack("<IQ", code, n) + body


def tensor(name: str, sizes: list[int], code: int = 0, offset: int = 0) -> bytes:
    """``sizes`` innermost first, as in the file."""
    n = len(sizes)
    return text(name) + struct.pack(f"<I{n}QIQ", n, *sizes, code, offset)


def raw(
    pairs: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: int = 0,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    pad: int = 32,
) -> bytes:
    pairs, tensors = pairs or [], tensors or []
    n_tensors, n_pairs = counts or (len(tensors), len(pairs))
    head = magic + struct.pack("<IQQ", version, n_tensors, n_pairs)
    head += b"".join(pairs) + b"".join(tensors)
    if tensors:
        head += bytes(-len(head) % pad)
    return head + bytes(data)


def test_values_of_every_type(tmp_path: Path) -> None:
    scalars: list[tuple[int, str, Any]] = [
        (0, "B", 255), (1, "b", -128), (2, "H", 65535), (3, "h", -32768), (4, "I", 2**32 - 1),
        (5, "i", -(2**31)), (6, "f", 0.5), (7, "?", True), (10, "Q", 2**64 - 1),
        (11, "q", -(2**63)), (12, "d", 1e300),
    ]  # fmt: skip
    pairs = [pair(f"s{c}", c, struct.pack("<" + k, v)) for c, k, v in scalars]
    pairs += [pair(f"a{c}", ARR, array(c, 2, struct.pack("<2" + k, v, v))) for c, k, v in scalars]
    pairs += [
        pair("text", STR, text("naïve")),
        pair("texts", ARR, array(STR, 2, text("a") + text(b"\xe4\xff"))),
        pair("nested", ARR, array(ARR, 2, array(U8, 1, b"\7") + array(STR, 0, b""))),
        pair("none", ARR, array(F32, 0, b"")),
    ]
    (tmp_path / "f").write_bytes(raw(pairs))
    got = read_gguf(tmp_path / "f").metadata
    for code, _, value in scalars:
        assert got[f"s{code}"] == value
        assert got[f"a{code}"] == [value, value]
        assert type(got[f"s{code}"]) is type(value)
    assert got["text"] == "naïve"
    assert got["texts"][1].encode("utf-8", "surrogateescape") == b"\xe4\xff"
    assert got["nested"] == [[7], []]
    assert got["none"] == []


def test_block_sizes_are_the_references() -> None:
    """The installed package may be older than the table, or know types that came after it."""
    newest = max(TYPES)
    for kind, (elements, nbytes) in gguf.GGML_QUANT_SIZES.items():
        if int(kind) <= newest:
            assert TYPES[int(kind)] == (kind.name.lower(), elements, nbytes)
    assert {t.name for t in TYPES.values()} - {k.name.lower() for k in gguf.GGML_QUANT_SIZES} <= {
        "mxfp4",
        "nvfp4",
        "q1_0",
    }
    assert BY_NAME["mxfp4"] == TYPES[39]


KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1]


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(
            st.sampled_from(KINDS), st.lists(st.integers(1, 3), max_size=3), st.integers(1, 3)
        ),
        max_size=5,
    ),
    alignment=st.sampled_from([None, 8, 64, 4096]),
    words=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), max_size=4),
)
def test_agrees_with_the_reference_writer(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[Kind, list[int], int]],
    alignment: int | None,
    words: list[str],
) -> None:
    path = tmp_path_factory.mktemp("gguf") / "f.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    if words:
        writer.add_token_list(words)
    rng = np.random.default_rng(0)
    written: dict[str, tuple[Kind, tuple[int, ...], bytes]] = {}
    for i, (kind, lead, blocks) in enumerate(shapes):
        shape = (*lead, blocks * 32)
        values = rng.standard_normal(shape, np.float32)
        stored = gguf.quants.quantize(values, kind)
        typed = stored if kind in (Kind.F32, Kind.F16) else stored.view(np.uint8)
        raw_dtype = None if kind in (Kind.F32, Kind.F16) else kind
        writer.add_tensor(f"t{i}", typed, raw_dtype=raw_dtype)
        written[f"t{i}"] = kind, shape, stored.tobytes()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    got = read_gguf(path)
    assert got.metadata["general.architecture"] == "llama"
    assert got.metadata.get("tokenizer.ggml.tokens", []) == words
    assert list(got.tensors) == list(written)
    for name, (kind, shape, content) in written.items():
        t = got.tensors[name]
        assert (t.type, t.shape, t.nbytes) == (kind.name.lower(), shape, len(content))
        assert t.offset % (alignment or 32) == 0
        assert got.read(name) == content


def test_shapes_are_row_major(tmp_path: Path) -> None:
    data = 2 * 3 * 18 * 2
    (tmp_path / "f").write_bytes(raw(tensors=[tensor("w", [64, 3, 2], 2)], data=data))
    got = read_gguf(tmp_path / "f")
    start = got.headers[0].data_start
    assert got.tensors == {"w": GGUFTensor("w", "q4_0", (2, 3, 64), start, data)}
    assert got.total_bytes == data


@pytest.mark.parametrize("code", TYPES)
def test_every_type(tmp_path: Path, code: int) -> None:
    kind = TYPES[code]
    n = 3 * 2 * kind.nbytes
    (tmp_path / "f").write_bytes(raw(tensors=[tensor("w", [2 * kind.elements, 3], code)], data=n))
    got = read_gguf(tmp_path / "f").tensors["w"]
    assert (got.type, got.shape, got.nbytes) == (kind.name, (3, 2 * kind.elements), n)


def test_version_2_and_no_tensors(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(raw([pair("a", U32, u32(1))], version=2))
    got = read_gguf(tmp_path / "f")
    assert (got.version, got.tensors, got.metadata) == (2, {}, {"a": 1})


def test_padding_behind_the_last_tensor(tmp_path: Path) -> None:
    for more in (0, 28):
        (tmp_path / "f").write_bytes(raw(tensors=[tensor("w", [1])], data=4 + more))
        assert read_gguf(tmp_path / "f").tensors["w"].nbytes == 4


W = tensor("w", [4])
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes are too few"),
    "short": (b"GGUF" + bytes(10), "14 bytes are too few"),
    "not gguf": (bytes(64), "not GGUF"),
    "html": (b"<!DOCTYPE html>" + bytes(64), "starts with b'<!DO'"),
    "ggml": (raw(magic=b"tjgg"), "before GGUF; convert"),
    "big-endian": (raw(version=3 << 24), "big-endian"),
    "version 1": (raw(version=1), "version 1 is not supported"),
    "version 4": (raw(version=4), "version 4 is not supported"),
    "many tensors": (raw(counts=(2**40, 0)), f"{2**40} tensors of at least 25 bytes"),
    "many pairs": (raw(counts=(0, 2**63)), f"{2**63} metadata pairs of at least 14 bytes"),
    "one pair short": (
        raw([pair("a", U32, u32(1)), pair("b", STR, text("x" * 30))], counts=(0, 3)),
        "truncated in its header: a metadata key at byte 92 takes 8 bytes",
    ),
    "key past the end": (raw([struct.pack("<Q", 99) + bytes(30)]), "takes 99 bytes, the file ends"),
    "a key of a damaged length": (
        raw([text("k" * 2000) + bytes(9)]),
        "a metadata key at byte 24 is 2000 bytes long, over the limit of 1024; the file is",
    ),
    "a name of a damaged length": (
        raw(tensors=[tensor("t" * 70_000, [32])], data=128),
        "the name of a tensor at byte 24 is 70000 bytes long, over the limit of 1024",
    ),
    "git-lfs": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "key of noise": (raw([pair("k", U8, b"1"), text(b"\xff\xfe") + bytes(9)]), "is not UTF-8"),
    "empty key": (raw([pair("", U64, bytes(8))]), "metadata key at byte 24 is empty"),
    "same key": (raw([pair("a", U32, u32(1))] * 2), "the key 'a' is there twice"),
    "value type": (raw([pair("a", 13, bytes(8))]), "value of a has the unknown type 13"),
    "array type": (raw([pair("a", ARR, array(77, 1, bytes(8)))]), "unknown type 77"),
    "truth": (raw([pair("a", BOOL, b"\2")]), "a is a truth of 2"),
    "truths": (raw([pair("a", ARR, array(BOOL, 3, b"\0\1\3"))]), "a is a truth of 3"),
    "long text": (raw([pair("a", STR, struct.pack("<Q", 2**40) + b"x")]), f"takes {2**40} bytes"),
    "long array": (raw([pair("a", ARR, array(U8, 2**50, b"x"))]), "over the limit of 8388608"),
    "long arrays together": (
        raw([pair("a", ARR, array(U8, 2**22, bytes(2**22))),
             pair("b", ARR, array(U8, 2**22 + 1, bytes(2**22 + 1)))]),
        "b has 4194305 elements and the arrays before it 4194304, over the limit of 8388608",
    ),
    "short array": (raw([pair("a", ARR, array(U64, 9, bytes(8)))]), "array a at .* takes 72 bytes"),
    "texts": (raw([pair("a", ARR, array(STR, 9, text("x")))]), "9 elements of at least 8 bytes, 9"),
    "deep": (
        raw([pair("a", ARR, array(ARR, 1, b"") * 9 + array(U8, 0, b""))]),
        "array a is nested more than 4 deep",
    ),
    "alignment 0": (raw([pair("general.alignment", U32, u32(0))]), "alignment is 0, not a power"),
    "alignment 24": (raw([pair("general.alignment", U32, u32(24))]), "is 24, not a power of two"),
    "alignment text": (raw([pair("general.alignment", STR, text("32"))]), "is '32', not a power"),
    "dimensions": (raw(tensors=[tensor("w", [1] * 5)], data=32), "5 dimensions, at most 4"),
    "unknown type": (
        raw(tensors=[tensor("w", [4], 99)], data=16),
        "tensor w has the unknown GGML type 99; known are F32, F16",
    ),
    "removed type": (raw(tensors=[tensor("w", [32], 31)], data=32), r"type Q4_0_4_4 \(31\)"),
    "half a block": (raw(tensors=[tensor("w", [48, 2], 2)], data=64), "rows of 48 values are not"),
    "half a superblock": (raw(tensors=[tensor("w", [32], 12)], data=64), "blocks of 256, as Q4_K"),
    "crooked": (raw(tensors=[tensor("w", [4], 0, 8)], data=64), "offset 8, not a multiple of 32"),
    "same tensor": (raw(tensors=[W, tensor("w", [4], 0, 32)], data=48), "tensor w is there twice"),
    "no name": (raw(tensors=[tensor("", [4])], data=32), "name of a tensor at byte 24 is empty"),
    "same place": (raw(tensors=[W, tensor("v", [4])], data=48), "inside tensor"),
    "overlap": (
        raw(tensors=[tensor("v", [16]), tensor("w", [4], 0, 32)], data=64),
        "tensor w starts at byte 128, inside tensor v, which ends at 160",
    ),
    "hole": (
        raw(tensors=[W, tensor("v", [4], 0, 64)], data=80),
        r"a hole of 48 bytes between tensor w \(to 112\) and tensor v \(from 160\)",
    ),
    "hole at the start": (raw(tensors=[tensor("w", [4], 0, 32)], data=48), "a hole of 32 bytes"),
    "truncated": (
        raw(tensors=[tensor("w", [100])], data=300),
        "truncated: its header promises 464 bytes, the file has 364, 100 are missing",
    ),
    "huge": (raw(tensors=[tensor("w", [2**63, 2**63])], data=16), "truncated: .* are missing"),
    "trailing": (raw(tensors=[W], data=60), "44 bytes behind tensor w"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_headers(tmp_path: Path, what: str) -> None:
    content, message = BAD[what]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)


def test_a_header_over_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "MAX_HEADER_BYTES", 64)
    (tmp_path / "f").write_bytes(raw([pair("a", STR, text("x" * 100))]))
    with pytest.raises(CheckpointError, match="takes 100 bytes, over the limit of 64 for a header"):
        read_gguf(tmp_path / "f")


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*none.gguf: No such file"):
        read_gguf(tmp_path / "none.gguf")
    with pytest.raises(CheckpointError, match="Is a directory"):
        read_gguf(tmp_path)


def whole() -> bytes:
    """A file with every kind of part of a header."""
    pairs = [
        pair("general.architecture", STR, text("llama")),
        pair("l", ARR, array(STR, 2, text("ab") + text("c"))),
        pair("n", ARR, array(I32, 3, struct.pack("<3i", 1, 2, 3))),
        pair("b", BOOL, b"\1"),
    ]
    return raw(pairs, [tensor("v", [32, 2], 8), tensor("w", [4], 0, 96)], data=96 + 16)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_noise_is_refused_or_sound(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """A flipped byte anywhere in a header: an error, or ranges that are still inside the file."""
    path = tmp_path_factory.mktemp("gguf") / "f"
    body = bytearray(whole())
    body[data.draw(st.integers(0, len(body) - 113))] = data.draw(st.integers(0, 255))
    path.write_bytes(body)
    try:
        got = read_gguf(path)
    except CheckpointError:
        return
    for t in got.tensors.values():
        assert got.headers[0].data_start <= t.offset <= t.offset + t.nbytes <= len(body)


def test_cut_anywhere(tmp_path: Path) -> None:
    body = whole()
    path = tmp_path / "f"
    for n in range(len(body)):
        path.write_bytes(body[:n])
        with pytest.raises(CheckpointError, match=r"truncated|too few|do not fit|are left"):
            read_gguf(path)


# Split files


def split(folder: Path, names: list[list[str]]) -> list[Path]:
    total = sum(len(part) for part in names)
    paths = []
    for i, part in enumerate(names):
        pairs = [
            pair("split.no", 2, struct.pack("<H", i)),
            pair("split.count", 2, struct.pack("<H", len(names))),
            pair("split.tensors.count", I32, struct.pack("<i", total)),
        ]
        if i == 0:
            pairs.append(pair("general.architecture", STR, text("llama")))
        infos = [tensor(name, [4], 0, 32 * k) for k, name in enumerate(part)]
        paths.append(folder / f"m-{i + 1:05d}-of-{len(names):05d}.gguf")
        paths[-1].write_bytes(raw(pairs, infos, data=32 * len(part)))
    return paths


def test_the_digest_is_that_of_the_bytes_however_many_texts_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = raw([pair("a", ARR, array(STR, 9, b"".join(text("x" * i) for i in range(9))))])
    (tmp_path / "f").write_bytes(content)
    for together in (2, 7, 2**16):
        monkeypatch.setattr(gguf_header, "_HASHED_TOGETHER", together)
        (header,) = read_gguf(tmp_path / "f").headers
        assert header.digest == hashlib.sha256(content).hexdigest()


def test_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*/xxx.*: File name too long"):
        read_gguf(tmp_path / f"{'x' * 5000}.gguf")


def test_split_by_any_part(tmp_path: Path) -> None:
    paths = split(tmp_path, [[], ["a", "b"], ["c"]])
    for path in paths:
        got = read_gguf(path)
        assert got.files == tuple(paths)
        assert {n: t.file for n, t in got.tensors.items()} == {"a": 1, "b": 1, "c": 2}
        assert got.metadata["general.architecture"] == "llama"
        assert got.read("c") == bytes(16)


def test_split_by_the_reference_writer(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=2)
    for i in range(5):
        writer.add_tensor(f"t{i}", np.full(4, i, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    got = read_gguf(tmp_path / "m-00001-of-00003.gguf")
    assert len(got.files) == 3
    for i in range(5):
        assert got.read(f"t{i}") == np.full(4, i, np.float32).tobytes()


def test_split_faults(tmp_path: Path) -> None:
    def refused(path: Path, message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            read_gguf(path)

    paths = split(tmp_path, [["a"], ["b"], ["c"]])
    saved = [p.read_bytes() for p in paths]
    paths[1].unlink()
    refused(paths[0], re.escape("1 of the 3 parts of this GGUF are missing, m-00002-of-00003.gguf"))
    paths[1].write_bytes(saved[2])
    refused(paths[0], r"m-00002-of-00003.gguf: its split.no is 2, by its name it is 1")
    paths[1].write_bytes(raw([pair("a", U32, u32(1))]))
    refused(paths[0], "m-00002.*its split.count is 0, by its name there are 3")
    paths[1].write_bytes(saved[1][:-20])
    refused(paths[0], "m-00002.*truncated")
    other = [
        pair("general.architecture", STR, text("qwen3")),
        pair("split.no", 2, struct.pack("<H", 1)),
        pair("split.count", 2, struct.pack("<H", 3)),
    ]
    paths[1].write_bytes(raw(other, [tensor("b", [4])], data=32))
    refused(
        paths[0], "m-00002.*of the architecture 'qwen3', the first part of 'llama': .*different"
    )
    alone = tmp_path / "renamed.gguf"
    alone.write_bytes(saved[0])
    refused(alone, r"it is one of 3 parts; .*-00001-of-00003.gguf")
    (tmp_path / "m-00004-of-00003.gguf").write_bytes(saved[0])
    refused(tmp_path / "m-00004-of-00003.gguf", "part 4 of 3 cannot be")
    split(tmp_path, [["a"], ["a"]])
    refused(tmp_path / "m-00001-of-00002.gguf", "tensor a is both in m-00001-of-00002")
    split(tmp_path, [["a"], ["b"]])
    one = tmp_path / "m-00001-of-00002.gguf"
    one.write_bytes(
        one.read_bytes().replace(
            text("split.tensors.count") + u32(I32) + u32(2),
            text("split.tensors.count") + u32(I32) + u32(5),
        )
    )
    refused(one, "split.tensors.count is 5, the 2 parts have 2")


def test_fingerprint_changes_with_the_file(tmp_path: Path) -> None:
    import os

    path = tmp_path / "f"
    path.write_bytes(whole())
    before = read_gguf(path).fingerprint()
    assert read_gguf(path).fingerprint() == before
    os.utime(path, ns=(1, 1))
    assert read_gguf(path).fingerprint() != before


def test_read_of_what_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(whole())
    got = read_gguf(path)
    with pytest.raises(CheckpointError, match="there is no tensor x"):
        got.read("x")
    path.write_bytes(whole()[:-10])
    with pytest.raises(CheckpointError, match="tensor w: 6 of 16 bytes could be read"):
        got.read("w")
