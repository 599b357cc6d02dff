"""``plan``, ``probe``, ``doctor`` and ``synth``, and how results are written."""

from __future__ import annotations

import builtins
import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from cli_support import TINY_EFFORT, Cli, refused

from offload.cli import checks, output
from offload.cli.checks import Verdict, run_checks
from offload.errors import OffloadError
from offload.models import prepared
from offload.runtime import probe as probe_module
from offload.runtime.hardware_cache import cache_path, load_cached, save
from offload.scheduler.hardware import Hardware


@pytest.mark.usefixtures("tiny_probe")
def test_probe_measures_shows_and_keeps(cli: Cli, tmp_path: Path) -> None:
    report = tmp_path / "rates.json"
    done = cli("probe", "--disk", tmp_path, "--quick", "-t", 1, "--json", report)
    assert done.code == 0, done.err
    found = Hardware.from_json(json.loads(report.read_text()))
    assert load_cached(tmp_path, threads=1) == found
    assert str(cache_path()) in done.err
    for word in ("disk read", "RAM copy", "matmul bfloat16", "GFLOP/s", "median", "lowest"):
        assert word in done.out
    assert f"{found.ssd_read.median / 1e9:.3g} GB/s" in done.out


@pytest.mark.usefixtures("tiny_probe")
def test_what_was_probed_is_written_where_it_cannot_be_kept(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    report = tmp_path / "rates.json"
    done = cli("probe", "--disk", tmp_path, "--quick", "-t", 1, "--json", report)
    assert done.code == 2
    assert "the rates cannot be kept" in done.err.splitlines()[-1]
    assert "disk read" in done.out
    assert Hardware.from_json(json.loads(report.read_text())).cores == 1


def test_probe_of_a_directory_that_is_not_there(cli: Cli, tmp_path: Path) -> None:
    refused(cli("probe", "--disk", tmp_path / "nothing", "--quick"), "nothing")


@pytest.mark.usefixtures("tiny_probe")
def test_plan_shows_everything_and_loads_nothing(
    cli: Cli, moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a plan must not open the model")

    monkeypatch.setattr(prepared, "open_prepared", refuse)
    report = tmp_path / "plan.json"
    cli("plan", "-m", moe, "-c", 32, "--no-predict", "--json", report)
    ram = json.loads(report.read_text())["minimum_bytes"]["ram"] + (6 << 20)
    done = cli("plan", "-m", moe, "-c", 32, "--ram", ram, "--json", report)
    assert done.code == 0, done.err
    plan = json.loads(report.read_text())
    for word in (
        "what lives where", "experts cached from disk", "budget", "KV cache", "expert slots",
        "predicted", "bound", "bottleneck", "why", "the smallest that works",
    ):  # fmt: skip
        assert word in done.out
    assert plan["streams"]
    assert plan["model_type"] == "qwen3_moe"
    tier = plan["tiers"]["ram"]
    parts = tier["pinned_bytes"] + tier["ring_bytes"] + tier["slots"] * tier["slot_bytes"]
    assert tier["budget_bytes"] == ram
    assert parts <= tier["used_bytes"] <= ram
    assert tier["used_bytes"] - parts >= sum(tier["reserved_bytes"].values())
    assert sum(home["bytes"] for home in plan["homes"].values()) == plan["weight_bytes"]
    rates = plan["predicted_decode_tok_s"]
    assert 0 < rates["low"] <= rates["mid"] <= rates["high"]
    assert plan["bottleneck"] in plan["lane_s"]


def test_a_plan_counts_the_tokenizer_of_the_run(cli: Cli, tmp_path: Path) -> None:
    """Or the smallest budget that works by the plan would not."""
    tiny, report = Path(__file__).parents[2] / "examples" / "tiny_moe", tmp_path / "plan.json"
    done = cli("plan", "-m", tiny, "-c", 32, "--no-predict", "--json", report)
    assert done.code == 0, done.err
    assert "tokenizer" in json.loads(report.read_text())["tiers"]["ram"]["reserved_bytes"]


def test_a_disk_that_is_not_needed_is_said(cli: Cli, dense: Path, tmp_path: Path) -> None:
    done = cli("plan", "-m", dense, "--no-predict", "--disk", tmp_path)
    assert "is not needed" in done.out
    done = cli("plan", "-m", dense, "--no-predict", "--disk", tmp_path, "--dtype", "float32")
    assert "is not needed" not in done.out
    assert "converted once" in done.out


def test_doctor_finds_this_machine_fit(cli: Cli, tmp_path: Path) -> None:
    report = tmp_path / "doctor.json"
    done = cli("doctor", "--disk", tmp_path, "--json", report)
    assert done.code == 0, done.out
    found = json.loads(report.read_text())
    assert found["ok"]
    names = [check["name"] for check in found["checks"]]
    assert names[:4] == ["python", "torch", "transformers", "numba"]
    for check in found["checks"]:
        assert check["detail"] in done.out
        assert check["verdict"] == "good" or check["fix"], check
    assert list(tmp_path.glob(".offload*")) == []
    # This test's cache is empty.
    assert f"offload probe --disk {tmp_path}" in done.out


def test_doctor_sees_a_probe(tmp_path: Path) -> None:
    found = probe_module.probe(tmp_path, effort=TINY_EFFORT)
    save(tmp_path, found)
    assert checks.probed(tmp_path).verdict is Verdict.GOOD


def test_doctor_fails_for_what_is_required(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checks.importlib.import_module

    def missing(name: str) -> Any:
        if name in ("transformers", "numba"):
            raise ImportError(f"No module named {name!r}")
        return real(name)

    monkeypatch.setattr(checks.importlib, "import_module", missing)
    done = cli("doctor", "--disk", tmp_path)
    assert done.code == 1
    assert "✗ transformers" in done.out
    assert "! numba" in done.out
    assert "pip install 'transformers>=" in done.out
    assert "transformers: to be fixed first" in done.out


def test_doctor_of_a_directory_that_is_not_there(cli: Cli, tmp_path: Path) -> None:
    done = cli("doctor", "--disk", tmp_path / "nothing")
    assert done.code == 1
    assert "✗ disk" in done.out


def test_doctor_says_what_could_be_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "available_ram", lambda: 2**28)
    monkeypatch.setattr(checks, "ram_limit", lambda: 2**29)
    monkeypatch.setattr(checks, "reset_peak_rss", lambda: False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    found = {check.name: check for check in run_checks(tmp_path)}
    for name, word in (("RAM", "container"), ("peak memory", "clear_refs"), ("cache", "XDG")):
        assert found[name].verdict is Verdict.BETTER
        assert word in found[name].detail + found[name].fix


def test_an_old_library_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.importlib.metadata, "version", lambda _: "5.9.1rc1")
    found = checks.library("transformers", "5.17", Verdict.BROKEN)
    assert found.verdict is Verdict.BROKEN
    assert "5.9.1rc1 is older than 5.17" in found.detail
    assert checks.library("transformers", "5.9", Verdict.BROKEN).verdict is Verdict.GOOD


def test_synth_writes_what_generate_reads(cli: Cli, moe: Path, tmp_path: Path) -> None:
    out = tmp_path / "made"
    words = ("synth", moe, out, "--layers", 2, "--seed", 7, "--shard-size", "1MiB")
    done = cli(*words)
    assert done.code == 0, done.err
    assert "Qwen3MoeForCausalLM" in done.out
    assert len(list(out.glob("*.safetensors"))) > 1
    run = cli("generate", "-m", out, "--no-predict", "-p", "hi", "-n", 2)
    assert run.code == 0, run.err
    refused(cli(*words), str(out))
    assert cli(*words, "--overwrite").code == 0
    refused(cli("synth", tmp_path / "nothing.json", tmp_path / "other"), "nothing.json")


def test_a_reader_of_a_table_that_goes_away(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

        def fileno(self) -> int:
            return spare

    spare = os.open(tmp_path / "stdout", os.O_CREAT | os.O_WRONLY)
    monkeypatch.setattr("sys.stdout", Gone())
    done = cli("doctor", "--disk", tmp_path)
    assert os.readlink(f"/proc/self/fd/{spare}") == os.devnull  # what Python flushes at exit
    os.close(spare)
    assert done.code == 128 + signal.SIGPIPE
    assert done.err == ""


def test_json_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.json"
    output.write_json(target, {"a": 1})
    assert json.loads(target.read_text()) == {"a": 1}
    assert target.stat().st_mode & 0o777 == 0o666 & ~_umask()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output.os, "fsync", full)
    with pytest.raises(OffloadError, match="No space left"):
        output.write_json(target, {"a": 2})
    assert json.loads(target.read_text()) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]
    with pytest.raises(OffloadError, match="directory"):
        output.check_json_target(tmp_path)


def test_json_to_a_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    output.write_json(pipe, {"a": 1})
    with builtins.open(reader) as file:
        assert json.load(file) == {"a": 1}
    assert not pipe.is_file()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
