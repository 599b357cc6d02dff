"""How fast a disk reads, writes, and does both, past the page cache."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from offload.blocks import ALIGN, align_up
from offload.errors import StoreError
from offload.runtime.memory import HostMemory
from offload.scheduler.hardware import BYTES_PER_S, Rate
from offload.units import format_bytes

log = logging.getLogger(__name__)


class DiskRates(NamedTuple):
    read: Rate
    write: Rate
    mixed: Rate


class Request(NamedTuple):
    """One request of a fixed size at ``offset``."""

    write: bool
    offset: int


def measure_disk(
    directory: str | os.PathLike[str],
    *,
    file_bytes: int,
    request_bytes: int,
    depth: int,
    samples: int,
    sequential: bool = False,
    progress: Callable[[float], None] = lambda _: None,
) -> DiskRates:
    """Measure on a private file in ``directory`` that has no name and dies with the process.

    Every sample moves a quarter of the file with ``depth`` requests of ``request_bytes`` in flight,
    at random offsets unless ``sequential``. Writes count until the disk has them (fdatasync), on
    blocks that exist already: what the first write to a file system costs is not a disk's rate.

    Args:
        file_bytes: size wished for; at most half of the free space is used.

    Raises:
        StoreError: no such directory, no space, or an I/O error.
    """
    if request_bytes <= 0 or request_bytes % ALIGN or depth < 1 or samples < 1:
        raise ValueError(
            f"requests of {request_bytes} bytes (a multiple of {ALIGN}), depth {depth}, "
            f"{samples} samples: not measurable"
        )
    path = Path(directory)
    slots = _slots(path, file_bytes, request_bytes, 4 * depth)
    slot_bytes = request_bytes * depth
    memory = HostMemory(slot_bytes, "disk probe")
    # Random, so that a disk that compresses has nothing to gain.
    memory.view()[:] = os.urandom(slot_bytes)
    buffers = [memory.view()[i * request_bytes : (i + 1) * request_bytes] for i in range(depth)]
    rng = random.Random(0)
    rates: dict[str, list[float]] = {"read": [], "write": [], "mixed": []}
    try:
        with _scratch(path) as (fd, direct):
            _transfer(
                fd, _lanes([Request(True, i * request_bytes) for i in range(slots)], depth), buffers
            )
            _settle(fd)
            total = samples * len(rates)
            # Kinds take turns, so that a disk that throttles shows in the spread of all of them.
            for i in range(total):
                kind = list(rates)[i % len(rates)]
                chosen = list(range(slots))
                if not sequential:
                    rng.shuffle(chosen)
                requests = [
                    Request(kind == "write" or (kind == "mixed" and k % 2 == 0), j * request_bytes)
                    for k, j in enumerate(chosen[: slots // 4])
                ]
                if not direct:
                    _settle(fd)
                seconds = _transfer(fd, _lanes(requests, depth), buffers)
                rates[kind].append(len(requests) * request_bytes / seconds)
                progress((i + 1) / total)
    except OSError as e:
        raise StoreError(f"cannot measure the disk of {path}: {e}") from e
    finally:
        buffers.clear()
        memory.close()
    return DiskRates(**{kind: Rate.of(seen, BYTES_PER_S) for kind, seen in rates.items()})


def _slots(path: Path, file_bytes: int, request_bytes: int, least: int) -> int:
    """Requests that fit into the file; checks the space."""
    try:
        free = shutil.disk_usage(path).free
    except OSError as e:
        raise StoreError(f"cannot measure the disk of {path}: {e}") from e
    slots = min(align_up(file_bytes, request_bytes), free // 2) // request_bytes
    if slots < least:
        raise StoreError(
            f"measuring the disk of {path} needs {format_bytes(2 * least * request_bytes)} free, "
            f"{format_bytes(free)} are; free some space or choose another directory"
        )
    return slots


@contextlib.contextmanager
def _scratch(directory: Path) -> Iterator[tuple[int, bool]]:
    """A file without a name: (descriptor, whether it bypasses the page cache)."""
    # Not O_TMPFILE: overlay and network file systems lack it, and unlinking is as good.
    named, name = tempfile.mkstemp(prefix=".offload-probe-", dir=directory)  # mode 0600
    try:
        fd, direct = _reopen_direct(name)
    finally:
        os.unlink(name)
        os.close(named)
    try:
        yield fd, direct
    finally:
        os.close(fd)


def _reopen_direct(name: str) -> tuple[int, bool]:
    flag = getattr(os, "O_DIRECT", 0)
    if flag:
        try:
            return os.open(name, os.O_RDWR | os.O_CLOEXEC | flag), True
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
    log.warning("%s has no O_DIRECT: its rates may be those of memory", os.path.dirname(name))
    return os.open(name, os.O_RDWR | os.O_CLOEXEC), False


def _settle(fd: int) -> None:
    """Write back and forget cached pages, so that the next read comes from the disk."""
    os.fdatasync(fd)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _lanes(requests: Sequence[Request], depth: int) -> list[Sequence[Request]]:
    """Deal the requests out to ``depth`` lanes; each has one in flight.

    By turns of two, so that alternating kinds reach every lane.
    """
    return [[r for i, r in enumerate(requests) if i // 2 % depth == lane] for lane in range(depth)]


def _transfer(fd: int, lanes: Sequence[Sequence[Request]], buffers: Sequence[memoryview]) -> float:
    """Do all requests, one thread and buffer per lane; seconds until the disk has the writes.

    The one place that knows how requests reach the disk.

    Raises:
        OSError: the first error of any lane.
    """
    start_line = threading.Barrier(len(lanes) + 1)
    errors: list[OSError] = []

    def run(requests: Sequence[Request], buffer: memoryview) -> None:
        start_line.wait()
        try:
            for write, offset in requests:
                n = os.pwritev(fd, [buffer], offset) if write else os.preadv(fd, [buffer], offset)
                if n != len(buffer):
                    raise OSError(errno.EIO, f"moved {n} of {len(buffer)} bytes at {offset}")
        except OSError as e:
            errors.append(e)

    threads = [
        threading.Thread(target=run, args=pair, name="offload-probe")
        for pair in zip(lanes, buffers, strict=True)
    ]
    for thread in threads:
        thread.start()
    start_line.wait()
    begin = time.perf_counter()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    if any(r.write for lane in lanes for r in lane):
        os.fdatasync(fd)
    return time.perf_counter() - begin
