"""A store that fails on purpose, as told or by chance with a seed. For tests of what is above."""

from __future__ import annotations

import enum
import errno
import os
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from offload.errors import StoreError
from offload.io.files import TransferError
from offload.io.memory import AlignedBuffer, byte_view
from offload.io.store import Receipt, Span, Store
from offload.io.transfer import check_room, failed
from offload.io.wrappers import Linked, Wrapper, copy_outcome


class Fault(enum.Enum):
    """What can go wrong. The first four hit reads, the last four writes; two hit both."""

    SHORT_READ = "half of the bytes come, then an error"
    BIT_FLIP = "one bit of the data is wrong, no error"
    EIO = "an I/O error, nothing is moved"
    HANG = "nothing happens until release()"
    ENOSPC = "the disk is full, nothing is moved"
    TORN_WRITE = "only the first half reaches the disk, no error"


_READ_FAULTS = (Fault.SHORT_READ, Fault.BIT_FLIP, Fault.EIO, Fault.HANG)
_WRITE_FAULTS = (Fault.EIO, Fault.HANG, Fault.ENOSPC, Fault.TORN_WRITE)


class FaultyStore(Wrapper):
    """Fails on purpose: as told by ``inject``, or by chance with a seed.

    With the same seed, rates and order of calls the same calls fail. ``injected`` lists what was
    done, as ``(operation, block id, fault)``.
    """

    def __init__(
        self, inner: Store, *, seed: int = 0, rates: Mapping[Fault, float] | None = None
    ) -> None:
        """``rates``: probability per call of each fault; none by default."""
        super().__init__(inner)
        self._rates = dict(rates or {})
        self._random = random.Random(seed)
        self._script: list[tuple[Fault, str | None]] = []
        self._lock = threading.Lock()
        self._hung: list[Callable[[], None]] = []
        self.injected: list[tuple[str, str, Fault]] = []

    def inject(self, fault: Fault, block_id: str | None = None, *, times: int = 1) -> None:
        """Let the next ``times`` calls that can have this fault (on this block) have it."""
        with self._lock:
            self._script += [(fault, block_id)] * times

    def release(self) -> None:
        """Let the transfers that hang go on."""
        with self._lock:
            hung, self._hung = self._hung, []
        for go_on in hung:
            go_on()

    def close(self) -> None:
        """Release what hangs, then close the inner store."""
        self.release()
        super().close()

    def _draw(self, op: str, block_id: str) -> Fault | None:
        possible = _READ_FAULTS if op == "read" else _WRITE_FAULTS
        with self._lock:
            fault = None
            for i, (scripted, where) in enumerate(self._script):
                if scripted in possible and where in (None, block_id):
                    fault = scripted
                    del self._script[i]
                    break
            else:
                for candidate in possible:
                    if fault is None and self._random.random() < self._rates.get(candidate, 0.0):
                        fault = candidate
            if fault is not None:
                self.injected.append((op, block_id, fault))
            return fault

    def _around(
        self,
        op: str,
        block_id: str,
        spans: Sequence[Span],
        buf: memoryview,
        start: Callable[[], Future[Receipt]],
    ) -> Future[Receipt]:
        fault = self._draw(op, block_id)
        if fault is None:
            return start()
        if fault is Fault.HANG:
            return self._hang(start)
        if fault is Fault.BIT_FLIP:
            return self._flip(spans, buf, start)
        if fault is Fault.SHORT_READ:
            return self._short(block_id, spans, buf)
        if fault is Fault.TORN_WRITE:
            return self._tear(block_id, buf)
        code = errno.EIO if fault is Fault.EIO else errno.ENOSPC
        text = f"cannot {op} {sum(s.nbytes for s in spans)} bytes: {os.strerror(code)} (injected)"
        return failed(
            TransferError(f"block {block_id}: {text}", path="(injected)", offset=0, errno=code)
        )

    def _hang(self, start: Callable[[], Future[Receipt]]) -> Future[Receipt]:
        outer: Future[Receipt] = Future()
        outer.set_running_or_notify_cancel()  # like a thread in the kernel: no way back
        with self._lock:
            self._hung.append(
                lambda: start().add_done_callback(lambda inner: copy_outcome(inner, outer))
            )
        return outer

    def _flip(
        self, spans: Sequence[Span], buf: memoryview, start: Callable[[], Future[Receipt]]
    ) -> Future[Receipt]:
        with self._lock:
            where = [s for s in spans if s.nbytes]
            span = self._random.choice(where) if where else None
            at = span.dst + self._random.randrange(span.nbytes) if span else -1
            bit = 1 << self._random.randrange(8)
        view = byte_view(buf)
        inner = start()
        outer = Linked(inner)

        def flip(_: Future[Receipt]) -> None:
            if at >= 0 and not inner.cancelled() and inner.exception() is None:
                view[at] ^= bit
            view.release()
            outer.follow()

        inner.add_done_callback(flip)
        return outer

    def _short(self, block_id: str, spans: Sequence[Span], buf: memoryview) -> Future[Receipt]:
        half = [Span(s.src, s.dst, s.nbytes // 2) for s in spans]
        inner = self._inner.read_spans_into(block_id, half, buf)
        outer = Linked(inner)

        def fail(_: Future[Receipt]) -> None:
            if inner.cancelled() or inner.exception() is not None:
                outer.follow()
                return
            got, want = sum(s.nbytes for s in half), sum(s.nbytes for s in spans)
            outer.set_exception(
                StoreError(f"block {block_id}: short read, {got} of {want} bytes (injected)")
            )

        inner.add_done_callback(fail)
        return outer

    def _tear(self, block_id: str, src: memoryview) -> Future[Receipt]:
        spec = self.spec(block_id)
        view = check_room(block_id, src, spec.nbytes)
        torn = AlignedBuffer(spec.slot_nbytes)
        half = spec.nbytes // 2
        torn.view[:half] = view[:half]
        for at in range(half, spec.nbytes):
            torn.view[at] = view[at] ^ 0xA5  # surely not what was to be written
        view.release()
        inner = self._inner.write_from(block_id, torn.view)
        outer = Linked(inner)

        def done(_: Future[Receipt]) -> None:
            torn.close()
            outer.follow()

        inner.add_done_callback(done)
        return outer
