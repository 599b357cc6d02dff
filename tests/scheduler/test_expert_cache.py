"""``ExpertCache``: its documented rule, and what the rule is worth against LRU and Belady."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.scheduler.expert_cache import ExpertCache

GROUPS = ["g0", "g1", "g2"]
BLOCKS = [f"{g}e{i}" for g in GROUPS for i in range(4)]


class Rule:
    """The documented rule by brute force: the highest age in passes of the entry's own layer,
    then the layer that runs furthest in the future, then the least recent use."""

    def __init__(self) -> None:
        self.passes = dict.fromkeys(GROUPS, 0)
        self.entries: dict[str, tuple[str, int, int]] = {}  # group, its pass, clock of the use
        self.now, self.clock = 0, 0

    def victim(self, evictable: set[str]) -> str | None:
        def key(b: str) -> tuple[int, int, int]:
            g, last, clock = self.entries[b]
            until_run = (GROUPS.index(g) - self.now - 1) % len(GROUPS)
            return self.passes[g] - last, until_run, -clock

        return max((b for b in self.entries if b in evictable), key=key, default=None)


events = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.sampled_from(GROUPS)),
        st.tuples(st.just("touch"), st.sampled_from(BLOCKS)),
        st.tuples(st.just("touch"), st.sampled_from(BLOCKS)),
        st.tuples(st.just("discard"), st.sampled_from(BLOCKS)),
        st.tuples(st.just("victim"), st.sets(st.sampled_from(BLOCKS), min_size=6)),
    ),
    max_size=80,
)


@given(events)
def test_rule(events: list[tuple[str, str | set[str]]]) -> None:
    cache, rule = ExpertCache(GROUPS), Rule()
    for what, arg in events:
        rule.clock += 1
        if what == "pass":
            cache.begin_pass(arg)
            rule.passes[arg] += 1
            rule.now = GROUPS.index(arg)
        elif what == "touch":
            group = arg[:2]
            cache.touch(arg, group)
            rule.entries[arg] = (group, rule.passes[group], rule.clock)
        elif what == "discard":
            cache.discard(arg)
            rule.entries.pop(arg, None)
        else:
            assert cache.victim(arg.__contains__) == rule.victim(arg)
        assert len(cache) == len(rule.entries)
        assert all((b in cache) == (b in rule.entries) for b in BLOCKS)


def test_a_block_that_changes_its_layer_is_in_one_only() -> None:
    cache = ExpertCache(GROUPS)
    cache.touch("x", "g0")
    cache.touch("x", "g1")
    cache.discard("x")
    assert len(cache) == 0
    assert cache.victim(lambda _: True) is None


# -- what the rule is worth: whole traces of (layer, experts wanted) ---------------------------

Trace = list[tuple[int, list[int]]]  # layer, experts (numbered across all layers)


def uniform(layers: int, experts: int, k: int, tokens: int, seed: int) -> Trace:
    rng = random.Random(seed)
    return [
        (layer, [layer * experts + e for e in rng.sample(range(experts), k)])
        for _ in range(tokens)
        for layer in range(layers)
    ]


def zipf(layers: int, experts: int, k: int, tokens: int, seed: int, power: float) -> Trace:
    """Some experts of each layer are more popular than others."""
    rng = random.Random(seed)
    orders = [rng.sample(range(experts), experts) for _ in range(layers)]
    weights = [1 / (i + 1) ** power for i in range(experts)]
    trace = []
    for _ in range(tokens):
        for layer in range(layers):
            # Efraimidis-Spirakis: a weighted sample without replacement.
            keyed = sorted(range(experts), key=lambda i: -(rng.random() ** (1 / weights[i])))
            trace.append((layer, [layer * experts + orders[layer][i] for i in keyed[:k]]))
    return trace


def markov(layers: int, experts: int, k: int, tokens: int, seed: int, stay: float) -> Trace:
    """Each expert of a layer is kept for the next token with probability ``stay``."""
    rng = random.Random(seed)
    now = [rng.sample(range(experts), k) for _ in range(layers)]
    trace = []
    for _ in range(tokens):
        for layer in range(layers):
            kept = [e for e in now[layer] if rng.random() < stay]
            others = [e for e in range(experts) if e not in kept]
            now[layer] = kept + rng.sample(others, k - len(kept))
            trace.append((layer, [layer * experts + e for e in now[layer]]))
    return trace


def hit_rate(events: Iterator[bool]) -> float:
    """Over the second half: the first use of an expert misses under every rule."""
    hits = list(events)
    hits = hits[len(hits) // 2 :]
    return sum(hits) / len(hits)


def ours(trace: Trace, slots: int) -> Iterator[bool]:
    cache = ExpertCache([str(i) for i in range(1 + max(layer for layer, _ in trace))])
    for layer, experts in trace:
        group, wanted = str(layer), {str(e) for e in experts}
        cache.begin_pass(group)
        here = {b for b in wanted if b in cache}
        for b in sorted(here):
            cache.touch(b, group)
        for b in sorted(wanted):
            if b not in here:
                if len(cache) == slots:
                    victim = cache.victim(lambda v: v not in wanted)  # noqa: B023
                    assert victim is not None
                    cache.discard(victim)
                cache.touch(b, group)
            yield b in here


def lru(trace: Trace, slots: int) -> Iterator[bool]:
    cache: OrderedDict[int, None] = OrderedDict()
    for _, experts in trace:
        here = set(experts) & cache.keys()
        for e in experts:
            cache[e] = None
            cache.move_to_end(e)
            if len(cache) > slots:
                cache.popitem(last=False)
            yield e in here


def belady(trace: Trace, slots: int) -> Iterator[bool]:
    uses: dict[int, list[int]] = {}
    for t, (_, experts) in enumerate(trace):
        for e in experts:
            uses.setdefault(e, []).append(t)
    for times in uses.values():
        times.append(len(trace))
        times.reverse()
    cache: set[int] = set()
    for _, experts in trace:
        here = set(experts) & cache
        for e in experts:
            uses[e].pop()
        cache |= set(experts)
        while len(cache) > slots:
            cache.remove(max(cache, key=lambda e: uses[e][-1]))
        for e in experts:
            yield e in here


L, E, K, TOKENS = 8, 32, 4, 250
SHARES = [0.2, 0.3, 0.5, 0.7, 0.9]


@pytest.mark.parametrize("share", SHARES)
def test_uniform_routing_hits_at_the_cache_share(share: float) -> None:
    slots = round(share * L * E)
    warm = uniform(L, E, K, TOKENS, seed=1)
    rate = hit_rate(ours(warm, slots))
    assert rate >= share - 0.02
    assert rate <= hit_rate(belady(warm, slots))


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(
    "trace",
    [
        zipf(L, E, K, TOKENS, seed=2, power=0.8),
        zipf(L, E, K, TOKENS, seed=3, power=1.5),
        markov(L, E, K, TOKENS, seed=4, stay=0.3),
        markov(L, E, K, TOKENS, seed=5, stay=0.8),
    ],
    ids=["zipf0.8", "zipf1.5", "markov0.3", "markov0.8"],
)
def test_not_worse_than_lru_where_there_is_locality(trace: Trace, share: float) -> None:
    slots = round(share * L * E)
    rate = hit_rate(ours(trace, slots))
    assert rate >= hit_rate(lru(trace, slots)) - 0.005
    assert rate <= hit_rate(belady(trace, slots))


@pytest.mark.parametrize(("slots", "floor"), [(K + 1, 0.02), (2 * K, 0.08), (L * K // 2, 0.3)])
def test_hits_below_one_tokens_experts_where_lru_never_does(slots: int, floor: float) -> None:
    # With exactly K slots not even Belady hits: each layer needs all of them at once.
    trace = markov(L, E, K, TOKENS, seed=6, stay=0.8)
    assert hit_rate(lru(trace, slots)) == 0
    assert floor <= hit_rate(ours(trace, slots)) <= hit_rate(belady(trace, slots))
