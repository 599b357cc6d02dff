"""Keys and values under ``--kv-ram``: what people see, and what is left when it goes wrong."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_support import Cli, Result, process, refused
from disk_support import fill, small_filesystem

from offload.io.safetensors import read_header

KIB, MIB = 2**10, 2**20
SLOT = 128 * KIB  # 256 tokens of 2 heads of 64 numbers, keys and values, bfloat16
LAYERS = 8
IDS = ",".join(str(5 + i % 300) for i in range(700))
SHORT = ",".join(str(5 + i % 300) for i in range(200))


def run(cli: Cli, model: Path, *more: object, ids: str = IDS, new: int = 24) -> Result:
    return cli(
        "generate", "-m", model, "--prompt-ids", ids, "-n", new, "--ignore-eos", "--no-predict",
        "-t", 1, *more,
    )  # fmt: skip


def test_the_same_tokens_and_what_the_cache_did(cli: Cli, dense: Path, tmp_path: Path) -> None:
    whole = run(cli, dense)
    assert whole.code == 0, whole.err
    assert "KV " not in whole.err.split("stats:")[1]
    assert "everything was resident" in whole.err
    found, disk = tmp_path / "found.json", tmp_path / "disk"
    few = run(cli, dense, "--kv-ram", "1500KiB", "--json", found, "--disk", disk)
    assert few.code == 0, few.err
    assert few.out == whole.out
    stats = few.err.split("stats:")[1]
    assert "spilled" in stats
    assert "MiB/token back" in stats
    assert "all weights were resident: only keys and values were streamed" in few.err
    assert "is not needed" not in few.err, "--disk is where keys and values went"
    figures = json.loads(found.read_text())
    kv, planned = figures["kv"], figures["plan"]["kv"]
    assert kv["ram_bytes"] == planned["budget_bytes"] == 1500 * KIB // SLOT * SLOT
    assert kv["written_bytes"] == kv["blocks_on_disk"] * SLOT > 0
    # Each step reads what the last ones left on the disk, once.
    steps = figures["new_tokens"] - 1
    assert kv["read_bytes"] <= (steps + 1) * planned["disk_bytes_per_token"]
    assert list(disk.iterdir()) == []


def test_the_plan_says_where_they_are(cli: Cli, dense: Path, tmp_path: Path) -> None:
    found = tmp_path / "plan.json"
    words = ["plan", "-m", dense, "--no-predict", "-c", 1024, "--json", found, "--kv-ram"]
    few = cli(*words, "2MiB")
    assert few.code == 0, few.err
    assert "RAM: KV blocks" in few.out
    assert "read once for each token" in few.out
    assert json.loads(found.read_text())["kv"]["blocks_on_disk"] > 0
    all_of_them = cli(*words, "100MiB")
    assert all_of_them.code == 0, all_of_them.err
    assert "blocks of 256 tokens: all in RAM" in all_of_them.out


def test_budgets_that_cannot_be(cli: Cli, dense: Path) -> None:
    least = f"{(LAYERS + 2) * SLOT // KIB}KiB"
    refused(run(cli, dense, "--kv-ram", "1MiB"), "--kv-ram", f"{least} or more", "holds 8 block")
    assert run(cli, dense, "--kv-ram", least, new=2).code == 0
    refused(run(cli, dense, "--kv-ram", "2GiB", "--ram", "1GiB"), "a part of --ram")
    refused(run(cli, dense, "--kv-ram", "2MiB", "--device", "sim"), "--device sim or --kv-ram")
    refused(run(cli, dense, "--kv-ram", "2MiB", "--ram", "3MiB"), "raise --ram", "KV blocks")
    refused(run(cli, dense, "--kv-ram", "0"), "must be positive")


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    with small_filesystem(tmp_path, 4) as disk:
        fill(disk)
        yield disk


def test_a_full_disk(cli: Cli, dense: Path, full: Path) -> None:
    """With room in RAM it goes on, without it says so, and what was written stays."""
    whole = run(cli, dense, ids=SHORT, new=100)
    kept = run(cli, dense, "--kv-ram", 24 * SLOT, "--disk", full, ids=SHORT, new=100)
    assert kept.code == 0, kept.err
    assert kept.out == whole.out
    few = run(cli, dense, "--kv-ram", 12 * SLOT, "--disk", full, ids=SHORT, new=100)
    assert few.code == 2, few.err
    assert len(few.errors) == 1, few.err
    for word in ("KV cache is full", "nothing can be spilled", str(full), "--kv-ram"):
        assert word in few.errors[0]
    assert "Traceback" not in few.err
    # 256 tokens are one block of each layer: so far it came, and the text is there.
    assert len(few.out) > 20
    assert whole.out.startswith(few.out)
    assert "stats:" in few.err
    assert sorted(p.name for p in full.iterdir() if p.name != "lost+found") == ["filler"]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_no_file_is_left(dense: Path, tmp_path: Path, signum: int, code: int) -> None:
    disk = tmp_path / "disk"
    words = ["generate", "-m", dense, "--prompt-ids", IDS, "-n", 1300, "--ignore-eos", "-t", 1]
    with process(*words, "--no-predict", "--kv-ram", "1500KiB", "--disk", disk) as spilling:
        assert spilling.stdout is not None
        assert spilling.stdout.read(1)
        spilling.send_signal(signum)
        _, err = spilling.communicate(timeout=240)
    assert spilling.returncode == code, err
    assert "Traceback" not in err
    assert list(disk.iterdir()) == []


@pytest.mark.slow
def test_chat_beyond_what_ram_holds(cli: Cli, dense: Path, tmp_path: Path) -> None:
    """Without a flag: a context that RAM cannot hold beside the weights goes to the disk."""
    weights = sum(t.nbytes for t in read_header(dense / "model.safetensors").tensors.values())
    words = ["chat", "-m", dense, "--no-predict", "-t", 1, "-n", 8, "-c", 2048, "--ignore-eos"]
    lines = "the disk feeds\nthe ring feeds\n"
    whole = cli(*words, "--ram", "1GiB", stdin=lines)
    assert whole.code == 0, whole.err
    assert "blocks of 256 tokens" not in whole.err
    # In MiB. The least that works is where blocks are the last resort.
    low, less, found = 0, 1024, ""
    while less - low > 4:
        middle = (low + less) // 2
        plan = cli("plan", "-m", dense, "--no-predict", "-c", 2048, "--ram", middle * MIB)
        if plan.code == 0:
            less, found = middle, plan.out
        else:
            low = middle
    assert "blocks of 256 tokens" in found
    assert less * MIB < 100 * weights
    few = cli(*words, "--ram", f"{less + 2}MiB", "--disk", tmp_path / "disk", stdin=lines)
    assert few.code == 0, few.err
    assert few.out == whole.out
