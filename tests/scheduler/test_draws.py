"""Made-up routings are those that were asked for, and the same for the same seed."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from offload.scheduler.draws import Draws

EXPERTS = {g: [f"{g}#{e}" for e in range(16)] for g in ("a", "b")}
TOP_K = {"a": 2, "b": 4}


def uses(draws: Draws, group: str, passes: int = 500) -> Counter[str]:
    return Counter(b for i in range(passes) for b in draws(i, group))


def test_a_pass_uses_top_k_experts_in_their_order_and_asks_twice_get_the_same() -> None:
    draws = Draws(EXPERTS, TOP_K, 1.0, repeat=0.5, seed=3)
    again = Draws(EXPERTS, TOP_K, 1.0, repeat=0.5, seed=3)
    other = Draws(EXPERTS, TOP_K, 1.0, repeat=0.5, seed=4)
    seen = []
    for i in range(50):
        for group, k in TOP_K.items():
            chosen = draws(i, group)
            assert len(set(chosen)) == len(chosen) == k
            assert chosen == sorted(chosen, key=EXPERTS[group].index) == draws(i, group)
            seen.append(chosen)
    # Whatever is asked in between: layers do not share their luck.
    assert [again(i, g) for i in range(50) for g in TOP_K] == seen
    assert [again(i, g) for i in range(50) for g in TOP_K] == seen
    assert [other(i, g) for i in range(50) for g in TOP_K] != seen


def test_zipf_has_favourites_of_each_layers_own_and_even_has_none() -> None:
    zipf = Draws(EXPERTS, TOP_K, 1.2)
    counts = uses(zipf, "b")
    hot = [b for b in zipf.hottest() if b.startswith("b")]
    assert counts.most_common(1)[0][0] == hot[0]
    assert sum(counts[b] for b in hot[:4]) > 2.5 * sum(counts[b] for b in hot[-8:])
    assert hot[:4] != [b.replace("a", "b") for b in zipf.hottest() if b.startswith("a")][:4]
    even = uses(Draws(EXPERTS, TOP_K), "b")
    assert max(even.values()) < 1.4 * min(even.values())


def test_given_weights_hold_by_rank() -> None:
    counts = uses(Draws(EXPERTS, {"a": 2, "b": 2}, [8.0, 4.0, 1.0, *([0.0] * 13)]), "a")
    assert len(counts) == 3
    assert sorted(counts.values())[0] < sorted(counts.values())[1]


def test_repeats_bring_locality_in_time() -> None:
    def kept(repeat: float) -> int:
        draws = Draws(EXPERTS, TOP_K, repeat=repeat)
        runs = [set(draws(i, "b")) for i in range(200)]
        return sum(len(a & b) for a, b in pairwise(runs))

    assert kept(0.7) > 2 * kept(0.0)


def test_a_prompt_uses_what_its_tokens_use_together() -> None:
    assert len(Draws(EXPERTS, TOP_K, tokens=100)(0, "a")) == 16
    few = [1.0, 1.0, *([0.0] * 14)]
    assert len(Draws(EXPERTS, {"a": 2, "b": 2}, few, tokens=100)(0, "a")) == 2


@pytest.mark.parametrize(
    ("weights", "more", "said"),
    [
        ([1.0], {}, "1 weights for 16 experts"),
        ([1.0, *([0.0] * 15)], {}, "must be above zero"),
        (-1.0, {}, "exponent"),
        (0.0, {"repeat": 1.0}, "chance"),
        (0.0, {"tokens": 0}, "at least one token"),
    ],
)
def test_impossible_routings_are_refused(weights: object, more: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Draws(EXPERTS, TOP_K, weights, **more)  # type: ignore[arg-type]


def test_steep_weights_do_not_take_for_ever() -> None:
    assert len(Draws(EXPERTS, {"a": 8, "b": 8}, 10.0)(0, "a")) == 8
