"""synth as a user meets it: determinism, shards, errors with numbers, kills, bounded memory."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors import safe_open

from offload.errors import CheckpointError, OffloadError, StoreError, UnsupportedModelError
from offload.models.synth import SynthProgress, synth
from offload.models.synth_values import BLOCK_VALUES, POOL_VALUES, ValueSource

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "dtype": "bfloat16",
}


def config_file(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(LLAMA | changes))
    return file


def tensor_digests(folder: Path) -> dict[str, str]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118  (not a dict)
                raw = shard.get_tensor(name).contiguous().view(-1).view(torch.uint8)
                found[name] = hashlib.sha256(raw.numpy().tobytes()).hexdigest()
    return found


def test_same_seed_same_values_whatever_the_shards(tmp_path: Path) -> None:
    config = config_file(tmp_path / "c")
    before = torch.get_rng_state()
    one = synth(config, tmp_path / "one", seed=5)
    assert torch.equal(torch.get_rng_state(), before)  # the caller's own draws are not disturbed
    many = synth(config, tmp_path / "many", seed=5, shard_bytes="50KiB")
    assert one.shards == 1
    assert many.shards > 4
    assert tensor_digests(tmp_path / "one") == tensor_digests(tmp_path / "many")
    synth(config, tmp_path / "again", seed=5)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "again")]
    assert files[0] == files[1]


def test_another_seed_and_another_name_give_other_values(tmp_path: Path) -> None:
    config = config_file(tmp_path / "c")
    synth(config, tmp_path / "a", seed=1)
    synth(config, tmp_path / "b", seed=2)
    a, b = tensor_digests(tmp_path / "a"), tensor_digests(tmp_path / "b")
    matrices = [name for name in a if "norm" not in name]
    assert len(matrices) == 2 + 4 * 7
    assert all(a[name] != b[name] for name in matrices)
    assert len({a[name] for name in matrices}) == len(matrices)


def test_fewer_layers_are_the_first_ones(tmp_path: Path) -> None:
    config = config_file(tmp_path / "c")
    synth(config, tmp_path / "all")
    report = synth(config, tmp_path / "two", layers=2)
    every, two = tensor_digests(tmp_path / "all"), tensor_digests(tmp_path / "two")
    assert report.layers == 2
    assert json.loads((tmp_path / "two" / "config.json").read_text())["num_hidden_layers"] == 2
    assert two == {
        name: digest for name, digest in every.items() if not re.search(r"layers\.[23]\.", name)
    }


def test_fewer_layers_cut_per_layer_lists(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    config = config_file(
        tmp_path / "c", model_type="qwen3", architectures=["Qwen3ForCausalLM"], layer_types=kinds
    )
    synth(config, tmp_path / "out", layers=3)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["layer_types"] == kinds[:3]


@pytest.mark.parametrize("layers", [0, -1, 5])
def test_impossible_layers(tmp_path: Path, layers: int) -> None:
    with pytest.raises(OffloadError, match=f"between 1 and the model's 4, got {layers}"):
        synth(config_file(tmp_path / "c"), tmp_path / "out", layers=layers)


def test_index_and_shards_agree(tmp_path: Path) -> None:
    report = synth(config_file(tmp_path / "c"), tmp_path / "out", shard_bytes=60_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert files == [
        f"model-{i:05d}-of-{report.shards:05d}.safetensors" for i in range(1, report.shards + 1)
    ]
    assert index["metadata"]["total_size"] == report.weight_bytes == 2 * report.parameters
    held: dict[str, str] = {}
    for file in files:
        with safe_open(tmp_path / "out" / file, "pt") as shard:
            held |= dict.fromkeys(shard.keys(), file)
            sizes = [shard.get_tensor(name).nbytes for name in shard.keys()]  # noqa: SIM118
        assert sum(sizes) <= 60_000 or len(sizes) == 1
    assert held == index["weight_map"]
    assert len(held) == report.tensors


def test_tensors_are_aligned_to_their_own_width(tmp_path: Path) -> None:
    """float32 parts of a bfloat16 model are not left on odd multiples of two."""
    config = config_file(
        tmp_path / "c",
        model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"], dtype="bfloat16",
        q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
        num_key_value_heads=4, n_routed_experts=7, num_experts_per_tok=2, n_group=1, topk_group=1,
        moe_intermediate_size=33, first_k_dense_replace=1,
    )  # fmt: skip
    synth(config, tmp_path / "out")
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    header_end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:header_end])
    assert header_end % 8 == 0
    assert header.pop("__metadata__") == {"format": "pt"}
    width = {"F32": 4, "BF16": 2}
    assert {entry["dtype"] for entry in header.values()} == set(width)
    for entry in header.values():
        assert entry["data_offsets"][0] % width[entry["dtype"]] == 0


def test_companions_are_copied_from_a_model_directory_only(tmp_path: Path) -> None:
    config = config_file(tmp_path / "c")
    (tmp_path / "c" / "tokenizer.json").write_text("{}")
    (tmp_path / "c" / "generation_config.json").write_text('{"eos_token_id": 3}')
    (tmp_path / "c" / "secrets.txt").write_text("no")
    report = synth(tmp_path / "c", tmp_path / "out")
    assert report.copied_files == ("generation_config.json", "tokenizer.json")
    assert sorted(os.listdir(tmp_path / "out")) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"eos_token_id": 3}'
    lone = config.rename(tmp_path / "c" / "llama-tiny.json")
    assert synth(lone, tmp_path / "lone").copied_files == ()


def test_progress_covers_the_run(tmp_path: Path) -> None:
    seen: list[SynthProgress] = []
    config = config_file(tmp_path / "c", vocab_size=200_000)
    report = synth(config, tmp_path / "out", progress=seen.append)
    done = [p.bytes_done for p in seen]
    assert done[0] == 0
    assert done[-1] == report.weight_bytes
    assert done == sorted(done)
    assert len(done) >= 4
    assert {p.bytes_total for p in seen} == {report.weight_bytes}
    assert max(b - a for a, b in itertools.pairwise(done)) < 17 * 2**20
    assert SynthProgress(bytes_done=6, bytes_total=9, seconds=2.0).bytes_per_s == 3.0


class Refusal(NamedTuple):
    error: type[OffloadError]
    says: str
    changes: dict[str, Any]


@pytest.mark.parametrize(
    "refusal",
    [
        Refusal(UnsupportedModelError, "no model_type", {"model_type": None}),
        Refusal(UnsupportedModelError, "no model type 'nosuch'", {"model_type": "nosuch"}),
        Refusal(
            UnsupportedModelError,
            "auto_map",
            {"model_type": "nosuch", "auto_map": {"AutoConfig": "code.Config"}},
        ),
        Refusal(UnsupportedModelError, "fp8", {"quantization_config": {"quant_method": "fp8"}}),
        Refusal(UnsupportedModelError, "not a valid llama config", {"hidden_size": "wide"}),
        Refusal(UnsupportedModelError, "cannot be built", {"vocab_size": -3}),
        Refusal(OffloadError, "not 'float8_e4m3fn'", {"dtype": "float8_e4m3fn"}),
    ],
    ids=lambda r: r.says.replace(" ", "-"),
)
def test_refused_configs(tmp_path: Path, refusal: Refusal) -> None:
    config = config_file(tmp_path / "c", **refusal.changes)
    with pytest.raises(refusal.error, match=refusal.says):
        synth(config, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["c"]


def test_remote_code_is_never_run(tmp_path: Path) -> None:
    """A known type with an auto_map is built from transformers' own class, its code ignored."""
    code = f"raise SystemExit({str(tmp_path)!r})\n"
    config = config_file(
        tmp_path / "c",
        auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    )
    (tmp_path / "c" / "code.py").write_text(code)
    synth(tmp_path / "c", tmp_path / "out")
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert "auto_map" in json.loads(config.read_text())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "a JSON list"),
        (None, "No such file"),
        ("GGUF\3", "is a GGUF file; give the model's config.json"),
    ],
)
def test_damaged_configs(tmp_path: Path, text: str | None, says: str) -> None:
    config = tmp_path / "config.json"
    if text is not None:
        config.write_text(text)
    with pytest.raises(CheckpointError, match=says):
        synth(config, tmp_path / "out")


def test_existing_target_needs_overwrite(tmp_path: Path) -> None:
    config, out = config_file(tmp_path / "c"), tmp_path / "out"
    synth(config, out, seed=1)
    before = tensor_digests(out)
    with pytest.raises(OffloadError, match="exists"):
        synth(config, out, seed=2)
    assert tensor_digests(out) == before
    synth(config, out, seed=2, overwrite=True)
    assert tensor_digests(out) != before
    assert sorted(os.listdir(tmp_path)) == ["c", "out"]


def test_overwrite_spares_what_is_no_model(tmp_path: Path) -> None:
    precious = tmp_path / "home"
    precious.mkdir()
    (precious / "thesis.tex").write_text("work of years")
    with pytest.raises(OffloadError, match="not a model directory"):
        synth(config_file(tmp_path / "c"), precious, overwrite=True)
    with pytest.raises(OffloadError, match="where the config comes from"):
        synth(tmp_path / "c", tmp_path / "c", overwrite=True)
    assert (precious / "thesis.tex").read_text() == "work of years"
    assert sorted(os.listdir(tmp_path)) == ["c", "home"]


def test_too_little_space_is_said_in_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_file(tmp_path / "c", vocab_size=200_000)
    usage = shutil.disk_usage(tmp_path)._replace(free=20 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(StoreError, match=r"needs 4\d\.\d MiB but .* 20\.0 MiB free"):
        synth(config, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["c"]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write, written = os.write, 0

    def write(fd: int, data: Any) -> int:
        nonlocal written
        if written > 100_000:
            raise OSError(28, "No space left on device")
        done = real_write(fd, data[:1000])  # short writes are continued
        written += done
        return done

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(StoreError, match=r"model\.safetensors .*No space left on device .* free"):
        synth(config_file(tmp_path / "c"), tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["c"]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_file(tmp_path / "c")
    synth(config, tmp_path / "whole")
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, data[:1001]))
    synth(config, tmp_path / "pieces")
    monkeypatch.undo()
    assert tensor_digests(tmp_path / "pieces") == tensor_digests(tmp_path / "whole")


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def stop(now: SynthProgress) -> None:
        if now.bytes_done:
            raise KeyboardInterrupt

    config = config_file(tmp_path / "c", vocab_size=200_000)
    with pytest.raises(KeyboardInterrupt):
        synth(config, tmp_path / "out", progress=stop)
    assert sorted(os.listdir(tmp_path)) == ["c"]


def run_python(code: str, *args: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True, text=True, timeout=240, check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )  # fmt: skip


KILLED = """
import os, signal, sys
from offload.models.synth import synth

def die(now):
    if now.bytes_done:
        os.kill(os.getpid(), signal.SIGKILL)

synth(sys.argv[1], sys.argv[2], progress=die)
"""


def test_killed_midway_is_never_taken_for_whole(tmp_path: Path) -> None:
    config, out = config_file(tmp_path / "c", vocab_size=200_000), tmp_path / "out"
    run = run_python(KILLED, config, out)
    assert run.returncode == -signal.SIGKILL, run.stderr
    (left,) = [name for name in os.listdir(tmp_path) if name != "c"]
    assert left.startswith("out.partial-")
    assert not (tmp_path / left / "config.json").exists()
    synth(config, out)  # finds the dead one's directory and removes it
    assert sorted(os.listdir(tmp_path)) == ["c", "out"]


def test_only_its_own_leftovers_are_removed(tmp_path: Path) -> None:
    others = ["out.partial-notes", "out2.partial-0123abcd", "out.partial-old-0123abcd"]
    for name in others:
        (tmp_path / name).mkdir()
    config = config_file(tmp_path / "c")
    # The last is the only copy of a checkpoint whose replacement was killed between two renames.
    synth(config, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == sorted(["c", "out", *others])
    # With a whole one in its place it is a leftover.
    synth(config, tmp_path / "out", overwrite=True)
    assert sorted(os.listdir(tmp_path)) == sorted(["c", "out", *others[:2]])


def test_a_run_in_progress_is_left_alone(tmp_path: Path) -> None:
    config, out = config_file(tmp_path / "c", vocab_size=200_000), tmp_path / "out"

    def second(now: SynthProgress) -> None:
        if now.bytes_done == 0:
            synth(config, out, seed=2)

    # The inner run wins the name; the outer one then refuses to replace it.
    with pytest.raises(OffloadError, match="exists"):
        synth(config, out, seed=1, progress=second)
    assert sorted(os.listdir(tmp_path)) == ["c", "out"]
    synth(config, tmp_path / "reference", seed=2)
    assert tensor_digests(out) == tensor_digests(tmp_path / "reference")


MEASURED = """
import resource, sys
from offload.models.synth import synth

def rss():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

synth(sys.argv[1], sys.argv[2] + "-small", layers=1)
before = rss()
report = synth(sys.argv[1], sys.argv[2])
print(report.weight_bytes, (rss() - before) * 1024)
"""


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """320 MiB more of weights, stacked experts of 40 MiB each: under 24 MiB more at the peak."""
    config = config_file(
        tmp_path / "c",
        model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=9,
        num_experts=32, num_experts_per_tok=2, moe_intermediate_size=416, hidden_size=512,
        head_dim=64,
    )  # fmt: skip
    run = run_python(MEASURED, config, tmp_path / "out")
    assert run.returncode == 0, run.stderr
    weights, grown = map(int, run.stdout.split())
    assert weights > 320 * 2**20
    assert grown < 24 * 2**20


def test_values_are_normal_and_signed() -> None:
    count = 3 * POOL_VALUES + 12_345
    raw = b"".join(ValueSource(0).normal("w", count, "float32", 0.25))
    values = np.frombuffer(raw, np.float32)
    assert values.size == count
    assert abs(float(values.mean())) < 2e-3
    assert abs(float(values.std()) - 0.25) < 1e-3
    assert abs(float((values > 0).mean()) - 0.5) < 5e-3
    assert abs(float((np.abs(values) < 0.25).mean()) - 0.6827) < 5e-3
    # Blocks start at places of their own: none repeats another.
    starts = {bytes(values[at : at + 4]) for at in range(0, count, BLOCK_VALUES)}
    assert len(starts) == -(-count // BLOCK_VALUES)


def test_values_do_not_depend_on_what_was_asked_before() -> None:
    fresh = b"".join(ValueSource(9).normal("b", 1000, "bfloat16", 0.5))
    used = ValueSource(9)
    for i in range(20):  # more distributions than are kept
        for view in used.normal("a", 10, "bfloat16", 0.1 + i):
            assert view.readonly
    assert b"".join(used.normal("b", 1000, "bfloat16", 0.5)) == fresh
