"""``--record-routing``, ``--expert-policy`` and ``offload bench cache`` from the command line."""

from __future__ import annotations

import importlib.util
import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_support import Cli, refused

from offload.cli import bench, decode
from offload.cli.signals import Interrupted
from offload.io.routing_file import RoutingHeader, RoutingReader, RoutingWriter
from offload.scheduler.policy import DEFAULT, NAMES

MIB = 2**20
LAYERS, EXPERTS, TOP_K = 4, 16, 2


def write(path: Path, tokens: int = 200, model: str = "test") -> Path:
    """Two layers of eight experts, two of them for each token, in a pattern with locality."""
    writer = RoutingWriter(path, RoutingHeader(("a", "b"), (8, 8), model))
    for t in range(tokens):
        for layer in range(2):
            ids = [(t // 4 + layer) % 8, (t // 3) % 8]
            ids = ids if ids[0] != ids[1] else [ids[0], (ids[0] + 1) % 8]
            writer.add(layer, 2, 2, struct.pack("<2H", *ids), struct.pack("<2e", 0.6, 0.3))
    writer.close()
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "trace")


def test_the_table_and_its_json(cli: Cli, trace: Path, tmp_path: Path) -> None:
    done = cli("bench", "cache", trace, "--json", tmp_path / "r.json", "--shares", "10,50,100")
    assert done.code == 0, done.err
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["default"] == DEFAULT
    assert (report["uses"], report["passes"], report["experts"]) == (800, 400, 16)
    assert report["one_token_uses"] == 4
    assert [row["slots"] for row in report["results"]] == [2, 8, 16]
    for row in report["results"]:
        assert set(row["policies"]) == set(NAMES)
        assert max(row["policies"].values()) <= row["optimum"]
        assert row["below_one_token"] == (row["slots"] < 4)
    first, _, whole = report["results"]
    assert first["policies"]["lru"] == 0
    assert len(set(whole["policies"].values()) | {whole["optimum"]}) == 1
    lines = done.out.splitlines()
    [head] = [line.split() for line in lines if line.startswith("cache")]
    assert head[2 : 2 + len(NAMES)] == list(NAMES)
    [row] = [line.split() for line in lines if line.startswith("50% (8)")]
    rates = report["results"][1]
    shown = [*rates["policies"].values(), rates["optimum"]]
    assert row[2 : 3 + len(NAMES)] == [f"{rate:.1%}" for rate in shown]
    assert "2 slots are less than the 4 experts" in done.out


def test_a_replay_needs_no_torch(trace: Path) -> None:
    import subprocess

    code = (
        "import sys; from offload.cli.main import main; "
        f"assert main(['bench', 'cache', {str(trace)!r}]) == 0; "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_pinned_learns_from_another_routing(cli: Cli, trace: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", tokens=30)
    done = cli("bench", "cache", trace, "--routing", other, "--json", tmp_path / "r.json")
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "r.json").read_text())["pinned_learns_from"] == "other"
    assert "pinned learnt from other" in done.out


def test_a_plot(cli: Cli, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("matplotlib") is not None:
        done = cli("bench", "cache", trace, "--plot", tmp_path / "p.png")
        assert done.code == 0, done.err
        assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    refused(cli("bench", "cache", trace, "--plot", tmp_path / "q.png"), "pip install matplotlib")
    assert not (tmp_path / "q.png").exists()


def test_bad_traces(cli: Cli, trace: Path, tmp_path: Path) -> None:
    whole = trace.read_bytes()
    bad = tmp_path / "bad"
    refused(cli("bench", "cache", bad), "No such file")
    refused(cli("bench", "cache", tmp_path), "directory")
    for content, word in [
        (b"", "empty"),
        (b"{}\n", "not a routing"),
        (whole.replace(b"routing 1", b"routing 9"), "version 9"),
        (whole[: len(whole) // 2], "truncated"),
        (whole[:300] + b"\xff" + whole[301:], "damaged"),
        (whole + b"\0", "damaged"),
    ]:
        bad.write_bytes(content)
        refused(cli("bench", "cache", bad), word, str(bad))
    write(bad, tokens=0)
    refused(cli("bench", "cache", bad), "holds no tokens")
    other = tmp_path / "other"
    RoutingWriter(other, RoutingHeader(("a",), (8,))).close()
    refused(cli("bench", "cache", trace, "--routing", other), "another model")


@pytest.mark.parametrize("shares", ["0", "-5", "101", "ten", "", "10,,20"])
def test_bad_shares(cli: Cli, trace: Path, shares: str) -> None:
    refused(cli("bench", "cache", trace, "--shares", shares), "--shares")


def test_passes_as_they_ran(tmp_path: Path) -> None:
    from offload.runtime.routings import RecordedRouting

    path = tmp_path / "prompt"
    writer = RoutingWriter(path, RoutingHeader(("a", "b"), (4, 4)))
    for tokens in (3, 1):
        for layer in range(2):
            ids = [(t + layer) % 4 for t in range(tokens)]
            writer.add(
                layer, 1, 1, struct.pack(f"<{tokens}H", *ids), struct.pack("<e", 0.5) * tokens
            )
    writer.close()
    found = [(run.group, list(run.experts)) for run in RecordedRouting(path)]
    assert found[:4] == [("a", ["0.0"]), ("b", ["1.1"]), ("a", ["0.1"]), ("b", ["1.2"])]
    assert len(found) == 8
    as_run = [(run.group, list(run.experts)) for run in RecordedRouting(path, as_run=True)]
    assert as_run == [
        ("a", ["0.0", "0.1", "0.2"]), ("b", ["1.1", "1.2", "1.3"]), ("a", ["0.0"]), ("b", ["1.1"]),
    ]  # fmt: skip
    report = bench.replay_all(RecordedRouting(path, as_run=True), [50])
    assert (report["passes"], report["by"]) == (4, "pass")


# -- generate and plan -----------------------------------------------------------------------------

WORDS = ("-p", "the disk feeds", "--raw", "-n", "12", "--ignore-eos", "--no-predict")


def run(cli: Cli, moe: Path, tmp_path: Path, *words: object) -> dict[str, Any]:
    report = tmp_path / "run.json"
    done = cli("generate", "-m", moe, *WORDS, "--ram", "12MiB", "--json", report, *words)
    assert done.code == 0, done.err
    return json.loads(report.read_text()) | {"stderr": done.err}


def test_record_then_replay_then_pin(cli: Cli, moe: Path, tmp_path: Path) -> None:
    trace = tmp_path / "moe.routing"
    first = run(cli, moe, tmp_path, "--record-routing", trace)
    assert f"routing: what every token was routed to is in {trace}" in first["stderr"]
    runs = list(RoutingReader(trace))
    assert sum(r.tokens for r in runs) == (first["prompt_tokens"] + 12 - 1) * LAYERS
    assert cli("bench", "cache", trace).code == 0
    for name in (DEFAULT, "lru", "pinned"):  # all of them: test_expert_policies
        more = ["--routing", trace] if name == "pinned" else []
        again = run(cli, moe, tmp_path, "--expert-policy", name, *more)
        assert again["token_ids"] == first["token_ids"]
        assert again["plan"]["expert_policy"] == name
        assert again["streamed"]


def test_an_interrupted_run_keeps_what_it_has_recorded(
    cli: Cli, moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "moe.routing"
    seen = 0
    real = decode.Tap.take

    def interrupted(self: Any, *args: Any, **more: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == 5:
            raise Interrupted(2)
        return real(self, *args, **more)

    monkeypatch.setattr(decode.Tap, "take", interrupted)
    done = cli("generate", "-m", moe, *WORDS, "--ram", "12MiB", "--record-routing", trace)
    assert done.code == 130
    runs = list(RoutingReader(trace))
    assert [r.tokens for r in runs[LAYERS:]] == [1] * 4 * LAYERS
    assert list(tmp_path.glob(".moe*")) == []


def test_flags_that_cannot_take_effect(cli: Cli, moe: Path, dense: Path, tmp_path: Path) -> None:
    for command in ("generate", "plan"):
        words = WORDS if command == "generate" else ("--no-predict",)
        line = refused(cli(command, "-m", moe, *words, "--expert-policy", "mru"), "'mru'")
        assert ", ".join(NAMES) in line
        refused(cli(command, "-m", moe, *words, "--expert-policy", "pinned"), "--routing FILE")
        refused(cli(command, "-m", moe, *words, "--routing", tmp_path / "x"), "drop --routing")
        refused(cli(command, "-m", dense, *words, "--expert-policy", "lru"), "no experts")
    refused(cli("generate", "-m", dense, *WORDS, "--record-routing", tmp_path / "x"), "no experts")
    refused(
        cli("generate", "-m", moe, *WORDS, "--record-routing", tmp_path / "no" / "x"),
        "--record-routing",
        "no directory",
    )
    refused(
        cli("plan", "-m", moe, "--no-predict", "--expert-policy", "pinned", "--routing",
            write(tmp_path / "other")),
        "another model",
    )  # fmt: skip
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["other"]


def test_the_summary_warns_below_one_tokens_experts(cli: Cli, moe: Path, tmp_path: Path) -> None:
    report = tmp_path / "plan.json"
    words = ("-m", moe, "--no-predict", "-c", 64, "--prompt-tokens", 16)
    assert cli("plan", *words, "--json", report).code == 0
    least = json.loads(report.read_text())["minimum_bytes"]["ram"]
    for more in range(0, 8 * MIB, MIB // 4):
        done = cli(
            "plan", *words, "--ram", least + more, "--json", report, "--expert-policy", "lru"
        )
        plan = json.loads(report.read_text()) if done.code == 0 else {}
        if plan and 0 < plan["tiers"]["ram"]["slots"] < LAYERS * TOP_K:
            break
    else:
        raise AssertionError("no budget is below one token's experts")
    [warning] = [r for r in plan["reasons"] if r.startswith("warning:")]
    assert "8 experts of one token" in warning
    assert "drop --expert-policy" in warning
    assert plan["expected_hit_rate"] == 0.0
