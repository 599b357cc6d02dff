"""Objects of a JSON file: one per line, or the elements of one list.

Which of the two a file holds is told by its first character, not by its name: both endings are in
use for both. Memory holds one object at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from offload.errors import DataError
from offload.train.data.bad_rows import BadRow


class Repeated(dict[str, Any]):
    """An object that has a key more than once; of the values the last one is here."""

    keys_again: frozenset[str]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    names = [name for name, _ in pairs]
    repeated = Repeated(found)
    repeated.keys_again = frozenset(name for name in found if names.count(name) > 1)
    return repeated


_DECODER = json.JSONDecoder(object_pairs_hook=_object)

_BLANK = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"
_COMPRESSED = (
    (b"\x1f\x8b", "gzip", "gunzip -k"), (b"\x28\xb5\x2f\xfd", "zstd", "unzstd"),
    (b"\xfd7zXZ\0", "xz", "unxz -k"), (b"BZh", "bzip2", "bunzip2 -k"),
    (b"PK\x03\x04", "zip", "unzip"),
)  # fmt: skip
_CHUNK_BYTES = 1 << 20
MAX_ELEMENT = 1 << 28
"""Characters of one element of a list; without a limit a damaged one would read the file whole."""


def json_rows(path: Path) -> Iterator[tuple[int, Any, int]]:
    """(line, object or ``BadRow``, bytes read so far) of each object.

    Blank lines count as lines and are nothing else. A byte order mark is skipped.

    Raises:
        DataError: a list that is broken: what follows in it cannot be found; or what is in the
            file is compressed.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        start = file.read(4096)
        if start.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise DataError(
                f"{path.name}: is UTF-16 or UTF-32; JSON is UTF-8: convert it (iconv -t utf-8)"
            )
        for magic, kind, tool in _COMPRESSED:
            if start.startswith(magic):
                raise DataError(f"{path.name}: is compressed ({kind}): unpack it first ({tool})")
        file.seek(len(_BOM) if start.startswith(_BOM) else 0)
        if start.removeprefix(_BOM).lstrip(_BLANK).startswith(b"["):
            yield from _elements(file, path.name)
        else:
            yield from _lines(file)


def _lines(file: BinaryIO) -> Iterator[tuple[int, Any, int]]:
    done = file.tell()
    for number, line in enumerate(file, 1):
        done += len(line)
        if line.strip(_BLANK):
            yield number, _parse(line), done


def _parse(line: bytes) -> Any:
    try:
        value = _DECODER.decode(line.decode("utf-8"))
    except UnicodeDecodeError as e:
        return BadRow(f"is not UTF-8: byte {e.object[e.start]:#04x} at position {e.start + 1}")
    except json.JSONDecodeError as e:
        if e.msg.startswith("Expecting") and 0 < len(e.doc.rstrip()) <= e.pos:
            return BadRow("is no JSON: its object goes on in the next line; jq -c . joins them")
        what = e.msg.removesuffix(" at")  # some of its messages end so
        return BadRow(f"is no JSON: {what} at character {e.pos + 1}, in {_excerpt(e.doc, e.pos)}")
    except (ValueError, RecursionError) as e:
        return BadRow(f"is no JSON that can be read: {e}")
    return value if isinstance(value, dict) else _no_object(value)


def _no_object(value: Any) -> BadRow:
    kind = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return BadRow(f'is {kind.get(type(value), "a number")}, not an object like {{"text": ...}}')


def _excerpt(text: str, at: int) -> str:
    begin = max(0, at - 20)
    return repr(text[begin : at + 20].strip())


def _elements(file: BinaryIO, name: str) -> Iterator[tuple[int, Any, int]]:
    """A list, element by element; the line of each is where it begins."""
    text = _Text(file, name)
    text.skip("[")
    if text.peek() == "]":
        text.skip("]")
    else:
        while True:
            text.peek()
            line = text.line
            value = text.value()
            yield line, value if isinstance(value, dict) else _no_object(value), text.done
            if text.peek() == "]":
                text.skip("]")
                break
            text.skip(",")
    if text.peek():
        raise DataError(f"{name}:{text.line}: something follows the end of the list")


class _Text:
    """The unread part of a file, as much as one element needs."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        import codecs

        self._file, self._name = file, name
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._scan = _DECODER.raw_decode
        self._text = ""
        self._at = 0
        self._ended = False
        self.line = 1

    @property
    def done(self) -> int:
        return self._file.tell()

    def peek(self) -> str:
        """The next character that is no blank, "" at the end."""
        while True:
            rest = len(self._text)
            at = self._at
            while at < rest and self._text[at] in " \t\r\n":
                at += 1
            self._advance(at)
            if at < rest or not self._more(_CHUNK_BYTES):
                return self._text[at : at + 1]

    def skip(self, wanted: str) -> None:
        found = self.peek()
        if found != wanted:
            raise DataError(
                f"{self._name}:{self.line}: the list is broken: expected {wanted!r}, "
                f"found {found or 'the end of the file'!r}"
            )
        self._advance(self._at + 1)

    def value(self) -> Any:
        """The element that begins here."""
        want = _CHUNK_BYTES
        while True:
            try:
                value, end = self._scan(self._text, self._at)
            except (ValueError, RecursionError) as e:
                # Broken, or not all here yet: the end of the buffer looks like either.
                held = len(self._text) - self._at
                if held > MAX_ELEMENT or isinstance(e, RecursionError) or not self._more(want):
                    raise DataError(f"{self._name}:{self.line}: the list is broken: {e}") from e
                want *= 2
            else:
                self._advance(end)
                return value

    def _advance(self, at: int) -> None:
        self.line += self._text.count("\n", self._at, at)
        self._at = at

    def _more(self, nbytes: int) -> bool:
        if self._ended:
            return False
        data = self._file.read(nbytes)
        self._ended = not data
        try:
            fresh = self._decoder.decode(data, final=self._ended)
        except UnicodeDecodeError as e:
            raise DataError(f"{self._name}: is not UTF-8 near line {self.line}: {e}") from e
        self._text, self._at = self._text[self._at :] + fresh, 0
        return not self._ended
