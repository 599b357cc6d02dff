"""Compiling kernels from the command line: announced, kept, counted, interrupted; ``--kernels``."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_support import Cli, refused
from numba.core import caching
from transformers import Phi3Config, Phi3ForCausalLM

import offload
from offload.cli import checks, warming
from offload.cli.checks import Verdict
from offload.cpu_ops import entries, kernel_cache, prefill_kernels, warm
from offload.cpu_ops.isa import choose

TINY = Path(__file__).parents[2] / "examples" / "tiny_moe"

SMALL = """
import sys
from offload.cli import main
from offload.cpu_ops import warm
whole = warm.every_kernel
warm.every_kernel = lambda: whole()[:5]
sys.exit(main.main(sys.argv[1:]))
"""
"""The command line on a machine that needs five kernels, the cheapest."""


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "NUMBA_CACHE_DIR": str(cache)}


def small_kernels() -> list[entries.Kernel]:
    """Two that compile in half a second, as of a fresh process."""
    made = prefill_kernels.activate_kernel, prefill_kernels.accumulate_kernel
    return [kernel.__wrapped__() for kernel in made]


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process's directory for compiled kernels, empty."""
    monkeypatch.setattr(kernel_cache._config, "CACHE_DIR", str(tmp_path / "numba"))
    monkeypatch.setattr(kernel_cache, "_warned", set())
    return tmp_path / "numba"


def run(program: str, cache: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *map(str, words)]
    return subprocess.run(
        command, env=environment(cache), capture_output=True, text=True, timeout=300
    )


def test_a_cold_cache_is_announced_and_a_warm_one_is_not(tmp_path: Path) -> None:
    config = Phi3Config(  # its layers are unknown to lean decode: two kernels do
        hidden_size=64, num_attention_heads=2, num_key_value_heads=2, intermediate_size=64,
        num_hidden_layers=2, vocab_size=128, pad_token_id=0, bos_token_id=None, eos_token_id=0,
        max_position_embeddings=64, dtype="float32",
    )  # fmt: skip
    Phi3ForCausalLM(config).save_pretrained(tmp_path / "phi3")
    command = (
        "generate", "-m", tmp_path / "phi3", "--quant", "none", "--prompt-ids", "1,2,3", "-n", 2,
        "--no-predict", "--ram", "64MiB",
    )  # fmt: skip
    program = "import sys; from offload.cli.main import main; sys.exit(main())"
    first = run(program, tmp_path / "numba", *command)
    again = run(program, tmp_path / "numba", *command)
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    assert first.stdout == again.stdout
    lines = first.stderr.splitlines()
    announced = next(i for i, line in enumerate(lines) if "first use on this machine" in line)
    assert f"compiling: 1 CPU kernel for {choose().value}" in lines[announced]
    assert "kernel 1 of 1: gemm f32" in lines[announced + 1]
    assert lines[announced + 2].startswith("compiled: 1 CPU kernel in")
    assert any(line.startswith("load:") for line in lines[announced + 2 :])
    assert "compil" not in again.stderr


@pytest.mark.usefixtures("empty")
def test_a_library_user_finds_it_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "offload.cpu_ops.warm"):
        assert warm.compile_ahead(small_kernels()) == 2
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "first use on this machine" in caplog.messages[0]
    caplog.clear()
    seen: list[warm.Compiling] = []
    assert warm.compile_ahead(small_kernels(), seen.append) == 0  # in another process, as it were
    assert not caplog.records
    assert not seen


@pytest.mark.usefixtures("empty")
def test_progress_counts_and_estimates() -> None:
    seen: list[warm.Compiling] = []
    kernels = small_kernels()
    assert warm.missing([*kernels, *kernels]) == kernels
    warm.compile_ahead(kernels, seen.append)
    assert [(at.done, at.total) for at in seen] == [(0, 2), (1, 2), (2, 2)]
    assert [bool(at.next) for at in seen] == [True, True, False]
    assert seen[0].left_s == sum(kernel.seconds for kernel in kernels)
    assert seen[2].left_s == 0
    assert seen[0].seconds < seen[1].seconds < seen[2].seconds


def test_a_directory_that_cannot_be_written(
    cli: Cli, empty: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])  # not even beside the sources
    kernel = small_kernels()[0]
    entry = kernel.entry()
    assert not entry.cached
    assert entry.address
    assert "set NUMBA_CACHE_DIR to a directory that can be written" in caplog.text
    assert not empty.exists()
    refused(cli("doctor", "--warm"), "cannot be kept anywhere", "NUMBA_CACHE_DIR")
    found = checks.kernels()
    assert found.verdict is Verdict.BETTER
    assert "export NUMBA_CACHE_DIR" in found.fix


def test_a_named_directory_that_cannot_be_written(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(kernel_cache._config, "CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(kernel_cache, "_warned", set())
    done = cli("doctor", "--warm")
    assert "cannot be kept where NUMBA_CACHE_DIR says" in refused(done)
    assert "kernels are kept in" in done.err


@pytest.mark.usefixtures("empty")
def test_a_full_disk_costs_time_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(caching.IndexDataCacheFile, "_save_data", full)
    kernel = small_kernels()[1]
    assert kernel.entry().address
    assert "No space left" in caplog.text
    assert not small_kernels()[1].ready


def test_a_damaged_file_is_compiled_again(empty: Path, caplog: pytest.LogCaptureFixture) -> None:
    small_kernels()[1].entry()
    (data,) = empty.rglob("*.nbc")
    data.write_bytes(data.read_bytes()[:100])
    assert not small_kernels()[1].entry().cached
    assert "cannot be read" in caplog.text
    assert small_kernels()[1].entry().cached


def test_warm_can_be_interrupted_and_goes_on(tmp_path: Path) -> None:
    cache, report = tmp_path / "numba", tmp_path / "warm.json"
    command = [sys.executable, "-c", SMALL, "doctor", "--warm"]
    with subprocess.Popen(
        command, env=environment(cache), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if "kernel 4 of 5" in line:
                process.send_signal(signal.SIGINT)
                break
        said += process.stderr.readlines()
        assert process.wait(240) == 130
    assert said[-1] == "interrupted\n"
    assert "Traceback" not in "".join(said)
    again = run(SMALL, cache, "doctor", "--warm", "--json", report)
    assert again.returncode == 0, again.stderr
    found = json.loads(report.read_text())
    assert 3 <= found["compiled_before"] < found["compiled"] == found["kernels"] == 5
    assert found["directory_bytes"] > 0
    assert found["directory"] in again.stdout
    assert "kernels compiled in" in again.stdout
    last = run(SMALL, cache, "doctor", "--warm")
    assert "nothing to compile: all 5" in last.stdout
    assert "compiling" not in last.stderr


def test_doctor_counts_what_is_compiled(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "every_kernel", small_kernels)
    found = checks.kernels()
    assert found.verdict is Verdict.BETTER
    assert f"0 of 2 for {choose().value}" in found.detail
    assert found.fix.startswith("offload doctor --warm")
    for kernel in small_kernels():
        kernel.entry()
    found = checks.kernels()
    assert found.verdict is Verdict.GOOD
    assert "all 2" in found.detail
    assert str(empty) in found.detail
    monkeypatch.setenv("OFFLOAD_ISA", "mmx")
    assert checks.kernels().verdict is Verdict.BROKEN


def test_doctor_explains_numba_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_THREADING_LAYER", raising=False)
    assert checks.threading_layer().verdict is Verdict.GOOD
    monkeypatch.setattr(checks, "_numba_layers", lambda: {"workqueue"})
    assert "only workqueue is here" in checks.threading_layer().detail
    monkeypatch.setenv("NUMBA_THREADING_LAYER", "workqueue")
    found = checks.threading_layer()
    assert found.verdict is Verdict.BETTER
    assert "does not concern them" in found.detail
    assert "unset NUMBA_THREADING_LAYER" in found.fix


def test_no_kernel_uses_numba_threads() -> None:
    """What the doctor says about them is true."""
    for file in Path(offload.__file__).parent.rglob("*.py"):
        text = file.read_text()
        if "numba" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.keyword):
                assert node.arg != "parallel", (file, node.lineno)
            if isinstance(node, (ast.Name, ast.Attribute)):
                name = node.id if isinstance(node, ast.Name) else node.attr
                assert name not in ("prange", "vectorize", "guvectorize"), file


def test_fast_kernels_report_their_error(cli: Cli, tmp_path: Path) -> None:
    report = tmp_path / "run.json"
    words = ("-m", TINY, "--no-predict", "-p", "The function returns", "-n", 8, "--json", report)
    exact = cli("generate", *words)
    assert exact.code == 0, exact.err
    assert json.loads(report.read_text())["kernel_error"] is None
    assert "fast kernels" not in exact.err
    fast = cli("generate", *words, "--kernels", "fast", "--ram", "64MiB")
    assert fast.code == 0, fast.err
    found = json.loads(report.read_text())
    assert found["kernel_error"]["error"] < 1e-2
    assert found["kernel_error"]["dtype"] == "bfloat16"
    assert found["peak_rss_bytes"] - found["baseline_rss_bytes"] <= 1.05 * found["ram_budget_bytes"]
    assert "fast kernels: largest relative logit error" in fast.err
    redundant = cli("generate", *words, "--kernels", "fast", "--quant", "q8")
    assert redundant.code == 0, redundant.err
    assert "fast kernels" not in redundant.err
    plan = cli("plan", "-m", TINY, "--kernels", "fast", "--no-predict", "-c", 32)
    assert plan.code == 0, plan.err
    refused(cli("plan", "-m", TINY, "--kernels", "exact", "--quant", "q4"), "--kernels exact")
    refused(cli("plan", "-m", TINY, "--kernels", "slow"), "'slow' is not one of")
