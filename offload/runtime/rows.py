"""Rows of a block that nobody needs as a whole: an embedding's, by token.

They are read past the state machine: nothing makes room for them, and they are the caller's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import CancelledError

from offload.blocks import Tier
from offload.errors import ClosedError, WatchdogError
from offload.io.store import DEMAND, Span, Store
from offload.runtime.stats import Stats
from offload.runtime.timeline import Recorder, Story
from offload.runtime.transfers import Transfers
from offload.runtime.waiting import Waiting
from offload.scheduler.plan import Plan
from offload.scheduler.timeline import READ


class RowReader:
    """From host memory where the block is pinned there, else from the store."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        transfers: Transfers,
        waiting: Waiting,
        stats: Stats,
        *,
        watchdog_s: float,
        recorder: Recorder | None,
        story: Story | None,
    ) -> None:
        """``watchdog_s``: a read that takes longer is an error."""
        self._pinned = plan.tiers[Tier.RAM].pinned
        self._store, self._transfers = store, transfers
        self._waiting, self._stats = waiting, stats
        self._watchdog_s = watchdog_s
        self._recorder, self._story = recorder, story

    def read(self, block: str, spans: Sequence[Span], buffer: memoryview) -> None:
        """Fill ``buffer`` with parts of a block: bytes, as ``spans`` say.

        Raises:
            StoreError: they could not be read.
            WatchdogError: they have not been read for the watchdog's time.
            ClosedError: closed before or meanwhile.
        """
        if self._copied(block, spans, buffer):
            return
        began = time.perf_counter()
        if self._story is not None:
            self._story.waits(f"rows of {block}")
        reading = self._store.read_spans_into(block, spans, buffer, priority=DEMAND)
        try:
            receipt = reading.result(timeout=self._watchdog_s)
        except TimeoutError:
            raise WatchdogError(
                f"{len(spans)} rows of {block} have not been read for {self._watchdog_s:.0f} s"
            ) from None
        except CancelledError:
            raise ClosedError(f"closed while rows of {block} were read") from None
        with self._waiting.changed:
            self._transfers.count(receipt)
            self._stats.row_reads += len(spans)
            ended = time.perf_counter()
            self._stats.stall_s += ended - began
            if self._recorder is not None and self._story is not None:
                self._recorder.add(READ, block, began, ended, receipt.payload_bytes)
                self._story.goes_on()

    def _copied(self, block: str, spans: Sequence[Span], buffer: memoryview) -> bool:
        """Whether the block lies in host memory. Under the lock: ``close()`` in another thread
        takes the memory away."""
        with self._waiting.changed:
            self._waiting.check_open()
            self._stats.host_waits["token"] += 1
            if block not in self._pinned:
                return False
            there = self._transfers.lease(block, Tier.RAM).view
            for src, dst, nbytes in spans:
                buffer[dst : dst + nbytes] = there[src : src + nbytes]
            return True
