"""``generate --batch``: the answers of single runs, a kill in the middle, refusals."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers.utils import chat_template_utils

from offload.cli.main import main
from offload.errors import OffloadError
from offload.models import prompt_time

Checkpoint = Callable[[str], Path]


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements and private files of a test stay its own. (Not for packed models: kernels that
    are compiled already lie in the shared one.)"""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


LINES: list[dict[str, Any]] = [
    {"prompt": "the disk", "id": "a"},
    {"prompt": "feeds", "temperature": 1.1, "seed": 5},
    {"prompt": "the ring", "max_new_tokens": 4},
    {"prompt": "and the", "stop": ["e", "a"], "id": 3},
]


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def answers(path: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["index"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def words(model: Path, source: Path, target: Path, *more: object) -> list[str]:
    found = ["generate", "-m", model, "--batch", source, "--output", target, "--no-predict"]
    return [str(word) for word in (*found, "-n", 12, "-t", 1, "--ram", "6MiB", *more)]


def test_the_text_of_single_runs(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = checkpoint("qwen3")
    source, target = write(tmp_path / "in", LINES), tmp_path / "out"
    report = tmp_path / "report"
    assert main(words(model, source, target, "--batch-size", 3, "--json", report)) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "3 prompts at once (as asked for)" in shown.err
    assert "4 of 4 prompts in" in shown.err
    found = answers(target)
    assert [found[i]["id"] for i in range(4)] == ["a", None, None, 3]
    assert found[1]["seed"] == 5
    for index, line in enumerate(LINES):
        flags = ["--temp", 1.1, "--seed", 5] if "seed" in line else []
        flags += [w for stop in line.get("stop", ()) for w in ("--stop", stop)]
        single = ["generate", "-m", model, "-p", line["prompt"], "--no-predict", "-t", 1]
        single += ["-n", line.get("max_new_tokens", 12), *flags]
        assert main([str(w) for w in single]) == 0
        assert capsys.readouterr().out == found[index]["text"]
    data = json.loads(report.read_text())
    assert data["answered"] == data["prompts"] == 4
    assert data["most_at_once"] == data["batch"]["sequences"] == 3
    assert data["new_tokens"] == sum(line["new_tokens"] for line in found.values())
    # Once more: nothing to do; with other settings: not these answers.
    assert main(words(model, source, target)) == 0
    assert "nothing to do" in capsys.readouterr().err
    assert main(words(model, source, target, "--ignore-eos")) == 2
    assert "other flags or settings" in capsys.readouterr().err


def test_the_checkpoints_own_settings_are_those_of_single_runs(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its stop strings end answers, and ways to generate that need more than one sequence do not
    come back by transformers' own filling in."""
    whole = checkpoint("qwen3")
    model = tmp_path / "model"
    model.mkdir()
    for file in whole.iterdir():
        (model / file.name).symlink_to(file)
    lines = [{"prompt": "the disk"}, {"prompt": "feeds"}]
    source, target = write(tmp_path / "in", lines), tmp_path / "out"
    flags = ("--ignore-eos",)
    assert main(words(model, source, target, *flags)) == 0
    text = answers(target)[0]["text"]
    stop = text[len(text) // 2 :][:2]
    settings = json.loads((whole / "generation_config.json").read_text())
    settings |= {"stop_strings": [stop], "cache_implementation": "static", "penalty_alpha": 0.6}
    (model / "generation_config.json").unlink()
    (model / "generation_config.json").write_text(json.dumps(settings))
    target = tmp_path / "stopped"
    assert main(words(model, source, target, *flags)) == 0
    found = answers(target)
    assert found[0]["text"] == text[: text.index(stop)]
    assert found[0]["finish_reason"] == "stop"
    capsys.readouterr()
    for index, line in enumerate(lines):
        single = ["generate", "-m", model, "-p", line["prompt"], "--no-predict", "-t", 1]
        assert main([str(w) for w in (*single, "-n", 12, *flags)]) == 0
        assert capsys.readouterr().out == found[index]["text"]


def test_prompts_with_one_beginning_read_it_once(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first run stores the shared part, also for the prompts behind it."""
    model = checkpoint("qwen3")
    shared = "the ring feeds the disk and the disk feeds the ring, "
    prompts = [shared + end for end in ("a", "bc", "d")]
    source = write(tmp_path / "in", [{"prompt": text} for text in prompts])
    target, report = tmp_path / "out", tmp_path / "report"
    more = ["--prompt-cache-chunk", 16, "--ram", "8MiB", "--prompt-cache"]
    batch = words(model, source, target, "--batch-size", 2, "--json", report, *more, tmp_path / "p")
    assert main(batch) == 0
    cached = json.loads(report.read_text())["end"]["prompt_cache"]
    assert cached["reused_tokens"] >= 2 * (len(shared) // 16 * 16)
    found = answers(target)
    again = words(model, source, tmp_path / "again", "--json", report, *more, tmp_path / "p")
    assert main(again) == 0
    assert answers(tmp_path / "again") == found
    cached = json.loads(report.read_text())["end"]["prompt_cache"]
    assert cached["reused_tokens"] == sum(answer["prompt_tokens"] for answer in found.values())
    capsys.readouterr()
    for index, text in enumerate(prompts[:2]):
        single = ["generate", "-m", model, "-p", text, "--no-predict", "-t", 1, "-n", 12, *more]
        assert main([str(word) for word in (*single, tmp_path / "single")]) == 0
        assert capsys.readouterr().out == found[index]["text"]


@pytest.mark.parametrize(
    "flags", [["--kv", "q8"], ["--kv-keep", "512"], ["--attention", "offload"]], ids=" ".join
)
def test_answers_of_other_attention_are_not_continued(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    source, target = write(tmp_path / "in", LINES[:1]), tmp_path / "out"
    model = checkpoint("qwen3")
    assert main(words(model, source, target, *flags, "--ram", "60MiB")) == 0
    written = target.read_bytes()
    assert main(words(model, source, target)) == 2
    assert "other flags or settings" in capsys.readouterr().err
    assert main(words(model, source, target, *flags)) == 0
    assert "nothing to do" in capsys.readouterr().err
    renamed = write(tmp_path / "renamed", [{**LINES[0], "id": "another"}])
    assert main(words(model, renamed, target, *flags)) == 2
    assert '--batch has "another"' in capsys.readouterr().err
    assert target.read_bytes() == written


def test_a_template_with_the_date_is_continued_on_another_day(
    checkpoint: Checkpoint,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All prompts of a batch have the date of its beginning: the bytes of a run without a stop."""

    def on(day: int) -> None:
        class Clock(datetime.datetime):
            @classmethod
            def now(cls, tz: Any = None) -> Any:
                return cls(2026, 1, day, 12, 30, 5, 77)

        for module in (prompt_time, chat_template_utils):
            monkeypatch.setattr(module, "datetime", Clock)

    model, target, whole = tmp_path / "m", tmp_path / "out", tmp_path / "whole"
    shutil.copytree(checkpoint("qwen3"), model)
    template = "{{ strftime_now('%d %b %Y %S') }} {{ messages[0]['content'] }}"
    (model / "chat_template.jinja").write_text(template)
    lines = [{"prompt": "the disk"}, {"messages": [{"role": "user", "content": "the ring"}]}]
    source = write(tmp_path / "in", lines)
    on(7)
    assert main(words(model, source, whole)) == 0
    target.write_bytes(whole.read_bytes().splitlines(keepends=True)[0])
    on(8)
    assert main(words(model, source, target)) == 0
    assert "date stays that of their prompts: 2026-01-07T12:30:05" in capsys.readouterr().err
    assert target.read_bytes() == whole.read_bytes()
    assert main(words(model, source, tmp_path / "new")) == 0
    assert (tmp_path / "new").read_bytes() != whole.read_bytes()


def test_a_template_that_makes_nothing_of_a_message_is_told(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "m"
    shutil.copytree(checkpoint("qwen3"), model)
    (model / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    source = write(tmp_path / "in", [{"messages": [{"role": "user", "content": ""}]}])
    assert main(words(model, source, tmp_path / "out")) == 2
    assert "line 1: the prompt has no tokens" in capsys.readouterr().err


def test_files_that_say_nothing_of_the_model_may_change(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output itself may lie beside the weights."""
    model = tmp_path / "m"
    shutil.copytree(checkpoint("qwen3"), model)
    source, target = write(model / "in.jsonl", LINES[:2]), model / "out.json"
    assert main(words(model, source, target)) == 0
    written = target.read_bytes()
    target.write_bytes(written.splitlines(keepends=True)[0])
    (model / "README.md").write_text("about")
    assert main(words(model, source, target)) == 0
    assert target.read_bytes() == written


def test_answers_of_other_weights_are_not_continued(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that was trained further has files of the same names and sizes."""
    model, source, target = tmp_path / "m", write(tmp_path / "in", LINES[:1]), tmp_path / "out"
    shutil.copytree(checkpoint("qwen3"), model)
    assert main(words(model, source, target)) == 0
    file = model / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name] * 2}, file, {"format": "pt"})
    assert main(words(model, source, target)) == 2
    assert "another model" in capsys.readouterr().err


def test_a_kill_loses_no_answer_and_repeats_none(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = checkpoint("qwen3")
    lines = [{"prompt": "abcdefgh"[: 1 + i % 8], "temperature": 0.7} for i in range(12)]
    source = write(tmp_path / "in", lines)
    whole, target = tmp_path / "whole", tmp_path / "out"
    more = ("--batch-size", 2, "--ignore-eos")
    assert main(words(model, source, whole, *more)) == 0
    start = [sys.executable, "-m", "offload", *words(model, source, target, *more)]
    process = subprocess.Popen(start, stderr=subprocess.PIPE, text=True, env=os.environ.copy())
    assert process.stderr is not None
    while (line := process.stderr.readline()) and not line.startswith("progress: "):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = answers(target)
    assert 0 < len(before) < 12
    assert main(words(model, source, target, *more)) == 0
    after = answers(target)
    assert {i: after[i] for i in before} == before
    assert after == answers(whole)


def test_ctrl_c_ends_cleanly(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from offload.cli import batch

    class Sends(batch._Progress):
        def __call__(self, tally: Any) -> None:
            if tally.done == 1:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(batch, "_Progress", Sends)
    source, target = write(tmp_path / "in", LINES), tmp_path / "out"
    code = main(words(checkpoint("qwen3_moe"), source, target, "--batch-size", 4))
    shown = capsys.readouterr().err
    assert code == 130
    assert shown.splitlines()[-1] == "interrupted"
    assert "stats: 1 of 4 prompts" in shown
    assert len(answers(target)) == 1


def test_an_answer_that_finds_no_room_is_not_counted(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from offload.batch.answers import Answers

    add = Answers.add

    def full(self: Any, index: int, key: str, answer: Any) -> None:
        if self.done:
            raise OffloadError("no space left")
        add(self, index, key, answer)
        self.done.add(index)

    source, target = write(tmp_path / "in", LINES), tmp_path / "out"
    batch = words(checkpoint("qwen3_moe"), source, target)
    with monkeypatch.context() as patched:
        patched.setattr(Answers, "add", full)
        assert main(batch) == 2
    shown = capsys.readouterr().err
    assert len(answers(target)) == 1
    assert "stats: 1 of 4 prompts" in shown
    assert "no space left" in shown.splitlines()[-1]
    assert main(batch) == 0
    assert len(answers(target)) == 4


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["-p", "x"], "-p and --batch contradict"),
        (["--trace", "x"], "a timeline shows one generation's waiting"),
        (["--batch-size", "500"], "500 sequences at once do not fit"),
        (["-c", "4"], "line 1: the prompt does not fit"),
    ],
)
def test_refusals(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    more: list[str], says: str,
) -> None:  # fmt: skip
    source = write(tmp_path / "in", LINES)
    assert main(words(checkpoint("qwen3"), source, tmp_path / "out", *more)) == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_flags_without_a_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-m", "x", "--output", "y"]) == 2
    assert "--output is for --batch" in capsys.readouterr().err
    assert main(["generate", "-m", "x", "--batch", "y"]) == 2
    assert "--batch needs --output" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "way"),
    [({}, "lower -n to 7"), ({"max_new_tokens": 13}, "lower max_new_tokens to 7")],
    ids=["flag", "line"],
)
def test_what_does_not_fit_is_lowered_where_it_was_said(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    line: dict[str, Any], way: str,
) -> None:  # fmt: skip
    source = write(tmp_path / "in", [{"prompt": "the disk, the"} | line])
    assert main(words(checkpoint("qwen3"), source, tmp_path / "out", "-c", "20")) == 2
    assert way in capsys.readouterr().err
