"""What a commit of a tile store says, how it is written down, and how it is read back.

A *tile* has parts (a weight's copy, its moments, ...). A *slot* is the room for a tile in the data
file: its parts one after the other, each at a multiple of 4096. All tiles' slots in order are a
*generation*; the data file is ``keep + 1`` generations, and tile i lives in its own slot of any
one of them. So a mapping is one small number per tile, nothing ever fragments, two tiles cannot
overlap whatever a manifest says, and tiles written in order lie in order on the disk.

A manifest is one line of JSON. Its checksum covers every byte of it: one that was cut or changed
anywhere is refused. Each value is checked on top, because a checksum says only that the writer
wrote it. Numbers per tile and part are base64 of little-endian bytes: for 100,000 tiles of four
parts that is 5 MB instead of 10, read in a few ms.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from offload.blocks import align_up
from offload.errors import StoreError
from offload.io.json_fields import count, rows, table, text
from offload.io.pack_format import normal_meta

FORMAT = "offload-tiles"
VERSION = 2

VIRGIN = 255
"""In place of a generation: the tile was never written."""
LOST = 254
"""The tile was being overwritten when that failed. Never in a manifest."""
MOST_GENERATIONS = 128


class Layout:
    """Where the parts of tiles lie. Immutable.

    Attributes:
        shapes: bytes of each part of each tile; equal tiles share one tuple.
        parts: parts of all tiles together; those of tile i have numbers from ``first[i]`` on.
        nbytes: of a generation.
    """

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        """Raises ValueError: no bytes at all, a tile without parts, or a negative size."""
        known: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.shapes = [known.setdefault(t, t) for t in map(tuple, shapes)]
        for tile in known:
            if not tile or min(tile) < 0:
                raise ValueError(f"a tile's parts must be sizes in bytes, got {list(tile)}")
        self._places = {t: [0, *accumulate(map(align_up, t))] for t in known}
        self.first = [0, *accumulate(map(len, self.shapes))]
        self.parts = self.first.pop()
        self._starts = [0, *accumulate(self._places[t][-1] for t in self.shapes)]
        self.nbytes = self._starts.pop()
        if self.nbytes == 0:
            raise ValueError("a tile store needs at least one tile with at least one byte")

    def __len__(self) -> int:
        return len(self.shapes)

    def places(self, tile: int) -> list[int]:
        """Where the tile's parts start in its slot, and the slot's length; multiples of 4096."""
        return self._places[self.shapes[tile]]

    def offset(self, tile: int, generation: int) -> int:
        """Where the tile's slot of a generation starts in the data file."""
        return generation * self.nbytes + self._starts[tile]

    def difference(self, other: Layout) -> str | None:
        """How ``other`` differs, or None."""
        if len(self) != len(other):
            return f"it has {len(self)} tiles, this run {len(other)}"
        for i, (mine, yours) in enumerate(zip(self.shapes, other.shapes, strict=True)):
            if mine != yours:
                return f"tile {i} has parts of {list(mine)} bytes, this run's {list(yours)}"
        return None


def space_needed(shapes: Sequence[Sequence[int]], keep: int, hold: int = 0) -> int:
    """Bytes of a data file for tiles of these parts: ``keep`` commits, ``hold`` that are held
    beyond them, and what is being written.

    Raises:
        ValueError: sizes that ``TileStore`` does not take.
    """
    return (check_keep(keep, hold) + 1) * Layout(shapes).nbytes


def check_keep(keep: int, hold: int = 0) -> int:
    """``keep + hold`` if a store can keep that many commits, else ValueError."""
    if keep < 1 or hold < 0 or keep + hold >= MOST_GENERATIONS:
        more = f" and {hold} held" if hold else ""
        raise ValueError(f"keep must be from 1 to {MOST_GENERATIONS - 1} commits, not {keep}{more}")
    return keep + hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A valid state of all tiles.

    Attributes:
        meta: the caller's, as JSON has it.
        generations: of each tile, or ``VIRGIN``.
        present: 1 for each part that was written, 0 for one that is absent.
        sums: of the parts that are present, else 0.
        held: numbers of older commits that stay for as long as this one's successors name them.
    """

    number: int
    identity: Mapping[str, Any]
    meta: Mapping[str, Any]
    layout: Layout
    generations: bytes
    present: bytes
    sums: array[int]
    held: tuple[int, ...] = ()


def dump(commit: Commit) -> bytes:
    """The text of a manifest.

    Raises:
        ValueError: ``meta`` is not JSON.
    """
    kinds: dict[tuple[int, ...], int] = {}
    tiles = [kinds.setdefault(t, len(kinds)) for t in commit.layout.shapes]
    body = {
        "number": commit.number,
        "identity": normal_meta(commit.identity),
        "meta": normal_meta(commit.meta),
        "kinds": [list(k) for k in kinds],
        "tiles": tiles,
        "generations": _encode(commit.generations),
        "present": _encode(commit.present),
        "sums": _encode(_little_endian(commit.sums).tobytes()),
    }
    if commit.held:
        body["held"] = list(commit.held)
    written = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    return _head(written, VERSION) + written + b"}\n"


def manifest_space(
    shapes: Sequence[Sequence[int]], identity: Mapping[str, Any], meta: Mapping[str, Any], hold: int
) -> int:
    """Bytes of disk that the manifest of any commit takes, with no longer a ``meta`` than this."""
    layout = Layout(shapes)
    largest = Commit(
        number=10**18 - 1, identity=identity, meta=meta, layout=layout,
        generations=bytes(len(layout)), present=bytes(layout.parts),
        sums=array("Q", bytes(8 * layout.parts)), held=(10**18 - 1,) * hold,
    )  # fmt: skip
    return align_up(len(dump(largest)))


def load(raw: bytes, where: str) -> Commit:
    """What ``dump`` wrote.

    Raises:
        ValueError: it is cut, changed, or says what no store wrote; the message says what.
        StoreError: it is whole, but of another version.
    """
    try:
        whole = table(json.loads(raw), "it")
    except (ValueError, RecursionError) as e:
        raise ValueError(f"it is cut or no JSON ({e})") from None
    version = count(whole.get("version"), "its version")
    head = len(_head(b"", version))
    if not raw.endswith(b"}\n") or raw[:head] != _head(raw[head:-2], version):
        raise ValueError("its checksum is wrong")
    if version != VERSION:
        raise StoreError(
            f"{where} is of version {version}, this offload reads version {VERSION}; use the "
            "offload that wrote it"
        )
    body = table(whole.get("commit"), "the commit")
    try:
        return _from_json(body)
    except KeyError as e:
        raise ValueError(f"its {e.args[0]} is missing") from None


def _from_json(body: Mapping[str, Any]) -> Commit:
    kinds = [
        tuple(count(n, "a part's size") for n in rows(kind, "a tile's parts"))
        for kind in rows(body["kinds"], "kinds")
    ]
    tiles = [count(k, "a tile's kind") for k in rows(body["tiles"], "tiles")]
    if max(tiles, default=0) >= len(kinds):
        raise ValueError(f"a tile is of kind {max(tiles)} of {len(kinds)}")
    layout = Layout([kinds[k] for k in tiles])
    generations = _decode(body["generations"], "generations", len(layout))
    present = _decode(body["present"], "present", layout.parts)
    sums = array("Q")
    sums.frombytes(_decode(body["sums"], "sums", 8 * layout.parts))
    sums = _little_endian(sums)
    if max(present) > 1:
        raise ValueError(f"a part's presence is {max(present)}, not 0 or 1")
    for tile, generation in enumerate(generations):
        if generation >= MOST_GENERATIONS and generation != VIRGIN:
            raise ValueError(f"tile {tile} is in generation {generation}")
        at = layout.first[tile]
        if generation == VIRGIN and any(present[at : at + len(layout.shapes[tile])]):
            raise ValueError(f"tile {tile} was never written, but has parts")
    for part, there in enumerate(present):
        if not there and sums[part]:
            raise ValueError(f"part number {part} is absent, but has a checksum")
    return Commit(
        number=count(body["number"], "number"),
        identity=table(body["identity"], "identity"),
        meta=table(body["meta"], "meta"),
        layout=layout,
        generations=generations,
        present=present,
        sums=sums,
        held=tuple(count(n, "a held commit") for n in rows(body.get("held", []), "held")),
    )


def require_same(where: str, found: Commit, layout: Layout, identity: Mapping[str, Any]) -> None:
    """Raise StoreError, naming the first key that differs, unless ``found`` is of this run."""
    mine = normal_meta(identity)
    keys = mine.keys() | found.identity.keys()
    # What only one of them has follows from something that both have and that differs.
    for key in sorted(keys, key=lambda k: (not (k in mine and k in found.identity), k)):
        want, have = mine.get(key, "missing"), found.identity.get(key, "missing")
        if want != have:
            raise StoreError(
                f"{where} is of another run: its {key} is {have!r}, this run's is {want!r}; "
                "resume with the same settings, or choose another directory"
            )
    different = found.layout.difference(layout)
    if different is not None:
        raise StoreError(
            f"{where} is of another run: {different}; resume with the same model and settings, "
            "or choose another directory"
        )


def _head(body: bytes, version: int) -> bytes:
    """What stands before the body. The digest covers the version: a changed digit of it must not
    look like a manifest of tomorrow."""
    digest = hashlib.sha256(b"%s %d\n" % (FORMAT.encode(), version) + body).hexdigest()
    head = f'{{"format":"{FORMAT}","version":{version},"sha256":"{digest}","commit":'
    return head.encode()


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decode(value: Any, what: str, nbytes: int) -> bytes:
    data = base64.b64decode(text(value, what), validate=True)
    if len(data) != nbytes:
        raise ValueError(f"{what} has {len(data)} bytes, not {nbytes}")
    return data


def _little_endian(words: array[int]) -> array[int]:
    if sys.byteorder == "little":
        return words
    swapped = words[:]
    swapped.byteswap()
    return swapped
