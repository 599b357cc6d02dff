"""Who a model's hooks ask for blocks: the executor, or whoever runs several sequences on it.

One sequence asks the executor itself. Where several run through one model (``offload.batch``), a
conductor stands in between: it lets those that come to the same unit wait for each other, and asks
the executor once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from offload.io.store import Span
from offload.scheduler.policy import Scores

T = TypeVar("T")


class Road(Protocol):
    """See ``Executor`` for what each call means; here is what differs where it is shared."""

    def who(self) -> object:
        """Who asks: the thread, or one of several sequences in it. Hashable."""
        ...

    def enter(
        self, unit: str, blocks: Sequence[str], let_go: Callable[[], None] | None = None
    ) -> int:
        """``let_go``: called before the blocks leave, if that is not the moment of ``leave``."""
        ...

    def leave(self, ticket: int, blocks: Sequence[str]) -> None: ...

    def views(self, block: str) -> dict[str, Any]: ...

    def route(self, group: str, experts: Sequence[str], scores: Scores | None = None) -> None:
        """Alone, ``Executor.split_route`` may give a part of the experts to the CPU."""
        ...

    def guess(self, group: str, experts: Sequence[str], *, far: bool = False) -> None: ...

    def acquire(self, expert: str) -> dict[str, Any]: ...

    def acquire_run(self, experts: Sequence[str], most: int) -> list[int]: ...

    def release(self, expert: str) -> None: ...

    def release_run(self, experts: Sequence[str]) -> None: ...

    def end_route(self) -> None: ...

    def read_rows(self, block: str, spans: Sequence[Span], buffer: memoryview) -> None: ...


class Conducting(Road, Protocol):
    """A road that several sequences share."""

    def conducts(self) -> bool:
        """Whether the caller is one of its sequences."""
        ...

    def alone(self) -> bool:
        """Whether the caller is its only one."""
        ...

    def local(self, key: object, make: Callable[[], T]) -> T:
        """What the calling sequence keeps under ``key``; made when it asks first."""
        ...


__all__ = ["Conducting", "Road"]
