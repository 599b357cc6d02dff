"""A source, once through the tokenizer, into a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from offload.errors import DataError
from offload.train.data.bad_rows import BadRow, Tally
from offload.train.data.encode import Encoded, Encoder, StreamEncoder
from offload.train.data.plain_text import Chunk
from offload.train.data.shapes import Completion, Shape, Text, shape_of
from offload.train.data.sources import Row, Source
from offload.train.data.store import TokenStore

Progress = Callable[[int, int], None]
"""Bytes done, bytes in all."""

What = Shape | Chunk | BadRow

_GROUP_ROWS = 256
_GROUP_CHARACTERS = 1 << 18


def tokenise(
    source: Source,
    encoder: Encoder,
    directory: Path,
    *,
    skip_bad_rows: bool,
    note: Callable[[str], None],
    progress: Progress | None,
) -> TokenStore:
    """Read and encode everything.

    Of a plain text, which is one row, every sequence counts as a row.

    Raises:
        DataError: a bad row that is not to be skipped, a broken file, or nothing to learn from.
        StoreError: the disk is full or fails.
    """
    store = TokenStore(directory)
    tally = Tally(skip_bad_rows)
    try:
        _fill(store, source, encoder, tally, progress)
    except BaseException:
        store.close()
        raise
    tally.tell(note, source.path.name, encoder.seq_len)
    if not len(store):
        store.close()
        skipped = f": all {tally.bad} rows are bad; the first: {tally.first_bad}"
        raise DataError(f"{source.path} has nothing to learn from{skipped if tally.bad else ''}")
    return store


def _fill(
    store: TokenStore, source: Source, encoder: Encoder, tally: Tally, progress: Progress | None
) -> None:
    stream = StreamEncoder(encoder)
    row_number = 0
    for group in _groups(source.rows()):
        for (row, what), result in zip(group, _encode(group, encoder, stream), strict=True):
            if isinstance(result, BadRow):
                tally.reject(source.place(row.file, row.line), result)
                continue
            if result.cut:
                tally.truncate(source.place(row.file, row.line))
            for piece in result.pieces:
                store.add(piece, file=row.file, line=row.line, row=row_number)
                row_number += isinstance(what, Chunk)
            row_number += not isinstance(what, Chunk)
        if progress is not None:
            progress(group[-1][0].done, source.nbytes)
    store.seal()


def _groups(rows: Iterator[Row]) -> Iterator[list[tuple[Row, What]]]:
    """Some rows at a time with what they say; chunks of a text alone."""
    group: list[tuple[Row, What]] = []
    characters = 0
    for row in rows:
        what = _read(row.value)
        alone = isinstance(what, Chunk)
        if group and (alone or len(group) == _GROUP_ROWS or characters >= _GROUP_CHARACTERS):
            yield group
            group, characters = [], 0
        if alone:
            yield [(row, what)]
        else:
            group.append((row, what))
            characters += _characters(what)
    if group:
        yield group


def _read(value: Any) -> What:
    if isinstance(value, Chunk | BadRow):
        return value
    try:
        return shape_of(value)
    except BadRow as bad:
        return bad


def _characters(what: What) -> int:
    match what:
        case Text(text):
            return len(text)
        case Completion(prompt, completion):
            return 2 * (len(prompt) + len(completion))
    return 0  # conversations are encoded one by one


def _encode(
    group: list[tuple[Row, What]], encoder: Encoder, stream: StreamEncoder
) -> list[Encoded | BadRow]:
    first = group[0][1]
    if isinstance(first, Chunk):
        return [stream.encode(first.text, first.last)]
    encoded = iter(encoder.encode([w for _, w in group if not isinstance(w, BadRow | Chunk)]))
    return [what if isinstance(what, BadRow) else next(encoded) for _, what in group]
