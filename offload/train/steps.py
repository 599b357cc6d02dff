"""What a step is told, and what it tells."""

from __future__ import annotations

from dataclasses import dataclass

from offload.cpu_ops.adam_step import AdamStep
from offload.errors import OffloadError


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Hyper-parameters of some parameters for one step."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def step(self, number: int, clip: float) -> AdamStep:
        return AdamStep(
            lr=self.lr, step=number, beta1=self.beta1, beta2=self.beta2, eps=self.eps,
            weight_decay=self.weight_decay, clip=clip,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepResult:
    """``norm`` of all gradients before clipping, and the factor they were multiplied by.

    ``experts`` and ``skipped``: updates of experts that are taken, and that are not because no
    token reached them; both 0 unless ``Engine.skip_untouched``.
    """

    norm: float
    clip: float
    experts: int = 0
    skipped: int = 0


class NotFinite(OffloadError):
    """A loss or a gradient is NaN or infinite; nothing was updated by that step."""


@dataclass(slots=True)
class Clock:
    """Where the training thread's time goes, in seconds."""

    waiting: float = 0.0
    """For weights: reads and updates that were not through."""
    updates: float = 0.0
    """Of these, for units with an update pending: what the optimizer costs beyond what runs behind
    computing."""


__all__ = ["Clock", "Group", "NotFinite", "StepResult"]
