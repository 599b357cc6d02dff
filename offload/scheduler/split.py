"""Which site computes which of a MoE layer's experts: the device or the CPU, at the same time.

An expert that a layer is routed to lies in a slot of the device, in RAM, or on the disk. What is in
a slot is computed there. For the others there are two ways: the weights go up and the device
computes, or the CPU computes where they lie. Neither is always right: a copy costs as much for one
token as for a hundred, and a CPU that works leaves the link to what only the device can do in time.

So the layer is played on four lanes (disk, link, device, CPU), whose costs were measured, and the
assignment that ends first is taken, or one that ends almost as early and moves more. Candidates
come from two greedy rules: *earliest finish*, over jobs by falling load (Graham's
longest-processing-time rule), and the *two ends* of HybriMoE (Zhong et al., 2025, section 4.2: the
device takes the heaviest from one end, the CPU the lightest from the other). Both sites alone are
candidates, too, so that the answer is hardly ever worse than either, and never by more than what is
spent on moving. It is a function of its arguments alone: neither time nor threads have a say.
"""

from __future__ import annotations

import enum
import functools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offload.blocks import BlockSpec
from offload.scheduler.costs import CostModel

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Tokens of one expert for which costs are kept; between them lines are drawn."""

INVEST = 0.1
"""Of assignments that end within this share of the first, the one that moves most is taken: what
has gone up is in a slot when its layer comes again."""


PATTERNS = 4096
"""Splits that are remembered: of eight experts on three places there are 6561."""


class Site(enum.Enum):
    """Where an expert is computed, and how it gets there."""

    SLOT = "slot"
    """On the device, where it is already."""
    MOVE = "move"
    """On the device, after its weights have gone up."""
    CPU = "cpu"
    """On the CPU, where its weights lie in RAM."""


class Place(enum.Enum):
    """Where an expert's weights are when it is asked for."""

    SLOT = "slot"
    RAM = "ram"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Job:
    """One expert of a layer: how many tokens it is applied to, and where its weights are."""

    expert: str
    tokens: int
    place: Place
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCosts:
    """Seconds of one expert of ``nbytes``; others cost in proportion to their bytes.

    Attributes:
        cpu, device: by ``COUNTS`` of tokens.
        move_s: a copy up. ``read_s``: a read from disk, others in flight.
        hand_over_s: what an expert computed on the CPU costs besides: activations go down, its
            result comes up.
        rows: most tokens of a pass whose experts are split; activations of more have no room.

    Raises:
        ValueError: a table of another length, or a time that is negative.
    """

    nbytes: int
    cpu: tuple[float, ...]
    device: tuple[float, ...]
    move_s: float
    read_s: float
    hand_over_s: float = 0.0
    rows: int

    def __post_init__(self) -> None:
        if len(self.cpu) != len(COUNTS) or len(self.device) != len(COUNTS):
            raise ValueError(f"costs are tables of {len(COUNTS)} times")
        if min(*self.cpu, *self.device, self.move_s, self.read_s, self.hand_over_s) < 0:
            raise ValueError("times cannot be negative")
        if self.nbytes < 1 or self.rows < 1:
            raise ValueError(f"{self.nbytes} bytes, {self.rows} rows")

    @classmethod
    def measured(cls, costs: CostModel, spec: BlockSpec, rows: int) -> SplitCosts:
        """What an expert like ``spec`` costs; the card is the device if it computes at all."""
        host = costs.beside_card()
        return cls(
            nbytes=spec.nbytes,
            cpu=tuple(host.expert_s(spec, n) for n in COUNTS),
            device=tuple(costs.expert_s(spec, n) for n in COUNTS),
            move_s=costs.copy_up_s(spec.nbytes),
            read_s=costs.read_busy_s(spec.nbytes),
            hand_over_s=2 * costs.copy_latency_s,
            rows=rows,
        )

    @classmethod
    def assumed(cls, nbytes: int, rows: int) -> SplitCosts:
        """Without a measurement: a link half as fast as RAM and a device ten times faster than the
        CPU, for which one token's product takes as long as reading the weights."""
        cpu = tuple(max(1.0, n / 8) for n in COUNTS)
        return cls(
            nbytes=nbytes,
            cpu=cpu,
            device=tuple(t / 10 for t in cpu),
            move_s=2.0,
            read_s=8.0,
            rows=rows,
        )

    def to_json(self) -> dict[str, object]:
        """As a dict that ``json`` can write."""
        return {
            "nbytes": self.nbytes,
            "cpu": list(self.cpu),
            "device": list(self.device),
            "move_s": self.move_s,
            "read_s": self.read_s,
            "hand_over_s": self.hand_over_s,
            "rows": self.rows,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> SplitCosts:
        """Inverse of ``to_json``. Raises KeyError, TypeError, ValueError."""
        found = {**data, **{k: tuple(data[k]) for k in ("cpu", "device")}}  # type: ignore[arg-type]
        return cls(**found)  # type: ignore[arg-type]

    def cpu_s(self, job: Job) -> float:
        """The job on the CPU, its weights in RAM."""
        return self._at(self.cpu, job) + self.hand_over_s

    def device_s(self, job: Job) -> float:
        """The job on the device, its weights there."""
        return self._at(self.device, job)

    def up_s(self, job: Job) -> float:
        """Its weights' copy up."""
        return self.move_s * job.nbytes / self.nbytes

    def disk_s(self, job: Job) -> float:
        """Its weights' read."""
        return self.read_s * job.nbytes / self.nbytes

    def _at(self, table: tuple[float, ...], job: Job) -> float:
        n, scale = max(1, job.tokens), job.nbytes / self.nbytes
        if n >= COUNTS[-1]:
            return table[-1] * scale * n / COUNTS[-1]
        i = bisect_left(COUNTS, n)
        if COUNTS[i] == n:
            return table[i] * scale
        low, high = COUNTS[i - 1], COUNTS[i]
        part = (n - low) / (high - low)
        return (table[i - 1] * (1.0 - part) + table[i] * part) * scale


@dataclass(frozen=True, slots=True)
class Schedule:
    """Who computes what, in which order, and when the layer would be done."""

    device: tuple[str, ...]
    """In the order of computing: what is in slots, then what is moved."""
    cpu: tuple[str, ...]
    reads: tuple[str, ...]
    """What is not in a slot, in the order in which its weights are wanted in RAM."""
    span_s: float


def split(jobs: Sequence[Job], costs: SplitCosts, *, cpu: bool = True) -> Schedule:
    """The assignment that ends first by the lanes' costs, or almost first and moves more.

    Args:
        jobs: experts, each once, in any order: the answer depends on their names, not on it.
        cpu: whether the CPU may compute.
    """
    names = sorted(j.expert for j in jobs)
    rank = {name: i for i, name in enumerate(names)}
    pattern = sorted((-j.tokens, rank[j.expert], j.place.value, j.nbytes) for j in jobs)
    found = _split_pattern(tuple(pattern), costs, cpu)
    device, on_cpu, reads, span_s = found
    return Schedule(
        tuple(names[i] for i in device),
        tuple(names[i] for i in on_cpu),
        tuple(names[i] for i in reads),
        span_s,
    )


@functools.lru_cache(maxsize=PATTERNS)
def _split_pattern(
    pattern: tuple[tuple[int, int, str, int], ...], costs: SplitCosts, cpu: bool
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], float]:
    """``split`` of experts whose names are numbers. A token's layers differ in which of their few
    experts are where, and those cases come again: playing one takes half a millisecond in Python,
    a hundred times as long as finding it."""
    jobs = [Job(f"{i:06}", -n, Place(place), nbytes) for n, i, place, nbytes in pattern]
    found = _split(jobs, costs, cpu)
    device, on_cpu, reads = (
        tuple(map(int, some)) for some in (found.device, found.cpu, found.reads)
    )
    return device, on_cpu, reads, found.span_s


def _split(jobs: Sequence[Job], costs: SplitCosts, cpu: bool) -> Schedule:
    """``jobs``: the heaviest first, of equal load by name."""
    here = [j for j in jobs if j.place is Place.SLOT]
    # Of equal load, what is in RAM comes first: both sites can begin with it.
    away = [j for p in (Place.RAM, Place.DISK) for j in jobs if j.place is p]
    moved = frozenset(j.expert for j in away)
    if not away or not cpu:
        return _play(here, away, frozenset(), costs)
    on_cpu = {
        frozenset[str](): None,
        moved: None,
        _earliest_finish(here, away, costs): None,
        _two_ends(here, away, costs): None,
    }
    for chosen in tuple(on_cpu):  # and one less of each, its heaviest
        heaviest = next((j.expert for j in away if j.expert in chosen), "")
        on_cpu.setdefault(chosen - {heaviest})
    played = [_play(here, away, chosen, costs) for chosen in on_cpu]
    near_s = min(s.span_s for s in played) * (1.0 + INVEST)
    close = [s for s in played if s.span_s <= near_s]
    return min(close, key=lambda s: (len(s.cpu), s.span_s, s.cpu))


def _earliest_finish(here: list[Job], away: list[Job], costs: SplitCosts) -> frozenset[str]:
    """Each job, the heaviest first, to the site that would have it done first."""
    lanes = _Lanes(costs)
    for job in here:
        lanes.on_device(job)
    chosen: set[str] = set()
    for job in sorted(away, key=lambda j: (j.place is Place.DISK, -j.tokens, j.expert)):
        there = lanes.read(job)
        if lanes.cpu_end(job, there) < lanes.device_end(job, there):
            lanes.on_cpu(job, there)
            chosen.add(job.expert)
        else:
            lanes.move(job, there)
    return frozenset(chosen)


def _two_ends(here: list[Job], away: list[Job], costs: SplitCosts) -> frozenset[str]:
    """HybriMoE's rule over ``slots by falling load, others by falling load``."""
    lanes = _Lanes(costs)
    line = [*here, *sorted(away, key=lambda j: (-j.tokens, j.expert))]
    first, last = 0, len(line) - 1
    chosen: set[str] = set()
    ready = {j.expert: lanes.read(j) for j in away}
    while first <= last:
        front, back = line[first], line[last]
        front_there = ready.get(front.expert)
        end = (
            lanes.device_at(front) if front_there is None else lanes.device_end(front, front_there)
        )
        back_there = ready.get(back.expert)
        if back_there is None or end <= lanes.cpu_end(back, back_there):
            if front_there is None:
                lanes.on_device(front)
            else:
                lanes.move(front, front_there)
            first += 1
        else:
            lanes.on_cpu(back, back_there)
            chosen.add(back.expert)
            last -= 1
    return frozenset(chosen)


def _play(here: list[Job], away: list[Job], on_cpu: frozenset[str], costs: SplitCosts) -> Schedule:
    """Play an assignment: reads go to whoever waits longest for one, each site in its order."""
    lanes = _Lanes(costs)
    moves = [j for j in away if j.expert not in on_cpu]
    stays = [j for j in away if j.expert in on_cpu]
    for job in here:
        lanes.on_device(job)
    reads: list[str] = []
    i = k = 0
    while i < len(moves) or k < len(stays):
        if k == len(stays) or (i < len(moves) and lanes.device_first(moves[i], stays[k])):
            job = moves[i]
            i += 1
            lanes.move(job, lanes.read(job))
        else:
            job = stays[k]
            k += 1
            lanes.on_cpu(job, lanes.read(job))
        reads.append(job.expert)
    return Schedule(
        device=tuple(j.expert for j in (*here, *moves)),
        cpu=tuple(j.expert for j in stays),
        reads=tuple(reads),
        span_s=lanes.end,
    )


class _Lanes:
    """When each lane will be free."""

    def __init__(self, costs: SplitCosts) -> None:
        self._costs = costs
        self._disk = self._link = self._device = self._cpu = 0.0

    @property
    def end(self) -> float:
        return max(self._device, self._cpu)

    def device_first(self, move: Job, stay: Job) -> bool:
        """Whose weights are wanted earlier: those to be moved need the time of a copy more. What
        asks nothing of the disk never waits behind what does."""
        if move.place is not stay.place:
            return move.place is Place.RAM
        up_s = self._costs.up_s(move)
        return max(self._device, self._link + up_s) - up_s <= self._cpu

    def read(self, job: Job) -> float:
        """Bring a job's weights to RAM; returns when they are there."""
        if job.place is not Place.DISK:
            return 0.0
        self._disk += self._costs.disk_s(job)
        return self._disk

    def device_at(self, job: Job) -> float:
        """When a job whose weights are in a slot would be done."""
        return self._device + self._costs.device_s(job)

    def device_end(self, job: Job, there: float) -> float:
        up = max(self._link, there) + self._costs.up_s(job)
        return max(self._device, up) + self._costs.device_s(job)

    def cpu_end(self, job: Job, there: float) -> float:
        return max(self._cpu, there) + self._costs.cpu_s(job)

    def on_device(self, job: Job) -> None:
        self._device = self.device_at(job)

    def move(self, job: Job, there: float) -> None:
        end = self.device_end(job, there)
        self._link = max(self._link, there) + self._costs.up_s(job)
        self._device = end

    def on_cpu(self, job: Job, there: float) -> None:
        self._cpu = self.cpu_end(job, there)


__all__ = ["COUNTS", "Job", "Place", "Schedule", "Site", "SplitCosts", "split"]
