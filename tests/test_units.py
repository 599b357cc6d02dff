"""Sizes and values in messages."""

from __future__ import annotations

import pytest

from offload.units import brief


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("short", "'short'"),
        ("x" * 100, "'" + "x" * 17 + "…'"),
        (list(range(50)), "[0, 1, 2, 3, 4, 5,…]"),
        ({"a": "b" * 100}, "{'a': 'bbbbbbbbbbb…}"),
        (10**50, "1" + 18 * "0" + "…"),
    ],
)
def test_a_value_that_is_cut_still_ends(value: object, said: str) -> None:
    assert brief(value, 20) == said
    assert len(said) <= 20
