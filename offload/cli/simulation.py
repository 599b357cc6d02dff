"""What ``offload simulate`` does, and how it shows it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from offload.blocks import Tier
from offload.cli import console, machines, output, planning, tracing
from offload.cli.console import heading, rows
from offload.cli.simulated_routing import Routing
from offload.cli.view import cpu_json
from offload.errors import OffloadError, PlanError
from offload.models.hybrid import ROWS as SPLIT_ROWS
from offload.models.shape import Shape, shape_of
from offload.scheduler import describe, forecast
from offload.scheduler.costs import CostModel
from offload.scheduler.draws import Draws
from offload.scheduler.forecast import Forecast
from offload.scheduler.hardware import Hardware
from offload.scheduler.plan import Home, Plan
from offload.scheduler.planner import make_plan
from offload.scheduler.policy import DEFAULT
from offload.scheduler.timeline import PASSES, Span, Timeline, arrange
from offload.units import format_bytes, format_count, format_rate

SETTLING = 16
"""Tokens before those that are measured: the experts in the slots become those that are used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The flags of ``simulate``."""

    config: Path
    hardware: str | None
    quant: str | None
    ram: int | None
    gpu: int | None
    disk_space: int | None
    context: int | None
    prompt_tokens: int
    tokens: int
    routing: Routing
    seed: int
    layers: int | None
    expert_policy: str | None
    hybrid: bool | None
    guess: bool
    trace: Path | None
    picture: Path | None
    json_file: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A simulation's outcome."""

    shape: Shape
    hardware: Hardware
    plan: Plan
    prompt: Forecast
    decode: Forecast
    prompt_time: Timeline
    decode_time: Timeline
    """The tokens that count, from 0."""
    seconds: float


def run_simulation(wish: Wish) -> None:
    """Simulate, show, write the files.

    Raises:
        OffloadError: anything for the user to change.
    """
    with console.waiting("simulating") as done:
        found = simulate(wish)
        done()
    show(console.out(), found, wish)
    title = f"simulated: {found.shape.name} on {found.hardware.name}"
    both = joined(found.prompt_time, found.decode_time)
    facts = summary(found, wish)
    if wish.trace is not None:
        tracing.write(both, wish.trace, None, title, facts)
    if wish.picture is not None:
        tracing.write(found.decode_time, None, wish.picture, title, facts)
    output.write_json(wish.json_file, facts)


def simulate(wish: Wish) -> Simulated:
    """Plan and run on a virtual clock.

    Raises:
        OffloadError: the config cannot be used, or budgets do not fit the model or the machine.
    """
    began = time.perf_counter()
    hardware = _hardware(wish)
    machines.check_fits(hardware, wish.ram, wish.gpu)
    if wish.expert_policy == "pinned":
        raise OffloadError(
            "the expert policy pinned learns from a recorded routing, and this one is made up; "
            "choose another --expert-policy"
        )
    context = wish.context
    if context is not None and wish.prompt_tokens + wish.tokens > context:
        raise OffloadError(
            f"{wish.prompt_tokens} tokens of prompt and {wish.tokens} of answer do not fit a "
            f"context of {context}; raise --context"
        )
    shape = shape_of(
        wish.config,
        quant=wish.quant,
        layers=wish.layers,
        prompt_tokens=wish.prompt_tokens,
        tokens=wish.tokens,
        context=context,
        hybrid=bool(wish.hybrid),
    )
    budgets = {Tier.RAM: wish.ram or machines.default_ram(hardware)}
    if wish.gpu is not None:
        budgets[Tier.DEVICE] = wish.gpu
    costs = CostModel(hardware=hardware, flops=shape.flops, on_card=wish.gpu is not None)
    request = shape.request(
        budgets,
        costs,
        expert_policy=wish.expert_policy or DEFAULT,
        guesses=wish.guess,
        split_rows=_split_rows(wish, shape),
    )
    try:
        plan = make_plan(request)
    except PlanError as error:
        raise PlanError(f"{shape.name}: {error}") from None
    machines.check_space(wish.disk_space, plan)
    spans: list[Span] = []

    def record(lane: str, name: str, start_s: float, end_s: float, nbytes: int) -> None:
        spans.append(Span(lane, name, start_s, end_s, nbytes))

    draws = _draws(shape, wish.routing, wish.seed, 1)
    decode = forecast.decode(
        plan,
        costs,
        passes=SETTLING + wish.tokens,
        skip=SETTLING,
        routing=draws,
        hot=draws.hottest(),
        record=record,
        seed=wish.seed,
    )
    decode_time = _measured(arrange(spans))
    spans.clear()
    prompt = forecast.prefill(
        plan,
        costs,
        wish.prompt_tokens,
        routing=_draws(shape, wish.routing, wish.seed, wish.prompt_tokens),
        record=record,
        seed=wish.seed,
    )
    return Simulated(
        shape=shape,
        hardware=hardware,
        plan=plan,
        prompt=prompt,
        decode=decode,
        prompt_time=arrange(spans),
        decode_time=decode_time,
        seconds=time.perf_counter() - began,
    )


def _split_rows(wish: Wish, shape: Shape) -> int:
    """As ``offload.models.hybrid.split_rows``, for a model without modules."""
    if not wish.hybrid:
        return 0
    if wish.gpu is None or not (shape.experts or shape.apart):
        what = (
            "this model has no experts, and no linear layers that could do with their weights "
            "elsewhere"
            if wish.gpu is not None
            else "there is no --gpu"
        )
        raise OffloadError(f"--hybrid cannot take effect: {what}; drop it")
    return SPLIT_ROWS if shape.experts else 0


def _hardware(wish: Wish) -> Hardware:
    if wish.hardware is not None:
        return machines.load(wish.hardware)
    folder = wish.config if wish.config.is_dir() else wish.config.parent
    found = planning.find_hardware(folder)
    if found is None:
        raise OffloadError(
            "nothing is known of this machine's rates; name one with --hardware, e.g. "
            f"{machines.names()[0]}"
        )
    return found


def _draws(shape: Shape, routing: Routing, seed: int, tokens: int) -> Draws:
    try:
        return Draws(
            shape.experts,
            shape.top_k,
            routing.weights,
            repeat=routing.repeat,
            tokens=tokens,
            seed=seed,
        )
    except ValueError as error:
        raise OffloadError(f"--routing {routing.said}: {error}") from error


def _measured(timeline: Timeline) -> Timeline:
    """Without the tokens that settle."""
    passes = timeline.lanes.get(PASSES, ())[SETTLING:]
    if not passes:
        return timeline
    return timeline.between(passes[0].start_s, passes[-1].end_s).shifted(-passes[0].start_s)


def joined(prompt: Timeline, decode: Timeline) -> Timeline:
    """A prompt and the tokens after it."""
    later = decode.shifted(prompt.end_s)
    names = [*prompt.lanes, *(n for n in later.lanes if n not in prompt.lanes)]
    return Timeline({n: [*prompt.lanes.get(n, ()), *later.lanes.get(n, ())] for n in names})


# -- showing ------------------------------------------------------------------------------


def show(out: Console, found: Simulated, wish: Wish) -> None:
    """The plan's budget, the lanes over time, the predictions."""
    shape, plan = found.shape, found.plan
    out.print(title(found), soft_wrap=True)
    out.print(
        f"on {found.hardware.name}; a virtual clock, {found.seconds:.1f} s of this one's",
        style="dim",
        soft_wrap=True,
    )
    sections: list[tuple[str, Sequence[tuple[str, ...]]]] = [
        ("what lives where", describe.homes(plan)),
        ("budget", describe.budget(plan)),
    ]
    for name, lines in sections:
        out.print()
        out.print(heading(name))
        out.print(rows(lines))
    if plan.sites is not None:
        out.print(plan.reasons[-1], soft_wrap=True, markup=False, highlight=False)
    for name, timeline, said in (
        (f"a prompt of {found.prompt.tokens} tokens", found.prompt_time, found.prompt),
        (f"{_shown(found.decode_time)} tokens", _first(found.decode_time), found.decode),
    ):
        out.print()
        out.print(heading(f"{name}, {describe.seconds(timeline.end_s - timeline.start_s)}"))
        for line in timeline.text():
            out.print(line, soft_wrap=True, markup=False, highlight=False)
        out.print(rows(prediction(said, timeline)))
    if shape.experts:
        out.print(
            f"routing {wish.routing.said}, seed {wish.seed}: made up; a real one is recorded with "
            "'offload generate --record-routing'",
            style="dim",
            soft_wrap=True,
        )


def title(found: Simulated) -> str:
    """What is simulated."""
    shape = found.shape
    where = "RAM"
    if found.plan.compute_tier is Tier.DEVICE and found.hardware.card is not None:
        where = found.hardware.card.name
    packed = f"{shape.quant} of {shape.dtype}" if shape.quant not in (None, "none") else shape.dtype
    return (
        f"{shape.name}: {shape.family}, {format_count(shape.parameters)} parameters, "
        f"{format_count(shape.active)} active, {packed}, {format_bytes(shape.weight_bytes)} of "
        f"weights, computed in {where}"
    )


def prediction(found: Forecast, timeline: Timeline) -> list[tuple[str, ...]]:
    """Speed, bottleneck, bytes, hits."""
    speed, p = found.tokens_per_s, found.pass_s
    what = "per token" if found.tokens == 1 else "first token after"
    lines: list[tuple[str, ...]] = [
        (
            "speed",
            f"{format_rate(speed.mid)} tok/s",
            f"{format_rate(speed.low)} to {format_rate(speed.high)}",
        ),
        (
            what,
            describe.seconds(p.mid),
            f"{describe.seconds(p.low)} to {describe.seconds(p.high)}, bound "
            f"{describe.seconds(found.bound_s)}",
        ),
        ("bottleneck", found.bottleneck, describe.lanes(found)),
        ("waiting", f"{found.stall_s / p.mid:.0%}", "of the time compute stands still"),
    ]
    if found.hit_rate is not None:
        lines.append(("expert hits", f"{found.hit_rate:.1%}", "above the disk when asked for"))
    hidden = timeline.hidden()
    if hidden is not None:
        lines.append(("hidden", f"{hidden:.0%}", "of the I/O time, compute works, too"))
    return lines


def summary(found: Simulated, wish: Wish) -> dict[str, Any]:
    """All of it as plain data; sizes in bytes, times in seconds."""
    shape, plan = found.shape, found.plan
    return {
        "model": shape.name,
        "model_type": shape.family,
        "dtype": shape.dtype,
        "quant": shape.quant,
        "parameters": shape.parameters,
        "active_parameters": shape.active,
        "weight_bytes": shape.weight_bytes,
        "hardware": found.hardware.name,
        "compute": plan.compute_tier.name.lower(),
        "context": shape.context,
        "routing": wish.routing.said,
        "seed": wish.seed,
        "tiers": {
            tier.name.lower(): {
                "budget_bytes": plan.budgets[tier],
                "used_bytes": plan.resident_bytes(tier),
                "pinned_bytes": layout.pinned_bytes,
                "ring_bytes": layout.ring_bytes,
                "slots": layout.slots,
                "slot_bytes": layout.slot_bytes,
            }
            for tier, layout in plan.tiers.items()
        },
        "streamed_blocks": sum(h is Home.STREAMED for h in plan.homes.values()),
        "cpu": cpu_json(plan),
        "reasons": list(plan.reasons),
        "prompt": found.prompt.to_json(),
        "decode": found.decode.to_json(),
    }


_TOKENS_SHOWN = 2


def _shown(timeline: Timeline) -> int:
    return min(_TOKENS_SHOWN, len(timeline.lanes.get(PASSES, ())))


def _first(timeline: Timeline) -> Timeline:
    """The first tokens: more are too narrow in a line of text."""
    passes = timeline.lanes.get(PASSES, ())[:_TOKENS_SHOWN]
    return timeline.between(passes[0].start_s, passes[-1].end_s) if passes else timeline
