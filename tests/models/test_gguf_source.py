"""Packs of GGUF files against the models that transformers makes of the same files."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf_cases import CASES, tiny
from gguf_fixtures import write_gguf
from gguf_support import load_model
from pack_support import expert_of, found_in, open_pack, value_of

from offload.cpu_ops.formats import FORMATS, get_format
from offload.cpu_ops.packing import unpack_rows
from offload.errors import CheckpointError, OffloadError, StoreError, UnsupportedModelError
from offload.io.gguf import GGUFFile, read_gguf
from offload.io.gguf_types import BY_NAME
from offload.io.pack_manifest import Kind, Layout
from offload.io.source_files import SourceFiles
from offload.models import gguf_places, pack_convert
from offload.models.gguf_config import config_from_gguf
from offload.models.gguf_names import entries_from_gguf
from offload.models.gguf_requant import REQUANTISED, require_kernels
from offload.models.gguf_source import GgufSource
from offload.models.pack_cache import packed as packed_in_cache
from offload.models.pack_open import open_source
from offload.models.pack_plan import plan_pack
from offload.models.pack_run import pack


def packed(file: Path, out: Path, quant: str = "none", **how: Any) -> Any:
    source = GgufSource.open(file, **how)
    try:
        pack(source, out, quant=quant)
    finally:
        source.close()
    return open_pack(out)


def model_of(directory: Path, file: GGUFFile) -> dict[str, Any]:
    """What transformers makes of the file's values."""
    config = config_from_gguf(file)
    return found_in(load_model(directory, file, config, entries_from_gguf(file, config)))


def compare(tmp_path: Path, file: Path) -> tuple[Any, dict[str, bytes]]:
    """Pack, and compare every value with the model's."""
    model, blocks = packed(file, tmp_path / "p")
    found = model_of(tmp_path / "hf", read_gguf(file))
    seen = set()
    for name, located in model.tensors.items():
        value = value_of(located.part, blocks[located.block.name])
        np.testing.assert_array_equal(value, found["state"][name], name)
        seen.add(name)
    for name, group in model.experts.items():
        for part in group.parts:
            for e, block in enumerate(group.blocks):
                want = expert_of(found, name, part.name, e)
                np.testing.assert_array_equal(value_of(part, blocks[block]), want, block)
        seen |= {k for k in found["state"] if k.startswith(f"{name}.")}
    assert seen == set(found["state"])
    assert not model.manifest.errors
    return model, blocks


def formats(model: Any) -> dict[str, set[str]]:
    """The formats of the parts that are no biases, by kind of block."""
    out: dict[str, set[str]] = {}
    for block in model.manifest.blocks:
        mine = {part.format for part in block.parts if not part.name.endswith("_bias")}
        out.setdefault(block.kind.value, set()).update(mine)
    return out


# Every architecture


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_every_value_of_the_model(tmp_path: Path, case: str) -> None:
    family, overrides, how = CASES[case]
    file = write_gguf(tmp_path / "m.gguf", tiny(family, **overrides), **how)
    model, _ = compare(tmp_path, file)
    assert not model.manifest.converted
    assert model.manifest.source.kind == "gguf"
    assert model.manifest.model["model_type"] == tiny(family, **overrides).config.model_type


WIDE = {
    "llama": {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64},
    "mixtral": {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64},
    "qwen3_moe": {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64},
    "gpt_oss": {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64},
}
KEPT = [
    Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.IQ4_NL,
    Type.MXFP4, Type.Q4_K, Type.Q5_K, Type.Q6_K,
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KEPT, ids=lambda k: k.name)
@pytest.mark.parametrize("family", WIDE)
def test_quantised_rows_keep_their_bits(tmp_path: Path, family: str, kind: Type) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny(family, **WIDE[family]), kind)
    model, blocks = compare(tmp_path, file)
    name = kind.name.lower()
    assert not model.manifest.converted
    found = formats(model)
    assert {found["matrix"].pop(), found["head"].pop()} == {name}
    assert "expert" not in found or found["expert"] == {name}
    # Bits too, of tensors whose rows are in the model's order.
    stored = read_gguf(file)
    for theirs, ours in (
        ("output.weight", "lm_head.weight"),
        ("blk.1.attn_output.weight", "model.layers.1.self_attn.o_proj.weight"),
    ):
        located = model.tensors[ours]
        part, data = located.part, blocks[located.block.name]
        raw = np.frombuffer(data[part.offset : part.offset + part.nbytes], np.uint8)
        rows = unpack_rows(get_format(name), raw, *part.shape)
        assert rows.tobytes() == stored.read(theirs)
    table = model.tensors["model.embed_tokens.weight"]
    raw = blocks[table.block.name][table.part.offset :][: table.part.nbytes]
    assert raw == stored.read("token_embd.weight")
    layout = Layout.PLAIN if kind in (Type.F16, Type.BF16) else Layout.ROWS
    assert table.part.layout is layout


def test_experts_bits_of_a_stack(tmp_path: Path) -> None:
    """Expert ``e`` of a packed layer is slice ``e`` of the stored stack, whatever transformers
    does to it: here it fuses gate and up, and wants them transposed and interleaved."""
    file = write_gguf(
        tmp_path / "m.gguf", tiny("gpt_oss", **WIDE["gpt_oss"]), kinds={"_exps.weight": Type.MXFP4}
    )
    model, blocks = packed(file, tmp_path / "p")
    stored = read_gguf(file)
    for layer in range(2):
        group = model.experts[f"model.layers.{layer}.mlp.experts"]
        for name in ("gate", "up", "down"):
            part = group.part(name)
            assert part.format == "mxfp4"
            raw = stored.read(f"blk.{layer}.ffn_{name}_exps.weight")
            each = len(raw) // len(group.blocks)
            for e, block in enumerate(group.blocks):
                data = np.frombuffer(blocks[block][part.offset :][: part.nbytes], np.uint8)
                rows = unpack_rows(get_format("mxfp4"), data, *part.shape)
                assert rows.tobytes() == raw[e * each : (e + 1) * each]


@pytest.mark.parametrize("split", [False, True])
def test_a_matrix_in_two_parts_becomes_float(tmp_path: Path, split: bool) -> None:
    sizes = {"hidden_size": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    model = tiny("deepseek_v3", **sizes)
    file = write_gguf(tmp_path / "m.gguf", model, Type.Q8_0, split_kv_b=split)
    got, _ = compare(tmp_path, file)
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    part = got.tensors[name].part
    assert part.layout is Layout.PACKED
    assert part.format == ("f32" if split else "q8_0")
    why = {n: w for n, w in got.manifest.converted.items() if "kv_b" in n}
    want = "its rows are not rows of the file: q8_0 became f32"
    assert why == ({f"model.layers.{i}.self_attn.kv_b_proj.weight": want for i in range(4)}
                   if split else {})  # fmt: skip


def test_parts_of_one_float_type_keep_it(tmp_path: Path) -> None:
    model = tiny("deepseek_v2", q_lora_rank=None)
    file = write_gguf(tmp_path / "m.gguf", model, Type.BF16, split_kv_b=True)
    got, _ = compare(tmp_path, file)
    assert got.tensors["model.layers.1.self_attn.kv_b_proj.weight"].part.format == "bf16"
    assert not got.manifest.converted


def test_a_quantised_router_becomes_float(tmp_path: Path) -> None:
    file = write_gguf(
        tmp_path / "m.gguf", tiny("mixtral"), kinds={"ffn_gate_inp.weight": Type.Q8_0}
    )
    got, _ = compare(tmp_path, file)
    gates = {n: t.part for n, t in got.tensors.items() if n.endswith("mlp.gate.weight")}
    assert {p.format for p in gates.values()} == {"float32"}
    assert got.manifest.converted == dict.fromkeys(gates, "it is not a matrix: q8_0 became f32")


def test_chunks_of_permuted_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk may end inside of a head, and a joined matrix inside of a part."""
    for family, how in (("llama", {}), ("deepseek_v3", {"split_kv_b": True})):
        file = write_gguf(tmp_path / f"{family}.gguf", tiny(family), **how)
        _, whole = packed(file, tmp_path / f"{family}-whole")
        monkeypatch.setattr(pack_convert, "CHUNK_ELEMENTS", 1024)
        _, cut = packed(file, tmp_path / f"{family}-cut")
        monkeypatch.undo()
        assert whole == cut


# Requantising


def test_floats_can_be_quantised(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny("qwen3_moe"), Type.F16)
    model, _ = packed(file, tmp_path / "p", "q4")
    found = formats(model)
    assert found["expert"] == found["matrix"] == {"q4_0"}
    assert found["head"] == found["rows"] == {"q8_0"}
    assert set(model.manifest.errors) == {"expert", "matrix", "head", "rows"}


def test_what_is_quantised_is_not_quantised_again(tmp_path: Path) -> None:
    source = GgufSource.open(write_gguf(tmp_path / "m.gguf", tiny("qwen3_moe"), Type.Q5_0))
    with pytest.raises(
        OffloadError, match=r"quantised already .* in q5_0, q4 would .*--quant none"
    ):
        plan_pack(source, "q4")
    source.close()


NO_KERNELS = [Type.Q2_K, Type.Q3_K, Type.IQ2_XXS, Type.IQ3_S, Type.IQ4_XS, Type.TQ2_0]
NO_KERNELS += [Type[name] for name in ("NVFP4",) if name in Type.__members__]  # gguf 0.19


@pytest.mark.parametrize("kind", NO_KERNELS, ids=lambda k: k.name)
def test_types_without_kernels(tmp_path: Path, kind: Type) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny("qwen3_moe", **WIDE["qwen3_moe"]), kind)
    # Embedding and head; q, k, v, o and three stacks of experts in each of 4 layers.
    with pytest.raises(OffloadError, match=rf"30 tensors are .* \(30 in {kind.name}\).*--allow-re"):
        GgufSource.open(file)
    model, blocks = packed(file, tmp_path / "p", allow_requant=True)
    found = formats(model)
    assert found["expert"] == found["matrix"] == {"q4_0"}
    assert found["head"] == found["rows"] == {"q8_0"}
    name = kind.name.lower()
    notes = model.manifest.converted
    assert notes["lm_head.weight"] == f"{name}, which has no kernels, became q8_0"
    assert notes["model.layers.3.mlp.experts.up"] == f"{name}, which has no kernels, became q4_0"
    errors = model.manifest.errors
    assert set(errors) == {"expert", "matrix", "head", "rows"}
    assert 0 < errors["head"].relative_rms < 0.01
    # What TQ2_0 can say, Q4_0 can: three values, a multiple of one scale.
    assert 0 <= errors["expert"].relative_rms < 0.15
    assert (errors["expert"].relative_rms == 0) == (kind is Type.TQ2_0)
    want = model_of(tmp_path / "hf", read_gguf(file))["state"]["lm_head.weight"]
    head = model.tensors["lm_head.weight"]
    got = value_of(head.part, blocks[head.block.name])
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert errors["head"].relative_rms == pytest.approx(error, rel=0.1)


def test_every_type_has_kernels_or_values_or_an_error() -> None:
    known = {kind.name.lower() for kind in gguf.quants._type_traits}
    # A type younger than the package here (NVFP4 came with 0.19) is refused by name.
    assert known & BY_NAME.keys() - FORMATS.keys() | {"nvfp4"} == REQUANTISED
    # What is left is no type of weights (integers, float64, intermediate results), or one whose
    # values the package does not have yet (Q1_0).
    assert BY_NAME.keys() - REQUANTISED - FORMATS.keys() == {
        "f64", "i8", "i16", "i32", "i64", "q8_1", "q8_k", "q1_0",
    }  # fmt: skip


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(
        tmp_path / "m.gguf",
        tiny("qwen3_moe", **WIDE["qwen3_moe"]),
        kinds={"ffn_up_exps.weight": Type.Q2_K},
    )
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(OffloadError, match=r"4 tensors .*\(4 in Q2_K\)"):
        GgufSource.open(file)
    with pytest.raises(OffloadError, match=r"needs the gguf package .*pip install 'gguf>=0.17'"):
        GgufSource.open(file, allow_requant=True)


def test_a_package_older_than_the_type(monkeypatch: pytest.MonkeyPatch) -> None:
    older = SimpleNamespace(GGMLQuantizationType=[kind for kind in Type if kind != Type.Q2_K])
    monkeypatch.setitem(sys.modules, "gguf", older)
    require_kernels(["q3_k", "q4_0"], "m.gguf", allow_requant=True)
    with pytest.raises(OffloadError, match=r"does not know Q2_K yet; .*pip install -U gguf"):
        require_kernels(["q2_k", "q4_0"], "m.gguf", allow_requant=True)


def test_a_type_that_nobody_has(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny("qwen3_moe"), kinds={"attn_q.weight": Type.F16})
    opened = read_gguf(file)
    tensors = {n: t._replace(type="i16") if t.type == "f16" else t
               for n, t in opened.tensors.items()}  # fmt: skip
    object.__setattr__(opened, "tensors", tensors)
    with pytest.raises(OffloadError, match=r"\(4 in I16\), and I16 cannot be converted either"):
        GgufSource(opened, allow_requant=True)


def test_plain_tensors_without_kernels(tmp_path: Path) -> None:
    model = tiny("qwen3_moe", **WIDE["qwen3_moe"])
    file = write_gguf(tmp_path / "m.gguf", model, kinds={"ffn_gate_inp.weight": Type.Q3_K})
    got, blocks = packed(file, tmp_path / "p", allow_requant=True)
    stored = read_gguf(file)
    for i in range(4):
        located = got.tensors[f"model.layers.{i}.mlp.gate.weight"]
        value = value_of(located.part, blocks[located.block.name])
        raw = np.frombuffer(stored.read(f"blk.{i}.ffn_gate_inp.weight"), np.uint8)
        want = gguf.quants.dequantize(raw.reshape(len(value), -1), Type.Q3_K)
        np.testing.assert_array_equal(value, want)


# What is wrong with a file


def damage(file: Path, tensor: str, at: int, data: bytes) -> None:
    offset = read_gguf(file).tensors[tensor].offset + at
    stat = file.stat()
    with open(file, "r+b") as f:
        f.seek(offset)
        f.write(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


NAN = np.array([np.nan], np.float16).tobytes()


@pytest.mark.parametrize(
    ("kind", "tensor", "at", "data"),
    [
        (Type.Q4_0, "blk.2.ffn_down_exps.weight", 18 * 40, NAN),
        (Type.Q4_K, "output.weight", 144 * 7 + 2, np.array([np.inf], np.float16).tobytes()),
        (Type.MXFP4, "blk.1.ffn_up_exps.weight", 17 * 9, b"\xff"),
        (Type.Q8_0, "token_embd.weight", 34, NAN),
        (Type.Q2_K, "blk.0.attn_k.weight", 80, NAN),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_scales_that_are_no_numbers(
    tmp_path: Path, kind: Type, tensor: str, at: int, data: bytes
) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny("qwen3_moe", **WIDE["qwen3_moe"]), kind)
    damage(file, tensor, at, data)
    named = "self_attn.k_proj" if kind is Type.Q2_K else f"tensor {tensor}"
    with pytest.raises(CheckpointError, match=rf"{named}.*NaN or infinite.*damaged"):
        packed(file, tmp_path / "p", allow_requant=True)


def test_a_router_that_is_no_number(tmp_path: Path) -> None:
    for name, kind, at in (("q", Type.Q8_0, 0), ("k", Type.Q3_K, 108)):
        file = write_gguf(
            tmp_path / f"{name}.gguf",
            tiny("qwen3_moe", **WIDE["qwen3_moe"]),
            kinds={"ffn_gate_inp.weight": kind},
        )
        damage(file, "blk.3.ffn_gate_inp.weight", at, NAN)
        with pytest.raises(CheckpointError, match=r"tensor blk.3.ffn_gate_inp.weight.*NaN or inf"):
            packed(file, tmp_path / name, allow_requant=True)


def test_experts_in_different_types(tmp_path: Path) -> None:
    """A file of 2023 has one tensor per expert, and could mix them."""
    model = tiny("mixtral")
    shapes = {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}
    zero = {
        f"blk.{i}.ffn_{part}.{e}.weight": torch.zeros(shape)
        for i in range(4)
        for e in range(4)
        for part, shape in shapes.items()
    }
    file = read_gguf(
        write_gguf(
            tmp_path / "m.gguf", model, extra=zero, kinds={"blk.2.ffn_up.3.weight": Type.Q4_0}
        )
    )
    tensors = {n: t for n, t in file.tensors.items() if "_exps" not in n}
    object.__setattr__(file, "tensors", tensors)
    with pytest.raises(UnsupportedModelError, match=r"layers.2.*up.* in f32, q4_0"):
        GgufSource(file)


def test_parameters_that_are_no_rows_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another version of transformers fuses what it does not today."""
    file = write_gguf(tmp_path / "m.gguf", tiny("gpt_oss"))
    monkeypatch.setattr(gguf_places, "_outputs", lambda entry: range(0))
    with pytest.raises(UnsupportedModelError, match=r"expert 0 of it is in 0 pieces"):
        GgufSource.open(file)


def test_other_weights_with_the_same_times(tmp_path: Path) -> None:
    """As archives, images and copies have them; the header says nothing of them."""
    file = write_gguf(tmp_path / "m.gguf", tiny("qwen3"))
    first = read_gguf(file)
    os.utime(file, ns=(1, 1))
    source = GgufSource.open(file)
    before = source.id.fingerprint
    source.close()
    raw = bytearray(file.read_bytes())
    for tensor in first.tensors.values():
        raw[tensor.offset : tensor.offset + tensor.nbytes] = bytes(tensor.nbytes)
    file.write_bytes(raw)
    os.utime(file, ns=(1, 1))
    source = GgufSource.open(file)
    assert source.id.fingerprint != before
    source.close()


def test_a_file_that_changes(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny("qwen3"))
    source = GgufSource.open(file)
    os.utime(file, ns=(1, 1))
    with pytest.raises(CheckpointError, match="was changed while it was being packed"):
        pack(source, tmp_path / "p")
    source.close()
    other = GgufSource.open(file)
    assert other.id.fingerprint != source.id.fingerprint
    with pytest.raises(StoreError, match=r"is an unfinished pack of .* wanted is"):
        pack(other, tmp_path / "p")
    other.close()


def test_a_file_that_is_cut(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny("qwen3"))
    source = GgufSource.open(file)
    size = file.stat().st_size
    os.truncate(file, size - 4096)
    with pytest.raises(CheckpointError, match="more bytes were wanted; it was cut while in use"):
        pack(source, tmp_path / "p")
    source.close()
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        GgufSource.open(file)


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match=r"cannot open .*/none"):
        SourceFiles([tmp_path / "a", tmp_path / "none"])
    files = SourceFiles([tmp_path / "a"])
    out = bytearray(2)
    files.read_into(0, 1, memoryview(out))
    assert out == b"bc"
    files.close()
    files.close()


# Which source


def test_what_is_a_gguf_file(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny("qwen3"))
    plain = file.rename(tmp_path / "model.bin")
    source = open_source(plain)
    assert source.id.kind == "gguf"
    source.close()
    with pytest.raises(CheckpointError, match=r"cannot read .*m\.gguf: No such file"):
        open_source(file)
    with pytest.raises(OffloadError, match="--allow-requant is for GGUF files"):
        open_source(tmp_path, allow_requant=True)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(OffloadError, match="is a file; give the directory"):
        open_source(tmp_path / "text")


def test_a_file_that_is_meant_to_be_greedy(tmp_path: Path) -> None:
    """transformers does not save a top-k beside greedy decoding; a file may have both."""
    example = Path(__file__).parents[2] / "examples" / "tiny_moe"
    model = tiny("qwen3_moe", vocab_size=2048)
    file = read_gguf(write_gguf(tmp_path / "m.gguf", model, tokenizer=(example, "gpt-2")))
    wish = {"general.sampling.temp": 0.0, "general.sampling.top_k": 20}
    source = GgufSource(replace(file, metadata=file.metadata | wish))
    settings = json.loads(source.extras()["generation_config.json"])
    source.close()
    assert settings["top_k"] == 20
    assert not settings.get("do_sample")
    assert "temperature" not in settings


def test_no_place_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = GgufSource.open(write_gguf(tmp_path / "m.gguf", tiny("qwen3")))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(StoreError, match="No such file or directory; set TMPDIR to"):
        source.extras()
    source.close()


def test_a_split_file_by_any_part(tmp_path: Path) -> None:
    model = tiny("qwen3_moe")
    whole = write_gguf(tmp_path / "m.gguf", model, Type.Q8_0)
    write_gguf(tmp_path / "s.gguf", model, Type.Q8_0, split_max_tensors=12)
    parts = sorted(tmp_path.glob("s-*.gguf"))
    assert len(parts) > 2
    source = GgufSource.open(parts[1])
    assert [name for name, *_ in source.id.files] == [part.name for part in parts]
    source.close()
    assert packed(parts[1], tmp_path / "a")[1] == packed(whole, tmp_path / "b")[1]


def test_the_cached_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "m.gguf", tiny("qwen3_moe"), Type.Q4_0)
    told: list[Path] = []
    for _ in range(2):
        source = GgufSource.open(file)
        model = packed_in_cache(source, "none", announce=told.append)
        source.close()
        assert model.manifest.quant == "none"
        assert len(model.blocks(Kind.EXPERT)) == 16
    assert len(told) == 1
