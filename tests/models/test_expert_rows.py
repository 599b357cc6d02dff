"""A layer's experts in two products: as one by one, whatever is there, fails or is unknown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence import budgets, greedy, opened, options, prompt, reference
from families import tiny_config, write

from offload.cpu_ops import row_products
from offload.errors import StoreError
from offload.models import load, single_rows
from offload.models.expert_rows import ExpertRows
from offload.models.load import prepare
from offload.models.single_rows import worth

Multiplied = list[tuple[int, int]]


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models count; nothing is known of this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(single_rows, "LEAST_BYTES", 1)
    if not worth(2**40, torch.bfloat16, "cpu"):
        pytest.skip("this processor has no kernel for single bfloat16 rows")
    if row_products.find_block(torch.randn(192, 64).bfloat16()) is None:
        pytest.skip("torch adds single rows' products here in an order that is not known")


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> Multiplied:
    """Experts and rows of each product of several."""
    found: Multiplied = []
    running: list[str] = []
    inner, toys = row_products.multiply_groups, load.warm_up

    def multiply_groups(x: Any, weights: Any, counts: Any, *sizes: int) -> torch.Tensor:
        if "toy" not in running:
            found.append((len(counts), sum(counts)))
        return inner(x, weights, counts, *sizes)

    def warm_up(*args: Any) -> Any:
        running.append("toy")
        try:
            return toys(*args)
        finally:
            running.pop()

    monkeypatch.setattr(row_products, "multiply_groups", multiply_groups)
    monkeypatch.setattr(load, "warm_up", warm_up)
    return found


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    config = tiny_config(
        "qwen3_moe", moe_intermediate_size=96, num_experts=8, num_experts_per_tok=3
    )
    return write("qwen3_moe", tmp_path / "moe", config=config)


def same(found: Any, want: Any) -> None:
    assert torch.equal(found.sequences, want.sequences)
    assert all(map(torch.equal, found.logits, want.logits))


def answer(directory: Path) -> Any:
    return greedy(reference(directory, torch.bfloat16), prompt(), max_new_tokens=12)


@pytest.fixture
def half(checkpoint: Path) -> Iterator[Any]:
    """With half of its experts in memory."""
    with opened(prepare(checkpoint, options("cpu", **budgets(checkpoint, "cpu")["half"]))) as model:
        yield model


def test_all_experts_of_a_token_are_one_product(checkpoint: Path, multiplied: Multiplied) -> None:
    with opened(prepare(checkpoint, options("cpu"))) as model:
        same(greedy(model, prompt(), max_new_tokens=12), answer(checkpoint))
    assert multiplied == [(3, 3)] * (2 * 4 * 11), "up and down, four layers, all tokens but one"


def test_those_that_are_there_come_first(
    checkpoint: Path, half: Any, multiplied: Multiplied, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[bool, ...]] = []
    runs = ExpertRows._runs

    def seen(self: ExpertRows, order: Any) -> Any:
        asked.append(tuple(bool(self._places[e]) for e in order))
        return runs(self, order)

    monkeypatch.setattr(ExpertRows, "_runs", seen)
    same(greedy(half, prompt(), max_new_tokens=12), answer(checkpoint))
    assert half.offload.executor.stats.misses
    assert any(False in there and True in there for there in asked)
    assert all(there == tuple(sorted(there, reverse=True)) for there in asked)
    assert {experts for experts, _ in multiplied} > {3}, "some had to be waited for"
    assert all(experts == rows for experts, rows in multiplied)


def test_a_recorded_timeline_hears_of_each_expert(
    checkpoint: Path, tmp_path: Path, multiplied: Multiplied
) -> None:
    from offload.runtime.timeline import Recorder

    made = options("cpu", recorder=Recorder(), **budgets(checkpoint, "cpu")["half"])
    with opened(prepare(checkpoint, made)) as model:
        same(greedy(model, prompt(), max_new_tokens=12), answer(checkpoint))
    assert not multiplied


def test_an_expert_that_cannot_be_read_is_the_error_and_the_next_run_is_right(
    checkpoint: Path, half: Any, multiplied: Multiplied
) -> None:
    want = answer(checkpoint)
    executor = half.offload.executor
    acquire_run, calls = executor.acquire_run, 0

    def broken(experts: Any, most: int) -> list[int]:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise StoreError("no such expert")
        found: list[int] = acquire_run(experts, most)
        return found

    executor.acquire_run = broken
    with pytest.raises(StoreError, match="no such expert"):
        greedy(half, prompt(), max_new_tokens=12)
    assert executor.held() == []
    same(greedy(half, prompt(), max_new_tokens=12), want)
    assert multiplied


def test_a_run_that_somebody_keeps_does_not_end_the_next_one(half: Any) -> None:
    """As a traceback does, whose frames are gone when it is."""
    executor, session = half.offload.executor, half.offload.attachment._sessions[0]
    blocks = session.group.blocks
    with half.offload.attachment.turn:
        session.begin([0, 1])
        left = session.batches_of([0, 1], 2)
        next(left)
        session.end()
        assert not set(blocks) & set(executor.held())
        session.begin([0, 1])
        now = session.batches_of([0, 1], 2)
        some, _ = next(now)
        left.close()
        assert {blocks[e] for e in some} <= set(executor.held())
        now.close()
        session.end()
    assert not set(blocks) & set(executor.held())


@pytest.mark.parametrize("when", ["up", "gate", "down"])
def test_a_computation_that_fails_holds_nothing(
    checkpoint: Path, half: Any, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = answer(checkpoint)
    experts = half.model.layers[1].mlp.experts
    with monkeypatch.context() as patch:
        if when == "gate":
            patch.setattr(type(experts), "_apply_gate", lambda *_: 1 / 0)
        else:
            inner, calls = row_products.multiply_groups, 0

            def failing(*args: Any) -> torch.Tensor:
                nonlocal calls
                calls += 1
                return 1 / 0 if calls == 3 + (when == "down") else inner(*args)  # type: ignore[return-value]

            patch.setattr(row_products, "multiply_groups", failing)
        with pytest.raises(ZeroDivisionError):
            greedy(half, prompt(), max_new_tokens=12)
    assert half.offload.executor.held() == []
    same(greedy(half, prompt(), max_new_tokens=12), want)


def test_where_an_order_of_sums_is_not_known_experts_come_one_by_one(
    checkpoint: Path, multiplied: Multiplied, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = row_products.find_block

    def find_block(weight: torch.Tensor, *rest: Any) -> int | None:
        return None if weight.shape == (64, 96) else inner(weight, *rest)

    monkeypatch.setattr(row_products, "find_block", find_block)
    with opened(prepare(checkpoint, options("cpu"))) as model:
        same(greedy(model, prompt(), max_new_tokens=12), answer(checkpoint))
    assert not multiplied


def test_a_gate_of_which_nothing_is_known_sees_one_row(
    tmp_path: Path, multiplied: Multiplied, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function may take more rows by another routine."""
    from transformers.activations import GELUActivation

    config = tiny_config("qwen3_moe", moe_intermediate_size=96, hidden_act="gelu")
    write("qwen3_moe", tmp_path / "moe", config=config)
    want = answer(tmp_path / "moe")
    with opened(prepare(tmp_path / "moe", options("cpu"))) as model:
        rows: list[int] = []
        inner = GELUActivation.forward

        def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
            rows.append(len(input))
            return inner(self, input)

        monkeypatch.setattr(GELUActivation, "forward", forward)
        same(greedy(model, prompt(), max_new_tokens=12), want)
    assert len(multiplied) == 2 * 4 * 11
    assert rows.count(1) >= sum(experts for experts, _ in multiplied) // 2


def test_a_prompt_comes_while_others_decode(half: Any, multiplied: Multiplied) -> None:
    """Its experts are asked for one by one, those of who is alone at once."""
    from offload.batch.conductor import Conductor

    run: Callable[[Any], Any] = lambda ids: greedy(half, ids, max_new_tokens=12)  # noqa: E731
    prompts = [prompt(seed=seed, length=20 - seed) for seed in range(4)]
    want = [run(ids) for ids in prompts]
    multiplied.clear()
    running: list[Any] = []
    with Conductor(half) as conductor:
        for ids in prompts:
            running.append(conductor.start(lambda ids=ids: run(ids)))
            while conductor.counters.passes < 3 * len(running):
                conductor.step()
        conductor.run()
    for one, alone in zip(running, want, strict=True):
        assert one.error is None, one.error
        same(one.result, alone)
    assert any(experts > 1 for experts, _ in multiplied)


@pytest.mark.parametrize("room", [1, 2**30])
def test_rows_of_several_sequences(
    room: int,
    checkpoint: Path,
    half: Any,
    multiplied: Multiplied,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many of them go through at once."""
    from offload.batch.conductor import Conductor
    from offload.models import expert_rows

    monkeypatch.setattr(expert_rows, "ROW_BYTES", room)
    run: Callable[[Any], Any] = lambda ids: greedy(half, ids, max_new_tokens=12)  # noqa: E731
    prompts = [prompt(seed=seed, length=3 + seed) for seed in range(6)]
    want = [run(ids) for ids in prompts]
    multiplied.clear()
    with Conductor(half) as conductor:
        running = [conductor.start(lambda ids=ids: run(ids)) for ids in prompts]
        conductor.run()
    for one, alone in zip(running, want, strict=True):
        assert one.error is None
        same(one.result, alone)
    before = len(multiplied)
    with Conductor(half) as conductor:  # the last one that is left takes experts at once, too
        one = conductor.start(lambda: run(prompts[0]))
        conductor.run()
    same(one.result, want[0])
    assert all(experts == rows for experts, rows in multiplied[before:])
    assert len(multiplied) > before
    together = [(experts, rows) for experts, rows in multiplied if rows > experts]
    assert together
    assert any(experts > 1 for experts, _ in together) is (room > 1)
