"""The race detector has teeth: each ordering edge of a pipeline, taken away, is found.

The pipeline is the data's way with two slots per tier: an I/O lane fills a host slot, h2d copies it
to a device slot, compute reads that, and both slots go round. The lane is a thread of its own.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from enum import Enum

import pytest
import torch

from offload.errors import SchedulerError
from offload.runtime.device import Event, Region
from offload.runtime.memory import HostMemory
from offload.runtime.race import RaceDetector, RaceError
from offload.runtime.sim_device import SimDevice

N = 4096
SLOTS = 2
BLOCKS = 8


class Edge(Enum):
    ARRIVED_BEFORE_COPY = "read -> h2d"
    COPIED_BEFORE_COMPUTE = "h2d -> compute"
    USED_BEFORE_NEXT_COPY = "compute -> h2d"
    COPIED_BEFORE_NEXT_READ = "h2d -> read"


@dataclass
class Request:
    block: int
    region: Region
    after: Event | None
    arrived: queue.SimpleQueue[Event]


def lane(
    device: SimDevice, requests: queue.SimpleQueue[Request | None], without: Edge | None
) -> None:
    """The read lane: waits for its slot, fills it, signals."""
    while (todo := requests.get()) is not None:
        actor = f"read/{todo.block % SLOTS}"
        if todo.after is not None and without is not Edge.COPIED_BEFORE_NEXT_READ:
            freed = threading.Event()
            todo.after.then(lambda _, freed=freed: freed.set())  # type: ignore[misc]
            assert freed.wait(30)
            device.acquire(actor, todo.after)
        device.touch(actor, todo.region, "w")
        start = todo.region.offset
        todo.region.memory.tensor()[start : start + N].fill_(todo.block + 1)
        todo.arrived.put(device.signal(actor))


def pipeline(device: SimDevice, without: Edge | None) -> list[int]:
    """Sums that compute saw, one per block."""
    host = device.host_memory(SLOTS * N, "staging")
    dev = device.device_memory(SLOTS * N, "slots")
    requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
    reader = threading.Thread(target=lane, args=(device, requests, without))
    reader.start()
    copied: list[Event] = []
    asked: list[Request] = []

    def ask(block: int) -> None:
        after = copied[block - SLOTS] if block >= SLOTS else None
        region = Region(host, block % SLOTS * N, N)
        asked.append(Request(block, region, after, queue.SimpleQueue()))
        requests.put(asked[-1])

    sums: list[int] = []
    used: list[Event] = []
    try:
        for block in range(SLOTS):
            ask(block)
        for block in range(BLOCKS):
            slot = Region(dev, block % SLOTS * N, N)
            arrived = asked[block].arrived.get(timeout=30)
            if without is not Edge.ARRIVED_BEFORE_COPY:
                device.h2d.wait(arrived)
            if block >= SLOTS and without is not Edge.USED_BEFORE_NEXT_COPY:
                device.h2d.wait(used[block - SLOTS])
            copied.append(device.copy(slot, asked[block].region, device.h2d))
            if block + SLOTS < BLOCKS:
                ask(block + SLOTS)
            if without is not Edge.COPIED_BEFORE_COMPUTE:
                device.compute.wait(copied[block])
            device.touch("compute", slot, "r")
            sums.append(int(dev.tensor()[slot.offset : slot.offset + N].sum(dtype=torch.int64)))
            used.append(device.compute.record())
    finally:
        requests.put(None)
        reader.join(30)
    device.h2d.record().wait(30)
    return sums


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(100))
def test_with_every_edge_nothing_is_flagged_and_the_data_is_right(seed: int) -> None:
    with SimDevice(SLOTS * N, seed=seed, jitter_s=200e-6) as device:
        assert pipeline(device, None) == [(b + 1) * N for b in range(BLOCKS)]
        assert device.races() == ()


MISSING = {
    Edge.ARRIVED_BEFORE_COPY: (r"race in memory 'staging'.*h2d reads", "recorded on read/"),
    Edge.COPIED_BEFORE_COMPUTE: (r"race in memory 'slots'.*compute reads", "recorded on h2d"),
    Edge.USED_BEFORE_NEXT_COPY: (r"race in memory 'slots'.*h2d writes", "recorded on compute"),
    Edge.COPIED_BEFORE_NEXT_READ: (r"race in memory 'staging'.*", "recorded on (h2d|read/)"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("edge", list(Edge), ids=lambda e: e.value)
def test_every_missing_edge_is_flagged_at_every_timing(edge: Edge, seed: int) -> None:
    what, missing = MISSING[edge]
    device = SimDevice(SLOTS * N, seed=seed, jitter_s=200e-6)
    try:
        with pytest.raises(RaceError, match=f"{what}.*{missing}"):
            pipeline(device, edge)
    finally:
        device.close()
    with pytest.raises(RaceError, match=what):
        device.check()
    assert device.races()


def test_the_wrong_event_of_the_right_lane_is_flagged() -> None:
    """Two requests in flight; the copy of the second waits for the first."""
    device = SimDevice(2 * N)
    host, dev = device.host_memory(2 * N, "staging"), device.device_memory(2 * N, "slots")
    for i in range(2):
        device.touch(f"read/{i}", Region(host, i * N, N), "w")
    device.h2d.wait(device.signal("read/0"))
    device.copy(Region(dev, 0, N), Region(host, 0, N), device.h2d)
    assert device.races() == ()
    device.copy(Region(dev, N, N), Region(host, N, N), device.h2d)
    (race,) = device.races()
    assert f"bytes [{N}, {2 * N})" in race
    assert "event recorded on read/1 after its write that h2d waits for" in race
    with pytest.raises(RaceError):
        device.d2h.record().wait(30)
    device.close()


def test_leaving_the_device_raises_what_was_found() -> None:
    with pytest.raises(RaceError, match="garbage read"), SimDevice(N) as device:
        device.touch("compute", Region(device.device_memory(N, "slots"), 0, 1), "r")


def region(nbytes: int = 100) -> Region:
    return Region(HostMemory(nbytes, "m"), 0, nbytes)


def part(of: Region, start: int, stop: int) -> Region:
    return Region(of.memory, start, stop - start)


def test_reads_do_not_race_and_disjoint_writes_do_not() -> None:
    d, m = RaceDetector(), region()
    d.touch("a", part(m, 0, 50), "w")
    d.touch("b", part(m, 50, 100), "w")
    d.check()
    d = RaceDetector()
    for actor in "abc":
        d.touch(actor, m, "r")
    d.check()


def test_races_name_the_overlap_only() -> None:
    d, m = RaceDetector(), region()
    d.touch("a", part(m, 0, 50), "w")
    d.touch("b", part(m, 40, 60), "r")
    with pytest.raises(RaceError, match=r"'m' bytes \[40, 50\): b reads, but a's write is not"):
        d.check()


def test_order_is_transitive_and_ends_at_the_record() -> None:
    d, m = RaceDetector(), region()
    d.touch("a", m, "w")
    d.acquire("b", d.release("a"))
    d.acquire("c", d.release("b"))
    d.touch("c", m, "r")
    d.acquire("a", d.release("c"))
    stamp = d.release("a")
    d.touch("a", m, "w")
    d.check()
    d.acquire("c", stamp)  # recorded before the second write: covers the first only
    d.touch("c", m, "r")
    with pytest.raises(RaceError):
        d.check()


def test_a_write_must_come_after_every_reader() -> None:
    for forgotten in "xyz":
        d, m = RaceDetector(), region()
        d.touch("w", m, "w")
        for reader in "xyz":
            d.acquire(reader, d.release("w"))
            d.touch(reader, m, "r")
            if reader != forgotten:
                d.acquire("w", d.release(reader))
        d.touch("w", m, "w")
        with pytest.raises(RaceError, match=f"{forgotten}'s read is not ordered"):
            d.check()


def test_compute_is_the_host() -> None:
    d, m = RaceDetector(), region()
    d.touch("compute", m, "w")
    d.touch("host", m, "r")
    d.acquire("h2d", d.release("host"))
    d.touch("h2d", m, "w")
    d.check()


def test_unwritten_and_released_bytes_may_not_be_read() -> None:
    d, m = RaceDetector(), region()
    d.created(m.memory)
    d.touch("host", part(m, 0, 10), "w")
    d.touch("host", part(m, 0, 10), "r")
    d.check()
    d.touch("host", part(m, 5, 15), "r")
    with pytest.raises(RaceError, match=r"garbage read in memory 'm' bytes \[10, 15\).*never"):
        d.check()
    d, m = RaceDetector(), region()
    d.touch("host", m, "w")
    d.discard(part(m, 20, 30), [])
    d.touch("host", part(m, 0, 20), "r")
    d.touch("host", part(m, 30, 100), "r")
    d.check()
    d.touch("host", part(m, 20, 30), "w")
    d.touch("host", m, "r")
    d.check()
    d.discard(m, [])
    d.touch("host", part(m, 99, 100), "r")
    with pytest.raises(RaceError, match="released"):
        d.check()


def test_a_lease_ends_after_its_last_use() -> None:
    d, m = RaceDetector(), region()
    d.touch("host", m, "w")
    d.acquire("h2d", d.release("host"))
    early = d.release("h2d")
    d.touch("h2d", m, "r")
    late = d.release("h2d")
    d.discard(m, [late])
    d.check()
    d.discard(m, [early])
    with pytest.raises(RaceError, match=r"end of the lease writes .released., but h2d's read"):
        d.check()


def test_the_next_owner_needs_the_events_of_the_last() -> None:
    d, m = RaceDetector(), region()
    d.touch("h2d", m, "r")
    stamp = d.release("h2d")
    d.discard(m, [stamp])
    d.touch("read", m, "w")
    with pytest.raises(RaceError, match="read writes, but h2d's read"):
        d.check()


def test_a_race_is_a_scheduler_error_and_they_are_bounded() -> None:
    d, m = RaceDetector(), region()
    for i in range(1000):
        d.touch(f"a{i % 2}", m, "w")
    assert 1 <= len(d.races()) <= 64
    with pytest.raises(SchedulerError, match="and 63 more"):
        d.check()


def test_against_all_pairs_of_uses() -> None:
    """Random programs; the oracle keeps full clocks of every use and compares all pairs."""
    gen = torch.Generator().manual_seed(1)

    def draw(n: int) -> int:
        return int(torch.randint(0, n, (1,), generator=gen))

    verdicts = set()
    for _ in range(300):
        d, m = RaceDetector(), region(16)
        known: dict[str, set[int]] = {a: set() for a in "abc"}  # uses that happened before
        uses: list[tuple[str, int, int, bool]] = []
        events: list[tuple[dict[str, int], set[int]]] = []
        racy = False
        for _ in range(14):
            actor, what = "abc"[draw(3)], draw(8)
            if what < 2:
                events.append((dict(d.release(actor)), set(known[actor])))
            elif what < 5 and events:
                stamp, seen = events[draw(len(events))]
                d.acquire(actor, stamp)
                known[actor] |= seen
            else:
                start, n, write = draw(12), 1 + draw(4), draw(2) == 0
                for i, (_, s, e, w) in enumerate(uses):
                    overlap = s < start + n and start < e
                    racy |= overlap and (w or write) and i not in known[actor]
                known[actor].add(len(uses))
                uses.append((actor, start, start + n, write))
                d.touch(actor, part(m, start, start + n), "w" if write else "r")
        assert bool(d.races()) == racy
        verdicts.add(racy)
    assert verdicts == {True, False}
