"""What a prompt cache has found, stored and lost. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """What a prompt found. Times in seconds.

    ``tokens``: that the cache holds now and no pass was made for, those included that it held
    before (``kept``). ``saved_s``: what the passes took when they were made, less reading.
    """

    tokens: int = 0
    kept: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    saved_s: float = 0.0
    damaged: int = 0


@dataclass(slots=True)
class PrefixStats:
    """Since it was opened; sizes in bytes, times in seconds."""

    reused_tokens: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    saved_s: float = 0.0
    damaged_groups: int = 0
    written_groups: int = 0
    written_bytes: int = 0

    def found(self, tokens: int, read_bytes: int, read_s: float, saved_s: float) -> None:
        """A prompt has found ``tokens``."""
        self.reused_tokens += tokens
        self.read_bytes += read_bytes
        self.read_s += read_s
        self.saved_s += saved_s
