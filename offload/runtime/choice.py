"""Which device computes: from the name a user gives to a ``Device``.

Three kinds: ``cpu`` (two tiers), ``cuda`` (a card) and ``sim`` (a simulated accelerator).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from offload.errors import OffloadError, PlanError
from offload.io.whole_file import expanded
from offload.runtime import cuda_api
from offload.runtime.cuda_device import CudaDevice, pinning_refused
from offload.runtime.cuda_memory import check_budget
from offload.runtime.cuda_probe import on_card
from offload.runtime.device import Device
from offload.runtime.null_device import NullDevice
from offload.runtime.sim_device import SimDevice
from offload.scheduler.hardware import Hardware
from offload.scheduler.hardware_file import parse
from offload.units import format_bytes

NAMES = "auto, cpu, sim, sim:FILE, cuda, cuda:N"

SAFE_SHARE = 0.9
"""Of a card's free memory, what a model takes when no budget is given."""

LEAST_GPU = 1 << 20
"""A budget below this is a slip of the unit: no block of any model fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Attributes:
    kind: ``cpu``, ``sim`` or ``cuda``.
    index: of the card; None: the one torch calls ``cuda``.
    rates: of the simulated accelerator: a file that ``offload probe --json`` has written.
    """

    kind: str
    index: int | None = None
    rates: Path | None = None

    @property
    def name(self) -> str:
        """Of the device that computes, as torch calls it."""
        return str(cuda_api.open_card(self.card).device) if self.kind == "cuda" else "cpu"

    @property
    def card(self) -> int:
        """The number of the card."""
        return cuda_api.current_card() if self.index is None else self.index


def choose(name: str, gpu: int | None) -> Choice:
    """What ``name`` and a GPU budget of ``gpu`` bytes mean; ``auto`` with a budget is the card.

    Raises:
        OffloadError: an unknown name, a budget without a card, or a card that is not there.
        PlanError: a budget below ``LEAST_GPU``.
    """
    choice = _parse(name, gpu)
    if gpu is not None and choice.kind == "cpu":
        raise OffloadError(
            f"a GPU budget of {format_bytes(gpu)} and device {name!r} contradict each other; drop "
            f"one of them"
        )
    if gpu is not None and choice.kind == "cuda" and gpu < LEAST_GPU:
        raise PlanError(
            f"a GPU budget of {format_bytes(gpu)} holds no block of any model; sizes without a "
            f"unit are bytes"
        )
    if choice.kind == "cuda":
        cuda_api.check_card(choice.index or 0)
    return choice


def _parse(name: str, gpu: int | None) -> Choice:
    if name == "auto":
        return Choice(kind="cpu" if gpu is None else "cuda")
    if name in ("cpu", "sim", "cuda"):
        return Choice(kind=name)
    if name.startswith("sim:") and name != "sim:":
        return Choice(kind="sim", rates=expanded(Path(name.removeprefix("sim:"))))
    found = re.fullmatch(r"cuda:(\d{1,3})", name)
    if found is None:
        raise OffloadError(f"device {name!r} is not one of {NAMES}")
    return Choice(kind="cuda", index=int(found.group(1)))


def budget(choice: Choice, gpu: int | None, ram: int) -> int | None:
    """Bytes of the device tier: as asked for, or what is safe; None if there is no such tier.

    Raises:
        PlanError: the card cannot give that much.
    """
    if choice.kind == "cpu":
        return None
    if choice.kind == "sim":
        return gpu if gpu is not None else ram
    api = cuda_api.open_card(choice.card)
    if gpu is None:
        return int(api.room().free * SAFE_SHARE)
    check_budget(gpu, api)
    return gpu


def warm_up(choice: Choice) -> None:
    """Have the process weigh what it will with the card in use: before budgets count."""
    if choice.kind == "cuda":
        cuda_api.open_card(choice.card).warm_up()


def flash(choice: Choice) -> bool:
    """Whether flash attention runs where the choice computes, if that is a card."""
    return choice.kind == "cuda" and cuda_api.open_card(choice.card).flash


def release_cached(choice: Choice) -> None:
    """Have torch's allocator give back what it keeps of a card's memory that was freed."""
    if choice.kind == "cuda":
        cuda_api.open_card(choice.card).release_cached()


STAGED = (
    "the system pins no host memory ({why}): copies to the card go through a small pinned buffer, "
    "each at the cost of a core's time"
)


def staged_copies(choice: Choice) -> str | None:
    """Why copies to the device have to be staged, if the system pins no memory."""
    if choice.kind != "cuda":
        return None
    return pinning_refused(cuda_api.open_card(choice.card))


def make_device(choice: Choice, capacity: int | None, seed: int = 0) -> Device:
    """The device; ``capacity``: bytes that its arena may have.

    Raises:
        OffloadError: the file of rates cannot be used.
    """
    if choice.kind == "cuda":
        return CudaDevice(capacity, choice.card)
    if choice.kind == "sim":
        up, down = (None, None) if choice.rates is None else link_rates(choice.rates)
        # The device's budget covers activations too; its arena can be no larger.
        return SimDevice(capacity or 2**40, up, down, seed=seed)
    return NullDevice()


def with_card(choice: Choice, hardware: Hardware) -> Hardware:
    """The machine with the card that is meant in it, measured; as it is if none is."""
    if choice.kind != "cuda":
        return hardware
    device = CudaDevice(None, choice.card)
    try:
        return on_card(hardware, device)
    finally:
        device.close()


def link_rates(file: Path) -> tuple[float, float]:
    """Bytes per second to a card and back, from a hardware file.

    Raises:
        OffloadError: it cannot be read, is none, or is of a machine without a card.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise OffloadError(f"the rates of a simulated device: {file}: {error}") from error
    hardware = parse(data, str(file))
    if hardware.h2d is None or hardware.d2h is None:
        raise OffloadError(
            f"{file} is of a machine without a card ({hardware.name}): h2d and d2h are missing"
        )
    return hardware.h2d.median, hardware.d2h.median


__all__ = [
    "NAMES", "STAGED", "Choice", "budget", "choose", "flash", "link_rates", "make_device",
    "release_cached", "staged_copies", "warm_up", "with_card",
]  # fmt: skip
