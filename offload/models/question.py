"""What the planner is asked of a model, and the plan it answers with.

The question depends on the budget (staging and slack grow with it) and on where keys and values
live, which the answer decides: where nothing fits with them in RAM, they leave it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from offload.blocks import Tier
from offload.errors import PlanError
from offload.models import kv_plan, kv_speed
from offload.models.kv_plan import KvNeed, KvPlan
from offload.models.options import Options
from offload.models.prepared import plan_within
from offload.models.prompt_plan import PromptPlan
from offload.runtime import choice
from offload.runtime.rss import current_rss, reset_peak_rss
from offload.scheduler.costs import CostModel
from offload.scheduler.plan import Plan
from offload.scheduler.planner import PlanRequest, minimum_budgets


@dataclass(kw_only=True)
class Question:
    """Asked with a budget of RAM in bytes: ``question(ram)``.

    Attributes:
        name: the model's, for errors.
        ram: the budget in bytes.
        baseline: bytes that the process takes before the model is opened; grows as kernels are
            compiled.
        need: what blocks of keys and values would take; None: they cannot be kept in any.
        kv: where keys and values of one sequence live, if they are kept in blocks.
        prompts: the prompt cache, if there is one.
        compiling: told how far it is if kernels have to be compiled; see ``compile_ahead``.
    """

    options: Options
    name: str
    ram: int
    baseline: int
    need: KvNeed | None
    kv: KvPlan | None
    prompts: PromptPlan | None
    compiling: Callable[[Any], None] | None

    def __post_init__(self) -> None:
        self.budgets = {Tier.RAM: self.ram}
        on_device = choice.budget(self.options.choice, self.options.gpu, self.ram)
        if on_device is not None:
            self.budgets[Tier.DEVICE] = on_device
        self.top = max(self.budgets)
        """Where weights are when they are multiplied with."""
        self.staged_copies = choice.staged_copies(self.options.choice)
        """Why copies to the device go by way of memory that is pinned; None: they do not."""

    def __call__(self, ram: int) -> PlanRequest:
        """The planner's question if staging and slack were those of a budget of ``ram``."""
        raise NotImplementedError

    def leave_ram(self) -> None:
        """What else changes when keys and values are in blocks after all."""

    def attended(self, plan: Plan, costs: CostModel | None) -> Plan:
        """A plan with what going over keys and values takes, where they are in one piece."""
        return plan

    @property
    def together(self) -> KvPlan | None:
        """``kv`` of all sequences that run beside each other."""
        return kv_plan.beside(self.kv, self.options)

    def finished(self, plan: Plan, costs: CostModel | None) -> Plan:
        """A plan's speed with keys and values."""
        together = self.together
        if together is not None:
            return kv_speed.predicted(plan, together, costs)
        return self.attended(plan, costs)

    def answer(self) -> Plan:
        """The plan; with keys and values on the disk, if nothing fits otherwise.

        Raises:
            PlanError: nothing fits; says the least that works.
        """
        try:
            plan = plan_within(self, self.ram, self.name)
        except PlanError:
            if self.options.kv_ram is not None or self.need is None:
                raise
            # Then keys and values leave RAM, and what weights do not need at least is theirs.
            plain = minimum_budgets(self(self.ram))[Tier.RAM]
            self.kv, self.options.kv_spill = kv_plan.least(self.need), True
            self.leave_ram()
            tiered = minimum_budgets(self(self.ram))[Tier.RAM]
            if tiered >= plain:
                raise  # so little is cached that blocks take more
            self.kv = kv_plan.with_spare(self.need, self.kv, self.ram - tiered)
            self.baseline += compiled_for(self.kv, self.compiling)
            plan = plan_within(self, self.ram, self.name)
        return self.finished(plan, self(self.ram).costs)


def compiled_for(kv: KvPlan | None, compiling: Callable[[Any], None] | None) -> int:
    """Compile and load what attends to blocks of keys and values; returns by how many bytes the
    process has grown, which are the program and not the model."""
    if kv is None or not kv.need.in_place:
        return 0
    from offload.cpu_ops.warm import compile_ahead

    before = current_rss()
    compile_ahead(kv.need.kernels(), compiling)
    gc.collect()
    grown = max(0, current_rss() - before)
    reset_peak_rss()
    return grown


__all__ = ["Question", "compiled_for"]
