"""What a whole run must come to: the resident oracle on the run's own batches and rates."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from equivalence import reference

from offload.io.checksum import xxh3
from offload.io.engines import make_engine
from offload.io.tile_store import TileStore
from offload.runtime.memory import HostMemory
from offload.train.decay import group_maker
from offload.train.head_find import run_body
from offload.train.head_loss import ResidentHead, evaluate, head_loss, shift_labels
from offload.train.head_weights import HEAD_ROWS
from offload.train.loop import inputs_of
from offload.train.lora import inject
from offload.train.oracle import Oracle
from offload.train.run import Run
from offload.train.updates import Updater


@dataclass
class Golden:
    """What the resident model came to: by step, and in the end."""

    oracle: Oracle
    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    evals: dict[int, float] = field(default_factory=dict)


class ResidentLoop:
    """``loop.LanguageLoop`` without an engine: one micro-batch after the other, all in memory."""

    def __init__(self, run: Run) -> None:
        options = run.options
        model = reference(run.meta.directory, run.meta.dtype).train()
        if options.method == "lora":
            adapters = inject(
                model, r=options.lora_r, alpha=options.lora_alpha, dropout=0.0,
                targets=options.lora_targets, seed=options.seed,
            )  # fmt: skip
            values = adapters.resident_values()
            for name, make in adapters.initial.items():
                values[name].copy_(make())
        assert run.form is not None
        self.run, self.model, self.form = run, model, run.form
        self.oracle = Oracle(model, run.layout, grad_dtype=run.grad_dtype, seed=options.seed)
        self.groups = group_maker(model, options)
        self.module = model.get_submodule(self.form.head)
        names = {id(p): name for name, p in self.oracle.named.items()}
        self._weight = names[id(self.module.weight)]

    def _head(self) -> ResidentHead:
        return ResidentHead(self.module.weight, self.module.bias, HEAD_ROWS)

    def step(self, step: int) -> tuple[float, float]:
        """Take step ``step`` (from 0); returns the loss and the norm."""
        train, options = self.run.data.train, self.run.options
        batches = [train.micro_batch(step, i) for i in range(train.micro_batches(step))]
        total = sum(b.label_tokens for b in batches)
        losses, frozen = [], not self.module.weight.requires_grad
        wanted = self.run.grad_dtype
        for batch in batches:
            hidden = run_body(self.model, self.form, **inputs_of(batch))
            head = self._head()
            loss, gradient = head_loss(
                hidden.detach().flatten(0, 1), shift_labels(batch.labels), head, scale=1 / total,
                transform=self.form.transform, frozen=frozen,
                grad_dtype=getattr(torch, wanted) if wanted else self.module.weight.dtype,
            )  # fmt: skip
            if head.weight_grad is not None and not frozen:
                self.oracle.add(self._weight, head.weight_grad)
            hidden.backward(gradient.view_as(hidden))
            losses.append(float(loss))
        rate = self.run.schedule.rate(step + 1)
        norm = self.oracle.step(self.groups(rate), options.max_grad_norm)
        return math.fsum(losses) / total, norm

    @torch.no_grad()
    def evaluate(self) -> float:
        held_out = self.run.data.eval
        assert held_out is not None
        self.model.eval()
        losses, tokens = [], 0
        for k in range(held_out.steps_per_epoch):
            batch = held_out.micro_batch(k, 0)
            hidden = run_body(self.model, self.form, **inputs_of(batch))
            losses.append(
                float(
                    evaluate(
                        hidden.flatten(0, 1), shift_labels(batch.labels), self._head(),
                        transform=self.form.transform,
                    )
                )
            )  # fmt: skip
            tokens += batch.label_tokens
        self.model.train()
        return math.fsum(losses) / tokens


def golden(run: Run) -> Golden:
    """Train resident what ``run`` trains streamed, evaluating behind every step."""
    loop = ResidentLoop(run)
    out = Golden(loop.oracle)
    for step in range(run.total):
        out.losses[step + 1], out.norms[step + 1] = loop.step(step)
        if run.data.eval is not None:
            out.evals[step + 1] = loop.evaluate()
    return out


def assert_same_states(run: Run, oracle: Oracle) -> int:
    """Compare every part of every tile of the run's last commit; returns how many bytes."""
    kinds = Updater.kinds(run.layout, run.options.states)
    layout, compared = run.layout, 0
    kind_of = [kinds[layout.blocks[t.block].dtype] for t in layout.tiles]
    shapes = [k.parts(t.count) for k, t in zip(kind_of, layout.tiles, strict=True)]
    engine = make_engine(queue_depth=2)
    try:
        with TileStore.open(
            run.states, engine, shapes=shapes, identity=run.identity,
            keep=run.options.save_total_limit, checksum=xxh3,
        ) as store:  # fmt: skip
            for tile, kind in zip(layout.tiles, kind_of, strict=True):
                block, places = layout.blocks[tile.block], kind.offsets(tile.count)
                for i, name in enumerate(kind.names):
                    if not store.has(tile.index, i):
                        # The copy is the rounded master: what stays in RAM does not write it.
                        assert name == "copy"
                        continue
                    memory = HostMemory(places[i + 1] - places[i], "compare")
                    try:
                        store.read_into(tile.index, i, i, memory.view()).result()
                        ours = memory.tensor().numpy()[: shapes[tile.index][i]].copy()
                    finally:
                        memory.close()
                    size = ours.size // tile.count
                    for piece in block.pieces:
                        low = max(piece.offset, tile.start)
                        high = min(piece.offset + piece.count, tile.start + tile.count)
                        if low >= high:
                            continue
                        mine = ours[(low - tile.start) * size : (high - tile.start) * size]
                        wanted = oracle.part(piece, name)
                        wanted = wanted[(low - piece.offset) * size : (high - piece.offset) * size]
                        assert np.array_equal(mine, wanted), (piece.param, piece.expert, name)
                        compared += mine.size
    finally:
        engine.close()
    return compared


def assert_same_output(run: Run, oracle: Oracle) -> None:
    """Compare the model that was written, as transformers loads it."""
    written = reference(run.options.output, run.meta.dtype)
    for name, value in written.named_parameters():
        assert torch.equal(value, oracle.named[name]), name
