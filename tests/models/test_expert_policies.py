"""Policies and recordings in real runs of the trained model: the same tokens, other hits."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import offload
from offload.blocks import Tier
from offload.errors import OffloadError, StoreError
from offload.io.routing_file import RoutingReader
from offload.models import opening
from offload.models.expert_groups import ExpertGroup
from offload.models.load import prepare
from offload.models.options import Options
from offload.models.routing_tap import RouterTap
from offload.runtime.routings import RecordedRouting, hot_experts
from offload.scheduler.policies import make_policy
from offload.scheduler.policy import NAMES
from offload.scheduler.replay import replay

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny_moe"
LAYERS, EXPERTS, TOP_K = 8, 16, 2
NEW = 24
EXPERT_BYTES = 72 * 2**10
MIB = 2**20
SETTINGS: dict[str, Any] = {
    "context": 64, "prompt_tokens": 40, "overhead_bytes": 2 * MIB, "guess": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    text = (MODEL / "heldout.txt").read_text(encoding="utf-8")
    found = AutoTokenizer.from_pretrained(MODEL).encode(text, add_special_tokens=False)
    return torch.tensor([found[:40]])


@pytest.fixture(scope="module")
def want(ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Greedy tokens of the resident model, and its router's logits for all but the last."""
    model = AutoModelForCausalLM.from_pretrained(
        MODEL, dtype="auto", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        out = greedy(model, ids)
        logits = model(input_ids=out[:, :-1], output_router_logits=True).router_logits
    return out, list(logits)


def greedy(model: Any, ids: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW,
        min_new_tokens=NEW,
    )  # fmt: skip
    return out


@cache
def budget(slots: int, device: str) -> int:
    """RAM (and device memory) for all dense weights and just so many experts."""
    prepared = prepare(MODEL, Options(ram=64 * MIB, device=device, **SETTINGS))
    ram = prepared.minimum[max(prepared.minimum)] + 4 * MIB
    for _ in range(20):
        prepared = prepare(MODEL, Options(ram=ram, device=device, **SETTINGS))
        found = prepared.plan.tiers[prepared.plan.compute_tier].slots
        if found == slots:
            return ram
        ram += (slots - found) * EXPERT_BYTES
    raise AssertionError(f"no budget has {slots} slots")


@contextmanager
def opened(slots: int, device: str = "cpu", **more: Any) -> Iterator[Any]:
    model = offload.load(MODEL, ram=budget(slots, device), device=device, **SETTINGS | more)
    try:
        yield model
    finally:
        model.offload.close()


@pytest.fixture(scope="module")
def recorded(
    ids: torch.Tensor, want: tuple[torch.Tensor, Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("routing") / "tiny.routing"
    with opened(64, record_routing=path) as model:
        assert torch.equal(greedy(model, ids), want[0])
        assert not path.exists(), "only a whole file has the name"
    return path


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("slots", "device"), [(8, "cpu"), (48, "sim")])
@pytest.mark.parametrize("name", NAMES)
def test_the_same_tokens_whatever_the_policy(
    name: str, slots: int, device: str, ids: torch.Tensor, want: Any, recorded: Path
) -> None:
    more = {"routing": recorded} if name == "pinned" else {}
    with opened(slots, expert_policy=name, device=device, **more) as model:
        assert model.offload.plan.expert_policy == name
        assert torch.equal(greedy(model, ids), want[0])
        stats = model.offload.stats()
        assert stats["misses"] > 0
        model.offload.executor.validate()


def test_what_is_recorded_is_what_the_router_said(
    ids: torch.Tensor, want: Any, recorded: Path
) -> None:
    reader = RoutingReader(recorded)
    assert reader.header.model == "tiny_moe"
    assert reader.header.experts == (EXPERTS,) * LAYERS
    at = [0] * LAYERS
    runs = list(reader)
    assert [r.tokens for r in runs] == [ids.shape[1]] * LAYERS + [1] * LAYERS * (NEW - 1)
    for run in runs:
        probs_TE = want[1][run.layer].float().softmax(-1)[at[run.layer] :][: run.tokens]
        at[run.layer] += run.tokens
        assert (run.chosen, run.width) == (TOP_K, 2 * TOP_K)
        experts_TP = torch.tensor(run.experts).view(run.tokens, run.width)
        scores_TP = torch.tensor(run.scores).view(run.tokens, run.width)
        # The reference ran in one pass: other kernels, other last bits.
        torch.testing.assert_close(scores_TP, probs_TE.gather(1, experts_TP), atol=0.02, rtol=0.02)
        assert (scores_TP[:, 1:] <= scores_TP[:, :-1] + 1e-6).all(), "the likeliest first"
    assert at == [ids.shape[1] + NEW - 1] * LAYERS


def test_below_one_tokens_experts_the_default_hits_where_lru_does_not(
    ids: torch.Tensor, want: Any, recorded: Path
) -> None:
    """The cliff: 8 slots, 16 expert uses per token. Real runs, and the replay foretells them."""
    rates = {}
    hot = {"pinned": {"routing": recorded}}
    for name in ("lru", "laps", "pinned"):
        with opened(8, expert_policy=name, **hot.get(name, {})) as model:
            plan = model.offload.plan
            assert plan.tiers[Tier.RAM].slots == 8
            greedy(model, ids)
            stats = model.offload.stats()
            rates[name] = stats["hits"] / (stats["hits"] + stats["misses"])
            [warning] = [r for r in plan.reasons if r.startswith("warning:")]
            assert "16 experts of one token" in warning
            blocks = {g.name: g.blocks for g in model.offload.attachment.cut.groups}
            passes = list(RecordedRouting(recorded, blocks=blocks, as_run=True))
            kept = plan.kept.get(Tier.RAM, frozenset())
            # The real run displaces what it wants last where the replay asks the policy, in waves.
            tally = replay(passes, make_policy(name, plan.groups, kept), 8)
            assert rates[name] == pytest.approx(tally.hit_rate, abs=0.02)
    assert rates["lru"] < 0.01
    assert rates["laps"] > rates["lru"] + 0.03
    assert rates["pinned"] > rates["lru"] + 0.03


def test_mrs_hears_the_router(ids: torch.Tensor) -> None:
    with opened(48, expert_policy="mrs") as model:
        greedy(model, ids)
        mrs = model.offload.executor._residency._stock.top.cache
        groups = model.offload.attachment.cut.groups
        scores = {b: mrs.score(b, g.name) for g in groups for b in g.blocks}
        # Without the router's word S of what was used last would be at least α = 1/2.
        used_last = [max(scores[b] for b in g.blocks) for g in groups]
        assert all(0 < s < 1 for s in used_last)
        assert len({round(s, 6) for s in scores.values()}) > EXPERTS


def test_an_unwrapped_model_publishes_and_a_forgotten_one_too(
    ids: torch.Tensor, tmp_path: Path
) -> None:
    first, second = tmp_path / "unwrapped", tmp_path / "forgotten"
    model = AutoModelForCausalLM.from_pretrained(
        MODEL, dtype="auto", experts_implementation="eager"
    ).eval()
    offload.wrap(model, ram="16MiB", disk=tmp_path, record_routing=first, expert_policy="clock")
    assert model.offload.plan.expert_policy == "clock"
    with torch.no_grad():
        model(input_ids=ids)
    offload.unwrap(model)
    assert len(list(RoutingReader(first))) == LAYERS
    streamed = offload.load(MODEL, ram="16MiB", context=64, record_routing=second)
    with torch.no_grad():
        streamed(input_ids=ids)
    del streamed
    gc.collect()
    if not second.exists():  # transformers may keep the model alive a little
        pytest.skip("the model has not been collected")
    assert len(list(RoutingReader(second))) == LAYERS


def test_a_routing_that_cannot_be_written_leaves_a_closed_model(
    tmp_path: Path, ids: torch.Tensor
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    model = offload.load(MODEL, ram="16MiB", context=64, record_routing=folder / "r")
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    with pytest.raises(StoreError, match="cannot be written"):
        model.offload.close()
    assert model.offload.executor.closed
    model.offload.close()


@pytest.mark.parametrize("quant", [None, "q8"])
def test_an_opening_that_fails_leaves_the_recording_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quant: str | None
) -> None:
    """However late: caches come when everything else is there."""

    def full(*_: Any) -> None:
        raise StoreError("no space left")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(opening, "_serve_prompts", full)
    target = tmp_path / "r"
    target.write_bytes(b"before")
    with pytest.raises(StoreError, match="no space left"):
        offload.load(MODEL, ram="256MiB", context=64, record_routing=target, quant=quant)
    assert target.read_bytes() == b"before"
    assert {file.name for file in tmp_path.iterdir()} <= {"r", "cache"}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"expert_policy": "fifo"}, "'fifo' is not one of laps, lru"),
        ({"expert_policy": "pinned"}, "routing FILE"),
        ({"expert_policy": "lru", "routing": "x"}, "only for the expert policy pinned"),
        ({"expert_policy": "pinned", "routing": MODEL / "heldout.txt"}, "not a routing"),
    ],
)
def test_options_that_cannot_take_effect(more: dict[str, Any], words: str) -> None:
    with pytest.raises(OffloadError, match=words):
        offload.load(MODEL, ram="16MiB", context=64, **more)


def test_a_routing_of_another_model(recorded: Path) -> None:
    with pytest.raises(
        OffloadError, match=r"another model \(tiny_moe\).*16 experts there and 1 here"
    ):
        hot_experts(recorded, {"model.layers.0.mlp.experts": ["a"]})


def tap(n: int = 4) -> RouterTap:
    module = torch.nn.Linear(2, 2)
    return RouterTap(ExpertGroup("g", module, n, []))


def test_a_router_that_cannot_be_heard() -> None:
    """Then the weights of the chosen experts count, and without them all the same."""
    index_TK = torch.tensor([[2, 0], [3, 4]])  # 4: another rank's
    hidden, weights_TK = torch.zeros(2, 8), torch.tensor([[3.0, 1.0], [1.0, 1.0]])
    said = tap().read((hidden, index_TK, weights_TK), {})
    assert said is not None
    assert said.experts_TP.tolist() == [[2, 0], [3, 0xFFFF]]
    assert said.scores_TP.tolist() == [[0.75, 0.25], [0.5, 0.0]]
    assert list(said.rows("abcd")) == [{"c": 0.75, "a": 0.25}, {"d": 0.5}]
    even = tap().read((), {"hidden_states": hidden, "top_k_index": index_TK})
    assert even is not None
    assert even.scores_TP.tolist() == [[0.5, 0.5], [0.5, 0.0]]
    assert tap().read((hidden,), {}) is None


def test_a_chosen_expert_need_not_be_the_likeliest() -> None:
    """DeepSeek's balancing bias chooses others."""
    heard = tap()
    logits_TE = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    heard._listen(None, None, (logits_TE, torch.zeros(1, 1)))
    said = heard.read((torch.zeros(1, 8), torch.tensor([[0]])), {})
    assert said is not None
    assert (said.chosen, said.experts_TP.tolist()) == (1, [[0, 1]])
    probs = logits_TE.softmax(-1)[0]
    assert said.scores_TP[0].tolist() == pytest.approx([float(probs[0]), float(probs[1])])
