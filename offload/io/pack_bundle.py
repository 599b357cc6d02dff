"""The blocks of a packed model as a store: one aligned read each, verified."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from offload.blocks import ALIGN, BlockSpec, align_up
from offload.errors import StoreError
from offload.io.engines import Engine
from offload.io.files import DirectFile
from offload.io.memory import Staging
from offload.io.pack_manifest import Block, Manifest, again, bundle_name
from offload.io.pack_sums import first_damaged, page_sums
from offload.io.ranges import Piece
from offload.io.store import DEMAND, Receipt, Span
from offload.io.transfer import Check, FileStore, Settle, check_spans, check_target, failed

LARGEST_REQUEST = 16 * 2**20


class BundleStore(FileStore):
    """Read-only blocks of a packed model directory.

    A block starts at a multiple of 4096 and goes to the start of the caller's buffer, so that it
    is read in place: into a buffer as long as the slot, an expert comes with one request and no
    copy. Whole blocks are compared with their checksums; of what ``read_spans_into`` reads, every
    page with its CRC-32, where the pack has those: for tables and for a head that is one.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        manifest: Manifest,
        engine: Engine,
        staging: Staging,
        *,
        verify: bool = True,
        request_bytes: int | None = None,
        open_file: Callable[[str | os.PathLike[str]], DirectFile] = DirectFile.open,
    ) -> None:
        """Open the bundles of ``manifest`` in ``directory``.

        Args:
            verify: compare every block that is read with its checksum; measured, 0.14 s per GB
                of one core, on the thread that ends the read.
            request_bytes: the longest request; None: as long as the largest expert, at most
                16 MiB.

        Raises:
            StoreError: a bundle cannot be opened, or is shorter than its blocks.
        """
        slots = [b.spec().slot_nbytes for b in manifest.blocks if b.group]
        longest = min(LARGEST_REQUEST, max(slots, default=LARGEST_REQUEST))
        super().__init__(engine, staging, request_bytes or align_up(longest))
        self._blocks: dict[str, Block] = {b.name: b for b in manifest.blocks}
        self._specs: dict[str, BlockSpec] = {b.name: b.spec() for b in manifest.blocks}
        self._verify = verify
        self._folder = directory
        try:
            for number, nbytes in enumerate(manifest.files):
                file = open_file(Path(directory) / bundle_name(number))
                self._files.append(file)
                if file.size < nbytes:
                    raise StoreError(
                        f"bundle {file.path} is truncated: {file.size} bytes where the manifest "
                        f"says {nbytes}; {again(directory)}"
                    )
        except BaseException:
            self.close()
            raise

    @property
    def writable(self) -> bool:
        return False

    def _pieces(self, block_id: str) -> list[Piece]:
        block = self._blocks[block_id]
        return [Piece(block.file, block.offset, 0, block.nbytes)]

    def read_into(
        self, block_id: str, dst: memoryview, *, priority: int = DEMAND
    ) -> Future[Receipt]:
        block, spec = self._blocks[block_id], self._specs[block_id]
        view = check_target(spec, dst)
        settle = self._verifier(block, view) if self._verify else None
        return self._read_block(spec, self._pieces, view, priority, settle)

    def _verifier(self, block: Block, view: memoryview) -> Settle:
        def verify(error: BaseException | None) -> None:
            if error is None and (got := page_sums(view[: block.nbytes])) != block.checksum:
                raise StoreError(
                    f"{self._files[block.file].path} is damaged: the {block.nbytes} bytes at "
                    f"offset {block.offset} have the checksum {got:#010x}, written was "
                    f"{block.checksum:#010x}; check the disk, then "
                    f"{again(self._folder)}"
                )

        return verify

    def read_spans_into(
        self, block_id: str, spans: Sequence[Span], dst: memoryview, *, priority: int = DEMAND
    ) -> Future[Receipt]:
        block, spec = self._blocks[block_id], self._specs[block_id]
        view = check_spans(spec, spans, dst)
        check = self._page_checker(block) if self._verify and block.page_crcs else None
        return self._read_spans(spec, self._pieces(block_id), spans, view, priority, check)

    def _page_checker(self, block: Block) -> Check:
        def check(offset: int, pages: memoryview) -> None:
            first = (offset - block.offset) // ALIGN
            crcs = memoryview(block.page_crcs)[4 * first : 4 * (first + len(pages) // ALIGN)]
            if (wrong := first_damaged(pages, crcs)) is not None:
                raise StoreError(
                    f"{self._files[block.file].path} is damaged: the {ALIGN} bytes at offset "
                    f"{offset + wrong * ALIGN} do not have the checksum that was written; check "
                    f"the disk, then {again(self._folder)}"
                )

        return check

    def write_from(self, block_id: str, src: memoryview) -> Future[Receipt]:
        _ = self._specs[block_id], src
        return failed(StoreError(f"block {block_id}: a packed model is never written again"))
