"""Where blocks of keys and values live. Pure: no torch, no I/O.

Decoding reads every block of every layer once per token, in the same order each time. Of such a
lap a least-recently-used cache keeps nothing that comes in time, so a fixed set stays in RAM: as
many blocks of each layer, so that the reads of the others spread over the whole lap and hide behind
computing. The rest streams through a small window of slots in the order of use, read ahead across
layers and into the next token. The newest, partly filled block of each sequence stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from offload.errors import PlanError
from offload.units import format_bytes

T = TypeVar("T")

LEAST_WINDOW = 2
"""Slots to stream through: one is used while the next is read."""

WINDOW_BYTES = 16 * 2**20
"""What the window takes where there is room: enough requests in flight for the disk."""

WINDOW_SLOTS = 16
"""At least so many slots, where there is room: half of them may be attended to at a time, and what
has been read into the others has to outlast what a layer computes besides."""

WINDOW_SHARE = 8
"""The window takes at most one slot in so many, beyond the least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvHomes:
    """Slots of RAM and how they are used; for ``layers`` layers and ``sequences`` sequences.

    Attributes:
        slots: all there are, of ``slot_bytes`` each.
        window: of them for blocks on their way from the disk.
        resident: full blocks that stay in RAM, by layer, of all sequences together.
    """

    slots: int
    slot_bytes: int
    layers: int
    sequences: int
    window: int
    resident: tuple[int, ...]

    @property
    def tails(self) -> int:
        """Slots for the newest block of each layer and sequence."""
        return self.layers * self.sequences

    @property
    def ram_bytes(self) -> int:
        return self.slots * self.slot_bytes

    def at(self, tokens: int, block_tokens: int) -> tuple[int, int]:
        """Blocks in RAM and on disk when each sequence has ``tokens`` tokens."""
        full, tail = divmod(tokens, block_tokens)
        each = full * self.sequences
        kept = sum(min(r, each) for r in self.resident)
        return kept + (self.tails if tail else 0), each * self.layers - kept


def least_slots(layers: int, sequences: int) -> int:
    """Without which nothing can be cached."""
    return layers * sequences + LEAST_WINDOW


def place(
    *,
    slots: int,
    slot_bytes: int,
    layers: int,
    sequences: int,
    written: int | None = None,
    beside: int = 0,
) -> KvHomes:
    """Share ``slots`` out. ``written``: as many are kept for blocks that are written to; None: one
    for each layer and sequence. ``beside``: bytes of the budget that are no slots.

    Raises:
        PlanError: too few; says how many bytes are needed.
    """
    if written is not None:
        if slots < written + LEAST_WINDOW:
            least = (written + LEAST_WINDOW) * slot_bytes + beside
            raise PlanError(
                f"the KV budget holds {max(0, slots)} full block(s) of {format_bytes(slot_bytes)} "
                f"beside the newest ones ({format_bytes(beside)}), and {written} are written and "
                f"{LEAST_WINDOW} read through: raise the KV budget (--kv-ram) to {_flag(least)} or "
                f"more, or use fewer sequences at once"
            )
        return _share_out(slots, slot_bytes, layers, sequences, written)
    least = least_slots(layers, sequences)
    if slots < least:
        raise PlanError(
            f"the KV budget holds {slots} block(s) of {format_bytes(slot_bytes)}; {layers} "
            f"layer(s) of {sequences} sequence(s) write one each and {LEAST_WINDOW} are read "
            f"through: raise the KV budget (--kv-ram) to {_flag(least * slot_bytes)} or more, or "
            f"use fewer sequences at once"
        )
    return _share_out(slots, slot_bytes, layers, sequences, layers * sequences)


def _share_out(slots: int, slot_bytes: int, layers: int, sequences: int, written: int) -> KvHomes:
    spare = slots - written
    window = min(spare, max(LEAST_WINDOW, min(most_window(slot_bytes), slots // WINDOW_SHARE)))
    return KvHomes(
        slots=slots,
        slot_bytes=slot_bytes,
        layers=layers,
        sequences=sequences,
        window=window,
        resident=shares(spare - window, layers),
    )


def most_window(slot_bytes: int) -> int:
    """Slots of the window where there is room for all."""
    return max(WINDOW_BYTES // slot_bytes, WINDOW_SLOTS)


def _flag(nbytes: int) -> str:
    """At least so many bytes as one writes them."""
    if nbytes < 10 * 2**20 and nbytes % 2**20:
        return f"{-(-nbytes // 2**10)}KiB"
    return f"{-(-nbytes // 2**20)}MiB"


def shares(count: int, layers: int) -> tuple[int, ...]:
    """``count`` split as evenly as it goes, more to the first."""
    each, more = divmod(max(0, count), max(1, layers))
    return tuple(each + (i < more) for i in range(layers))


def upcoming(blocks: Callable[[int], Iterable[T]], layers: int, after: int) -> Iterator[T]:
    """What is used behind layer ``after``: the layers after it, then the next token's, once
    round. ``blocks``: of a layer, in the order of use; asked for no earlier than needed."""
    for step in range(1, layers + 1):
        yield from blocks((after + step) % layers)
