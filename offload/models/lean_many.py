"""Many tokens through decoder layers at once: a prompt's, or the next ones of several sequences.

    T tokens, H hidden size

Several sequences that decode bring one token each to every layer. One after the other, each reads
all weights from memory again; together, weights are read once and multiplied with all rows, and
experts once with all rows that are routed there. Every row has a cache of its own, and gets the
bits that it gets alone (``cpu_ops.prompt``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from offload.cpu_ops import threads
from offload.cpu_ops.kernels import Floats
from offload.cpu_ops.kv_cache import KvCache
from offload.cpu_ops.layer_plan import LayerPlan
from offload.cpu_ops.prompt import CHUNK, PromptMlp, PromptRouter, Room
from offload.cpu_ops.quantised_prompt import prompt_for
from offload.models.lean_program import LayerParts

Positions = npt.NDArray[np.int64]


class Rooms:
    """Buffers for many tokens, kept from layer to layer; one set, however many sequences there
    are."""

    def __init__(
        self, plans: Sequence[LayerPlan], capacity: int, *, quantised: bool = False
    ) -> None:
        """``capacity``: of caches, in tokens; ``quantised``: they are ``QuantisedKv``."""
        self._plans, self._capacity, self._quantised = plans, capacity, quantised
        self._free: Room | None = None
        self._pair: tuple[Floats, Floats] | None = None
        self._outputs: list[torch.Tensor] = []

    @contextmanager
    def lent(self, tokens: int) -> Iterator[Room]:
        """For ``tokens`` or fewer at a time."""
        room, self._free = self._free, None
        rows = min(tokens, CHUNK)
        if room is None or room.rows < rows or room.workers < threads.count():
            room = Room(self._plans, rows, self._capacity, quantised=self._quantised)
        try:
            yield room
        finally:
            self._free = room

    @contextmanager
    def pair(self, like_TH: Floats) -> Iterator[tuple[Floats, Floats]]:
        """Two arrays of a shape. Memory that a layer gives back costs the next one its pages again:
        for 512 tokens, 2048 wide, 2000 of them in each layer, a twentieth of a prompt's time."""
        pair, self._pair = self._pair, None
        if pair is None or pair[0].shape[1:] != like_TH.shape[1:] or len(pair[0]) < len(like_TH):
            pair = np.empty_like(like_TH), np.empty_like(like_TH)
        first, second = pair
        try:
            yield first[: len(like_TH)], second[: len(like_TH)]
        finally:
            self._pair = pair if len(first) <= CHUNK else None

    def output(self, shape: torch.Size) -> torch.Tensor:
        """float32, not initialised, in memory of an earlier output that nobody holds any more: a
        layer's is gone when the next one's is made, unless a program has kept it."""
        for kept in self._outputs:
            if kept.shape == shape and _is_alone(kept):
                break
        else:
            kept = torch.empty(shape, dtype=torch.float32, device="cpu")
            if shape[:-1].numel() > CHUNK or _storage_uses is None:
                return kept
            self._outputs = [*self._outputs[-1:], kept]
        # Not a view: it has no base that autograd knows of.
        strides = kept.stride()
        empty = torch.empty(0, dtype=torch.float32, device="cpu")
        return empty.set_(kept.untyped_storage(), 0, shape, strides)

    def forget(self) -> None:
        """Its memory is somebody else's."""
        self._free, self._pair, self._outputs = None, None, []


_storage_uses: Any = getattr(torch._C, "_storage_Use_Count", None)


def _uses(tensor: torch.Tensor) -> int:
    """Tensors, and arrays of theirs, that hold its memory."""
    count: int = _storage_uses(tensor.untyped_storage()._cdata)
    return count


_ONE = 0 if _storage_uses is None else _uses(torch.empty(1))


def _is_alone(tensor: torch.Tensor) -> bool:
    """Whether nobody else can see its memory: no other tensor, no process that it is shared with;
    and whether it may be written to in this mode."""
    return (
        _uses(tensor) == _ONE
        and not tensor.is_shared()
        and tensor.is_inference() == torch.is_inference_mode_enabled()
    )


class ManyTokens:
    """One layer. Its parts know where weights and the prompt's cache are."""

    def __init__(self, parts: LayerParts, rooms: Rooms, *, alone: bool = False) -> None:
        """``alone``: see ``cpu_ops.prompt``."""
        self._rooms, self._experts = rooms, parts.experts
        self._attention = prompt_for(parts.attention, alone=alone)
        mlp, router, shared = parts.mlp, parts.router, parts.shared
        self._mlp = None if mlp is None else PromptMlp(mlp, alone=alone)
        self._router = None if router is None else PromptRouter(router, alone=alone)
        self._shared = None if shared is None else PromptMlp(shared, alone=alone)

    def prompt(self, x_TH: Floats, positions_T: Positions) -> None:
        """``x`` becomes the layer's output for tokens that follow each other in the cache that the
        layer reads, and stores keys and values in."""
        self._run(x_TH, lambda room: self._attention(x_TH, positions_T, room))

    def of_each(self, x_TH: Floats, positions_T: Positions, caches: Sequence[KvCache]) -> None:
        """``x`` becomes the layer's output for one token of each of T caches."""
        self._run(x_TH, lambda room: self._attention.of_each(x_TH, positions_T, caches, room))

    def _run(self, x_TH: Floats, attend: Callable[[Room], None]) -> None:
        with self._rooms.lent(len(x_TH)) as room:
            attend(room)
            if self._mlp is not None:
                self._mlp(x_TH, room)
        if self._router is None or self._experts is None:
            return
        with self._rooms.pair(x_TH) as (normed_TH, sum_TH):
            with self._rooms.lent(len(x_TH)) as room:
                ids_Tk, weights_Tk = self._router(x_TH, normed_TH, room)
            # While experts are waited for another sequence may come, and use the room.
            self._experts.for_prompt(ids_Tk, weights_Tk, normed_TH, sum_TH)
            if self._shared is not None:
                with self._rooms.lent(len(x_TH)) as room:
                    self._shared(normed_TH, room, sum_TH)
            x_TH += sum_TH


class Row(NamedTuple):
    """The next token of a sequence."""

    hidden: torch.Tensor
    """[..., H], one row."""
    position: int | None
    """For the rotation; None: as many as are cached."""
    cache: KvCache


class RowLayer(Protocol):
    """A layer that takes rows of several sequences; see ``ManyTokens.of_each``."""

    def of_each(self, x_TH: Floats, positions_T: Positions, caches: Sequence[KvCache]) -> None: ...


class RowLayers:
    """Layers, one behind the other, for the next tokens of several sequences."""

    def __init__(self, name: str, layers: Sequence[RowLayer], first: int) -> None:
        """``name``: of the place where sequences wait for each other; ``first``: the first layer's
        number in the caches."""
        self.name = name
        self._layers, self._first = layers, first

    def takes(self, row: Row) -> bool:
        """Whether a row may wait for others; raises OffloadError for itself: its cache is full."""
        row.cache.make_room(self._first)
        return True

    def at_once(self, sequences: int) -> int:
        """Rows in one go."""
        return sequences

    def multiply(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Each row's output, of its own shape and dtype."""
        x_TH = np.stack([row.hidden.detach().float().reshape(-1).numpy() for row in rows])
        caches = [row.cache for row in rows]
        positions_T = np.array(
            [
                row.cache.length(self._first) if row.position is None else row.position
                for row in rows
            ],
            np.int64,
        )
        for layer in self._layers:
            layer.of_each(x_TH, positions_T, caches)
        return [
            torch.from_numpy(x_H.copy()).view(row.hidden.shape).to(row.hidden.dtype)
            for x_H, row in zip(x_TH, rows, strict=True)
        ]


class Join(Protocol):
    """Asked for every row while several sequences run: its product, with those of others; None: it
    is alone, and does as ever."""

    def __call__(self, layers: RowLayers, row: Row) -> torch.Tensor | None: ...


__all__ = ["Join", "ManyTokens", "Rooms", "Row", "RowLayer", "RowLayers"]
