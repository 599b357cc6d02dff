"""Who is next: clients in turn, each client's requests in their order."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Round robin: somebody who asks once waits for one request of each other client, however many
    those have waiting. Not thread-safe; holds at most ``limit`` items."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def full(self) -> bool:
        return self._count >= self.limit

    def push(self, client: str, item: T) -> None:
        """Append to the client's own line; a client without one comes last.

        Raises:
            OverflowError: it is full.
        """
        if self.full:
            raise OverflowError(f"{self._count} of {self.limit} places are taken")
        self._waiting.setdefault(client, deque()).append(item)
        self._count += 1

    def pop(self) -> T:
        """The next client's oldest item; that client then comes last. Raises KeyError: empty."""
        client = next(iter(self._waiting), None)
        if client is None:
            raise KeyError("nothing is waiting")
        line = self._waiting[client]
        item = line.popleft()
        self._count -= 1
        if line:
            self._waiting.move_to_end(client)
        else:
            del self._waiting[client]
        return item

    def remove(self, client: str, item: T) -> bool:
        """Take an item out of its line; False if it is not there (any more)."""
        line = self._waiting.get(client)
        if line is None or item not in line:
            return False
        line.remove(item)
        self._count -= 1
        if not line:
            del self._waiting[client]
        return True

    def clear(self) -> list[T]:
        """Take all out."""
        items = [item for line in self._waiting.values() for item in line]
        self._waiting.clear()
        self._count = 0
        return items
