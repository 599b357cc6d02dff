"""What the tests of ``offload.io`` share: small blocks, aligned buffers, stores of each kind."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from offload.blocks import BlockKind, BlockSpec, layout
from offload.io.engines import Engine, make_engine
from offload.io.faults import FaultyStore
from offload.io.memory import AlignedBuffer, Staging
from offload.io.ranges import Piece
from offload.io.store import Store
from offload.io.stores import MemoryStore, PackStore, RangeStore
from offload.io.wrappers import LatencyStore, MeteredStore

DEPTH = 3
REQUEST_BYTES = 16384  # small, so that a block takes several requests

SPECS = [
    layout("small", BlockKind.WEIGHT, [("w", "bfloat16", (3, 5)), ("b", "float32", (3,))]),
    layout("page", BlockKind.WEIGHT, [("w", "uint8", (4096,))]),
    layout("odd", BlockKind.EXPERT, [("g", "uint8", (70001,)), ("u", "uint8", (1, 333))], "layer0"),
    layout("long", BlockKind.STATE, [("m", "float32", (64, 1024))]),
    layout("empty", BlockKind.WEIGHT, [("w", "float32", (0, 7))]),
]


def failing(code: int) -> Callable[..., int]:
    """A system call that always fails with ``code``."""

    def call(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    return call


def content_of(spec: BlockSpec, seed: int = 0) -> bytes:
    """Reproducible bytes for a block; the padding too."""
    return random.Random(f"{spec.id}/{seed}").randbytes(spec.nbytes)


def payload(spec: BlockSpec, content: bytes | memoryview) -> list[bytes]:
    """The tensors' bytes: what two copies of a block must agree on."""
    return [bytes(content[t.offset : t.offset + t.nbytes]) for t in spec.tensors]


@contextmanager
def filled(content: bytes, length: int | None = None) -> Iterator[memoryview]:
    """An aligned buffer that starts with ``content``."""
    with AlignedBuffer(length or len(content)) as buf:
        buf[: len(content)] = content
        yield buf


def read_block(store: Store, block_id: str, *, whole_slot: bool = True) -> list[bytes]:
    spec = store.spec(block_id)
    with AlignedBuffer(spec.slot_nbytes if whole_slot else spec.nbytes) as buf:
        store.read_into(block_id, buf).result(timeout=30)
        return payload(spec, buf)


def write_block(store: Store, block_id: str, content: bytes) -> None:
    spec = store.spec(block_id)
    with filled(content, spec.slot_nbytes) as buf:
        store.write_from(block_id, buf).result(timeout=30)


@dataclass
class Case:
    """A store with every block of ``SPECS`` in it, holding ``contents``."""

    store: Store
    contents: dict[str, bytes]
    on_disk: bool
    paths: list[Path] = field(default_factory=list)
    request_bytes: int = REQUEST_BYTES


def scatter(folder: Path, contents: dict[str, bytes]) -> tuple[list[Path], dict[str, list[Piece]]]:
    """Tensors of ``SPECS`` at unaligned places of two files, the second ending in mid-page."""
    bodies = [bytearray(b"header.."), bytearray(b"another header, longer..")]
    pieces: dict[str, list[Piece]] = {}
    for spec in SPECS:
        pieces[spec.id] = []
        for i, t in enumerate(spec.tensors):
            file = i % 2
            pieces[spec.id].append(Piece(file, len(bodies[file]), t.offset, t.nbytes))
            bodies[file] += contents[spec.id][t.offset : t.offset + t.nbytes]
            bodies[file] += b"\xee" * ((-len(bodies[file])) % 8)
    paths = []
    for i, body in enumerate(bodies):
        paths.append(folder / f"part{i}")
        paths[-1].write_bytes(body)
    return paths, pieces


LONG = 1 << 20  # in place a block takes one request, longer than a chunk


def _range(
    folder: Path, engine: Engine, staging: Staging, request_bytes: int | None = None
) -> Case:
    contents = {s.id: content_of(s) for s in SPECS}
    paths, pieces = scatter(folder, contents)
    recipes = {s.id: (s, tuple(pieces[s.id])) for s in SPECS}
    store = RangeStore(paths, recipes, engine, staging, request_bytes=request_bytes)
    return Case(store, contents, True, paths, request_bytes or REQUEST_BYTES)


def _pack(folder: Path, engine: Engine, staging: Staging, request_bytes: int | None = None) -> Case:
    contents = {s.id: content_of(s) for s in SPECS}
    store = PackStore.create(folder, SPECS, engine, staging, request_bytes=request_bytes)
    for s in SPECS:
        write_block(store, s.id, contents[s.id])
    return Case(store, contents, True, [], request_bytes or REQUEST_BYTES)


def _reopened(folder: Path, engine: Engine, staging: Staging) -> Case:
    contents = {s.id: content_of(s) for s in SPECS}
    with_sums = PackStore.create(folder, SPECS, engine, staging, checksums=True)
    for s in SPECS:
        write_block(with_sums, s.id, contents[s.id])
    with_sums.commit(folder / "pack", {"of": "tests"})
    with_sums.close()
    store = PackStore.open(
        folder / "pack", engine, staging, expect_meta={"of": "tests"}, verify=True
    )
    return Case(store, contents, True, [folder / "pack"])


def _memory(_folder: Path, _engine: Engine, _staging: Staging) -> Case:
    contents = {s.id: content_of(s) for s in SPECS}
    return Case(MemoryStore(SPECS, contents), contents, False)


def _around(
    make: Callable[[Path, Engine, Staging], Case], wrap: Callable[[Store], Store]
) -> Callable[[Path, Engine, Staging], Case]:
    def build(folder: Path, engine: Engine, staging: Staging) -> Case:
        case = make(folder, engine, staging)
        return Case(wrap(case.store), case.contents, case.on_disk, case.paths)

    return build


STORES: dict[str, Callable[[Path, Engine, Staging], Case]] = {
    "range": _range,
    "pack": _pack,
    "range-long-requests": partial(_range, request_bytes=LONG),
    "pack-long-requests": partial(_pack, request_bytes=LONG),
    "pack-reopened": _reopened,
    "memory": _memory,
    "latency(range)": _around(_range, lambda s: LatencyStore(s, seconds=0.001, bytes_per_s=1e9)),
    "metered(pack)": _around(_pack, MeteredStore),
    "faulty(pack)": _around(_pack, FaultyStore),
    "metered(latency(faulty(memory)))": _around(
        _memory, lambda s: MeteredStore(LatencyStore(FaultyStore(s)))
    ),
}


@contextmanager
def rig(engine_name: str) -> Iterator[tuple[Engine, Staging]]:
    """An engine and a staging for it, closed in the right order."""
    with ExitStack() as stack:
        staging = Staging(DEPTH, REQUEST_BYTES)
        stack.callback(staging.close)
        engine = make_engine(engine_name, DEPTH)
        stack.callback(engine.close)
        yield engine, staging
