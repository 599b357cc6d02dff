"""A core for those who read: tokens computed with one thread fewer than torch has, where that is
faster (``scheduler.team``) and bit-equal (``team_check``)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch

from offload.blocks import Tier
from offload.models.handle import OffloadHandle
from offload.models.options import Options
from offload.models.shadow import shadow
from offload.models.streamed_forward import not_compiled
from offload.models.team_check import same_bits
from offload.scheduler.costs import CostModel
from offload.scheduler.plan import Plan
from offload.scheduler.planner import PlanRequest, make_plan
from offload.scheduler.team import MARGIN, Team

LEAST_BYTES = 8 << 20
"""Read by a token: with fewer there is nothing to make room for, and nothing is tried."""

LEAST_BUDGET = 512 << 20
"""Of RAM, not in use yet when another process tries whether the bits are the same."""


@dataclass(frozen=True, slots=True)
class TeamPlan:
    """Who may compute a token.

    Attributes:
        fewer: whether a run begins with one thread fewer than torch has.
        planned: whether that was predicted to be better, or worse.
        note: what was said of it.
    """

    fewer: bool
    planned: bool
    note: str | None = None


def plan_team(
    plan: Plan,
    request: PlanRequest,
    options: Options,
    products: Callable[[], list[list[Any]] | None] | None,
    finished: Callable[[Plan, CostModel | None], Plan],
) -> tuple[Plan, TeamPlan | None, list[str]]:
    """Whether tokens are better computed with a thread fewer: the plan with the prediction that
    follows, who computes, and what to say of it.

    Args:
        products: see ``team_check.products_of``; None: bits do not depend on threads.
        finished: adds to a plan's prediction what the planner does not know of.
    """
    threads = torch.get_num_threads()
    shared = options.sequences > 1 or options.hybrid or options.elsewhere
    if (
        threads < 2
        or shared
        or options.choice.kind != "cpu"
        or plan.compute_tier is not Tier.RAM
        or plan.streamed_bytes_per_pass < LEAST_BYTES
    ):
        return plan, None, []
    if products is not None:
        listed = products()
        small = plan.budgets[Tier.RAM] < LEAST_BUDGET
        if listed is None or small or not same_bits(listed, threads):
            return plan, None, []
    if options.fewer is None or request.costs is None or plan.predicted_pass_s is None:
        return plan, TeamPlan(fewer=False, planned=False), []
    costs = replace(request.costs, hardware=options.fewer, crowd_s=0.0)
    other = finished(make_plan(replace(request, costs=costs)), costs)
    assert other.predicted_pass_s is not None
    now_s, then_s = plan.predicted_pass_s.mid, other.predicted_pass_s.mid
    if then_s >= MARGIN * now_s:
        return plan, TeamPlan(fewer=False, planned=True), []
    note = (
        f"tokens are computed by {threads - 1} of {threads} threads, which leaves a core to those "
        f"that read: {1 / then_s:.3g} tok/s predicted, instead of {1 / now_s:.3g}"
    )
    found = replace(
        plan,
        predicted_pass_s=other.predicted_pass_s,
        bound_pass_s=other.bound_pass_s,
        lane_s=other.lane_s,
    )
    return found, TeamPlan(fewer=True, planned=True, note=note), [note]


def serve_team(
    team: TeamPlan | None, model: Any, handle: OffloadHandle, *, kernels: bool = False
) -> None:
    """Have a model's passes of one token run as ``team`` says. ``kernels``: ours have threads of
    their own to set."""
    if team is None:
        return
    runner = _Runner(team, handle, kernels)
    handle.team = runner.team
    handle.attachment.on_detach(
        shadow(model, "forward", not_compiled(runner.around(model.forward)))
    )


class _Runner:
    def __init__(self, plan: TeamPlan, handle: OffloadHandle, kernels: bool) -> None:
        self.team = Team(fewer=plan.fewer, planned=plan.planned)
        self._kernels = kernels
        self._turn = handle.attachment.turn
        self._stats = handle.executor.stats

    def around(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            threads = torch.get_num_threads()
            if threads < 2 or not one_token(args, kwargs):
                return inner(*args, **kwargs)
            with self._turn:
                return self._timed(threads, lambda: inner(*args, **kwargs))

        return forward

    def _timed(self, threads: int, run: Callable[[], Any]) -> Any:
        fewer, read = self.team.next_fewer, self._stats.disk_read_bytes
        if fewer:
            self._set(threads - 1)
        began = time.perf_counter()
        try:
            output = run()
        finally:
            if fewer:
                self._set(threads)
        if self._stats.disk_read_bytes > read:  # else there was nothing to make room for
            self.team.took(time.perf_counter() - began)
        return output

    def _set(self, threads: int) -> None:
        torch.set_num_threads(threads)  # 0.2 us
        if self._kernels:
            from offload.cpu_ops.threads import setup

            setup(threads)


def one_token(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a model is called with a single token: numbers [1, 1] or hidden states [1, 1, H]."""
    ids = args[0] if args else kwargs.get("input_ids")
    if ids is None:
        ids = kwargs.get("decoder_input_ids")
    if isinstance(ids, torch.Tensor):
        return ids.numel() == 1
    states = kwargs.get("inputs_embeds")
    return isinstance(states, torch.Tensor) and states.dim() == 3 and states[..., 0].numel() == 1


__all__ = ["TeamPlan", "one_token", "plan_team", "serve_team"]
