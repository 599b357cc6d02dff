"""A plan: frozen decisions of what lives where, and the facts behind them.

Pure data. It is made once, before any weight is loaded, printed for the user, and then obeyed by
the residency state machine, which runs the same way on real lanes and on a virtual clock.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offload.blocks import BlockSpec, Tier
from offload.scheduler.interval import Interval
from offload.scheduler.policy import DEFAULT
from offload.scheduler.trace import Trace

if TYPE_CHECKING:
    from offload.scheduler.split import SplitCosts


SITE_ACTIVATIONS = "activations between device and CPU"
"""The reserve, in RAM and on the device alike, for what goes between two sites of compute."""


class Home(enum.Enum):
    """Where a block stays between uses."""

    PINNED = "pinned"
    """Loaded once, stays in the tier of the plan's ``pinned`` map."""
    STREAMED = "streamed"
    """Comes through the rings at each use."""
    CACHED = "cached"
    """An expert: in a slot while the cache keeps it."""
    BY_ROW = "by-row"
    """An embedding: single rows are read at each use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLayout:
    """How one tier's arena is divided: ``[pinned | ring | slots]``. Sizes in bytes."""

    pinned: Mapping[str, int] = field(default_factory=dict)
    """Pinned blocks and their offsets."""
    ring_base: int = 0
    ring_bytes: int = 0
    slot_base: int = 0
    slot_bytes: int = 0
    slots: int = 0

    @property
    def pinned_bytes(self) -> int:
        return self.ring_base

    @property
    def nbytes(self) -> int:
        """Size of the arena."""
        return max(self.ring_base + self.ring_bytes, self.slot_base + self.slot_bytes * self.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSites:
    """Dense blocks that stay in RAM and that the CPU computes there while a pass has few tokens:
    the hidden state moves and not the weight. Chosen by ``sites``."""

    blocks: frozenset[str]
    """All of them pinned in RAM."""
    rows: int
    """Most tokens of such a pass; with more the weights go up as others do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What lives where. See the module's text."""

    blocks: Mapping[str, BlockSpec]
    trace: Trace
    groups: tuple[str, ...]
    """Layers with experts, in the order in which they run."""
    compute_tier: Tier
    tiers: Mapping[Tier, TierLayout]
    homes: Mapping[str, Home]
    budgets: Mapping[Tier, int]
    reserves: Mapping[Tier, Mapping[str, int]]
    """Bytes set aside in each tier for what is not weights, by name (KV, activations, ...)."""
    weight_bytes: int
    """Bytes of all blocks, wherever they live."""
    streamed_bytes_per_pass: int
    """Bytes read from disk for one pass over the trace, experts at the expected hit rate."""
    expected_hit_rate: float | None
    top_k: Mapping[str, int] = field(default_factory=dict)
    """Experts that one token uses in each group."""
    guesses: bool = False
    """Whether the next layer's experts are read on a guess when the disk has nothing else to do."""
    expert_policy: str = DEFAULT
    """What decides which expert leaves a slot: a name of ``policy``."""
    kept: Mapping[Tier, frozenset[str]] = field(default_factory=dict)
    """Under the policy ``pinned``: the experts that stay in a tier's slots once they are there."""
    split: SplitCosts | None = None
    """What decides which experts the CPU computes and which the device, at the same time; None:
    where the plan computes, all of them."""
    sites: DenseSites | None = None
    """Which dense blocks the CPU computes beside the device; None: nobody has asked for any."""
    by_row: frozenset[str] = frozenset()
    """Blocks that are looked up and not multiplied with, pinned ones included."""
    overhead_s: float | Mapping[str, float] = 0.0
    """Seconds of each step that are neither weights nor I/O, for all units or by unit."""
    predicted_pass_s: Interval | None = None
    bound_pass_s: float | None = None
    """The busiest lane's time: no schedule can be faster."""
    lane_s: Mapping[str, float] = field(default_factory=dict)
    """Predicted busy seconds of each lane in one pass."""
    reasons: tuple[str, ...] = ()

    @property
    def bottleneck(self) -> str | None:
        """The lane with the most work, or None without rates."""
        return max(self.lane_s, key=lambda k: self.lane_s[k]) if self.lane_s else None

    def computed_in_ram(self, tokens: float) -> frozenset[str]:
        """Dense blocks that the CPU computes beside the device in a pass of so many tokens."""
        if self.sites is None or tokens > self.sites.rows:
            return frozenset()
        return self.sites.blocks

    def resident_bytes(self, tier: Tier) -> int:
        """Peak bytes of a tier under this plan: the arena and the reserves."""
        return self.tiers[tier].nbytes + sum(self.reserves.get(tier, {}).values())
