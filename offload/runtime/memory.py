"""Host memory: one anonymous mapping that costs nothing until it is touched.

Why not ``torch.empty``: O_DIRECT wants 4096-aligned addresses, weights want huge pages (a GEMV over
small pages loses a fifth of the memory's bandwidth to TLB misses), and a budget wants the pages
back at ``close()``, whoever still holds a view.
"""

from __future__ import annotations

import logging
import mmap
from pathlib import Path

import torch

from offload.blocks import ALIGN
from offload.errors import ClosedError, PlanError
from offload.units import format_bytes

log = logging.getLogger(__name__)

HUGE_PAGE = 2 << 20
"""Bytes of a transparent huge page (x86-64, and arm64 with 4 KiB base pages)."""

POISON = 0xFF
"""Fill of bytes nobody may read: NaN in every float format (also fp8), -1 in every signed int.

0xA5, the usual choice, is a small and plausible number in bfloat16.
"""

_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_page_mode() -> str:
    """The system's setting: ``always``, ``madvise``, ``never`` or ``unsupported``."""
    try:
        text = _THP.read_text()
    except OSError:
        return "unsupported"
    chosen = text.partition("[")[2].partition("]")[0]
    return chosen if chosen in ("always", "madvise", "never") else "unsupported"


class HostMemory:
    """``nbytes`` of zeroed, private, 4096-aligned memory (2 MiB-aligned from 2 MiB on).

    Creating it touches no page: the process grows as the bytes are used, by 4 KiB, or by 2 MiB
    where huge pages are granted, and never beyond ``nbytes`` rounded up to a page.

    Raises:
        PlanError: the system does not give that much address space.
    """

    def __init__(self, nbytes: int, name: str) -> None:
        if nbytes <= 0:
            raise ValueError(f"memory '{name}': size must be positive, got {nbytes}")
        self.name = name
        self.nbytes = nbytes
        usable = -(-nbytes // ALIGN) * ALIGN
        # One huge page more than needed, so that an aligned start exists; it is never touched.
        length = usable + HUGE_PAGE if nbytes >= HUGE_PAGE else usable
        try:
            # Private: on a shared mapping (Python's default) MADV_DONTNEED would free nothing,
            # and huge pages would follow the rules of shmem.
            map_ = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as e:
            raise PlanError(
                f"the system refused {format_bytes(nbytes)} of memory for '{name}' ({e}); "
                "use a smaller budget"
            ) from e
        address = torch.frombuffer(map_, dtype=torch.uint8).data_ptr()
        self._start = -address % HUGE_PAGE if nbytes >= HUGE_PAGE else 0
        self._usable = usable
        self.huge_pages = self._ask_for_huge_pages(map_)
        """Whether the system grants huge pages to this memory."""
        self._map: mmap.mmap | None = map_
        self._tensor = torch.frombuffer(map_, dtype=torch.uint8, count=nbytes, offset=self._start)
        self._view = memoryview(map_)[self._start : self._start + nbytes]

    def _ask_for_huge_pages(self, map_: mmap.mmap) -> bool:
        body = self._usable // HUGE_PAGE * HUGE_PAGE
        advice = getattr(mmap, "MADV_HUGEPAGE", None)
        if not body or advice is None:
            return False
        mode = huge_page_mode()
        if mode not in ("always", "madvise"):
            log.info("memory '%s': no huge pages, the system says '%s'", self.name, mode)
            return False
        try:
            map_.madvise(advice, self._start, body)
            # The rest, on small pages: a huge page across the end would take up to 2 MiB beyond
            # the budget.
            map_.madvise(mmap.MADV_NOHUGEPAGE, self._start + body, len(map_) - self._start - body)
        except OSError as e:
            log.info("memory '%s': huge pages refused (%s)", self.name, e)
            return False
        return True

    @property
    def closed(self) -> bool:
        return self._map is None

    def tensor(self) -> torch.Tensor:
        """All of it as a 1-d ``uint8`` tensor, without a copy. Raises ClosedError."""
        if self._map is None:
            raise ClosedError(f"memory '{self.name}' is closed")
        return self._tensor

    def view(self) -> memoryview:
        """All of it as writable bytes. Raises ClosedError."""
        if self._map is None:
            raise ClosedError(f"memory '{self.name}' is closed")
        return self._view

    def fill(self, byte: int) -> None:
        """Write ``byte`` everywhere. Touches every page."""
        self.tensor().fill_(byte)

    def close(self) -> None:
        """Give the pages back now, the address range when the last view dies. Idempotent.

        A view kept over this call stays valid memory, but reads zeros.
        """
        map_, self._map = self._map, None
        if map_ is None:
            return
        map_.madvise(mmap.MADV_DONTNEED)
        # Never map_.close(): torch.frombuffer keeps a reference to the mapping but not an export
        # of its buffer, so unmapping would succeed and leave tensors pointing at nothing.
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self._view = memoryview(b"")
