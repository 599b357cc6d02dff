"""``offload finetune`` with its real engine: what users give it that cannot work, and signals."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import Cli, Result, process, refused
from families import tiny_config, write
from run_support import (
    WORDS,
    planned_once,
    weights_of,
    write_data,
    write_model,
    write_tokenizer,
)
from safetensors.torch import load_file, save_file

Finetune = Callable[..., Result]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m", max_position_embeddings=64)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "train.jsonl")


WHOLE = ("test_a_whole_run", "test_a_trace", "test_a_budget_too_small", "test_float16")
"""Tests with all that a run does: its warm-up, measured rates and a prediction."""


@pytest.fixture(autouse=True)
def _planned_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.name not in WHOLE:
        planned_once(monkeypatch)


def words_for(model: Path, data: Path, place: Path, *more: object, steps: int = 2) -> list[object]:
    return [
        "finetune", "--model", model, "--data", data, "--output", place / "out",
        "--disk", place / "disk", "--ram", "1GiB", "--seq-len", 32, "--max-steps", steps,
        "--batch-size", 2, "--threads", 1, "--no-tensorboard", *more,
    ]  # fmt: skip


@pytest.fixture
def finetune(cli: Cli, model: Path, data: Path, tmp_path: Path) -> Finetune:
    """Run a short training; later flags win over those of ``words_for``."""

    def run(*more: object, model: Path = model, data: Path = data, steps: int = 2) -> Result:
        return cli(*words_for(model, data, tmp_path, *more, steps=steps))

    return run


def test_a_whole_run(finetune: Finetune, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = finetune("--json", tmp_path / "figures.jsonl")
    assert result.code == 0, result.err
    assert str(tmp_path / "out") in result.out
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(p.isfinite().all() for p in loaded.parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<end>"
    kinds = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    assert len(kinds) > 2


def test_a_trace(finetune: Finetune, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace, picture = tmp_path / "trace.json", tmp_path / "trace.png"
    result = finetune("--trace", trace, "--trace-plot", picture)
    assert result.code == 0, result.err
    found = json.loads(trace.read_text())
    names = {event["name"] for event in found["traceEvents"]}
    assert {"step 1 forward", "step 2 backward"} <= names
    assert picture.read_bytes().startswith(b"\x89PNG")
    refused(finetune("--trace", trace, "--json", trace), "--json and --trace are the same file")


BAD_DATA = {
    "nothing": ("", ("is empty",)),
    "blank-lines": ("\n\n\n", ("train.jsonl",)),
    "no-json": ('{"text": "the disk"}\n{"text": "a ring"\n', ("2",)),
    "another-key": ('{"text": "the disk"}\n{"content": "a ring"}\n', ("2", "text")),
    "no-text": ('{"text": 5}\n', ("1", "text")),
    "list": ("[1, 2]\n", ("1",)),
}


@pytest.mark.parametrize("what", BAD_DATA)
def test_bad_data(finetune: Finetune, tmp_path: Path, what: str) -> None:
    content, told = BAD_DATA[what]
    bad = tmp_path / "train.jsonl"
    bad.write_text(content)
    refused(finetune(data=bad), "train.jsonl", *told)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "disk").exists()


def test_bad_rows_are_counted_if_asked(finetune: Finetune, tmp_path: Path, data: Path) -> None:
    mixed = tmp_path / "train.jsonl"
    mixed.write_text(data.read_text() + '{"text": \n{"other": 1}\n')
    result = finetune("--skip-bad-rows", data=mixed)
    assert result.code == 0, result.err
    assert "2" in result.err


def test_longer_than_the_context(finetune: Finetune) -> None:
    refused(finetune("--seq-len", 65), "--seq-len 65", "64")


def test_a_row_longer_than_a_sequence(finetune: Finetune, tmp_path: Path) -> None:
    long = tmp_path / "train.jsonl"
    long.write_text(json.dumps({"text": " ".join(WORDS * 40)}) + "\n")
    result = finetune(data=long)
    assert result.code == 0, result.err


@pytest.mark.parametrize("special", [{}, {"eos_token": "<end>"}, {"pad_token": "<pad>"}])
@pytest.mark.parametrize("packing", ["--packing", "--no-packing"])
def test_a_tokenizer_without_special_tokens(
    finetune: Finetune, tmp_path: Path, model: Path, special: dict[str, str], packing: str
) -> None:
    bare = shutil.copytree(model, tmp_path / "model")
    for file in bare.glob("*token*"):
        file.unlink()
    write_tokenizer(bare, **special)
    result = finetune(packing, model=bare)
    assert result.code == 0, result.err
    assert ("no end of sequence token" in result.err) == ("eos_token" not in special)


def test_no_tokenizer(finetune: Finetune, tmp_path: Path) -> None:
    bare = write("llama", tmp_path / "bare", config=tiny_config("llama"))
    refused(finetune(model=bare), "tokenizer", "bare")


def test_a_vocabulary_larger_than_the_embedding(finetune: Finetune, tmp_path: Path) -> None:
    small = write_model(tmp_path / "small", vocab_size=10, pad_token_id=1, eos_token_id=0)
    refused(finetune(model=small), "10")


def test_float16(finetune: Finetune, tmp_path: Path) -> None:
    half = write_model(tmp_path / "half", dtype=torch.float16)
    refused(finetune(model=half), "float16", "--dtype bfloat16")
    assert not (tmp_path / "disk").exists()
    result = finetune("--dtype", "bfloat16", model=half)
    assert result.code == 0, result.err


def test_a_weight_that_is_infinite(finetune: Finetune, tmp_path: Path, model: Path) -> None:
    bad = shutil.copytree(model, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    next(t for n, t in tensors.items() if n.endswith("down_proj.weight"))[0, 0] = math.inf
    save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
    refused(finetune(model=bad), "step 1", "train.jsonl", "nan")
    assert not (tmp_path / "out").exists()


def test_an_output_of_somebody_else(finetune: Finetune, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    refused(finetune(), "thesis.tex", "not replaced")
    assert (tmp_path / "out" / "thesis.tex").read_text() == "mine"
    assert not (tmp_path / "disk").exists()


def test_a_disk_of_somebody_else(finetune: Finetune, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "thesis.tex").write_text("mine")
    refused(finetune(), "thesis.tex")
    assert [p.name for p in (tmp_path / "disk").iterdir()] == ["thesis.tex"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 1 MiB, where one may mount."""
    place = tmp_path / "small"
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(words, check=False).returncode:
        pytest.skip("no right to mount a filesystem")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_no_room(finetune: Finetune, small_disk: Path, tmp_path: Path) -> None:
    """Said before the first step, and nothing stays."""
    error = refused(finetune("--disk", small_disk / "states"), "MiB")
    assert "small" in error
    assert not list(small_disk.rglob("*.bin"))
    refused(finetune("--output", small_disk / "a" / "out", model=_wide(tmp_path)), "output", "free")
    assert not (tmp_path / "disk").exists()


def _wide(place: Path) -> Path:
    return write_model(place / "wide", vocab_size=20000)


def test_a_disk_that_is_read_only(finetune: Finetune, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    refused(finetune("--disk", small_disk / "states"), "small")
    refused(finetune("--disk", "/proc/states"), "/proc")


def test_a_budget_too_small(finetune: Finetune, tmp_path: Path) -> None:
    error = refused(finetune("--ram", "20MiB"), "--ram 20.0 MiB", "too small")
    told = re.search(r"raise it to (\d+)MiB", error)
    assert told is not None
    assert not (tmp_path / "disk").exists()
    result = finetune("--ram", f"{told.group(1)}MiB")
    assert result.code == 0, result.err


RESUME = {
    "data": (["--data"], "data"),
    "model": (["--model"], "model"),
    "lr": (["--lr", "3e-4"], "lr"),
    "states": (["--states", "8bit"], "states"),
    "seq-len": (["--seq-len", "16"], "seq_len"),
    "seed": (["--seed", "7"], "seed"),
    "no-packing": (["--no-packing"], "packing"),
    "dtype": (["--dtype", "float32"], "dtype"),
}


def test_resuming_something_else(finetune: Finetune, tmp_path: Path) -> None:
    refused(finetune("--resume"), "resume")
    assert finetune().code == 0
    before = weights_of(tmp_path / "out")
    refused(finetune(), "--resume")
    others: dict[str, Path] = {
        "data": write_data(tmp_path / "other.jsonl", seed=5),
        "model": write_model(tmp_path / "other", max_position_embeddings=64, num_hidden_layers=3),
    }
    for name, (flags, told) in RESUME.items():
        more: dict[str, Any] = {name: others[name]} if name in others else {}
        refused(finetune("--resume", *([] if more else flags), **more), told)
    assert weights_of(tmp_path / "out") == before
    assert finetune("--resume").code == 0
    assert weights_of(tmp_path / "out") == before


def test_a_packed_model(finetune: Finetune, cli: Cli, model: Path, tmp_path: Path) -> None:
    assert cli("pack", model, tmp_path / "packed", "--quant", "q8").code == 0
    refused(finetune(model=tmp_path / "packed"), "packed")


def test_a_gguf_file(finetune: Finetune, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(64))
    refused(finetune(model=file), "gguf")


@pytest.mark.parametrize(
    ("family", "task"),
    [
        ("t5", "Seq2SeqLM"),
        ("bert", "SequenceClassification"),
        ("bert", "MaskedLM"),
        ("bert", "CausalLM"),
        ("marian", "CausalLM"),
        ("git", "CausalLM"),
        ("vit", "ImageClassification"),
    ],
)
@pytest.mark.parametrize("packing", ["--packing", "--no-packing"])
def test_a_model_that_is_no_language_model(
    finetune: Finetune, tmp_path: Path, family: str, task: str, packing: str
) -> None:
    """Said at once, with the way to train it; not trained on labels that it sees."""
    import transformers

    auto = getattr(transformers, f"AutoModelFor{task}")
    other = write(family, tmp_path / family, config=tiny_config(family), auto=auto)
    write_tokenizer(other, eos_token="<end>", pad_token="<pad>")
    refused(finetune(packing, model=other), "next token", "offload.load(path, train=True)")
    assert not (tmp_path / "disk").exists()


# -- signals and processes ------------------------------------------------------------------


UNMEASURED = """
from offload.runtime.rss import current_rss
from offload.train import preparing
preparing.warm_training, preparing.step_rates = lambda *_: current_rss(), lambda *_: None
"""
"""What ``planned_once`` does, for a process of its own: neither warm up nor measure rates."""


@contextmanager
def started(model: Path, data: Path, place: Path, *more: object) -> Iterator[Any]:
    """A process that trains for long and has taken a step."""
    words = words_for(model, data, place, *more, steps=100000)
    with process(*words, first=UNMEASURED) as training:
        assert training.stderr is not None
        seen = []
        for line in training.stderr:
            seen.append(line)
            if "loss" in line and "step" in line:
                break
        else:
            raise AssertionError("".join(seen))
        yield training


def test_a_signal_commits_and_the_run_goes_on(model: Path, data: Path, tmp_path: Path) -> None:
    steps = []
    for signum, word, more in (
        (signal.SIGINT, "interrupted", ()), (signal.SIGTERM, "terminated", ("--resume",)),
    ):  # fmt: skip
        with started(model, data, tmp_path, *more) as training:
            training.send_signal(signum)
            out, err = training.communicate(timeout=120)
        assert training.returncode == 128 + signum, err
        assert err.splitlines()[-1] == word
        assert "Traceback" not in err
        assert out == ""
        told = re.search(r"stopped after step (\d+)", err)
        assert told is not None, err
        steps.append(int(told.group(1)))
        assert not (tmp_path / "out").exists()
        assert len(list((tmp_path / "disk").glob("commit-*.json"))) == 1
    assert steps[0] < steps[1]


def test_two_at_once_on_one_disk(model: Path, data: Path, tmp_path: Path, cli: Cli) -> None:
    with started(model, data, tmp_path, "--save-every", 1) as training:
        more = words_for(model, data, tmp_path, "--resume", steps=100000)
        refused(cli(*more), "in use")
        refused(cli(*words_for(model, data, tmp_path, steps=100000)), "another run")
        assert training.poll() is None
        training.send_signal(signal.SIGKILL)
    # Killed without a word: what it had committed is there.
    with started(model, data, tmp_path, "--resume") as training:
        training.send_signal(signal.SIGINT)
        _, err = training.communicate(timeout=120)
    assert training.returncode == 130, err


def test_a_directory_that_cannot_be_made(finetune: Finetune) -> None:
    """Root may write into /proc, says the system, and then cannot."""
    refused(finetune("--disk", "/proc/nowhere/d", "--output", "/proc/nowhere/o"), "/proc")
