"""All decoder layers for one token in as few parallel regions as there are waits.

Where a layer's weights stay in place, nothing has to be asked between its parts (``lean_run``) and
the next layer's: the processors go on by themselves (``cpu_ops.program``). With experts that come
and go, Python fetches them between a layer's router and what follows. As long as nothing has been
missing for a whole token, they are taken to be there: the processors look themselves where each
lies, nothing is displaced meanwhile, and only at one that is missing do they stop and leave it to
Python. A miss also wants the next layers' experts guessed, which Python does; so then it is asked
layer by layer again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as torch_modules

from offload.cpu_ops.decode import AttentionHalf, DenseMlp, TokenRouter
from offload.cpu_ops.experts import ExpertLayout, TokenExperts
from offload.cpu_ops.kv_cache import KvCache, aligned
from offload.cpu_ops.program import Program, Step, add_step, pick_step
from offload.models.packed_modules import PackedExperts
from offload.models.pause import Pause


class LayerParts(Protocol):
    """What a decoder layer runs for one token; see ``lean_run``."""

    attention: AttentionHalf
    mlp: DenseMlp | None
    router: TokenRouter | None
    shared: DenseMlp | None
    experts: PackedExperts | None


@dataclass(frozen=True, slots=True)
class _Fetched:
    """A layer whose experts come and go.

    Attributes:
        routed: the step behind its router: the experts are chosen.
        looked: the step behind that which looks where they lie.
        after: the step to go on with when they have been computed.
    """

    routed: int
    looked: int
    after: int
    router: TokenRouter
    experts: PackedExperts


class TokenProgram:
    """The layers of one model, in order. Calls must not overlap."""

    def __init__(self, layers: Sequence[tuple[nn.Module, LayerParts]], hidden: int) -> None:
        """``layers``: each with its module, whose forward is what the program stands for."""
        self._modules = [(module, module.forward) for module, _ in layers]
        self._attention = [parts.attention for _, parts in layers]
        self._x, self._out = (aligned((hidden,), np.float32) for _ in range(2))
        self._uses: list[tuple[PackedExperts, int]] = []
        """Layers whose experts stay in place, and how many of them a token uses."""
        self._calls: dict[tuple[ExpertLayout, int], TokenExperts] = {}
        steps: list[Step] = []
        self._fetched: list[_Fetched] = []
        for _, parts in layers:
            steps += parts.attention.steps(self._x)
            if parts.mlp is not None:
                steps.append(parts.mlp.step(self._x))
            if parts.router is None or parts.experts is None:
                continue
            steps.append(parts.router.step(self._x))
            routed = len(steps)
            steps += self._experts(parts.router, parts.experts)
            if parts.experts.session.waits:
                self._fetched.append(
                    _Fetched(routed, routed + 1, len(steps), parts.router, parts.experts)
                )
            if parts.shared is not None:
                steps.append(parts.shared.step(parts.router.normed, self._out))
            steps.append(add_step(self._x, self._out))
        self._program = Program(steps)

    def _experts(self, router: TokenRouter, experts: PackedExperts) -> list[Step]:
        k = len(router.ids)
        key = experts.layout, k
        call = TokenExperts(experts.layout, k, share=self._calls.get(key))
        self._calls.setdefault(key, call)
        bases, weights = np.zeros(k, np.int64), np.zeros(k, np.float32)
        if not experts.session.waits:
            self._uses.append((experts, k))
        return [
            pick_step(router.ids, router.weights, experts.session.places, bases, weights),
            call.step(bases, router.normed, weights, self._out),
        ]

    def fits(self) -> bool:
        """Whether a token that is ``unwatched`` may go this way: no other sequence may run while
        experts are waited for."""
        return not any(layer.experts.session.shared for layer in self._fetched)

    def pause(self) -> None:
        """What callers have asked for before each layer; may raise."""
        for pause in tuple(self._modules[0][0]._forward_pre_hooks.values()):
            pause()

    def unwatched(self) -> bool:
        """Whether nobody listens to the layers or has replaced one."""
        if torch_modules._has_any_global_hook():
            return False
        for module, forward in self._modules:
            if module._forward_hooks:
                return False
            if not all(type(hook) is Pause for hook in module._forward_pre_hooks.values()):
                return False
            if module.__dict__.get("forward") is not forward:
                return False
        return True

    def _calm(self) -> bool:
        """Whether experts are there as a rule: none was missing for a whole token."""
        fetched = self._fetched
        return fetched[0].experts.session.executor.calm >= len(fetched)

    def _unasked(self, at: int, ahead: int) -> tuple[int, int]:
        """Go on from step ``at``, with ``ahead`` the next layer to be fetched, to the end or to the
        first layer whose experts are not all there; returns where, and the layer."""
        with self._fetched[ahead].experts.session.executor.unasked() as used:
            at = self._program.run(at)
            while ahead < len(self._fetched) and self._fetched[ahead].looked < at:
                layer, ahead = self._fetched[ahead], ahead + 1
                group = layer.experts.session.group
                used.append((group.name, [group.blocks[e] for e in np.sort(layer.router.ids)]))
        return at, ahead

    def __call__(self, hidden: torch.Tensor, position: int | None, store: KvCache) -> torch.Tensor:
        """The last layer's output for one token's ``hidden`` [..., H]; its keys and values are
        added to ``store``, unless an error comes between.

        ``position``: for the rotation; None: as many as are cached.
        """
        for attention in self._attention:
            attention.read(store)
            attention.begin(position)
        self._x[:] = hidden.detach().float().reshape(-1).numpy()
        at, ahead, last = 0, 0, len(self._program.steps)
        while at < last:
            self.pause()
            if ahead == len(self._fetched):
                at = self._program.run(at)
            elif self._calm():
                at, ahead = self._unasked(at, ahead)
            else:
                at = self._program.run(at, self._fetched[ahead].routed)
            if at == last:
                break
            layer, ahead = self._fetched[ahead], ahead + 1
            ids, weights = layer.router.ids, layer.router.weights
            order = np.argsort(ids)  # every eager loop goes by ascending number
            layer.experts.for_token(ids[order], weights[order], layer.router.normed, self._out)
            at = layer.after
        for experts, k in self._uses:
            experts.session.count(k)
        for attention in self._attention:
            attention.finish()
        return torch.from_numpy(self._x.copy()).view(hidden.shape).to(hidden.dtype)


__all__ = ["LayerParts", "TokenProgram"]
