"""``--prompt-cache``: what people see, in one run and from one to the next."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_support import TINY, TURNS, checkpoint
from cli_support import Cli, Result, refused
from disk_support import fill, small_filesystem

KIB = 2**10
WORDS = "the disk feeds the ring and the ring feeds the layers, one after the other; "
CHUNK = 32


def run(cli: Cli, *more: object, prompt: str = WORDS * 12, model: Path = TINY) -> Result:
    found = cli(
        "generate", "-m", model, "-p", prompt, "-n", 8, "--ignore-eos", "--no-predict", "-t", 1,
        *more,
    )  # fmt: skip
    assert found.code == 0, found.err
    return found


def stored(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.kv"))


def test_a_second_run_reads_only_the_rest(cli: Cli, tmp_path: Path) -> None:
    directory, figures = tmp_path / "prompts", tmp_path / "figures.json"
    words = ("--prompt-cache", directory, "--prompt-cache-chunk", CHUNK, "--json", figures)
    first = run(cli, *words)
    assert "prompt cache: nothing to reuse" in first.err
    assert f"passes of {CHUNK} tokens" in first.err
    found = json.loads(figures.read_text())
    groups = (found["prompt_tokens"] - 1) // CHUNK
    assert len(stored(directory)) - 1 == groups > 3, "and the end of the prompt"
    assert found["prompt_cache"]["tokens"] == 0
    assert found["plan"]["prompt_cache"]["chunk_tokens"] == CHUNK
    again = run(cli, *words)
    assert again.out == first.out
    assert f"{found['prompt_tokens']} of {found['prompt_tokens']} tokens reused" in again.err
    assert f"prompt from the prompt cache ({found['prompt_tokens']} tokens)" in again.err
    tokens = found["prompt_tokens"]
    assert json.loads(figures.read_text())["prefill_tok_s"] is None, "nothing was computed"
    found = json.loads(figures.read_text())["prompt_cache"]
    assert found["tokens"] == tokens
    assert found["read_bytes"] == sum(p.stat().st_size for p in stored(directory))
    assert found["saved_s"] >= 0
    # Another question to the same text, and a damaged file on the way.
    file = max(stored(directory), key=lambda p: p.stat().st_mtime_ns)  # the first of the prompt
    whole = file.read_bytes()
    file.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    other = run(cli, *words, prompt=WORDS * 12 + "and then")
    assert "is computed again" in other.err
    assert "checksum" in other.err
    assert json.loads(figures.read_text())["prompt_cache"]["damaged"] == 1
    assert file.read_bytes()[:200] == whole[:200]
    for path in (directory, *directory.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    # As much of it as a limit takes, and never more.
    few = 3 * file.stat().st_size
    run(cli, *words, "--prompt-cache-limit", few, prompt="x " + WORDS * 12)
    assert sum(p.stat().st_size for p in stored(directory)) <= few


@pytest.mark.usefixtures("tiny_probe")
@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), id="as it is", marks=pytest.mark.sweep),
        pytest.param(("--quant", "q4"), id="packed"),
    ],
)
def test_predictions_and_traces_are_no_other_model(
    more: tuple[str, ...], cli: Cli, tmp_path: Path
) -> None:
    """What a run was told of the machine, of its guesses, or to write down changes no number."""
    figures = tmp_path / "figures.json"
    for turn in range(3):
        trace = ("--trace", tmp_path / "trace.json") if turn == 2 else ()
        found = cli(
            "generate", "-m", TINY, "-p", WORDS * 6, "-n", 4, "--ignore-eos", "-t", 1, *more,
            "--ram", "60MiB", "--prompt-cache", tmp_path / "p", "--prompt-cache-chunk", CHUNK,
            "--json", figures, *trace,
        )  # fmt: skip
        assert found.code == 0, found.err
        found = json.loads(figures.read_text())
        assert found["predicted_decode_tok_s"] is not None
        assert found["prompt_cache"]["tokens"] == (found["prompt_tokens"] if turn else 0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("more", [("--quant", "q4"), ()], ids=["fused layers", "between layers"])
def test_rounded_keys_and_values(more: tuple[str, ...], cli: Cli, tmp_path: Path) -> None:
    """With, without and with an empty prompt cache the same text; what rounding costs is said."""
    figures, words = tmp_path / "figures.json", ("--kv", "q8", "--ram", "60MiB", *more)
    without = run(cli, *words, prompt=WORDS * 16)
    for turn in range(2):
        found = run(
            cli, *words, "--prompt-cache", tmp_path / "p", "--json", figures, prompt=WORDS * 16
        )
        assert found.out == without.out
        assert "KV in q8: attention off by" in found.err
        assert json.loads(figures.read_text())["prompt_cache"]["tokens"] == 256 * turn
    other = run(cli, *words, "--kv", "q4", "--prompt-cache", tmp_path / "p", prompt=WORDS * 16)
    assert "nothing to reuse" in other.err


def chat(cli: Cli, model: Path, stdin: str, figures: Path, *more: object) -> tuple[Result, Any]:
    found = cli(
        "chat", "-m", model, "-c", 700, "-n", 12, "--ignore-eos", "--no-predict", "-t", 1, "-v",
        "--prompt-cache-chunk", CHUNK, "--json", figures, *more, stdin=stdin,
    )  # fmt: skip
    assert found.code == 0, found.err
    return found, json.loads(figures.read_text())


def test_chat_finds_its_history_in_the_next_run(cli: Cli, tmp_path: Path) -> None:
    model, figures = checkpoint(tmp_path / "model", TURNS), tmp_path / "figures.json"
    said = "one ring\nand the other ring\nwhat else\n"
    words = ("--system", WORDS * 5, "--prompt-cache", tmp_path / "prompts")
    first, before = chat(cli, model, said, figures, *words)
    again, after = chat(cli, model, said, figures, *words)
    assert again.out == first.out
    assert "read in" in again.err
    assert before["turns"][0]["reused_tokens"] == 0
    for turn, (old, new) in enumerate(zip(before["turns"], after["turns"], strict=True)):
        whole = (new["prompt_tokens"] - 1) // CHUNK * CHUNK
        # The first one is the same prompt to its end; a later one goes on in the cache.
        assert new["reused_tokens"] == (whole if turn else new["prompt_tokens"])
        assert old["prompt_tokens"] == new["prompt_tokens"]
        assert old["token_ids"] == new["token_ids"]
    # From memory and not from the disk, as long as the conversation goes on.
    assert before["turns"][1]["prompt_cache"]["kept"] >= 3 * CHUNK
    assert before["turns"][1]["prompt_cache"]["read_bytes"] == 0
    # Blocks on two tiers, nothing kept in memory, without a prompt cache of its own: the same text.
    for more in (("--no-reuse",), ("--kv-ram", "640KiB")):
        other, _ = chat(cli, model, said, figures, *words, *more)
        assert other.out == first.out, more
    fresh = ("--system", WORDS * 5, "--prompt-cache", tmp_path / "empty", "--no-reuse")
    other, _ = chat(cli, model, said, figures, *fresh)
    assert other.out == first.out


def test_chat_finds_rounded_history(cli: Cli, tmp_path: Path) -> None:
    model, figures = checkpoint(tmp_path / "model", TURNS), tmp_path / "figures.json"
    said = f"{WORDS * 8}\n{WORDS * 4}\nwhat else\n"
    words = ("chat", "-m", model, "-c", 1024, "-n", 8, "--ignore-eos", "--no-predict", "-t", 1)
    words = (*words, "--kv", "q8", "--json", figures, "--system", WORDS * 8, "--prompt-cache")
    first = cli(*words, tmp_path / "prompts", stdin=said)
    assert first.code == 0, first.err
    before = json.loads(figures.read_text())["turns"]
    assert before[0]["reused_tokens"] == 0 < before[2]["prompt_cache"]["kept"]
    for more in ((tmp_path / "prompts",), (tmp_path / "empty", "--no-reuse")):
        again = cli(*words, *more, stdin=said)
        assert again.out == first.out
        if len(more) == 1:
            for turn in json.loads(figures.read_text())["turns"]:
                assert turn["reused_tokens"] == (turn["prompt_tokens"] - 1) // 256 * 256


def test_chat_takes_kv_ram(cli: Cli, tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", TURNS)
    words = ("chat", "-m", model, "-c", 900, "-n", 8, "--ignore-eos", "--no-predict", "-t", 1)
    said = f"{WORDS * 8}\nand\n"
    whole = cli(*words, stdin=said)
    few = cli(*words, "--kv-ram", "640KiB", stdin=said)
    assert whole.code == few.code == 0, few.err
    assert few.out == whole.out


def test_bad_flags(cli: Cli, tmp_path: Path) -> None:
    file, directory = tmp_path / "file", tmp_path / "directory"
    file.write_text("x")
    words = ("generate", "-m", TINY, "-p", "hi", "--no-predict")
    refused(cli(*words, "--prompt-cache", file), "is not a directory")
    refused(cli(*words, "--prompt-cache", file / "x"), "cannot be made")
    refused(
        cli(*words, "--prompt-cache", directory, "--prompt-cache-limit", "100KiB"),
        "100.0 KiB is below one group", "256 tokens", "raise it",
    )  # fmt: skip
    refused(cli(*words, "--prompt-cache-limit", "1GiB"), "needs a prompt cache")
    refused(cli(*words, "--prompt-cache-chunk", 64), "needs a prompt cache")
    refused(cli(*words, "--prompt-cache", directory, "--prompt-cache-chunk", 1), "2")
    refused(cli(*words, "--prompt-cache", directory, "--prompt-cache-limit", "0"), "positive")
    refused(cli(*words, "--prompt-cache", directory, "--device", "sim"), "accelerator")
    assert stored(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written(cli: Cli, tmp_path: Path) -> None:
    directory = tmp_path / "closed"
    directory.mkdir(mode=0o500)
    refused(cli("generate", "-m", TINY, "-p", "hi", "--prompt-cache", directory), "written")


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    with small_filesystem(tmp_path, 4) as disk:
        yield disk


def test_a_full_disk_is_one_warning(cli: Cli, full: Path) -> None:
    words = ("--prompt-cache-chunk", CHUNK, "--prompt-cache")
    free = run(cli, *words, full.parent / "free")
    directory = full / "prompts"
    run(cli, *words, directory, prompt="before it was full " * 10)
    before = stored(directory)
    fill(full)
    found = run(cli, *words, directory)
    assert found.out == free.out
    assert found.err.count("a prompt is not in the prompt cache") == 1
    assert stored(directory) == before
