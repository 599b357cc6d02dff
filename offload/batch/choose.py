"""How many sequences run beside each other: what the cost model says of each number that fits.

A pass reads what streams once, whatever the number. It computes every sequence by itself, but for
the products of linear layers where they can be joined (``joined``): those take as long as the
memory or the multiplications of all. So more sequences help until computing takes as long as
reading; beyond that, their keys and values only take the RAM that weights would stay in.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from offload.batch.joined import can_join
from offload.batch.joined_layers import layers_of
from offload.blocks import Tier
from offload.errors import PlanError
from offload.models import kv_plan
from offload.models.options import ROW_SHARE
from offload.models.prepared import Prepared
from offload.scheduler.bounds import COMPUTE, READ, compute_seconds, traffic
from offload.scheduler.costs import CostModel
from offload.scheduler.plan import Plan
from offload.scheduler.planner import PlanRequest, make_plan
from offload.units import format_bytes

MOST = 256
"""Sequences that are tried. Python's part of a switch is 10 us, so that more would not help."""

WORTH = 0.03
"""More sequences are not taken for a smaller gain: each takes memory and time to end."""

PARKED_SHARE = 16
"""One part in so many of the budget is for prompts that wait for each other within a pass."""

UNKNOWN = 16
"""Sequences where nothing is measured, and so many fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """So many sequences, and what is expected of them.

    Attributes:
        pass_rows: tokens of prompts that a pass reads at most.
        read_bytes: from the disk in one pass, for all sequences together.
        read_s, compute_s: what the two lanes need for one pass; None without measured rates.
        why: one sentence.
    """

    sequences: int
    pass_rows: int
    read_bytes: float
    read_s: float | None = None
    compute_s: float | None = None
    why: str = ""

    @property
    def pass_s(self) -> float | None:
        if self.read_s is None or self.compute_s is None:
            return None
        return max(self.read_s, self.compute_s)

    @property
    def tok_s(self) -> float | None:
        """While all of them decode."""
        return self.sequences / self.pass_s if self.pass_s else None

    @property
    def bound(self) -> str | None:
        """The lane that sets the pace."""
        if self.read_s is None or self.compute_s is None:
            return None
        return READ if self.read_s > self.compute_s else COMPUTE

    def to_json(self) -> dict[str, Any]:
        """Sizes in bytes, times in seconds."""
        return {
            "sequences": self.sequences,
            "prompt_tokens_per_pass": self.pass_rows,
            "read_bytes_per_pass": round(self.read_bytes),
            "read_s_per_pass": self.read_s,
            "compute_s_per_pass": self.compute_s,
            "predicted_tok_s": self.tok_s,
            "bound": self.bound,
            "why": self.why,
        }


def choose(prepared: Prepared, *, jobs: int, asked: int | None = None) -> Choice:
    """The number of sequences for ``jobs`` prompts, and the plan for it.

    Args:
        prepared: a plan for one sequence; made anew.
        asked: this number and no other.

    Raises:
        PlanError: as many as were asked for do not fit; says how many do.
    """
    best: Choice | None = None
    more = ""
    for count in [asked] if asked else ladder(min(jobs, MOST)):
        try:
            found = _estimate(prepared, count)
        except PlanError as error:
            if asked and count > 1:
                raise PlanError(
                    f"{asked} sequences at once do not fit: {error}; or give a smaller "
                    f"--batch-size, or none, to have it chosen"
                ) from error
            if best is None:
                raise
            more = f"{count} do not fit in {_ram(prepared)}"
            break
        if best is not None and not _better(found, best):
            more = f"{count} are not faster"
            break
        best = found
    if best is None:
        raise AssertionError("the ladder has a first step")
    _set(prepared, best.sequences, best.pass_rows)
    prepared.replan()
    return dataclasses.replace(best, why=_why(best, jobs, asked, more))


def ladder(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12 ... up to ``most``."""
    steps = sorted({n for i in range(9) for n in (2**i, 3 * 2**i)} - {3 * 2**8})
    return [n for n in steps if n < most] + [max(1, most)]


def _better(found: Choice, best: Choice) -> bool:
    if found.tok_s is not None and best.tok_s is not None:
        return found.tok_s > best.tok_s * (1 + WORTH)
    # Nothing is measured: as many as do not cost reads, and not too many.
    return found.sequences <= UNKNOWN and found.read_bytes / found.sequences < (
        best.read_bytes / best.sequences
    )


def _estimate(prepared: Prepared, count: int) -> Choice:
    options, footprint = prepared.options, prepared.footprint
    prompt = max(1, options.prompt_tokens or options.context)
    budget = prepared.plan.budgets[Tier.RAM]
    each = max(1, footprint.parked(1, prompt))
    rows = max(prompt, min((count - 1) * prompt, budget // PARKED_SHARE // each))
    _set(prepared, count, rows)
    request, plan = kv_plan.in_ram_or_spilled(options, lambda: _planned(prepared, budget))
    read = traffic(plan, count)[Tier.RAM] + _kv_read(prepared)
    costs: CostModel | None = request.costs
    if costs is None:
        return Choice(sequences=count, pass_rows=rows, read_bytes=read)
    return Choice(
        sequences=count,
        pass_rows=rows,
        read_bytes=read,
        read_s=costs.read_busy_s(read),
        compute_s=_compute_s(prepared, plan, costs, count),
    )


def _planned(prepared: Prepared, budget: int) -> tuple[PlanRequest, Plan]:
    request = prepared.ask(budget)
    return request, make_plan(request)


def _compute_s(prepared: Prepared, plan: Plan, costs: CostModel, count: int) -> float:
    """Of a pass in which ``count`` sequences decode."""
    alone = count * compute_seconds(plan, costs)
    if count == 1 or not can_join(prepared):
        return alone
    each = plan.overhead_s  # Python's part, and attention: of every sequence
    if isinstance(each, (int, float)):
        beside_s = each * len(plan.trace)
    else:
        beside_s = sum(each.get(step.unit, 0.0) for step in plan.trace)
    if getattr(prepared, "lean", None) is None and layers_of(prepared.meta.model):
        layers_s = max(0.0, beside_s - prepared.between_s)
        beside_s -= (1 - ROW_SHARE) * layers_s
    return min(alone, compute_seconds(plan, costs, count) + (count - 1) * beside_s)


def _kv_read(prepared: Prepared) -> float:
    """Bytes of keys and values from the disk in a pass, at the end of the context. Raises
    PlanError: their budget is too small for so many."""
    kv = kv_plan.beside(prepared.kv, prepared.options)
    return 0.0 if kv is None else float(kv.disk_bytes_per_token)


def _set(prepared: Prepared, sequences: int, pass_rows: int) -> None:
    prepared.options.sequences, prepared.options.pass_rows = sequences, pass_rows


def _ram(prepared: Prepared) -> str:
    return f"{format_bytes(prepared.plan.budgets[Tier.RAM])} of RAM"


def _why(best: Choice, jobs: int, asked: int | None, more: str) -> str:
    if asked:
        return "as asked for"
    if best.sequences == jobs:
        return "all prompts at once"
    if best.sequences >= MOST:
        return f"more than {MOST} are not tried"
    if not best.read_bytes:
        return f"no weights are read from the disk, so that {more}"
    return more


__all__ = ["Choice", "choose", "ladder"]
