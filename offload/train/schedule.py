"""The learning rate of each step: a pure function of the step's number.

The numbers are those of transformers' ``get_scheduler`` (optimization.py), to the last bit, so
that a run can be compared with the Trainer's. A function and not an object that is advanced: a
resumed run asks for step 512 without having asked for 511.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from offload.errors import OffloadError
from offload.train.options import SCHEDULES, TrainOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Warms up linearly from 0, then follows ``name``; the first step of a warmup is at rate 0."""

    name: str
    """"linear" and "cosine" fall to 0 where step ``total_steps + 1`` would be; "constant"."""
    lr: float
    """The peak."""
    warmup_steps: int
    total_steps: int

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise OffloadError(f"--schedule {self.name} is none of {', '.join(SCHEDULES)}")
        if self.total_steps < 1:
            raise OffloadError(f"a run of {self.total_steps} steps trains nothing")
        if self.warmup_steps < 0:
            raise OffloadError(f"a warmup of {self.warmup_steps} steps is negative")
        if self.warmup_steps >= self.total_steps:
            raise OffloadError(
                f"--warmup {self.warmup_steps} would take all of the run's {self.total_steps} "
                f"step(s): the rate would never be --lr {self.lr:g}; at most "
                f"{self.total_steps - 1}, or a share below 1"
            )

    @classmethod
    def of(cls, options: TrainOptions, total_steps: int) -> Schedule:
        """The schedule that ``options`` ask for, once the number of steps is known.

        Raises:
            OffloadError: the warmup takes all steps.
        """
        return cls(
            name=options.schedule,
            lr=options.lr,
            warmup_steps=warmup_steps(options.warmup, total_steps),
            total_steps=total_steps,
        )

    def rate(self, step: int) -> float:
        """The rate of ``step``, from 1."""
        if not 1 <= step <= self.total_steps:
            raise ValueError(f"step {step} is not one of 1 to {self.total_steps}")
        return self.lr * self._factor(step - 1)

    def _factor(self, before: int) -> float:
        """Share of the peak after ``before`` steps. The operations and their order are
        transformers': the last bit depends on them."""
        if before < self.warmup_steps:
            return before / self.warmup_steps
        if self.name == "constant":
            return 1.0
        falling = self.total_steps - self.warmup_steps
        if self.name == "linear":
            return max(0.0, (self.total_steps - before) / falling)
        progress = (before - self.warmup_steps) / falling
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * 0.5 * 2.0 * progress)))


def warmup_steps(warmup: float, total_steps: int) -> int:
    """Steps of a warmup given in steps (1 or more) or as a share of all (below 1).

    A share is rounded up, as transformers do, but leaves a step to train with: its own rounding
    made the only step of a run of one a step at rate 0.
    """
    if warmup >= 1:
        return int(warmup)
    return min(math.ceil(total_steps * warmup), total_steps - 1)
