"""The answers of a batch: a file that only grows by whole lines, and that a later run continues.

Each line names its prompt's place in the input and a hash of everything that decides its answer
(model, tokens, settings), so a run that goes on knows what is there already, and never takes an
answer for another question's. What a kill leaves behind is at most one line without its end.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from offload.errors import OffloadError

KEY = "job"
"""The field with the hash."""


def key_of(facts: Any) -> str:
    """A hash of what decides an answer; ``facts`` is anything that JSON takes."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))


class Answers:
    """An output file, locked while it is open.

    Attributes:
        done: indices of the prompts that have an answer.
        torn: bytes of a line without an end that were cut off.
    """

    def __init__(self, path: Path, keys: Sequence[str]) -> None:
        """
        Args:
            path: made if it is not there.
            keys: of all prompts, by index.

        Raises:
            OffloadError: it cannot be written, another process writes it, or it holds something
                else than answers to these prompts.
        """
        self._path = path
        self.done: set[int] = set()
        self.torn = 0
        try:
            target = path.expanduser()
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
            OffloadError: the disk is full or failed; the file ends with the last whole line.
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
        except (ValueError, KeyError, TypeError):
            raise OffloadError(self._foreign(number)) from None
        if not isinstance(index, int) or not 0 <= index < len(keys) or keys[index] != key:
            raise OffloadError(
                f"--output {self._path} line {number} is the answer to another prompt, or of "
                f"another model or other settings; continue with the same input and flags, or give "
                f"another file"
            )
        return index

    def _foreign(self, number: int) -> str:
        return (
            f"--output {self._path} is no output of this command (line {number}); give another "
            f"file: it is not overwritten"
        )


__all__ = ["KEY", "Answers", "key_of"]
