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
from offload.train.head_find import HeadForm, run_body
from offload.train.head_loss import evaluate, head_loss, shift_labels
from offload.train.layout import Piece
from offload.train.phases import BACKWARD, FORWARD, Phases
from offload.train.router_loss import RouterLoss
from offload.train.vertical import Rounds

HEAD_ROWS = 4096
"""Rows of a slice of the head: fixed, as results depend on it."""


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


class EngineHead:
    """``head_loss.HeadWeights`` of a streamed model: its head's unit is entered around it."""

    def __init__(self, engine: Engine, form: HeadForm) -> None:
        module = engine.model.get_submodule(form.head)
        self.engine = engine
        self.module: Any = module
        self.slices = [
            (a, min(a + HEAD_ROWS, form.vocabulary)) for a in range(0, form.vocabulary, HEAD_ROWS)
        ]
        self.unit = next((u.index for u in engine.layout.units if u.module is module), None)
        params = {id(p): name for name, p in engine.params.items()}
        self._places = {
            attr: engine.piece_of(params[id(module._parameters[attr])])
            for attr in ("weight", "bias")
            if module._parameters.get(attr) is not None
        }

    @property
    def frozen(self) -> bool:
        return not self.module.weight.requires_grad

    @property
    def grad_dtype(self) -> torch.dtype:
        block, _ = self._places["weight"]
        gradients = self.engine.gradients
        dtype: torch.dtype = getattr(torch, gradients.dtype_of(self.engine.layout.blocks[block]))
        return dtype

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The head's weights are in place inside; its gradients are complete behind it."""
        if self.unit is None:
            yield
            return
        with self.engine.running(self.unit, backward=True):
            yield
        if torch.is_grad_enabled():
            self.engine.backward_done(self.unit)

    @contextlib.contextmanager
    def weight(self, i: int) -> Iterator[Tensor]:
        first, end = self.slices[i]
        rows = self.engine.table_rows
        packed = None if rows is None else rows(self._places["weight"][0], first, end)
        yield self.module.weight.detach()[first:end] if packed is None else packed

    def bias(self, i: int) -> Tensor | None:
        first, end = self.slices[i]
        return None if self.module.bias is None else self.module.bias.detach()[first:end]

    def _final(self) -> bool:
        """Whether the slices of this micro-batch are the head's whole gradient in this step."""
        engine = self.engine
        users = engine.layout.users[self._places["weight"][0]]
        alone = engine.rounds is None and engine.micro == 0 and engine.last_micro_batch
        return alone and users == [self.unit]

    def gradient(self, i: int, weight: Tensor, bias: Tensor | None) -> None:
        rows = slice(*self.slices[i])
        gradients = self.engine.gradients
        add = gradients.add_slice if self._final() else gradients.add
        add(*self._places["weight"], weight, rows)
        if bias is not None and self.module.bias.requires_grad:
            self.engine.gradients.add(*self._places["bias"], bias, rows)


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
            rows = ", ".join(r for b in batches for r in b.rows[:4])
            raise NotFinite(f"step {number + 1}: {error}; its rows begin with {rows}") from None
        except BaseException:
            engine.abandon()
            raise
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
        hidden = run_body(self.engine.model, self.form, **inputs_of(batch))
        self.phases.enter(BACKWARD)
        labels = shift_labels(batch.labels)
        if self._router is not None:
            self._router.value()
        with self.head.entered():
            loss, gradient = head_loss(
                hidden.detach().flatten(0, 1), labels, self.head, scale=1 / total,
                transform=self.form.transform, frozen=self.head.frozen,
                grad_dtype=self.head.grad_dtype,
            )  # fmt: skip
            self._check(loss)
        hidden.backward(gradient.view_as(hidden))
        if self._router is not None:
            self._router.end()
        return float(loss)

    def _check(self, loss: Tensor) -> None:
        if not math.isfinite(float(loss)):
            raise NotFinite(f"the loss is {float(loss)}")

    def _own_loss(self, batch: Batch, total: int) -> float:
        out = self.engine.model(**inputs_of(batch), labels=batch.labels)
        loss = out.loss * batch.label_tokens
        self.phases.enter(BACKWARD)
        self._check(loss)
        if self._router is not None:
            self._router.value()
        (loss / total).backward()
        if self._router is not None:
            self._router.end()
        return float(loss)

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
                    with self.head.entered():
                        loss = evaluate(
                            hidden.flatten(0, 1), shift_labels(batch.labels), self.head,
                            transform=self.form.transform,
                        )  # fmt: skip
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
