"""The loop of a chat: read an entry, answer it or obey it; Ctrl-C stops an answer, not the chat."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from offload.cli import console
from offload.cli.chat_history import Conversation
from offload.cli.chat_input import Command, Said, Source
from offload.cli.chat_report import stats_notes, stats_rows, turn_line
from offload.cli.chat_talk import Talk, Turn
from offload.cli.flags import check_text
from offload.cli.signals import Interrupted, listen_again, signals_at_once
from offload.errors import OffloadError
from offload.scheduler.plan import Plan

HELP = [
    ("/help", "this list"),
    ("/stats", "figures of the last turn and of all"),
    ("/reset", "forget what was said; the system prompt stays"),
    ("/system TEXT", "another system prompt; without TEXT shows it, - removes it"),
    ("/undo", "take back the last message and its answer"),
    ("/retry", "answer the last message once more"),
    ("/save FILE", "write the conversation as JSON, readable by you only"),
    ("/load FILE", "go on with a saved conversation"),
    ("/exit", "leave; so does Ctrl-D"),
]
ENTRY_HELP = (
    'a line that ends in \\ goes on in the next one; lines between """ belong together; // sends a '
    "line that begins with /; Ctrl-C stops an answer"
)


class Shell:
    """Runs a talk with what comes from a source."""

    def __init__(
        self,
        talk: Talk,
        source: Source,
        *,
        plan: Plan,
        counters: Callable[[], dict[str, Any]],
        model: str,
        verbose: bool,
    ) -> None:
        """
        Args:
            counters: ``model.offload.stats``.
            model: its name, for saved conversations.
            verbose: a line of figures after each answer.
        """
        self._talk = talk
        self._source = source
        self._plan = plan
        self._counters = counters
        self._model = model
        self._verbose = verbose
        self._commands: dict[str, Callable[[str], None]] = {
            "help": self._help,
            "stats": self._stats,
            "reset": self._reset,
            "system": self._system,
            "undo": self._undo,
            "retry": self._retry,
            "save": self._save,
            "load": self._load,
        }

    def run(self) -> None:
        """Until the input ends or the user leaves. Inside of ``signals_wait()``.

        Raises:
            OffloadError: a read failed; without a terminal, a message that cannot be answered.
            Interrupted: SIGTERM; without a terminal, Ctrl-C as well.
        """
        if self._source.interactive:
            context = self._talk.terms.context
            console.note(
                f"context of {context} tokens; /help lists commands, Ctrl-D leaves", "chat"
            )
        warned = False
        while True:
            try:
                with signals_at_once():
                    entry = self._source.read()
            except Interrupted as stop:
                self._survive(stop)
                if warned:
                    return
                warned = True
                sys.stderr.write("\n")
                console.note("press Ctrl-C again or Ctrl-D to leave", "chat")
                continue
            except OffloadError as error:
                self._complain(error)
                continue
            warned = False
            if entry is None or (isinstance(entry, Command) and entry.name in ("exit", "quit")):
                return
            if isinstance(entry, Said):
                self._answer(partial(self._talk.ask, entry.text))
            else:
                self._obey(entry)

    def _survive(self, stop: Interrupted) -> None:
        """Go on after Ctrl-C at a terminal; anything else ends the chat."""
        if stop.signum != signal.SIGINT or not self._source.interactive:
            raise stop
        listen_again()

    def _complain(self, error: OffloadError) -> None:
        """A mistake that the user can mend; without a user it ends the chat."""
        if not self._source.interactive:
            raise error
        console.note(str(error), "error")

    def _answer(self, ask: Callable[[], Turn]) -> None:
        before = len(self._talk.turns)
        try:
            ask()
        except OffloadError as error:
            if len(self._talk.turns) > before:
                raise  # not the message: the model could not go on
            self._complain(error)
            return
        except Interrupted as stop:
            self._end_line(before)
            self._survive(stop)
            self._say_stopped(before)
            return
        self._end_line(before)
        run, terms = self._talk.turns[-1].run, self._talk.terms
        if run.finished == "length":
            full = self._talk.turns[-1].context_tokens >= terms.context
            limit = f"the context of {terms.context} is full" if full else "-n"
            console.note(f"the answer ends after {len(run.token_ids)} tokens: {limit}", "chat")
        if self._verbose:
            console.note(turn_line(self._talk, self._plan), "turn")

    def _end_line(self, before: int) -> None:
        # In a pipe, too: answers must not run together.
        turns = self._talk.turns[before:]
        if turns and (turns[-1].run.text or not self._source.interactive):
            if not turns[-1].run.text.endswith("\n"):
                sys.stdout.write("\n")
            sys.stdout.flush()

    def _say_stopped(self, before: int) -> None:
        turns = self._talk.turns[before:]
        if turns and turns[-1].run.text:
            n = len(turns[-1].run.token_ids)
            console.note(
                f"stopped; the answer so far ({n} token{'' if n == 1 else 's'}) stays in the "
                f"conversation, /undo takes it back",
                "chat",
            )
        else:
            sys.stderr.write("\n")
            console.note("stopped before the first word; the message is not kept", "chat")

    def _obey(self, command: Command) -> None:
        action = self._commands.get(command.name)
        if action is None:
            known = " ".join(f"/{name}" for name in (*self._commands, "exit"))
            console.note(f"/{command.name} is unknown; there are {known}; // sends a /", "chat")
            return
        try:
            action(command.argument)
        except OffloadError as error:
            self._complain(error)
        except Interrupted as stop:
            self._survive(stop)
            sys.stderr.write("\n")
            console.note(f"/{command.name} stopped; the conversation is as it was", "chat")

    def _help(self, _: str) -> None:
        console.err().print(console.rows(HELP))
        console.note(ENTRY_HELP, "chat")

    def _stats(self, _: str) -> None:
        if not self._talk.turns:
            console.note("nothing was answered yet", "stats")
            return
        table = console.rows(stats_rows(self._talk), heads=("", "last turn", "all"), notes=False)
        console.err().print(table)
        for line in stats_notes(self._talk, self._counters()):
            console.note(line, "stats")

    def _reset(self, _: str) -> None:
        n = self._talk.conversation.reset()
        console.note(f"{n} exchange{'' if n == 1 else 's'} forgotten", "chat")

    def _system(self, text: str) -> None:
        said = self._talk.conversation
        if not text:
            console.note("there is none" if said.system is None else said.system, "system prompt")
            return
        check_text(text, "that prompt")
        wanted = None if text == "-" else text
        self._talk.terms.check(Conversation(wanted, said.exchanges))
        said.system = wanted
        console.note("none" if wanted is None else "from the next message on", "system prompt")

    def _undo(self, _: str) -> None:
        gone = self._talk.conversation.take_back()
        if gone is None:
            console.note("there is nothing to take back", "chat")
        else:
            first = gone.user.splitlines()[0] if gone.user else ""
            short = first if len(first) <= 60 else first[:59] + "…"
            console.note(f"taken back: {short}", "chat")

    def _retry(self, _: str) -> None:
        self._answer(self._talk.retry)

    def _save(self, name: str) -> None:
        said = self._talk.conversation
        said.save(_file(name, "/save"), self._model)
        n = len(said.exchanges)
        console.note(f"{n} exchange{' is' if n == 1 else 's are'} in {name}", "chat")

    def _load(self, name: str) -> None:
        with signals_at_once():  # a pipe may keep us waiting
            found = Conversation.load(_file(name, "/load"))
        self._talk.terms.check(found)
        self._talk.conversation = found
        console.note(f"{len(found.exchanges)} exchanges from {name}", "chat")


def _file(name: str, command: str) -> Path:
    if not name:
        raise OffloadError(f"{command} needs a file, e.g. {command} talk.json")
    return Path(name)
