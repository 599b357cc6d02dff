"""Packing as a process: resumed, killed, twice at once, within its memory, exact."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import tiny_config, write
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_support import ArraySource, open_pack, read_all, small_source, value_of
from safetensors.torch import load_file, save_file

from offload.blocks import ALIGN, TENSOR_ALIGN
from offload.cpu_ops.codecs import encode_rows
from offload.cpu_ops.formats import get_format
from offload.errors import CheckpointError, OffloadError, StoreError
from offload.io.pack_manifest import Kind, Layout, is_pack
from offload.models import pack_convert
from offload.models.pack_cache import pack_cache_dir, packed
from offload.models.pack_checkpoint import CheckpointSource
from offload.models.pack_kernels import encode
from offload.models.pack_plan import plan_pack
from offload.models.pack_reader import PackedModel
from offload.models.pack_run import PackProgress, pack
from offload.models.pack_source import Tensor, as_float32
from offload.models.pack_synth import SynthSource

# Kernels


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([1e-38, 1e-20, 1e-6, 1.0, 300.0]),
    source=st.sampled_from(["f32", "f16", "bf16"]),
    format=st.sampled_from(["q4_0", "q8_0"]),
    special=st.sampled_from(["normal", "zeros", "ties", "sparse"]),
)
def test_the_kernels_are_the_reference_to_the_bit(
    seed: int, scale: float, source: str, format: str, special: str
) -> None:
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((5, 96)).astype(np.float32)
    if special == "zeros":
        x[:, :64] = 0
        x[1, 3] = -0.0
    elif special == "ties":  # the same magnitude with both signs, in either order
        x = np.sign(x).astype(np.float32)
    elif special == "sparse":
        x *= draw.random(x.shape) < 0.05
    x *= np.float32(scale)
    rows = encode_rows(get_format(source), x)
    weights = as_float32(source, rows).reshape(5, 96)
    want = encode_rows(get_format(format), weights, search=format == "q4_0")
    np.testing.assert_array_equal(encode(get_format(format), source, rows, "w"), want)


@pytest.mark.parametrize("format", ["q4_0", "q8_0"])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf, 3e38])
def test_weights_without_a_scale_are_refused(format: str, value: float) -> None:
    x = np.ones((3, 64), np.float32)
    x[2, 63] = value
    with pytest.raises(CheckpointError, match=r"^w has (NaN or infinite|weights up to)"):
        encode(get_format(format), "f32", x.view(np.uint8), "w")


def test_a_search_takes_rows_of_any_length() -> None:
    """Blocks are searched 64 at a time, across rows: fewer, exactly and more than so many."""
    format, draw = get_format("q4_0"), np.random.default_rng(0)
    for rows, columns in ((1, 32), (2, 1024), (3, 704), (1, 4128)):
        x = draw.standard_normal((rows, columns)).astype(np.float32)
        found = encode(format, "f32", x.view(np.uint8), "w")
        np.testing.assert_array_equal(found, encode_rows(format, x, search=True))


# Plans


def test_experts_of_a_layer_are_laid_out_alike() -> None:
    plan = plan_pack(small_source(), "q4")
    experts = [b for b in plan.manifest.blocks if b.kind is Kind.EXPERT]
    assert len(experts) == 6
    assert len({b.parts for b in experts}) == 1
    assert [p.name for p in experts[0].parts] == ["gate", "up", "down"]
    for block in plan.manifest.blocks:
        assert block.offset % ALIGN == 0
        end = 0
        for part in block.parts:
            assert part.offset % TENSOR_ALIGN == 0
            assert end <= part.offset < end + TENSOR_ALIGN
            end = part.offset + part.nbytes
        assert block.nbytes == end


@pytest.mark.parametrize("bundle_bytes", [1, 20000, 2**30])
def test_bundles_are_bounded(tmp_path: Path, bundle_bytes: int) -> None:
    plan = plan_pack(small_source(), "q4", bundle_bytes=bundle_bytes)
    for number, nbytes in enumerate(plan.manifest.files):
        inside = [b for b in plan.manifest.blocks if b.file == number]
        assert nbytes <= bundle_bytes or len(inside) == 1
    report = pack(small_source(), tmp_path / "p", quant="q4", bundle_bytes=bundle_bytes)
    assert len(report.manifest.files) == len(plan.manifest.files)
    whole = pack(small_source(), tmp_path / "w", quant="q4")
    assert read_all(PackedModel.open(tmp_path / "p")) == read_all(PackedModel.open(whole.path))


def test_columns_that_no_block_divides_stay(tmp_path: Path) -> None:
    source = small_source(inner=40)  # columns of "down"; 40 is no multiple of 32
    pack(source, tmp_path / "p", quant="q4")
    model, blocks = open_pack(tmp_path / "p")
    group = model.experts["layers.0.experts"]
    assert (group.part("gate").format, group.part("down").format) == ("q4_0", "f32")
    why = model.manifest.kept["layers.0.experts.down"]
    assert why == "40 columns are not a multiple of 32"
    for e, block in enumerate(group.blocks):
        value = value_of(group.part("down"), blocks[block])
        np.testing.assert_array_equal(value, source.arrays["layers.0.experts.down"][e])


def test_what_is_quantised_keeps_its_bits_or_is_refused(tmp_path: Path) -> None:
    """A source may give GGUF rows: a GGUF file does."""

    class Quantised(ArraySource):
        def format_of(self, tensor: Tensor) -> str:
            return "q4_0" if tensor.kind is Kind.MATRIX else "f32"

        def rows(self, tensor: Tensor, expert: int | None, start: int, stop: int) -> Any:
            rows = super().rows(tensor, expert, start, stop)
            if tensor.kind is not Kind.MATRIX:
                return rows
            return encode_rows(get_format("q4_0"), as_float32("f32", rows), search=True)

    source = Quantised(list(small_source().outline.items), small_source().arrays)
    pack(source, tmp_path / "kept", quant="none")
    pack(small_source(), tmp_path / "made", quant="q4")
    kept, made = open_pack(tmp_path / "kept"), open_pack(tmp_path / "made")
    for name in made[0].experts["layers.0.experts"].blocks:
        assert kept[1][name] == made[1][name]
    assert "expert" not in kept[0].manifest.errors
    with pytest.raises(OffloadError, match=r"is quantised already .*--quant none keeps its bits"):
        plan_pack(source, "q8")
    with pytest.raises(OffloadError, match="quant 'q5' is not one of none, q8, q4"):
        plan_pack(source, "q5")


# Runs


def test_chunks_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = small_source(vocabulary=200)
    pack(source, tmp_path / "whole", quant="q4")
    monkeypatch.setattr(pack_convert, "CHUNK_ELEMENTS", 1500)
    for threads in (1, 3):
        pack(source, tmp_path / f"{threads}", quant="q4", threads=threads)
        made = open_pack(tmp_path / f"{threads}")
        assert made[1] == open_pack(tmp_path / "whole")[1]


class Stop(Exception):
    """Raised by a test's progress."""


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    source = small_source(experts=30)
    told: list[PackProgress] = []

    def stop(state: PackProgress) -> None:
        told.append(state)
        if state.bytes_done > state.bytes_total / 2:
            raise Stop

    with pytest.raises(Stop):
        pack(source, tmp_path / "p", quant="q4", progress=stop)
    assert not is_pack(tmp_path / "p")
    with pytest.raises(StoreError, match="unfinished pack"):
        PackedModel.open(tmp_path / "p")
    at = told[-1].bytes_done
    told.clear()
    report = pack(source, tmp_path / "p", quant="q4", progress=told.append)
    assert told[0].bytes_before == told[0].bytes_done == at
    assert told[-1].bytes_done == told[-1].bytes_total
    assert report.bytes_written == told[-1].bytes_total - at
    whole = pack(source, tmp_path / "w", quant="q4")
    assert report.manifest.blocks == whole.manifest.blocks  # checksums too
    assert report.manifest.errors == whole.manifest.errors
    again = pack(source, tmp_path / "p", quant="q4")
    assert again.bytes_written == 0
    assert again.manifest == report.manifest


def test_a_source_that_changed_is_not_published(tmp_path: Path) -> None:
    source = small_source()
    source.changed = True
    with pytest.raises(CheckpointError, match="changed while it was being packed"):
        pack(source, tmp_path / "p", quant="q8")
    assert not is_pack(tmp_path / "p")


def test_an_error_of_the_source_ends_the_run(tmp_path: Path) -> None:
    source = small_source(experts=30)
    source.arrays["layers.0.experts.up"][17, 3, 3] = np.nan
    with pytest.raises(CheckpointError, match=r"layers\.0\.experts\.up has NaN"):
        pack(source, tmp_path / "p", quant="q4")
    assert not is_pack(tmp_path / "p")


KILLED = """
import os, signal, sys
from offload.io.pack_manifest import is_pack
from offload.models.pack_checkpoint import CheckpointSource
from offload.models.pack_run import pack
def progress(state):
    if state.bytes_done > state.bytes_total * share:
        os.kill(os.getpid(), signal.SIGKILL)
for share in map(float, sys.argv[3:]):
    child = os.fork()
    if child == 0:
        try:
            pack(CheckpointSource.open(sys.argv[1]), sys.argv[2], quant="q4", progress=progress,
                 sync_bytes=1 << 14)
        finally:
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), is_pack(sys.argv[2]))
"""


def run(script: str, *args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.mark.slow
def test_kill_9_in_the_middle_then_again(tmp_path: Path) -> None:
    write("qwen3_moe", tmp_path / "m")
    done = run(KILLED, tmp_path / "m", tmp_path / "p", 0.1, 0.6)
    assert done.stdout.splitlines() == [f"{-signal.SIGKILL} False"] * 2, done.stderr
    source = CheckpointSource.open(tmp_path / "m")
    told: list[PackProgress] = []
    pack(source, tmp_path / "p", quant="q4", progress=told.append)
    assert told[0].bytes_before > 0.3 * told[0].bytes_total
    pack(source, tmp_path / "w", quant="q4")
    source.close()
    assert open_pack(tmp_path / "p")[1] == open_pack(tmp_path / "w")[1]


TWICE = """
import sys
from offload.models.pack_cache import packed
from offload.models.pack_checkpoint import CheckpointSource
model = packed(CheckpointSource.open(sys.argv[1]), "q4", announce=lambda p: print("packing", p))
print(model.path)
"""


@pytest.mark.slow
def test_two_processes_want_the_same_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write("qwen3_moe", tmp_path / "m")
    both = [
        subprocess.Popen(
            [sys.executable, "-c", TWICE, str(tmp_path / "m")], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = [process.communicate(timeout=250)[0].splitlines()[-1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    source = CheckpointSource.open(tmp_path / "m")
    path = pack_cache_dir(source.id, "q4")
    assert said == [str(path)] * 2
    assert path.parent == tmp_path / "cache" / "offload" / "packs"
    assert re.fullmatch(r"[0-9a-f]{32}-q4", path.name)
    announced: list[Path] = []
    model = packed(source, "q4", announce=announced.append)
    source.close()
    assert not announced
    assert read_all(model)
    assert os.listdir(path.parent) == [path.name]


def test_other_weights_with_the_same_times(tmp_path: Path) -> None:
    """As archives, images and copies have them; names, sizes and headers are those of any model
    that was trained further."""
    write("llama", tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    tensors, ids = load_file(weights), []
    for factor in (1, 2):
        save_file({k: v * factor for k, v in tensors.items()}, weights, {"format": "pt"})
        os.utime(weights, ns=(1, 1))
        source = CheckpointSource.open(tmp_path / "m")
        ids.append(source.id.fingerprint)
        source.close()
    assert ids[0] != ids[1]


def test_named_templates_and_every_vocabulary_go_with_a_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its templates for tools a model reads other prompts than its checkpoint."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write("llama", tmp_path / "m")
    named = "additional_chat_templates/tool_use.jinja"
    (tmp_path / "m" / named).parent.mkdir()

    def made() -> Path:
        source = CheckpointSource.open(tmp_path / "m")
        pack(source, tmp_path / "p", quant="q4")
        cached = packed(source, "q4").path
        source.close()
        return cached

    for text in ("old", "new"):
        for name in (named, "vocab.model"):
            (tmp_path / "m" / name).write_text(text)
        cached = made()
        assert [(cached / name).read_text() for name in (named, "vocab.model")] == [text] * 2
    assert (tmp_path / "p" / named).read_text() == "old"  # complete: it is left as it is
    (tmp_path / "m" / named).unlink()
    assert not (made() / named).exists()


def test_a_cached_pack_has_the_checkpoints_template_of_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are the same are not packed again for it; what went away is gone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write("llama", tmp_path / "m")
    template, settings_file = tmp_path / "m" / "chat_template.jinja", "generation_config.json"
    told: list[Path] = []

    def small_files() -> dict[str, bytes]:
        source = CheckpointSource.open(tmp_path / "m")
        path = packed(source, "q4", announce=told.append).path
        source.close()
        assert read_all(PackedModel.open(path))
        return {p.name: p.read_bytes() for p in path.iterdir() if p.stat().st_size < 4096}

    template.write_text("old")
    first = small_files()
    assert first["chat_template.jinja"] == b"old"
    assert small_files() == first
    template.write_text("new")
    (tmp_path / "m" / settings_file).write_text('{"eos_token_id": 7}')
    second = small_files()
    assert second["chat_template.jinja"] == b"new"
    assert second[settings_file] == b'{"eos_token_id": 7}'
    template.unlink()
    assert set(second) - set(small_files()) == {"chat_template.jinja"}
    assert len(told) == 1
    folder, rename = told[0], os.replace
    template.write_text("newer")

    def refused(a: Any, b: Any, **more: Any) -> None:
        if Path(b).name == template.name:
            raise OSError(30, "Read-only file system")
        rename(a, b, **more)

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(StoreError, match=r"chat_template.jinja of the checkpoint has changed"):
        small_files()
    assert sorted(p.name for p in folder.iterdir() if p.name.startswith(".")) == []


MEMORY = """
import resource, sys
import numpy as np
from offload.cpu_ops.formats import get_format
from offload.models.pack_kernels import encode
from offload.models.pack_run import pack
from pack_support import small_source
for format in ("q4_0", "q8_0"):
    encode(get_format(format), "f32", np.zeros((1, 128), np.uint8), "warm")
source = small_source(columns=4096, inner=10240, experts=2, vocabulary=32000)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
pack(source, sys.argv[1], quant="q8", threads=2)
print((peak() - before) // 1024)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_tensors(tmp_path: Path) -> None:
    """2 GiB of source arrays (which this source holds in memory), 0.5 GiB the largest."""
    paths = f"{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parent}"
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "p")],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 350


# Random packs


@pytest.mark.parametrize("quant", ["none", "q8", "q4"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_random_packs_follow_the_seed(tmp_path: Path, family: str, quant: str) -> None:
    tiny_config(family).save_pretrained(tmp_path / "c")
    for name, seed in (("a", 1), ("b", 1), ("c2", 2)):
        source = SynthSource(tmp_path / "c" / "config.json", quant=quant, seed=seed)
        pack(source, tmp_path / name, quant=quant)
    a, b, c = (open_pack(tmp_path / name) for name in ("a", "b", "c2"))
    assert a[1] == b[1]
    assert a[1] != c[1]
    assert a[0].manifest.quant == quant
    group = next(iter(a[0].experts.values()))
    assert group.part("gate").format == {"none": "bf16", "q8": "q8_0", "q4": "q4_0"}[quant]
    first, second = (value_of(group.part("gate"), a[1][name]) for name in group.blocks[:2])
    assert not np.array_equal(first, second)
    # 1/sqrt of the longer side, as a trained model's are about.
    assert first.std() == pytest.approx(max(first.shape) ** -0.5, rel=0.2)
    assert (tmp_path / "a" / "config.json").is_file()


def test_a_random_pack_has_the_layout_of_a_real_one(tmp_path: Path) -> None:
    write("qwen3_moe", tmp_path / "m")
    real = CheckpointSource.open(tmp_path / "m")
    random = SynthSource(tmp_path / "m", quant="q4")
    one, other = plan_pack(real, "q4").manifest, plan_pack(random, "q4").manifest
    real.close()
    assert one.blocks == other.blocks
    assert one.files == other.files
    assert {part.layout for b in one.blocks for part in b.parts} == set(Layout)


def test_random_chunks_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_config("qwen3_moe").save_pretrained(tmp_path / "c")
    pack(SynthSource(tmp_path / "c", quant="q4"), tmp_path / "whole", quant="q4")
    monkeypatch.setattr(pack_convert, "CHUNK_ELEMENTS", 1500)
    pack(SynthSource(tmp_path / "c", quant="q4"), tmp_path / "cut", quant="q4")
    assert open_pack(tmp_path / "cut")[1] == open_pack(tmp_path / "whole")[1]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["layers.0.norm", "embed", "layers.0.experts.up"])
def test_what_is_kept_as_it_is_has_to_be_finite(tmp_path: Path, name: str, value: float) -> None:
    source = small_source()
    source.arrays[name].reshape(-1)[7] = value
    with pytest.raises(CheckpointError, match=rf"{name} has 1 weights that are NaN or infinite"):
        pack(source, tmp_path / "p", quant="none")
    assert not is_pack(tmp_path / "p")
