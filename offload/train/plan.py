"""What a plan of training says: a placement, the bytes it takes, and the traffic of a step.

Pure: numbers in, numbers out. ``placing`` makes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from offload.blocks import DTYPE_BYTES
from offload.runtime.heap import LARGE_BYTES
from offload.train.layout import TrainLayout
from offload.train.opening import Placement
from offload.train.reading import Routing, unit_reads
from offload.train.tiles import SlotKind

SLACK_SHARE = 32
"""Of the budget, kept free for what no one counts (at least ``LEAST_SLACK``)."""
LEAST_SLACK, MOST_SLACK = 24 << 20, 256 << 20
WORKING = "activations of a unit"
LOSS = "loss"
LEAVING = "gradients of a unit, to be spilled"
FREED = "freed blocks for the next unit"
"""The name of ``Placement.freed_bytes`` in a plan."""
FREED_SHARE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a run needs in RAM whatever is placed where, in bytes by name."""

    fixed: Mapping[str, int]
    kinds: Mapping[str, SlotKind]
    """Slots by the dtype of weights."""
    grad_dtype: str | None
    """In which gradients are summed; None: in their weights'."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """Parameters whose gradients are kept by rows, and in RAM -> bytes of them at most."""
    sliced: frozenset[str] = frozenset()
    """Parameters whose gradients leave by slices where they are spilled."""
    fetched_bytes: int = 0
    """Of fused experts that a unit needs beside its own weights: two at a time."""
    updated: Mapping[int, float] = field(default_factory=dict)
    """Block -> share of the steps that update it, where that is not all of them."""
    routing: Routing = field(default_factory=Routing)
    """Which experts are read."""
    copies: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """Block -> times that it goes to a device in a step's forward and backward, if its unit runs
    there: RAM needs it for that only (``link.Link.copies``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlan:
    """A placement, and what it means."""

    budget: int
    placement: Placement
    ram: Mapping[str, int]
    """Bytes of RAM by what they are for."""
    disk_bytes: int
    """Of states on the disk, retained commits included."""
    spill_bytes: int
    phases: Mapping[str, tuple[int, int]]
    """Phase -> bytes read from and written to the disk in a step, by the homes of blocks."""
    versions: int = 1
    """How often states are on the disk: what changes, and what commits keep meanwhile."""
    inputs_bytes: int = 0
    """Of the file that inputs kept for backward are spilled to."""
    inputs_moved: int = 0
    """Of inputs that a step writes there, and reads again."""
    inputs_text: str = ""
    """What became of them, and why."""
    link: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Phase -> bytes copied to the device and back in a step; empty: there is none."""
    notes: tuple[str, ...] = field(default=())

    @property
    def read_bytes(self) -> int:
        """From the disk, each step."""
        return sum(read for read, _ in self.phases.values())

    @property
    def written_bytes(self) -> int:
        return sum(written for _, written in self.phases.values())

    @property
    def up_bytes(self) -> int:
        """To the device, each step."""
        return sum(up for up, _ in self.link.values())

    @property
    def down_bytes(self) -> int:
        return sum(down for _, down in self.link.values())

    @property
    def ram_bytes(self) -> int:
        return sum(self.ram.values())

    @property
    def limit(self) -> int:
        """Of the budget, what the run knows how to spend."""
        return self.budget - self.ram["slack"]

    @property
    def ahead(self) -> int:
        """What a unit that computes in RAM takes at most beside what is there before it."""
        if self.placement.device is not None:
            return 0
        return sum(self.ram.get(name, 0) for name in (WORKING, LOSS, LEAVING))


def slack_bytes(budget: int) -> int:
    """What is kept free of a budget."""
    return min(MOST_SLACK, max(LEAST_SLACK, budget // SLACK_SHARE))


def freed_bytes(working: int, loss: int) -> int:
    """Bytes of freed blocks that are worth keeping from unit to unit, where activations of one take
    ``working`` and the loss ``loss``: as much again as the larger. A unit finds few of its blocks
    again at worst (a layer of 2,048 tokens peaked at 1.2 to 1.6 times what was in use). 0: there
    are none that would leave."""
    most = max(working, loss)
    return most if most > LARGE_BYTES else 0


def affordable(freed: int, budget: int) -> bool:
    """Whether to keep ``freed`` bytes of freed blocks where nobody has rates: an eighth or less of
    the budget, whose reading again takes less than the page faults do."""
    return FREED_SHARE * freed <= budget


def slot_bytes(layout: TrainLayout, needs: Needs, block: int) -> int:
    """Bytes of the slots of a block's tiles."""
    spec = layout.blocks[block]
    kind = needs.kinds[spec.dtype]
    return sum(kind.offsets(layout.tiles[t].count)[-1] for t in spec.tiles)


def grad_bytes(layout: TrainLayout, needs: Needs, block: int) -> int:
    spec = layout.blocks[block]
    size = DTYPE_BYTES[needs.grad_dtype or spec.dtype]
    return sum(needs.rows.get(p.param, p.count * size) for p in spec.pieces)


ORDERS = ("weights", "states")
"""What is given RAM first: see ``placing.make_plan``."""


def traffic(
    layout: TrainLayout, needs: Needs, placement: Placement, *, clipping: bool, backwards: int
) -> dict[str, tuple[int, int]]:
    """Phase -> (bytes read, bytes written) of the disk in a step.

    Deferred updates run under forward and leave behind what it computes with; without clipping
    updates run inside backward, and forward reads its weights.
    """
    states_read = states_written = spilled = 0.0
    for block in layout.blocks:
        b = block.index
        if not block.trained:
            continue
        copy = block.nbytes if needs.kinds[block.dtype].first_state else 0
        share = needs.updated.get(b, 1.0)
        if b not in placement.resident:
            states = slot_bytes(layout, needs, b)
            states_read += share * (states - copy)
            states_written += share * (states - (copy if b in placement.pinned else 0))
        if b in placement.spilled:
            spilled += share * grad_bytes(layout, needs, b)
    weights = unit_reads(
        layout, placement, needs.routing, needs.copies, clipping=clipping, backwards=backwards
    )
    reads = dict(zip(("forward", "backward"), weights.sums(), strict=True))
    update = "forward" if clipping else "backward"
    reads[update] += states_read + spilled
    writes = {"forward": 0.0, "backward": spilled}
    writes[update] += states_written
    return {phase: (round(reads[phase]), round(writes[phase])) for phase in writes}
