"""What a run tells while it works. Plain values: the command line prints them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One optimizer step."""

    step: int
    """From 1."""
    of: int
    epoch: float
    loss: float
    """Mean over the step's label tokens."""
    grad_norm: float
    """Before clipping."""
    lr: float
    tokens: int
    """Input tokens of the step, padding not counted."""
    label_tokens: int
    seconds: float
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of "forward" (with the deferred updates before it) and "backward"."""
    lanes: Mapping[str, float] = field(default_factory=dict)
    """Busy seconds of "compute", "ssd", "update"."""
    read_bytes: int = 0
    written_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """A pass over the held-out data."""

    step: int
    loss: float
    label_tokens: int
    seconds: float
    best: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitReport:
    """Step ``step`` is safe."""

    step: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndReport:
    """How the run ended."""

    steps: int
    """Taken in this process."""
    last_step: int
    stopped: str
    """"done" or "interrupted"."""
    seconds: float
    tokens: int
    budget_bytes: int
    peak_rss_bytes: int
    """Above the bare process, as the budget counts."""
    read_bytes: int
    written_bytes: int
    output: str | None
    """The model directory; None if interrupted before it was written."""
    merged_onto: str | None = None
    """LoRA on a packed base: whose weights the adapters were merged into."""


class Listener(Protocol):
    """Who wants to know. Calls come from the training thread."""

    def note(self, text: str) -> None: ...

    def phase(self, what: str, done: int, total: int) -> None:
        """Progress in bytes of something long that is no step (reading, writing the output)."""
        ...

    def step(self, report: StepReport) -> None: ...

    def evaluated(self, report: EvalReport) -> None: ...

    def committed(self, report: CommitReport) -> None: ...

    def ended(self, report: EndReport) -> None: ...
