"""The protocol of durable blocks.

A store fills the caller's buffer or writes from it and never allocates the payload itself: the
caller owns the memory (a lease of an arena) and therefore the budget. Every call returns a
``concurrent.futures.Future``; it resolves only when no thread touches the buffer any more, also
after ``cancel()``, so a lease is free for reuse exactly when its future is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from offload.blocks import BlockSpec

DEMAND = 0
"""Priority of a request that compute is waiting for."""
PREFETCH = 1
"""Priority of a request made ahead of its use. Never delays a queued DEMAND request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What a finished transfer did; all sizes in bytes.

    ``payload_bytes`` are the bytes asked for, ``physical_bytes`` what went over the disk's lane
    (alignment included), ``copied_bytes`` what was moved once more in memory. ``seconds`` runs
    from the start of the first request to the end of the last; waiting before it is not in it.
    """

    payload_bytes: int
    physical_bytes: int
    copied_bytes: int
    requests: int
    seconds: float

    def __add__(self, other: Receipt) -> Receipt:
        return Receipt(
            payload_bytes=self.payload_bytes + other.payload_bytes,
            physical_bytes=self.physical_bytes + other.physical_bytes,
            copied_bytes=self.copied_bytes + other.copied_bytes,
            requests=self.requests + other.requests,
            seconds=self.seconds + other.seconds,
        )


class Span(NamedTuple):
    """Copy ``nbytes`` from ``src`` (offset in the block) to ``dst`` (offset in the buffer)."""

    src: int
    dst: int
    nbytes: int


@runtime_checkable
class Store(Protocol):
    """Durable blocks. Thread-safe.

    Errors arrive through the future as ``StoreError``, after ``close`` as ``ClosedError``. A
    caller's mistake raises at once: KeyError for an unknown id, ValueError for a buffer that is
    too short, read-only or not aligned.
    """

    @property
    def writable(self) -> bool:
        """Whether ``write_from`` can be called."""
        ...

    def ids(self) -> Iterable[str]:
        """The ids of all blocks, in the order they lie on disk."""
        ...

    def spec(self, block_id: str) -> BlockSpec:
        """The block's description. Raises KeyError for an unknown id."""
        ...

    def read_into(
        self, block_id: str, dst: memoryview, *, priority: int = DEMAND
    ) -> Future[Receipt]:
        """Fill ``dst[:spec.nbytes]``. ``dst``: writable bytes at a 4096-aligned address.

        Padding between tensors is left undefined; bytes from ``spec.nbytes`` up to
        ``spec.slot_nbytes`` may be overwritten when ``dst`` is that long.
        """
        ...

    def read_spans_into(
        self, block_id: str, spans: Sequence[Span], dst: memoryview, *, priority: int = DEMAND
    ) -> Future[Receipt]:
        """Fill parts of ``dst`` from parts of one block (rows of an embedding). No alignment."""
        ...

    def write_from(self, block_id: str, src: memoryview) -> Future[Receipt]:
        """Write ``src[:spec.nbytes]``; the block is readable once the future is done."""
        ...

    def close(self) -> None:
        """Wait for what is in flight, then release files and threads. Idempotent."""
        ...
