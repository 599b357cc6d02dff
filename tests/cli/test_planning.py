"""What is done before a plan is made."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from offload.cli import planning
from offload.models import workspace
from offload.models.options import Options


def test_products_are_limited_before_a_probe_multiplies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch reads the limits at its first product: 16 MiB over a budget of 25 on the first use."""
    for name in workspace._VARIABLES:
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)
    limited: list[bool] = []

    def probes(_: Path) -> None:
        limited.extend(name in os.environ for name in workspace._VARIABLES)

    class Planned(Exception):
        pass

    def plans(*_: Any) -> None:
        raise Planned

    monkeypatch.setattr(planning, "find_hardware", probes)
    monkeypatch.setattr(planning, "prepare", plans)
    wanted = planning.Wanted(
        ram=2**24, gpu=None, device="auto", disk=None, dtype=None, threads=None, predict=True,
        guess=True,
    )  # fmt: skip
    with pytest.raises(Planned):
        planning.make_plan(tmp_path, wanted, Options(ram=2**24), prompt_tokens=1, context=2)
    assert limited
    assert all(limited)
