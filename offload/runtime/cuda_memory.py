"""Memory of a card, and host memory pinned for it.

Pinned memory is one mapping, registered once: torch's own pinned memory is rounded up to a power of
two (2.25 GiB become 4), and registering takes 0.1 s and more per GiB.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from offload.blocks import ALIGN
from offload.errors import ClosedError, PlanError, SchedulerError
from offload.runtime.cuda_api import CardApi
from offload.runtime.memory import HostMemory
from offload.units import format_bytes

log = logging.getLogger(__name__)


class PinnedMemory(HostMemory):
    """Host memory that a card copies from and to by itself, if the system pins it.

    Attributes:
        refused: why it is not pinned; None if it is.
    """

    def __init__(
        self, nbytes: int, name: str, api: CardApi, drain: Callable[[], bool] = lambda: True
    ) -> None:
        """``drain`` waits for the copies under way; whether they have ended."""
        super().__init__(nbytes, name)
        self._api = api
        self._drain = drain
        self._address = self.tensor().data_ptr()
        self.refused = api.pin(self._address, self._usable)

    def close(self) -> None:
        """See ``HostMemory``. What a hanging card may still write to is not given back."""
        if self.closed:
            return
        if not self._drain():
            log.error("'%s' is not given back: the card may still be using it", self.name)
            return
        if self.refused is None and (wrong := self._api.unpin(self._address)) is not None:
            log.warning("'%s' could not be unpinned: %s", self.name, wrong)
        super().close()


class CardMemory:
    """Bytes on a card: one allocation of torch's, at a 4096-aligned address.

    Raises:
        PlanError: it does not fit; says what is used and what could be had.
    """

    def __init__(self, nbytes: int, name: str, api: CardApi) -> None:
        if nbytes <= 0:
            raise ValueError(f"memory '{name}': size must be positive, got {nbytes}")
        self.name = name
        self.nbytes = nbytes
        try:
            whole = api.empty(nbytes + ALIGN)
        except RuntimeError as error:
            if not api.out_of_memory(error):
                raise
            raise PlanError(_does_not_fit(nbytes, name, api)) from error
        start = -whole.data_ptr() % ALIGN
        with torch.inference_mode(False):
            self._tensor = whole[start : start + nbytes]
        self.closed = False

    def tensor(self) -> torch.Tensor:
        """See ``Memory``. Raises ClosedError."""
        if self.closed:
            raise ClosedError(f"memory '{self.name}' is closed")
        return self._tensor

    def view(self) -> memoryview:
        """Refused: the host cannot address a card's memory."""
        raise SchedulerError(f"device memory '{self.name}' cannot be addressed by the host or I/O")

    def close(self) -> None:
        """Give the bytes back to torch, as soon as no view of them is left. Idempotent."""
        self.closed = True
        self._tensor = torch.empty(0, dtype=torch.uint8)


def _does_not_fit(nbytes: int, name: str, api: CardApi) -> str:
    room = api.room()
    cap = ""
    if room.limit < room.total:
        cap = f", of which this process may have {format_bytes(room.limit)}"
    return (
        f"device memory '{name}' needs {format_bytes(nbytes)}, but {api.name} has "
        f"{format_bytes(room.free)} free of {format_bytes(room.total)}{cap}: short by "
        f"{max(0, nbytes - room.free)} bytes; lower the GPU budget, or free the card's memory"
    )


def check_budget(nbytes: int, api: CardApi) -> None:
    """Whether a budget can be had on the card at all, before anything is planned for it.

    Raises:
        PlanError: it is more than the card has, or than is free on it now.
    """
    room = api.room()
    if nbytes > room.limit:
        whose = "this process may have" if room.limit < room.total else f"{api.name} has"
        raise PlanError(
            f"a GPU budget of {format_bytes(nbytes)} cannot be had: {whose} "
            f"{format_bytes(room.limit)}; lower it by at least {nbytes - room.limit} bytes"
        )
    if nbytes > room.free:
        raise PlanError(
            f"a GPU budget of {format_bytes(nbytes)} cannot be had now: of the "
            f"{format_bytes(room.total)} of {api.name} {format_bytes(room.free)} are free; lower "
            f"it by {nbytes - room.free} bytes, or end what else uses the card"
        )


__all__ = ["CardMemory", "PinnedMemory", "check_budget"]
