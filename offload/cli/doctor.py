"""``offload doctor``: what works here, what does not, and the command that changes it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offload.cli import flags, output


def doctor(
    disk: Annotated[
        Path, typer.Option(metavar="DIR", help="The directory that models would be read from.")
    ] = Path("."),
    warm: Annotated[
        bool,
        typer.Option(
            "--warm",
            help="Compile all CPU kernels for this machine now (minutes, once) and do nothing "
            "else; otherwise a model's are compiled when it is first used.",
        ),
    ] = False,
    json_file: flags.JsonFile = None,
    verbose: flags.Verbose = False,
) -> None:
    """Check this machine, each line with the command that fixes it.

    ✓ works, ! works but could be better, ✗ has to be fixed first. The exit code is 1 if there is
    a ✗, else 0.
    """
    output.check_json_target(json_file)
    from offload.cli import libraries

    libraries.set_up(verbose=verbose)
    if warm:
        from offload.cli import warming

        output.write_json(json_file, warming.warm())
        return
    from rich.text import Text

    from offload.cli import console
    from offload.cli.checks import Verdict, run_checks

    out = console.out()
    marks = {
        Verdict.GOOD: ("✓", "green"),
        Verdict.BETTER: ("!", "yellow"),
        Verdict.BROKEN: ("✗", "bold red"),
    }
    found = []
    for check in run_checks(disk):
        found.append(check)
        out.print(
            Text.assemble(marks[check.verdict], f" {check.name}: {check.detail}"), soft_wrap=True
        )
        if check.fix:
            out.print(Text.assemble(("    → ", "dim"), check.fix), soft_wrap=True)
    broken = [check.name for check in found if check.verdict is Verdict.BROKEN]
    out.print()
    out.print(
        f"{', '.join(broken)}: to be fixed first" if broken else "ready to run",
        style="bold red" if broken else "bold green",
        soft_wrap=True,
    )
    output.write_json(
        json_file,
        {"ok": not broken, "checks": [check.to_json() for check in found]},
    )
    if broken:
        raise typer.Exit(1)
