"""A plan as a document: written once, obeyed again.

What is frozen are the decisions: homes, addresses, rings and slots, where is computed, the order in
which prefetch looks ahead. What is not are facts of the run that obeys them: its budgets, its model
and its machine must be those of the plan, or the document is refused with the reason.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from offload.blocks import Tier
from offload.errors import PlanError
from offload.scheduler.interval import Interval
from offload.scheduler.plan import DenseSites, Home, Plan, TierLayout
from offload.scheduler.split import SplitCosts
from offload.scheduler.trace import Step, Trace
from offload.units import format_bytes

VERSION = 2
WHAT = "offload plan"

_FLAG = {Tier.RAM: "--ram", Tier.DEVICE: "--gpu"}
_LAYOUT = ("ring_base", "ring_bytes", "slot_base", "slot_bytes", "slots")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whose plan it is.

    Attributes:
        model: for people. ``config``: a digest of its configuration.
        machine: what rates depend on.
        context, prompt_tokens: that memory is set aside for.
    """

    model: str
    config: str
    machine: str
    context: int
    prompt_tokens: int


def fingerprint(plan: Plan) -> str:
    """Of what the plan is about: its blocks, to the tensor, and the steps that use them. Not where
    in its block a tensor starts: that of a pinned one is chosen when pins are."""
    digest = hashlib.sha256()
    for name in sorted(plan.blocks):
        spec = plan.blocks[name]
        tensors = [(t.name, t.dtype, t.shape) for t in spec.tensors]
        digest.update(repr((name, spec.kind.value, spec.group, spec.nbytes, tensors)).encode())
    for step in plan.trace:
        digest.update(repr((step.unit, step.blocks, step.group)).encode())
    return digest.hexdigest()


def document(plan: Plan, who: Identity) -> dict[str, Any]:
    """The plan as a dict that ``json`` can write."""
    homes: dict[str, list[str]] = {home.value: [] for home in Home}
    for block, home in plan.homes.items():
        homes[home.value].append(block)
    predicted = plan.predicted_pass_s
    found = {
        "what": WHAT,
        "version": VERSION,
        "model": who.model,
        "config": who.config,
        "blocks": fingerprint(plan),
        "machine": who.machine,
        "context": who.context,
        "prompt_tokens": who.prompt_tokens,
        "budgets": {tier.name: n for tier, n in plan.budgets.items()},
        "compute": plan.compute_tier.name,
        "tiers": {
            tier.name: {"pinned": dict(a.pinned)} | {name: getattr(a, name) for name in _LAYOUT}
            for tier, a in plan.tiers.items()
        },
        "homes": homes,
        "prefetch": [
            {"unit": s.unit, "blocks": list(s.blocks), "group": s.group} for s in plan.trace
        ],
        "expert_policy": plan.expert_policy,
        "kept": {tier.name: sorted(blocks) for tier, blocks in plan.kept.items()},
        "guesses": plan.guesses,
        "split": None if plan.split is None else plan.split.to_json(),
        "sites": None
        if plan.sites is None
        else {"blocks": sorted(plan.sites.blocks), "rows": plan.sites.rows},
        "expected_hit_rate": plan.expected_hit_rate,
        "streamed_bytes_per_pass": plan.streamed_bytes_per_pass,
        "predicted_pass_s": None
        if predicted is None
        else [predicted.low, predicted.mid, predicted.high],
        "bound_pass_s": plan.bound_pass_s,
        "lane_s": dict(plan.lane_s),
        "reasons": list(plan.reasons),
    }
    # Whatever is changed by hand is found out.
    return found | {"checksum": _checksum(found)}


def read_identity(data: object, where: str) -> Identity:
    """Whose plan a document is, before anything is planned.

    Raises:
        PlanError: it is no plan of this version, or it is damaged.
    """
    if not isinstance(data, Mapping) or data.get("what") != WHAT:
        raise PlanError(f"{where} is no plan; 'offload plan --plan-out FILE' writes one")
    if data.get("version") != VERSION:
        raise PlanError(
            f"{where} is a plan of version {data.get('version')!r}, and this program reads "
            f"{VERSION}; write it again with 'offload plan --plan-out'"
        )
    if data.get("checksum") != _checksum(data):
        raise PlanError(
            f"{where} was damaged or changed after it was written; write it again with "
            "'offload plan --plan-out'"
        )
    return Identity(
        model=data["model"],
        config=data["config"],
        machine=data["machine"],
        context=data["context"],
        prompt_tokens=data["prompt_tokens"],
    )


def restore(data: Mapping[str, Any], fresh: Plan, who: Identity, where: str) -> Plan:
    """The frozen plan for a run that would have made the plan ``fresh``.

    Raises:
        PlanError: the run has another model, machine or budget, or needs more memory beside the
            weights than the plan has left for it; says which, and what to change.
    """
    then = read_identity(data, where)
    if then.config != who.config:
        raise PlanError(f"{where} is a plan for {then.model}, and this is {who.model}: replan")
    if then.machine != who.machine:
        raise PlanError(
            f"{where} was made for another machine ({then.machine}) than this one "
            f"({who.machine}): replan"
        )
    for tier in fresh.budgets.keys() | {Tier[name] for name in data["budgets"]}:
        before, now = data["budgets"].get(tier.name), fresh.budgets.get(tier)
        if before != now:
            said = "none" if now is None else f"{now} bytes ({format_bytes(now)})"
            asked = "without"
            if before is not None:
                asked = f"with {before} bytes ({format_bytes(before)}) of"
            raise PlanError(
                f"{where} was made {asked} {_FLAG[tier]}, and this run has {said}: give the "
                "same, or replan"
            )
    if data["compute"] != fresh.compute_tier.name:
        raise PlanError(f"{where} computes in {data['compute']}, not {fresh.compute_tier.name}")
    if data["blocks"] != fingerprint(fresh):
        raise PlanError(
            f"{where} is about other blocks than this run's: {then.model} was cut otherwise, in "
            "another version of this program or with other flags (--quant, --kernels, --dtype); "
            "replan"
        )
    for name, flag in (("expert_policy", "--expert-policy"), ("guesses", "--guess")):
        if data[name] != getattr(fresh, name):
            raise PlanError(
                f"{where} was made with {flag} {data[name]}, and this run says "
                f"{getattr(fresh, name)}: drop {flag}, or replan"
            )
    # A plan written before there was a choice of sites has none.
    split = None if data.get("split") is None else SplitCosts.from_json(data["split"])
    sites = None
    if (found := data.get("sites")) is not None:
        sites = DenseSites(blocks=frozenset(found["blocks"]), rows=found["rows"])
    shared = split is not None or sites is not None
    if shared != (fresh.split is not None or fresh.sites is not None):
        there, here = ("with", "without") if shared else ("without", "with")
        way = "give --hybrid" if shared else "drop --hybrid"
        raise PlanError(
            f"{where} was made {there} a part for the CPU beside the device, and this run is "
            f"{here}: {way}, or replan"
        )
    tiers = {
        Tier[name]: TierLayout(pinned=dict(a["pinned"]), **{k: a[k] for k in _LAYOUT})
        for name, a in data["tiers"].items()
    }
    predicted = data["predicted_pass_s"]
    plan = replace(
        fresh,
        tiers=tiers,
        homes={b: Home(home) for home, blocks in data["homes"].items() for b in blocks},
        trace=Trace(
            [
                Step(unit=s["unit"], blocks=tuple(s["blocks"]), group=s["group"])
                for s in data["prefetch"]
            ]
        ),
        split=split,
        sites=sites,
        kept={Tier[name]: frozenset(blocks) for name, blocks in data["kept"].items()},
        expected_hit_rate=data["expected_hit_rate"],
        streamed_bytes_per_pass=data["streamed_bytes_per_pass"],
        predicted_pass_s=None
        if predicted is None
        else Interval(low=predicted[0], mid=predicted[1], high=predicted[2]),
        bound_pass_s=data["bound_pass_s"],
        lane_s=dict(data["lane_s"]),
        reasons=tuple(data["reasons"]),
    )
    for tier in plan.tiers:
        over = plan.resident_bytes(tier) - plan.budgets[tier]
        if over > 0:
            raise PlanError(
                f"{where} leaves {over} bytes too few of {_FLAG[tier]} for what this run needs "
                "beside its weights; replan with more room: a longer --prompt-tokens or --context"
            )
    return plan


def _checksum(data: Mapping[str, Any]) -> str:
    plain = {key: value for key, value in data.items() if key != "checksum"}
    text = json.dumps(plain, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
