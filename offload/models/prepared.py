"""A plan for a checkpoint, with everything that carrying it out takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from offload.blocks import Tier
from offload.errors import PlanError
from offload.models import kv_plan, kv_speed
from offload.models.footprint import Footprint
from offload.models.kernel_error import KernelError
from offload.models.kv_plan import KvPlan
from offload.models.meta import MetaModel
from offload.models.naming import model_name
from offload.models.opening import open_prepared
from offload.models.options import Options, Progress
from offload.models.prompt_plan import PromptPlan
from offload.models.recipes import Recipes, align_pins
from offload.models.single_rows import SingleRows
from offload.models.teams import TeamPlan
from offload.models.units import Cut
from offload.scheduler.plan import Plan
from offload.scheduler.planner import PlanRequest, make_plan, minimum_budgets


@dataclass(kw_only=True)
class Prepared:
    """A plan for a checkpoint, with everything ``open`` needs to carry it out."""

    meta: MetaModel
    options: Options
    cut: Cut
    recipes: Recipes
    plan: Plan
    request: PlanRequest
    ask: Callable[[int], PlanRequest]
    footprint: Footprint
    baseline_rss: int
    head_rows: frozenset[int] | None
    notes: list[str] = field(default_factory=list)
    kv: KvPlan | None = None
    """Where keys and values live, if they are kept in blocks."""
    kv_alone: KvPlan | None = None
    """The same of one sequence, where several run beside each other."""
    prompts: PromptPlan | None = None
    """The prompt cache, if there is one."""
    kernel_error: KernelError | None = None
    team: TeamPlan | None = None
    """Who computes a token, where that is not always all threads."""
    single_rows: SingleRows | None = None
    """Who multiplies for tokens, where that is not torch; the kernel is there then."""
    between_s: float = 0.0
    """What ``generate`` takes between the layers of two tokens; a part of the plan's overheads."""

    @property
    def minimum(self) -> Mapping[Tier, int]:
        """The smallest budgets in bytes that this model, context and cut can run in."""
        return least_budgets(self.ask)

    def replan(self) -> None:
        """Make the plan anew after ``options.sequences`` or ``pass_rows`` have changed.

        Raises:
            PlanError: it does not fit.
        """
        ram = self.plan.budgets[Tier.RAM]
        if self.kv_alone is None:
            self.kv_alone = self.kv
        before = None if self.kv is None else self.kv.note(self.options)
        plan = kv_plan.in_ram_or_spilled(
            self.options, lambda: plan_within(self.ask, ram, model_name(self.meta.directory))
        )
        kv = kv_plan.beside(self.kv_alone, self.options)
        self.request = self.ask(ram)
        if kv is not None:
            plan = kv_speed.predicted(plan, kv, self.request.costs)
            self.notes = [kv.note(self.options) if n == before else n for n in self.notes]
        else:
            plan = self._attended(plan)
        if self.team is not None:  # of a pass with one token of one sequence
            self.notes = [note for note in self.notes if note != self.team.note]
            self.team = None
        self.plan, self.kv = self.aligned(plan), kv

    def kv_json(self) -> dict[str, Any] | None:
        """Of keys and values that are kept otherwise than by transformers, sizes in bytes."""
        return None if self.kv is None else self.kv.to_json()

    def _attended(self, plan: Plan) -> Plan:
        """With what going over keys and values takes, where they are in one piece."""
        return plan

    def aligned(self, plan: Plan) -> Plan:
        """With what it pins laid where products read it best, see ``align_pins``."""
        return align_pins(plan, self.cut, self.recipes)

    def open(self, progress: Progress | None = None, wrap_store: Any = None) -> Any:
        """Load what is pinned and return the model, ready to run."""
        return open_prepared(self, progress, wrap_store)

    def check_kernels(self, model: Any) -> None:
        """Measure how far the opened model's kernels are from torch's, if fast ones were asked
        for: ``kernel_error``. These are torch's."""


def plan_within(ask: Callable[[int], PlanRequest], ram: int, name: str) -> Plan:
    """The plan for a budget. Raises PlanError: nothing fits; says the least that works, which has
    less staging and slack than what was asked for."""
    try:
        return make_plan(ask(ram))
    except PlanError:
        try:
            return make_plan(ask(least_budgets(ask)[Tier.RAM]))
        except PlanError as error:
            raise PlanError(f"{name}: {error}") from error


def least_budgets(ask: Callable[[int], PlanRequest]) -> Mapping[Tier, int]:
    """The smallest budgets that work. Staging and slack grow with the budget, by far less than
    it does, so asking again with the answer settles at once."""
    found: Mapping[Tier, int] = {Tier.RAM: 0}
    while True:
        ram = found[Tier.RAM]
        found = minimum_budgets(ask(ram))
        if found[Tier.RAM] <= ram:
            return found


__all__ = ["Prepared", "least_budgets", "plan_within"]
