"""The head of a streamed model, as its loss asks for it: in RAM, or on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from offload.train.engine import Engine
from offload.train.head_find import HeadForm
from offload.train.head_weights import slices_of
from offload.train.visit import AT_HOME, Visit


class EngineHead:
    """``head_loss.HeadWeights`` of a streamed model: its head's unit is entered around it."""

    def __init__(self, engine: Engine, form: HeadForm) -> None:
        module = engine.model.get_submodule(form.head)
        self.engine = engine
        self.module: Any = module
        self.slices = slices_of(form.vocabulary)
        self.unit = next((u.index for u in engine.layout.units if u.module is module), None)
        params = {id(p): name for name, p in engine.params.items()}
        self._places = {
            attr: engine.piece_of(params[id(module._parameters[attr])])
            for attr in ("weight", "bias")
            if module._parameters.get(attr) is not None
        }
        self._away = engine.homes.head

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
    def entered(self) -> Iterator[Visit]:
        """The head's weights are in place inside, where the visit brings what it is given; its
        gradients are complete behind it."""
        grads = torch.is_grad_enabled()
        with contextlib.ExitStack() as stack:
            if self.unit is not None:
                stack.enter_context(self.engine.running(self.unit, backward=True))
            if self._away is None:
                yield AT_HOME
            else:
                yield stack.enter_context(self._away.visiting(returns=grads))
        if grads:
            self.engine.homes.land()
            if self.unit is not None:
                self.engine.backward_done(self.unit)

    @contextlib.contextmanager
    def weight(self, i: int) -> Iterator[Tensor]:
        if self._away is not None:
            with self._away.weight(i) as values:
                yield values
            return
        first, end = self.slices[i]
        rows = self.engine.table_rows
        packed = None if rows is None else rows(self._places["weight"][0], first, end)
        yield self.module.weight.detach()[first:end] if packed is None else packed

    def bias(self, i: int) -> Tensor | None:
        if self._away is not None:
            return self._away.bias(i)
        first, end = self.slices[i]
        return None if self.module.bias is None else self.module.bias.detach()[first:end]

    def _final(self) -> bool:
        """Whether the slices of this micro-batch are the head's whole gradient in this step."""
        engine = self.engine
        users = engine.layout.users[self._places["weight"][0]]
        alone = engine.rounds is None and engine.micro == 0 and engine.last_micro_batch
        return alone and users == [self.unit]

    def gradient(self, i: int, weight: Tensor, bias: Tensor | None) -> None:
        rows, homes = slice(*self.slices[i]), self.engine.homes
        homes.add_rows(*self._places["weight"], weight, rows, once=self._final())
        if bias is not None and self.module.bias.requires_grad:
            homes.add_rows(*self._places["bias"], bias, rows)


__all__ = ["EngineHead"]
