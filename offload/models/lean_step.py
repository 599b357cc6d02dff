"""A decoder layer of a packed model as calls of kernels: for one token, for a prompt, or for the
next tokens of several sequences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from offload.cpu_ops.decode import DenseMlp, Scratch, TokenRouter
from offload.cpu_ops.formats import FORMATS
from offload.cpu_ops.kernels import Floats, address_of
from offload.cpu_ops.kv_cache import KvCache
from offload.cpu_ops.packing import Bytes, pack_rows
from offload.cpu_ops.quantised_half import half_for
from offload.cpu_ops.rope import Rope
from offload.models.lean_cache import LeanCache
from offload.models.lean_detect import Lean
from offload.models.lean_many import ManyTokens, Positions, Rooms
from offload.models.lean_masks import is_causal
from offload.models.lean_watch import Copied, LayerWatch
from offload.models.packed_modules import PackedExperts, PackedLinear

_MATRICES = frozenset({"q", "k", "v", "o", "gate", "up", "down"})


class LayerStep:
    """One layer for one token, or for a prompt."""

    def __init__(
        self, layer: Any, lean: Lean, rope: Rope, store: KvCache, index: int, scratch: Scratch,
        rooms: Rooms | None,
    ) -> None:  # fmt: skip
        """``rooms``: None: prompts run as they are."""
        plan, parts = lean.plan, lean.parts
        self._keep: list[Any] = []
        self._kept: list[tuple[torch.nn.Module, str]] = []
        self._copies: list[Copied] = []
        self._moving: list[tuple[Any, str, PackedLinear]] = []
        self.attention = half_for(plan.attention, rope, store, index, scratch)
        self._place(self.attention, layer, parts.attention)
        self.mlp = self.router = self.shared = None
        self.experts: PackedExperts | None = None
        if plan.mlp is not None:
            self.mlp = DenseMlp(plan.mlp, scratch)
            self._place(self.mlp, layer, parts.mlp)
        if plan.router is not None:
            self.router = TokenRouter(plan.router, scratch)
            self._place(self.router, layer, parts.router)
            self.experts = layer.get_submodule(parts.experts).__dict__["forward"]
        if plan.shared is not None:
            self.shared = DenseMlp(plan.shared, scratch)
            self._place(self.shared, layer, parts.shared)
        self.watch = LayerWatch(layer, self._kept)
        self.rooms = rooms
        self._prompts = None if rooms is None else ManyTokens(self, rooms)
        self._rows = None if rooms is None else ManyTokens(self, rooms, alone=True)

    def _place(self, region: Any, layer: Any, parts: dict[str, str]) -> None:
        for slot, name in parts.items():
            path, _, leaf = name.rpartition(".")
            module = layer.get_submodule(path)
            if isinstance(module, PackedLinear) and leaf == "weight":
                if module.packed.device.type == "cpu" and type(module.packed) is torch.nn.Parameter:
                    region.place(**{slot: module.packed.data_ptr()})
                else:  # streamed: it is somewhere else each time
                    self._moving.append((region, slot, module))
                continue
            self._kept.append((module, leaf))
            weight = module._parameters[leaf].detach()
            value = weight.float().contiguous()
            if slot in _MATRICES:
                packed = pack_rows(FORMATS["f32"], _bytes_of(value), value.shape[1])
                self._keep.append(packed)
                region.place(**{slot: address_of(packed)})
                self._copies.append(Copied(module, leaf, partial(_pack_into, packed)))
            else:
                self._keep.append(value)
                region.place(**{slot: value.data_ptr()})
                if value.data_ptr() != weight.data_ptr():
                    self._copies.append(Copied(module, leaf, value.copy_))

    def untouched(self) -> bool:
        """Whether the layer is as it was opened; values that were written to since are taken."""
        if not self.watch.untouched():
            return False
        for copy in self._copies:
            copy.refresh()
        return True

    @property
    def stays(self) -> bool:
        """Whether its weights, but for experts, are where they are for good."""
        return not self._moving

    def prompt(
        self, hidden: torch.Tensor, positions: torch.Tensor | None, store: KvCache
    ) -> torch.Tensor:
        """The layer's output for ``hidden`` [1, T, H]; keys and values are added to ``store``.

        ``positions``: for the rotation, [..., T]; None: those behind what is cached.
        """
        assert self._prompts is not None
        assert self.rooms is not None
        self._ready(store)
        out = self.rooms.output(hidden.shape).copy_(hidden.detach())
        x_TH = out[0].numpy()
        if positions is None:
            first = store.length(self.attention.layer)
            positions_T = np.arange(first, first + len(x_TH))
        else:
            positions_T = positions.reshape(-1).numpy()
        self._prompts.prompt(x_TH, positions_T)
        return out.to(hidden.dtype)

    def of_each(self, x_TH: Floats, positions_T: Positions, caches: Sequence[KvCache]) -> None:
        """``x`` becomes the layer's output for the next tokens of T sequences; their keys and
        values are added to their caches."""
        assert self._rows is not None
        self._place_moving()
        self._rows.of_each(x_TH, positions_T, caches)

    def sees_past(self, cache: LeanCache, kwargs: dict[str, Any]) -> bool:
        """Whether a call for one token hides from it nothing but what is out of the layer's
        window, and gives it one position."""
        cache.check_live()
        positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        if positions is not None and positions.numel() != 1:
            return False
        return mask is None or is_causal(
            mask, 1, cache.store.length(self.attention.layer), self.attention.plan.window
        )

    def sees_all(self, cache: LeanCache, hidden: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether a call hides from each token nothing but what comes later, and what is out of
        the layer's window, and gives each one position."""
        cache.check_live()
        positions = kwargs.get("position_ids")
        if positions is not None and positions.numel() != hidden.shape[1]:
            return False
        return is_causal(
            kwargs.get("attention_mask"), hidden.shape[1],
            cache.store.length(self.attention.layer), self.attention.plan.window,
        )  # fmt: skip

    def _ready(self, store: KvCache) -> None:
        self.attention.read(store)
        self._place_moving()

    def _place_moving(self) -> None:
        for region, slot, module in self._moving:
            region.place(**{slot: module.packed.data_ptr()})

    def __call__(self, hidden: torch.Tensor, position: int | None, store: KvCache) -> torch.Tensor:
        self._ready(store)
        x = hidden.detach().float().reshape(-1).numpy().copy()
        self.attention(x, position)
        if self.mlp is not None:
            self.mlp(x)
        if self.router is not None and self.experts is not None:
            ids, weights, normed = self.router(x)
            if self.experts.session.waits:
                normed = normed.copy()  # the router's own: another sequence may come meanwhile
            order = np.argsort(ids)  # every eager loop goes by ascending number
            out = self.experts.for_token(ids[order], weights[order], normed)
            if self.shared is not None:
                self.shared(normed, out)
            x += out
        return torch.from_numpy(x).view(hidden.shape).to(hidden.dtype)


def _bytes_of(value: torch.Tensor) -> Bytes:
    found: Bytes = value.numpy().view(np.uint8)
    return found


def _pack_into(packed: Bytes, weight: torch.Tensor) -> None:
    value = weight.float().contiguous()
    pack_rows(FORMATS["f32"], _bytes_of(value), value.shape[1], packed)
