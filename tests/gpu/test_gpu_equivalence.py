"""The very bits of the resident model on the same device, whatever the budgets.

One file for every device with memory of its own: the simulated accelerator, the device of a card on
a fake of the card, and a real card, whose reference is the resident model moved there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence import Golden, budgets, check_logits, greedy, options, prompt, reference
from families import write

from offload.models.load import Prepared, prepare

pytestmark = pytest.mark.usefixtures("cut_small")

FAMILIES = ["llama", "gemma2", "gpt2", "qwen3_moe", "gpt_oss", "deepseek_v3"]
"""Dense, tied and scaled embeddings, transposed weights with biases, three kinds of MoE."""

Want = Callable[[str], Golden]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            write(family, made[family], torch.bfloat16)
        return made[family]

    return make


_answers: dict[tuple[str, torch.device], Golden] = {}


@pytest.fixture
def want(written: Callable[[str], Path], place: torch.device) -> Want:
    """What the resident model answers on the device; its prompt is on the CPU, as a user's is."""

    def ask(family: str) -> Golden:
        if (family, place) not in _answers:
            directory = written(family)
            model = reference(directory, torch.bfloat16).to(place)
            ids_BL = prompt()
            with torch.no_grad():
                logits_BLV = model(ids_BL.to(place)).logits
            out = greedy(model, ids_BL.to(place))
            _answers[family, place] = Golden(
                directory=directory,
                dtype=torch.bfloat16,
                ids_BL=ids_BL,
                logits_BLV=logits_BLV,
                sequences=out.sequences,
                steps_BV=out.logits,
            )
        return _answers[family, place]

    return ask


@contextmanager
def opened(prepared: Prepared) -> Iterator[Any]:
    """The streamed model; after the block nothing is held and nothing has failed in silence."""
    model = prepared.open()
    handle = model.offload
    try:
        yield model
        handle.executor.settle()
        assert handle.executor.held() == []
        handle.executor.validate()
    finally:
        handle.close()
    assert handle.executor.device.acquired_memory() == 0


def planned(directory: Path, device: str, budget: str, **kwargs: Any) -> Prepared:
    found = budgets(directory, device, **kwargs)[budget]
    return prepare(directory, options(device, **{**kwargs, **found}))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("budget", ["all", "half", "minimum"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_equal(want: Want, family: str, budget: str, device: str) -> None:
    expected = want(family)
    prepared = planned(expected.directory, device, budget)
    with opened(prepared) as model:
        assert model.device == expected.logits_BLV.device
        check_logits(model, expected)
        stats = model.offload.stats()
        assert stats["h2d_bytes"] > 0
        assert stats["device_budget_bytes"] == prepared.options.gpu


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_sampling_draws_the_same_tokens(
    want: Want, family: str, device: str, place: torch.device
) -> None:
    directory = want(family).directory

    def sampled(model: Any, ids_BL: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(7)
        out: torch.Tensor = greedy(model, ids_BL, do_sample=True, top_k=20, temperature=1.3)
        return out.sequences  # type: ignore[attr-defined, no-any-return]

    resident = reference(directory, torch.bfloat16).to(place)
    expected = sampled(resident, prompt(rows=2).to(place))
    with opened(planned(directory, device, "minimum", batch=2)) as model:
        assert torch.equal(sampled(model, prompt(rows=2)), expected)


def test_the_first_layers_are_pinned_on_the_device(want: Want, device: str) -> None:
    """With half of the weights' room some blocks stay and the others go through, every pass."""
    directory = want("llama").directory
    with opened(planned(directory, device, "half")) as model:
        plan, executor = model.offload.plan, model.offload.executor
        pinned = set(plan.tiers[plan.compute_tier].pinned)
        assert pinned
        assert pinned < set(plan.blocks)
        with torch.no_grad():
            model(prompt())
            before = executor.stats.h2d_bytes
            for _ in range(4):
                model(prompt())
        moved = executor.stats.h2d_bytes - before
        streamed = [b for b in plan.blocks if b not in pinned and b not in plan.by_row]
        each = sum(plan.blocks[b].slot_nbytes for b in streamed)
        # What is under way at either end is part of a pass.
        assert 3 * each <= moved <= 5 * each


def test_waits_are_counted(want: Want, device: str) -> None:
    """The host waits for the routing of each MoE layer, for the tokens it looks up, for copies,
    and for experts that the CPU computes beside the device."""
    with opened(planned(want("qwen3_moe").directory, device, "minimum")) as model:
        layers = model.config.num_hidden_layers
        with torch.no_grad():
            for n in range(1, 4):
                model(prompt())
                waits = model.offload.stats()["host_waits"]
                assert waits["routing"] == layers * n
                assert waits["token"] == n
        assert set(waits) <= {"routing", "token", "block", "cpu"}
