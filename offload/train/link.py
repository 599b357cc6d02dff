"""What a step moves over the link between RAM and a device: bytes of each unit, by direction.

Pure: numbers in, numbers out. Which weights go up again follows from a replay of what
``device_weights`` does: slots keep what is needed next (Belady), an update drops what it changes,
and a frozen base that has room goes up once and in no step. What a unit on the device hands to the
next one there does not move, what all get alike goes up once for a micro-batch; what backward needs
of it comes down beside the next unit. Gradients of weights come down behind each backward.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from offload.blocks import DTYPE_BYTES
from offload.train.device_plan import DevicePlacement
from offload.train.head_place import HeadPlacement
from offload.train.layout import TrainLayout, TrainUnit

FORWARD, BACKWARD = 0, 1

EXPERTS_AHEAD = 8
"""Uses of experts that are looked ahead at: ``device_weights``'s."""

STEPS = 2
"""Replayed: the first leaves on the device what later steps find there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visited:
    """Bytes that one visit of a unit moves besides weights."""

    arguments: int
    results: int
    """Of what it returns; as many of the gradients that come back."""
    inputs: int
    """Of its arguments, those whose gradients come down."""
    handed: int = 0
    """Of its arguments, what another unit has returned."""
    maker: int | None = None
    """That unit."""
    same: tuple[tuple[int, int], ...] = ()
    """Of the others (number, bytes): what has one number is one tensor."""
    router_mask: int = 0
    """Up, where there is a load-balancing loss: which tokens its router counts."""
    router_down: int = 0
    """Of its router's sums for that loss, in forward."""
    router_up: int = 0
    """Of the experts' shares for it, in backward."""


@dataclass(slots=True, kw_only=True)
class UnitLink:
    """Bytes of a unit in a step, each in forward and in backward."""

    weights: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Up, ahead of their use."""
    experts: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Up while it runs, each ahead of its use."""
    experts_again: float = 0.0
    """Of these, in backward while it runs again, before it goes back."""
    first_experts: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Of these, what nothing is computed beside: the first one, once it has been routed to."""
    arguments: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Up: what it is called with; in backward the gradients of what it returned, too."""
    results: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Down: what it returns; in backward the gradients of its inputs. The next unit waits."""
    kept: float = 0.0
    """Down in forward while the next unit runs: what it returns, where that is on the device."""
    gradients: float = 0.0
    """Down, of its weights, while backward computes."""
    last_gradient: float = 0.0
    """Of these, what is made last in each backward: nothing is left to compute beside it."""
    slices: float = 0.0
    """Up in backward, while it computes: a head's, each before it is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A step's copies."""

    units: Mapping[int, UnitLink]
    copies: Mapping[int, tuple[float, float]]
    """Block -> times that it goes up in forward and in backward, those of units on the device."""
    head: UnitLink | None = None
    """Of the head, if the loss is computed on the device."""
    states: tuple[float, float] = 0.0, 0.0
    """(up, down) of optimizer states that the device updates."""
    updating: int = FORWARD
    """The phase that they are updated in."""

    def bytes_of(self, phase: int) -> tuple[int, int]:
        """(up, down) in ``FORWARD`` or ``BACKWARD``."""
        up, down = self.states if phase == self.updating else (0.0, 0.0)
        heads = [] if self.head is None else [self.head]
        for unit in (*self.units.values(), *heads):
            up += unit.weights[phase] + unit.experts[phase] + unit.arguments[phase]
            down += unit.results[phase]
            if phase == FORWARD:
                down += unit.kept
            else:
                up += unit.slices
                down += unit.gradients
        return round(up), round(down)


def link_of(
    layout: TrainLayout, place: DevicePlacement, visits: Mapping[int, Visited], *, passes: int,
    micro_batches: int, routed: Mapping[int, float] = {},
) -> Link:  # fmt: skip
    """What a step of ``micro_batches`` moves.

    Args:
        visits: by unit.
        passes: times that weights are asked for forward and backward in a step.
        routed: block of a fused expert -> how likely a micro-batch reaches it; else certain.
    """
    here = [layout.units[u] for u in sorted(place.units)]
    trained = [u.index for u in layout.units if _trains(layout, u)]
    first = min(trained, default=len(layout.units))  # nothing goes back below it
    turns = _turns([u.index for u in here], first, passes)
    replay = _Replay(layout, place, turns, micro_batches // passes, routed)
    for _ in range(STEPS):
        replay.step()
    out: dict[int, UnitLink] = {}
    flow = _Flow(place, visits, first)
    for unit in here:
        found = out[unit.index] = UnitLink()
        for phase in (FORWARD, BACKWARD):
            found.weights[phase] = replay.nbytes(unit.blocks, phase)
            fused = [b for ids in unit.experts.values() for b in ids]
            found.experts[phase] = replay.nbytes(fused, phase)
            one = max((layout.blocks[b].nbytes for b in fused), default=0)
            found.first_experts[phase] = min(
                replay.nbytes_first(fused, phase), float(one * micro_batches)
            )
        found.experts_again = replay.nbytes_first(fused, BACKWARD)
        found.arguments = [micro_batches * n for n in flow.up(unit.index)]
        found.results = [micro_batches * n for n in flow.down(unit.index)]
        found.kept = micro_batches * flow.kept(unit.index)
        if unit.index < first:
            continue
        sizes = _gradients(layout, unit, routed)
        found.gradients = micro_batches * sum(sizes)
        found.last_gradient = micro_batches * sizes[0] if sizes else 0.0
    last = max((u for u in out if u >= first), default=None)
    if last is not None:
        out[last].arguments[BACKWARD] += micro_batches * flow.shares
    copies = {b: (f, g) for b, (f, g) in replay.times.items()}
    head = place.head
    if head is not None and head.stays:
        copies |= {b: (0.0, 0.0) for b in head.blocks}
    return Link(
        units=out, copies=copies, head=None if head is None else _head_link(head, micro_batches)
    )


class _Flow:
    """What a micro-batch moves between RAM and the device besides weights, unit by unit."""

    def __init__(self, place: DevicePlacement, visits: Mapping[int, Visited], first: int) -> None:
        """``first``: the lowest unit that is gone back to."""
        none = Visited(arguments=0, results=0, inputs=0)
        self._visits = {u: visits.get(u, none) for u in sorted(place.units)}
        self._first = first
        self._hands = place.hands_over()
        self._stays = place.same_bytes > 0
        self._next = {v.maker: u for u, v in self._visits.items() if v.maker in self._visits}
        came: set[int] = set()
        self._new: dict[int, int] = {}
        """Of what all units get alike, bytes that are new with a unit."""
        masked = False
        for u, visit in self._visits.items():
            new = [n for number, n in visit.same if number not in came or not self._stays]
            came.update(number for number, _ in visit.same)
            self._new[u] = sum(new) + visit.router_mask * (not masked or not self._stays)
            masked = masked or bool(visit.router_mask)
        self.shares = 0
        """Bytes of the experts' shares that go up once, for whatever unit is first in backward."""
        if self._stays:
            back = [v.router_up for u, v in self._visits.items() if u >= first]
            self.shares = max(back, default=0)

    def _handed(self, unit: int) -> int:
        """Of its arguments, what is on the device already."""
        visit = self._visits[unit]
        return visit.handed if self._hands and visit.maker in self._visits else 0

    def up(self, unit: int) -> list[float]:
        visit = self._visits[unit]
        alike = sum(n for _, n in visit.same)
        own = visit.arguments - alike
        forward = own - self._handed(unit) + self._new[unit]
        if unit < self._first:
            return [float(forward), 0.0]
        backward = own + visit.results
        if unit in self._next:
            backward -= min(visit.results, self._handed(self._next[unit]))
        if not self._stays:
            backward += alike + visit.router_mask + visit.router_up
        return [float(forward), float(backward)]

    def down(self, unit: int) -> list[float]:
        visit = self._visits[unit]
        stays = unit in self._next and self._handed(self._next[unit])
        forward = visit.router_down + (0 if stays else visit.results)
        backward = 0 if unit <= self._first or self._handed(unit) else visit.inputs
        return [float(forward), float(backward)]

    def kept(self, unit: int) -> float:
        """Where nothing is gone back to nobody asks for it."""
        after = self._next.get(unit)
        if after is None or not self._handed(after) or after < self._first:
            return 0.0
        return float(self._visits[unit].results)


def _head_link(head: HeadPlacement, micro_batches: int) -> UnitLink:
    found = UnitLink()
    found.slices, first = head.copied(micro_batches)
    found.arguments[BACKWARD] = first + micro_batches * head.arguments
    found.results[BACKWARD] = float(micro_batches * head.results)
    found.gradients = float(micro_batches * sum(head.gradients))
    found.last_gradient = float(micro_batches * head.gradients[0]) if head.gradients else 0.0
    return found


def _trains(layout: TrainLayout, unit: TrainUnit) -> bool:
    mine = (*unit.blocks, *(b for ids in unit.experts.values() for b in ids))
    return any(layout.blocks[b].trained for b in mine)


def _gradients(layout: TrainLayout, unit: TrainUnit, routed: Mapping[int, float]) -> list[float]:
    """Bytes of each gradient of a backward, those of the first weights last."""
    return [
        piece.count * DTYPE_BYTES[block.dtype] * routed.get(block.index, 1.0)
        for b in (*unit.blocks, *(b for ids in unit.experts.values() for b in ids))
        for block in (layout.blocks[b],)
        if block.trained
        for piece in block.pieces
    ]


@dataclass(frozen=True, slots=True)
class _Turn:
    """A use of a unit."""

    unit: int
    phase: int
    last: bool
    """Nothing uses it in this step any more: its update follows."""
    farthest: tuple[tuple[int, int], ...]
    """(index of its next use, of the step after from its length on; unit), the last one first."""


def _turns(units: Sequence[int], first: int, passes: int) -> list[_Turn]:
    """A step's uses of units, in order."""
    back = [u for u in reversed(units) if u >= first]
    uses = [(u, p) for p, some in ((FORWARD, units), (BACKWARD, back)) for u in some] * passes
    n = len(uses)
    when: dict[int, int] = {}
    farthest: list[tuple[tuple[int, int], ...]] = [()] * n
    # Backwards through two cycles: in the second round it is known when each is used next.
    for i in reversed(range(2 * n)):
        if i < n:
            farthest[i] = tuple(sorted(((at, u) for u, at in when.items()), reverse=True))
        when[uses[i % n][0]] = i
    final = {u: i for i, (u, _) in enumerate(uses)}
    return [
        _Turn(u, phase, final[u] == i, farthest[i]) for i, (u, phase) in enumerate(uses)
    ]  # fmt: skip


class _Slots:
    """Slots of one kind, and what is in them: lists of keys by unit, in ascending order."""

    def __init__(self, count: int) -> None:
        self.free = count
        self.there: dict[int, list[int]] = {}

    def has(self, unit: int, key: int) -> bool:
        return key in self.there.get(unit, ())

    def put(self, unit: int, key: int, farthest: Sequence[tuple[int, int]]) -> int | None:
        """Make it be there; the key that made room."""
        gone = None
        if self.free:
            self.free -= 1
        else:
            gone = self.there[next(u for _, u in farthest if self.there.get(u))].pop()
        insort(self.there.setdefault(unit, []), key)
        return gone

    def drop(self, unit: int) -> list[int]:
        """All of a unit's, and say what they were."""
        gone = self.there.pop(unit, [])
        self.free += len(gone)
        return gone


class _Replay:
    """Steps of ``DeviceWeights``, without time."""

    def __init__(
        self, layout: TrainLayout, place: DevicePlacement, turns: Sequence[_Turn], visits: int,
        routed: Mapping[int, float],
    ) -> None:  # fmt: skip
        """``visits``: micro-batches that visit a unit at each of its turns."""
        self._layout = layout
        self._turns = turns
        self._visits = visits
        self._routed = routed
        self._units = _Slots(place.slots)
        self._experts = _Slots(place.expert_slots)
        self._stale: set[int] = set()
        """Units whose trained blocks are to come again."""
        self._come: dict[int, float] = {}
        """Trained expert in a slot -> how likely it has come since its update."""
        self.times: dict[int, list[float]] = {}
        self.risen_first: dict[int, list[float]] = {}
        """Of these, of fused experts, while the unit runs, or runs again: before it goes back."""

    def nbytes(self, blocks: Collection[int], phase: int) -> float:
        """Of these, that went up in the last step."""
        return sum(self.times[b][phase] * self._layout.blocks[b].nbytes for b in blocks)

    def nbytes_first(self, blocks: Collection[int], phase: int) -> float:
        """Of these, that went up before the unit went back through itself."""
        return sum(self.risen_first[b][phase] * self._layout.blocks[b].nbytes for b in blocks)

    def step(self) -> None:
        self.times = {
            b: [0.0, 0.0]
            for turn in self._turns
            for unit in (self._layout.units[turn.unit],)
            for b in (*unit.blocks, *(e for ids in unit.experts.values() for e in ids))
        }
        self.risen_first = {b: [0.0, 0.0] for b in self.times}
        for i, turn in enumerate(self._turns):
            unit = self._layout.units[turn.unit]
            self._acquire(turn, unit)
            self._ahead(i, turn)
            for visit in range(self._visits):
                for ids in unit.experts.values():
                    self._run_experts(turn, ids, again=visit + 1 < self._visits)
            if turn.last:
                self._update(unit)

    def _acquire(self, turn: _Turn, unit: TrainUnit) -> None:
        blocks = unit.blocks
        if not self._units.has(unit.index, 0):
            self._units.put(unit.index, 0, turn.farthest)
        elif unit.index in self._stale:
            blocks = [b for b in blocks if self._layout.blocks[b].trained]
        else:
            return
        self._stale.discard(unit.index)
        for b in blocks:
            self.times[b][turn.phase] += 1.0

    def _ahead(self, i: int, now: _Turn) -> None:
        """Weights go up while a unit runs that stays where it is, in the place of what is needed
        later than they are; not before their update."""
        slots, n = self._units, len(self._turns)
        for j in range(i + 1, i + n + 1):
            turn = self._turns[j % n]
            unit = self._layout.units[turn.unit]
            if slots.has(unit.index, 0):
                continue
            idle = (x for x in now.farthest if x[1] != now.unit and slots.there.get(x[1]))
            victim = None if slots.free else next(idle, (0, -1))
            if victim is not None and victim[0] <= j:
                return
            if j >= n and any(self._layout.blocks[b].trained for b in unit.blocks):
                return
            self._acquire(_Turn(turn.unit, turn.phase, turn.last, (victim or (0, -1),)), unit)

    def _run_experts(self, turn: _Turn, ids: Sequence[int], *, again: bool) -> None:
        """``again``: another micro-batch comes behind this one."""
        # Backward runs the layer again, and goes back through it.
        order = [*ids] if turn.phase == FORWARD else [*ids, *reversed(ids)]
        uses: dict[int, list[int]] = {b: [] for b in ids}
        for i, b in enumerate([*order, *ids] if again else order):
            uses[b].append(i)
        for i in range(len(order)):
            self._come_up(turn, uses, ids, i, i, order[i])
            # While it is used others go up ahead, in the place of what is used later than they are.
            for j in range(i + 1, min(len(order), i + EXPERTS_AHEAD + 1)):
                if not self._come_up(turn, uses, ids, i, j, order[j]):
                    break

    def _come_up(
        self, turn: _Turn, uses: Mapping[int, Sequence[int]], ids: Sequence[int], now: int,
        use: int, b: int,
    ) -> bool:  # fmt: skip
        """An expert goes up for its ``use`` of the visit, which is at ``now``; False: no room."""
        share = self._routed.get(b, 1.0)
        if not self._experts.has(turn.unit, b):
            if not self._make_room(turn, uses, now, use):
                return False
            self._experts.put(turn.unit, b, ())
            self.times[b][turn.phase] += share
            if use < len(ids):
                self.risen_first[b][turn.phase] += share
            self._come[b] = share if self._layout.blocks[b].trained else 1.0
        elif turn.phase == FORWARD and use == now:  # in backward it is what forward was routed to
            missing = share * (1.0 - self._come[b])
            self.times[b][FORWARD] += missing
            self.risen_first[b][FORWARD] += missing
            self._come[b] += missing
        return True

    def _make_room(
        self, turn: _Turn, uses: Mapping[int, Sequence[int]], now: int, use: int
    ) -> bool:
        """Drop the expert that is used last: of all that the unit which runs does not ask for any
        more, or else of those that it asks for behind ``use``; not what it uses ``now``."""
        if self._experts.free:
            return True
        there = self._experts.there
        mine = there.get(turn.unit, [])
        later = {b: next((i for i in uses.get(b, ()) if i >= now), -1) for b in mine}
        through = [b for b in mine if later[b] < 0]
        for _, owner in turn.farthest:
            some = through if owner == turn.unit else there.get(owner, [])
            if some:
                gone = some[-1]
                break
        else:
            when, gone = max(((i, b) for b, i in later.items() if i > now), default=(-1, -1))
            owner = turn.unit
            if when <= use:
                return False
        there[owner].remove(gone)
        self._experts.free += 1
        del self._come[gone]
        return True

    def _update(self, unit: TrainUnit) -> None:
        trained = [self._layout.blocks[b].trained for b in unit.blocks]
        if all(trained):
            self._units.drop(unit.index)
        elif any(trained) and self._units.has(unit.index, 0):
            self._stale.add(unit.index)
        fused = [b for ids in unit.experts.values() for b in ids]
        if fused and self._layout.blocks[fused[0]].trained:
            for b in self._experts.drop(unit.index):
                del self._come[b]


__all__ = ["BACKWARD", "FORWARD", "Link", "UnitLink", "Visited", "link_of"]
