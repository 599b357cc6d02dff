"""``offload synth``: a random checkpoint, to try a model before downloading it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offload.cli import flags
from offload.cli.pack import Quant
from offload.errors import OffloadError


def synth(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG", help="A config.json, or a directory with one.", show_default=False
        ),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The directory to make.", show_default=False)
    ],
    dtype: Annotated[
        str | None,
        typer.Option(parser=flags.dtype, metavar="DTYPE", help="Default: the config's."),
    ] = None,
    shard_size: Annotated[
        int, typer.Option(parser=flags.size, metavar="SIZE", help="Largest file.")
    ] = "2GiB",  # type: ignore[assignment]  # the parser takes defaults, too
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of the random weights.")] = 0,
    layers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep only so many layers.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model that is there.")
    ] = False,
    quant: Annotated[
        Quant | None,
        typer.Option(help="Write a pack in this format, without a checkpoint first."),
    ] = None,
    verbose: flags.Verbose = False,
) -> None:
    """Write a random checkpoint in the shape and the names of a published one.

    Its speed and memory are those of the real model; its text is noise. It is written in pieces and
    appears only when it is complete.
    """
    from offload.cli import libraries

    libraries.set_up(verbose=verbose)
    if quant is not None:
        if dtype is not None or overwrite:
            flag = "--dtype" if dtype is not None else "--overwrite"
            raise OffloadError(f"{flag} cannot be combined with --quant; leave one of them out")
        from offload.cli.pack import run
        from offload.models.pack_synth import SynthSource

        source = SynthSource(config, quant=quant.value, seed=seed, layers=layers)
        run(source, out, quant.value, shard_size, None)
        return
    from offload.cli import console
    from offload.cli.imports import imported
    from offload.models.synth import SynthProgress
    from offload.models.synth import synth as write
    from offload.units import format_bytes, format_count

    imported()
    with console.byte_progress() as report:

        def progress(state: SynthProgress) -> None:
            report("write", state.bytes_done, state.bytes_total)

        done = write(
            config,
            out,
            dtype=dtype,
            shard_bytes=shard_size,
            seed=seed,
            layers=layers,
            progress=progress,
            overwrite=overwrite,
        )
    console.out().print(
        f"{done.path}: {done.architecture}, {format_count(done.parameters)} parameters in "
        f"{done.tensors} tensors, {format_bytes(done.weight_bytes)} of {done.dtype} in "
        f"{done.shards} file{'s' if done.shards > 1 else ''}, "
        f"{format_bytes(done.bytes_per_s)}/s",
        soft_wrap=True,
    )
