"""A hardware file is read as it was written, and a wrong one is refused by the field's name."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_support import machine, rate

from offload.blocks import BlockKind, layout
from offload.errors import OffloadError
from offload.scheduler.costs import CostModel
from offload.scheduler.hardware import FLOP_PER_S, Card
from offload.scheduler.hardware_file import document, parse

SHIPPED = sorted((Path(__file__).resolve().parents[2] / "offload" / "hardware").glob("*.json"))

CARD = Card(
    name="card",
    memory_bytes=2**33,
    read=rate(1e12),
    matmul={"bfloat16": rate(1e14, unit=FLOP_PER_S)},
    gemv={"bfloat16": rate(8e11)},
    launch_s=5e-6,
)


def test_a_document_survives_json() -> None:
    for hardware in (machine(), replace(machine(), card=CARD), replace(machine(), h2d=None)):
        assert parse(json.loads(json.dumps(document(hardware))), "x") == hardware


@pytest.mark.parametrize("file", SHIPPED, ids=lambda f: f.stem)
def test_shipped_machines_are_valid_and_every_rate_says_where_it_comes_from(file: Path) -> None:
    data = json.loads(file.read_text())
    hardware = parse(data, file.name)
    assert (hardware.card is None) == (file.stem == "cpu-laptop")

    def rates(value: Any) -> list[Any]:
        if isinstance(value, dict) and "median" in value:
            return [value]
        return [r for v in value.values() for r in rates(v)] if isinstance(value, dict) else []

    assert rates(data)
    assert all(r["comment"] for r in rates(data))


def test_there_are_machines_to_choose_from() -> None:
    assert [f.stem for f in SHIPPED] == ["cpu-laptop", "h200", "rtx3060-laptop", "rtx4090-desktop"]


WRONG = [
    (("version",), 2, "version is 2"),
    (("sdd_read",), {}, "unknown field sdd_read"),
    (("ssd_read", "median"), -3.0, "ssd_read.median must be positive, got -3.0"),
    (("ssd_read", "low"), "fast", "ssd_read.low must be a number"),
    (("ssd_read", "mode"), 1, "unknown field ssd_read.mode"),
    (("ssd_read", "unit"), "FLOP/s", "ssd_read.unit must be B/s"),
    (("matmul", "bfloat16", "high"), 0, "matmul.bfloat16.high must be positive"),
    (("gemv",), {}, "gemv has no rate"),
    (("card", "memory"), 1, "unknown field card.memory"),
    (("card", "read", "median"), float("inf"), "card.read.median must be positive"),
    (("h2d",), None, "h2d and d2h are missing"),
    (("ssd_read", "high"), 10**400, "ssd_read.high must be positive, got 1000000"),
    (("read_beside",), 10**400, "too large"),
    (("ram_bytes",), 10**400, "ram_bytes must be below 2**63"),
    (("card", "memory_bytes"), 2**63, "card.memory_bytes must be below 2**63"),
    (("cores",), 2.5, "cores must be int"),
    (("read_beside",), 1.5, "shares of a rate"),
    (("memcpy",), None, "memcpy must be an object"),
]


@pytest.mark.parametrize(("path", "value", "said"), WRONG, ids=lambda x: str(x)[:40])
def test_a_wrong_file_is_refused_by_the_name_of_its_field(
    path: tuple[str, ...], value: Any, said: str
) -> None:
    data: Any = copy.deepcopy(document(replace(machine(), card=CARD)))
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(OffloadError, match=r"my\.json is no hardware file: ") as error:
        parse(data, "my.json")
    assert said in str(error.value)


@pytest.mark.parametrize("path", [("ssd_read",), ("name",), ("ssd_read", "n"), ("card", "gemv")])
def test_a_missing_field_is_named(path: tuple[str, ...]) -> None:
    data: Any = copy.deepcopy(document(replace(machine(), card=CARD)))
    at = data
    for key in path[:-1]:
        at = at[key]
    del at[path[-1]]
    with pytest.raises(OffloadError, match=f"the field {'.'.join(path)} is missing"):
        parse(data, "my.json")


def test_a_card_computes_at_its_own_rates() -> None:
    block = layout("b", BlockKind.WEIGHT, [("w", "bfloat16", (1000, 1000))])
    host = CostModel(hardware=replace(machine(), card=CARD))
    card = replace(host, on_card=True)
    assert card.weights_s([block]) == pytest.approx(2e6 / 8e11 + 5e-6)
    assert card.weights_s([block], 1000) == pytest.approx(2e9 / 1e14)
    assert host.weights_s([block]) == pytest.approx(2e6 / 20e9)
    with pytest.raises(ValueError, match="no card"):
        CostModel(hardware=machine(), on_card=True)


def test_packed_blocks_say_their_own_products() -> None:
    block = layout("b", BlockKind.WEIGHT, [("w", "uint8", (4096,))])
    costs = CostModel(hardware=machine(), flops={"b": 2 * 8192})
    assert costs.weights_s([block], 1e6) == pytest.approx(2 * 8192 * 1e6 / 1e12)
