"""Sequences beside each other: the tokens of each alone, and weights read once for all."""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_support import CASES, Case, all_alone, opened
from families import randomise

from offload.batch.conductor import Cancelled, Conductor
from offload.batch.joined import LinearProduct, SliceProduct
from offload.batch.order import Order
from offload.batch.sequence import Sequence
from offload.cpu_ops import row_products
from offload.errors import ClosedError, OffloadError, StoreError
from offload.models import units

Checkpoint = Callable[[str], Path]

BUDGETS = [
    ("qwen3", "1GiB", {}),
    ("qwen3", "2MiB", {}),
    ("qwen3", "2100KiB", {"kv_ram": "500KiB", "kv_block_tokens": 16}),
    ("deepseek_v3", "1800KiB", {"kv_ram": "700KiB", "kv_block_tokens": 16}),
    ("qwen3_moe", "2MiB", {}),
    ("qwen3_moe/q4", "1GiB", {}),
    ("qwen3_moe/q4", "2500KiB", {}),
    ("qwen3/q4", "2500KiB", {}),
]


@pytest.mark.parametrize(("name", "ram", "options"), BUDGETS)
def test_each_gets_the_tokens_it_gets_alone(
    checkpoint: Checkpoint, name: str, ram: str, options: dict[str, Any]
) -> None:
    with opened(checkpoint(name), ram, **options) as model:
        alone = all_alone(model)
        before = torch.get_rng_state()
        read = model.offload.stats()["disk_read_bytes"]
        with Conductor(model) as conductor:
            running = [conductor.start(lambda c=c: c.run(model), seed=c.seed) for c in CASES]
            conductor.run()
        read = model.offload.stats()["disk_read_bytes"] - read
        assert [s.error for s in running] == [None] * len(CASES)
        assert [s.result for s in running] == alone
        assert torch.equal(torch.get_rng_state(), before)
        # Autograd is as it was, too: rows of packed tables are waited for within operations.
        assert (torch.ones(1, requires_grad=True) * 2).requires_grad
        # As many rounds as the longest has passes, and each reads at most what a pass streams.
        assert conductor.counters.passes == max(c.new for c in CASES)
        assert conductor.counters.forwards == sum(c.stop_after or c.new for c in CASES)
        # Where a processor has a kernel, whoever decodes is multiplied together with the others.
        if row_products.find_block(torch.randn(64, 128).bfloat16()) is not None:
            assert conductor.counters.joined > 0
        streams = sum(
            spec.slot_nbytes
            for block, spec in model.offload.plan.blocks.items()
            if model.offload.plan.homes[block].name != "PINNED"
        )
        assert bool(streams) == (ram != "1GiB")
        rows = conductor.counters.rows * 4096 * 2
        assert read <= streams * (conductor.counters.passes + 1) + rows


def test_slices_of_the_head_are_multiplied_together(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each slice is read once, and multiplied once for all who decode, with each one's logits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(checkpoint("qwen3"), vocab_size=256)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    randomise(made)
    made.save_pretrained(tmp_path)
    monkeypatch.setattr(units, "HEAD_SLICE_BYTES", 2**14)
    multiply, together = SliceProduct.multiply, list[tuple[str, int]]()

    def counted(self: SliceProduct, rows: Any) -> Any:
        together.append((self.name, len(rows)))
        return multiply(self, rows)

    monkeypatch.setattr(SliceProduct, "multiply", counted)

    def logits(model: Any, ids: tuple[int, ...]) -> torch.Tensor:
        how: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": []}
        how |= {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
        return torch.cat(model.generate(torch.tensor([ids]), **how).logits)

    with opened(tmp_path, "2MiB") as model:
        head = model.offload.attachment.cut.head
        assert head is not None
        assert [b - a for a, b in head.rows] == [64] * 4
        alone = [logits(model, case.ids) for case in CASES]
        assert together == []
        with Conductor(model) as conductor:
            running = [conductor.start(lambda c=c: logits(model, c.ids)) for c in CASES]
            conductor.run()
        assert model.offload.attachment.join_head is None
    for sequence, want in zip(running, alone, strict=True):
        assert sequence.error is None
        assert torch.equal(sequence.result, want)
    if row_products.find_block(torch.randn(64, 128).bfloat16()) is not None:
        found = {name for name, _ in together}
        assert found == {f"lm_head#{i}" for i in range(4)}
        assert together.count(("lm_head#0", len(CASES))) == 4


def test_an_order_is_learnt_from_those_who_leave_stops_out() -> None:
    """One that decodes shows q2 first, then a prompt, which has no q2, shows r2."""
    order = Order("pass")
    decode = ["q1", "r1", "q2", "o2", "r2", "q3", "r3", "head"]
    prompt = ["r1", "r2", "r3", "head"]

    def walk(stops: list[str]) -> None:
        for after, stop in pairwise(["pass", *stops, "pass"]):
            order.learn(stop, after)

    for some in (prompt[:1], decode[:3], prompt, decode, prompt):
        walk(some)
    assert sorted(decode, key=order.__getitem__) == decode
    assert (order["pass"], len(order)) == (0, 9)
    # What contradicts itself changes nothing.
    order.learn("q1", "head")
    assert sorted(decode, key=order.__getitem__) == decode


def test_sequences_join_and_leave(checkpoint: Checkpoint) -> None:
    """Two at a time: whoever ends makes room for the next, in the middle of the others."""
    with opened(checkpoint("qwen3"), "2MiB") as model:
        alone = all_alone(model)
        waiting = list(enumerate(CASES))
        found: dict[int, Any] = {}
        most = 0
        with Conductor(model, most_rows=8) as conductor:

            def begin(_: object = None) -> None:
                if waiting:
                    i, case = waiting.pop(0)

                    def end(sequence: Sequence) -> None:
                        found[i] = sequence.result
                        begin()

                    conductor.start(lambda: case.run(model), seed=case.seed, on_end=end)

            begin()
            begin()
            while conductor.step():
                most = max(most, len(conductor))
        assert most == 2
        assert [found[i] for i in range(len(CASES))] == alone


def test_cancelled_and_failing_sequences_harm_nobody(checkpoint: Checkpoint) -> None:
    """In the middle of a unit, too: a MoE layer's sequences wait there for its experts."""
    with opened(checkpoint("qwen3_moe"), "2MiB") as model:
        alone = all_alone(model)

        def fails() -> None:
            def on_token(_: int) -> bool:
                raise ValueError("of its own")

            from offload.batch.generation import generate

            generate(model, (4, 5), max_new_tokens=5, on_token=on_token)

        ended: list[Sequence] = []
        with Conductor(model) as conductor:
            good = [conductor.start(lambda c=c: c.run(model), seed=c.seed) for c in CASES[:3]]
            bad = conductor.start(fails, on_end=ended.append)
            gone = [conductor.start(lambda: CASES[2].run(model)) for _ in range(6)]
            for i, sequence in enumerate(gone):
                for _ in range(3 + 4 * i):
                    conductor.step()
                sequence.cancel()
            conductor.run()
            assert [s.result for s in good] == alone[:3]
            assert all(isinstance(s.error, Cancelled) for s in gone)
            assert isinstance(bad.error, ValueError)
            assert ended == [bad]
            model.offload.executor.validate()
            assert model.offload.executor.held() == []
        assert all_alone(model) == alone


def test_a_block_that_cannot_be_read_fails_those_who_need_it(checkpoint: Checkpoint) -> None:
    with opened(checkpoint("qwen3"), "2MiB") as model:
        store = model.offload.executor.store
        read_into, broken = store.read_into, True

        def read(block: str, *args: Any, **kwargs: Any) -> Any:
            if broken:
                failed: Future[Any] = Future()
                failed.set_exception(StoreError(f"{block}: {errno.errorcode[errno.EIO]}"))
                return failed
            return read_into(block, *args, **kwargs)

        model.offload.executor.settle()
        store.read_into = read
        with Conductor(model) as conductor:
            running = [conductor.start(lambda c=c: c.run(model), seed=c.seed) for c in CASES]
            conductor.run()
            assert all(isinstance(s.error, StoreError) for s in running)
            broken = False
            again = [conductor.start(lambda c=c: c.run(model), seed=c.seed) for c in CASES]
            conductor.run()
        del store.read_into
        assert [s.result for s in again] == all_alone(model)


def test_an_interruption_ends_all_and_the_model_lives_on(checkpoint: Checkpoint) -> None:
    class Stop(BaseException):
        pass

    with opened(checkpoint("qwen3_moe"), "2MiB") as model:
        alone = all_alone(model)
        calls = 0

        def stop(*_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 20:
                raise Stop

        hook = model.model.layers[1].mlp.experts.register_forward_pre_hook(stop, prepend=True)
        conductor = Conductor(model)
        running = [conductor.start(lambda c=c: c.run(model), seed=c.seed) for c in CASES]
        with pytest.raises(Stop):
            conductor.run()
        conductor.close()
        hook.remove()
        assert sum(isinstance(s.error, Cancelled) for s in running) == len(CASES) - 1
        assert all_alone(model) == alone
        with pytest.raises(ClosedError):
            conductor.start(lambda: None)


def test_what_a_sequence_may_not_do(checkpoint: Checkpoint) -> None:
    with opened(checkpoint("qwen3"), "2MiB") as model, Conductor(model) as conductor:
        with pytest.raises(OffloadError, match="already"):
            Conductor(model)

        def leaks() -> Any:
            with torch.inference_mode():
                return CASES[0].run(model)

        bad = conductor.start(leaks)
        good = conductor.start(lambda: CASES[2].run(model))
        conductor.run()
        assert isinstance(bad.error, OffloadError)
        assert "inference_mode" in str(bad.error)
        assert good.error is None
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()


def test_autograd_is_each_ones_own(checkpoint: Checkpoint) -> None:
    """One under no_grad, one without: neither sees the other's."""
    with opened(checkpoint("qwen3"), "2MiB") as model, Conductor(model) as conductor:
        seen: list[tuple[str, bool]] = []

        def forward(name: str) -> None:
            for _ in range(3):
                model(input_ids=torch.tensor([[4, 5]]), use_cache=False)
                seen.append((name, torch.is_grad_enabled()))

        def without() -> None:
            with torch.no_grad():
                forward("without")

        running = [conductor.start(without), conductor.start(lambda: forward("with"))]
        conductor.run()
        assert [s.error for s in running] == [None, None]
        assert sorted(set(seen)) == [("with", True), ("without", False)]
        assert torch.is_grad_enabled()


def test_who_joins_in_the_middle_of_a_pass_learns_no_other_order(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that runs twice in a pass: the second time is the second stop, also of a sequence
    that was alone the first time."""
    monkeypatch.setattr(LinearProduct, "takes", lambda _, x: x.shape[-1] == x.numel())
    with opened(checkpoint("qwen3"), "2MiB") as model:
        twice = model.twice = torch.nn.Linear(128, 128, dtype=torch.bfloat16)
        runs: list[int] = []
        for i in (0, 4):
            layer = model.model.layers[i].mlp

            def hook(_module: Any, args: Any, i: int = i) -> None:
                twice(args[0])
                runs.append(i)

            layer.register_forward_pre_hook(hook)
        with Conductor(model) as conductor:
            one = conductor.start(lambda: CASES[0].run(model), seed=CASES[0].seed)
            while runs != [0, 4, 0]:  # a prompt, and the first half of a token
                conductor.step()
            other = conductor.start(lambda: CASES[2].run(model), seed=CASES[2].seed)
            conductor.run()
            order = conductor._order
            joined = [stop for stop in order._stops if stop[:2] == ("join", "twice")]
            assert [s.error for s in (one, other)] == [None, None]
        assert sorted(stop[2] for stop in joined) == [1, 2]
        for stop, behind in order._behind.items():
            assert all(order[stop] < order[later] for later in behind)


def test_prompts_share_a_pass_only_as_far_as_memory_allows(checkpoint: Checkpoint) -> None:
    """One that always goes, then those that fit; the others join with the next pass."""
    cases = [Case(tuple(range(3, 3 + n)), 2) for n in (10, 10, 5, 20)]
    with opened(checkpoint("qwen3"), "1GiB") as model, Conductor(model, most_rows=16) as conductor:
        running = [conductor.start(lambda c=c: c.run(model)) for c in cases]
        counts = []
        while conductor.step():
            counts.append(conductor.counters.rows)
        # Steps within a pass (they wait at linear layers, too) add nothing.
        rows = list(dict.fromkeys([*counts, conductor.counters.rows]))
        assert [n for n in rows if n] == [15, 27, 48, 49]
        assert [s.error for s in running] == [None] * 4
