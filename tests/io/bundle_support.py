"""Six small blocks in two bundles: for the tests of packed model directories."""

from __future__ import annotations

import random
from pathlib import Path

from offload.blocks import align_up
from offload.io.engines import Engine
from offload.io.memory import AlignedBuffer, Staging
from offload.io.pack_bundle import BundleStore
from offload.io.pack_manifest import (
    Block,
    Kind,
    Layout,
    Manifest,
    Part,
    SourceId,
    read_manifest,
)
from offload.io.pack_writer import Job, PackDirectory

SIZES = [5000, 4096, 70001, 12288, 300, 9000]


def block(i: int, nbytes: int, file: int, offset: int) -> Block:
    half = nbytes // 2 // 64 * 64
    parts = (
        Part(name="gate", format="q4_0", layout=Layout.PACKED, shape=(16, 32), offset=0,
             nbytes=half - 7),
        Part(name="down", format="uint8", layout=Layout.PLAIN, shape=(nbytes - half,),
             offset=half, nbytes=nbytes - half),
    )  # fmt: skip
    return Block(
        name=f"b{i}", kind=Kind.EXPERT, group="layer", file=file, offset=offset, nbytes=nbytes,
        parts=parts,
    )  # fmt: skip


def job(fingerprint: str = "f" * 64, quant: str = "q4", plan: str = "p", scale: int = 1) -> Job:
    files = [0, 0]
    blocks = []
    for i, size in enumerate(SIZES):
        file = i // 3
        blocks.append(block(i, size * scale, file, files[file]))
        files[file] += align_up(size * scale)
    manifest = Manifest(
        source=SourceId(kind="test", path=f"/models/{fingerprint[:2]}", fingerprint=fingerprint),
        quant=quant,
        offload="0",
        model={"model_type": "test"},
        blocks=tuple(blocks),
        files=tuple(files),
    )
    return Job(manifest=manifest, plan=plan)


def content(i: int) -> bytes:
    return random.Random(i).randbytes(SIZES[i])


def fill(directory: PackDirectory, stop: int = len(SIZES)) -> None:
    for i in range(len(directory.finished), stop):
        directory.begin()
        data = memoryview(content(i))
        for at in range(0, len(data), 3000):
            directory.write(data[at : at + 3000])
        directory.end([i])


def write(path: Path) -> Manifest:
    with PackDirectory(path, job()) as directory:
        fill(directory)
        return directory.commit({"config.json": b"{}"}, aliases={"a": "b"})


def read(path: Path, io: tuple[Engine, Staging], verify: bool = True) -> list[bytes]:
    store = BundleStore(path, read_manifest(path), *io, verify=verify)
    try:
        out = []
        for i in store.ids():
            spec = store.spec(i)
            with AlignedBuffer(spec.slot_nbytes) as buf:
                receipt = store.read_into(i, buf).result(timeout=30)
                assert (receipt.requests, receipt.copied_bytes) == (
                    -(-spec.slot_nbytes // 73728),
                    0,
                )
                assert receipt.physical_bytes == spec.slot_nbytes
                out.append(bytes(buf[: spec.nbytes]))
        return out
    finally:
        store.close()
