"""Tokens with one thread fewer: only where the bits are the same, and nobody notices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence import greedy, opened, options, prompt, reference
from families import write
from test_packed_run import IDS, packed, planned
from torch import nn

from offload.cpu_ops import threads as kernel_threads
from offload.models import team_check, teams
from offload.models.load import Prepared, prepare
from offload.models.team_check import products_of, same_bits
from offload.models.teams import TeamPlan, one_token
from offload.scheduler.costs import PACKED
from offload.scheduler.hardware import BYTES_PER_S, FLOP_PER_S, Hardware, Rate


def machine(bytes_per_s: float) -> Hardware:
    """Everything else takes no time."""
    fast = Rate.of([1e13], BYTES_PER_S)
    gemv = Rate.of([bytes_per_s], BYTES_PER_S)
    names = ("bfloat16", "float32", PACKED)
    return Hardware(
        name="made up", cores=2, ram_bytes=2**34, ssd_read=fast, ssd_write=fast, ssd_mixed=fast,
        ram_read=fast, memcpy=fast, gemv=dict.fromkeys(names, gemv),
        matmul=dict.fromkeys(names, Rate.of([1e15], FLOP_PER_S)),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _two_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of two threads; tiny models count; the memory of trials is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(teams, "LEAST_BYTES", 1)
    monkeypatch.setattr(teams, "LEAST_BUDGET", 1)
    torch.set_num_threads(2)
    kernel_threads.setup(2)
    yield
    torch.set_num_threads(1)
    kernel_threads.setup(1)


def half(directory: Path, **more: Any) -> Prepared:
    """A plan that streams about half of a model."""
    whole = prepare(directory, options("cpu", **more))
    ram = max(whole.minimum.values()) + sum(s.slot_nbytes for s in whole.cut.blocks.values()) // 3
    return prepare(directory, options("cpu", **more, ram=ram))


# -- do they compute the same bits? ---------------------------------------------------------

PRODUCTS = [
    ["linear", 700, 256, "float32", True],
    ["linear", 60_000, 64, "bfloat16", False],  # more than the memory that is repeated
    ["turned", 256, 300, "bfloat16", False],
    ["attends", 8, 2, 32, 16, 515, "float32"],
]


def test_the_trial_says_what_this_machine_does() -> None:
    """The answer of the whole is that of its parts, tried here one by one."""

    def same(work: Any) -> bool:
        found = []
        for threads in (2, 1):
            torch.set_num_threads(threads)
            found.append(work())
        return torch.equal(*found)

    generator = torch.Generator().manual_seed(5)
    W = torch.randn(700, 256, generator=generator)
    x_NI = torch.randn(50, 1, 256, generator=generator)
    here = same(lambda: torch.stack([nn.functional.linear(x, W) for x in x_NI]))
    assert same_bits(PRODUCTS[:1], 2) is here
    assert isinstance(same_bits(PRODUCTS, 2), bool)


def test_what_was_tried_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team_check, "_TRIAL", "print('true')")
    assert same_bits(PRODUCTS, 2)
    monkeypatch.setattr(team_check, "_TRIAL", "print('false')")
    assert same_bits(PRODUCTS, 2)
    assert not same_bits(PRODUCTS, 3)  # another number is another question
    assert not same_bits(PRODUCTS[:2], 2)


@pytest.mark.parametrize(
    "text",
    ["raise SystemExit(3)", "print('nonsense')", "", "print(1)", "import signal; signal.pause()"],
)
def test_a_trial_that_fails_is_no(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team_check, "_TRIAL", text)
    monkeypatch.setattr(team_check, "TIMEOUT_S", 0.5 if "signal" in text else 60.0)
    assert not same_bits(PRODUCTS, 2)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2", "gpt_oss"])
def test_every_matrix_is_tried(family: str, tmp_path: Path) -> None:
    """Of a token's products, as they happen: each was listed."""
    write(family, tmp_path / "m")
    made = prepare(tmp_path / "m", options("cpu"))
    listed = products_of(made.meta.model, made.cut, 64)
    assert listed is not None
    shapes = {tuple(p[1:3]) for p in listed if p[0] != "attends"}
    model = reference(tmp_path / "m", torch.float32)
    seen: set[tuple[int, ...]] = set()

    class Products(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            if func in (nn.functional.linear, torch.addmm):
                weight = args[1] if func is nn.functional.linear else args[2]
                seen.add(tuple(weight.shape))
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Products():
        model(torch.tensor([[3]]))
    vocabulary = model.config.vocab_size  # in slices, where it is large
    assert seen
    assert {s for s in seen if vocabulary not in s} <= shapes


def test_what_is_not_known_is_not_tried(tmp_path: Path) -> None:
    write("llama", tmp_path / "m")
    made = prepare(tmp_path / "m", options("cpu"))
    model = made.meta.model
    assert products_of(model, made.cut, 64) is not None
    for odd in (nn.Conv1d(4, 4, 3), nn.GRU(4, 4)):
        model.odd = odd
        assert products_of(model, made.cut, 64) is None


# -- who computes? --------------------------------------------------------------------------


def test_the_faster_number_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team_check, "_TRIAL", "print('true')")
    write("llama", tmp_path / "m")
    base = half(tmp_path / "m", hardware=machine(1e4))
    assert base.team == TeamPlan(fewer=False, planned=False)
    assert base.plan.predicted_pass_s is not None

    better = half(tmp_path / "m", hardware=machine(1e4), fewer=machine(2e4))
    assert better.team is not None
    assert better.team.fewer
    assert better.plan.predicted_pass_s is not None
    twice = base.plan.predicted_pass_s.mid / better.plan.predicted_pass_s.mid
    assert twice == pytest.approx(2, rel=0.2)
    assert better.team.note in better.notes
    assert "1 of 2 threads" in str(better.team.note)
    # All else of the plan is the same.
    times = {k: getattr(base.plan, k) for k in ("predicted_pass_s", "bound_pass_s", "lane_s")}
    assert replace(better.plan, **times, trace=base.plan.trace) == base.plan
    better.replan()  # for several sequences, or many tokens at once
    assert better.team is None
    assert not [note for note in better.notes if "threads" in note]

    for fewer in (machine(0.5e4), machine(1.01e4)):  # slower; as good as the same
        left = half(tmp_path / "m", hardware=machine(1e4), fewer=fewer)
        assert left.plan.predicted_pass_s == base.plan.predicted_pass_s
        assert left.team is not None
        assert not left.team.fewer
        assert left.team.planned
        assert left.notes == base.notes


def test_other_bits_are_not_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team_check, "_TRIAL", "print('false')")
    write("llama", tmp_path / "m")
    base = half(tmp_path / "m", hardware=machine(1e4))
    found = half(tmp_path / "m", hardware=machine(1e4), fewer=machine(2e4))
    assert found.plan.predicted_pass_s == base.plan.predicted_pass_s
    assert found.team is base.team is None


@pytest.mark.parametrize(
    "more", [{"device": "sim", "gpu": 2**30}, {"sequences": 4}, {"ram": 2**30}], ids=str
)
def test_where_it_is_not_for(more: dict[str, Any], tmp_path: Path) -> None:
    """A card computes; several sequences; nothing is streamed."""
    write("llama", tmp_path / "m")
    job = {"device": "cpu", "hardware": machine(1e4), "fewer": machine(2e4), **more}
    if "ram" in more:
        assert prepare(tmp_path / "m", options(**job)).team is None
    else:
        device = job.pop("device")
        assert prepare(tmp_path / "m", options(device, **job)).team is None


def test_one_thread_has_none_fewer(tmp_path: Path) -> None:
    write("llama", tmp_path / "m")
    torch.set_num_threads(1)
    assert half(tmp_path / "m", hardware=machine(1e4), fewer=machine(2e4)).team is None


def test_passes_of_one_token() -> None:
    one, two = torch.zeros(1, 1), torch.zeros(1, 2)
    for args, kwargs in (
        ((one,), {}),
        ((), {"input_ids": one}),
        ((), {"decoder_input_ids": one}),
        ((), {"inputs_embeds": torch.zeros(1, 1, 8)}),
    ):
        assert one_token(args, kwargs)
    for args, kwargs in (
        ((two,), {}),
        ((two.T,), {}),
        ((), {"input_ids": two}),
        ((), {"inputs_embeds": torch.zeros(1, 2, 8)}),
        ((), {"inputs_embeds": torch.zeros(2, 1, 8)}),
        ((), {}),
    ):
        assert not one_token(args, kwargs)


# -- what runs ------------------------------------------------------------------------------


@contextmanager
def counted(module: nn.Module) -> Iterator[list[tuple[int, int]]]:
    """Tokens and threads of every call of a module."""
    seen: list[tuple[int, int]] = []

    def note(_: nn.Module, args: Any, kwargs: Any, __: Any) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        seen.append((x.shape[-2], torch.get_num_threads()))

    handle = module.register_forward_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


@pytest.mark.parametrize("fewer", [False, True])
def test_tokens_and_prompts(fewer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts have all threads; a token has those that were planned; the bits are those of the
    resident model; outside nothing has changed."""
    monkeypatch.setattr(team_check, "_TRIAL", "print('true')")
    write("llama", tmp_path / "m")
    want = greedy(reference(tmp_path / "m", torch.bfloat16), prompt())
    rates = (machine(1e4), machine(2e4))
    now, other = rates if fewer else rates[::-1]
    made = half(tmp_path / "m", hardware=now, fewer=other)
    with opened(made) as model, counted(model.model.layers[0]) as seen:
        got = greedy(model, prompt())
        assert torch.get_num_threads() == 2
        assert model.offload.stats()["fewer_threads"] is fewer
    assert torch.equal(got.sequences, want.sequences)
    assert all(map(torch.equal, got.logits, want.logits))
    assert seen[0] == (9, 2)
    assert set(seen[1:]) == {(1, 1 if fewer else 2)}


def test_nobody_has_said_which_is_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are tried in the run."""
    monkeypatch.setattr(team_check, "_TRIAL", "print('true')")
    write("llama", tmp_path / "m")
    with opened(half(tmp_path / "m")) as model, counted(model.model.layers[0]) as seen:
        greedy(model, prompt(), max_new_tokens=30)
        assert model.offload.team is not None
        assert model.offload.team.trials == 1
    assert [t for n, t in seen if n == 1][:20] == [2] * 4 + ([2] * 4 + [1] * 4) * 2


def test_a_budget_in_which_nothing_can_be_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process might not have room beside this one."""
    monkeypatch.setattr(teams, "LEAST_BUDGET", 2**40)
    monkeypatch.setattr(team_check, "_TRIAL", "print('true')")
    write("llama", tmp_path / "m")
    made = half(tmp_path / "m", hardware=machine(1e4), fewer=machine(2e4))
    assert made.team is None


def test_an_error_gives_the_threads_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team_check, "_TRIAL", "print('true')")
    write("llama", tmp_path / "m")
    made = half(tmp_path / "m", hardware=machine(1e4), fewer=machine(2e4))
    with opened(made) as model:

        def fails(*_: Any) -> None:
            assert torch.get_num_threads() == 1
            raise RuntimeError("a user's hook")

        hook = model.model.norm.register_forward_hook(fails)
        with pytest.raises(RuntimeError, match="a user's hook"), torch.no_grad():
            model(torch.tensor([[3]]))
        assert torch.get_num_threads() == 2
        hook.remove()
        greedy(model, prompt(), max_new_tokens=2)


@pytest.mark.parametrize("fewer", [False, True])
def test_a_packs_kernels_have_as_many(
    fewer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their bits do not depend on it, so nothing is tried before."""
    _, pack_dir = packed("qwen3_moe", tmp_path, "q4")
    with opened(planned(pack_dir)) as model:
        want = greedy(model, IDS, max_new_tokens=8)
        whole = sum(s.slot_nbytes for s in model.offload.plan.blocks.values())
        least = max(planned(pack_dir).minimum.values())
    rates = (machine(1e4), machine(2e4))
    now, other = rates if fewer else rates[::-1]
    made = planned(pack_dir, least + whole // 4, hardware=now, fewer=other)
    assert made.team is not None
    used: list[int] = []
    run = kernel_threads.run

    def noted(*args: Any, **kwargs: Any) -> None:
        used.append(kernel_threads.count())
        run(*args, **kwargs)

    with opened(made) as model:
        monkeypatch.setattr(kernel_threads, "run", noted)
        got = greedy(model, IDS, max_new_tokens=8)
        assert kernel_threads.count() == 2
        assert model.offload.stats()["fewer_threads"] is fewer
    assert torch.equal(got.sequences, want.sequences)
    assert all(map(torch.equal, got.logits, want.logits))
    assert used
    assert (1 in used) is fewer
