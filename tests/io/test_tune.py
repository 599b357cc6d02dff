"""Measuring engines: the numbers come from real reads, the choice follows the rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.errors import StoreError
from offload.io.engines import DEFAULT_ENGINE
from offload.io.tune import Comparison, Rate, compare_engines, tune


def rate(engine: str, bytes_per_s: float) -> Rate:
    return Rate(
        engine=engine,
        queue_depth=4,
        request_bytes=4 << 20,
        bytes_per_s=bytes_per_s,
        low_bytes_per_s=bytes_per_s * 0.9,
        high_bytes_per_s=bytes_per_s * 1.2,
        rounds=3,
    )


@pytest.mark.parametrize(
    ("default", "other", "choice"),
    [(100, 90, "aiofiles"), (100, 105, "aiofiles"), (100, 106, "threads"), (100, 100, "aiofiles")],
)
def test_the_default_stays_unless_it_is_five_percent_slower(
    default: float, other: float, choice: str
) -> None:
    found = Comparison(
        default=rate("aiofiles", default), other=rate("threads", other), mode="direct"
    )
    assert found.choice == choice


def test_rate() -> None:
    assert rate("threads", 100).spread == pytest.approx(0.3)
    assert rate("threads", 100).buffer_bytes == 16 << 20


def test_compare(big_file: Path) -> None:
    big_file.write_bytes(bytes(1 << 20))
    found = compare_engines(
        big_file, queue_depth=2, request_bytes=65536, rounds=3, bytes_per_round=1 << 20
    )
    assert (found.default.engine, found.other.engine) == (DEFAULT_ENGINE, "threads")
    for r in (found.default, found.other):
        assert 0 < r.low_bytes_per_s <= r.bytes_per_s <= r.high_bytes_per_s
        assert r.rounds == 3
    assert found.mode in ("direct", "buffered")


def test_tune(big_file: Path) -> None:
    big_file.write_bytes(bytes(1 << 20))
    found = tune(
        big_file,
        queue_depths=(1, 2),
        request_sizes=(16384, 65536),
        rounds=2,
        bytes_per_round=1 << 18,
    )
    assert len(found.rates) == 8
    top = max(r.bytes_per_s for r in found.rates)
    assert found.best in found.rates
    assert found.best.bytes_per_s >= 0.97 * top
    good = [r for r in found.rates if r.bytes_per_s >= 0.97 * top]
    assert found.best.buffer_bytes == min(r.buffer_bytes for r in good)


def test_a_file_too_short_to_measure(big_file: Path) -> None:
    with pytest.raises(StoreError, match=r"20.1 KiB.*1.0 MiB"):
        compare_engines(big_file, request_bytes=1 << 20)
