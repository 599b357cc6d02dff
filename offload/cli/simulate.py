"""``offload simulate``: a model that is not here on a machine that is not here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offload.cli import flags, output
from offload.cli.simulated_routing import parse_routing
from offload.cli.tracing import check_picture


def simulate(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG",
            help="A config.json, or a directory with one. No weights are needed.",
            show_default=False,
        ),
    ],
    hardware: flags.HardwareName = None,
    quant: flags.Quant = None,
    ram: flags.Ram = None,
    gpu: flags.Gpu = None,
    disk_space: flags.DiskSpace = None,
    context: flags.Context = None,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens of the prompt.")
    ] = 512,
    tokens: Annotated[
        int, typer.Option("-n", "--tokens", min=2, metavar="N", help="Tokens that are decoded.")
    ] = 32,
    routing: Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help="Which experts tokens use: even, zipf:S (S about 1), zipf:S:R (each of the last "
            "token's stays with the chance R), or a JSON file with a weight for every expert of a "
            "layer.",
        ),
    ] = "zipf:1:0.3",
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of the routing.")] = 0,
    layers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep only so many layers.")
    ] = None,
    expert_policy: flags.ExpertPolicy = None,
    hybrid: flags.Hybrid = None,
    guess: flags.Guess = True,
    trace: flags.Trace = None,
    trace_plot: flags.TracePlot = None,
    json_file: flags.JsonFile = None,
    verbose: flags.Verbose = False,
) -> None:
    """Predict a model's speed from its config alone, by running the scheduler on a virtual clock.

    The same code that decides in a real run decides here: what is fetched, what makes room, who
    waits for whom. Prints the plan's budget, the lanes over time and the predicted speed of a
    prompt and of single tokens, with the lane that sets each. Computing is counted by the rates of
    the hardware; Python and attention over past tokens are not counted.
    """
    output.check_targets({"--json": json_file, "--trace": trace, "--trace-plot": trace_plot})
    check_picture(trace_plot)
    drawn = parse_routing(routing)
    from offload.cli import libraries

    libraries.set_up(verbose=verbose)
    from offload.cli.simulation import Wish, run_simulation

    run_simulation(
        Wish(
            config=config,
            hardware=hardware,
            quant=None if quant is None else quant.value,
            ram=ram,
            gpu=gpu,
            disk_space=disk_space,
            context=context,
            prompt_tokens=prompt_tokens,
            tokens=tokens,
            routing=drawn,
            seed=seed,
            layers=layers,
            expert_policy=expert_policy,
            hybrid=hybrid,
            guess=guess,
            trace=trace,
            picture=trace_plot,
            json_file=json_file,
        )
    )
