"""What a router says, beyond the experts it chooses: for policies that learn from its scores, and
for recording.

An experts module is told only the chosen experts and their weights. The scores of the others are
what the router's module returns beside them, so they are taken from there; where a router is no
module of its own, or returns something else, the chosen experts' weights have to do.
"""

# T tokens, E experts, K chosen ones, P of which scores are kept

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from offload.io.routing_file import BUFFER_BYTES, NO_EXPERT, RoutingHeader, RoutingWriter
from offload.models.expert_groups import ExpertGroup

MOST_SCORED = 255
"""Experts per token of which scores are kept: a byte counts them in the file."""

__all__ = [
    "BUFFER_BYTES", "RouterTap", "Routing", "RoutingRecorder", "ScoreRows", "tap_bytes",
]  # fmt: skip


def tap_bytes(rows: int, experts: int) -> int:
    """Memory of one reading: logits, probabilities, their masked copy and the best of them."""
    return 4 * 4 * rows * experts


class Routing:
    """One run of a layer: ``experts_TP`` int64, the K chosen ones first (``NO_EXPERT``: none), and
    their ``scores_TP`` float32 in [0, 1]."""

    __slots__ = ("chosen", "experts_TP", "scores_TP")

    def __init__(self, experts_TP: torch.Tensor, scores_TP: torch.Tensor, chosen: int) -> None:
        self.experts_TP = experts_TP
        self.scores_TP = scores_TP
        self.chosen = chosen

    def rows(self, blocks: Sequence[str]) -> ScoreRows:
        """As eviction policies take them: for each token, scores by block."""
        return ScoreRows(self, blocks)


class ScoreRows:
    """Made row by row: a long prompt's as Python objects would not fit a small budget."""

    def __init__(self, routing: Routing, blocks: Sequence[str]) -> None:
        self._routing = routing
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._routing.experts_TP)

    def __iter__(self) -> Iterator[dict[str, float]]:
        blocks, routing = self._blocks, self._routing
        for experts_P, scores_P in zip(routing.experts_TP, routing.scores_TP, strict=True):
            pairs = zip(experts_P.tolist(), scores_P.tolist(), strict=True)
            yield {blocks[e]: s for e, s in pairs if e != NO_EXPERT}


class RouterTap:
    """Listens to one layer's router. ``detach`` removes its hook."""

    def __init__(self, group: ExpertGroup) -> None:
        self._n = group.n_experts
        self._logits_TE: torch.Tensor | None = None
        self._undo: Callable[[], None] | None = None
        if group.gate is not None:
            router = group.gate.places[0].module
            self._undo = router.register_forward_hook(self._listen).remove

    def detach(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None

    def read(self, args: Any, kwargs: Any) -> Routing | None:
        """The routing that an experts module was called with; None if it cannot be told."""
        given = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
        index = next(
            (t for t in given if not t.is_floating_point() and t.dtype != torch.bool), None
        )
        logits_TE, self._logits_TE = self._logits_TE, None
        if index is None or not index.numel():
            return None
        index_TK = index.detach().reshape(-1, index.shape[-1]).to("cpu", torch.int64)
        tokens, k = index_TK.shape
        valid_TK = (index_TK >= 0) & (index_TK < self._n)
        safe_TK = index_TK.where(valid_TK, torch.zeros((), dtype=torch.int64, device="cpu"))
        if logits_TE is not None and len(logits_TE) == tokens:
            probs_TE = logits_TE.to("cpu", torch.float32).softmax(-1)
            chosen_TK = probs_TE.gather(1, safe_TK)
            more = min(2 * k, self._n, MOST_SCORED) - k
            # Masked once by the chosen ones, what topk finds are the likeliest of the others.
            rest = probs_TE.scatter(1, safe_TK, -1.0).topk(max(0, more), dim=1)
            experts_TP = torch.cat([index_TK, rest.indices], 1)
            scores_TP = torch.cat([chosen_TK, rest.values.clamp(min=0.0)], 1)
            valid_TP = torch.cat([valid_TK, rest.values >= 0.0], 1)
        else:
            experts_TP, valid_TP = index_TK, valid_TK
            weights_TK = self._weights(given, index)
            even_TK = torch.full((tokens, k), 1.0 / k, dtype=torch.float32, device="cpu")
            scores_TP = even_TK if weights_TK is None else weights_TK
        none = torch.full((), NO_EXPERT, dtype=torch.int64, device="cpu")
        return Routing(experts_TP.where(valid_TP, none), scores_TP * valid_TP, k)

    def _weights(self, given: Sequence[torch.Tensor], index: torch.Tensor) -> torch.Tensor | None:
        """The chosen experts' weights, each row's sum 1; None if there are none."""
        for tensor in given:
            if tensor.is_floating_point() and tensor.shape == index.shape:
                weights = tensor.detach().reshape(-1, index.shape[-1]).to("cpu", torch.float32)
                weights = weights.abs()
                return weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
        return None

    def _listen(self, _module: Any, _args: Any, output: Any) -> None:
        found = output if isinstance(output, (tuple, list)) else (output,)
        for value in found:
            if (
                isinstance(value, torch.Tensor)
                and value.is_floating_point()
                and value.shape[-1:] == (self._n,)
            ):
                self._logits_TE = value.detach().reshape(-1, self._n)
                return


class RoutingRecorder:
    """Writes what layers route to into a file."""

    def __init__(self, path: Any, groups: Sequence[ExpertGroup], model: str) -> None:
        """Raises StoreError if the file cannot be made."""
        self.path = path
        self.paused = False
        self._layer = {g.name: i for i, g in enumerate(groups)}
        self._writer = RoutingWriter(
            path,
            RoutingHeader(tuple(g.name for g in groups), tuple(g.n_experts for g in groups), model),
        )

    def add(self, group: str, routing: Routing) -> None:
        """One run of a layer. Raises StoreError."""
        if self.paused:
            return
        self._writer.add(
            self._layer[group],
            routing.chosen,
            routing.experts_TP.shape[1],
            routing.experts_TP.numpy().astype("<u2").tobytes(),
            routing.scores_TP.numpy().astype("<f2").tobytes(),
        )

    def abandon(self) -> None:
        """Leave no trace: nothing has run."""
        self._writer.abandon()

    def close(self) -> None:
        """Publish the file, also after an interruption: every record in it is whole."""
        self._writer.close()
