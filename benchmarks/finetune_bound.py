"""The least time of a training step on a machine, and what a run's records say. Numbers only.

``T_min`` is the sum over the two phases of a step of the phase's busiest lane:

* *forward*, with the deferred updates of the step before: the layers' products; the states that
  these updates read and write; Adam over memory;
* *backward*, with the loss: the head's products (logits twice, the gradients of the hidden state
  and of the head), every layer backward, and before that again, unless it has kept what it
  computed; the weights that are read again; gradients that are spilled. Without clipping the
  updates are in this phase. Inputs that are spilled are written in forward and read in backward.

Computing is counted twice: as the model's own layer does it alone, forward and backward, with
nothing else on the machine (an exact engine runs these operations and no others), and as its
products alone at the rate of products (``t_min_products``): what would be left if attention, norms
and activations cost nothing.

What one layer takes to fill and to drain a pipeline is not in it: the bound is a little lower than
any schedule can reach. Bytes are the run's own; bytes per parameter are reported beside the bound,
so that needless traffic shows.

Legend: T tokens, O and I a linear layer's outputs and inputs, V vocabulary.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

PHASES = ("forward", "backward")

ADAM_BYTES = {"fp32": 28.0, "bf16": 14.0, "8bit": 16.0 + 4 / 64}
"""Per parameter, read and written by one update of a bfloat16 model; see ``optimizer.py``."""

PRODUCTS, LAYERS = "products", "layers"
"""Lanes of computing: products alone, and layers as the model computes them."""

FORWARD, INPUT, WEIGHT = "x w'", "dy w", "dy' x"
"""The three products of a linear layer: outputs, gradients of inputs, gradients of weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What a dense model multiplies."""

    linears: Mapping[tuple[int, int], int]
    """(O, I) of the layers' matrices -> how many there are."""
    head: tuple[int, int]
    """(V, I)."""
    attention: int
    """Layers times heads times the width of a head."""
    parameters: int
    layers: int = 0

    @property
    def products(self) -> int:
        """Parameters of the layers' matrices."""
        return sum(o * i * n for (o, i), n in self.linears.items())


def flops(model: Model, tokens: int, kept: float = 0.0) -> dict[str, dict[str, float]]:
    """Floating-point operations of each phase, by the kind of product.

    Attention over the tokens of one causal sequence: two products of T x T / 2 forward, and two
    and a half times that backward (scores again, and four products). Backward runs layers forward
    once more, but for the share that has ``kept`` what it computed.
    """
    again = 1.0 - kept
    layers = 2.0 * tokens * model.products
    head = head_flops(model, tokens)["backward"]
    attention = 2.0 * tokens * tokens * model.attention
    return {
        "forward": {FORWARD: layers + attention},
        "backward": {
            FORWARD: again * layers + head[FORWARD] + (2.5 + again) * attention,
            INPUT: layers + head[INPUT],
            WEIGHT: layers + head[WEIGHT],
        },
    }


def head_flops(model: Model, tokens: int) -> dict[str, dict[str, float]]:
    """The head's part of them: logits twice, for they are never kept."""
    once = 2.0 * tokens * model.head[0] * model.head[1]
    return {"forward": {}, "backward": {FORWARD: 2 * once, INPUT: once, WEIGHT: once}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Homes:
    """What a plan moves between RAM and the disk in a step, in bytes."""

    states_read: int
    """By updates; weights that are read to be computed with are not among them."""
    states_written: int
    spilled: int
    """Gradients, written and read again."""
    inputs: int = 0
    """Units' inputs, written in forward and read again in backward."""
    kept_layers: int = 0
    """Layers that keep what they computed and are not run again."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes between RAM and the disk."""

    read: float
    written: float

    @property
    def total(self) -> float:
        return self.read + self.written

    @property
    def read_share(self) -> float:
        return self.read / self.total if self.total else 1.0


def phase_traffic(
    homes: Homes, read: float, written: float, *, clipping: bool
) -> dict[str, Traffic]:
    """Who of the phases moves a step's ``read`` and ``written`` bytes.

    States are where the updates are, and spilled gradients are read there. All other reads are
    weights: backward's alone with deferred updates, which leave behind what forward computes
    with; else half of them are forward's.
    """
    states_written = max(0.0, written - homes.spilled)
    weights = max(0.0, read - homes.states_read - homes.spilled - homes.inputs)
    states = min(homes.states_read, read)
    if clipping:
        return {
            "forward": Traffic(states + homes.spilled, states_written),
            "backward": Traffic(weights + homes.inputs, homes.spilled),
        }
    return {
        "forward": Traffic(weights / 2, homes.inputs),
        "backward": Traffic(
            weights / 2 + states + homes.spilled + homes.inputs, max(0.0, written - homes.inputs)
        ),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a machine does, measured around a run."""

    products: Mapping[str, float]
    """Flops per second of the layers' products, by kind."""
    dram: float
    """Bytes per second of a stream in place."""
    ssd: Mapping[float, float]
    """Share of reads among the bytes -> bytes per second, both directions together."""
    layer: Mapping[str, float] | None = None
    """Seconds of one layer alone: "forward", and "both" with backward. None: not measured."""


def rate_at(curve: Mapping[float, float], share: float) -> float:
    """Bytes per second at a share of reads, between two that were measured.

    Seconds per byte are what is interpolated: they add up where rates do not.
    """
    knots = sorted(curve)
    if share <= knots[0]:
        return curve[knots[0]]
    for low, high in pairwise(knots):
        if share <= high:
            along = (share - low) / (high - low)
            return 1 / ((1 - along) / curve[low] + along / curve[high])
    return curve[knots[-1]]


def mean_rates(measured: Sequence[Rates]) -> Rates:
    """The rates at which work that is split evenly over all of ``measured`` would be done."""

    def mean(values: list[float]) -> float:
        return statistics.harmonic_mean(values)

    return Rates(
        products={k: mean([r.products[k] for r in measured]) for k in measured[0].products},
        dram=mean([r.dram for r in measured]),
        ssd={k: mean([r.ssd[k] for r in measured]) for k in measured[0].ssd},
        layer=None
        if any(r.layer is None for r in measured)
        else {
            k: statistics.fmean(r.layer[k] for r in measured if r.layer)
            for k in ("forward", "both")
        },
    )


def lanes(
    model: Model, tokens: int, states: str, traffic: Mapping[str, Traffic], rates: Rates, *,
    clipping: bool, kept_layers: int = 0,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Seconds that each phase's lanes are busy at the machine's rates."""
    work = flops(model, tokens, kept_layers / max(1, model.layers))
    out: dict[str, dict[str, float]] = {}
    for phase in PHASES:
        moved = traffic[phase]
        updates = (phase == "forward") == clipping
        out[phase] = {
            PRODUCTS: sum(n / rates.products[kind] for kind, n in work[phase].items()),
            "ssd": moved.total / rate_at(rates.ssd, moved.read_share),
            "adam": ADAM_BYTES[states] * model.parameters / rates.dram if updates else 0.0,
        }
        if rates.layer is not None:
            head = head_flops(model, tokens)[phase]
            alone = rates.layer["forward" if phase == "forward" else "both"]
            kept = kept_layers if phase == "backward" else 0
            out[phase][LAYERS] = (
                model.layers * alone
                - kept * rates.layer["forward"]
                + sum(n / rates.products[kind] for kind, n in head.items())
            )
    return out


def t_min(busy: Mapping[str, Mapping[str, float]]) -> float:
    """The sum of the phases' busiest lanes."""
    return sum(max(phase.values()) for phase in busy.values())


def without_layers(busy: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """The lanes with products as all of computing."""
    return {phase: {k: v for k, v in lane.items() if k != LAYERS} for phase, lane in busy.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """Medians over the steps of a run that are like all later ones."""

    steps: int
    seconds: float
    forward_s: float
    backward_s: float
    waiting_s: float
    """Of the training thread: for weights and for updates."""
    ssd_busy_s: float
    update_busy_s: float
    read: float
    written: float
    tokens: float


def steady(events: Sequence[Mapping[str, Any]], skip: int = 2) -> Steady:
    """What the ``step`` events of a run's metrics say, without the first ``skip`` steps.

    The first has no updates to do yet, and those of the second read no states.

    Raises:
        ValueError: there are no more steps than that.
    """
    steps = [e for e in events if e["event"] == "step"][skip:]
    if not steps:
        raise ValueError(f"the run has no more than {skip} steps: nothing is steady yet")

    def median(get: Any) -> float:
        return float(statistics.median(get(e) for e in steps))

    return Steady(
        steps=len(steps),
        seconds=median(lambda e: e["seconds"]),
        forward_s=median(lambda e: e["phases"]["forward"]),
        backward_s=median(lambda e: e["phases"]["backward"]),
        waiting_s=median(lambda e: e["seconds"] - e["lanes"]["compute"]),
        ssd_busy_s=median(lambda e: e["lanes"]["ssd"]),
        update_busy_s=median(lambda e: e["lanes"]["update"]),
        read=median(lambda e: e["read_bytes"]),
        written=median(lambda e: e["written_bytes"]),
        tokens=median(lambda e: e["tokens"]),
    )


def always_clipped(events: Sequence[Mapping[str, Any]], most: float) -> bool:
    """Whether every step's norm was above ``most``, so that clipping changed it."""
    norms = [e["grad_norm"] for e in events if e["event"] == "step"]
    return bool(norms) and all(norm is not None and norm > most for norm in norms)


def judge(
    model: Model, states: str, homes: Homes, found: Steady, rates: Rates, *, clipping: bool
) -> dict[str, Any]:
    """A run beside its bound."""
    moved = phase_traffic(homes, found.read, found.written, clipping=clipping)
    busy = lanes(
        model, int(found.tokens), states, moved, rates, clipping=clipping,
        kept_layers=homes.kept_layers,
    )  # fmt: skip
    bound = t_min(busy)
    parameters = model.parameters
    return {
        **asdict(found),
        "t_min": bound,
        "fraction": bound / found.seconds,
        "t_min_products": (least := t_min(without_layers(busy))),
        "fraction_products": least / found.seconds,
        "bound_lanes": busy,
        "busiest": {phase: max(lane, key=lambda name: lane[name]) for phase, lane in busy.items()},
        "read_share": {phase: t.read_share for phase, t in moved.items()},
        "ssd_busy_share": found.ssd_busy_s / found.seconds,
        "read_per_parameter": found.read / parameters,
        "written_per_parameter": found.written / parameters,
        "tok_s": found.tokens / found.seconds,
    }


def exposed_optimizer(points: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Seconds that updates add to each point's steps, as far as its own run or its twin can tell.

    With clipping: how much longer forward takes than in the run's first step, which has no updates
    to do. Without: how much longer backward takes than in the same run with clipping. None where
    there is no such run.
    """
    same = ("ram_bytes", "tokens_asked", "states")

    def key(point: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(point[name] for name in same)

    twins = {key(p): p for p in points if p["clipping"] and "error" not in p}
    out: list[float | None] = []
    for point in points:
        if "error" in point:
            out.append(None)
        elif point["clipping"]:
            out.append(point["forward_s"] - point["first_forward_s"])
        else:
            twin = twins.get(key(point))
            out.append(point["backward_s"] - twin["backward_s"] if twin else None)
    return out
