"""Stores around a store: slower or metered. Each decorates any other; see also ``faults``."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from offload.blocks import BlockSpec
from offload.io.store import DEMAND, Receipt, Span, Store


class Linked(Future[Receipt]):
    """Follows another future: its cancellation is decided there, where the buffer is used."""

    def __init__(self, inner: Future[Receipt]) -> None:
        super().__init__()
        self.inner = inner

    def cancel(self) -> bool:
        return self.inner.cancel()  # and then our callback on it calls follow()

    def follow(self) -> None:
        """Become what the inner future has become."""
        copy_outcome(self.inner, self)


def copy_outcome(done: Future[Receipt], to: Future[Receipt]) -> None:
    """Resolve ``to`` like ``done``, which is."""
    if done.cancelled():
        Future.cancel(to)
        to.set_running_or_notify_cancel()
    elif (error := done.exception()) is not None:
        to.set_exception(error)
    else:
        to.set_result(done.result())


class Wrapper:
    """Passes everything on."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    @property
    def writable(self) -> bool:
        return self._inner.writable

    def ids(self) -> Iterable[str]:
        return self._inner.ids()

    def spec(self, block_id: str) -> BlockSpec:
        return self._inner.spec(block_id)

    def read_into(
        self, block_id: str, dst: memoryview, *, priority: int = DEMAND
    ) -> Future[Receipt]:
        start = partial(self._inner.read_into, block_id, dst, priority=priority)
        tensors = [Span(t.offset, t.offset, t.nbytes) for t in self.spec(block_id).tensors]
        return self._around("read", block_id, tensors, dst, start)

    def read_spans_into(
        self, block_id: str, spans: Sequence[Span], dst: memoryview, *, priority: int = DEMAND
    ) -> Future[Receipt]:
        start = partial(self._inner.read_spans_into, block_id, spans, dst, priority=priority)
        return self._around("read", block_id, spans, dst, start)

    def write_from(self, block_id: str, src: memoryview) -> Future[Receipt]:
        start = partial(self._inner.write_from, block_id, src)
        tensors = [Span(t.offset, t.offset, t.nbytes) for t in self.spec(block_id).tensors]
        return self._around("write", block_id, tensors, src, start)

    def _around(
        self,
        op: str,
        block_id: str,
        spans: Sequence[Span],
        buf: memoryview,
        start: Callable[[], Future[Receipt]],
    ) -> Future[Receipt]:
        """Do ``start`` with something before, after or instead of it."""
        raise NotImplementedError

    def close(self) -> None:
        self._inner.close()


class LatencyStore(Wrapper):
    """A slow disk: each transfer takes ``seconds`` more and shares ``bytes_per_s`` with the rest.

    Transfers pass one lane in the order of the calls; the latency is added behind the lane, so
    several overlap. The buffer is filled early and the future resolves late; ``close`` delivers
    what is still late at once.
    """

    def __init__(
        self, inner: Store, *, seconds: float = 0.0, bytes_per_s: float = float("inf")
    ) -> None:
        super().__init__(inner)
        self._seconds = seconds
        self._bytes_per_s = bytes_per_s
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Linked]] = []
        self._order = itertools.count()
        self._lane_free_s = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="offload-latency", daemon=True)
        self._thread.start()

    def _around(
        self,
        op: str,
        block_id: str,
        spans: Sequence[Span],
        buf: memoryview,
        start: Callable[[], Future[Receipt]],
    ) -> Future[Receipt]:
        _ = op, block_id, buf
        inner = start()
        with self._changed:
            busy_s = sum(s.nbytes for s in spans) / self._bytes_per_s
            self._lane_free_s = max(self._lane_free_s, time.monotonic()) + busy_s
            due_s = self._lane_free_s + self._seconds
        outer = Linked(inner)
        inner.add_done_callback(lambda _: self._finish(outer, due_s))
        return outer

    def _finish(self, outer: Linked, due_s: float) -> None:
        with self._changed:
            wait = not self._closed and not outer.inner.cancelled()
            if wait:
                heapq.heappush(self._due, (due_s, next(self._order), outer))
                self._changed.notify_all()
        if not wait:
            outer.follow()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._closed)
                if not self._due:
                    return
                left_s = self._due[0][0] - time.monotonic()
                if left_s > 0 and not self._closed:
                    self._changed.wait(left_s)  # or until an earlier one comes
                    continue
                outer = heapq.heappop(self._due)[2]
            outer.follow()
            del outer

    def close(self) -> None:
        self._inner.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What went through a store. Bytes as in ``Receipt``.

    ``busy_s`` is the time during which at least one transfer was under way, ``failures`` counts
    transfers that ended with an error. Cancelled ones are not counted.
    """

    reads: int = 0
    writes: int = 0
    failures: int = 0
    payload_bytes: int = 0
    physical_bytes: int = 0
    copied_bytes: int = 0
    requests: int = 0
    busy_s: float = 0.0


class MeteredStore(Wrapper):
    """Counts what goes through. A transfer is counted before its future is done."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._moved = Receipt(
            payload_bytes=0, physical_bytes=0, copied_bytes=0, requests=0, seconds=0.0
        )
        self._ops: Counter[str] = Counter()
        self._reads: Counter[str] = Counter()
        self._writes: Counter[str] = Counter()
        self._in_flight = 0
        self._since_s = 0.0
        self._busy_s = 0.0

    @property
    def totals(self) -> Totals:
        """Everything up to now."""
        with self._lock:
            running_s = time.perf_counter() - self._since_s if self._in_flight else 0.0
            return Totals(
                reads=self._ops["read"],
                writes=self._ops["write"],
                failures=self._ops["failed"],
                payload_bytes=self._moved.payload_bytes,
                physical_bytes=self._moved.physical_bytes,
                copied_bytes=self._moved.copied_bytes,
                requests=self._moved.requests,
                busy_s=self._busy_s + running_s,
            )

    def reads(self) -> Mapping[str, int]:
        """Finished reads per block."""
        with self._lock:
            return dict(self._reads)

    def writes(self) -> Mapping[str, int]:
        """Finished writes per block."""
        with self._lock:
            return dict(self._writes)

    def _around(
        self,
        op: str,
        block_id: str,
        spans: Sequence[Span],
        buf: memoryview,
        start: Callable[[], Future[Receipt]],
    ) -> Future[Receipt]:
        _ = spans, buf
        with self._lock:
            if self._in_flight == 0:
                self._since_s = time.perf_counter()
            self._in_flight += 1
        try:
            inner = start()
        except BaseException:
            with self._lock:
                self._leave()
            raise
        outer = Linked(inner)
        inner.add_done_callback(lambda _: self._count(op, block_id, outer))
        return outer

    def _leave(self) -> None:
        self._in_flight -= 1
        if self._in_flight == 0:
            self._busy_s += time.perf_counter() - self._since_s

    def _count(self, op: str, block_id: str, outer: Linked) -> None:
        inner = outer.inner
        with self._lock:
            self._leave()
            if inner.cancelled():
                pass
            elif inner.exception() is not None:
                self._ops["failed"] += 1
            else:
                self._ops[op] += 1
                (self._reads if op == "read" else self._writes)[block_id] += 1
                self._moved += inner.result()
        outer.follow()
