"""A text file as one document, in chunks that can be tokenised one after the other.

The whole file is one stream: blank lines are text like any other, as one expects of a book or of
source code. Who wants documents apart has JSON lines.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from offload.errors import DataError

CHUNK_CHARACTERS = 1 << 16
_MAX_CHUNK = 4 * CHUNK_CHARACTERS

# Before a line that begins with a letter or the like: no usual tokenizer has a token over that.
_CUT = re.compile(r"\n(?=\S)")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a document.

    Tokens do not span chunks: at a cut, once in about 65,000 characters, what would have been
    one token may be two.
    """

    text: str
    last: bool
    """The document ends here."""


def text_chunks(path: Path) -> Iterator[tuple[int, Chunk, int]]:
    """(line where it begins, chunk, bytes read so far); CRLF is read as LF, as everywhere.

    Nothing for a file without any text but blanks.

    Raises:
        DataError: the file is not UTF-8, or has zero bytes, as UTF-16 and what is no text have.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        held, line, any_text = "", 1, False
        ended = False
        while not ended:
            at = file.tell()
            data = file.read(CHUNK_CHARACTERS)
            ended = not data
            if (zero := data.find(0)) >= 0:
                raise DataError(
                    f"{path.name}: is no text: byte {at + zero + 1} is zero; if it is UTF-16, "
                    "convert it (iconv -f utf-16 -t utf-8)"
                )
            try:
                held += decoder.decode(data, final=ended)
            except UnicodeDecodeError as e:
                raise DataError(
                    f"{path.name}: is not UTF-8 text (near byte {at + e.start}: {e.reason}); "
                    "convert it (iconv -t utf-8)"
                ) from e
            cut = len(held) if ended else _last_cut(held)
            text, held = held[:cut].replace("\r\n", "\n"), held[cut:]
            any_text = any_text or bool(text.strip())
            if (text or ended) and any_text:
                yield line, Chunk(text, ended), file.tell()
            line += text.count("\n")


def _last_cut(text: str) -> int:
    """Where to end a chunk; 0: not yet."""
    if len(text) < CHUNK_CHARACTERS:
        return 0
    last = 0
    for found in _CUT.finditer(text, len(text) // 2):
        last = found.end()
    # An endless line: before a blank, which begins a word's token; or anywhere.
    last = last or max(0, text.rfind(" ", len(text) // 2))
    return last or (len(text) if len(text) >= _MAX_CHUNK else 0)
