"""``offload pack``: a model directory whose bytes are ready for the kernels."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli import flags
from offload.io.whole_file import expanded

if TYPE_CHECKING:
    from offload.io.pack_manifest import Manifest
    from offload.models.pack_plan import PackPlan
    from offload.models.pack_run import PackReport
    from offload.models.pack_source import Source


class Quant(enum.StrEnum):
    """The choices of ``--quant``."""

    NONE = "none"
    Q8 = "q8"
    Q4 = "q4"


BundleSize = Annotated[
    int,
    typer.Option(parser=flags.size, metavar="SIZE", help="Largest file."),
]


def pack(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="Directory with config.json and safetensors, a hub id in the local cache, or a "
            "GGUF file (of a split one: any part).",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The directory to make.", show_default=False)
    ],
    quant: Annotated[
        Quant,
        typer.Option(
            help="none: every bit as it is; q8: 8.5 bits per weight; q4: 4.5, head and embedding "
            "8.5. Norms, routers and biases always stay as they are. What is quantised already "
            "(most GGUF files) takes none only."
        ),
    ] = Quant.NONE,
    allow_requant: Annotated[
        bool,
        typer.Option(
            "--allow-requant",
            help="Requantise what a GGUF file has in types without kernels (Q2_K, Q3_K, IQ...): "
            "to 4.5 bits per weight, head and embedding to 8.5. The error is reported.",
        ),
    ] = False,
    bundle_size: BundleSize = "2GiB",  # type: ignore[assignment]  # the parser takes defaults, too
    json: flags.JsonFile = None,
    verbose: flags.Verbose = False,
) -> None:
    """Pack a model for fast reading: every expert one contiguous, checksummed range of a file.

    What is stopped (Ctrl-C, a kill, a full disk) continues where it was when the same command is
    given again. The directory counts as a model only when it is complete. Nothing that is there
    is ever replaced or deleted. The output is private to you.
    """
    from offload.cli import libraries, output

    libraries.set_up(verbose=verbose)
    output.check_json_target(json)
    from offload.models.pack_open import open_source

    opened = open_source(source, allow_requant=allow_requant)
    try:
        run(opened, out, quant.value, bundle_size, json)
    finally:
        opened.close()


def run(source: Source, out: Path, quant: str, bundle_bytes: int, json: Path | None) -> None:
    """Pack ``source``: the plan's line, progress, the result's lines."""
    from offload.cli import console, output
    from offload.cli.imports import imported
    from offload.cli.signals import Interrupted
    from offload.models.pack_plan import plan_pack
    from offload.models.pack_run import PackProgress
    from offload.models.pack_run import pack as write
    from offload.units import format_bytes

    imported()
    plan = plan_pack(source, quant, bundle_bytes=bundle_bytes)
    console.note(_plan_line(source, out, plan), label="plan")
    for line in (*plan.manifest.notes(), *_converted(plan.manifest)):
        console.note(line)
    last: PackProgress | None = None

    with console.byte_progress() as report:

        def progress(state: PackProgress) -> None:
            nonlocal last
            last = state
            before = state.bytes_before
            report("pack", state.bytes_done - before, state.bytes_total - before)

        try:
            done = write(source, out, plan=plan, progress=progress)
        except Interrupted:
            if last is not None:
                console.note(
                    f"{format_bytes(last.bytes_done)} of {format_bytes(last.bytes_total)} are "
                    "packed; the same command continues there"
                )
            raise
    for line in _result(done):
        console.out().print(line, soft_wrap=True)
    output.write_json(json, _as_json(done))


def _plan_line(source: Source, out: Path, plan: PackPlan) -> str:
    from offload.units import format_bytes

    free = _free(out)
    blocks = plan.manifest.blocks
    experts = sum(1 for b in blocks if b.group)
    what = f"{experts} experts and {len(blocks) - experts} other blocks"
    return (
        f"{source.id} -> {plan.manifest.quant}: {format_bytes(plan.bytes_in)} in, "
        f"{format_bytes(plan.bytes_out)} out ({what} in {len(plan.manifest.files)} files), "
        f"{format_bytes(free)} free"
    )


def _free(out: Path) -> int:
    import shutil

    folder = expanded(out).absolute()
    while not os.path.exists(folder):  # Path.exists raises for a name that is too long
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _converted(manifest: Manifest) -> list[str]:
    """One line for each reason why tensors are not in the source's format."""
    from offload.io.pack_manifest import by_reason

    return [f"{names}: {why}" for why, names in by_reason(manifest.converted)]


def _result(done: PackReport) -> list[str]:
    from offload.units import format_bytes

    if not done.bytes_written:
        lines = [f"{done.path}: complete already, {format_bytes(done.bytes_out)}"]
    else:
        lines = [
            f"{done.path}: {format_bytes(done.bytes_written)} written in {done.seconds:.1f} s "
            f"({done.bytes_per_s / 1e9:.2f} GB/s), {format_bytes(done.bytes_out)} in all"
        ]
    errors = done.manifest.errors
    if errors:
        shown = ", ".join(f"{kind} {100 * e.relative_rms:.2f} %" for kind, e in errors.items())
        rows = sum(e.rows for e in errors.values())
        lines.append(f"quantisation error, relative RMS over {rows} sampled rows: {shown}")
    return lines


def _as_json(done: PackReport) -> dict[str, Any]:
    manifest = done.manifest
    return {
        "path": str(done.path),
        "source": {
            "kind": manifest.source.kind,
            "path": manifest.source.path,
            "fingerprint": manifest.source.fingerprint,
        },
        "quant": manifest.quant,
        "bytes_in": done.bytes_in,
        "bytes_out": done.bytes_out,
        "bytes_written": done.bytes_written,
        "seconds": done.seconds,
        "bytes_per_s": done.bytes_per_s,
        "blocks": len(manifest.blocks),
        "files": len(manifest.files),
        "kept": dict(manifest.kept),
        "converted": dict(manifest.converted),
        "errors": {
            kind: {"relative_rms": e.relative_rms, "rows": e.rows}
            for kind, e in manifest.errors.items()
        },
    }
