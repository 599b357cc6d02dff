"""Whole runs of ``offload.train.run`` on tiny models: their data, their options, what they tell."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_config, write
from measured_once import ways

from offload.runtime.rss import current_rss
from offload.train import candidates, choosing, device_measure, preparing
from offload.train.footprint import TrainFootprint, measure_training
from offload.train.head_find import HeadForm, find_head
from offload.train.opening import InputSpill, Placement
from offload.train.options import TrainOptions
from offload.train.preparing import prepare
from offload.train.reports import CommitReport, EndReport, EvalReport, StepReport
from offload.train.run import Run

WORDS = (
    "the disk feeds a ring and every layer waits for its own update while tiles are read".split()
)
STEPS = 4


class Log:
    """A listener that keeps what it hears."""

    def __init__(self, after_step: Callable[[int], None] = lambda _: None) -> None:
        self.losses: dict[int, float] = {}
        self.norms: dict[int, float] = {}
        self.commits: list[int] = []
        self.evals: dict[int, float] = {}
        self.notes: list[str] = []
        self.end: EndReport | None = None
        self._after_step = after_step

    def note(self, text: str) -> None:
        self.notes.append(text)

    def phase(self, what: str, done: int, total: int) -> None: ...

    def step(self, report: StepReport) -> None:
        self.losses[report.step] = report.loss
        self.norms[report.step] = report.grad_norm
        self._after_step(report.step)

    def evaluated(self, report: EvalReport) -> None:
        self.evals[report.step] = report.loss

    def committed(self, report: CommitReport) -> None:
        self.commits.append(report.step)

    def ended(self, report: EndReport) -> None:
        self.end = report


def write_tokenizer(directory: Path, **special: str) -> None:
    """A tokenizer of whole words, ids below 32; ``special``: eos_token, pad_token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {w: i for i, w in enumerate(["<end>", "<pad>", "<unk>", *WORDS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=raw, **special).save_pretrained(directory)


def write_model(
    directory: Path, family: str = "llama", dtype: torch.dtype = torch.bfloat16, *, seed: int = 0,
    **overrides: Any,
) -> Path:  # fmt: skip
    """A tiny checkpoint with a tokenizer."""
    write(family, directory, dtype, config=tiny_config(family, **overrides), seed=seed)
    write_tokenizer(directory, eos_token="<end>", pad_token="<pad>")
    return directory


def write_data(path: Path, rows: int = 60, seed: int = 0) -> Path:
    generator = torch.Generator().manual_seed(seed)
    with path.open("w") as file:
        for _ in range(rows):
            count = int(torch.randint(3, 20, (), generator=generator))
            picks = torch.randint(len(WORDS), (count,), generator=generator).tolist()
            file.write(json.dumps({"text": " ".join(WORDS[i] for i in picks)}) + "\n")
    return path


def options_for(model: Path, data: Path, place: Path, **more: Any) -> TrainOptions:
    """A short run with commits; ``place`` gets its output and its states."""
    given: dict[str, Any] = {
        "model": str(model), "data": data, "output": place / "out", "disk": place / "disk",
        "ram": 1 << 30, "max_steps": STEPS, "seq_len": 32, "batch_size": 2, "lr": 1e-2,
        "warmup": 1, "weight_decay": 0.1, "save_every": 1,
    }  # fmt: skip
    return TrainOptions(**{**given, **more})


def train(
    options: TrainOptions, log: Log | None = None, *, stop_after: int | None = None,
    change: Callable[[Run], None] = lambda _: None,
) -> Log:  # fmt: skip
    """Prepare and train; with ``stop_after`` until that step. ``change`` sees the planned run."""
    log = log or Log()
    run = prepare(options)
    try:
        change(run)
        run.train(
            log,
            should_stop=lambda: stop_after is not None and max(log.losses, default=0) >= stop_after,
        )
    finally:
        run.close()
    return log


def not_warmed(*_: Any) -> int:
    """In the place of ``warm_training``, which takes most of the time of a tiny run."""
    return current_rss()


_heads: dict[Any, tuple[HeadForm | None, str]] = {}
_footprints: dict[Any, TrainFootprint] = {}


def planned_once(patch: pytest.MonkeyPatch) -> None:
    """Neither warm up nor measure rates, and pass a model through the meta device once for each
    shape of a run: planning is four fifths of a tiny run. What comes out depends on nothing but
    what is in the keys; no prediction is made, and the placement is the same without one."""

    def head(model: Any) -> tuple[HeadForm | None, str]:
        key = _key(model)
        if key not in _heads:
            _heads[key] = find_head(model)
        return _heads[key]

    def footprint(
        model: Any, units: list[Any], rows: int, length: int, tables: Any = (),
        card_flash: bool | None = None,
    ) -> TrainFootprint:  # fmt: skip
        if any("lora_" in name for name, _ in model.named_parameters()):
            # What is inside of an adapter is in no config.
            return measure_training(model, units, rows, length, tables, card_flash)
        modules = {id(m): name for name, m in model.named_modules()}
        names = {id(p): name for name, p in model.named_parameters()}
        key = (
            _key(model), tuple(modules[id(u)] for u in units), rows, length,
            tuple(names[id(t)] for t in tables), card_flash,
        )  # fmt: skip
        if key not in _footprints:
            _footprints[key] = measure_training(model, units, rows, length, tables, card_flash)
        return _footprints[key]

    patch.setattr(preparing, "warm_training", not_warmed)
    patch.setattr(preparing, "step_rates", lambda *_: None)
    patch.setattr(choosing, "find_head", head)
    for module in (candidates, device_measure):
        patch.setattr(module, "measure_training", footprint)


def _key(model: Any) -> Any:
    shapes = tuple(
        (name, p.dtype, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()
    )
    return type(model), ways(model.config), model.training, shapes


def everything_else_on_disk(run: Any) -> None:
    device = run.plan.placement.device
    everything_on_disk(run)
    placement = replace(run.plan.placement, device=device)
    object.__setattr__(run.plan, "placement", placement)


def again(options: TrainOptions, **changes: Any) -> TrainOptions:
    return replace(options, resume=True, **changes)


def weights_of(output: Path) -> dict[str, bytes]:
    """The bytes of all weight files of a model directory."""
    found = {p.name: p.read_bytes() for p in sorted(output.glob("*.safetensors"))}
    assert found, f"{output} has no weights"
    return found


def everything_on_disk(run: Run) -> None:
    """The placement of a budget that holds nothing: tiny models fit into any plan's slack."""
    layout, plan = run.layout, run.plan
    rest = frozenset(layout.rest)
    units = max(sum(layout.blocks[b].nbytes for b in u.blocks) for u in layout.units)
    most = max(b.nbytes for b in layout.blocks)
    placement = Placement(
        weights_bytes=sum(layout.blocks[b].nbytes for b in rest) + units + 3 * most,
        pinned=rest,
        spilled=frozenset(b.index for b in layout.trained) - rest,
        buffers=2,
        inputs=InputSpill(
            units=frozenset(u.index for u in layout.units), largest=1 << 20, file_bytes=1 << 20
        ),
    )
    object.__setattr__(plan, "placement", placement)
