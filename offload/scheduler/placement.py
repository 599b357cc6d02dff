"""Ways to divide the tiers among blocks: what is pinned, how long the rings, how many slots.

One rule divides every tier, from the top down. If all that is needed fits, it is pinned. Dense
weights come before experts, because a pass uses each of them and an expert only now and then.
When the dense weights do not fit either, some are pinned and the rest passes a ring, and nothing
short of a simulation tells how long that ring should be: a byte more of it is a byte less pinned
(more to read), a byte less may leave the disk idle while a step computes. So several divisions
come out of here, and the planner compares them.

Which blocks are pinned matters as well. Pinning a *prefix* of the trace is the classic answer to
cyclic reads; but while the pinned prefix computes, the ring is full and the disk idles. Pins
*spread* evenly over the trace leave work for the disk at each step. Both are offered.

Tiers below the top serve the same rule: what they hold is what streams to the tier above, and
their ring must also let pass, one by one, the blocks that are pinned above.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from offload.blocks import ALIGN, Tier, align_up
from offload.scheduler.inventory import Inventory, PlanRequest

SMALL = 64 * 2**10
"""Bytes under which a request costs more for being one than for its length: pinned first."""

FINE = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
COARSE = (0.5, 1.0, 2.0, 3.0)
"""Lengths of rings to try, in largest steps."""


MOST_LARGE = 8
"""Blocks that are pinned for being the largest, at most."""


class NoRoomError(Exception):
    """A tier's room is below ``need`` bytes (without the reserves)."""

    def __init__(self, tier: Tier, need: int) -> None:
        super().__init__(tier, need)
        self.tier = tier
        self.need = need


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How one tier's room is divided."""

    pinned: tuple[str, ...]
    ring: int
    slots: int
    floor: int
    """The smallest ring that these pins allow."""
    roomy: bool
    """Whether the ring holds another step and the wished lookahead beyond its floor; the wish is
    capped by what is streamed and, for small budgets, by a quarter of the room."""
    shape: str
    """How pins were chosen: all, dense, spread, prefix."""


Placement = Mapping[Tier, Share]
Picker = Callable[[Sequence[str], Inventory, int], set[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Demand:
    """What one tier is asked to hold."""

    tier: Tier
    always: list[str]
    dense: list[str]
    experts: list[str]
    floor: Callable[[set[str]], int]  # the smallest ring, given what is pinned


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tries:
    """What to try where a ring is needed."""

    lengths: tuple[float, ...]  # of the ring, in largest steps
    picks: tuple[Picker, ...]
    lookahead: int  # bytes


def placements(request: PlanRequest, inv: Inventory, *, by_rule: bool = False) -> list[Placement]:
    """Divisions worth comparing; one where the answer is clear.

    Args:
        by_rule: few candidates, for when nothing will be simulated.

    Raises:
        NoRoomError: none exists.
    """
    top = request.compute_tier
    room = {t: request.budgets[t] - request.reserved(t) for t in request.memory_tiers}
    room = {t: n // ALIGN * ALIGN for t, n in room.items()}  # all that is placed is whole pages
    deep = len(request.memory_tiers) > 1
    tries = _Tries(
        lengths=COARSE if deep or by_rule else FINE,
        # Two tiers with a choice each: the lesser one is not worth the square of the candidates.
        picks=(pin_spread,) if deep or by_rule else (pin_spread, pin_prefix),
        lookahead=align_up(request.min_lookahead_bytes),
    )
    uppers = _divide(_top_demand(inv, top), inv, room[top], tries)
    if not deep:
        return [{top: _add_rows(u, inv, room[top])} for u in uppers]
    found: list[Placement] = []
    errors: list[NoRoomError] = []
    for upper in uppers:
        # A looked-up table is pinned on the device only if its way through RAM costs nothing.
        with_rows = _add_rows(upper, inv, room[top])
        for choice in (with_rows, upper) if with_rows != upper else (upper,):
            try:
                lowers = _divide(_lower_demand(inv, choice), inv, room[Tier.RAM], tries)
            except NoRoomError as e:
                errors.append(e)
                continue
            found += [{Tier.RAM: lower, top: choice} for lower in lowers]
            if lowers[0].shape == "all":
                break
    if not found:
        raise min(errors, key=lambda e: e.need)
    return found


def least_bytes(request: PlanRequest, inv: Inventory) -> dict[Tier, int]:
    """The smallest room, without reserves, that lets a placement exist when every tier is as
    small as that."""
    top = request.compute_tier
    demand = _top_demand(inv, top)
    least = {top: _least(demand, inv)}
    if top != Tier.RAM:
        tries = _Tries(lengths=(), picks=(pin_spread,), lookahead=0)
        upper = _divide(demand, inv, least[top], tries)[0]
        least[Tier.RAM] = _least(_lower_demand(inv, upper), inv)
    return {t: least[t] for t in request.memory_tiers}


def _top_demand(inv: Inventory, top: Tier) -> _Demand:
    return _Demand(
        tier=top, always=inv.always, dense=inv.streamable, experts=inv.experts, floor=inv.floor
    )


def _lower_demand(inv: Inventory, upper: Share) -> _Demand:
    above = set(upper.pinned)
    dense = [b for b in inv.streamable if b not in above]
    passing = inv.largest(list(upper.pinned))

    def floor(pinned: set[str]) -> int:
        # Blocks go up one by one: the largest one has to fit, not a whole step.
        return max(passing, inv.largest([b for b in dense if b not in pinned]))

    experts = inv.experts if upper.slots else []
    return _Demand(tier=Tier.RAM, always=[], dense=dense, experts=experts, floor=floor)


def _least(demand: _Demand, inv: Inventory) -> int:
    streaming = inv.bytes(demand.always) + demand.floor(set())
    streaming += _expert_bytes(demand, inv, inv.least_slots)
    return min(streaming, _all_bytes(demand, inv))


def _all_bytes(demand: _Demand, inv: Inventory) -> int:
    blocks = [*demand.always, *demand.dense, *demand.experts]
    return inv.bytes(blocks) + demand.floor(set(blocks))


def _expert_bytes(demand: _Demand, inv: Inventory, slots: int) -> int:
    """Room for ``slots`` slots, or for all experts side by side where that is less."""
    return min(slots * inv.slot_bytes, inv.bytes(demand.experts))


def _divide(demand: _Demand, inv: Inventory, room: int, tries: _Tries) -> list[Share]:
    """Divisions of ``room`` bytes. Raises NoRoomError."""
    always, dense, experts = demand.always, demand.dense, demand.experts
    if _all_bytes(demand, inv) <= room:
        return [_resident(demand, inv, room, tries.lookahead, cached=False)]
    if _least(demand, inv) > room:
        raise NoRoomError(demand.tier, _least(demand, inv))
    slots = inv.least_slots
    held = inv.bytes([*always, *dense]) + demand.floor({*always, *dense})
    if experts and held + _expert_bytes(demand, inv, slots) <= room:
        return [_resident(demand, inv, room, tries.lookahead, cached=True)]

    # Twice one token's experts lets a prefill load the next ones while these compute.
    more = min(max(slots, 2 * inv.top_k), len(experts))
    extra = _expert_bytes(demand, inv, more) - _expert_bytes(demand, inv, slots)
    if extra * 20 <= room and _least(demand, inv) + extra <= room:
        slots = more
    expert_bytes = _expert_bytes(demand, inv, slots)
    if expert_bytes == inv.bytes(experts):
        always, slots = [*always, *experts], 0
        expert_bytes = 0
    room -= inv.bytes(always) + expert_bytes
    shares: dict[tuple[str, ...], Share] = {}
    for ring, first in _rings(demand, inv, room, tries):
        rest = [b for b in dense if b not in first]
        for pick in tries.picks:
            pinned = first | pick(rest, inv, room - ring - inv.bytes(list(first)))
            floor = demand.floor(pinned)
            if floor > ring:
                continue
            left = room - inv.bytes(list(pinned))
            more_slots = (left - ring) // inv.slot_bytes if slots else 0
            left -= more_slots * inv.slot_bytes
            streamed = sum(inv.size[b] for b in dense if b not in pinned)
            share = Share(
                pinned=(*always, *(b for b in dense if b in pinned)),
                ring=left,
                slots=slots + more_slots,
                floor=floor,
                roomy=left - floor >= max(floor, min(tries.lookahead, streamed, room // 4)),
                shape="spread" if pick is pin_spread else "prefix",
            )
            shares.setdefault(share.pinned, share)
    return list(shares.values())


def _resident(demand: _Demand, inv: Inventory, room: int, lookahead: int, *, cached: bool) -> Share:
    """All dense blocks pinned; experts too, or in as many slots as there is room for."""
    pinned = [*demand.always, *demand.dense, *([] if cached else demand.experts)]
    floor = demand.floor(set(pinned))
    left = room - inv.bytes(pinned) - floor
    slots = left // inv.slot_bytes if cached else 0
    left -= slots * inv.slot_bytes
    return Share(
        pinned=tuple(pinned),
        # Only for blocks on their way up: a little more lets disk and copies overlap at loading.
        ring=floor + min(left, lookahead) if floor else 0,
        slots=slots,
        floor=floor,
        roomy=True,
        shape="dense" if cached else "all",
    )


def _add_rows(share: Share, inv: Inventory, room: int) -> Share:
    """Pin looked-up tables in what is left."""
    left = room - inv.bytes(list(share.pinned)) - share.ring - share.slots * inv.slot_bytes
    pinned = list(share.pinned)
    for block in inv.by_row:
        if inv.size[block] <= left:
            left -= inv.size[block]
            pinned.append(block)
    if len(pinned) == len(share.pinned):
        return share
    return replace(share, pinned=tuple(pinned))


def _ring_lengths(
    demand: _Demand, inv: Inventory, room: int, tries: _Tries, apart: Collection[str]
) -> list[int]:
    """Lengths to try, in bytes. The floor, which holds any step, is always one of them; shorter
    ones work when the pins leave less of the largest step to stream. All of the room is one too:
    with few and large blocks a pin can cost more overlap than it saves reading."""
    floor, largest = demand.floor(set()), inv.largest(demand.dense)
    lengths = {floor, floor + largest, 2 * floor + largest, floor + tries.lookahead, room}
    lengths |= {align_up(int(floor * m)) for m in tries.lengths}
    if apart:
        rest = demand.floor(set(apart))
        lengths |= {2 * rest, 3 * rest, rest + min(tries.lookahead, align_up(room // 4))}
    return sorted(n for n in lengths if 0 < n <= room)


def _rings(
    demand: _Demand, inv: Inventory, room: int, tries: _Tries
) -> Iterator[tuple[int, set[str]]]:
    """Lengths to try, and what is pinned first with each: nothing; or the largest blocks, until
    the largest step fits, or steps out of proportion (a head with a large vocabulary) are gone.
    What such a step streams takes a ring of its own length, empty for most of the pass."""
    apart = _out_of_proportion(demand, inv)
    for ring in _ring_lengths(demand, inv, room, tries, apart):
        yield ring, set()
        first = set(apart)
        for block in _largest(demand, inv):
            if demand.floor(first) <= ring:
                break
            first.add(block)
        fits = ring + inv.bytes(list(first)) <= room
        if first and fits and demand.floor(first) <= ring:
            yield ring, first


def _out_of_proportion(demand: _Demand, inv: Inventory) -> set[str]:
    """The largest blocks, if without them the largest step is half as long."""
    first: set[str] = set()
    for block in _largest(demand, inv):
        first.add(block)
        if 2 * demand.floor(first) <= demand.floor(set()):
            return first
    return set()


def _largest(demand: _Demand, inv: Inventory) -> list[str]:
    return sorted(demand.dense, key=lambda b: -inv.size[b])[:MOST_LARGE]


def pin_spread(order: Sequence[str], inv: Inventory, room: int) -> set[str]:
    """Blocks of ``order`` that fit ``room``, evenly over it: Bresenham's error diffusion, in
    bytes."""

    def choose(blocks: list[str], left: int) -> set[str]:
        share = left / inv.bytes(blocks)
        pinned: set[str] = set()
        debt = 0.0
        for block in blocks:
            n = inv.size[block]
            debt += share * n
            if debt >= n / 2 and n <= left:
                pinned.add(block)
                debt -= n
                left -= n
        return pinned

    return _pin(order, inv, room, choose)


def pin_prefix(order: Sequence[str], inv: Inventory, room: int) -> set[str]:
    """Blocks of ``order`` that fit ``room``, from its start."""

    def choose(blocks: list[str], left: int) -> set[str]:
        pinned: set[str] = set()
        for block in blocks:
            if inv.size[block] > left:
                break
            pinned.add(block)
            left -= inv.size[block]
        return pinned

    return _pin(order, inv, room, choose)


def _pin(
    order: Sequence[str],
    inv: Inventory,
    room: int,
    choose: Callable[[list[str], int], set[str]],
) -> set[str]:
    """Whole classes by value per byte while they fit, then ``choose`` inside the first class
    that does not, then whatever still fits, largest first."""
    pinned: set[str] = set()
    for blocks in _by_value(order, inv):
        total = inv.bytes(blocks)
        chosen = set(blocks) if total <= room else choose(blocks, room)
        pinned |= chosen
        room -= inv.bytes(list(chosen))
        if total > inv.bytes(list(chosen)):
            break
    for block in sorted((b for b in order if b not in pinned), key=lambda b: -inv.size[b]):
        if inv.size[block] <= room:
            pinned.add(block)
            room -= inv.size[block]
    return pinned


def _by_value(order: Sequence[str], inv: Inventory) -> list[list[str]]:
    """Classes of blocks, the most valuable per byte first: more uses in a pass, then small ones
    (a request costs more than its bytes), then the rest; each in the order of ``order``."""
    classes: dict[tuple[int, bool], list[str]] = {}
    for block in order:
        key = (-inv.uses.get(block, 0), inv.size[block] > SMALL)
        classes.setdefault(key, []).append(block)
    return [classes[k] for k in sorted(classes)]
