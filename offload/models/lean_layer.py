"""A decoder layer of transformers, packed and computed by the kernels of decoding and of prompts.

Packs a module's parameters into memory of its own. It serves to verify plans and as the reference
of how a layer's parts follow each other; a runtime whose weights move makes the same parts from
the plan and places addresses itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.cpu_ops.decode import DenseMlp, Scratch, TokenRouter
from offload.cpu_ops.experts import ExpertLayout, expert_ffn, expert_layout
from offload.cpu_ops.formats import FORMATS, Format
from offload.cpu_ops.kernels import address_of
from offload.cpu_ops.kv_cache import KvCache
from offload.cpu_ops.layer_plan import MatrixPlan
from offload.cpu_ops.packing import pack_rows, quantize
from offload.cpu_ops.prompt import PromptMlp, PromptRouter, Room
from offload.cpu_ops.quantised_half import half_for
from offload.cpu_ops.quantised_prompt import prompt_for
from offload.cpu_ops.rope import Rope
from offload.models.lean_detect import Lean

Array = npt.NDArray[Any]


def rope_of(rotary: Any, layer_type: str | None) -> Rope:
    """From a model's rotary embedding module (on the CPU); ``layer_type``: ``Lean.layer_type``."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    inverse = getattr(rotary, f"{prefix}inv_freq").detach().float().numpy()
    return Rope(np.ascontiguousarray(inverse), getattr(rotary, f"{prefix}attention_scaling"))


class PackedLayer:
    """One layer for one sequence. ``layer``: its module, with weights on the CPU."""

    def __init__(
        self, layer: Any, lean: Lean, rope: Rope, cache: KvCache, index: int,
        *, experts: Format = FORMATS["f32"], isa: str | None = None,
    ) -> None:  # fmt: skip
        """``experts``: the format of routed experts; other matrices have the plan's."""
        plan, parts = lean.plan, lean.parts
        weights = {n: p.detach().float().numpy() for n, p in layer.named_parameters()}
        scratch = Scratch.of([plan], cache.capacity)
        self._keep: list[Array] = []
        self._isa = isa
        self.attention = half_for(plan.attention, rope, cache, index, scratch, isa=isa)
        self.attention.place(**self._places(plan.attention, parts.attention, weights))
        self.mlp = self.router = self.shared = None
        if plan.mlp is not None:
            self.mlp = DenseMlp(plan.mlp, scratch, isa=isa)
            self.mlp.place(**self._places(plan.mlp, parts.mlp, weights))
        if plan.router is not None:
            self.router = TokenRouter(plan.router, scratch, isa=isa)
            self.router.place(**self._places(plan.router, parts.router, weights))
            self._layout = expert_layout(
                experts, experts, plan.attention.hidden, plan.inner, biases=plan.expert_biases,
                glu=plan.glu, alpha=plan.alpha, limit=plan.limit,
            )  # fmt: skip
            prefix = f"{parts.experts}."
            stacks = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
            bundles = _bundles(self._layout, stacks, transposed=parts.transposed)
            self._bases = np.array([self._owned(bundle) for bundle in bundles])
            self._sum = np.zeros(plan.attention.hidden, np.float32)
        if plan.shared is not None:
            self.shared = DenseMlp(plan.shared, scratch, isa=isa)
            self.shared.place(**self._places(plan.shared, parts.shared, weights))

        self._plan = plan
        self._at = cache, index

    def prompt(self, x_TH: Array, rows: int, caches: Sequence[KvCache] | None = None) -> Array:
        """As many calls, ``rows`` tokens at a time: the outputs in place of the inputs ``x``,
        float32 [tokens, hidden]. ``caches``: of each token; None: one behind the other, of the
        layer's own."""
        cache, index = self._at
        room = Room([self._plan], rows, cache.capacity, quantised=cache.kind.quantised)
        attention = prompt_for(self.attention, isa=self._isa)
        if caches is None:
            length = cache.length(index)
            attention(x_TH, np.arange(length, length + len(x_TH)), room)
        else:
            positions = np.array([each.length(index) for each in caches], np.int64)
            attention.of_each(x_TH, positions, caches, room)
        if self.mlp is not None:
            PromptMlp(self.mlp, isa=self._isa)(x_TH, room)
            return x_TH
        assert self.router is not None
        normed, out = np.empty_like(x_TH), np.empty_like(x_TH)
        ids, weights = PromptRouter(self.router, isa=self._isa)(x_TH, normed, room)
        spread = np.zeros((len(x_TH), len(self._bases)), np.float32)
        np.put_along_axis(spread, ids, weights, axis=1)
        expert_ffn(self._layout, self._bases, normed, spread, out, isa=self._isa)
        if self.shared is not None:
            PromptMlp(self.shared, isa=self._isa)(normed, room, out)
        x_TH += out
        return x_TH

    def _owned(self, array: Array) -> int:
        self._keep.append(array)
        return address_of(array)

    def _places(
        self, plan: Any, parts: dict[str, str], weights: dict[str, Array]
    ) -> dict[str, int]:
        found = {}
        for slot, name in parts.items():
            weight = weights[name]
            if slot in ("q", "k", "v", "o", "gate", "up", "down"):
                matrix: MatrixPlan = getattr(plan, slot)
                rows = quantize(matrix.format, np.ascontiguousarray(weight))
                found[slot] = self._owned(pack_rows(matrix.format, rows, matrix.columns))
            else:
                found[slot] = self._owned(weight.reshape(-1).copy())
        return found

    def __call__(self, x: Array, position: int | None = None) -> Array:
        """The layer's output in place of its input ``x``, float32 [hidden]."""
        self.attention(x, position)
        if self.mlp is not None:
            return self.mlp(x)
        assert self.router is not None
        ids, weights, normed = self.router(x)
        order = np.argsort(ids)  # every eager loop goes by ascending number
        bases, weights = self._bases[ids[order]], weights[order]
        expert_ffn(self._layout, bases, normed, weights, self._sum, isa=self._isa)
        if self.shared is not None:
            self.shared(normed, self._sum)
        x += self._sum
        return x


def _bundles(layout: ExpertLayout, weights: dict[str, Array], *, transposed: bool) -> list[Array]:
    """The packed experts of transformers' stacked parameters."""
    gate_up, down = weights["gate_up_proj"], weights["down_proj"]
    bias = weights.get("gate_up_proj_bias")
    if transposed:
        gate_up, down = gate_up.transpose(0, 2, 1), down.transpose(0, 2, 1)
        gate, up = gate_up[:, 0::2], gate_up[:, 1::2]
        gate_bias, up_bias = (None, None) if bias is None else (bias[:, 0::2], bias[:, 1::2])
    else:
        gate, up = gate_up[:, : layout.inner], gate_up[:, layout.inner :]
        gate_bias = None if bias is None else bias[:, : layout.inner]
        up_bias = None if bias is None else bias[:, layout.inner :]
    found = []
    for e in range(len(gate)):
        bundle = np.zeros(layout.nbytes, np.uint8)
        for fmt, offset, weight in (
            (layout.gate_up, layout.gate_offset, gate[e]),
            (layout.gate_up, layout.up_offset, up[e]),
            (layout.down, layout.down_offset, down[e]),
        ):
            rows = quantize(fmt, np.ascontiguousarray(weight))
            packed = pack_rows(fmt, rows, weight.shape[1])
            bundle[offset : offset + packed.size] = packed
        for offset, vectors in (
            (layout.gate_bias_offset, gate_bias),
            (layout.up_bias_offset, up_bias),
            (layout.down_bias_offset, weights.get("down_proj_bias")),
        ):
            if vectors is not None:
                raw = np.ascontiguousarray(vectors[e]).view(np.uint8)
                bundle[offset : offset + raw.size] = raw
        found.append(bundle)
    return found
