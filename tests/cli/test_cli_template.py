"""``--template NAME=VALUE``: what a model's chat template reads besides the messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_support import END, TURNS, checkpoint
from cli_support import Cli, refused
from transformers import AutoTokenizer

from offload.cli.template import check_settings, parse_settings
from offload.errors import OffloadError

THINKING = (
    TURNS + "{% if enable_thinking is defined and enable_thinking is false %}"
    "<think></think>{% endif %}{{ effort | default('') }}"
)


@pytest.fixture
def thinker(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "models" / "tiny", THINKING)


def ids(path: Path, text: str, **settings: Any) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(path)
    found: list[int] = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        add_generation_prompt=True,
        return_dict=False,
        **settings,
    )
    return found


@pytest.mark.parametrize(
    ("given", "value"),
    [("a=false", False), ("a=False", False), ("a=TRUE", True), ("a=None", None), ("a=null", None),
     ("a=3", 3), ("a=0.5", 0.5), ("a=low", "low"), ('a="3"', "3"), ("a=", ""), ("a=b=c", "b=c"),
     ("a=2026-01-02", "2026-01-02"), ('a=["x", {"y": 1}]', ["x", {"y": 1}]), ("a=NaN", "NaN"),
     ("a=[", "[")],
)  # fmt: skip
def test_a_value_is_json_where_it_is_json(given: str, value: Any) -> None:
    (found,) = parse_settings([given]).items()
    assert found == ("a", value)
    assert type(found[1]) is type(value)


def test_the_prompt_is_what_the_template_makes_of_it(
    cli: Cli, thinker: Path, tmp_path: Path
) -> None:
    report = tmp_path / "run.json"

    def read(*words: object) -> int:
        done = cli(
            "generate", "-m", thinker, "-p", "A list", "-n", 2, "--no-predict", "--json", report,
            *words,
        )  # fmt: skip
        assert done.code == 0, done.err
        return int(json.loads(report.read_text())["prompt_tokens"])

    plain, without = ids(thinker, "A list"), ids(thinker, "A list", enable_thinking=False)
    both = ids(thinker, "A list", enable_thinking=False, effort="low")
    assert len(plain) < len(without) < len(both)
    assert read() == len(plain)
    assert read("--template", "enable_thinking=true") == len(plain)
    assert read("--template", "enable_thinking=False") == len(without)
    words = ("--template", "enable_thinking=false", "--template", "effort=low")
    assert read(*words) == len(both)


def test_a_conversation_and_a_batch_obey_it(cli: Cli, thinker: Path, tmp_path: Path) -> None:
    report = tmp_path / "run.json"
    setting = ("--template", "enable_thinking=false", "--no-predict")
    done = cli(
        "chat", "-m", thinker, "-n", 2, "-c", 64, "--json", report, *setting, stdin="A list\n"
    )
    assert done.code == 0, done.err
    without = len(ids(thinker, "A list", enable_thinking=False))
    assert json.loads(report.read_text())["turns"][0]["prompt_tokens"] == without

    jobs, answers = tmp_path / "jobs.jsonl", tmp_path / "answers.jsonl"
    say = {"messages": [{"role": "user", "content": "A list"}]}
    jobs.write_text(json.dumps({"prompt": "A list"}) + "\n" + json.dumps(say) + "\n")
    asked = ("generate", "-m", thinker, "--batch", jobs, "--output", answers, "-n", 2)
    done = cli(*asked, *setting)
    assert done.code == 0, done.err
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [row["prompt_tokens"] for row in rows] == [without, without]
    # Other settings are other prompts: their answers are not these.
    done = cli(*asked, "--no-predict")
    assert done.code == 2
    assert "--output" in done.errors[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--template", "enable_thinking"), ("NAME=VALUE",)),
     (("--template", "=1"), ("NAME=VALUE",)),
     (("--template", "effort=1", "--template", "effort=2"), ("twice",)),
     (("--template", "thinking=false"), ("thinking", "it reads effort, enable_thinking")),
     (("--template", "messages=[]"), ("messages", "from offload")),
     (("--template", "add_generation_prompt=false"), ("from offload",)),
     (("--template", "tools=[]"), ("from offload",)),
     (("--template", "effort=1", "--raw"), ("--raw",))],
)  # fmt: skip
def test_what_changes_nothing_is_refused(
    cli: Cli, thinker: Path, words: tuple[str, ...], said: tuple[str, ...]
) -> None:
    refused(cli("generate", "-m", thinker, "-p", "x", *words), "--template", *said)


def test_a_model_without_a_template(cli: Cli, tmp_path: Path) -> None:
    plain = checkpoint(tmp_path / "models" / "plain", None)
    done = cli("generate", "-m", plain, "-p", "x", "--template", "a=1")
    refused(done, "no chat template", "--template a")


def test_a_template_that_marks_answers_is_read_for_the_error(thinker: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(thinker)
    tokenizer.chat_template = (
        "{%- for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% if depth %}{% break %}{% endif %}{% endfor %}"
    )
    check_settings({"depth": 1}, tokenizer, thinker)
    with pytest.raises(OffloadError, match="reads depth"):
        check_settings({"deep": 1}, tokenizer, thinker)


@pytest.mark.parametrize(
    ("template", "reads", "others"),
    [(THINKING, ("enable_thinking", "effort"), ("think", "role", "m", "if", "defined", "default")),
     ("{# effort #}{% set n = 1 %}{% macro f(x) %}{{ x }}{% endmacro %}{{ f(n) }}{{ messages }}",
      (), ("effort", "n", "x", "f")),
     ("{% set a = a | default(1) %}{% if b is not defined %}{% set b = 2 %}{% endif %}{{ a + b }}",
      ("a", "b"), ("c",)),
     ("{{ strftime_now('%Y') }}{{ raise_exception('no') if bad }}",
      ("bad",), ("strftime_now", "raise_exception")),
     ("{{ cannot be read", ("any",), ())],
)  # fmt: skip
def test_words_of_a_template_are_no_settings(
    thinker: Path, template: str, reads: tuple[str, ...], others: tuple[str, ...]
) -> None:
    """Its text, its own variables and fields of messages: given as settings they change nothing."""
    tokenizer: Any = AutoTokenizer.from_pretrained(thinker)
    tokenizer.chat_template = template
    check_settings(dict.fromkeys(reads, 1), tokenizer, thinker)
    for name in others:
        with pytest.raises(OffloadError, match=f"{name}: "):
            check_settings({name: 1}, tokenizer, thinker)


def test_several_templates_without_a_default(thinker: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(thinker)
    tokenizer.chat_template = {"rag": THINKING, "tool_use": THINKING}
    with pytest.raises(OffloadError, match=r"--template effort: .*default"):
        check_settings({"effort": 1}, tokenizer, thinker)
    tokenizer.chat_template = {"default": THINKING, "rag": TURNS}
    check_settings({"effort": 1}, tokenizer, thinker)


assert END in THINKING
