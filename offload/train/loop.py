"""One optimizer step of a language model on the engine: micro-batches, head, loss, backward.

The same for training and for its resident reference is only what defines the result: losses are
sums over label tokens, divided by the label tokens of all micro-batches of the step.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.errors import OffloadError
from offload.train.data.batches import Batch
from offload.train.engine import Engine, Group, NotFinite, StepResult
from offload.train.engine_head import EngineHead
from offload.train.head_find import HeadForm, run_body
from offload.train.head_loss import evaluate, head_loss, shift_labels
from offload.train.hollow_use import HollowUse
from offload.train.layout import Piece
from offload.train.phases import BACKWARD, FORWARD, Phases
from offload.train.router_loss import RouterLoss
from offload.train.vertical import Rounds


def inputs_of(batch: Batch) -> dict[str, Any]:
    """What the model is called with."""
    given: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
    if batch.attention_mask is None:
        given["position_ids"] = batch.position_ids
    else:
        given["attention_mask"] = batch.attention_mask
    return given


def random_key(seed: int, step: int, micro: int, place: int) -> int:
    """A seed for torch's generator: dropout of (step, micro-batch, unit), in whatever order."""
    text = f"{seed} {step} {micro} {place}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def _each(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """What a visit makes of tensors: as many."""
    return [tensor for tensor in tensors if tensor is not None]


@dataclass(slots=True)
class Taken:
    """A step that was taken."""

    loss: float
    result: StepResult
    tokens: int
    label_tokens: int
    phases: dict[str, float] = field(default_factory=dict)
    counted: dict[str, dict[str, float]] = field(default_factory=dict)
    """Phase -> by how much ``LanguageLoop.phases.counters`` grew in it."""


class LanguageLoop:
    """Steps and evaluations of a causal language model on an engine."""

    def __init__(
        self, engine: Engine, form: HeadForm | None, *, vertical: int = 1, seed: int = 0,
        router: float | None = None,
    ) -> None:  # fmt: skip
        """``router``: coefficient of the load-balancing loss; None: there is none. ``form``: how
        the loss comes of the hidden state; None: the model's own loss, with whole logits.
        ``vertical``: micro-batches that run layer by layer; 1: one after the other."""
        self.engine = engine
        self.form = form
        self.seed = seed
        self.head = None if form is None else EngineHead(engine, form)
        self._rounds = Rounds(vertical) if vertical > 1 else None
        self.phases = Phases()
        self._uses = HollowUse(engine.params, engine.present)
        self._tried = False
        """A step was taken."""
        self._router: RouterLoss | None = None
        if router is not None:
            self._router = RouterLoss(
                engine.model, router, lambda: engine.current_micro, lambda: engine.visit
            )
            engine.extra = self._router_terms

    def _router_terms(self) -> list[tuple[Tensor, Tensor]]:
        """Each micro-batch's loss counts alike: the coefficient is shared among them."""
        assert self._router is not None
        weight = self._router.coefficient / self._micros
        return [(t, torch.full_like(t, weight)) for t in self._router.take_terms()]

    def step(
        self, number: int, batches: Sequence[Batch], group_of: Callable[[Piece], Group],
        max_norm: float,
    ) -> Taken:  # fmt: skip
        """Take step ``number`` (from 0) with its micro-batches.

        Raises:
            NotFinite: a loss or the gradient norm is NaN or infinite; says the step and the rows.
        """
        engine = self.engine
        self.phases.begin()
        self._micros = len(batches)
        total = sum(b.label_tokens for b in batches)
        engine.in_backward = None if max_norm > 0 else group_of
        engine.random_key = partial(random_key, self.seed, number)
        engine.begin_forward()
        work = [partial(self._micro, number, i, b, total) for i, b in enumerate(batches)]
        try:
            if self._rounds is not None and len(batches) > 1:
                engine.rounds = self._rounds
                try:
                    losses = self._rounds.run(work)
                finally:
                    engine.rounds = None
            else:
                losses = []
                for i, run in enumerate(work):
                    engine.micro = i
                    engine.last_micro_batch = i + 1 == len(work)
                    self.phases.enter(FORWARD)
                    losses.append(run())
            engine.end_backward()
            result = engine.step(group_of, max_norm)
        except NotFinite as error:
            engine.abandon()
            self._blame(error)
            rows = ", ".join(r for b in batches for r in b.rows[:4])
            raise NotFinite(f"step {number + 1}: {error}; its rows begin with {rows}") from None
        except BaseException as error:
            engine.abandon()
            if isinstance(error, RuntimeError):  # there may be no gradient to go back for
                self._blame(error)
            raise
        self._tried = True
        self.phases.end()
        return Taken(
            loss=math.fsum(losses) / total,
            result=result,
            tokens=sum(b.tokens for b in batches),
            label_tokens=total,
            phases=self.phases.seconds,
            counted=self.phases.counted,
        )

    def _micro(self, step: int, index: int, batch: Batch, total: int) -> float:
        """Forward and backward of one micro-batch; returns the sum of its labels' losses."""
        torch.manual_seed(random_key(self.seed, step, index, -1))
        if self._router is not None:
            width = batch.input_ids.shape[1]
            self._router.begin(torch.arange(width) < torch.tensor(batch.lengths)[:, None])
        if self.form is None or self.head is None:
            return self._own_loss(batch, total)
        with self._watched():
            hidden = run_body(self.engine.model, self.form, **inputs_of(batch))
        self.phases.enter(BACKWARD)
        labels = shift_labels(batch.labels)
        if self._router is not None:
            self._router.value()
        with self.head.entered() as visit:
            above, marks = _each(visit.up([hidden.detach().flatten(0, 1), labels]))
            found = head_loss(
                above, marks, self.head, scale=1 / total, transform=self.form.transform,
                frozen=self.head.frozen, grad_dtype=self.head.grad_dtype,
            )  # fmt: skip
            loss, gradient = _each(visit.down(found))
            self._check(loss)
        hidden.backward(gradient.view_as(hidden))
        if self._router is not None:
            self._router.end()
        return float(loss)

    def _watched(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, what reads weights past their layers is known, in the first step."""
        return contextlib.nullcontext() if self._tried else self._uses

    def _blame(self, error: BaseException) -> None:
        self._uses.blame(type(self.engine.model).__name__, error)

    def _check(self, loss: Tensor) -> None:
        if not math.isfinite(float(loss)):
            raise NotFinite(f"the loss is {float(loss)}")

    def _own_loss(self, batch: Batch, total: int) -> float:
        with self._watched():
            out = self.engine.model(**inputs_of(batch), labels=batch.labels)
        loss = out.loss * batch.label_tokens
        self.phases.enter(BACKWARD)
        value = loss.detach()
        self._check(value)
        if self._router is not None:
            self._router.value()
        (loss / total).backward()
        if self._router is not None:
            self._router.end()
        return float(value)

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Batch]) -> tuple[float, int]:
        """The mean loss over all label tokens, and their number. Waits for pending updates."""
        engine = self.engine
        engine.begin_forward()
        was = engine.model.training
        engine.model.eval()
        losses, tokens = [], 0
        try:
            for batch in batches:
                if self.form is None or self.head is None:
                    out = engine.model(**inputs_of(batch), labels=batch.labels)
                    loss = out.loss * batch.label_tokens
                else:
                    hidden = run_body(engine.model, self.form, **inputs_of(batch))
                    with self.head.entered() as visit:
                        labels = shift_labels(batch.labels)
                        above, marks = _each(visit.up([hidden.flatten(0, 1), labels]))
                        value = evaluate(above, marks, self.head, transform=self.form.transform)
                        (loss,) = _each(visit.down([value]))
                losses.append(float(loss))
                tokens += batch.label_tokens
        finally:
            engine.model.train(was)
        engine.forget_order()
        if not tokens:
            raise OffloadError("nothing to evaluate: the data has no label tokens")
        return math.fsum(losses) / tokens, tokens

    def close(self) -> None:
        if self._rounds is not None:
            self._rounds.close()
        if self._router is not None:
            self._router.close()
            self.engine.extra = None
