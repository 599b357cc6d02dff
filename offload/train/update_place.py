"""Room on a device for tiles of optimizer states that it updates, and how many of them go there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offload.blocks import DTYPE_BYTES, align_up
from offload.train.layout import TrainLayout
from offload.train.tiles import SlotKind

SLOTS = 3
"""Tiles there at a time: one goes up, one is updated or waits for it, one comes down."""

EVERY = (8, 6, 4, 3, 2, 1)
"""Of so many tiles of a block one may go, from the fewest that do to all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlacement:
    """Sizes in bytes."""

    every: int
    """Of so many tiles of a block the first one is updated on the device."""
    slots: int
    """Tiles there at a time."""
    slot_bytes: int
    gradient_bytes: int
    why: str = ""

    @property
    def nbytes(self) -> int:
        """Of the device."""
        return self.slots * (self.slot_bytes + self.gradient_bytes)

    @property
    def host_bytes(self) -> int:
        """Of RAM, from which gradients go up."""
        return self.slots * self.gradient_bytes

    def sent(self, tiles: int) -> range:
        """Of a block of so many tiles, the positions of those that go."""
        return range(0, tiles - self.every + 1, self.every)

    def describe(self) -> str:
        """For the plan's text."""
        which = {1: "all", 2: "every second one", 3: "every third one"}
        return (
            f"tiles of states updated there: {which.get(self.every, f'one in {self.every}')}"
            + f" ({self.why})" * bool(self.why)
        )


def place_updates(
    layout: TrainLayout, kinds: Mapping[str, SlotKind], grad_dtype: str | None, every: int
) -> UpdatePlacement | None:
    """Room for every ``every``-th tile; None: no block has so many.

    ``kinds``: by the dtype of weights. ``grad_dtype``: in which gradients are summed; None: in
    their weights'.
    """
    sizes = [
        (kinds[block.dtype].offsets(tile.count)[-1],
         align_up(tile.count * DTYPE_BYTES[grad_dtype or block.dtype]))
        for block in layout.trained
        if len(block.tiles) >= every
        for tile in (layout.tiles[i] for i in block.tiles)
    ]  # fmt: skip
    if not sizes:
        return None
    slot, gradient = (max(column) for column in zip(*sizes, strict=True))
    return UpdatePlacement(every=every, slots=SLOTS, slot_bytes=slot, gradient_bytes=gradient)


def sent_bytes(
    layout: TrainLayout, kinds: Mapping[str, SlotKind], grad_dtype: str | None,
    place: UpdatePlacement, block: int,
) -> tuple[int, int]:  # fmt: skip
    """(bytes up, bytes down) of a block's update; without its first step, which the CPU takes."""
    spec = layout.blocks[block]
    kind, width = kinds[spec.dtype], DTYPE_BYTES[grad_dtype or spec.dtype]
    up = down = 0
    for position in place.sent(len(spec.tiles)):
        count = layout.tiles[spec.tiles[position]].count
        offsets = kind.offsets(count)
        up += offsets[-1] - offsets[kind.first_state] + width * count
        down += offsets[-1]
    return up, down


def moved_bytes(
    layout: TrainLayout, kinds: Mapping[str, SlotKind], grad_dtype: str | None,
    place: UpdatePlacement | None, updated: Mapping[int, float] = {},
) -> dict[int, tuple[float, float]]:  # fmt: skip
    """Block -> (bytes up, bytes down) of its update in a step. ``updated``: share of the steps that
    update a block, where that is not all of them."""
    if place is None:
        return {}
    out = {}
    for block in layout.trained:
        up, down = sent_bytes(layout, kinds, grad_dtype, place, block.index)
        share = updated.get(block.index, 1.0)
        if up:
            out[block.index] = share * up, share * down
    return out


def sent_share(layout: TrainLayout, place: UpdatePlacement | None, block: int) -> float:
    """Of a block's elements, those that the device updates."""
    spec = layout.blocks[block]
    if place is None or not spec.count:
        return 0.0
    tiles = [layout.tiles[i].count for i in spec.tiles]
    return sum(tiles[i] for i in place.sent(len(tiles))) / sum(tiles)


__all__ = [
    "EVERY", "SLOTS", "UpdatePlacement", "moved_bytes", "place_updates", "sent_bytes", "sent_share",
]  # fmt: skip
