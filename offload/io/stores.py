"""Blocks read straight from a checkpoint's files, and blocks in memory for tests."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

from offload.blocks import BlockSpec
from offload.errors import ClosedError, StoreError
from offload.io.engines import Engine
from offload.io.files import DirectFile
from offload.io.memory import Staging
from offload.io.pack import PackStore
from offload.io.ranges import Piece
from offload.io.store import DEMAND, Receipt, Span
from offload.io.transfer import FileStore, check_room, check_spans, check_target, failed

log = logging.getLogger(__name__)

__all__ = ["MemoryStore", "PackStore", "Piece", "RangeStore"]

Recipe = tuple[BlockSpec, tuple[Piece, ...]]
"""A block and the pieces of files its tensors come from; ``Piece.dst`` counts from its start."""


class RangeStore(FileStore):
    """Read-only blocks gathered from the original files of a checkpoint.

    A tensor of a published file starts at any multiple of 8 bytes. What lies in its pages of the
    block as in the file's is read in place, the rest is copied once, from the staging into the
    buffer; the receipt says how many bytes.
    """

    def __init__(
        self,
        files: Sequence[str | os.PathLike[str]],
        recipes: Mapping[str, Recipe],
        engine: Engine,
        staging: Staging,
        *,
        request_bytes: int | None = None,
        open_file: Callable[[str | os.PathLike[str]], DirectFile] = DirectFile.open,
    ) -> None:
        """Open ``files``; ``Piece.file`` counts in their order.

        Args:
            request_bytes: the longest request, where less than a chunk of the staging of it has to
                be copied; None: as long as a chunk.

        Raises:
            StoreError: a file cannot be opened, or is too short for its pieces.
            ValueError: a recipe does not bring exactly its block's tensors.
        """
        super().__init__(engine, staging, request_bytes)
        ordered = sorted(recipes.items(), key=lambda item: min(item[1][1], default=(0, 0, 0, 0)))
        self._specs = {block_id: spec for block_id, (spec, _) in ordered}
        self._pieces = {block_id: pieces for block_id, (_, pieces) in ordered}
        for spec, pieces in recipes.values():
            _check_recipe(spec, pieces, len(files))
        try:
            for path in files:
                self._files.append(open_file(path))
            self._check_sizes()
        except BaseException:
            self.close()
            raise

    def _check_sizes(self) -> None:
        for block_id, pieces in self._pieces.items():
            for p in pieces:
                file = self._files[p.file]
                if p.src + p.nbytes > file.size:
                    raise StoreError(
                        f"block {block_id} needs bytes {p.src} to {p.src + p.nbytes} of "
                        f"{file.path}, which has {file.size}; download the file again"
                    )

    @property
    def writable(self) -> bool:
        return False

    def read_into(
        self, block_id: str, dst: memoryview, *, priority: int = DEMAND
    ) -> Future[Receipt]:
        spec = self._specs[block_id]
        view = check_target(spec, dst)
        return self._read_block(spec, self._pieces.__getitem__, view, priority)

    def read_spans_into(
        self, block_id: str, spans: Sequence[Span], dst: memoryview, *, priority: int = DEMAND
    ) -> Future[Receipt]:
        spec = self._specs[block_id]
        view = check_spans(spec, spans, dst)
        return self._read_spans(spec, self._pieces[block_id], spans, view, priority)

    def write_from(self, block_id: str, src: memoryview) -> Future[Receipt]:
        _ = self._specs[block_id], src
        return failed(StoreError(f"block {block_id}: the checkpoint's own files are never written"))

    def close(self) -> None:
        """As every store; warns of files that others have written to in the meantime. Nothing in
        them tells which of the bytes that were read are of which version."""
        for file in self._files:
            if file.changed():
                log.warning(
                    "%s was written to while it was in use: what was computed with it may be of "
                    "neither version; do it again with a file that stays as it is",
                    file.path,
                )
        super().close()


def _check_recipe(spec: BlockSpec, pieces: Sequence[Piece], files: int) -> None:
    """The pieces must tile the block's tensors: every byte of them once, nothing of the padding."""
    end = -1
    runs: list[list[int]] = []
    for p in sorted((p for p in pieces if p.nbytes), key=lambda p: p.dst):
        if p.dst < end or min(p) < 0 or p.file >= files:
            raise ValueError(f"block {spec.id}: {p} overlaps another piece or names no file")
        if p.dst == end:
            runs[-1][1] = end = p.dst + p.nbytes
        else:
            end = p.dst + p.nbytes
            runs.append([p.dst, end])
    tensors: list[list[int]] = []
    for t in spec.tensors:
        if tensors and tensors[-1][1] == t.offset:
            tensors[-1][1] += t.nbytes
        elif t.nbytes:
            tensors.append([t.offset, t.offset + t.nbytes])
    if runs != tensors:
        raise ValueError(f"block {spec.id}: pieces bring bytes {runs}, its tensors are {tensors}")


class MemoryStore:
    """Blocks in a dict: the model that other stores are compared with, for tests."""

    def __init__(
        self, specs: Iterable[BlockSpec], contents: Mapping[str, bytes] | None = None
    ) -> None:
        self._specs = {s.id: s for s in specs}
        self._contents: dict[str, bytes] = dict(contents or {})
        for block_id, content in self._contents.items():
            if len(content) != self._specs[block_id].nbytes:
                raise ValueError(
                    f"block {block_id} has {self._specs[block_id].nbytes} bytes, "
                    f"its content {len(content)}"
                )
        self._lock = threading.Lock()
        self._closed = False

    @property
    def writable(self) -> bool:
        return True

    def ids(self) -> Iterable[str]:
        return self._specs.keys()

    def spec(self, block_id: str) -> BlockSpec:
        return self._specs[block_id]

    def read_into(
        self,
        block_id: str,
        dst: memoryview,
        *,
        priority: int = DEMAND,
    ) -> Future[Receipt]:
        spec = self._specs[block_id]
        spans = [Span(t.offset, t.offset, t.nbytes) for t in spec.tensors]
        return self._fill(block_id, spans, check_target(spec, dst))

    def read_spans_into(
        self,
        block_id: str,
        spans: Sequence[Span],
        dst: memoryview,
        *,
        priority: int = DEMAND,
    ) -> Future[Receipt]:
        return self._fill(block_id, spans, check_spans(self._specs[block_id], spans, dst))

    def _fill(self, block_id: str, spans: Sequence[Span], view: memoryview) -> Future[Receipt]:
        with self._lock:
            if self._closed:
                return failed(ClosedError(f"block {block_id}: the store is closed"))
            content = self._contents.get(block_id)
        if content is None:
            return failed(StoreError(f"block {block_id} was never written"))
        for s in spans:
            view[s.dst : s.dst + s.nbytes] = content[s.src : s.src + s.nbytes]
        view.release()
        return _moved(sum(s.nbytes for s in spans))

    def write_from(self, block_id: str, src: memoryview) -> Future[Receipt]:
        spec = self._specs[block_id]
        view = check_room(block_id, src, spec.nbytes)
        with self._lock:
            if self._closed:
                return failed(ClosedError(f"block {block_id}: the store is closed"))
            self._contents[block_id] = bytes(view[: spec.nbytes])
        return _moved(spec.payload_nbytes)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._contents.clear()


def _moved(nbytes: int) -> Future[Receipt]:
    future: Future[Receipt] = Future()
    future.set_running_or_notify_cancel()
    future.set_result(
        Receipt(
            payload_bytes=nbytes, physical_bytes=0, copied_bytes=nbytes, requests=0, seconds=0.0
        )
    )
    return future
