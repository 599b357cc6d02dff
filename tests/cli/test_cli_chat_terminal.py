"""``offload chat`` at a terminal: commands, and signals that stop an answer but not the chat."""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_support import TURNS, Typist, checkpoint
from cli_support import Cli, Result

from offload.cli import chat
from offload.cli.chat_input import Terminal

LONG = ("--no-predict", "-t", 1, "-c", 1024, "--ignore-eos")
"""An answer of a thousand tokens: it is stopped long before its end."""

FIRST_WORD = "\x1b[?25h"
"""The spinner shows the cursor again when the first word comes."""

Talk = Callable[..., tuple[Result, dict[str, Any]]]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "models" / "tiny", TURNS)


@pytest.fixture
def talk(cli: Cli, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Talk:
    """Enter lines as at a terminal, in this process."""

    def run(*lines: str, words: tuple[object, ...] = ()) -> tuple[Result, dict[str, Any]]:
        left = list(lines)
        source = Terminal(lambda _prompt: left.pop(0) if left else None)
        monkeypatch.setattr(chat, "open_source", lambda **_: source)
        report = tmp_path / "chat.json"
        done = cli(
            "chat", "-m", tiny, "--no-predict", "-c", 256, "-n", 8, "--ignore-eos",
            "--json", report, *words,
        )  # fmt: skip
        assert done.code == 0, done.err
        return done, json.loads(report.read_text())

    return run


def test_undo_and_retry(talk: Talk) -> None:
    done, run = talk("What is a list?", "/retry", "/undo", "/undo", "/retry", "What is a list?")
    first, again, anew = run["turns"]
    assert first["token_ids"] == again["token_ids"] == anew["token_ids"]
    # All but the prompt's last token was there.
    assert again["read_tokens"] == anew["read_tokens"] == 1
    assert "taken back: What is a list?" in done.err
    assert "nothing to take back" in done.err
    assert "no message to answer again" in done.err
    assert done.out == f"{first['text']}\n" * 3


def test_reset_and_system(talk: Talk) -> None:
    done, run = talk(
        "/system", "one", "/system Be brief.", "/system", "two", "/reset", "two", "/system -", "one"
    )
    one, _, two, last = run["turns"]
    assert "system prompt: there is none" in done.err
    assert "system prompt: Be brief." in done.err
    assert "2 exchanges forgotten" in done.err
    assert two["prompt_tokens"] > one["prompt_tokens"]
    assert last["prompt_tokens"] > two["prompt_tokens"] - 8
    assert run["context_tokens"] == last["context_tokens"]


def test_stats(talk: Talk) -> None:
    done, run = talk("/stats", "one", "two", "/stats")
    assert "nothing was answered yet" in done.err
    one, two = run["turns"]
    rows = {line[:32].strip(): line[32:].split() for line in done.err.splitlines()}
    assert rows["prompt tokens kept from before"] == [str(two["reused_tokens"])] * 2
    total = one["read_tokens"] + two["read_tokens"]
    assert rows["prompt tokens read"] == [str(two["read_tokens"]), str(total)]
    assert rows["answer tokens"] == ["8", "16"]
    assert "peak RSS" in done.err
    assert f"context {two['context_tokens']} of 256 tokens" in done.err


def test_save_and_load(talk: Talk, tmp_path: Path) -> None:
    file = tmp_path / "a talk.json"
    talk("/system Be brief.", "one", f"/save {file}")
    saved = json.loads(file.read_text())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [m["role"] for m in saved["messages"]] == ["system", "user", "assistant"]
    assert saved["model"] == "tiny"
    _, straight = talk("/system Be brief.", "one", "two")
    _, loaded = talk(f"/load {file}", "two")
    assert loaded["turns"][0]["prompt_tokens"] == straight["turns"][1]["prompt_tokens"]
    assert loaded["turns"][0]["reused_tokens"] == 0


def test_mistakes_are_said_and_the_chat_goes_on(talk: Talk, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    done, run = talk(
        "/nonsense", "/save", f"/load {bad}", f"/load {tmp_path / 'none'}", "many words " * 200,
        f"/save {tmp_path}", "/load ~no-such-user/x", "/save ~no-such-user/x", "/help", "one",
    )  # fmt: skip
    assert "/nonsense is unknown; there are /help /stats" in done.err
    errors = done.errors
    assert [any(word in e for e in errors) for word in (
        "/save needs a file", "not a saved conversation", "cannot be read", "does not fit",
        "is not a file", "there is no home directory ~no-such-user",
    )] == [True] * 6  # fmt: skip
    assert len(errors) == 7
    assert len(run["turns"]) == 1
    assert "Ctrl-C stops an answer" in done.err


def test_overflow_stops_until_there_is_room(talk: Talk) -> None:
    words = ("-c", 48, "--overflow", "stop")
    done, run = talk("message one", "message two", "message three", "/undo", "x", words=words)
    assert ["over the context of 48" in error for error in done.errors] == [True]
    assert len(run["turns"]) == 3
    assert run["forgotten_exchanges"] == 0


def test_exit_leaves_at_once(talk: Talk) -> None:
    _, run = talk("/exit", "one")
    assert run["turns"] == []


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(tiny: Path, tmp_path: Path) -> None:
    report = tmp_path / "chat.json"
    with Typist(["chat", "-m", tiny, *LONG, "--json", report]) as user:
        user.wait_for("\n> ")
        # Typed wrongly and mended: two to the left, one letter more.
        user.type("/hlp\x1b[D\x1b[De\n")
        user.wait_for("/undo")
        user.wait_for("\n> ")
        user.type("The interpreter\n")
        user.wait_for("reading ")
        user.wait_for(FIRST_WORD)
        user.type("\x03")
        user.wait_for("stopped; the answer so far")
        user.wait_for("\n> ")
        user.type("And a tuple?\n")
        user.wait_for("reading ")
        user.wait_for(FIRST_WORD)
        user.type("\x03")
        user.wait_for("stopped; the answer so far")
        user.wait_for("\n> ")
        user.type("half a line\x03")
        user.wait_for("press Ctrl-C again or Ctrl-D to leave")
        user.wait_for("\n> ")
        user.type("/undo\n")
        user.wait_for("taken back: And a tuple?")
        user.wait_for("\n> ")
        user.type("\x03")
        user.wait_for("press Ctrl-C again")
        user.wait_for("\n> ")
        user.type("\x03")
        user.wait_for("stats: ")
        assert user.end() == 0
    assert "Traceback" not in user.seen
    run = json.loads(report.read_text())
    first, second = run["turns"]
    assert [first["finished"], second["finished"]] == ["interrupted"] * 2
    # Stopped between two tokens or in a pass: what all layers have seen is kept.
    seen = first["prompt_tokens"] + first["new_tokens"]
    assert first["prompt_tokens"] - 1 <= second["reused_tokens"] <= seen
    assert run["ended"] == "left"


def test_ctrl_c_while_a_pipe_has_nothing_to_load(tiny: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with Typist(["chat", "-m", tiny, *LONG]) as user:
        user.wait_for("\n> ")
        user.type(f"/load {pipe}\n")
        # Opens as soon as the chat waits at its end.
        with open(pipe, "wb"):
            user.type("\x03")
            user.wait_for("/load stopped; the conversation is as it was")
        user.wait_for("\n> ")
        user.type("/undo\n")
        user.wait_for("there is nothing to take back")
        user.wait_for("\n> ")  # before it a terminal reads lines, and loses the key
        user.type("\x04")
        assert user.end() == 0
    assert "Traceback" not in user.seen


def test_what_is_pasted_is_one_message(tiny: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    with Typist(["chat", "-m", tiny, "--no-predict", "-c", 256, "-n", 4]) as user:
        user.wait_for("\n> ")
        user.type("Mend this:\x1b[200~\nfor x in y:\n/exit\n\x1b[201~\n")
        user.wait_for("reading ")
        user.wait_for("\n> ")
        user.type(f"/save {saved}\n")
        user.wait_for("1 exchange is in")
        user.wait_for("\n> ")  # before it a terminal reads lines, and loses the key
        user.type("\x04")
        assert user.end() == 0
    first = json.loads(saved.read_text())["messages"][0]
    assert first == {"role": "user", "content": "Mend this:\nfor x in y:\n/exit\n"}


def test_sigterm_while_the_prompt_is_printed(tiny: Path) -> None:
    """Sent as soon as the line before the prompt is there: it must not wait for the next key."""
    with Typist(["chat", "-m", tiny, *LONG]) as user:
        user.wait_for("Ctrl-D leaves")
        user.process.send_signal(signal.SIGTERM)
        assert user.end() == 128 + signal.SIGTERM


def test_ctrl_d_leaves(tiny: Path) -> None:
    with Typist(["chat", "-m", tiny, *LONG]) as user:
        user.wait_for("\n> ")
        user.type("\x04")
        assert user.end() == 0


def test_sigterm_ends_a_chat_with_its_figures(tiny: Path, tmp_path: Path) -> None:
    report = tmp_path / "chat.json"
    with Typist(["chat", "-m", tiny, *LONG, "--json", report]) as user:
        user.wait_for("\n> ")
        user.type("The interpreter\n")
        user.wait_for("reading ")
        user.wait_for(FIRST_WORD)
        user.process.send_signal(signal.SIGTERM)
        assert user.end() == 128 + signal.SIGTERM
    assert user.seen.rstrip().endswith("terminated")
    assert json.loads(report.read_text())["ended"] == "terminated"
