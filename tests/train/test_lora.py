"""Adapters on the streamed engine against the same adapters on a resident model, bit for bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from engine_support import assert_equal_weights, batch, every_pair, group_at
from lora_support import (
    EXPERTS,
    Made,
    adapted_engine,
    adapted_oracle,
    adapted_reference,
    pinned,
)

from offload.train.oracle import Oracle
from offload.train.vertical import Rounds

PLACES = ["disk", "least", "half", "ram"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory)


def train(
    engine: Any, oracle: Any, accumulate: int, clip: float, steps: int = 3, seeded: bool = False
) -> None:
    """``seeded``: the engine seeds torch's generator for each unit; the oracle has hooks for it."""
    for step in range(steps):
        engine.begin_forward()
        if not clip:
            engine.in_backward = group_at(step)
        if seeded:
            engine.random_key = lambda m, unit, step=step: 1000 * step + 100 * m + unit
        for micro in range(accumulate):
            engine.micro = oracle.micro = micro
            oracle.step_number = step
            engine.last_micro_batch = micro + 1 == accumulate
            ids = batch(step, micro)
            torch.manual_seed(step)
            ours = engine.model(input_ids=ids, labels=ids).loss
            torch.manual_seed(step)
            wanted = oracle.model(input_ids=ids, labels=ids).loss
            assert torch.equal(ours, wanted), (step, micro)
            (ours / accumulate).backward()
            (wanted / accumulate).backward()
        engine.end_backward()
        norm = oracle.step(group_at(step), clip)
        assert engine.step(group_at(step), clip).norm == norm > 0
    assert_equal_weights(engine, oracle)


@pytest.mark.parametrize(
    ("family", "clip", "place"), every_pair(["llama", "gpt2"], [0.05, 0.0], PLACES)
)
def test_linear_layers(tiny: Made, family: str, place: str, clip: float) -> None:
    directory = tiny(family)
    with adapted_engine(directory, pinned(place), dropout=0.1) as (engine, adapters, _):
        before = adapters.values(engine)
        train(engine, adapted_oracle(directory, engine.layout, dropout=0.1), 1, clip)
        for name, value in adapters.values(engine).items():
            assert not torch.equal(value, before[name]), name
        assert adapters.unused() == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "clip", "place"),
    every_pair(["qwen3_moe", "mixtral", "gpt_oss"], [0.05, 0.0], PLACES),
)
def test_single_experts(tiny: Made, family: str, place: str, clip: float) -> None:
    directory = tiny(family)
    with adapted_engine(directory, pinned(place), targets=EXPERTS) as (engine, adapters, _):
        assert list(engine.layout.expert_blocks())
        assert any(t.experts for t in adapters.targets)
        train(engine, adapted_oracle(directory, engine.layout, targets=EXPERTS), 2, clip)
        assert adapters.unused() == []


@pytest.mark.parametrize("place", PLACES)
def test_adapters_may_stream_like_anything_else(tiny: Made, place: str) -> None:
    directory = tiny("mixtral")
    with adapted_engine(directory, place, targets=EXPERTS) as (engine, _, _):
        train(engine, adapted_oracle(directory, engine.layout, targets=EXPERTS), 2, 0.05)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("clip", [0.05, 0.0])
def test_accumulation(tiny: Made, place: str, clip: float) -> None:
    directory = tiny("llama")
    with adapted_engine(directory, pinned(place)) as (engine, _, _):
        train(engine, adapted_oracle(directory, engine.layout), 3, clip)


def seed_units(engine: Any, oracle: Any) -> None:
    """Before each unit of the oracle, the seed that the engine gives it."""
    for unit in engine.layout.units:

        def seed(*_: Any, unit: int = unit.index) -> None:
            torch.manual_seed(1000 * oracle.step_number + 100 * oracle.micro + unit)

        oracle.model.get_submodule(unit.name).register_forward_pre_hook(seed)


@pytest.mark.parametrize("place", ["disk", "half"])
@pytest.mark.parametrize(
    ("family", "targets"),
    [("llama", None), ("gpt_oss", EXPERTS), ("gpt2", r"transformer\.h\.[23]\..*c_attn")],
)
def test_dropout_that_is_a_function_of_step_micro_batch_and_unit(
    tiny: Made, family: str, targets: Any, place: str
) -> None:
    """GPT-2 has dropout of its own, also in the layers below the first adapter."""
    directory = tiny(family)
    how = {"dropout": 0.3, "targets": targets}
    with adapted_engine(directory, pinned(place), **how) as (engine, _, _):
        oracle = adapted_oracle(directory, engine.layout, **how)
        seed_units(engine, oracle)
        train(engine, oracle, 2, 0.05, seeded=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt2"])
def test_evaluation_in_between(tiny: Made, family: str, place: str) -> None:
    directory = tiny(family)
    targets = EXPERTS if family == "qwen3_moe" else None
    with adapted_engine(directory, pinned(place), targets=targets, dropout=0.2) as (engine, _, _):
        oracle = adapted_oracle(directory, engine.layout, targets=targets, dropout=0.2)
        for step in range(2):
            train(engine, oracle, 1, 0.05, steps=step + 1)
            engine.begin_forward()
            for model in (engine.model, oracle.model):
                model.eval()
            with torch.no_grad():
                ids = batch(99, step)
                assert torch.equal(
                    engine.model(input_ids=ids).logits, oracle.model(input_ids=ids).logits
                )
            for model in (engine.model, oracle.model):
                model.train()


@pytest.mark.parametrize("place", ["disk", "ram"])
@pytest.mark.parametrize("states", ["bf16", "8bit"])
def test_states(tiny: Made, place: str, states: str) -> None:
    """Float32 weights have no bf16 states: adapters keep float32 ones, as one would wish."""
    directory = tiny("llama")
    options = {"states": states, "seed": 3}
    with adapted_engine(directory, pinned(place), options=options) as (engine, _, _):
        oracle = Oracle(adapted_reference(directory)[0], engine.layout, **options)
        train(engine, oracle, 1, 0.05)


@pytest.mark.parametrize("clip", [0.05, 0.0])
@pytest.mark.parametrize(
    ("family", "targets"), [("mixtral", EXPERTS), ("gpt2", r"transformer\.h\.[23]\..*c_attn")]
)
def test_vertical_accumulation_is_the_usual_one(
    tiny: Made, family: str, targets: Any, clip: float
) -> None:
    """Micro-batches layer by layer, with dropout, also below the first adapter."""
    width = 3

    def run(vertical: bool, place: str) -> tuple[list[float], dict[str, torch.Tensor]]:
        how = {"targets": targets, "dropout": 0.2}
        with adapted_engine(tiny(family), pinned(place), **how) as (engine, adapters, _):
            rounds, losses = Rounds(width) if vertical else None, []
            for step in range(2):
                engine.begin_forward()
                engine.in_backward = None if clip else group_at(step)
                engine.random_key = lambda m, unit, step=step: 1000 * step + 100 * m + unit

                def micro(i: int, step: int = step, engine: Any = engine) -> float:
                    engine.micro = i
                    torch.manual_seed(1000 * step + 100 * i + 99)
                    ids = batch(step, i, length=8 + 3 * i)
                    loss = engine.model(input_ids=ids, labels=ids).loss
                    loss.backward()
                    return loss.item()  # type: ignore[no-any-return]

                if rounds is not None:
                    engine.rounds = rounds
                    losses += rounds.run([partial(micro, i) for i in range(width)])
                else:
                    for i in range(width):
                        engine.last_micro_batch = i == width - 1
                        losses.append(micro(i))
                engine.end_backward()
                losses.append(engine.step(group_at(step), clip).norm)
            if rounds is not None:
                rounds.close()
            return losses, adapters.values(engine)

    ours, values = run(True, "disk")
    wanted, usual = run(False, "ram")
    assert ours == wanted
    assert all(torch.equal(value, usual[name]) for name, value in values.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_of_the_base(tiny: Made, dtype: torch.dtype) -> None:
    """A frozen base may be float16, which could not be trained."""
    directory = tiny("llama", dtype)
    with adapted_engine(directory, pinned("disk")) as (engine, _, _):
        assert {b.dtype for b in engine.layout.trained} == {"float32"}
        train(engine, adapted_oracle(directory, engine.layout, dtype), 1, 0.05)


@pytest.mark.parametrize("place", ["disk", "ram"])
def test_a_resumed_run_takes_adapters_from_its_tiles(tiny: Made, place: str) -> None:
    directory = tiny("llama")
    with adapted_engine(directory, pinned(place)) as (engine, adapters, tiles):
        oracle = adapted_oracle(directory, engine.layout)
        train(engine, oracle, 1, 0.05)
        engine.drain()
        engine.updater.write_resident()
        values, steps = adapters.values(engine), dict(engine.steps)
    # The first values are never asked for again: these would be others.
    with adapted_engine(directory, pinned(place), seed=99, tiles=tiles) as (engine, adapters, _):
        engine.steps = steps
        for name, value in adapters.values(engine).items():
            assert torch.equal(value, values[name]), name
        train(engine, oracle, 1, 0.05)


def test_the_base_has_no_gradients_and_below_the_first_adapter_nothing_is_run_again(
    tiny: Made,
) -> None:
    directory = tiny("qwen3_moe")
    targets = r"model\.layers\.2\.(self_attn\.q_proj|mlp\.experts\.down_proj)"
    with adapted_engine(directory, pinned("disk"), targets=targets) as (engine, adapters, _):
        assert len(adapters.targets) == 2
        runs: dict[str, list[bool]] = {}
        for unit in engine.layout.units:
            unit.module.register_forward_pre_hook(
                lambda *_, name=unit.name: runs.setdefault(name, []).append(torch.is_grad_enabled())
            )
        inner: dict[str, list[bool]] = {}
        for i in range(4):
            engine.model.get_submodule(f"model.layers.{i}.self_attn").register_forward_pre_hook(
                lambda *_, i=i: inner.setdefault(f"layer {i}", []).append(torch.is_grad_enabled())
            )
        ids = batch(0, 0)
        engine.begin_forward()
        engine.model(input_ids=ids, labels=ids).loss.backward()
        # Forward without autograd everywhere; again, with it, from the first adapter on.
        assert inner == {
            "layer 0": [False], "layer 1": [False],
            "layer 2": [False, True], "layer 3": [False, True],
        }  # fmt: skip
        mine = set(adapters.blocks(engine.layout))
        assert set(engine.gradients.blocks()) == mine
        for name, param in engine.params.items():
            assert param.grad is None
            assert param.requires_grad == (name in adapters.initial)
        for block in mine:
            assert len(engine.gradients.pieces(block)) == len(engine.layout.blocks[block].pieces)
        engine.end_backward()
        assert engine.step(group_at(0), 0.0).norm > 0
        assert set(engine.steps) == set(adapters.initial)


def test_every_expert_takes_every_step(tiny: Made) -> None:
    """With decay, a resident optimizer moves the adapters of experts that no token went to."""
    directory = tiny("qwen3_moe")
    with adapted_engine(directory, pinned("disk"), targets=("down_proj",)) as (engine, adapters, _):
        before = adapters.pairs(adapters.values(engine))
        ids = batch(0, 0, length=2, rows=1)  # one token has a label, and it goes to two experts
        engine.begin_forward()
        engine.model(input_ids=ids, labels=ids).loss.backward()
        engine.end_backward()
        name = "model.layers.0.mlp.experts.down_proj"
        block, piece = engine.piece_of(f"{name}_lora_A")
        gradient = engine.gradients._held[block].pieces[piece].view(before[name].a.shape)
        reached = gradient.abs().amax((1, 2)) > 0
        assert reached.any()
        assert not reached.all()
        engine.step(group_at(0), 0.0)
        after = adapters.pairs(adapters.values(engine))
        for name, pair in after.items():
            assert (pair.a != before[name].a).flatten(1).any(1).all(), name
