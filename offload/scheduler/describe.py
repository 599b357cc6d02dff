"""A plan in the user's words: rows for a table, and plain lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from offload.blocks import BlockKind, Tier
from offload.scheduler.forecast import Forecast
from offload.scheduler.plan import Home, Plan
from offload.units import format_bytes, format_rate

_TIER = {Tier.DISK: "disk", Tier.RAM: "RAM", Tier.DEVICE: "device"}


class Row(NamedTuple):
    """One line of a table."""

    label: str
    value: str
    note: str = ""


def homes(plan: Plan) -> list[Row]:
    """Where the blocks of each kind live, with their bytes."""
    found: dict[tuple[BlockKind, str], list[int]] = {}
    for block, home in plan.homes.items():
        spec = plan.blocks[block]
        found.setdefault((spec.kind, _place(plan, block, home)), []).append(spec.nbytes)
    return [
        Row(f"{kind.value}s {place}", format_bytes(sum(sizes)), f"{len(sizes)} blocks")
        for (kind, place), sizes in sorted(
            found.items(), key=lambda f: (f[0][0].value, -sum(f[1]), f[0][1])
        )
    ]


def budget(plan: Plan) -> list[Row]:
    """What fills each tier's budget, line by line, and what is left of it."""
    rows: list[Row] = []
    for tier in sorted(plan.tiers, reverse=True):
        layout, name = plan.tiers[tier], _TIER[tier]
        pieces = [
            ("pinned", layout.pinned_bytes, f"{len(layout.pinned)} blocks"),
            ("ring", layout.ring_bytes, "streamed blocks on their way"),
            (
                "expert slots",
                layout.slot_bytes * layout.slots,
                f"{layout.slots} × {format_bytes(layout.slot_bytes)}",
            ),
            *((k, n, "reserved") for k, n in plan.reserves.get(tier, {}).items()),
        ]
        rows += [Row(f"{name}: {k}", format_bytes(n), note) for k, n, note in pieces if n]
        used, given = plan.resident_bytes(tier), plan.budgets[tier]
        rows.append(
            Row(f"{name}: total", format_bytes(used), f"{used / max(given, 1):.0%} of the budget")
        )
        rows.append(
            Row(f"{name}: budget", format_bytes(given), f"{format_bytes(given - used)} free")
        )
    return rows


def prediction(plan: Plan) -> list[Row]:
    """Speed as an interval, its bound, and the lane that sets it; empty without rates."""
    rows = []
    if plan.predicted_pass_s is not None:
        p = plan.predicted_pass_s
        rows.append(
            Row(
                "predicted",
                f"{_rate(p.mid)} tok/s",
                f"{_rate(p.high)} to {_rate(p.low)}, from the spread of the measured rates",
            )
        )
    if plan.bound_pass_s is not None:
        rows.append(Row("bound", f"{_rate(plan.bound_pass_s)} tok/s", "the busiest lane, no waits"))
    if plan.bottleneck is not None:
        lanes = ", ".join(f"{k} {s * 1e3:.3g} ms" for k, s in plan.lane_s.items())
        rows.append(Row("bottleneck", plan.bottleneck, f"per token: {lanes}"))
    rows.append(Row("read per token", format_bytes(plan.streamed_bytes_per_pass)))
    if plan.expected_hit_rate is not None:
        rows.append(Row("expert hits", f"{plan.expected_hit_rate:.1%}", "expected, even routing"))
    return rows


def prompt(found: Forecast) -> list[Row]:
    """The first token's time as an interval, and the lane that sets it."""
    p, speed = found.pass_s, found.tokens_per_s
    return [
        Row(
            "first token",
            f"{p.mid:.3g} s",
            f"{p.low:.3g} to {p.high:.3g}, a prompt of {found.tokens} tokens after loading",
        ),
        Row(
            "prompt",
            f"{format_rate(speed.mid)} tok/s",
            f"set by {found.bottleneck}: {lanes(found)}",
        ),
    ]


def lanes(found: Forecast) -> str:
    """Busy time and bytes of each lane, the busiest first."""
    ranked = sorted(found.lane_s.items(), key=lambda lane: -lane[1])
    return ", ".join(
        f"{name} {seconds(s)}"
        + (f" ({format_bytes(found.lane_bytes[name])})" if found.lane_bytes.get(name) else "")
        for name, s in ranked
    )


def seconds(s: float) -> str:
    """Three digits of seconds or milliseconds."""
    return f"{s:.3g} s" if s >= 1 else f"{s * 1e3:.3g} ms"


def describe(plan: Plan) -> list[str]:
    """The whole plan as lines of text: homes, budgets, prediction, reasons."""
    lines = [f"weights {format_bytes(plan.weight_bytes)}, computed in {_TIER[plan.compute_tier]}"]
    for title, rows in (
        ("homes", homes(plan)),
        ("budget", budget(plan)),
        ("speed", prediction(plan)),
    ):
        lines += [f"{title}:", *_columns(rows)]
    if plan.reasons:
        lines += ["why:", *(f"  - {reason}" for reason in plan.reasons)]
    return lines


def _place(plan: Plan, block: str, home: Home) -> str:
    if home is Home.PINNED:
        return f"pinned in {_TIER[plan.compute_tier]}"
    if home is Home.BY_ROW:
        return "read by row from disk"
    if plan.sites is not None and block in plan.sites.blocks:
        return f"in RAM, for up to {plan.sites.rows} tokens computed there by the CPU"
    below = "RAM" if block in plan.tiers[Tier.RAM].pinned else "disk"
    return f"cached from {below}" if home is Home.CACHED else f"streamed from {below}"


def _rate(seconds: float) -> str:
    return format_rate(1 / seconds) if seconds > 0 else "unlimited"


def _columns(rows: Sequence[Row]) -> list[str]:
    label = max((len(r.label) for r in rows), default=0)
    value = max((len(r.value) for r in rows), default=0)
    return [f"  {r.label:<{label}}  {r.value:>{value}}  {r.note}".rstrip() for r in rows]
