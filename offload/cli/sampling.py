"""How the next token is chosen: flags over the checkpoint's own settings."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from offload.errors import OffloadError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Greedy at ``temp`` 0; above, what is None comes from the checkpoint's generation settings.

    Raises:
        OffloadError: a value out of range, or a flag that cannot take effect when greedy.
    """

    temp: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for flag, value, low, high in (
            ("--temp", self.temp, 0.0, 100.0),
            ("--top-p", self.top_p, 0.0, 1.0),
            ("--min-p", self.min_p, 0.0, 1.0),
        ):
            if value is not None and not low <= value <= high:
                raise OffloadError(f"{flag} {value:g} is not between {low:g} and {high:g}")
        if self.top_p == 0.0:
            raise OffloadError("--top-p 0 keeps no token; leave --temp out for the likeliest one")
        if self.top_k is not None and self.top_k < 1:
            raise OffloadError(f"--top-k {self.top_k} keeps no token; give at least 1")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise OffloadError(f"--seed {self.seed} is not between 0 and 2^63 - 1")
        if self.temp == 0.0:
            flags = {"--top-k": self.top_k, "--top-p": self.top_p, "--min-p": self.min_p}
            useless = [f for f, v in (flags | {"--seed": self.seed}).items() if v is not None]
            if useless:
                raise OffloadError(
                    f"{', '.join(useless)} cannot take effect: without --temp the likeliest token "
                    f"is taken; add e.g. --temp 0.8"
                )

    def apply(self, settings: Any, vocabulary: int | None = None) -> dict[str, float | int]:
        """Write the choice into a transformers ``GenerationConfig`` and seed torch. ``vocabulary``:
        logits of a token; None: ids of the checkpoint's file are not looked at.

        Returns what is in force, for the report; empty when greedy.
        """
        from offload.models.sampling import LEAST_TEMPERATURE, check_settings, choose_alone

        choose_alone(settings, vocabulary)
        settings.do_sample = self.temp > 0
        if not settings.do_sample:
            settings.temperature = settings.top_k = settings.top_p = settings.min_p = None
            return {}
        import torch

        settings.temperature = max(self.temp, LEAST_TEMPERATURE)
        # 0 and not None: transformers would fill a top-k of 50 in.
        settings.top_k = self.top_k or settings.top_k or 0
        if self.top_k is not None and vocabulary is not None and self.top_k >= vocabulary:
            settings.top_k = 0  # all of them: nothing to sort
        settings.top_p = self.top_p or settings.top_p or 1.0
        settings.min_p = settings.min_p if self.min_p is None else self.min_p
        check_settings(settings)
        seed = secrets.randbits(32) if self.seed is None else self.seed
        torch.manual_seed(seed)
        return {
            "temperature": self.temp,
            "top_k": settings.top_k,
            "top_p": settings.top_p,
            "min_p": settings.min_p or 0.0,
            "seed": seed,
        }
