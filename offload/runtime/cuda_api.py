"""All that is called of ``torch.cuda``, behind one seam.

``CudaDevice`` is written against ``CardApi``; ``TorchCard`` is the real one, and a recording fake
stands in where there is no card, so that the discipline of events and streams is tested anywhere.
Nothing outside of this module calls ``torch.cuda``. AMD cards come through the same calls: torch
names them ``cuda``, too.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch

from offload.errors import DeviceError, OffloadError, PlanError

log = logging.getLogger(__name__)

_cuda: Any = torch.cuda
"""For what has no types there."""

OUT_OF_MEMORY = 2
"""``cudaErrorMemoryAllocation``."""

PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for every context of the process."""


class Room(NamedTuple):
    """Bytes of a card's memory: all of it, what this process may have of it, and what of that is
    still to be had."""

    total: int
    limit: int
    free: int


class CardApi(Protocol):
    """One card. Streams and events are the implementation's own objects.

    Calls are asynchronous unless they say otherwise, and raise RuntimeError if the card has failed,
    be it in work that was queued long before.
    """

    device: torch.device
    name: str
    flash: bool
    """Whether torch's flash attention runs on it."""

    def stream(self) -> Any:
        """A new stream that does not wait for torch's default one."""
        ...

    def compute_stream(self) -> Any:
        """A new stream that a thread computes on besides torch's default one."""
        ...

    def computing_on(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        """Inside, torch puts the calling thread's computation on ``stream``."""
        ...

    def current_stream(self) -> Any:
        """The stream that torch puts the calling thread's computation on."""
        ...

    def record(self, stream: Any) -> Any:
        """A new event after everything queued on ``stream`` so far."""
        ...

    def wait(self, stream: Any, event: Any) -> None:
        """What is queued on ``stream`` from now on comes after ``event``."""
        ...

    def reached(self, event: Any) -> bool:
        """Whether the work before the event has finished. Does not block."""
        ...

    def block(self, event: Any) -> None:
        """Block the calling thread, without spinning and without the GIL, until ``event``."""
        ...

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Any) -> None:
        """Queue a copy of bytes. Host memory has to be pinned, or the call may block."""
        ...

    def empty(self, nbytes: int) -> torch.Tensor:
        """Bytes on the card, from torch's allocator. Raises ``out_of_memory`` errors."""
        ...

    def used_by(self, tensor: torch.Tensor, stream: Any) -> None:
        """``tensor``'s memory may be given to others only after ``stream``'s work on it."""
        ...

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether ``error`` says that the card's memory is exhausted."""
        ...

    def pin(self, address: int, nbytes: int) -> str | None:
        """Pin host memory. None, or why the system refuses."""
        ...

    def unpin(self, address: int) -> str | None:
        """Undo ``pin``. None, or what went wrong."""
        ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        """A small pinned buffer of host bytes. Raises RuntimeError if refused."""
        ...

    def room(self) -> Room: ...

    def peak(self) -> int:
        """Most bytes allocated at once since ``reset_peak``."""
        ...

    def reset_peak(self) -> None: ...

    def release_cached(self) -> None:
        """Give back what torch's allocator keeps of freed memory."""
        ...

    def warm_up(self) -> None:
        """Load what any model needs on the card, so that a process weighs what it will."""
        ...


class TorchCard:
    """``CardApi`` on ``torch.cuda``.

    Raises:
        OffloadError: there is no such card.
    """

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        check_card(index)
        _cuda.init()
        self.name: str = torch.cuda.get_device_name(index)
        self.flash: bool = torch.cuda.get_device_capability(index) >= (8, 0)

    def stream(self) -> Any:
        return _cuda.Stream(self.device)

    def compute_stream(self) -> Any:
        return self.stream()

    @contextlib.contextmanager
    def computing_on(self, stream: Any) -> Iterator[None]:
        with torch.cuda.stream(stream):
            yield

    def current_stream(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def record(self, stream: Any) -> Any:
        # Blocking: who waits sleeps. A spinning wait would take one of the cores that the disk's
        # lanes and the user's Python need.
        event = _cuda.Event(enable_timing=False, blocking=True)
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def reached(self, event: Any) -> bool:
        # Threads of ours start on card 0, and asking there for what another card does would make
        # a context on it, of hundreds of megabytes.
        with torch.cuda.device(self.device):
            return bool(event.query())

    def block(self, event: Any) -> None:
        with torch.cuda.device(self.device):
            event.synchronize()

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Any) -> None:
        # The context also makes the card current: threads of the disk's lanes start on card 0.
        with torch.cuda.stream(stream):
            dst.copy_(src, non_blocking=True)

    def empty(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def used_by(self, tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def out_of_memory(self, error: BaseException) -> bool:
        # The allocator's own, or the runtime's, which has none of its memory to tell of.
        code = getattr(error, "error_code", None)
        return isinstance(error, torch.OutOfMemoryError) or code == OUT_OF_MEMORY

    def pin(self, address: int, nbytes: int) -> str | None:
        with torch.cuda.device(self.device):
            code = int(_cudart().cudaHostRegister(address, nbytes, PORTABLE))
            if code:
                self._forget_error()
        return _text(code)

    def unpin(self, address: int) -> str | None:
        try:
            with torch.cuda.device(self.device):
                code = int(_cudart().cudaHostUnregister(address))
                if code:
                    self._forget_error()
        except RuntimeError as error:  # of a card that has failed: even asking for it does
            return str(error)
        return _text(code)

    def _forget_error(self) -> None:
        """The runtime keeps a refused call's error for the thread, and the next kernel that is
        launched would find it and be blamed."""
        try:
            torch.zeros(1, device=self.device)
        except RuntimeError as error:
            log.debug("the runtime's last error, now forgotten: %s", error)

    def pinned(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def room(self) -> Room:
        free, total = torch.cuda.mem_get_info(self.device)
        # torch before 2.9 has no such question; then the card's own size is the limit.
        ask = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        limit = int(total * ask(self.device)) if ask is not None else total
        held = torch.cuda.memory_reserved(self.device)
        unused = held - torch.cuda.memory_allocated(self.device)
        return Room(total, limit, max(0, min(free, limit - held) + unused))

    def peak(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.device))

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def release_cached(self) -> None:
        torch.cuda.empty_cache()

    def warm_up(self) -> None:
        with torch.inference_mode():
            for dtype in (torch.float32, torch.bfloat16):
                for rows in (1, 64):
                    x = torch.ones((rows, 256), dtype=dtype, device=self.device)
                    w = torch.ones((256, 256), dtype=dtype, device=self.device)
                    y = torch.nn.functional.linear(x, w).softmax(-1)
                    float(y.sum())
        torch.cuda.empty_cache()


def card_count() -> int:
    """Cards that torch can use here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def current_card() -> int:
    """The card that torch calls ``cuda``, without a number."""
    return torch.cuda.current_device()


def card_name(device: str) -> str:
    """What a card, by torch's name of it, is called by its maker."""
    return str(torch.cuda.get_device_name(device))


def check_card(index: int) -> None:
    """Raises OffloadError: there is no card of this number, or none at all."""
    count = card_count()
    if not count:
        built = "" if torch.version.cuda or torch.version.hip else " (this torch is built for CPUs)"
        raise OffloadError(
            f"no card that torch can use was found{built}; drop the GPU budget and --device cuda "
            f"to compute on the CPU, or simulate an accelerator with device='sim'"
        )
    if not 0 <= index < count:
        raise OffloadError(f"there is no card cuda:{index}: torch sees {count} here, from cuda:0")


def open_card(index: int) -> CardApi:
    """The card of this number. Raises OffloadError."""
    return TorchCard(index)


def failed(what: str, error: BaseException) -> DeviceError:
    """``error`` of the card as ours."""
    if isinstance(error, DeviceError):
        return error
    first = str(error).strip().splitlines()[:1] or [type(error).__name__]
    ours = DeviceError(
        f"the card failed {what}: {first[0]}; start the program again, its memory cannot be trusted"
    )
    ours.__cause__ = error
    return ours


@contextlib.contextmanager
def telling(where: str, during: str, way_out: str) -> Iterator[None]:
    """What torch's own kernels and allocator say of a card inside, as ours; copies' errors are.

    Args:
        where: whose memory it is. during: what they are in the middle of, "a pass".
        way_out: what to do where memory runs out.

    Raises:
        PlanError: its memory is exhausted.
        DeviceError: it has failed.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        said = str(error).strip().splitlines()[:1] or ["no more is known"]
        raise PlanError(
            f"the memory of {where} ran out in the middle of {during} ({said[0]}): {way_out}"
        ) from error
    except torch.AcceleratorError as error:
        raise failed(f"in the middle of {during}", error) from error


def _cudart() -> Any:
    return _cuda.cudart()


def _text(code: int) -> str | None:
    if not code:
        return None
    return f"{_cudart().cudaGetErrorString(_cudart().cudaError(code))} (error {code})"


__all__ = [
    "CardApi", "Room", "TorchCard", "card_count", "card_name", "check_card", "current_card",
    "failed", "open_card", "telling",
]  # fmt: skip
