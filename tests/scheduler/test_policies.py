"""Eviction policies against models of their definitions, and the rules they all obey."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from offload.scheduler.frequency import KeyHeap, Lfu, Mrs
from offload.scheduler.policies import make_policy
from offload.scheduler.policy import CYCLIC, DEFAULT, NAMES, SCORED, kept_experts
from offload.scheduler.recency import SWEEP, Clock, Lru, PinnedLru

GROUPS = ["g0", "g1", "g2"]
BLOCKS = [f"{g}e{i}" for g in GROUPS for i in range(4)]
KEPT = ["g0e0", "g1e1", "g1e2", "g2e3"]


def group_of(block: str) -> str:
    return block[:2]


class Model:
    """A definition, without any cleverness; ``victim`` returns every right answer."""

    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}
        self.time = 0

    def begin_pass(self, group: str, scores: list[dict[str, float]] | None) -> None:
        pass

    def touch(self, block: str) -> None:
        self.time += 1
        self.entries[block] = self.time

    def discard(self, block: str) -> None:
        self.entries.pop(block, None)

    def victim(self, can: set[str]) -> list[str]:
        return [min(can, key=lambda b: self.entries[b])]


class LruModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.entries = OrderedDict()

    def touch(self, block: str) -> None:
        self.entries[block] = None
        self.entries.move_to_end(block)

    def victim(self, can: set[str]) -> list[str]:
        return [next(b for b in self.entries if b in can)]


class ClockModel(Model):
    """A list, a bit for each, a hand; fewer entries than ``SWEEP``: the textbook's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.circle: list[str] = []

    def touch(self, block: str) -> None:
        if block not in self.entries:
            self.circle.append(block)
        self.entries[block] = block in self.entries

    def discard(self, block: str) -> None:
        if block in self.entries:
            self.circle.remove(block)
        super().discard(block)

    def victim(self, can: set[str]) -> list[str]:
        for _ in range(2 * len(self.circle) + 1):
            block = self.circle[0]
            if block in can:
                if not self.entries[block]:
                    return [block]
                self.entries[block] = False
            self.circle.append(self.circle.pop(0))
        raise AssertionError("a clock finds something in two turns")


class LfuModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.age = 0

    def touch(self, block: str) -> None:
        self.time += 1
        count = self.entries.get(block, (0, 0, 0))[2] + 1
        self.entries[block] = (self.age + count, self.time, count)

    def victim(self, can: set[str]) -> list[str]:
        found = min(can, key=lambda b: self.entries[b])
        self.age = self.entries[found][0]
        return [found]


class MrsModel(Model):
    """S of every expert, decayed with every token of its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.score = dict.fromkeys(BLOCKS, 0.0)
        self.blind: str | None = None
        self.fed: set[str] = set()

    def begin_pass(self, group: str, scores: list[dict[str, float]] | None) -> None:
        self.blind = group if scores is None else None
        self.fed = set()
        for row in [{}] if scores is None else scores:
            for b in BLOCKS:
                if group_of(b) == group:
                    self.score[b] = 0.5 * row.get(b, 0.0) + 0.5 * self.score[b]

    def touch(self, block: str) -> None:
        super().touch(block)
        if group_of(block) == self.blind and block not in self.fed:
            self.fed.add(block)
            self.score[block] += 0.5

    def victim(self, can: set[str]) -> list[str]:
        least = min(self.score[b] for b in can)
        return [b for b in can if self.score[b] <= least * (1 + 1e-9)]


class PinnedModel(LruModel):
    def victim(self, can: set[str]) -> list[str]:
        return super().victim({b for b in can if b not in KEPT} or can)


MODELS: Mapping[str, Callable[[], Model]] = {
    "lru": LruModel,
    "lfu": LfuModel,
    "clock": ClockModel,
    "mrs": MrsModel,
    "pinned": PinnedModel,
}

rows = st.lists(
    st.dictionaries(st.sampled_from(range(4)), st.sampled_from([0.0, 0.1, 0.25, 0.9]), max_size=4),
    min_size=1,
    max_size=3,
)
events = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.sampled_from(GROUPS), st.none() | rows),
        st.tuples(st.just("touch"), st.sampled_from(BLOCKS), st.none()),
        st.tuples(st.just("touch"), st.sampled_from(BLOCKS), st.none()),
        st.tuples(st.just("discard"), st.sampled_from(BLOCKS), st.none()),
        st.tuples(st.just("victim"), st.sets(st.sampled_from(BLOCKS), min_size=4), st.none()),
    ),
    max_size=80,
)


PAST_ONE_THAT_STAYS = [
    *(("touch", block, None) for block in ("g0e2", "g0e0", "g0e0", "g0e1", "g0e1")),
    ("victim", {"g0e0", "g0e3", "g1e0", "g0e1"}, None),
    ("victim", {"g0e0", "g0e2", "g0e3", "g0e1"}, None),
]
"""A clock's hand goes on from where it took something, after a full turn, too."""


@pytest.mark.parametrize("name", sorted(MODELS))
@given(events=events)
@example(events=PAST_ONE_THAT_STAYS)
def test_a_policy_is_its_definition(name: str, events: list[Any]) -> None:
    policy, model = make_policy(name, GROUPS, KEPT), MODELS[name]()
    for what, arg, scores in events:
        if what == "pass":
            named = scores and [{f"{arg}e{e}": s for e, s in row.items()} for row in scores]
            policy.begin_pass(arg, named)
            model.begin_pass(arg, named)
        elif what == "touch":
            policy.touch(arg, group_of(arg))
            model.touch(arg)
        elif what == "discard":
            policy.discard(arg)
            model.discard(arg)
        else:
            can = set(arg) & model.entries.keys()
            found = policy.victim(can.__contains__)
            if not can:
                assert found is None
                continue
            assert found in model.victim(can)
            assert found is not None
            policy.discard(found)
            model.discard(found)
        assert len(policy) == len(model.entries)
        assert all((b in policy) == (b in model.entries) for b in BLOCKS)
        if isinstance(policy, Mrs) and isinstance(model, MrsModel):
            for b in BLOCKS:
                assert policy.score(b, group_of(b)) == pytest.approx(model.score[b], rel=1e-9)


@pytest.mark.parametrize("name", NAMES)
@given(events=events, forbidden=st.sets(st.sampled_from(BLOCKS)))
def test_what_is_in_use_stays_and_something_else_goes(
    name: str, events: list[Any], forbidden: set[str]
) -> None:
    """And two policies that hear the same do the same."""
    first, second = make_policy(name, GROUPS, KEPT), make_policy(name, GROUPS, KEPT)
    there: set[str] = set()
    for what, arg, _ in events:
        for policy in (first, second):
            if what == "pass":
                policy.begin_pass(arg)
            elif what == "touch":
                policy.touch(arg, group_of(arg))
            elif what == "discard":
                policy.discard(arg)
        if what == "touch":
            there.add(arg)
        elif what == "discard":
            there.discard(arg)
        elif what == "victim":
            found = first.victim(lambda b: b not in forbidden)
            assert found == second.victim(lambda b: b not in forbidden)
            assert (found is None) == (there <= forbidden)
            if found is not None:
                assert found in there - forbidden
                for policy in (first, second):
                    policy.discard(found)
                there.discard(found)
        assert len(first) == len(there)


def test_names() -> None:
    assert DEFAULT in NAMES
    assert set(NAMES) > SCORED | CYCLIC
    with pytest.raises(ValueError, match="fifo"):
        make_policy("fifo", GROUPS)


def test_lfu_forgets_what_was_popular_once() -> None:
    lfu = Lfu()
    for _ in range(50):
        lfu.touch("old", "g0")
    gone = []
    for i in range(200):
        lfu.touch(f"new{i}", "g0")
        if len(lfu) > 4:
            victim = lfu.victim(lambda _: True)
            assert victim is not None
            lfu.discard(victim)
            gone.append(victim)
    assert gone[0] == "new0"
    assert "old" in gone
    assert gone.index("old") > 20


def test_the_clocks_hand_does_not_go_round_a_large_cache() -> None:
    clock, n = Clock(), 50 * SWEEP
    for _ in range(2):
        for i in range(n):
            clock.touch(str(i), "g0")
    asked: list[str] = []

    def can(block: str) -> bool:
        asked.append(block)
        return True

    assert clock.victim(can) == "0"
    assert len(asked) <= SWEEP + 1
    clock.discard("0")
    clock.touch("1", "g0")  # cleared, and used again: its second chance
    assert clock.victim(can) not in ("0", "1")


def test_what_is_kept_goes_last_and_only_if_it_must() -> None:
    pinned = PinnedLru({"a"})
    for block in ("a", "b", "c"):
        pinned.touch(block, "g0")
    assert pinned.victim(lambda _: True) == "b"
    assert pinned.victim(lambda b: b == "a") == "a"


def test_mrs_counts_every_token_and_gives_each_score_to_its_own_expert() -> None:
    """What the released code gets wrong: see the class."""
    mrs = Mrs(GROUPS)
    mrs.begin_pass("g0", [{"g0e3": 0.6, "g0e1": 0.3}, {"g0e0": 0.8, "g0e3": 0.1}])
    expected = {"g0e0": 0.4, "g0e1": 0.075, "g0e2": 0.0, "g0e3": 0.2}
    assert {b: mrs.score(b, "g0") for b in expected} == pytest.approx(expected)
    for block in expected:
        mrs.touch(block, "g0")
    order = []
    while (victim := mrs.victim(lambda _: True)) is not None:
        mrs.discard(victim)
        order.append(victim)
    assert order == ["g0e2", "g0e1", "g0e3", "g0e0"]


def test_mrs_does_not_run_out_of_numbers() -> None:
    mrs = Mrs(["g0", "g1"])
    for i in range(5000):
        mrs.begin_pass("g0", [{"a": 0.9, "b": 0.1 if i % 7 else 0.5}])
        mrs.touch("a", "g0")
        mrs.touch("b", "g0")
    mrs.touch("never scored", "g1")
    assert mrs.score("a", "g0") == pytest.approx(0.9)
    assert mrs.victim(lambda _: True) == "never scored"
    assert mrs.victim(lambda b: b != "never scored") == "b"
    with pytest.raises(ValueError, match="alpha"):
        Mrs(["g0"], alpha=1.0)


@pytest.mark.parametrize("name", NAMES)
def test_decisions_stay_short_with_many_entries(name: str) -> None:
    """Counted, not timed: entries looked at per decision, amortised and at worst."""
    rng = random.Random(0)
    groups = [f"g{i}" for i in range(16)]
    policy = make_policy(name, groups, [f"g0e{i}" for i in range(100)])
    blocks = [(g, f"{g}e{i}") for g in groups for i in range(256)]
    looks: list[int] = []
    for step in range(6000):
        if step % 8 == 0:
            policy.begin_pass(groups[step // 8 % 16])
        group, block = rng.choice(blocks)
        if block in policy or len(policy) < 2000:
            policy.touch(block, group)
            continue
        seen = 0

        def can(_: str) -> bool:
            nonlocal seen
            seen += 1
            return True

        victim = policy.victim(can)
        assert victim is not None
        looks.append(seen)
        policy.discard(victim)
        policy.touch(block, group)
    assert len(looks) > 1000
    assert sum(looks) / len(looks) < 8
    assert max(looks) <= 2 * SWEEP


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 20)), max_size=200))
def test_the_heap_does_not_grow_without_entries(moves: list[tuple[str, int]]) -> None:
    heap = KeyHeap()
    for use, (block, key) in enumerate(moves * 3, 1):
        if key == 0:
            heap.discard(block)
        elif block not in heap:
            heap.set(block, float(key), use)
        assert len(heap._heap) <= 2 * len(heap) + 65
        lowest = heap.lowest()
        assert (lowest is None) == (len(heap) == 0)


@pytest.mark.parametrize(
    ("slots", "top_k", "spare", "kept"),
    [
        (64, dict.fromkeys("abcdefgh", 2), 0, 32),
        (32, dict.fromkeys("abcdefgh", 2), 1, 16),
        (20, dict.fromkeys("abcdefgh", 2), 1, 16),  # LRU over 10 slots would hardly hit
        (8, dict.fromkeys("abcdefgh", 2), 1, 4),
        (3, dict.fromkeys("abcdefgh", 2), 0, 0),
        (0, {}, 0, 0),
    ],
)
def test_how_many_are_kept(slots: int, top_k: dict[str, int], spare: int, kept: int) -> None:
    assert kept_experts(slots, top_k, spare) == kept


def test_lru_is_an_ordered_dict_over_a_long_run() -> None:
    rng, lru, model = random.Random(1), Lru(), OrderedDict[str, None]()
    for _ in range(20_000):
        block = str(int(rng.paretovariate(0.6)) % 500)
        model[block] = None
        model.move_to_end(block)
        lru.touch(block, "g0")
        if len(model) > 100:
            gone, _ = model.popitem(last=False)
            assert lru.victim(lambda _: True) == gone
            lru.discard(gone)
    assert len(lru) == len(model) == 100
