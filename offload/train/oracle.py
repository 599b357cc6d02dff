"""The resident reference: what streaming must be equal to, bit for bit.

An ordinary model in memory, torch's own autograd over all of it, gradients summed as the engine
says it sums them, one norm over everything, and the same Adam kernels over whole parameters. No
units, no tiles, no threads. It shares with the engine only what is defined and not scheduled: how a
norm is summed (chunks of 4096 elements of a parameter, of fused experts: of an expert's slice) and
the arithmetic of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from offload.cpu_ops import grad_norm
from offload.train.engine import Group
from offload.train.layout import Piece, TrainLayout
from offload.train.tiles import Slot, SlotKind
from offload.train.weights import as_numbers


@dataclass(slots=True)
class _State:
    """A piece's resident states, in one slot of its own."""

    slot: Slot
    memory: Any
    first: int
    """Global index of its first element, as the engine numbers them for rounding."""


class Oracle:
    """Resident training of ``model`` with the engine's definition of a step.

    ``grad_dtype``: in which gradients are summed over micro-batches; None: the weights' own.
    """

    def __init__(
        self, model: nn.Module, layout: TrainLayout, *, states: str = "fp32",
        grad_dtype: str | None = None, seed: int = 0, masters: Callable[[Piece], Any] | None = None,
    ) -> None:  # fmt: skip
        """``layout``: of a model with the same parameters. ``masters``: float32 values of a piece
        that are more exact than the model's; None: the model's."""
        self.model = model
        self.layout = layout
        self.grad_dtype = grad_dtype
        self.seed = seed
        self.steps: dict[str, int] = {}
        self.named = dict(model.named_parameters())
        self._totals: dict[str, torch.Tensor] = {}
        self._states: dict[tuple[str, int | None], _State] = {}
        base = 0
        for block in layout.blocks:
            for piece in block.pieces if block.trained else ():
                kind = SlotKind(
                    "fp32" if states == "bf16" and block.dtype != "bfloat16" else states,
                    block.dtype,
                )
                memory = np.zeros(kind.offsets(piece.count)[-1], np.uint8)
                slot = Slot(kind, piece.count, memory)
                slot.start(as_numbers(self._part(piece)))
                if masters is not None and kind.states != "bf16":
                    slot.part("p").view(np.float32)[:] = masters(piece)
                self._states[piece.param, piece.expert] = _State(slot, memory, base + piece.offset)
            base += block.count
        for name, param in self.named.items():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self._take(name))

    def _part(self, piece: Piece) -> torch.Tensor:
        flat = self.named[piece.param].detach().reshape(-1)
        return flat[piece.start : piece.start + piece.count]

    def _take(self, name: str) -> Callable[[nn.Parameter], None]:
        def take(param: nn.Parameter) -> None:
            gradient, param.grad = param.grad, None
            if gradient is not None:
                self.add(name, gradient)

        return take

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Add to the gradient of parameter ``name``: autograd's are added by themselves."""
        if name in self._totals:
            self._totals[name].add_(gradient)
        else:
            dtype = getattr(torch, self.grad_dtype) if self.grad_dtype else gradient.dtype
            self._totals[name] = gradient.to(dtype)

    def step(
        self, group_of: Callable[[Piece], Group], max_norm: float = 0.0,
        skip: Callable[[Piece], bool] = lambda _: False,
    ) -> float:  # fmt: skip
        """One optimizer step with what backward has left; returns the norm before clipping.

        ``skip``: pieces that are left as they are, with their states.
        """
        sums, jobs = [], []
        for block in self.layout.trained:
            for piece in block.pieces:
                total = self._totals.get(piece.param)
                if total is None:
                    continue
                flat = as_numbers(total)[piece.start : piece.start + piece.count]
                out = np.empty(grad_norm.chunks(flat.size), np.float64)
                grad_norm.squares(flat, out, workers=1)
                sums.append(out)
                jobs.append((piece, flat))
        norm = grad_norm.norm(sums)
        clip = min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0
        for piece, flat in jobs:
            if skip(piece):
                continue
            state = self._states[piece.param, piece.expert]
            step = group_of(piece).step(self.steps.get(piece.param, 0) + 1, clip)
            state.slot.update(
                step, flat, 0, piece.count, seed=self.seed, first=state.first, workers=1
            )
            as_numbers(self._part(piece))[:] = state.slot.copy
        for name in self._totals:
            self.steps[name] = self.steps.get(name, 0) + 1
        self._totals.clear()
        return norm

    def part(self, piece: Piece, name: str) -> Any:
        """Bytes of a piece's states: "copy", "p", "m", "v", ..."""
        return self._states[piece.param, piece.expert].slot.part(name)
