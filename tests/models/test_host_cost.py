"""What a product on the CPU beside a device costs besides itself, measured on that device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offload.models import host_cost, request
from offload.models.host_cost import product_overhead_s
from offload.models.options import Options
from offload.runtime.choice import Choice

FILE = Path(host_cost.__file__).parents[1] / "hardware" / "rtx4090-desktop.json"


def test_its_copies_are_in_it(tmp_path: Path) -> None:
    """4 KiB down and 4 KiB up at 0.4 MB/s take 20 ms, whatever threads take."""
    data = json.loads(FILE.read_text())
    for name in ("h2d", "d2h"):
        data[name] |= dict.fromkeys(("median", "low", "high"), 4096e2)
    file = tmp_path / "slow.json"
    file.write_text(json.dumps(data))
    slow = product_overhead_s(Choice(kind="sim", rates=file))
    assert slow >= 2 * 4096 / 4096e2
    assert 0 < product_overhead_s(Choice(kind="sim")) < slow


@pytest.mark.parametrize(("more", "want"), [({}, 2e-3), ({"elsewhere": True}, None)])
def test_it_is_asked_of_the_device_that_is_here(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], want: float | None
) -> None:
    asked: list[Choice] = []
    monkeypatch.setattr(
        request, "product_overhead_s", lambda choice: (asked.append(choice), 2e-3)[1]
    )
    options = Options(ram=1 << 30, gpu=1 << 30, device="sim", hybrid=True, **more)
    assert request._product_overhead_s(options, request.Tier.DEVICE) == want
    assert request._product_overhead_s(options, request.Tier.RAM) is None
    assert [c.kind for c in asked] == ["sim"] * (want is not None)
