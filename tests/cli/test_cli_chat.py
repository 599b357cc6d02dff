"""``offload chat`` in a pipe: the same answers as without reuse, and nothing read twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_support import END, MIB, TINY, TURNS, assert_streams, checkpoint, tight
from cli_support import Cli, refused
from transformers import AutoModelForCausalLM, AutoTokenizer

MESSAGES = ["What is a list?", "And a tuple?", "The interpreter"]
CONTEXT = 256
NEW = 16
SHOUTING = TURNS.replace(
    "{{ m['content'] }}", "{{ m['content'] if loop.last else m['content']|upper }}"
)
"""Rewrites what was said before, in the way of templates that take thinking blocks out."""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "models" / "tiny", TURNS)


def chat(
    cli: Cli, path: Path, target: Path, *words: object, say: list[str] | str = MESSAGES
) -> dict[str, Any]:
    """Run it; returns the JSON with stdout and stderr added."""
    report = target / "chat.json"
    stdin = say if isinstance(say, str) else "".join(f"{line}\n" for line in say)
    done = cli(
        "chat", "-m", path, "--no-predict", "-c", CONTEXT, "--json", report, *words, stdin=stdin
    )  # fmt: skip
    assert done.code == 0, done.err
    run: dict[str, Any] = json.loads(report.read_text())
    return run | {"stdout": done.out, "stderr": done.err}


def answers(run: dict[str, Any]) -> list[list[int]]:
    return [turn["token_ids"] for turn in run["turns"]]


def test_a_turn_reads_only_what_is_new(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    ram = tight(cli, tiny, tmp_path, CONTEXT)
    run = chat(cli, tiny, tmp_path, "-n", NEW, "--ram", ram, "-v")
    assert_streams(run["plan"])
    turns = run["turns"]
    assert len(turns) == len(MESSAGES)
    assert turns[0]["reused_tokens"] == 0
    for before, turn in pairwise(turns):
        # All that the model read: the last token of an answer is chosen, and not read.
        assert turn["reused_tokens"] == before["prompt_tokens"] + before["new_tokens"] - 1
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    new = tokenizer(f"{END}user:{MESSAGES[1]}{END}assistant:")["input_ids"]
    assert turns[1]["read_tokens"] == 1 + len(new)
    assert all(turn["decode_disk_read_bytes"] > 0 for turn in turns)
    assert run["total"]["read_tokens"] == sum(turn["read_tokens"] for turn in turns)
    assert run["stdout"] == "".join(f"{turn['text']}\n" for turn in turns)
    assert run["stderr"].count("turn: TTFT") == len(MESSAGES)
    assert "stats: load" in run["stderr"]
    assert "3 turns" in run["stderr"]
    assert run["ended"] == "left"


def test_the_answers_are_those_of_transformers_and_of_no_reuse(
    cli: Cli, tiny: Path, tmp_path: Path
) -> None:
    """In float32: what is read at once and what one by one rounds differently, and bfloat16 has
    so few digits that two words are equally likely now and then."""
    words = ("-n", NEW, "--dtype", "float32", "--system", "Be brief.")
    kept = chat(cli, tiny, tmp_path, *words)
    fresh = chat(cli, tiny, tmp_path, *words, "--no-reuse")
    assert answers(kept) == answers(fresh)
    assert [t["prompt_tokens"] for t in kept["turns"]] == [
        t["prompt_tokens"] for t in fresh["turns"]
    ]
    assert kept["total"]["reused_tokens"] > 0 == fresh["total"]["reused_tokens"]

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    model: Any = AutoModelForCausalLM.from_pretrained(
        tiny, dtype=torch.float32, experts_implementation="eager"
    )
    said = [{"role": "system", "content": "Be brief."}]
    for message, turn in zip(MESSAGES, kept["turns"], strict=True):
        said.append({"role": "user", "content": message})
        ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
        prompt = torch.tensor([ids])
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW
        )
        assert turn["token_ids"] == out[0, len(ids) :].tolist()
        said.append({"role": "assistant", "content": turn["text"]})


@pytest.mark.parametrize("template", [SHOUTING, None], ids=["shouting", "its own"])
def test_a_template_that_rewrites_what_was_said(
    cli: Cli, tmp_path: Path, template: str | None
) -> None:
    """The model's own template joins messages by a newline that no answer begins with."""
    path = TINY if template is None else checkpoint(tmp_path / "other", template)
    words = ("-n", NEW, "--dtype", "float32")
    kept = chat(cli, path, tmp_path, *words)
    fresh = chat(cli, path, tmp_path, *words, "--no-reuse")
    assert answers(kept) == answers(fresh)
    for before, turn in pairwise(kept["turns"]):
        assert 0 < turn["reused_tokens"] < before["prompt_tokens"] + before["new_tokens"] - 1


def test_a_checkpoint_that_was_trained_without_a_cache(
    cli: Cli, tiny: Path, tmp_path: Path
) -> None:
    """Trainers leave ``use_cache: false`` in the files they save."""
    words = ("-n", NEW, "--dtype", "float32")
    want = answers(chat(cli, tiny, tmp_path, *words))
    settings = json.loads((tiny / "generation_config.json").read_text())
    (tiny / "generation_config.json").write_text(json.dumps(settings | {"use_cache": False}))
    kept = chat(cli, tiny, tmp_path, *words)
    assert answers(kept) == want
    assert kept["total"]["reused_tokens"] > 0


def test_sampling_with_a_seed_repeats(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    words = ("-n", 8, "--temp", 0.9, "--seed", 3)
    assert answers(chat(cli, tiny, tmp_path, *words)) == answers(chat(cli, tiny, tmp_path, *words))


def test_the_oldest_exchanges_are_dropped_and_the_system_prompt_stays(
    cli: Cli, tiny: Path, tmp_path: Path
) -> None:
    say = [f"message {i} of many" for i in range(9)]
    words = ("-c", 192, "-n", 20, "--ignore-eos", "--system", "Be brief.")
    run = chat(cli, tiny, tmp_path, *words, say=say)
    turns = run["turns"]
    assert len(turns) == len(say)
    assert all(turn["prompt_tokens"] + 20 <= 192 for turn in turns)
    dropped = [turn["newly_forgotten_exchanges"] for turn in turns]
    assert sum(dropped) == run["forgotten_exchanges"] > 0
    # Not on every turn: a drop makes room for more than one.
    assert max(dropped) > 1
    assert run["stderr"].count(
        "context: the conversation outgrew the context of 192 tokens"
    ) == sum(n > 0 for n in dropped)
    system = AutoTokenizer.from_pretrained(tiny)(f"system:Be brief.{END}")["input_ids"]
    first = next(turn for turn in turns if turn["newly_forgotten_exchanges"])
    # What begins the prompt is the system prompt still, and only that is kept.
    assert len(system) <= first["reused_tokens"] < first["prompt_tokens"]


def test_overflow_can_stop_instead(cli: Cli, tiny: Path) -> None:
    words = ("-m", tiny, "--no-predict", "-c", 64, "-n", 16, "--ignore-eos", "--overflow", "stop")
    done = cli("chat", *words, stdin="".join(f"message {i} of many\n" for i in range(6)))
    assert done.code == 2
    assert len(done.errors) == 1
    assert "over the context of 64" in done.errors[0]
    assert done.out.count("\n") >= 1
    assert "stats: load" in done.err


def test_a_message_that_cannot_fit(cli: Cli, tiny: Path) -> None:
    done = cli("chat", "-m", tiny, "--no-predict", "-c", 32, stdin="many words " * 40)
    assert done.code == 2
    assert "does not fit" in done.errors[0]
    assert "takes 32" in done.errors[0]
    assert done.out == ""


def test_all_of_stdin_is_one_message(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    run = chat(cli, tiny, tmp_path, "-n", 4, "--once", say="two\nlines\n")
    (turn,) = run["turns"]
    ids = AutoTokenizer.from_pretrained(tiny)(f"user:two\nlines{END}assistant:")["input_ids"]
    assert turn["prompt_tokens"] == len(ids)


def test_a_pipe_has_messages_and_no_commands(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "saved.json"
    run = chat(cli, tiny, tmp_path, "-n", 2, say=["", f"/save {file}", "  ", '"""', "a\\"])
    assert len(run["turns"]) == 3
    assert not file.exists()


def test_nothing_to_say(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    run = chat(cli, tiny, tmp_path, say="")
    assert run["turns"] == []
    assert run["stdout"] == ""
    assert run["total"]["decode_tok_s"] is None


def test_stop_strings_do_not_come_back(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    whole = chat(cli, tiny, tmp_path, "-n", NEW, say=MESSAGES[:1])["turns"][0]["text"]
    stop = whole[len(whole) // 2 :][:3]
    run = chat(cli, tiny, tmp_path, "-n", NEW, "--stop", stop, say=MESSAGES[:2])
    assert run["turns"][0]["finished"] == "stop"
    assert run["turns"][0]["text"] == whole[: whole.index(stop)]
    assert run["turns"][1]["reused_tokens"] > 0


def test_the_checkpoints_stop_strings_hold_in_every_turn(
    cli: Cli, tiny: Path, tmp_path: Path
) -> None:
    before = chat(cli, tiny, tmp_path, "-n", NEW, say=MESSAGES[:2])["turns"]
    first, second = (turn["text"] for turn in before)
    stop = next(s for i in range(4, len(second)) if (s := second[i : i + 3]) not in first)
    file = tiny / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"stop_strings": [stop]}))
    turns = chat(cli, tiny, tmp_path, "-n", NEW, say=MESSAGES[:2])["turns"]
    assert turns[0]["text"] == first
    assert turns[1]["finished"] == "stop"
    assert turns[1]["text"] == second[: second.index(stop)]


def test_what_cannot_work_is_refused_before_the_plan(
    cli: Cli, tiny: Path, moe: Path, bare: Path, tmp_path: Path
) -> None:
    here = ("chat", "-m", tiny, "--no-predict")
    refused(cli("chat", "-m", moe), "no chat template", "offload generate")
    refused(cli("chat", "-m", bare), "no tokenizer", "offload generate")
    refused(cli(*here, "--system", "a", "--system-file", "b"), "--system-file", "contradict")
    refused(cli(*here, "--system-file", tmp_path / "none"), "--system-file", "No such file")
    refused(cli(*here, "--once"), "--once", "empty")
    refused(cli(*here, "-c", 64, "-n", 64), "-n 64", "64 tokens")
    refused(cli(*here, "-c", 9999), "9999", "1024")
    refused(cli(*here, "-c", 16, "--system", "many words " * 9), "system prompt", "takes 16")
    refused(cli(*here, "--top-k", 5), "--top-k", "--temp")
    refused(cli(*here, "--stop", ""), "--stop")
    refused(cli(*here, "--json", tmp_path / "none" / "x"), "--json")
    picky = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}x"
    strict = checkpoint(tmp_path / "strict", picky)
    refused(cli("chat", "-m", strict, "--system", "a"), "no system", "without")


def test_words_that_are_no_text(cli: Cli, tiny: Path) -> None:
    """Python takes bytes of the command line that are no UTF-8 for halves of surrogate pairs."""
    refused(cli("chat", "-m", tiny, "--system", "be\udcff", stdin="hi\n"), "--system is not UTF-8")
    refused(cli("chat", "-m", tiny, "--stop", "\udcff", stdin="hi\n"), "--stop is not UTF-8")


def test_a_line_that_is_no_text(cli: Cli, tiny: Path) -> None:
    done = cli("chat", "-m", tiny, "--no-predict", "-n", 2, "-c", 64, stdin=b"hi\n\xff\n")
    assert done.code == 2
    assert "line 2 of stdin is not UTF-8" in done.errors[0]


def test_the_budget_holds_in_a_chat_that_fills_its_context(tiny: Path, tmp_path: Path) -> None:
    """In a process of its own: the peak of this one is the test run's."""
    plan, report = tmp_path / "plan.json", tmp_path / "chat.json"
    # Limits of torch's caches that this process set for itself, by larger budgets, are not theirs.
    env = {k: v for k, v in os.environ.items() if "PRIMITIVE_CACHE" not in k and "LRU" not in k}
    env["OMP_NUM_THREADS"] = "1"
    offload = [sys.executable, "-m", "offload"]
    common = ["-m", str(tiny), "--no-predict", "-c", "160", "-t", "1"]
    subprocess.run([*offload, "plan", *common, "--json", plan], env=env, check=True)
    ram = json.loads(plan.read_text())["minimum_bytes"]["ram"] + 4 * MIB
    words = [*common, "--ram", str(ram), "-n", "20", "--ignore-eos", "--json", str(report)]
    subprocess.run(
        [*offload, "chat", *words],
        input="".join(f"{message}\n" for message in (*MESSAGES, "many words " * 30, *MESSAGES[:1])),
        env=env,
        text=True,
        check=True,
        capture_output=True,
    )
    run = json.loads(report.read_text())
    assert_streams(run["plan"])
    assert run["forgotten_exchanges"] > 0
    assert run["ram_budget_bytes"] == ram
    # The toy that shows how the family reads prompts ran before the process was weighed: with it
    # peaks were 0.85 to 1.02 of this budget, and are 0.56 to 0.65.
    assert run["peak_rss_bytes"] - run["baseline_rss_bytes"] <= 0.9 * ram
