"""``offload bench``: measurements that help to choose settings."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli import flags, output
from offload.errors import OffloadError

if TYPE_CHECKING:
    from offload.runtime.routings import RecordedRouting
    from offload.scheduler.replay import Replay

SHARES = "10,25,50,75"
LEARNT = 4
"""``pinned`` learns from the first one in so many passes, unless another routing is given."""

app = typer.Typer(
    help="Measurements that help to choose settings.",
    rich_markup_mode=None,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def shares(text: str) -> list[float]:
    """Percentages from a flag's text."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of percentages, e.g. {SHARES}") from None
    if not all(0 < share <= 100 for share in found):
        raise typer.BadParameter(f"{text!r}: shares are above 0 and up to 100 %")
    return list(dict.fromkeys(found))


@app.callback()
def _bench() -> None:
    """Measurements that help to choose settings."""


@app.command("cache")
def cache(
    trace: Annotated[
        Path,
        typer.Argument(metavar="TRACE", help="What 'offload generate --record-routing' wrote."),
    ],
    share: Annotated[
        Any,
        typer.Option(
            "--shares", parser=shares, metavar="LIST", help="Cache sizes, % of all experts."
        ),
    ] = SHARES,
    hot: Annotated[
        Path | None,
        typer.Option(
            "--routing",
            metavar="FILE",
            help="Another routing, from which 'pinned' learns what to keep. Default: the first "
            "quarter of TRACE.",
        ),
    ] = None,
    as_run: Annotated[
        bool,
        typer.Option(
            "--as-run", help="Replay a prompt in one pass, as it ran, not token by token."
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the hit rates, too, as PNG; needs matplotlib."),
    ] = None,
    json_file: flags.JsonFile = None,
) -> None:
    """Replay a recorded routing through every eviction policy.

    Hit rates for caches of several sizes, beside the optimum that knows the future (Belady's MIN).
    Reads no model and needs no weights.
    """
    output.check_targets({"--json": json_file, "--plot": plot}, reads=[trace, hot])
    if plot is not None:
        _check_plot()
    from offload.cli import console
    from offload.runtime.routings import RecordedRouting

    routing = RecordedRouting(trace, as_run=as_run)
    learnt = None
    if hot is not None:
        blocks = {
            layer: [f"{i}.{e}" for e in range(n)]
            for i, (layer, n) in enumerate(
                zip(routing.header.layers, routing.header.experts, strict=True)
            )
        }
        learnt = RecordedRouting(hot, blocks=blocks, as_run=as_run)
    with console.waiting("replaying") as done:
        report = replay_all(routing, share if isinstance(share, list) else shares(share), learnt)
        done()
    _show(report)
    if plot is not None:
        _draw(plot, report)
    output.write_json(json_file, report)


def replay_all(
    routing: RecordedRouting, percent: Sequence[float], learnt: RecordedRouting | None = None
) -> dict[str, Any]:
    """All policies at all shares in two readings of the routing.

    Returns:
        Plain data: ``results`` has for each share the slots, the optimum and the hit rate of each
        policy, as fractions.

    Raises:
        OffloadError: the routing holds no tokens.
        RoutingFileError: it is truncated or damaged.
    """
    from offload.scheduler.policies import make_policy
    from offload.scheduler.policy import DEFAULT, NAMES, kept_experts
    from offload.scheduler.replay import Future, Replay, hottest

    began = time.perf_counter()
    passes = 0
    used: dict[str, int] = {}  # the most experts that one pass of a layer uses

    def noted() -> Any:
        nonlocal passes
        for run in routing:
            passes += 1
            used[run.group] = max(used.get(run.group, 0), len(run.experts))
            yield run

    future = Future(noted())
    if not future.uses:
        raise OffloadError(f"the routing {routing.path} holds no tokens; record a longer run")
    learn = _first(routing, max(1, passes // LEARNT)) if learnt is None else learnt
    hot = hottest(learn, routing.experts)
    groups = routing.header.layers
    slots = {p: max(1, round(routing.experts * p / 100)) for p in percent}
    cycle = sum(used.values())
    runs: dict[tuple[float, str], Replay] = {
        (p, name): Replay(make_policy(name, groups, hot[: kept_experts(n, used)]), n)
        for p, n in slots.items()
        for name in NAMES
    }
    for run in routing:
        for each in runs.values():
            each.feed(run)
    results = []
    for p, n in slots.items():
        rates = {name: runs[p, name].tally.hit_rate for name in NAMES}
        results.append(
            {
                "share": n / routing.experts,
                "asked_percent": p,
                "slots": n,
                "below_one_token": n < cycle,
                "optimum": future.optimum(n).hit_rate,
                "policies": rates,
                "default_behind_best": max(rates.values()) - rates[DEFAULT],
            }
        )
    return {
        "benchmark": "cache",
        "trace": routing.path.name,
        "model": routing.header.model,
        "layers": len(groups),
        "experts": routing.experts,
        "passes": passes,
        "uses": future.uses,
        "by": "pass" if routing.as_run else "token",
        "one_token_uses": cycle,
        "pinned_learns_from": "the first quarter" if learnt is None else learnt.path.name,
        "default": DEFAULT,
        "results": results,
        "seconds": time.perf_counter() - began,
    }


def _first(routing: RecordedRouting, passes: int) -> Any:
    from itertools import islice

    return islice(iter(routing), passes)


def _show(report: Mapping[str, Any]) -> None:
    from offload.cli import console

    out = console.out()
    out.print(
        f"{report['model'] or report['trace']}: {report['uses']} uses of {report['experts']} "
        f"experts in {report['layers']} layers, {report['passes']} passes through one of them, "
        f"{report['by']} by {report['by']}",
        soft_wrap=True,
    )
    names = list(report["results"][0]["policies"])
    lines = []
    for row in report["results"]:
        rates = row["policies"]
        best = max(rates, key=lambda name: rates[name])
        lines.append(
            (
                f"{row['share']:.0%} ({row['slots']})",
                *(f"{rates[name]:.1%}" for name in names),
                f"{row['optimum']:.1%}",
                f"{row['optimum'] - rates[report['default']]:.1%}",
                f"{best} +{row['default_behind_best']:.1%}",
            )
        )
    heads = ("cache (slots)", *names, "optimum", "gap", "best")
    out.print(console.rows(lines, heads=heads))
    out.print(
        f"gap: from {report['default']}, the default, to the optimum; best: the best policy, and "
        f"its lead over the default; pinned learnt from {report['pinned_learns_from']}",
        style="dim",
        soft_wrap=True,
    )
    for row in report["results"]:
        if row["below_one_token"]:
            out.print(
                f"{row['slots']} slots are less than the {report['one_token_uses']} experts that "
                f"one {report['by']} uses: plain LRU cannot hit there",
                style="dim",
                soft_wrap=True,
            )


def _check_plot() -> None:
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise OffloadError("--plot needs matplotlib; pip install matplotlib, or drop --plot")


def _draw(path: Path, report: Mapping[str, Any]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")  # no window, whatever the environment says
    from matplotlib import pyplot as plt

    rows = sorted(report["results"], key=lambda row: row["share"])
    x = [100 * row["share"] for row in rows]
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    axes.plot(x, [100 * r["optimum"] for r in rows], "k--o", label="optimum (MIN)")
    for name in rows[0]["policies"]:
        wide = 2.5 if name == report["default"] else 1.2
        axes.plot(x, [100 * r["policies"][name] for r in rows], "-o", label=name, linewidth=wide)
    axes.plot(x, x, ":", color="grey", label="even routing")
    axes.set(xlabel="cache, % of the experts", ylabel="hits, % of uses", ylim=(0, 100))
    axes.legend()
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise OffloadError(f"--plot {path} cannot be written: {error.strerror or error}") from error
    finally:
        plt.close(figure)
