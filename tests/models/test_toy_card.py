"""A card's code is loaded before a process is weighed: what comes later counts against ``--ram``"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_card import FakeCard
from families import tiny_config, write
from test_packed_run import packed

from offload.models import baseline, load, packed_card, packed_load, toy
from offload.models.load import prepare
from offload.models.meta import model_class
from offload.models.options import Options
from offload.runtime import cuda_api
from offload.runtime.choice import choose

GIB = 1 << 30


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCard]:
    card = FakeCard()
    monkeypatch.setattr(cuda_api, "card_count", lambda: 1)
    monkeypatch.setattr(cuda_api, "current_card", lambda: 0)
    monkeypatch.setattr(cuda_api, "open_card", lambda index: card)
    yield card
    card.end()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_toy_runs_on_the_card(card: FakeCard, family: str, monkeypatch: Any) -> None:
    config = tiny_config(family)
    kind = model_class(config)
    seen: list[tuple[int, int]] = []
    forward = kind.forward

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        ids = args[0] if args else kwargs["input_ids"]
        seen.append(tuple(ids.shape))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", watched)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    baseline.warm_card(choose("cuda", None), config, kind, torch.bfloat16)
    # A prompt, a few tokens, and one: each greedily and drawn, and no draw is the user's.
    assert seen == 2 * [(1, baseline.PROMPT), (1, 1)] + 2 * [(1, 4), (1, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    assert card.calls == ["warm_up", "release_cached"]


def test_a_toy_that_does_not_run_stops_nothing(card: FakeCard) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: no kernel image is available")

    class Broken:
        _from_config = refuse

    baseline.warm_card(choose("cuda", None), tiny_config("llama"), Broken, torch.bfloat16)
    assert card.calls == ["warm_up", "release_cached"]


def test_there_is_nothing_to_do_on_the_cpu() -> None:
    for name in ("cpu", "sim"):
        baseline.warm_card(choose(name, None), tiny_config("llama"), None, torch.bfloat16)


def test_a_checkpoints_process_is_weighed_behind_it(
    card: FakeCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("llama", tmp_path, torch.bfloat16)
    order = watch(monkeypatch, load)
    prepare(tmp_path, Options(ram=GIB, gpu=GIB, device="cuda", context=32, overhead_bytes=0))
    assert order == ["warm_card", "warm_up"]


def test_a_packs_process_is_weighed_behind_its_compiler(
    card: FakeCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVRTC alone is some hundred MiB."""
    _, pack_dir = packed("qwen3_moe", tmp_path, "q8")
    order = watch(monkeypatch, packed_load)
    compiled: list[Any] = []

    class Launcher:
        def __init__(self, device: torch.device) -> None:
            order.append("compiler")

        def prepare(self, kernel: Any) -> None:
            compiled.append(kernel)

    monkeypatch.setattr(packed_load, "check_options", lambda *_: None)
    monkeypatch.setattr(packed_card, "CupyLauncher", Launcher)
    prepare(pack_dir, Options(ram=GIB, gpu=GIB, device="cuda", context=32, overhead_bytes=0))
    assert order == ["warm_card", "compiler", "warm_up"]
    assert len(compiled) == len(set(compiled))
    assert {"quantize", "linear", "dequantize", "gate_up", "down", "merge"} == {
        k.name for k in compiled
    }


def watch(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[str]:
    """The order in which a module warms up and weighs."""
    order: list[str] = []

    def weigh(*_: Any) -> toy.Warm:
        order.append("warm_up")
        return toy.Warm(baseline_rss=0)

    monkeypatch.setattr(module, "warm_card", lambda *_: order.append("warm_card"))
    monkeypatch.setattr(module, "warm_up", weigh)
    return order
