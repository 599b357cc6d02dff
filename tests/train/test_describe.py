"""Numbers as the plan of a run says them."""

from __future__ import annotations

import pytest

from offload.units import format_count


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"), (999, "999"), (1000, "1k"), (116_736, "117k"), (999_499, "999k"),
        (999_500, "1M"), (5_655_168, "5.66M"), (12_000_000, "12M"), (1_235_814_400, "1.24B"),
        (70_553_706_496, "70.6B"), (1_026_408_232_448, "1.03T"),
    ],
)  # fmt: skip
def test_counts_have_three_digits(count: int, text: str) -> None:
    assert format_count(count) == text
