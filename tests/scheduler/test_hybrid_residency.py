"""Experts on two sites under the oracle of ``residency_oracle``: what moves, when, and that time
has no say in it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from residency_oracle import Harness, make_plan

from offload.blocks import ALIGN, Tier
from offload.errors import SchedulerError
from offload.scheduler.plan import Plan
from offload.scheduler.split import COUNTS, Site, SplitCosts

GROUPS, EXPERTS, TOP_K = 3, 8, 3


def plan_of(
    *, ram: int, device: int, policy: str = "lru", move_s: float = 2.0, kept: bool = False
) -> Plan:
    """Three layers of eight experts of one page; ``kept``: all of them in RAM for good."""
    experts = {f"g{i}": [f"g{i}e{j}" for j in range(EXPERTS)] for i in range(GROUPS)}
    names = [e for es in experts.values() for e in es]
    plan = make_plan(
        [(f"u{i}", ()) for i in range(GROUPS)],
        dict.fromkeys(names, 1),
        top=Tier.DEVICE,
        ring={},
        pinned={Tier.RAM: names} if kept else {},
        experts=experts,
        slots={Tier.RAM: 0 if kept else ram, Tier.DEVICE: device},
    )
    costs = SplitCosts(
        nbytes=ALIGN - 17, cpu=tuple(max(1.0, n / 4) for n in COUNTS),
        device=(0.1,) * len(COUNTS), move_s=move_s, read_s=4.0, rows=32,
    )  # fmt: skip
    return replace(plan, split=costs, expert_policy=policy, top_k=dict.fromkeys(experts, TOP_K))


class Player:
    """Plays a model's thread and the CPU's, with transfers that land whenever ``rng`` likes."""

    def __init__(self, plan: Plan, rng: random.Random) -> None:
        self.h = Harness(plan)
        self.rng = rng
        self.sites: list[dict[str, Site]] = []
        while self.h.oracle.flights:
            self.land()

    def land(self) -> None:
        """Something arrives, or not, as on lanes that nobody waits for."""
        flights = sorted(self.h.oracle.flights)
        if flights:
            self.h.arrive(*self.rng.choice(flights))

    def layer(self, group: str, loads: dict[str, int]) -> None:
        h, rng = self.h, self.rng
        h.route(group, tuple(loads), loads)
        self.sites.append(dict(h.residency.sites))
        schedule = h.residency.schedule
        assert schedule is not None
        todo = {"device": list(schedule.device), "cpu": list(schedule.cpu)}
        held: list[str] = []
        for _ in range(400):
            match rng.choice(("land", "device", "cpu", "end")):
                case "land":
                    self.land()
                case "device" if todo["device"]:
                    if h.acquire(todo["device"][0]):
                        h.release(todo["device"].pop(0))
                case "cpu":
                    ready = next((b for b in todo["cpu"] if h.hold_below(b)), None)
                    if ready is not None:
                        todo["cpu"].remove(ready)
                        held.append(ready)
                case "end" if held:
                    h.release_below(held.pop(0))
            if not any(todo.values()) and not held:
                break
        else:
            pytest.fail(f"{group} never ends: {todo}, {held}")
        h.note(h.residency.end_route())


def routings(seed: int, passes: int = 8, most: int = TOP_K) -> list[tuple[str, dict[str, int]]]:
    rng = random.Random(seed)
    out = []
    for _ in range(passes):
        for g in range(GROUPS):
            chosen = sorted(rng.sample(range(EXPERTS), rng.randint(1, most)))
            out.append((f"g{g}", {f"g{g}e{e}": rng.choice((1, 1, 1, 9)) for e in chosen}))
    return out


@pytest.mark.parametrize("policy", ["lru", "mrs", "laps"])
@pytest.mark.parametrize(("ram", "device"), [(4, 1), (4, 4), (12, 6), (24, 9)])
def test_the_sites_do_not_depend_on_time(policy: str, ram: int, device: int) -> None:
    """The same routings, transfers in other orders: the same sites, and the same slots filled."""
    plan = plan_of(ram=ram, device=device, policy=policy)
    found = []
    for seed in range(5):
        player = Player(plan, random.Random(f"{seed}/{ram}"))
        for group, loads in routings(7):
            player.layer(group, loads)
        found.append((player.sites, sorted(player.h.oracle.spans[Tier.DEVICE])))
        assert player.h.residency.held() == []
    assert all(f == found[0] for f in found)
    seen = {site for sites in found[0][0] for site in sites.values()}
    # With one slot an expert has always gone before its layer comes again.
    assert seen == ({*Site} if device > 1 else {Site.MOVE, Site.CPU})


@pytest.mark.parametrize("device", [1, 2, 5])
def test_more_experts_than_slots_go_up_one_after_the_other(device: int) -> None:
    """Without loads the device has all, in any order, through however few slots."""
    plan = plan_of(ram=8, device=device)
    for seed in range(6):
        player = Player(plan, random.Random(seed))
        for group, loads in routings(seed, most=EXPERTS):
            player.h.run_experts(group, tuple(loads))
            assert player.h.residency.schedule is None
        assert player.h.oracle.fetches.total() > 3 * EXPERTS


def test_a_slot_is_computed_where_it_is() -> None:
    player = Player(plan_of(ram=8, device=4, move_s=0.1), random.Random(1))
    loads = {"g0e1": 1, "g0e5": 1}
    player.layer("g0", loads)
    assert set(player.sites[-1].values()) == {Site.MOVE}
    player.layer("g0", loads)
    assert set(player.sites[-1].values()) == {Site.SLOT}


def test_what_stays_in_ram_is_computed_there() -> None:
    """Copies that take long against a product of one token: the CPU has most of them."""
    player = Player(plan_of(ram=0, device=3, kept=True), random.Random(2))
    reads = player.h.oracle.fetches.total()
    for group, loads in routings(3):
        player.layer(group, dict.fromkeys(loads, 1))
    sites = [s for of in player.sites for s in of.values()]
    assert sites.count(Site.CPU) > sites.count(Site.MOVE) > 0
    assert player.h.oracle.fetches.total() - reads == sites.count(Site.MOVE)


def test_a_layer_that_is_broken_off_leaves_nothing_in_the_way() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        player = Player(plan_of(ram=4, device=2), rng)
        for group, loads in routings(seed, passes=4):
            if rng.random() < 0.4:
                player.h.route(group, tuple(loads), loads)
                for _ in range(rng.randint(0, 3)):
                    player.land()
                if rng.random() < 0.5:
                    player.h.note(player.h.residency.end_route())
            else:
                player.layer(group, loads)
        player.h.settle()
        assert player.h.residency.held() == []


def test_a_failed_transfer_can_be_asked_for_again() -> None:
    for tier in (Tier.RAM, Tier.DEVICE):
        player = Player(plan_of(ram=4, device=2, move_s=0.1), random.Random(0))
        h = player.h
        h.route("g0", ("g0e0", "g0e1"), {"g0e0": 1, "g0e1": 1})
        if tier is Tier.DEVICE:
            while not any(t is Tier.DEVICE for _, t in h.oracle.flights):
                player.land()
        block = next(b for b, t in h.oracle.flights if t is tier)
        h.fail(block, tier)
        schedule = h.residency.schedule
        assert schedule is not None
        for b in schedule.device:
            if not h.acquire(b):
                h.settle()
                assert h.acquire(b)
            h.release(b)
        h.note(h.residency.end_route())


def test_two_sites_need_two_tiers() -> None:
    plan = plan_of(ram=4, device=2)
    bare = replace(plan, compute_tier=Tier.RAM, tiers={Tier.RAM: plan.tiers[Tier.RAM]})
    with pytest.raises(SchedulerError, match="split between a device and the CPU"):
        Harness(bare)
