"""A run that stops and goes on is the run that never stopped, to the last bit."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_support import (
    STEPS,
    Log,
    again,
    everything_on_disk,
    options_for,
    planned_once,
    train,
    weights_of,
    write_data,
    write_model,
)
from transformers.utils import chat_template_utils

import offload
from offload.errors import OffloadError, PlanError
from offload.models import prompt_time
from offload.runtime.rss import current_rss
from offload.train import dropin_load, preparing
from offload.train.preparing import prepare
from offload.train.run import Run

KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"states": "bf16"},
    "8bit": {"states": "8bit"},
    "unclipped": {"max_grad_norm": 0.0},
    "accumulated": {"grad_accum": 3, "max_steps": 4},
    "unclipped-accumulated-bf16": {"max_grad_norm": 0.0, "grad_accum": 2, "states": "bf16"},
    "clipped-hard": {"max_grad_norm": 0.05},
    "gradients-in-fp32": {"grad_dtype": "fp32"},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": {},
    "tied": {"family": "llama", "tie_word_embeddings": True},
    "masters": {"family": "llama", "dtype": torch.float32},
    "dropout": {"family": "gpt2", "tie_word_embeddings": False},
    "tied masters": {"family": "llama", "dtype": torch.float32, "tie_word_embeddings": True},
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    planned_once(monkeypatch)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            how = {"family": name, **FAMILIES[name]}
            made[name] = write_model(tmp_path_factory.mktemp(name) / "m", **how)
        return made[name]

    return get


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "train.jsonl")


def as_planned(_: Run) -> None: ...


def check(whole: Log, parts: list[Log], one: Path, other: Path) -> None:
    losses: dict[int, float] = {}
    norms: dict[int, float] = {}
    for part in parts:
        losses |= part.losses
        norms |= part.norms
    assert losses == whole.losses
    assert norms == whole.norms
    assert weights_of(other) == weights_of(one)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *[("llama", kind) for kind in KINDS if kind not in ("bf16", "unclipped")],
        ("qwen3_moe", "fp32"), ("qwen3_moe", "unclipped"),
        ("tied", "fp32"), ("masters", "fp32"), ("masters", "8bit"), ("dropout", "accumulated"),
        # Each of their traits is in one of the above.
        *[pytest.param("llama", kind, marks=pytest.mark.sweep) for kind in ("bf16", "unclipped")],
        *[pytest.param("qwen3_moe", kind, marks=pytest.mark.sweep) for kind in
          ("bf16", "accumulated")],
        pytest.param("masters", "bf16", marks=pytest.mark.sweep),
    ],
)  # fmt: skip
def test_stopped_at_every_step(
    models: Callable[[str], Path], data: Path, tmp_path: Path, family: str, kind: str
) -> None:
    """At each step another budget and another way to the same result."""
    more = dict(KINDS[kind])
    if family == "masters":
        more["dtype"] = "bfloat16"
    model = models(family)
    whole = train(options_for(model, data, tmp_path / "whole", **more))
    assert len(set(whole.losses.values())) == STEPS
    assert whole.commits == list(range(1, STEPS + 1))
    options = options_for(model, data, tmp_path / "parts", **{**more, "save_every": None})
    ways: list[tuple[Callable[[Run], None], dict[str, Any]]] = [
        (as_planned, {}),
        (everything_on_disk, {"order": "usual"}),
        (as_planned, {"ram": 128 << 20, "save_every": 3}),
        (everything_on_disk, {"save_every": 1}),
    ]
    parts = []
    for step, (change, differs) in enumerate(ways, 1):
        turn = options if step == 1 else again(options, **differs)
        parts.append(train(turn, stop_after=step, change=change))
        assert list(parts[-1].losses) == [step]
        end = parts[-1].end
        assert end is not None
        assert end.stopped == ("interrupted" if step < STEPS else "done")
        assert parts[-1].commits[-1] == step
    check(whole, parts, tmp_path / "whole" / "out", tmp_path / "parts" / "out")


def test_the_order_of_a_weight_in_two_places(
    models: Callable[[str], Path], data: Path, tmp_path: Path
) -> None:
    """Tied embeddings: layer by layer the head's gradients of all micro-batches are summed before
    the first one of the table comes, one after the other they alternate. A run keeps its order."""
    more: dict[str, Any] = {"grad_accum": 3, "max_steps": 2}
    options = options_for(models("tied masters"), data, tmp_path / "parts", **more)
    train(options, stop_after=1)
    with pytest.raises(OffloadError, match=r"(?s)order.*vertical"):
        train(again(options, order="usual"))
    second = train(again(options, ram=256 << 20), change=everything_on_disk)
    assert list(second.losses) == [2]
    whole = options_for(models("tied masters"), data, tmp_path / "whole", **more)
    train(whole)
    assert weights_of(tmp_path / "parts" / "out") == weights_of(tmp_path / "whole" / "out")


def test_from_the_disk_at_once(models: Callable[[str], Path], data: Path, tmp_path: Path) -> None:
    """The first part without anything in RAM, the second one all in it; evaluation in between."""
    more: dict[str, Any] = {"eval_share": 0.3, "eval_every": 1}
    model = models("qwen3_moe")
    whole = train(options_for(model, data, tmp_path / "whole", **more))
    options = options_for(model, data, tmp_path / "parts", **more)
    first = train(options, stop_after=2, change=everything_on_disk)
    second = train(again(options))
    check(whole, [first, second], tmp_path / "whole" / "out", tmp_path / "parts" / "out")
    assert first.evals | second.evals == whole.evals
    assert whole.evals


def test_another_pass_over_a_finished_run_writes_it_again(
    models: Callable[[str], Path], data: Path, tmp_path: Path
) -> None:
    options = options_for(models("llama"), data, tmp_path)
    train(options)
    before = weights_of(tmp_path / "out")
    log = train(again(options))
    assert not log.losses
    assert weights_of(tmp_path / "out") == before


def test_a_run_at_a_constant_rate_is_made_longer(
    models: Callable[[str], Path], data: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"schedule": "constant", "warmup": 2.0}
    whole = train(options_for(models("llama"), data, tmp_path / "whole", **settings))
    options = options_for(models("llama"), data, tmp_path / "parts", max_steps=3, **settings)
    first = train(options)
    assert list(first.losses) == [1, 2, 3]
    check(
        whole, [first, train(again(options, max_steps=STEPS))],
        tmp_path / "whole" / "out", tmp_path / "parts" / "out",
    )  # fmt: skip
    with pytest.raises(OffloadError, match=f"has taken {STEPS} steps.*--max-steps {STEPS} or more"):
        train(again(options, max_steps=3))
    with pytest.raises(OffloadError, match="its warmup is 2, this run's is 1"):
        train(again(options, max_steps=STEPS, warmup=1.0))


def test_stopped_before_any_commit(
    models: Callable[[str], Path], data: Path, tmp_path: Path
) -> None:
    """A store without a commit: the run begins anew, whatever the store's tiles hold."""
    options = options_for(models("masters"), data, tmp_path / "a", dtype="bfloat16")
    whole = train(options_for(models("masters"), data, tmp_path / "b", dtype="bfloat16"))

    class Gone(Exception):
        pass

    def leave(step: int) -> None:
        if step == 2:
            raise Gone

    with pytest.raises(Gone):
        train(replace(options, save_every=None), Log(leave), change=everything_on_disk)
    resumed = train(again(options))
    check(whole, [resumed], tmp_path / "b" / "out", tmp_path / "a" / "out")


def test_a_template_with_the_date_goes_on_on_another_day(
    models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are those of the day on which the run began."""

    def on(day: int) -> None:
        class Clock(datetime.datetime):
            @classmethod
            def now(cls, tz: Any = None) -> Any:
                return cls(2026, 1, day, 12, 30, 5, 77)

        for module in (prompt_time, chat_template_utils):
            monkeypatch.setattr(module, "datetime", Clock)

    model, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    shutil.copytree(models("llama"), model)
    (model / "chat_template.jinja").write_text(
        "{{ 'disk' if strftime_now('%d') == '07' else 'ring' }}"
        "{% for m in messages %} {{ m['content'] }}{% endfor %}"
    )
    said = [{"role": "user", "content": "feeds"}, {"role": "assistant", "content": "a layer"}]
    rows.write_text((json.dumps({"messages": said}) + "\n") * 40)
    options = options_for(model, rows, tmp_path / "a")
    on(7)
    whole = train(options_for(model, rows, tmp_path / "b"))
    begun = train(options, stop_after=2)
    on(8)
    resumed = train(again(options))
    check(whole, [begun, resumed], tmp_path / "b" / "out", tmp_path / "a" / "out")
    new = train(options_for(model, rows, tmp_path / "c"))
    assert new.losses != whole.losses


def test_the_least_budget_is_told_and_works(
    models: Callable[[str], Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_for(models("llama"), data, tmp_path)
    with pytest.raises(PlanError, match=r"raise it to \d+MiB") as raised:
        prepare(replace(options, ram=1 << 20))
    assert not (tmp_path / "disk").exists()
    told = re.search(r"raise it to (\d+)MiB", str(raised.value))
    assert told is not None
    train(replace(options, ram=int(told.group(1)) << 20))
    with pytest.raises(PlanError):
        prepare(replace(options, ram=(int(told.group(1)) - 40) << 20, resume=True))
    # The process that is started with it weighs what it does, on a busy machine more.
    monkeypatch.setattr(preparing, "current_rss", lambda: current_rss() + (12 << 20))
    prepare(replace(options, ram=int(told.group(1)) << 20, resume=True)).close()


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"lr": 2e-2}, "lr"),
        ({"seed": 3}, "seed"),
        ({"batch_size": 1}, "batch_size"),
        ({"states": "8bit"}, "states"),
        ({"max_steps": 9}, "of 4 steps and this one of 9, and with --schedule linear the rate"),
        ({"max_steps": 9, "lr": 2e-2}, "its lr is"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"grad_dtype": "fp32"}, "grad_dtype"),
        ({"weight_decay": 0.0}, "weight_decay"),
        ({"method": "lora"}, "its method is 'full', this run's is 'lora'"),
    ],
)
def test_other_settings_are_named(
    models: Callable[[str], Path], data: Path, tmp_path: Path, change: dict[str, Any], names: str
) -> None:
    options = options_for(models("llama"), data, tmp_path)
    train(options, stop_after=1)
    with pytest.raises(OffloadError, match=names):
        train(again(options, **change))
    # The refusal has touched nothing.
    assert list(train(again(options)).losses) == [2, 3, 4]


def test_adapters_of_a_model_of_the_hub(
    models: Callable[[str], Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is the adapter's base, no path of this machine; targets may change places."""
    place = models("llama")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(place))
    targets = ("q_proj", "v_proj")
    options = options_for(place, data, tmp_path, method="lora", lora_targets=targets)
    options = replace(options, model="someone/tiny")
    train(options, stop_after=1)
    with pytest.raises(OffloadError, match="lora_targets"):
        train(again(options, lora_targets=("q_proj",)))
    assert list(train(again(options, lora_targets=targets[::-1])).losses) == [2, 3, 4]
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "someone/tiny"


def test_other_data_and_another_model_are_named(
    models: Callable[[str], Path], data: Path, tmp_path: Path
) -> None:
    options = options_for(models("llama"), data, tmp_path)
    train(options, stop_after=1)
    told = r"the data, once tokenised, is not what it was.* begin another one with another --output"
    with pytest.raises(OffloadError, match=told) as other_data:
        train(again(options, data=write_data(tmp_path / "other.jsonl", seed=1)))
    with pytest.raises(OffloadError, match="the model's checkpoint has other files") as other_model:
        train(again(options, model=str(models("tied"))))
    for raised in (other_data, other_model):
        assert not re.search("[0-9a-f]{16}", str(raised.value)), "a digest"


def test_another_model_of_the_same_shape_is_named(
    models: Callable[[str], Path], data: Path, tmp_path: Path
) -> None:
    """A base model and what was made of it differ in nothing but values, or in a number of the
    config."""
    options = options_for(models("llama"), data, tmp_path, method="lora")
    train(options, stop_after=1)
    other = write_model(tmp_path / "other", seed=1)
    with pytest.raises(OffloadError, match="weights have other values since the run began"):
        train(again(options, model=str(other)))
    moved = shutil.copytree(models("llama"), tmp_path / "moved")
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    with pytest.raises(OffloadError, match=r"config\.json says something else since"):
        train(again(options, model=str(moved)))
    (moved / "config.json").write_text(json.dumps(config | {"transformers_version": "5.99.0"}))
    assert list(train(again(options, model=str(moved))).losses) == [2, 3, 4]


def test_where_states_cannot_be_is_said_before_anything_is_planned(
    models: Callable[[str], Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_for(models("llama"), data, tmp_path)
    train(options, stop_after=1)
    other = options_for(models("llama"), data, tmp_path / "other")
    (tmp_path / "other" / "disk").mkdir(parents=True)
    (tmp_path / "other" / "disk" / "thesis.tex").write_text("mine")

    def planned(*_: Any, **__: Any) -> int:
        raise AssertionError("it was planned before")

    monkeypatch.setattr(preparing, "warm_training", planned)
    monkeypatch.setattr(dropin_load, "warm_training", planned)

    def loaded(disk: Path, **how: Any) -> None:
        offload.load(options.model, train=True, ram="1GiB", context=16, disk=disk, **how)

    with pytest.raises(OffloadError, match="thesis"):
        prepare(other)
    with pytest.raises(OffloadError, match="thesis"):
        loaded(tmp_path / "other" / "disk")
    with pytest.raises(OffloadError, match="resume=True"):
        loaded(tmp_path / "disk")
    with pytest.raises(OffloadError, match="no training states"):
        loaded(tmp_path / "nowhere", resume=True)
    with pytest.raises(OffloadError, match="cannot take effect"):
        offload.load(options.model, train="adapters", resume=True)
    holder = os.open(tmp_path / "disk", os.O_RDONLY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(OffloadError, match="in use"):
            prepare(again(options))
        with pytest.raises(OffloadError, match="in use"):
            loaded(tmp_path / "disk", resume=True)
    finally:
        os.close(holder)
    assert not (tmp_path / "nowhere").exists()
