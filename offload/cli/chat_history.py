"""What was said: turns, what the model still sees of them, and a file that keeps them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from offload.cli.output import is_of_a_model
from offload.errors import OffloadError
from offload.io.whole_file import expanded

Message = dict[str, str]
"""``{"role": ..., "content": ...}``, as chat templates take it."""

FORMAT, VERSION = "offload-chat", 1


class Overflow(StrEnum):
    """What becomes of a conversation that outgrows its context."""

    DROP = "drop"
    STOP = "stop"


@dataclass(slots=True)
class Exchange:
    """A user's message and its answer; None while there is none yet."""

    user: str
    answer: str | None = None


@dataclass(slots=True)
class Conversation:
    """The system prompt, all exchanges, and how many of the oldest the model sees no more.

    Forgotten exchanges stay in the transcript: /save writes all that was said.
    """

    system: str | None = None
    exchanges: list[Exchange] = field(default_factory=list)
    forgotten: int = 0

    def visible(self) -> list[Message]:
        """What goes through the chat template."""
        return _messages(self.system, self.exchanges[self.forgotten :])

    def ask(self, text: str) -> None:
        """Begin an exchange."""
        self.exchanges.append(Exchange(text))

    def take_back(self) -> Exchange | None:
        """Remove the last exchange and return it; None if there is none.

        What was forgotten may fit again now: it is decided anew when the next message comes.
        """
        self.forgotten = 0
        return self.exchanges.pop() if self.exchanges else None

    def reset(self) -> int:
        """Remove all exchanges, keep the system prompt; returns how many there were."""
        n = len(self.exchanges)
        self.exchanges.clear()
        self.forgotten = 0
        return n

    def save(self, path: Path, model: str) -> None:
        """Write everything that was said as JSON, for its owner only (0600), whole or not at all.

        Raises:
            OffloadError: it cannot be written.
        """
        data = {
            "format": FORMAT,
            "version": VERSION,
            "model": model,
            "messages": _messages(self.system, self.exchanges),
        }
        text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
        try:
            # Through a link: its target is replaced, not the link.
            target = expanded(path).resolve()
            if target.exists() and not target.is_file():
                raise OffloadError(f"{path} is not a file; nothing is saved")
            if is_of_a_model(target):
                raise OffloadError(f"{path} is a file of a model; nothing is saved")
            _write_private(target, text.encode("utf-8", "surrogatepass"))
        except OSError as error:
            raise OffloadError(f"{path} cannot be written: {error.strerror}") from error

    @staticmethod
    def load(path: Path) -> Conversation:
        """Read what ``save`` wrote, or a bare JSON list of such messages.

        Raises:
            OffloadError: not readable, or not a conversation; says where it goes wrong.
        """
        try:
            data = json.loads(expanded(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise OffloadError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise OffloadError(f"{path} is not JSON: {error}") from error
        if isinstance(data, dict):
            version = data.get("version", VERSION)
            if version != VERSION:
                raise OffloadError(
                    f"{path} has version {version!r}; this program reads version {VERSION}"
                )
            data = data.get("messages")
        try:
            return _conversation(data)
        except OffloadError as error:
            raise OffloadError(f"{path} is not a saved conversation: {error}") from None


def _messages(system: str | None, exchanges: list[Exchange]) -> list[Message]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    for exchange in exchanges:
        messages.append({"role": "user", "content": exchange.user})
        if exchange.answer is not None:
            messages.append({"role": "assistant", "content": exchange.answer})
    return messages


def _conversation(data: Any) -> Conversation:
    if not isinstance(data, list):
        raise OffloadError("there is no list of messages")
    found = Conversation()
    for i, message in enumerate(data):
        role = message.get("role") if isinstance(message, dict) else None
        text = message.get("content") if isinstance(message, dict) else None
        if not isinstance(role, str) or not isinstance(text, str):
            raise OffloadError(f"message {i} has no role and content as text")
        waiting = bool(found.exchanges) and found.exchanges[-1].answer is None
        if role == "system" and i == 0:
            found.system = text
        elif role == "user" and not waiting:
            found.ask(text)
        elif role == "assistant" and waiting:
            found.exchanges[-1].answer = text
        else:
            raise OffloadError(f"message {i} is of role {role!r} where another is due")
    if found.exchanges and found.exchanges[-1].answer is None:
        raise OffloadError("its last message has no answer")
    return found


def _write_private(target: Path, data: bytes) -> None:
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    # 0600 from the first byte on: a chmod afterwards would leave a moment for others to open it.
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
