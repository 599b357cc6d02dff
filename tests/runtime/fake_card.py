"""A card for tests: ``CardApi`` on CPU tensors, with streams that lag, and rules that are checked.

Each stream is a thread that works its queue off after seeded delays, so that what is not ordered
comes in another order. Computation is the host's, as on every stand-in: the stream that torch
computes on waits on the host for what it has to come after, and its events are done late, as those
of kernels are. Broken rules are kept in ``wrong``.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from offload.runtime.cuda_api import Room

CPU = torch.device("cpu")


class CardError(RuntimeError):
    """What a card's driver would say."""


class FullError(RuntimeError):
    """Out of the card's memory."""


class FakeEvent:
    def __init__(self, stream: FakeStream) -> None:
        self.stream = stream
        self.reached = threading.Event()


class FakeStream:
    """Work in order on a thread that ends with the card."""

    def __init__(self, card: FakeCard, name: str, *, computes: bool = False) -> None:
        self.card = card
        self.name = name
        self.computes = computes
        self.todo: deque[Callable[[], None]] = deque()
        self.changed = threading.Condition()
        self.busy = False
        self.rng = random.Random(f"{card.seed}/{name}")
        self.thread = threading.Thread(target=self._run, name=f"fake-{name}", daemon=True)
        self.thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        with self.changed:
            self.todo.append(work)
            self.changed.notify_all()

    def _run(self) -> None:
        while True:
            with self.changed:
                self.busy = False
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.todo or self.card.gone)
                if not self.todo:
                    return
                self.busy = True
                work = self.todo.popleft()
            time.sleep(self.rng.random() * self.card.jitter_s)
            while self.card.hangs and not self.card.gone:
                time.sleep(0.001)
            try:
                work()
            except Exception as error:  # noqa: BLE001  kept for the test
                self.card.wrong.append(f"{type(error).__name__}: {error}")


class FakeCard:
    """See the module. ``calls`` are the names of what was called, in order.

    Args:
        nbytes: its memory. refuse: why host memory is not pinned; None: it is.
        refuse_buffers: not even small buffers are.
        device: torch's, that its memory is of.
    """

    name = "a card of paper"
    flash = True

    def __init__(
        self,
        nbytes: int = 2**31,
        *,
        seed: int = 0,
        jitter_s: float = 100e-6,
        refuse: str | None = None,
        refuse_buffers: bool = False,
        device: torch.device = CPU,
    ) -> None:
        self.device = device
        self.nbytes = self.limit = nbytes
        self.seed = seed
        self.jitter_s = jitter_s
        self.refuse = refuse
        self.refuse_buffers = refuse_buffers
        self.gone = False
        self.hangs = False
        self.broken = False
        self.break_after: int | None = None
        self.allocated = self.most = 0
        self._ranges: list[tuple[int, int]] = []  # its memory's
        self.calls: list[str] = []
        self.wrong: list[str] = []
        self.pins: dict[int, int] = {}
        self.buffers: list[torch.Tensor] = []
        self.flying: list[tuple[int, int]] = []  # host ranges of copies under way
        self._streams: list[FakeStream] = []
        self.default = self._new_stream("default", computes=True)

    def _new_stream(self, name: str, *, computes: bool = False) -> FakeStream:
        stream = FakeStream(self, name, computes=computes)
        self._streams.append(stream)
        return stream

    def end(self) -> None:
        """Stop the threads; raise what rules were broken."""
        self.gone = True
        for stream in self._streams:
            with stream.changed:
                stream.changed.notify_all()
            stream.thread.join(30)
        assert not self.pins, "memory is still pinned"
        assert not self.wrong, self.wrong

    def _call(self, what: str) -> None:
        self.calls.append(what)
        if self.break_after is not None and what in ("copy", "record"):
            self.break_after -= 1
            self.broken = self.broken or self.break_after < 0
        if self.broken:
            raise CardError("CUDA error: an illegal memory access was encountered\nand so on")

    # -- streams and events --------------------------------------------------------------------

    def stream(self) -> FakeStream:
        self.calls.append("stream")
        return self._new_stream(f"s{len(self._streams)}")

    def compute_stream(self) -> FakeStream:
        self.calls.append("compute_stream")
        return self._new_stream(f"s{len(self._streams)}", computes=True)

    def computing_on(self, stream: FakeStream) -> contextlib.AbstractContextManager[None]:
        self.calls.append(f"on:{stream.name}")
        return contextlib.nullcontext()

    def current_stream(self) -> FakeStream:
        return self.default

    def record(self, stream: FakeStream) -> FakeEvent:
        self._call("record")
        event = FakeEvent(stream)
        stream.submit(event.reached.set)
        return event

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        self._call(f"wait:{stream.name}:{event.stream.name}")
        if stream.computes:
            assert event.reached.wait(30)
        else:
            stream.submit(lambda: None if event.reached.wait(30) else self.wrong.append("hung"))

    def reached(self, event: FakeEvent) -> bool:
        self._call("reached")
        return event.reached.is_set()

    def block(self, event: FakeEvent) -> None:
        while not event.reached.wait(0.01):
            if self.broken or self.gone:
                break
        self._call("block")

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: FakeStream) -> None:
        self._call("copy")
        host = [t for t in (dst, src) if self._is_host(t)]
        spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in host]
        for start, stop in spans:
            if not self.refuse_buffers and not self._is_pinned(start, stop):
                self.wrong.append(f"an asynchronous copy of pageable memory at {start}")
        self.flying += spans

        def work() -> None:
            dst.copy_(src)
            for span in spans:
                self.flying.remove(span)

        stream.submit(work)

    def _is_host(self, tensor: torch.Tensor) -> bool:
        return not any(a <= tensor.data_ptr() < a + n for a, n in self._ranges)

    def _is_pinned(self, start: int, stop: int) -> bool:
        pins = [(a, a + n) for a, n in self.pins.items()]
        pins += [(b.data_ptr(), b.data_ptr() + b.nbytes) for b in self.buffers]
        return any(a <= start and stop <= b for a, b in pins)

    # -- memory --------------------------------------------------------------------------------

    def empty(self, nbytes: int) -> torch.Tensor:
        self._call("empty")
        if self.allocated + nbytes > self.limit:
            raise FullError(f"CUDA out of memory. Tried to allocate {nbytes} bytes")
        self.allocated += nbytes
        self.most = max(self.most, self.allocated)
        with torch.inference_mode(False):
            tensor = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._ranges.append((tensor.data_ptr(), nbytes))
        return tensor

    def used_by(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        del tensor
        self.calls.append(f"used_by:{stream.name}")

    def out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, FullError)

    def pin(self, address: int, nbytes: int) -> str | None:
        self.calls.append("pin")
        if self.refuse is not None:
            return self.refuse
        assert address % 4096 == 0
        assert nbytes % 4096 == 0
        self.pins[address] = nbytes
        return None

    def unpin(self, address: int) -> str | None:
        self.calls.append("unpin")
        nbytes = self.pins.pop(address, None)
        if nbytes is None:
            self.wrong.append("unpinned what is not pinned")
            return "not pinned"
        if any(a < address + nbytes and address < b for a, b in self.flying):
            self.wrong.append("unpinned under a copy")
        return None

    def pinned(self, nbytes: int) -> torch.Tensor:
        if self.refuse_buffers:
            raise CardError("no pinned memory at all")
        self.buffers.append(torch.empty(nbytes, dtype=torch.uint8))
        return self.buffers[-1]

    def room(self) -> Room:
        return Room(self.nbytes, self.limit, self.limit - self.allocated)

    def peak(self) -> int:
        return self.most

    def reset_peak(self) -> None:
        self.most = self.allocated

    def warm_up(self) -> None:
        self.calls.append("warm_up")

    def release_cached(self) -> None:
        self.calls.append("release_cached")
