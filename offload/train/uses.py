"""What is needed next of all blocks: by the order of units, and of experts as they are asked for.

Not thread-safe: whoever asks holds the engine's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from offload.train.layout import TrainLayout
from offload.train.order import NEVER, Agenda, UseOrder


class Uses:
    """Of each block, how far away its next use is; of what is needed soon, the order."""

    def __init__(self, layout: TrainLayout, order: UseOrder) -> None:
        self.layout = layout
        self.order = order
        self.agenda = Agenda()
        """Blocks that the unit which runs asks for one by one."""
        self._experts_too = self._every_expert = False
        self._routed = False
        """What is expected has been routed to, and not only guessed."""

    def enter(self, unit: int, *, backward: bool) -> None:
        """``unit`` runs now. Where experts are read before they are routed to, all of its are
        expected."""
        self.order.enter(unit)
        if self._experts_too:
            self._routed = False
            mine = [b for ids in self.layout.units[unit].experts.values() for b in ids]
            self.agenda.put_first([*mine, *mine[::-1]] if backward else mine, mine)

    def expect(self, blocks: Sequence[int], instead: Collection[int] = ()) -> None:
        """The unit that runs asks for these from now on, as it has routed to them, ``instead`` of
        what it is not expected to ask for any more."""
        self.agenda.put_first(blocks, instead)
        self._routed = True

    def experts_soon(
        self, count: int, there: Callable[[int], bool] = lambda block: False
    ) -> Iterator[tuple[int, int]]:
        """(block, how far away) of the next ``count`` experts, in order: those that the unit which
        runs will ask for, then the next units' where all are routed to. Those ``there`` are
        counted, and left out: every use of an expert asks, and nearly all are."""
        if not (self._routed or self._every_expert):
            return
        left = count
        for block in self.agenda.soon(count):
            left -= 1
            if not there(block) and (distance := self.agenda.distance(block)) is not None:
                yield block, distance
        if not self._every_expert:
            return
        for distance, unit in self.order.upcoming():
            if distance >= 2 or left <= 0:
                return
            for ids in self.layout.units[unit].experts.values():
                for block in ids[:left]:
                    if not there(block):
                        yield block, distance
                left -= len(ids)

    def upcoming(self, ahead: int) -> Iterator[tuple[int, int]]:
        """(block, how far away) of what is needed next, in order; ``ahead``: blocks that are read
        ahead at once."""
        for i, block in enumerate(self.agenda.rest()):
            distance = self.agenda.distance(block)
            if distance is not None:
                # What the unit will need later does not leave for what it needs only somewhat
                # earlier: soon there is room of what it has used.
                yield block, distance if i < ahead else -1
        for distance, unit in self.order.upcoming():
            for block in self.layout.units[unit].blocks:
                yield block, distance
            if self._experts_too and distance < 2:
                for ids in self.layout.units[unit].experts.values():
                    for block in ids:
                        yield block, distance

    def expect_experts(self, routed: int, count: int) -> None:
        """A unit has routed to ``routed`` of its ``count`` experts: from half of them on all are
        worth reading before they are routed to, and if that were all, copying to a device."""
        self._experts_too = 2 * routed >= count
        self._every_expert = routed == count

    def next_use(self, block: int, default: int = NEVER) -> int:
        """How far away the block's next use is."""
        soon = self.agenda.distance(block)
        if soon is not None:
            return soon
        return min((self.order.distance(u) for u in self.layout.users[block]), default=default)

    def farthest(self, blocks: Iterable[int]) -> tuple[int, int] | None:
        """(how far away, block) of what is needed last of these, as the greatest ``next_use`` and
        then block says; None: of none. Asked for every copy up, of all experts on a device."""
        agenda, order, users = self.agenda, self.order, self.layout.users
        units: dict[int, int] = {}
        found: tuple[int, int] | None = None
        for block in blocks:
            when = agenda.distance(block)
            if when is None:
                when = NEVER
                for unit in users[block]:
                    if unit not in units:  # its experts are many
                        units[unit] = order.distance(unit)
                    when = min(when, units[unit])
            if found is None or (when, block) > found:
                found = when, block
        return found


__all__ = ["Uses"]
