"""``offload plan --method``: fine-tuning on another machine, from a model's config alone."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.cli import console, libraries, machines, output
from offload.errors import OffloadError


def plan_training(
    model: str, hardware: str | None, ram: int | None, gpu: int | None, asked: Mapping[str, Any],
    json_file: Path | None, *, verbose: bool,
) -> None:  # fmt: skip
    """Show the plan.

    Args:
        asked: ``TrainOptions`` by name; None: its default.

    Raises:
        OffloadError: no machine is named, or there is no plan.
    """
    if hardware is None:
        raise OffloadError(
            "--method plans fine-tuning on a machine that is not here: name it with --hardware; "
            "here, 'offload finetune' shows its plan before it begins"
        )
    output.check_json_target(json_file)
    machine = machines.load(hardware)
    machines.check_fits(machine, ram, gpu)
    libraries.set_up(verbose=verbose)
    from rich.text import Text

    from offload.train.checks import check_updates
    from offload.train.options import TrainOptions
    from offload.train.outlook import outlook

    given = {
        name: value.value if isinstance(value, enum.Enum) else value
        for name, value in asked.items()
        if value is not None
    }
    # Nothing is read from there, nor written.
    options = TrainOptions(model=model, data=Path("data"), output=Path("output"), gpu=gpu, **given)
    check_updates(options)
    for flag, value in (("--head", options.head), ("--gpu-updates", options.gpu_updates)):
        if value != "auto" and gpu is None:
            raise OffloadError(
                f"{flag} {value} cannot take effect: no layers run on a card; drop it, or give "
                f"--gpu"
            )
    found = outlook(options, machine, ram or machines.default_ram(machine))
    for line in found.lines():
        console.out().print(Text(line), soft_wrap=True)
    output.write_json(json_file, found.to_json())


__all__ = ["plan_training"]
