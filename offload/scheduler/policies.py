"""The eviction policies by name."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from offload.scheduler.expert_cache import ExpertCache
from offload.scheduler.frequency import Lfu, Mrs
from offload.scheduler.policy import NAMES, ExpertPolicy
from offload.scheduler.recency import Clock, Lru, PinnedLru


def make_policy(name: str, groups: Sequence[str], kept: Collection[str] = ()) -> ExpertPolicy:
    """A policy without entries.

    Args:
        name: one of ``NAMES``.
        groups: layer names in the order in which they run.
        kept: for ``pinned``: the blocks that stay.

    Raises:
        ValueError: unknown name (a bug of the caller, who has checked the user's word).
    """
    match name:
        case "laps":
            return ExpertCache(groups)
        case "lru":
            return Lru()
        case "lfu":
            return Lfu()
        case "clock":
            return Clock()
        case "mrs":
            return Mrs(groups)
        case "pinned":
            return PinnedLru(kept)
    raise ValueError(f"expert policy {name!r} is not one of {', '.join(NAMES)}")
