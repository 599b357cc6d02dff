"""``--kv-keep``: flagged lossy, bounded, refused where it cannot be."""

from __future__ import annotations

import json
from pathlib import Path

from cli_support import Cli, Result, refused

IDS = ",".join(str(5 + i % 300) for i in range(300))


def run(cli: Cli, model: Path, *more: object) -> Result:
    return cli(
        "generate", "-m", model, "--prompt-ids", IDS, "-n", 24, "--ignore-eos", "--no-predict",
        "-t", 1, *more,
    )  # fmt: skip


def test_an_answer_behind_what_stays(cli: Cli, dense: Path, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    few = run(cli, dense, "--kv-keep", 96, "--json", found)
    assert few.code == 0, few.err
    said = " ".join(few.err.split())
    assert "at most 96 tokens of each layer stay (--kv-keep), which is lossy" in said
    figures = json.loads(found.read_text())
    kv, planned = figures["kv"], figures["plan"]["kv"]
    assert figures["new_tokens"] == 24
    assert kv["keep_tokens"] == planned["keep_tokens"] == 96
    assert 323 - 96 <= kv["evicted_tokens"] < 323
    assert f"KV keeps 96 tokens: {kv['evicted_tokens']} tokens evicted, lossy" in said
    assert kv["blocks_on_disk"] == 0
    whole = run(cli, dense, "--attention", "offload")
    same = run(cli, dense, "--kv-keep", 400, "--json", found)
    assert same.code == 0, same.err
    assert same.out == whole.out
    assert "evicted" not in same.err
    assert json.loads(found.read_text())["kv"]["evicted_tokens"] == 0


def test_a_conversation_behind_what_stays(cli: Cli, dense: Path) -> None:
    chat = cli(
        "chat", "-m", dense, "--no-predict", "-t", 1, "-n", 40, "-c", 512, "--ignore-eos",
        "--kv-keep", 64, stdin="the disk feeds\nthe ring feeds\nthe arena feeds\n",
    )  # fmt: skip
    assert chat.code == 0, chat.err
    assert "which is lossy" in " ".join(chat.err.split())


def test_what_cannot_be(cli: Cli, dense: Path, tmp_path: Path) -> None:
    refused(run(cli, dense, "--kv-keep", 47), "--kv-keep 47 is too few", "keep 48 or more")
    refused(run(cli, dense, "--kv-keep", 96, "--attention", "exact"), "drop --attention exact")
    refused(run(cli, dense, "--kv-keep", 96, "--prompt-cache", tmp_path), "drop one of the two")
    refused(run(cli, dense, "--kv-keep", 96, "--device", "sim"), "--kv-keep compute on the CPU")
    assert run(cli, dense, "--kv-keep", 0).code == 2
