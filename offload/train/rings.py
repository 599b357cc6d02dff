"""Memory that is handed out in a circle: what comes round takes the place of what is oldest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from offload.blocks import align_up


@dataclass(eq=False, slots=True)
class Part:
    """Some bytes, from a page's beginning."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + align_up(self.nbytes)


P = TypeVar("P", bound=Part)


class Ring(Generic[P]):
    """Which bytes of a memory are whose. Not thread-safe."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.parts: list[P] = []
        """The oldest first."""
        self.at = 0
        """Where the newest one ends."""

    def find(
        self, nbytes: int, held: Callable[[P], bool] = lambda _: False, first: int | None = None
    ) -> int | None:
        """Where ``nbytes`` fit beside what is held: at ``first``, or behind the newest one, else
        wherever they do; None: nowhere."""
        size = align_up(nbytes)
        kept = [part for part in self.parts if held(part)]
        for start in (self.at if first is None else first, *(p.end for p in kept), 0):
            free = all(p.end <= start or start + size <= p.offset for p in kept)
            if free and start + nbytes <= self.nbytes:
                return start
        return None

    def clear(self, offset: int, nbytes: int) -> list[P]:
        """Take out what is in the way of these bytes."""
        end = offset + align_up(nbytes)
        gone = [p for p in self.parts if p.offset < end and offset < p.end]
        self.parts = [p for p in self.parts if p not in gone]
        return gone

    def put(self, part: P) -> None:
        self.parts.append(part)
        self.at = part.end


__all__ = ["Part", "Ring"]
