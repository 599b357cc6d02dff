"""The device's tier of a training plan: which units run there, and what that takes.

Pure: numbers in, numbers out. Layers run on the device, and the head with the loss if that fits and
pays (``head_place``). Between them everything is in RAM: their inputs and outputs, embeddings, what
is outside of layers, gradients, states.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from offload.blocks import ALIGN, DTYPE_BYTES, align_up
from offload.errors import OffloadError, PlanError
from offload.train.head_place import HeadPlacement
from offload.train.layout import TrainLayout
from offload.train.update_place import UpdatePlacement
from offload.units import format_bytes

FALLING_SHARE = 16
"""Of a device's budget, and of RAM, what gradients on their way down may take."""

TENSORS = 64
"""Arguments of a unit at most, each of which starts at a page of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlacement:
    """What the device holds. Sizes in bytes."""

    budget: int
    units: frozenset[int]
    """That run there."""
    slots: int
    """Units whose weights are there at a time."""
    slot_bytes: int
    adapter_bytes: int = 0
    """Of a slot, those of adapters, which come again after each step while the rest stays."""
    expert_slots: int = 0
    """Fused experts that are there at a time."""
    expert_bytes: int = 0
    unpacked_bytes: int = 0
    """Of a unit's packed weights in the dtype that computes, while it runs; slots hold them
    packed."""
    unpacked_expert_bytes: int = 0
    """Of a packed fused expert."""
    up_bytes: int
    """A unit's arguments, and the gradients of what it returns."""
    down_bytes: int
    """What a unit returns, or the gradients of its arguments."""
    turn_bytes: int = 0
    """More for results: of other micro-batches that wait for their turn at the next unit."""
    same_bytes: int = 0
    """Of arguments that all units get alike, which go up once."""
    result_bytes: int = 0
    """Of what a unit returns, or of the gradients of its arguments, each at a page's beginning."""
    turns: int = 1
    """Micro-batches that run in turns, unit by unit."""
    gradients: int = 1
    """Gradients of weights, of the largest's size, that there is room for on their way down."""
    gradient_bytes: int
    """The largest one."""
    work_bytes: int
    """Of activations while a unit runs forward and backward, or of the loss."""
    kernel_bytes: int = 0
    """That a card's kernels take besides."""
    head: HeadPlacement | None = None
    """The head and the loss, if they are computed there."""
    head_why: str = ""
    """Why they are, or are not."""
    updates: UpdatePlacement | None = None
    """Tiles of optimizer states that are updated there; None: all in RAM."""

    def hands_over(self) -> bool:
        """Whether a unit finds there what the one before has returned: nothing else has taken its
        place, for as long as other micro-batches had their turns."""
        return self.down_bytes + self.turn_bytes >= _turns(self.turns) * self.result_bytes

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of the device by what they are for."""
        found = {
            "weights": self.slots * self.slot_bytes,
            "experts": self.expert_slots * self.expert_bytes,
            "unpacked weights": self.unpacked_bytes + self.unpacked_expert_bytes,
            "head": 0 if self.head is None else self.head.nbytes,
            "activations of a unit": self.work_bytes,
            "matrix workspace": self.kernel_bytes,
            "arguments and results": self.up_bytes
            + self.down_bytes
            + self.turn_bytes
            + self.same_bytes,
            "gradients on their way": self.gradients * self.gradient_bytes,
            "tiles to update": 0 if self.updates is None else self.updates.nbytes,
        }
        return {name: nbytes for name, nbytes in found.items() if nbytes}

    @property
    def nbytes(self) -> int:
        """Of all of it."""
        return sum(self.parts.values())

    @property
    def arena_bytes(self) -> int:
        """What is set aside at once; the rest is torch's while a unit runs."""
        return self.nbytes - self.work_bytes - self.kernel_bytes

    @property
    def host_bytes(self) -> int:
        """Of RAM, from which and to which copies are made. Weights are copied from where they
        are."""
        updates = 0 if self.updates is None else self.updates.host_bytes
        return self.up_bytes + self.down_bytes + self.gradients * self.gradient_bytes + updates

    def describe(self) -> str:
        """For the plan's text."""
        parts = ", ".join(
            f"{format_bytes(n)} {k}" for k, n in sorted(self.parts.items(), key=lambda i: -i[1])
        )
        count = len(self.units)
        held = "all of them" if self.slots == count else f"{self.slots} of them at a time"
        again = (
            f" ({format_bytes(self.adapter_bytes)} of a layer are adapters, which alone are copied "
            f"again after a step)"
        ) * bool(self.adapter_bytes)
        packed = ", packed and unpacked there as it runs" * bool(
            self.unpacked_bytes + self.unpacked_expert_bytes
        )
        return (
            f"{format_bytes(self.nbytes)} of {format_bytes(self.budget)}: {parts}; {count} layers "
            f"run there, the weights of {held}{packed}{again}; {self._head_text()}{self._updates()}"
        )

    def _updates(self) -> str:
        return "" if self.updates is None else f"; {self.updates.describe()}"

    def _head_text(self) -> str:
        why = f" ({self.head_why})" * bool(self.head_why)
        if self.head is None:
            return f"embeddings, head, loss and updates in RAM{why}"
        n, k = len(self.head.slices), self.head.slots
        some = "all" if k == n else f"{k}"
        return (
            f"head and loss there{why}, {some} of {n} slices at a time; embeddings and updates in "
            f"RAM"
        )


def device_units(layout: TrainLayout, tables: Collection[str] = ()) -> frozenset[int]:
    """The units that can run on a device: layers whose weights nothing else uses.

    ``tables``: parameters whose gradients leave by rows: their units stay.

    Raises:
        OffloadError: there is none.
    """
    rest = {p.param for b in layout.rest for p in layout.blocks[b].pieces}
    found = set()
    for unit in layout.units:
        inside = set(map(id, unit.module.modules()))
        mine = {p.param for b in unit.blocks for p in layout.blocks[b].pieces}
        outside = any(
            id(place.module) in inside for name in rest for place in layout.params[name].places
        )
        layer = any(True for _ in unit.module.children())
        if layer and unit.blocks and not outside and mine.isdisjoint(tables):
            found.add(unit.index)
    while True:
        shared = {
            u
            for u in found
            for b in layout.units[u].blocks
            if not found.issuperset(layout.users[b])
        }
        if not shared:
            break
        found -= shared
    if not found:
        raise OffloadError(
            "none of the model's layers can run on a device: their weights are used elsewhere, "
            "too; drop --gpu: the CPU computes"
        )
    return frozenset(found)


def visit_bytes(largest: int, shared: int) -> tuple[int, int]:
    """(bytes of a unit's arguments and of its results' gradients, bytes of its results).

    ``largest``: bytes of a unit's input. ``shared``: of what all units get alike.
    """
    most = align_up(largest)
    return 2 * most + align_up(shared) + TENSORS * ALIGN, 2 * most + TENSORS * ALIGN


def _turns(micro_batches: int) -> int:
    """Results for which there is room so that each is there when its turn comes: one is being made,
    and at the end of the memory some may be lost."""
    return 1 if micro_batches == 1 else micro_batches + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """What units hand to each other, to stay on the device."""

    result: int = 0
    """Bytes of what a unit returns, at most, each tensor at a page's beginning."""
    same: int = 0
    """Of what all units get alike in a micro-batch, likewise."""
    turns: int = 1
    """Micro-batches that run in turns."""


def plan_device(
    layout: TrainLayout, budget: int, units: frozenset[int], *, up: int, down: int, work: int,
    head: HeadPlacement | None = None, kernels: int = 0, hand_over: HandOver = HandOver(),
    updates: UpdatePlacement | None = None, falling: int | None = None,
) -> DevicePlacement:  # fmt: skip
    """Place what fits under ``budget`` bytes: at least one unit's weights.

    ``up``, ``down``: of ``visit_bytes``. ``hand_over``: there, where there is room
    for it beside two of everything. ``work``: of activations while a unit runs. ``head``:
    computed there, too; as many of its slots as there is room for beside layers. ``kernels``: what
    torch's kernels take besides, whatever runs. ``updates``: tiles that are updated there.
    ``falling``: most bytes of RAM for gradients on their way; None: what a device has for them.

    Raises:
        PlanError: it does not fit; says by how much.
    """
    blocks = layout.blocks
    mine = [layout.units[u] for u in sorted(units)]
    slot = max(sum(align_up(blocks[b].nbytes) for b in u.blocks) for u in mine)
    adapters = max(
        (
            sum(align_up(blocks[b].nbytes) for b in u.blocks if blocks[b].trained)
            for u in mine
            if not all(blocks[b].trained for b in u.blocks)
        ),
        default=0,
    )
    experts = [b for u in mine for ids in u.experts.values() for b in ids]
    expert = max((align_up(blocks[b].nbytes) for b in experts), default=0)

    def unpacked(ids: Iterable[int]) -> int:
        return sum(align_up(blocks[b].value_bytes) for b in ids if blocks[b].packed is not None)

    values = max(unpacked(u.blocks) for u in mine)
    expert_values = max((unpacked([b]) for b in experts), default=0)
    gradient = max(
        (
            align_up(piece.count * DTYPE_BYTES[blocks[b].dtype])
            for u in mine
            for b in (*u.blocks, *(e for ids in u.experts.values() for e in ids))
            if blocks[b].trained
            for piece in blocks[b].pieces
        ),
        default=0,
    )
    if head is not None:
        head = replace(head, slots=head.least_slots)
        gradient = max(gradient, *(align_up(n) for n in head.gradients), 0)
        # Each of two tensors begins at a page.
        up = max(up, align_up(head.arguments) + ALIGN)
        down = max(down, align_up(head.results) + ALIGN)
        work = max(work, head.work_bytes)

    def placed(
        slots: int, expert_slots: int, gradients: int, turn: int = 0, same: int = 0
    ) -> DevicePlacement:
        return DevicePlacement(
            budget=budget, units=units, slots=slots, slot_bytes=slot, adapter_bytes=adapters,
            expert_slots=expert_slots, expert_bytes=expert, unpacked_bytes=values,
            unpacked_expert_bytes=expert_values, up_bytes=up, down_bytes=down,
            turn_bytes=turn, same_bytes=same, result_bytes=hand_over.result, turns=hand_over.turns,
            gradients=gradients, gradient_bytes=gradient, work_bytes=work, head=head,
            kernel_bytes=kernels, updates=updates,
        )  # fmt: skip

    best = least = placed(1, min(1, len(experts)), 1)
    if least.nbytes > budget:
        names = ", ".join(
            f"{format_bytes(n)} {k}" for k, n in sorted(least.parts.items(), key=lambda i: -i[1])
        )
        raise PlanError(
            f"--gpu {format_bytes(budget)} is too small by {format_bytes(least.nbytes - budget)}: "
            f"a step needs {format_bytes(least.nbytes)} of the device ({names}); raise it to "
            f"{-(-least.nbytes // 2**20)}MiB, lower --seq-len or --batch-size, or drop --gpu"
        )
    # Two of each before more of any: one is used, one on its way.
    for slots, expert_slots, gradients in ((1, 1, 2), (1, 2, 2), (2, 2, 2)):
        more = placed(min(slots, len(mine)), min(expert_slots, len(experts)), gradients)
        if more.nbytes <= budget:
            best = more
    same = hand_over.same * (hand_over.turns + 1)  # the last ones are not gone yet
    turn = max(0, _turns(hand_over.turns) * hand_over.result - down)
    for more in (replace(best, same_bytes=same), replace(best, same_bytes=same, turn_bytes=turn)):
        if more.nbytes <= budget:
            best = more
    # Of two units, so that the host can queue one's backward while the device is at the other.
    trained = max(
        sum(
            align_up(piece.count * DTYPE_BYTES[blocks[b].dtype])
            for b in u.blocks
            if blocks[b].trained
            for piece in blocks[b].pieces
        )
        for u in mine
    )
    most = min(2 * trained, budget // FALLING_SHARE, budget - best.nbytes)
    most = most if falling is None else min(most, falling)
    if gradient and most // gradient > best.gradients:
        best = replace(best, gradients=most // gradient)
    left = budget - best.nbytes
    slots = min(len(mine), best.slots + left // slot)
    left -= (slots - best.slots) * slot
    expert_slots = best.expert_slots
    if expert:
        more_experts = min(len(experts) - expert_slots, left // expert)
        expert_slots += more_experts
        left -= more_experts * expert
    if head is not None:
        more_slices = min(len(head.slices) - head.slots, left // head.slot_bytes)
        head = replace(head, slots=head.slots + more_slices)
    return placed(slots, expert_slots, best.gradients, best.turn_bytes, best.same_bytes)


__all__ = ["DevicePlacement", "HandOver", "device_units", "plan_device", "visit_bytes"]
