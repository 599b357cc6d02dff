"""Machines by name or file, and budgets that they can keep."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from offload.errors import OffloadError, PlanError
from offload.scheduler.hardware import Hardware
from offload.scheduler.hardware_file import parse
from offload.scheduler.plan import Plan
from offload.units import format_bytes

SHARE = 0.8
"""Of a machine's memory, what is planned with if no budget is given."""


def names() -> list[str]:
    """The machines that come with the package."""
    found = resources.files("offload").joinpath("hardware").iterdir()
    return sorted(f.name.removesuffix(".json") for f in found if f.name.endswith(".json"))


def load(name: str) -> Hardware:
    """A machine by the name of a shipped one, or by the path of a file.

    Raises:
        OffloadError: there is none, or the file is not as it should be; names the field.
    """
    shipped = names()
    if name in shipped:
        text = resources.files("offload").joinpath("hardware", f"{name}.json").read_text("utf-8")
        return parse(json.loads(text), name)
    path = Path(name).expanduser()
    if not path.is_file():
        raise OffloadError(
            f"--hardware {name}: there is no such file, and the machines known by name are "
            f"{', '.join(shipped)}; 'offload probe --json FILE' describes this one"
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise OffloadError(f"--hardware {name} cannot be read as JSON: {error}") from error
    return parse(data, f"--hardware {name}")


def default_ram(hardware: Hardware) -> int:
    """The RAM budget on a machine if none is given."""
    return int(hardware.ram_bytes * SHARE)


def check_fits(hardware: Hardware, ram: int | None, gpu: int | None) -> None:
    """Refuse budgets that a machine does not have.

    Raises:
        PlanError: says by how many bytes, and what to change.
    """
    if ram is not None and ram > hardware.ram_bytes:
        raise _too_large("--ram", ram, hardware.ram_bytes, f"RAM of {hardware.name}")
    if gpu is None:
        return
    if hardware.card is None:
        raise PlanError(f"--gpu {format_bytes(gpu)}: {hardware.name} has no card; drop --gpu")
    if gpu > hardware.card.memory_bytes:
        raise _too_large("--gpu", gpu, hardware.card.memory_bytes, f"of {hardware.card.name}")


def check_space(space: int | None, plan: Plan) -> None:
    """Refuse a model that the disk's budget does not hold.

    Raises:
        PlanError: says by how many bytes, and what to change.
    """
    if space is not None and plan.weight_bytes > space:
        need = plan.weight_bytes
        raise PlanError(
            f"the model takes {need} bytes ({format_bytes(need)}) of the disk, {need - space} "
            f"bytes more than --disk-space {format_bytes(space)}; raise it or use a smaller --quant"
        )


def _too_large(flag: str, asked: int, there: int, of: str) -> PlanError:
    return PlanError(
        f"{flag} {format_bytes(asked)} is {asked - there} bytes more than the {there} bytes "
        f"({format_bytes(there)}) {of}; lower {flag} to {there // 2**20}MiB or less"
    )
