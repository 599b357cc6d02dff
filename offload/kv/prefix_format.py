"""What a stored group of keys and values looks like in its file, and what it is called. Pure.

A *group* is what one pass over ``chunk`` tokens of a prompt left in the cache, all layers of it:
the unit of reuse, one file, one read and one write. Its name is a chained hash: of everything that
changes a number (``root``), and of all tokens up to its end. So a name stands for a prefix, two
prompts share the files of what they have in common, and whatever differs (model, dtype, version,
processor) has other names and is never found.

File: the pieces (tensors, each at a multiple of 64 bytes), the footer as JSON, and a last page that
says where the footer is. Both parts carry an XXH3. The tokens are stored as well: a reader compares
them, so that what it takes never hangs on a hash alone.

A prompt's last tokens, at least one, are no group: they fill none, and a model has to be asked for
the logits behind them. What that pass leaves, those logits included, is a file of the same kind.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload.blocks import ALIGN, DTYPE_BYTES, align_up
from offload.errors import StoreError
from offload.io.checksum import xxh3

FORMAT = 2
PIECE_ALIGN = 64

_MAGIC = b"offload kv group"
_LAST = struct.Struct("<16sIQQQ")
"""Magic, format, where the footer begins, its bytes, its XXH3."""


class DamagedGroupError(StoreError):
    """A stored group is not what was written; the message says where it shows."""


def root_of(facts: Mapping[str, Any]) -> str:
    """The name of everything that changes a number, hexadecimal: 64 digits.

    ``facts``: what JSON can hold, or anything whose ``str`` is the same in every process.
    """
    text = json.dumps([FORMAT, dict(facts)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def group_names(root: str, tokens: Sequence[int], chunk: int, limit: int) -> list[str]:
    """Names of the groups that cover the first tokens, at most ``limit`` of them; each stands for
    all tokens up to its end."""
    names = []
    name = root
    for at in range(0, min(len(tokens), limit) - chunk + 1, chunk):
        digest = hashlib.sha256(bytes.fromhex(name))
        digest.update(struct.pack(f"<{chunk}q", *tokens[at : at + chunk]))
        name = digest.hexdigest()
        names.append(name)
    return names


def end_name(before: str, tokens: Sequence[int]) -> str:
    """The name of a prompt's *end*: the ``tokens`` behind its last group, called ``before`` (or the
    root), with the logits after the last of them. No group has such a name."""
    digest = hashlib.sha256(bytes.fromhex(before))
    digest.update(b"end")
    digest.update(struct.pack(f"<{len(tokens)}q", *tokens))
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A tensor of a group: of which layer, which of its parts, and where it lies, in bytes."""

    layer: int
    part: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        n = DTYPE_BYTES[self.dtype]
        for size in self.shape:
            n *= size
        return n


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What a file holds. ``start``: tokens before the group's own. ``compute_s``: what the pass
    took that made it."""

    root: str
    name: str
    start: int
    tokens: tuple[int, ...]
    pieces: tuple[Piece, ...]
    compute_s: float

    @property
    def payload_bytes(self) -> int:
        return max((p.offset + p.nbytes for p in self.pieces), default=0)


def footer_bytes(pieces: int, tokens: int) -> int:
    """Room that is certainly enough behind the pieces: footer and last page."""
    return align_up(1024 + 256 * pieces + 24 * tokens) + ALIGN


def finish(group: Group, area: memoryview) -> int:
    """Put footer and last page behind the pieces that are in ``area``; returns the file's bytes."""
    payload = group.payload_bytes
    text = json.dumps(
        {
            "root": group.root,
            "name": group.name,
            "start": group.start,
            "tokens": group.tokens,
            "pieces": [[p.layer, p.part, p.dtype, p.shape, p.offset] for p in group.pieces],
            "compute_s": group.compute_s,
            "payload_bytes": payload,
            "payload_xxh3": xxh3(area[:payload]),
        }
    ).encode()
    begin = align_up(payload)
    end = begin + align_up(len(text))
    _fill(area, payload, b"", begin)
    _fill(area, begin, text, end)
    _fill(
        area, end, _LAST.pack(_MAGIC, FORMAT, begin, len(text), xxh3(memoryview(text))), end + ALIGN
    )
    return end + ALIGN


def parse(area: memoryview, *, root: str, name: str, start: int, tokens: Sequence[int]) -> Group:
    """The group that a whole file holds, checked to the last byte.

    Raises:
        DamagedGroupError: it is not whole, or of something else than what is looked for.
    """
    if area.nbytes < 2 * ALIGN or area.nbytes % ALIGN:
        raise DamagedGroupError(f"it has {area.nbytes} bytes")
    magic, format, begin, length, want = _LAST.unpack_from(area, area.nbytes - ALIGN)
    if magic != _MAGIC or format != FORMAT:
        raise DamagedGroupError("its last page is not that of a group")
    if begin + length > area.nbytes - ALIGN or xxh3(area[begin : begin + length]) != want:
        raise DamagedGroupError("the checksum of its footer differs")
    try:
        found = json.loads(bytes(area[begin : begin + length]))
        group = Group(
            root=str(found["root"]),
            name=str(found["name"]),
            start=int(found["start"]),
            tokens=tuple(int(t) for t in found["tokens"]),
            pieces=tuple(_piece(row, begin) for row in found["pieces"]),
            compute_s=float(found["compute_s"]),
        )
        payload, total = int(found["payload_bytes"]), int(found["payload_xxh3"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedGroupError(f"its footer makes no sense: {error}") from error
    if payload != group.payload_bytes or xxh3(area[:payload]) != total:
        raise DamagedGroupError("the checksum of its keys and values differs")
    asked = (root, name, start, tuple(tokens))
    if (group.root, group.name, group.start, group.tokens) != asked:
        raise DamagedGroupError("it is of another prefix than its name says")
    return group


def _piece(row: Any, limit: int) -> Piece:
    layer, part, dtype, shape, offset = row
    found = Piece(
        layer=int(layer),
        part=str(part),
        dtype=str(dtype),
        shape=tuple(int(n) for n in shape),
        offset=int(offset),
    )
    if min(found.layer, found.offset, *found.shape) < 0 or found.offset % PIECE_ALIGN:
        raise ValueError(f"a piece at {found.offset} of {found.shape}")
    if found.offset + found.nbytes > limit:
        raise ValueError(f"a piece ends at {found.offset + found.nbytes} of {limit} bytes")
    return found


def _fill(area: memoryview, at: int, data: bytes, end: int) -> None:
    """``data``, then zeros up to ``end``: a file has no byte of what was in memory before."""
    area[at : at + len(data)] = data
    area[at + len(data) : end] = bytes(end - at - len(data))
