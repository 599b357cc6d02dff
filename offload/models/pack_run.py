"""Packing: source rows in, blocks out, on all cores, with little memory, and never twice.

    rows (threads) → quantise, interleave (threads) → checksum, write (this thread, in order)

Blocks are written in the order of the plan, so that what is finished is a prefix and a run that
was stopped continues behind it. Chunks of at most ``CHUNK_ELEMENTS`` weights bound the memory: with
four threads 570 MiB in all, 400 of them the interpreter with torch and transformers.

The disk is the limit: 4.4 GB of bfloat16 became q4 in 4.9 to 5.3 s on two cores that took 4 s each
of it, 1.1 GB/s of reads and writes together on a disk that reads 1.4 alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from offload.io.files import Syscalls
from offload.io.pack_manifest import ErrorStat, Manifest
from offload.io.pack_writer import SYNC_BYTES, PackDirectory
from offload.models.pack_convert import Chunk, Deviation, chunks, make
from offload.models.pack_plan import BUNDLE_BYTES, PackPlan, plan_pack
from offload.models.pack_source import Bytes, Source

logger = logging.getLogger(__name__)

MOST_THREADS = 8
"""More would only take more memory: two wait for the disk while the others convert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackProgress:
    """How far a run is: bytes of bundles on their way to the disk, of how many.

    ``bytes_before`` of them were there when the run began; ``seconds`` are of this run.
    """

    bytes_done: int
    bytes_total: int
    bytes_before: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PackReport:
    """What was done. ``bytes_written`` are this run's, ``bytes_out`` those of all bundles;
    ``seconds`` includes the syncs."""

    path: Path
    manifest: Manifest
    bytes_in: int
    bytes_out: int
    bytes_written: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """Of what this run wrote."""
        return self.bytes_written / self.seconds if self.seconds > 0 else 0.0


def pack(
    source: Source,
    out: str | os.PathLike[str],
    *,
    quant: str = "none",
    plan: PackPlan | None = None,
    bundle_bytes: int = BUNDLE_BYTES,
    progress: Callable[[PackProgress], None] | None = None,
    wait: bool = False,
    threads: int | None = None,
    syscalls: Syscalls | None = None,
    sync_bytes: int = SYNC_BYTES,
) -> PackReport:
    """Pack ``source`` into the directory ``out``, or continue a run that was stopped.

    A directory that is this very pack already is left as it is. It counts as complete, and can be
    opened, only when the last step has made it so.

    Args:
        quant: ``none``, ``q8`` or ``q4``; see ``pack_plan.target``.
        plan: made by ``plan_pack`` before; then ``quant`` and ``bundle_bytes`` are not looked at.
        bundle_bytes: most bytes per file.
        progress: called after every chunk, from this thread. What it raises stops the run; the
            next one continues.
        wait: for another process that packs into ``out``; without, that is an error.
        threads: that read and convert; None: two more than processors, at most 8.

    Raises:
        StoreError: ``out`` is something else or of another source, the disk is too small or
            failed, another process is at it.
        CheckpointError: the source is damaged, or changed meanwhile.
        OffloadError: the source cannot be packed in this way.
    """
    began = time.monotonic()
    plan = plan or plan_pack(source, quant, bundle_bytes=bundle_bytes)
    with PackDirectory(
        out, plan.job, wait=wait, syscalls=syscalls, sync_bytes=sync_bytes
    ) as directory:
        if directory.complete is not None:
            return _report(directory.path, directory.complete, plan, 0, began)
        blocks = plan.manifest.blocks
        before = done = sum(b.nbytes for b in blocks[: len(directory.finished)])
        total = sum(b.nbytes for b in blocks)

        def tell() -> None:
            if progress is not None:
                progress(
                    PackProgress(
                        bytes_done=done,
                        bytes_total=total,
                        bytes_before=before,
                        seconds=time.monotonic() - began,
                    )
                )

        tell()
        deviation = Deviation()
        first = len(directory.finished)
        with contextlib.closing(_converted(source, plan, first, threads)) as converted:
            for chunk, data, more in converted:
                if chunk.start == 0:
                    directory.begin()
                    deviation = Deviation()
                directory.write(data.data)
                deviation.add(more)
                if chunk.last:
                    directory.end([deviation.error, deviation.weight, deviation.rows])
                done += len(data)
                tell()
        source.check()
        manifest = directory.commit(plan.extras, errors=_errors(plan, directory))
        logger.info("packed %s into %s", manifest, directory.path)
        return _report(directory.path, manifest, plan, done - before, began)


def _report(
    path: Path, manifest: Manifest, plan: PackPlan, written: int, began: float
) -> PackReport:
    return PackReport(
        path=path,
        manifest=manifest,
        bytes_in=plan.bytes_in,
        bytes_out=sum(manifest.files),
        bytes_written=written,
        seconds=time.monotonic() - began,
    )


def _converted(
    source: Source, plan: PackPlan, first: int, threads: int | None
) -> Generator[tuple[Chunk, Bytes, Deviation], None, None]:
    """Every chunk from block ``first`` on, in order, made a few ahead."""
    threads = threads or min(MOST_THREADS, len(os.sched_getaffinity(0)) + 2)
    todo = (
        (chunk, block, fill)
        for number, (block, fill) in enumerate(zip(plan.manifest.blocks, plan.fills, strict=True))
        if number >= first
        for chunk in chunks(number, block, fill)
    )
    ahead: deque[tuple[Chunk, Future[tuple[Bytes, Deviation]]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="offload-pack") as pool:
        try:
            for chunk, block, fill in todo:
                ahead.append((chunk, pool.submit(make, source, chunk, block, fill)))
                if len(ahead) > threads + 2:
                    oldest, future = ahead.popleft()
                    yield oldest, *future.result()
            while ahead:
                oldest, future = ahead.popleft()
                yield oldest, *future.result()
        finally:
            # After an error or Ctrl-C: what has not begun is dropped, what runs ends in a moment.
            for _, future in ahead:
                future.cancel()


def _errors(plan: PackPlan, directory: PackDirectory) -> dict[str, ErrorStat]:
    """The quantisation error by kind of block; notes of earlier runs included."""
    by_kind: dict[str, Deviation] = {}
    for block, finished in zip(plan.manifest.blocks, directory.finished, strict=True):
        error, weight, rows = finished.note
        if rows:
            by_kind.setdefault(block.kind.value, Deviation()).add(Deviation(error, weight, rows))
    return {
        kind: ErrorStat(relative_rms=d.relative_rms, rows=d.rows) for kind, d in by_kind.items()
    }
