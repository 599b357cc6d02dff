"""A plan for people and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from offload.blocks import Tier
from offload.cli.console import heading, rows
from offload.models.naming import model_name
from offload.models.prepared import Prepared
from offload.scheduler import describe
from offload.scheduler.explain import WARNING
from offload.scheduler.forecast import Forecast
from offload.scheduler.interval import Interval
from offload.scheduler.plan import Home, Plan
from offload.units import format_bytes, format_rate


def streams(plan: Plan) -> bool:
    """Whether anything is read from the disk again after loading."""
    low = plan.tiers[Tier.RAM].pinned
    return any(home is not Home.PINNED and b not in low for b, home in plan.homes.items())


def goes_up(plan: Plan) -> bool:
    """Whether weights are copied to a device again after loading."""
    if plan.compute_tier is not Tier.DEVICE:
        return False
    top = plan.tiers[Tier.DEVICE].pinned
    return any(b not in top and home is not Home.BY_ROW for b, home in plan.homes.items())


def title(prepared: Prepared) -> Text:
    """What is run: name, family, dtype, size, where it computes."""
    meta, plan = prepared.meta, prepared.plan
    kind = prepared.options.choice.kind
    where = {"cpu": "RAM", "sim": "a simulated device", "cuda": "a card's memory"}[kind]
    options = prepared.options
    card = options.hardware.card if options.hardware is not None and options.elsewhere else None
    if card is not None and plan.compute_tier is Tier.DEVICE:
        where = card.name
    return Text.assemble(
        (model_name(meta.directory), "bold"),
        f": {meta.model.config.model_type}, {str(meta.dtype).removeprefix('torch.')}, "
        f"{format_bytes(plan.weight_bytes)} of weights, computed in {where}",
    )


def show_plan(console: Console, prepared: Prepared, first: Forecast | None = None) -> None:
    """The whole plan: homes, budgets line by line, speed, reasons, notes; ``first``: of the
    prompt."""
    plan, options = prepared.plan, prepared.options
    console.print(title(prepared), soft_wrap=True)
    console.print(
        f"memory is set aside for {options.context} tokens, a prompt of "
        f"{options.prompt_tokens or options.context} among them",
        soft_wrap=True,
    )
    least = ", ".join(f"{format_bytes(n)} of {_name(t)}" for t, n in _minimum(prepared))
    sections = [
        ("what lives where", describe.homes(plan)),
        ("budget", describe.budget(plan)),
        ("speed", [*describe.prediction(plan), *(describe.prompt(first) if first else ())]),
    ]
    for name, lines in sections:
        console.print()
        console.print(heading(name))
        console.print(rows(lines))
        if name == "budget":
            console.print(f"the smallest that works: {least}", style="dim", soft_wrap=True)
        if name == "speed" and plan.predicted_pass_s is None:
            console.print("no prediction without measured rates", style="dim")
    for name, sentences in (("why", plan.reasons), ("notes", prepared.notes)):
        if sentences:
            console.print()
            console.print(heading(name))
            for sentence in sentences:
                console.print(Text(f"- {sentence}"), soft_wrap=not console.is_terminal)


def show_summary(console: Console, prepared: Prepared) -> None:
    """A few lines: homes, what fills each budget, the predicted speed, notes."""
    plan = prepared.plan
    console.print(title(prepared), soft_wrap=True)
    console.print(rows((f"  {label}", value, n) for label, value, n in describe.homes(plan)))
    for tier in sorted(plan.tiers, reverse=True):
        layout = plan.tiers[tier]
        parts = {
            "weights": layout.pinned_bytes,
            "ring": layout.ring_bytes,
            "expert slots": layout.slot_bytes * layout.slots,
            **plan.reserves.get(tier, {}),
        }
        listed = ", ".join(f"{name} {format_bytes(n)}" for name, n in _largest(parts))
        used = f"{format_bytes(plan.resident_bytes(tier))} of {format_bytes(plan.budgets[tier])}"
        line = Text.assemble(f"{_name(tier)} {used}: ", (listed, "dim"))
        console.print(_indented(line))
    if plan.predicted_pass_s is not None:
        rate = tokens_per_s(plan.predicted_pass_s)
        bound = "" if not plan.bound_pass_s else f", bound {format_rate(1 / plan.bound_pass_s)}"
        lane = f" set by {plan.bottleneck}" if plan.bottleneck else ""
        console.print(
            _indented(
                f"predicted {format_rate(rate['mid'])} tok/s ({format_rate(rate['low'])} to "
                f"{format_rate(rate['high'])}){bound}{lane}, "
                f"{format_bytes(plan.streamed_bytes_per_pass)} per token from disk"
            )
        )
    for sentence in plan.reasons:
        if sentence.startswith(WARNING):
            console.print(_indented(Text(sentence, "yellow")))
    for sentence in prepared.notes:
        console.print(_indented(Text.assemble(("note: ", "dim"), sentence)))


def tokens_per_s(pass_s: Interval) -> dict[str, float]:
    """The interval of speeds that an interval of times is."""
    return {"low": 1 / pass_s.high, "mid": 1 / pass_s.mid, "high": 1 / pass_s.low}


def plan_json(prepared: Prepared, first: Forecast | None = None) -> dict[str, Any]:
    """The plan's figures; sizes in bytes, times in seconds. ``first``: of the prompt."""
    plan, meta = prepared.plan, prepared.meta
    predicted = plan.predicted_pass_s
    homes: dict[str, dict[str, int]] = {}
    for block, home in plan.homes.items():
        entry = homes.setdefault(f"{plan.blocks[block].kind.value}s {home.value}", _nothing())
        entry["blocks"] += 1
        entry["bytes"] += plan.blocks[block].nbytes
    found = {
        "model": str(meta.directory),
        "model_type": meta.model.config.model_type,
        "dtype": str(meta.dtype).removeprefix("torch."),
        "weight_bytes": plan.weight_bytes,
        "context": prepared.options.context,
        "prompt_tokens": prepared.options.prompt_tokens or prepared.options.context,
        "compute": _key(plan.compute_tier),
        "streams": streams(plan),
        "homes": homes,
        "tiers": {_key(tier): _tier_json(plan, tier) for tier in plan.tiers},
        "minimum_bytes": {_key(tier): n for tier, n in _minimum(prepared)},
        "converted_bytes": prepared.recipes.convert_bytes(prepared.cut.blocks),
        "streamed_bytes_per_token": plan.streamed_bytes_per_pass,
        "kv": prepared.kv_json(),
        "prompt_cache": None if prepared.prompts is None else prepared.prompts.to_json(),
        "expected_hit_rate": plan.expected_hit_rate,
        "guesses": plan.guesses,
        "expert_policy": plan.expert_policy,
        "cpu": cpu_json(plan),
        "predicted_decode_tok_s": None if predicted is None else tokens_per_s(predicted),
        "bound_decode_tok_s": 1 / plan.bound_pass_s if plan.bound_pass_s else None,
        "lane_s": dict(plan.lane_s),
        "bottleneck": plan.bottleneck,
        "reasons": list(plan.reasons),
        "notes": list(prepared.notes),
    }
    return found if first is None else found | {"predicted_prompt": first.to_json()}


def cpu_json(plan: Plan) -> dict[str, Any] | None:
    """The CPU's part beside a device: most tokens of a pass whose experts it shares (0: none), and
    the dense blocks that it computes in RAM; None without ``--hybrid``."""
    if plan.split is None and plan.sites is None:
        return None
    dense = _nothing() | {"rows": 0}
    if plan.sites is not None:
        dense["rows"] = plan.sites.rows
        for block in plan.sites.blocks:
            dense["blocks"] += 1
            dense["bytes"] += plan.blocks[block].nbytes
    return {"expert_rows": 0 if plan.split is None else plan.split.rows, "dense": dense}


def _tier_json(plan: Plan, tier: Tier) -> dict[str, Any]:
    layout = plan.tiers[tier]
    reserves: Mapping[str, int] = plan.reserves.get(tier, {})
    return {
        "budget_bytes": plan.budgets[tier],
        "used_bytes": plan.resident_bytes(tier),
        "pinned_bytes": layout.pinned_bytes,
        "ring_bytes": layout.ring_bytes,
        "slots": layout.slots,
        "slot_bytes": layout.slot_bytes,
        "reserved_bytes": dict(reserves),
    }


def _minimum(prepared: Prepared) -> list[tuple[Tier, int]]:
    return sorted(prepared.minimum.items(), reverse=True)


def _largest(parts: Mapping[str, int], most: int = 5) -> list[tuple[str, int]]:
    """The parts that matter; the rest as one."""
    ranked = sorted(((k, n) for k, n in parts.items() if n), key=lambda part: -part[1])
    rest = sum(n for _, n in ranked[most:])
    return ranked[:most] + ([("other", rest)] if rest else [])


def _indented(line: str | Text) -> Padding:
    return Padding(line, (0, 0, 0, 2), expand=False)


def _nothing() -> dict[str, int]:
    return {"blocks": 0, "bytes": 0}


def _key(tier: Tier) -> str:
    return tier.name.lower()


def _name(tier: Tier) -> str:
    return "RAM" if tier is Tier.RAM else "device memory"
