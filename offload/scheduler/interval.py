"""A figure and how far it may be off."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A predicted figure with the spread of the measurements it comes from."""

    low: float
    mid: float
    high: float
