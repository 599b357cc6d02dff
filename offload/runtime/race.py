"""A race detector for memory that streams, I/O lanes and the host share: vector clocks over bytes.

Two uses of overlapping bytes, at least one of them a write, race unless one *happens before* the
other. Every actor counts its releases (recorded events); an event carries a snapshot of what its
actor knew; whoever waits for the event learns the snapshot. A use by actor ``a`` at its count ``n``
happens before actor ``b``'s next use exactly if ``b`` knows ``a`` at ``n`` or later. Per byte range
the last write and the reads since are kept; a read that happens before a later read is implied by
it and dropped. (Mattern 1989, *Virtual time and global states*; Flanagan & Freund, PLDI 2009,
*FastTrack*, for epochs in place of full clocks.)

Uses are judged when they are *submitted*, in program order, never when a thread gets to them: a
missing wait is found at every timing, also when the bytes happened to come out right.

Submission is no ordering: a copy that must see what the host wrote waits for an event of the host.
That is stricter than CUDA is for pageable writes and exactly what it is for kernels, and it is what
makes a forgotten ``h2d.wait(compute.record())`` visible where the host computes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from offload.errors import SchedulerError
from offload.runtime.device import Access, Memory, Region
from offload.runtime.intervals import IntervalMap

log = logging.getLogger(__name__)

Stamp = Mapping[str, int]
"""What an actor knew when it recorded an event: actor → count."""

MAX_RACES = 64
"""Races kept; a missing wait in a loop would otherwise fill memory with copies of itself."""

_VERB = {"r": "reads", "w": "writes"}
_NOUN = {"r": "read", "w": "write"}


class RaceError(SchedulerError):
    """Two uses of the same bytes without an order, or a use of bytes nobody has written."""


def canonical(actor: str) -> str:
    """``compute`` is the host: on devices that check races the host thread computes."""
    return "host" if actor == "compute" else actor


@dataclass(frozen=True, slots=True)
class _Use:
    actor: str  # as the caller named it
    access: Access
    count: int
    what: str

    def __str__(self) -> str:
        return f"{self.actor}'s {_NOUN[self.access]}" + (f" ({self.what})" if self.what else "")


@dataclass(frozen=True, slots=True)
class _Bytes:
    """History of a byte range. Immutable, so that the halves of a split range can share it."""

    writer: _Use | None = None
    readers: tuple[_Use, ...] = ()
    garbage: str = ""
    """Why the content is worthless; empty if it was written."""


_UNKNOWN = _Bytes()


class RaceDetector:
    """Happens-before over memories. Thread-safe. Nothing is raised while recording: see check()."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clocks: dict[str, dict[str, int]] = {}
        self._memories: dict[int, tuple[Memory, IntervalMap[_Bytes]]] = {}
        self._races: list[str] = []

    # -- order ---------------------------------------------------------------------------------

    def release(self, actor: str) -> Stamp:
        """Everything ``actor`` did so far, as the snapshot an event carries."""
        with self._lock:
            name = canonical(actor)
            clock = self._clock(name)
            stamp = dict(clock)
            clock[name] += 1  # what it does from now on is not covered
            return stamp

    def acquire(self, actor: str, stamp: Stamp) -> None:
        """What ``actor`` does from now on comes after ``stamp``."""
        with self._lock:
            _learn(self._clock(canonical(actor)), stamp)

    def _clock(self, name: str) -> dict[str, int]:
        return self._clocks.setdefault(name, {name: 1})

    # -- memory --------------------------------------------------------------------------------

    def created(self, memory: Memory) -> None:
        """Start to watch a memory whose bytes nobody has written."""
        with self._lock:
            ranges = self._ranges(memory)
            ranges.put(0, memory.nbytes, _Bytes(garbage="never written"))

    def forget(self, memory: Memory) -> None:
        """Stop watching: the memory is closed."""
        with self._lock:
            self._memories.pop(id(memory), None)

    def _ranges(self, memory: Memory) -> IntervalMap[_Bytes]:
        # The strong reference keeps the id from being reused while the entry exists.
        return self._memories.setdefault(id(memory), (memory, IntervalMap()))[1]

    def touch(self, actor: str, region: Region, access: Access, what: str = "") -> None:
        """Record a use; ``what`` says more about it in a report. Memories that were never
        ``created`` here are taken for written."""
        with self._lock:
            name = canonical(actor)
            clock = self._clock(name)
            use = _Use(actor, access, clock[name], what)
            ranges = self._ranges(region.memory)
            start, stop = region.offset, region.offset + region.nbytes
            after: list[tuple[int, int, _Bytes]] = []
            for a, b, seen in _with_gaps(ranges.overlapping(start, stop), start, stop):
                self._judge(use, clock, region.memory, a, b, seen)
                if access == "r":
                    still = tuple(r for r in seen.readers if not _before(r, clock))
                    # Reported once: after that the bytes count as written.
                    seen = replace(seen, readers=(*still, use), garbage="")
                    if after and after[-1][2] == seen:
                        a = after.pop()[0]
                    after.append((a, b, seen))
            if access == "w":
                after = [(start, stop, _Bytes(writer=use))]
            ranges.replace(start, stop, after)

    def discard(self, region: Region, stamps: Iterable[Stamp], why: str = "released") -> None:
        """The bytes are worthless after ``stamps``: uses that are not before them race with the
        end of the lease, later reads are flagged."""
        with self._lock:
            end = dict(self._clock("host"))
            for stamp in stamps:
                _learn(end, stamp)
            use = _Use("the end of the lease", "w", 0, why)
            ranges = self._ranges(region.memory)
            start, stop = region.offset, region.offset + region.nbytes
            after = []
            for a, b, seen in _with_gaps(ranges.overlapping(start, stop), start, stop):
                self._judge(use, end, region.memory, a, b, seen)
                after.append((a, b, replace(seen, garbage=why)))
            ranges.replace(start, stop, after)

    def _judge(
        self, use: _Use, clock: Stamp, memory: Memory, start: int, stop: int, seen: _Bytes
    ) -> None:
        where = f"memory '{memory.name}' bytes [{start}, {stop})"
        does = f"{use.actor} {_VERB[use.access]}" + (f" ({use.what})" if use.what else "")
        if use.access == "r" and seen.garbage:
            self._report(
                f"garbage read in {where}: {does}, but the bytes were {seen.garbage}; "
                "missing: a write between, and the order to it"
            )
        against = [seen.writer] if seen.writer else []
        if use.access == "w":
            against += seen.readers
        for other in against:
            if not _before(other, clock):
                self._report(
                    f"race in {where}: {does}, but {other} is not ordered before it; missing: an "
                    f"event recorded on {other.actor} after its {_NOUN[other.access]} that "
                    f"{use.actor} waits for"
                )

    # -- report --------------------------------------------------------------------------------

    def _report(self, text: str) -> None:
        if len(self._races) < MAX_RACES:
            self._races.append(text)
            log.error("%s", text)

    def races(self) -> tuple[str, ...]:
        """What was found, oldest first."""
        with self._lock:
            return tuple(self._races)

    def check(self) -> None:
        """Raise RaceError with the first race and the number of all, if there was one."""
        if self._races:
            found = self.races()
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise RaceError(found[0] + more)


def _before(use: _Use, clock: Stamp) -> bool:
    return clock.get(canonical(use.actor), 0) >= use.count


def _learn(clock: dict[str, int], stamp: Stamp) -> None:
    for name, count in stamp.items():
        if clock.get(name, 0) < count:
            clock[name] = count


def _with_gaps(
    parts: list[tuple[int, int, _Bytes]], start: int, stop: int
) -> list[tuple[int, int, _Bytes]]:
    """``parts`` made to cover [start, stop): bytes never seen before have no history."""
    out: list[tuple[int, int, _Bytes]] = []
    for a, b, value in parts:
        if start < a:
            out.append((start, a, _UNKNOWN))
        out.append((a, b, value))
        start = b
    if start < stop:
        out.append((start, stop, _UNKNOWN))
    return out
