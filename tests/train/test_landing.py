"""What units on a device hand to each other, and who asks for it in between."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import device_support
import pytest
import torch
from device_support import engine_on_device, on_device, simulated
from engine_support import batch, engine_of, group_at, oracle_of, placements
from families import tiny_config, write
from test_engine import train

from offload.errors import OffloadError
from offload.runtime.sim_device import SimDevice
from offload.train.device_plan import DevicePlacement
from offload.train.landing import Home, Landing
from offload.train.visits import Visits


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[Any, Path] = {}

    def make(family: str, **config: Any) -> Path:
        key = (family, *sorted(config.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("tiny") / family
            write(family, made[key], torch.bfloat16, config=tiny_config(family, **config))
        return made[key]

    return make


@pytest.fixture
def visits() -> Iterator[Visits]:
    """With room for four pages of results."""
    place = DevicePlacement(
        budget=1 << 20, units=frozenset([0]), slots=1, slot_bytes=4096, gradient_bytes=4096,
        work_bytes=0, up_bytes=16384, down_bytes=16384, same_bytes=8192,
    )  # fmt: skip
    with SimDevice(1 << 20) as device:
        yield Visits(device, place)


def left(visits: Visits, values: torch.Tensor, *, wanted: bool = False) -> Landing:
    """What a visit leaves."""
    with visits.visiting() as visit:
        (found,) = visit.leave([values], wanted=wanted)
    assert isinstance(found, Landing)
    return found


def saved(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file)
    return loaded


def stacked(tensor: torch.Tensor) -> torch.Tensor:
    out = torch.empty(1, 3)
    torch.stack([tensor], out=out)
    return out[0]


ASKING: dict[str, Callable[[torch.Tensor], Any]] = {
    "an operation": lambda t: t + 0,
    "a list of tensors": lambda t: torch.cat([t]),
    "numpy": lambda t: torch.from_numpy(t.numpy()),
    "its data": lambda t: t.data,
    "without its history": lambda t: t.detach(),
    "a list": lambda t: torch.tensor(t.tolist()),
    "one by one": lambda t: torch.tensor([float(x) for x in t]),
    "a copy": copy.deepcopy,
    "a file": saved,
    "out": stacked,
    "a view": lambda t: t.view(3, 1)[:, 0],
    "storage": lambda t: torch.tensor(t.untyped_storage().tolist()).byte().view(t.dtype),
    "text": lambda t: torch.tensor(eval(repr(t).partition("(")[2].rpartition(")")[0])),
    "in place": lambda t: t.add_(0),
    "with a history": lambda t: (t * torch.ones(3, requires_grad=True)).detach(),
}  # fmt: skip


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("how", ASKING)
def test_whoever_asks_gets_the_values(visits: Visits, how: str, wanted: bool) -> None:
    values = torch.tensor([1.0, 2.0, 4.0])
    landing = left(visits, values, wanted=wanted)
    assert (landing.shape, landing.dtype, landing.device) == ((3,), torch.float32, values.device)
    assert landing.home.plain.untyped_storage().nbytes() == 0
    found = ASKING[how](landing)
    assert type(found) is torch.Tensor or found is landing
    assert torch.equal(found, values)
    assert visits.down_bytes == values.nbytes


def test_what_nobody_asks_for_does_not_come_down(visits: Visits) -> None:
    values = torch.arange(3.0)
    for _ in range(6):  # and gives way
        landing = left(visits, values)
        with visits.visiting() as visit:
            (there,) = visit.up([landing])
            assert torch.equal(there, values)
        values = values + 1
    assert visits.up_bytes == visits.down_bytes == 0
    assert not visits.stalls
    assert torch.equal(landing, values - 1)
    assert visits.stalls == Counter()  # of a visit before the last
    assert torch.equal(left(visits, values), values)
    assert visits.stalls == Counter(results=1)


def test_what_gives_way_comes_down_for_who_has_it(visits: Visits) -> None:
    every = [left(visits, torch.full((5,), float(i))) for i in range(9)]
    assert visits.down_bytes == 5 * 20
    for i, landing in enumerate(every):
        assert torch.equal(landing, torch.full((5,), float(i)))


@pytest.mark.parametrize("change", [lambda t: t.mul_(2), lambda t: t.data.mul_(2),
                                    lambda t: t.numpy().__imul__(2)])  # fmt: skip
def test_what_was_changed_in_ram_is_what_goes_up(visits: Visits, change: Any) -> None:
    values = torch.arange(3.0)
    landing = left(visits, values)
    change(landing)
    with visits.visiting() as visit:
        (there,) = visit.up([landing])
        assert torch.equal(there, values * 2)
    assert visits.up_bytes == values.nbytes


def test_what_all_units_get_goes_up_once(visits: Visits) -> None:
    mask, other = torch.ones(4), torch.zeros(4)
    for _ in range(3):
        with visits.visiting() as visit:
            own, there, _ = visit.up([torch.rand(8), mask, None], same=(1,))
            assert torch.equal(there, mask)
    assert visits.up_bytes == 3 * 32 + 16
    mask += 1
    with visits.visiting() as visit:  # it is another one now
        assert torch.equal(visit.up([mask], same=(0,))[0], torch.full((4,), 2.0))
        assert torch.equal(visit.up([other], same=(0,))[0], other)
        own = visit.up([mask], same=(0,))[0]
        own += 1  # what is there is changed for this unit alone
    before = visits.up_bytes
    with visits.visiting() as visit:
        assert torch.equal(visit.up([mask], same=(0,))[0], mask)
    assert visits.up_bytes == before + 16
    visits.begin_step()
    with visits.visiting() as visit:
        assert torch.equal(visit.up([mask], same=(0,))[0], mask)
    assert visits.up_bytes == before + 32


def test_an_input_that_backward_needs_is_not_changed_in_place(visits: Visits) -> None:
    landing = left(visits, torch.zeros(4), wanted=True)
    with pytest.raises(OffloadError, match="changes its input in place"), visits.visiting() as v:
        v.up([landing])[0].add_(1)
    # Without a backward it may, and what it leaves of it is its own.
    landing = left(visits, torch.zeros(4))
    with visits.visiting() as visit:
        there = visit.up([landing])[0].add_(1)
        (again,) = visit.leave([there], wanted=False)
    assert torch.equal(again, torch.ones(4))


def test_a_result_is_there_when_the_device_is_not(visits: Visits) -> None:
    kept, gone = left(visits, torch.ones(2)), left(visits, torch.ones(2))
    del gone
    visits.close()
    assert visits.down_bytes == 8
    assert torch.equal(kept, torch.ones(2))


# -- models ---------------------------------------------------------------------------------


def add_first(model: Any) -> None:
    """The third layer gets the first one's result, too: its gradient is a sum of two."""
    layers, first = model.model.layers, {}
    layers[0].register_forward_hook(lambda m, a, out: first.update(out=out))
    layers[2].register_forward_pre_hook(lambda m, args: (args[0] + first["out"], *args[1:]))


def scale_in_place(model: Any) -> None:
    """A layer's result, behind torch's back."""

    def hook(module: Any, args: Any, out: torch.Tensor) -> None:
        out.data.mul_(1.5)

    for layer in model.model.layers:
        layer.register_forward_hook(hook)


def watch(model: Any) -> None:
    """Whoever only looks changes nothing."""
    seen = []

    def hook(module: Any, args: Any, out: torch.Tensor) -> None:
        seen.append(out.detach().float().norm().item())

    for layer in model.model.layers:
        layer.register_forward_hook(hook)


def turn_gradients(model: Any) -> None:
    def hook(module: Any, args: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient * 2)

    for layer in model.model.layers:
        layer.register_forward_hook(hook)


def replace_results(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda m, a, out: out.clone())


def steps_of(engine: Any, loss_of: Callable[[Any, torch.Tensor], torch.Tensor]) -> list[Any]:
    """Losses, norms and weights of two steps of two micro-batches."""
    found: list[Any] = []
    for step in range(2):
        engine.begin_forward()
        for micro in range(2):
            engine.last_micro_batch = micro == 1
            loss = loss_of(engine.model, batch(step, micro))
            found.append(loss.detach().clone())
            loss.backward()
        engine.end_backward()
        found.append(torch.tensor(engine.step(group_at(step), 0.5).norm))
    engine.drain()
    return found + [engine.block_values(block) for block in engine.layout.blocks]


def own_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


def loss_of_all_states(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Each layer's result has two who use it."""
    out = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    return sum(h.float().pow(2).mean() for h in out.hidden_states)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("room", ["all", "least"])
@pytest.mark.parametrize(
    ("hooks", "loss_of"),
    [
        (add_first, own_loss), (scale_in_place, own_loss), (watch, own_loss),
        (turn_gradients, own_loss), (replace_results, own_loss),
        (lambda _: None, loss_of_all_states),
    ],
)  # fmt: skip
def test_hooks_between_layers(tiny: Any, hooks: Any, loss_of: Any, room: str) -> None:
    """They see, and change, what they would without a device."""
    directory = tiny("qwen3")
    with engine_of(directory, "disk") as (engine, _):
        hooks(engine.model)
        wanted = steps_of(engine, loss_of)
    with engine_on_device(directory, "disk", room) as (engine, _):
        hooks(engine.model)
        for one, other in zip(steps_of(engine, loss_of), wanted, strict=True):
            assert torch.equal(one, other)


def with_casts(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return own_loss(model, ids)


@pytest.mark.parametrize("room", ["all", "least"])
@pytest.mark.parametrize(("family", "loss_of"), [("gemma3n_text", own_loss), ("qwen3", with_casts)])
def test_keys_and_values_that_layers_share_and_casts(
    tiny: Any, family: str, loss_of: Any, room: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_support, "LEAST_RESULTS", 64 << 10)
    directory = tiny(family)
    with engine_of(directory, "disk") as (engine, _):
        wanted = steps_of(engine, loss_of)
    with engine_on_device(directory, "disk", room) as (engine, _):
        for one, other in zip(steps_of(engine, loss_of), wanted, strict=True):
            assert torch.equal(one, other)


@contextlib.contextmanager
def some_on_device(directory: Path, chosen: frozenset[int]) -> Iterator[Any]:
    """With these units alone on the device."""

    def where(layout: Any) -> Any:
        every = on_device(layout, "all")
        assert chosen < every.units
        return replace(placements(layout)["disk"], device=replace(every, units=chosen))

    with simulated() as device, engine_of(directory, where, device=device) as (engine, _):
        yield engine
        engine.drain()


@pytest.mark.parametrize("chosen", [{0, 2}, {1}, {0, 1}, {2, 3}])
def test_some_layers_in_ram(tiny: Any, chosen: set[int]) -> None:
    directory = tiny("qwen3")
    with some_on_device(directory, frozenset(chosen)) as engine:
        train(engine, oracle_of(directory, engine.layout), 2, 0.5, steps=2)


@pytest.mark.parametrize("clip", [0.5, 0.0])
def test_the_host_does_not_wait_for_each_layer(tiny: Any, clip: float) -> None:
    """For what the last unit leaves, and for the last gradients, whatever the number of units."""
    counts = []
    for layers in (2, 6):
        directory = tiny("qwen3", num_hidden_layers=layers)
        with engine_on_device(directory, "disk", "all") as (engine, _):
            oracle = oracle_of(directory, engine.layout)
            train(engine, oracle, 1, clip, steps=1)
            stalls = engine.homes.tier.visits.stalls
            before = Counter(stalls)
            train(engine, oracle, 1, clip, steps=2)
            counts.append(Counter(stalls) - before)
    few, many = counts
    # Of two steps: the last unit's result, and the gradient that goes below the first one.
    assert few["results"] == many["results"] == 2 * 2
    if clip:
        assert few["gradients"] == many["gradients"] == 2
    else:  # an update inside backward begins when its gradients are there
        assert (few["gradients"], many["gradients"]) == (2 * 2, 2 * 6)


class _Stop(Exception):
    pass


@pytest.mark.parametrize("backward", [False, True])
def test_a_step_that_fails_leaves_nothing(tiny: Any, backward: bool) -> None:
    directory = tiny("qwen3")
    with engine_on_device(directory, "disk", "least") as (engine, _):
        oracle = oracle_of(directory, engine.layout)
        train(engine, oracle, 1, 0.5, steps=1)
        stops = []

        def stop(*_: Any) -> None:
            if torch.is_grad_enabled() is backward:
                stops.append(1)
                raise _Stop

        handle = engine.model.model.layers[2].mlp.register_forward_hook(stop)
        engine.begin_forward()
        ids = batch(7, 0)
        with pytest.raises(_Stop):
            engine.model(input_ids=ids, labels=ids).loss.backward()
        assert stops
        handle.remove()
        engine.abandon()
        gc.collect()
        assert not [x for x in gc.get_objects() if type(x) is Landing]
        train(engine, oracle, 1, 0.5, steps=2)
        gc.collect()
        assert not [x for x in gc.get_objects() if type(x) is Home]


def test_what_is_not_a_number_is_handed_on(tiny: Any) -> None:
    """And is seen where it would be without a device."""
    directory = tiny("qwen3")
    with engine_on_device(directory, "disk", "all") as (engine, _):
        oracle = oracle_of(directory, engine.layout)
        handle = engine.model.model.layers[1].register_forward_hook(
            lambda m, a, out: out * torch.nan
        )
        engine.begin_forward()
        ids = batch(0, 0)
        loss = engine.model(input_ids=ids, labels=ids).loss
        assert loss.isnan()
        loss.backward()
        engine.end_backward()
        with pytest.raises(OffloadError, match="gradient norm is nan"):
            engine.step(group_at(0), 0.5)
        engine.abandon()
        handle.remove()
        train(engine, oracle, 1, 0.5, steps=2)
