"""Flags: help without heavy imports, contradictions, prompts, sampling, contexts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_support import Cli, refused

import offload
from offload.cli.planning import default_context, fit_context
from offload.cli.prompt import parse_ids
from offload.cli.sampling import Sampling
from offload.errors import OffloadError

COMMANDS = ("generate", "chat", "plan", "probe", "doctor", "synth", "simulate")

HELP = """
import sys
from offload.cli.main import main
for command in {commands}:
    assert main([*command, "--help"]) == 0, command
assert main([]) == 0
assert main(["--version"]) == 0
heavy = {{"torch", "transformers", "numpy", "numba", "rich", "asyncio"}} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_and_version_import_nothing_heavy() -> None:
    commands = [[], *([c] for c in COMMANDS)]
    done = subprocess.run(
        [sys.executable, "-c", HELP.format(commands=commands)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert f"offload {offload.__version__}" in done.stdout
    assert all(command in done.stdout for command in COMMANDS)


FLAGS = [
    "-m", "-p", "--prompt-file", "--prompt-ids", "-n", "-c", "-t", "--temp", "--top-k", "--top-p",
    "--min-p", "--seed", "--stop", "--ignore-eos", "--raw", "--ram", "--gpu", "--device", "--disk",
    "--dtype", "--json",
]  # fmt: skip


@pytest.mark.parametrize("flag", FLAGS)
def test_generate_has_the_flag(cli: Cli, flag: str) -> None:
    assert f" {flag}" in cli("generate", "--help").out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nonsense"], "--nonsense"),
        (["--ram", "lots"], "'lots' is not a size"),
        (["--ram", "9" * 400], "is not a size: no machine"),
        (["--ram", "0"], "positive"),
        (["--gpu", "4XiB"], "'4XiB' is not a size"),
        (["--dtype", "int8"], "'int8' is not one of bfloat16"),
        (["--device", "tpu"], "'tpu' is not one of auto, cpu, sim"),
        (["--device", "cuda"], "no card that torch can use was found"),
        (["--gpu", "1GiB"], "simulate an accelerator"),
        (["-n", "0"], "-n"),
        (["-n", "many"], "valid integer"),
        (["-t", "0"], "-t"),
        (["-t", "99999"], "99999 threads would wait for each other on"),
        (["-c", "1"], "-c"),
        (["--temp", "-1"], "--temp -1"),
        (["--temp", "1", "--top-p", "0"], "--top-p 0"),
        (["--temp", "1", "--min-p", "1.5"], "--min-p 1.5"),
        (["--temp", "1", "--top-k", "0"], "--top-k 0"),
        (["--seed", "3"], "--seed cannot take effect"),
        (["--top-k", "3", "--top-p", "0.9"], "--top-k, --top-p cannot take effect"),
        (["--stop", ""], "--stop ''"),
        (["--json", "/nowhere/at/all.json"], "no directory"),
        (["--prompt-ids", "1,2"], "contradict"),
        (["--prompt-file", "x"], "contradict"),
    ],
)
def test_a_wrong_flag_is_one_line(cli: Cli, dense: Path, words: list[str], said: str) -> None:
    refused(cli("generate", "-m", dense, "-p", "hi", *words), said)


def test_unknown_commands_and_missing_flags_are_one_line(cli: Cli) -> None:
    refused(cli("nonsense"), "nonsense", "offload --help")
    refused(cli("generate"), "--model", "offload generate --help")


def test_a_file_as_model_and_a_model_that_is_not_there(cli: Cli, dense: Path) -> None:
    refused(cli("generate", "-m", dense / "config.json", "-p", "x"), "is a file")
    refused(cli("generate", "-m", dense / "nothing", "-p", "x"), "no directory")
    refused(cli("plan", "-m", "no-such-org/no-such-model"), "hub cache")


@pytest.mark.parametrize(
    ("words", "stdin", "said"),
    [
        ([], b"", "stdin is empty"),
        (["-p", "-"], b"\n", "stdin is empty"),
        (["-p", ""], b"ignored", "-p is empty"),
        ([], b"\xff\xfe", "not UTF-8"),
        (["--prompt-ids", "1,x"], b"", "'x'"),
        (["--prompt-ids", ""], b"", "not a list"),
        (["--prompt-ids", "-1"], b"", "'-1'"),
        (["--prompt-file", "/nowhere"], b"", "/nowhere"),
        (["-p", "a\udce9b"], b"", "-p is not UTF-8 text (character 1)"),
        (["-p", "a\udce9b", "--raw"], b"", "-p is not UTF-8 text (character 1)"),
        (["-p", "a", "--stop", "b", "--stop", "\udce9"], b"", "--stop is not UTF-8 text"),
    ],
)
def test_a_prompt_that_cannot_be_read(
    cli: Cli, dense: Path, words: list[str], stdin: bytes, said: str
) -> None:
    refused(cli("generate", "-m", dense, *words, stdin=stdin), said)


def test_ids_in_any_usual_form() -> None:
    assert parse_ids("1,2, 3") == parse_ids("[1 2\n3]") == (1, 2, 3)


def test_greedy_whatever_the_checkpoint_says() -> None:
    settings = SimpleNamespace(temperature=0.6, top_k=20, top_p=0.9, min_p=None)
    assert Sampling().apply(settings) == {}
    assert settings.do_sample is False
    assert settings.temperature is None


def test_flags_over_the_checkpoints_settings() -> None:
    settings = SimpleNamespace(temperature=0.6, top_k=20, top_p=None, min_p=0.1)
    used = Sampling(temp=0.9, min_p=0.0, seed=4).apply(settings)
    assert used == {"temperature": 0.9, "top_k": 20, "top_p": 1.0, "min_p": 0.0, "seed": 4}
    assert settings.do_sample is True


def test_without_a_seed_there_is_one_to_report() -> None:
    settings = SimpleNamespace(top_k=None, top_p=None, min_p=None)
    used = Sampling(temp=0.9).apply(settings)
    assert used["top_k"] == 0  # off, not transformers' 50
    assert 0 <= used["seed"] < 2**32


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (dict(prompt=10, new_tokens=None, context=None, limit=2048), (128, 138)),
        (dict(prompt=10, new_tokens=None, context=None, limit=64), (54, 64)),
        (dict(prompt=10, new_tokens=None, context=32, limit=64), (22, 32)),
        (dict(prompt=10, new_tokens=20, context=32, limit=64), (20, 32)),
        (dict(prompt=10, new_tokens=5, context=None, limit=None), (5, 15)),
        (dict(prompt=63, new_tokens=None, context=None, limit=64), (1, 64)),
    ],
)
def test_the_context_takes_prompt_and_answer(given: dict[str, Any], want: tuple[int, int]) -> None:
    assert fit_context(**given) == want


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(prompt=64, new_tokens=None, context=None, limit=64), ["64", "65", "by 1"]),
        (dict(prompt=60, new_tokens=10, context=None, limit=64), ["60", "70", "by 6", "lower -n"]),
        (dict(prompt=2, new_tokens=70, context=None, limit=64), ["72", "64; lower -n to 62"]),
        (dict(prompt=64, new_tokens=70, context=None, limit=64), ["shorten it and lower -n"]),
        (dict(prompt=90, new_tokens=1, context=80, limit=100), ["91", "80", "raise --context"]),
        (dict(prompt=1, new_tokens=1, context=80, limit=64), ["80", "64"]),
    ],
)
def test_what_does_not_fit_the_context_says_by_how_much(
    given: dict[str, Any], said: list[str]
) -> None:
    with pytest.raises(OffloadError) as raised:
        fit_context(**given)
    assert all(word in str(raised.value) for word in said), str(raised.value)


def test_a_plan_without_a_prompt_takes_a_usual_context() -> None:
    assert default_context(None, None) == default_context(None, 4096) == 1024
    assert default_context(None, 64) == 64
    assert default_context(32, 64) == 32
    with pytest.raises(OffloadError, match="65"):
        default_context(65, 64)
