"""What a step reads of the weights that do not stay in RAM, unit by unit.

Pure: numbers in, numbers out. Dense weights are read once in forward and once in backward. Routed
experts come one by one, in ascending order when a layer computes and in descending order when
gradients go back through it: in backward, which runs the layer again first, each of them comes
twice, and what memory holds at the turn between the two is not read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from offload.train.layout import TrainLayout
from offload.train.opening import Placement

Copies = Mapping[int, tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Which experts a micro-batch reaches, of those that run where the weights in RAM are used."""

    shares: Mapping[int, float] = field(default_factory=dict)
    """Block of an expert -> how likely one micro-batch reaches it."""
    micro_batches: int = 1
    """Of a step: each comes to its experts by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitReads:
    """Bytes of each unit in a step; a block that several share is the first one's, and what no
    unit has is the first unit's."""

    forward: list[float]
    backward: list[float]
    experts: list[float]
    """Of these, what of its experts one run through the unit may have to read: they come one by
    one, so that computing need not wait for all of them."""

    def sums(self) -> tuple[float, float]:
        return sum(self.forward), sum(self.backward)


def unit_reads(
    layout: TrainLayout, place: Placement, routing: Routing, copies: Copies, *,
    clipping: bool, backwards: int,
) -> UnitReads:  # fmt: skip
    """``copies``: as of ``plan.Needs``; ``backwards``: times that dense weights move forward and
    backward in a step."""
    ring = ring_bytes(layout, place)
    n = len(layout.units)
    forward, backward, reached = [0.0] * n, [0.0] * n, [0.0] * n
    dense, largest, fresh = [0] * n, [0] * n, [0.0] * n
    for block in layout.blocks:
        b = block.index
        if b in place.pinned:
            continue
        u = min(layout.users[b], default=0)
        share = None if b in copies else routing.shares.get(b)
        left_behind = clipping and block.trained
        if share is None:
            there, back = copies.get(b, (float(backwards), float(backwards)))
            forward[u] += round(max(0.0, there - left_behind) * block.nbytes)
            backward[u] += round(back * block.nbytes)
            dense[u] += block.nbytes
            continue
        reached[u] += share * block.nbytes
        largest[u] = max(largest[u], block.nbytes)
        if left_behind:
            fresh[u] += share * block.nbytes
    for u, each in enumerate(reached):
        runs = routing.micro_batches
        fits = dense[u] + each <= ring
        stays = each if fits else max(0, ring - dense[u] - largest[u])
        forward[u] += max(0.0, runs * each - (runs - 1) * stays - fresh[u])
        backward[u] += 2 * runs * each - (2 * runs - 1) * stays
    # Around both turns of a step the ring has what comes next: experts in the order of their use.
    turned = ring if any(reached) else backwards * ring // 2
    _drop(forward, range(n), turned)
    _drop(backward, reversed(range(n)), turned)
    return UnitReads(forward=forward, backward=backward, experts=reached)


def ring_bytes(layout: TrainLayout, place: Placement) -> int:
    """Of RAM, for weights that come and go."""
    return place.weights_bytes - sum(layout.blocks[b].nbytes for b in place.pinned)


def _drop(amounts: list[float], order: Iterable[int], nbytes: float) -> None:
    """Take ``nbytes`` off what comes first."""
    for u in order:
        taken = min(amounts[u], nbytes)
        amounts[u] -= taken
        nbytes -= taken


__all__ = ["Copies", "Routing", "UnitReads", "ring_bytes", "unit_reads"]
