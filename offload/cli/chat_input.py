"""Where messages come from: a terminal with editing and commands, or a pipe without either."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from offload.cli.flags import check_text
from offload.cli.prompt import decode_text
from offload.errors import OffloadError

PROMPT, CONTINUED = "> ", ". "
BLOCK = '"""'

ReadLine = Callable[[str], str | None]
"""``read_line(prompt)``: a line without its newline; None at the end of input."""


@dataclass(frozen=True, slots=True)
class Said:
    """A message for the model."""

    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """A line that begins with one slash: its first word without the slash, and the rest."""

    name: str
    argument: str


class Source(Protocol):
    """Hands out what the user enters."""

    interactive: bool
    """Someone sits there: notices help, and mistakes can be mended."""

    def read(self) -> Said | Command | None:
        """The next entry; None at the end of input. A signal may raise in it."""


class Terminal:
    """Lines from a terminal.

    A line that ends in a backslash goes on in the next one; lines between ``\"\"\"`` belong
    together as they are. A line that begins with ``/`` is a command; ``//`` sends one slash. What
    is pasted may be a line with newlines in it.
    """

    interactive = True

    def __init__(self, read_line: ReadLine) -> None:
        self._read_line = read_line

    def read(self) -> Said | Command | None:
        """Raises OffloadError: a message has bytes that are no UTF-8, said when it is whole."""
        while (line := self._read_line(PROMPT)) is not None:
            if line.lstrip().startswith(BLOCK):
                text = self._block(line.lstrip().removeprefix(BLOCK))
            elif line.startswith("/") and not line.startswith("//"):
                name, _, argument = line[1:].strip().partition(" ")
                return Command(name, argument.strip())
            else:
                text = self._continued(line.replace("//", "/", 1) if line[:2] == "//" else line)
            if text.strip():
                check_text(text, "that message")
                return Said(text)
        return None

    def _block(self, first: str) -> str:
        """Up to the closing quotes; the end of input closes it, too."""
        lines: list[str] = []
        line: str | None = first
        while line is not None and not line.rstrip().endswith(BLOCK):
            lines.append(line)
            line = self._read_line(CONTINUED)
        if line is not None:
            lines.append(line.rstrip().removesuffix(BLOCK))
        # The quotes mostly stand on lines of their own.
        return "\n".join(lines).removeprefix("\n").removesuffix("\n")

    def _continued(self, line: str) -> str:
        lines = []
        more: str | None = line
        while more is not None and more.endswith("\\"):
            lines.append(more[:-1])
            more = self._read_line(CONTINUED)
        if more is not None:
            lines.append(more)
        return "\n".join(lines)


class Pipe:
    """Messages from a pipe or a file: one per line, blank ones left out.

    There are no commands and no escapes in it: text from elsewhere must not write files, and a
    line that happens to begin with a slash is a message like any other.
    """

    interactive = False

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._line = 0

    def read(self) -> Said | None:
        while data := self._stream.readline():
            self._line += 1
            text = decode_text(data, f"line {self._line} of stdin")
            if text.strip():
                return Said(text)
        return None


class Once:
    """One message: all of stdin, which is read at once, so that an empty one is refused early."""

    interactive = False

    def __init__(self, stream: BinaryIO) -> None:
        self._text: str | None = decode_text(stream.read(), "stdin")
        if not self._text.strip():
            raise OffloadError("--once: stdin is empty; pipe a message in")

    def read(self) -> Said | None:
        text, self._text = self._text, None
        return None if text is None else Said(text)


def open_source(*, once: bool) -> Source:
    """The source that stdin is.

    Raises:
        OffloadError: ``once`` and nothing there.
    """
    if once:
        return Once(sys.stdin.buffer)
    if sys.stdin.isatty():
        return Terminal(_line_reader())
    return Pipe(sys.stdin.buffer)


def _line_reader() -> ReadLine:
    edit = sys.stdout.isatty()
    if edit:
        with contextlib.suppress(ImportError):
            # Its import alone gives input() editing and a history, which no file ever keeps.
            import readline

            # What is pasted is one entry whatever lines it has: as lines of their own each would
            # be a message, and one that begins with a slash a command. Python switches it off.
            if "libedit" not in (readline.__doc__ or ""):
                readline.parse_and_bind("set enable-bracketed-paste on")

    def read_line(prompt: str) -> str | None:
        try:
            if edit:
                return input(prompt)
            # input() would write its prompt to stdout, which carries answers only.
            sys.stderr.write(prompt)
            sys.stderr.flush()
            line = sys.stdin.readline()
        except EOFError:
            line = ""
        except UnicodeDecodeError as error:
            raise OffloadError(f"that line is not UTF-8 text (byte {error.start})") from None
        if line:
            return line.removesuffix("\n")
        sys.stderr.write("\n")  # Ctrl-D leaves the cursor behind the prompt
        sys.stderr.flush()
        return None

    return read_line
