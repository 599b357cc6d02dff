"""What a run tells while it works. Plain values: the command line prints them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


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
    skipped_updates: int = 0
    """Experts that kept their weights because no token reached them, if that was asked for."""
    phase_read_bytes: Mapping[str, int] = field(default_factory=dict)
    """Of the disk, by phase."""
    phase_written_bytes: Mapping[str, int] = field(default_factory=dict)
    exposed_update_s: float = 0.0
    """Seconds that computing waited for updates: the optimizer's share of the step's time."""


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
    device_budget_bytes: int | None = None
    """Of the card, or the simulated one, that layers ran on; None: there was none."""
    device_peak_bytes: int | None = None
    """Most that was in use on a card at once; None: no card."""
    output: str | None
    """The model directory; None if interrupted before it was written."""
    output_step: int | None = None
    """After which step the weights in ``output`` were so; None with it."""
    best_loss: float | None = None
    """Of the evaluation after ``output_step``, if ``output`` is the best; else None."""
    skipped_updates: int = 0
    expert_updates: int = 0
    """Of experts, if untouched ones are skipped: updates that were not taken, and that were."""
    last_output: str | None = None
    """Where the weights after ``last_step`` are if they were to be kept, too."""
    merged_onto: str | None = None
    """LoRA on a packed base: whose weights the adapters were merged into."""
    step_seconds: float = 0.0
    """Of all steps: without opening, commits, evaluation and output."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of all steps by phase."""
    phase_read_bytes: Mapping[str, int] = field(default_factory=dict)
    phase_written_bytes: Mapping[str, int] = field(default_factory=dict)
    busy: Mapping[str, float] = field(default_factory=dict)
    """Share of the steps' time in which each lane was busy."""
    exposed_update_s: float = 0.0


class StepSums:
    """Sums over the steps of a process, for its ``EndReport``."""

    def __init__(self) -> None:
        self._seconds = self._exposed = 0.0
        self._lanes: Counter[str] = Counter()
        self._phases: Counter[str] = Counter()
        self._read: Counter[str] = Counter()
        self._written: Counter[str] = Counter()

    def add(self, report: StepReport) -> None:
        self._seconds += report.seconds
        self._exposed += report.exposed_update_s
        for sums, more in (
            (self._lanes, report.lanes), (self._phases, report.phases),
            (self._read, report.phase_read_bytes), (self._written, report.phase_written_bytes),
        ):  # fmt: skip
            sums.update(more)  # type: ignore[call-overload]  # Counter adds floats as well

    def fields(self) -> dict[str, Any]:
        """Fields of an ``EndReport``."""
        seconds = self._seconds
        return {
            "step_seconds": seconds, "phases": dict(self._phases),
            "phase_read_bytes": dict(self._read), "phase_written_bytes": dict(self._written),
            "busy": {k: v / seconds if seconds else 0.0 for k, v in self._lanes.items()},
            "exposed_update_s": self._exposed,
        }  # fmt: skip


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
