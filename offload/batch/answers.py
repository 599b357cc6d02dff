"""The answers of a batch: a file that only grows by whole lines, and that a later run continues.

Each line names its prompt's place in the input and a hash of everything that decides its answer
(model, tokens, settings), so a run that goes on knows what is there already, and never takes an
answer for another question's. What a kill leaves behind is at most one line without its end.
Where prompts hold the date, each line has the time that all of them were written at.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from offload.errors import OffloadError
from offload.io.whole_file import expanded
from offload.models.prompt_time import read_time

KEY = "job"
"""The field with the hash."""

ID = "id"
"""The field with what the input calls the prompt."""

TIME = "prompt_time"
"""The field with the time that a chat template saw."""

VERSION = "2"
"""Of what goes into a hash."""


def key_of(facts: Any) -> str:
    """A hash of what decides an answer; ``facts`` is anything that JSON takes."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))


def job_key(model: Any, settings: Any, prompt: Any) -> str:
    """What stands in a line: version, a few digits that tell what differs, and the hash of all."""
    hints = [key_of(part)[:4] for part in (model, settings)]
    return ":".join([VERSION, *hints, key_of([model, settings, prompt])])


def _difference(found: str, mine: str) -> str:
    """Why a line with the key ``found`` is not the answer that ``mine`` asks for; a way out."""
    theirs, ours = found.split(":"), mine.split(":")
    if len(theirs) != len(ours) or theirs[0] != ours[0]:
        return (
            "was written by another version of offload, which this one cannot continue: finish it "
            "with that version, or take the prompts that it answers out of --batch (index: their "
            "place, from 0) and give another file"
        )
    if theirs[1] != ours[1]:
        what = "is the answer of another model, or the files of this one have changed"
    elif theirs[2] != ours[2]:
        what = "is an answer with other flags or settings"
    else:
        what = (
            "is the answer to another prompt: the input, the chat template or the tokenizer has "
            "changed"
        )
    return f"{what}; continue with the same input and flags, or give another file"


def prompt_time(path: Path) -> datetime | None:
    """The time at which the prompts of an output were written, if they depend on it.

    What is no output has none, and is refused when it is opened.
    """
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if expanded(path).is_file():
            with expanded(path).open("rb") as file:
                first = json.loads(file.readline())
            return read_time(first.get(TIME)) if isinstance(first, dict) else None
    return None


class Answers:
    """An output file, locked while it is open.

    Attributes:
        done: indices of the prompts that have an answer.
        torn: bytes of a line without an end that were cut off.
    """

    def __init__(
        self, path: Path, keys: Sequence[str], ids: Sequence[str | int | None] | None = None
    ) -> None:
        """
        Args:
            path: made if it is not there.
            keys: of all prompts, by index.
            ids: of all prompts, by index: what lines name them by for whoever reads the file; None:
                lines have none.

        Raises:
            OffloadError: it cannot be written, another process writes it, or it holds something
                else than answers to these prompts.
        """
        self._path = path
        self._ids = ids
        self.done: set[int] = set()
        self.torn = 0
        try:
            target = expanded(path)
            self._file: BinaryIO = open(  # noqa: SIM115  held until close
                os.open(target, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666), "r+b", buffering=0
            )
        except OSError as error:
            raise OffloadError(f"--output {path} cannot be written: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                raise OffloadError(f"--output {path} is no file that can be continued; give one")
            self._lock()
            self._read(keys)
        except BaseException:
            self._file.close()
            raise

    def add(self, index: int, key: str, answer: Mapping[str, Any]) -> None:
        """Append an answer; it is on the disk when this returns.

        Raises:
            OffloadError: the disk is full or failed; the file ends with the last whole line. Or
                somebody has removed it: what is written to it is lost.
        """
        line = json.dumps({"index": index, KEY: key, **answer}, ensure_ascii=False)
        # A lone surrogate (from a broken tokenizer) is no UTF-8; escaped it is still JSON.
        data = (line + "\n").encode("utf-8", "backslashreplace")
        end = self._file.seek(0, os.SEEK_END)
        try:
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) or 0 :]
            os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            raise OffloadError(
                f"--output {self._path} cannot be written: {error.strerror}; what is there is "
                f"whole, and the same command continues it"
            ) from error
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise OffloadError(
                f"--output {self._path} was removed while answers were written to it, and they are "
                f"gone with it; the same command answers all prompts again"
            )
        self.done.add(index)

    def close(self) -> None:
        """Idempotent."""
        self._file.close()

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OffloadError(
                f"another process writes --output {self._path}; wait for it, or give another file"
            ) from None
        except OSError:
            return  # a file system without locks

    def _read(self, keys: Sequence[str]) -> None:
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].splitlines(), 1):
            index = self._index(line, number, keys)
            if index in self.done:
                raise OffloadError(
                    f"--output {self._path} line {number} answers prompt {index} again; give "
                    f"another file, or remove it"
                )
            self.done.add(index)
        if whole < len(data):
            # Ours, if the beginning looks like it: never cut what somebody else has written.
            if not (data[whole:].startswith(b'{"index"') or b'{"index"'.startswith(data[whole:])):
                raise OffloadError(self._foreign(data.count(b"\n") + 1))
            self.torn = len(data) - whole
            self._file.truncate(whole)

    def _index(self, line: bytes, number: int, keys: Sequence[str]) -> int:
        try:
            found = json.loads(line)
            index, key = found["index"], found[KEY]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise OffloadError(self._foreign(number)) from None
        if not isinstance(index, int) or not isinstance(key, str):
            raise OffloadError(self._foreign(number))
        if not 0 <= index < len(keys) or keys[index] != key:
            # Which prompt a line behind the input's end has answered does not matter.
            why = _difference(key, keys[min(max(index, 0), len(keys) - 1)])
            raise OffloadError(f"--output {self._path} line {number} {why}")
        self._check_id(found, index, number)
        return index

    def _check_id(self, found: Mapping[str, Any], index: int, number: int) -> None:
        """An id decides no answer and is in no hash, but answers are looked up by it."""
        if self._ids is None or ID not in found or found[ID] == self._ids[index]:
            return
        theirs, ours = (json.dumps(one) for one in (found[ID], self._ids[index]))
        raise OffloadError(
            f"--output {self._path} line {number} answers prompt {index} with the id {theirs}, and "
            f"--batch has {ours} there; give it back its id, or give another file"
        )

    def _foreign(self, number: int) -> str:
        return (
            f"--output {self._path} is no output of this command (line {number}); give another "
            f"file: it is not overwritten"
        )


__all__ = ["ID", "KEY", "TIME", "Answers", "job_key", "key_of", "prompt_time"]
