"""The load-balancing loss of mixture-of-experts models, layer by layer.

transformers computes it from the router logits of all layers at once (``load_balancing_loss_func``;
Fedus, Zoph and Shazeer 2021, "Switch Transformers", equations 4 to 6): with f_e the share of
(token, choice) pairs of all layers that went to expert e, P_e the mean probability over all layers,
the loss is E sum_e f_e P_e. Gradients only flow through P. A streamed backward has one layer at a
time, so the sums are gathered in forward; backward then adds to each layer's recomputed router
logits its own term of sum_e f_e P_e, whose f_e are known by then. Of layers that run on a device
the sums come down in forward, and the shares go up in backward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from offload.errors import OffloadError
from offload.models.expert_groups import expert_groups
from offload.models.request import expert_top_k
from offload.train.visit import AT_HOME, Visit


@dataclass(slots=True)
class _Sums:
    """Of one micro-batch."""

    valid: Tensor | None
    counts: list[Tensor] = field(default_factory=list)
    mass: list[Tensor] = field(default_factory=list)
    rows: int = 0
    """Of one layer."""
    share: Tensor | None = None
    """f_e, once forward has ended."""
    terms: list[Tensor] = field(default_factory=list)


class RouterLoss:
    """Watches the routers of a model. For each micro-batch: ``begin``, forward, ``value``,
    backward."""

    def __init__(
        self, model: Any, coefficient: float, current: Callable[[], int],
        visit: Callable[[], Visit] = lambda: AT_HOME,
    ) -> None:  # fmt: skip
        """``coefficient``: of the loss, as ``router_aux_loss_coef``. ``current``: the number of the
        micro-batch that runs. ``visit``: where the unit that runs does.

        Raises:
            OffloadError: see ``check_router_loss``.
        """
        check_router_loss(model, coefficient)
        self.coefficient = coefficient
        self.experts = expert_groups(model)[0].n_experts
        self.top_k = int(getattr(model, "num_experts_per_tok", expert_top_k(model.config)))
        self._current = current
        self._visit = visit
        self._sums: dict[int, _Sums] = {}
        self._handles = [
            router.register_forward_hook(self._hook(index)) for router, index in _routers(model)
        ]

    def begin(self, valid: Tensor | None) -> None:
        """A micro-batch's forward begins. ``valid`` [B, S]: 0 for padding, None: all are valid."""
        self._sums[self._current()] = _Sums(None if valid is None else valid.reshape(-1).bool())

    def _hook(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        # A function of this module, which a partial one is not: a unit warns of others' hooks.
        return lambda router, args, output: self._seen(index, output)

    def _seen(self, index: int, output: Any) -> None:
        sums = self._sums.get(self._current())
        if sums is None:
            return  # an evaluation
        logits = output if isinstance(output, Tensor) else output[index]
        logits = logits.reshape(-1, self.experts)
        visit = self._visit()
        valid, share = visit.up([sums.valid, sums.share], same=(0, 1))
        if valid is not None:
            logits = logits[valid]
        probabilities = torch.softmax(logits, dim=-1)  # in the model's dtype, as transformers'
        if share is None:
            chosen = probabilities.topk(self.top_k, dim=-1).indices.reshape(-1)
            counts = torch.bincount(chosen, minlength=self.experts).float()
            found = visit.down([counts, probabilities.detach().float().sum(0)])
            for sums_of, tensor in zip((sums.counts, sums.mass), found, strict=True):
                assert tensor is not None
                sums_of.append(tensor)
            sums.rows = logits.shape[0]
        elif probabilities.requires_grad:  # of layers above what is trained
            rows = sums.rows * len(sums.mass)
            mass = probabilities.float().sum(0)
            sums.terms.append((mass * share).sum() * (self.experts / rows))

    def value(self) -> float:
        """The loss of the forward that has ended, without the coefficient; fixes the shares."""
        sums = self._sums[self._current()]
        rows = sums.rows * len(sums.mass)
        if not rows:
            raise OffloadError("--router-aux-loss: no router ran in forward")
        sums.share = torch.stack(sums.counts).sum(0) / rows
        mean = torch.stack(sums.mass).sum(0) / rows
        return float((sums.share * mean).sum()) * self.experts

    def take_terms(self) -> list[Tensor]:
        """What the unit that was just run again adds to the loss, without the coefficient."""
        sums = self._sums.get(self._current())
        if sums is None:
            return []
        terms, sums.terms = sums.terms, []
        return terms

    def end(self) -> None:
        """The micro-batch is through."""
        self._sums.pop(self._current(), None)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def check_router_loss(model: Any, coefficient: float | None) -> None:
    """Refuse the loss for models that transformers computes none of: their routers are balanced
    otherwise (by a bias, say), and what they choose is not what the loss would count.

    Raises:
        OffloadError: it was asked for, and there is none, or no experts.
    """
    if coefficient is None:
        return
    asked = f"--router-aux-loss {coefficient:g} cannot take effect"
    if not expert_groups(model):
        raise OffloadError(
            f"{asked}: the model has no experts, or none that are known here; drop it"
        )
    code = sys.modules[type(model).__module__]
    if not hasattr(code, "load_balancing_loss_func") or not _routers(model):
        raise OffloadError(
            f"{asked}: transformers has no load-balancing loss for {type(model).__name__}; drop it"
        )


def _routers(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """The modules whose outputs transformers records as router logits, and which of a module's
    outputs it is. Not every router is one: those that look experts up by token have nothing to
    learn. What a model inside of the model records is its own affair, as it is there."""
    found: list[tuple[nn.Module, int]] = []

    def walk(module: nn.Module, name: str, recorders: list[Any]) -> None:
        own = getattr(module, "_can_record_outputs", None)
        if own is not None:
            asked = own.get("router_logits", [])
            recorders = asked if isinstance(asked, list) else [asked]
        for recorder in recorders:
            kind = getattr(recorder, "target_class", recorder)
            part = getattr(recorder, "layer_name", None)
            here = part is None or f".{part.strip('.')}." in f".{name}."
            if here and isinstance(kind, type) and isinstance(module, kind):
                found.append((module, getattr(recorder, "index", 1)))
        for leaf, child in module.named_children():
            walk(child, f"{name}.{leaf}", recorders)

    walk(model, "", [])
    return found
