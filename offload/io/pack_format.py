"""The bytes of a pack around its blocks: layout, index and footer, and how they are checked."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from offload.blocks import ALIGN, BlockKind, BlockSpec, TensorSpec, align_up
from offload.errors import StoreError
from offload.io.files import DirectFile
from offload.io.memory import AlignedBuffer

_MAGIC = b"offload\x00pack\x00\x01\r\n"
_FOOTER = struct.Struct("<16sQQ32s")  # magic, bytes of blocks, bytes of index, its SHA-256


class Slot(NamedTuple):
    """A block and its offset in the file."""

    spec: BlockSpec
    offset: int


def lay_out(specs: Iterable[BlockSpec]) -> tuple[list[Slot], int]:
    """One slot behind the other, and where the last one ends. ValueError: an id comes twice."""
    slots: list[Slot] = []
    seen: set[str] = set()
    end = 0
    for spec in specs:
        if spec.id in seen:
            raise ValueError(f"two blocks are called {spec.id}")
        seen.add(spec.id)
        slots.append(Slot(spec, end))
        end += spec.slot_nbytes
    return slots, end


def normal_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """``meta`` as it looks after a trip through JSON."""
    normal: dict[str, Any] = json.loads(json.dumps(dict(meta), allow_nan=False))
    return normal


def compare_meta(path: str, expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Raise StoreError, naming a key, unless both are the same."""
    for key in sorted(expected.keys() | found.keys()):
        want, have = expected.get(key, "missing"), found.get(key, "missing")
        if want != have:
            raise StoreError(
                f"{path} was made from something else: its {key} is {have!r}, wanted is "
                f"{want!r}; delete it to have it made again"
            )


def write_index(
    file: DirectFile, slots: Iterable[Slot], sums: Mapping[str, int | None], meta: Any
) -> None:
    """Put index and footer behind the blocks, and all of it on the disk.

    ``meta`` as ``normal_meta`` gives it.
    """
    slots = list(slots)
    data_bytes = sum(slot.spec.slot_nbytes for slot in slots)
    blocks = [_to_json(slot, sums[slot.spec.id]) for slot in slots]
    index = json.dumps({"meta": meta, "blocks": blocks}, separators=(",", ":")).encode()
    footer = _FOOTER.pack(_MAGIC, data_bytes, len(index), hashlib.sha256(index).digest())
    footer_at = align_up(len(index))
    with AlignedBuffer(footer_at + ALIGN) as tail:
        tail[: len(index)] = index
        tail[footer_at : footer_at + len(footer)] = footer
        file.truncate(data_bytes)  # the tail of an earlier attempt may be longer
        file.write(data_bytes, tail)
    file.sync()


def _to_json(slot: Slot, crc: int | None) -> list[Any]:
    spec = slot.spec
    tensors = [[t.name, t.dtype, list(t.shape), t.offset] for t in spec.tensors]
    return [spec.id, spec.kind.value, spec.group, spec.nbytes, slot.offset, crc, tensors]


def _from_json(item: Any) -> tuple[Slot, int | None]:
    block_id, kind, group, nbytes, offset, crc, tensors = item
    spec = BlockSpec(
        id=block_id,
        kind=BlockKind(kind),
        tensors=tuple(
            TensorSpec(name=n, dtype=d, shape=tuple(shape), offset=o) for n, d, shape, o in tensors
        ),
        nbytes=nbytes,
        group=group,
    )
    return Slot(spec, offset), crc


def read_index(file: DirectFile) -> tuple[list[Slot], dict[str, int | None], dict[str, Any]]:
    def refuse(why: str) -> StoreError:
        return StoreError(
            f"{file.path} is not a complete pack: {why}; delete it to have it made again"
        )

    size = file.size
    if size % ALIGN or size < 2 * ALIGN:
        raise refuse(f"its length of {size} bytes is impossible")
    with AlignedBuffer(ALIGN) as page:
        file.read(size - ALIGN, page)
        magic, data_bytes, index_bytes, digest = _FOOTER.unpack_from(page)
    if magic != _MAGIC:
        raise refuse("it has no footer")
    if data_bytes % ALIGN or data_bytes + align_up(index_bytes) + ALIGN != size:
        raise refuse(
            f"{data_bytes} bytes of blocks and {index_bytes} of index do not make {size} bytes"
        )
    with AlignedBuffer(align_up(index_bytes)) as buf:
        file.read(data_bytes, buf)
        index = bytes(buf[:index_bytes])
    if hashlib.sha256(index).digest() != digest:
        raise refuse("its index does not match its checksum")
    try:
        content = json.loads(index)
        found = [_from_json(item) for item in content["blocks"]]
        meta = dict(content["meta"])
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise refuse(f"its index cannot be understood ({e!r})") from e
    end = 0
    for slot, _ in found:
        if slot.offset != end:
            raise refuse(f"block {slot.spec.id} is at {slot.offset}, not at {end}")
        end += slot.spec.slot_nbytes
    if end != data_bytes:
        raise refuse(f"blocks end at {end}, not at {data_bytes}")
    return [slot for slot, _ in found], {slot.spec.id: crc for slot, crc in found}, meta
