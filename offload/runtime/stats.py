"""What an executor has counted: bytes that moved, time that compute waited, experts found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Stats:
    """Counters since the start; sizes in bytes, times in seconds."""

    disk_read_bytes: int = 0
    payload_read_bytes: int = 0
    copied_bytes: int = 0
    h2d_bytes: int = 0
    read_blocks: int = 0
    row_reads: int = 0
    stall_s: float = 0.0
    hits: int = 0
    misses: int = 0
    guessed: int = 0
    guessed_right: int = 0
    cpu_experts: int = 0
    """Uses of experts that the CPU computed while the device did others."""
    cpu_products: int = 0
    """Products with dense weights in RAM that the CPU computed and the device did not."""
    passes: int = field(default=0)
    host_waits: Counter[str] = field(default_factory=Counter)
    """How often the computing thread waited for the device: ``routing`` (a MoE layer's, without
    which nobody knows what to read), ``token`` (rows of an embedding), ``block`` (under way),
    ``cpu`` (what the CPU computes)."""

    @property
    def hit_rate(self) -> float | None:
        """Share of routed experts that did not have to be read from disk; None if none was."""
        total = self.hits + self.misses
        return self.hits / total if total else None
