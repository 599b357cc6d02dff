"""What of a budget is set aside for what no plan can count."""

from __future__ import annotations

from itertools import pairwise

from offload.models.options import LEAST_SLACK, MOST_SLACK, slack_bytes

MIB = 2**20


def test_slack() -> None:
    """A few MiB as soon as a budget has them, then a small share; a larger budget leaves more."""
    assert slack_bytes(0) == slack_bytes(5 * MIB) == LEAST_SLACK
    assert slack_bytes(15 * MIB) > 2.5 * MIB
    assert slack_bytes(100 * MIB) == 3 * MIB
    assert slack_bytes(640 * MIB) == 10 * MIB
    assert slack_bytes(64 * 2**30) == MOST_SLACK
    budgets = [n * MIB // 4 for n in range(400)]
    assert all(slack_bytes(a) <= slack_bytes(b) for a, b in pairwise(budgets))
    assert all(a - slack_bytes(a) < b - slack_bytes(b) for a, b in pairwise(budgets))
