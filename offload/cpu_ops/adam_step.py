"""What one optimizer step does to every parameter, frozen into a value.

A deferred update may run while the schedule has moved on: what it computes is decided when the
step is taken, by making one of these.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offload.errors import OffloadError


class Constant(enum.IntEnum):
    """Where ``AdamStep.constants`` holds what."""

    CLIP = 0
    DECAY = 1
    """Factor of the weights: 1 - lr * weight_decay, or 1."""
    L2 = 2
    """Weights' share in the gradient: 0, or weight_decay."""
    LERP = 3
    """m + LERP (g - m), or g + LERP (g - m) as ``rule`` says."""
    BETA2 = 4
    REST2 = 5
    """1 - beta2"""
    ROOT2 = 6
    """sqrt(1 - beta2^step)"""
    EPS = 7
    MINUS_STEP = 8
    """-lr / (1 - beta1^step)"""
    BY_ROOT2 = 9
    """1 / ROOT2"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamStep:
    """One step of Adam (Kingma and Ba 2015, algorithm 1) as ``torch.optim.AdamW`` computes it.

    ``decoupled`` weight decay is AdamW's (Loshchilov and Hutter 2019); otherwise it is added to
    the gradient, as ``torch.optim.Adam`` does.

    Raises:
        OffloadError: a value is outside of its range.
    """

    lr: float
    """>= 0"""
    step: int
    """The number of this step, from 1: of the bias correction and of random rounding."""
    beta1: float = 0.9
    beta2: float = 0.999
    """Both in [0, 1)."""
    eps: float = 1e-8
    """>= 0"""
    weight_decay: float = 0.01
    """>= 0"""
    clip: float = 1.0
    """Factor of the gradient, applied in float32 before all else."""
    decoupled: bool = True

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay", "clip"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise OffloadError(f"Adam's {name} must be finite and at least 0, not {value}")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise OffloadError(f"Adam's {name} must be in [0, 1), not {value}")
        if not 1 <= self.step < 2**63:
            raise OffloadError(f"Adam's steps count from 1, not {self.step}")

    @property
    def rule(self) -> str:
        """Which code computes it: what weight decay joins, and at which end m's average starts.

        torch's ``lerp`` starts at the nearer end, so that a weight of 1 gives the gradient
        exactly; to be equal to it to the bit, so do we.
        """
        decay = "decoupled" if self.decoupled or self.weight_decay == 0 else "l2"
        return f"{decay} {'gradient' if self._from_gradient else 'moment'}"

    @property
    def _from_gradient(self) -> bool:
        return bool(np.float32(1 - self.beta1) >= np.float32(0.5))

    def constants(self) -> npt.NDArray[np.float32]:
        """float32 [10] in the order of ``Constant``: computed in float64 and rounded once."""
        weight = np.float32(1 - self.beta1)
        return np.array(
            [
                self.clip,
                1 - self.lr * self.weight_decay if self.decoupled else 1.0,
                0.0 if self.decoupled else self.weight_decay,
                weight - np.float32(1) if self._from_gradient else weight,
                self.beta2,
                1 - self.beta2,
                (1 - self.beta2**self.step) ** 0.5,
                self.eps,
                -self.lr / (1 - self.beta1**self.step),
                1 / (1 - self.beta2**self.step) ** 0.5,
            ],
            np.float32,
        )
