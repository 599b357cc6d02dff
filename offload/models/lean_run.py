"""Single tokens through a packed model's decoder layers without the layers' own code.

transformers spends 0.4 ms of Python per layer and token, more than the weights of a small MoE layer
take from memory. Where a layer's structure is known (``lean_detect``) and a small twin of it gives
what the kernels give (``lean_verify``), its forward for one token becomes three calls: attention,
router, experts. Prompts, batches and beams run the layer as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from offload.cpu_ops.decode import AttentionHalf, DenseMlp, Scratch, TokenRouter, scratch_need
from offload.cpu_ops.entries import Kernel
from offload.cpu_ops.formats import FORMATS, Format, get_format
from offload.cpu_ops.kernels import address_of
from offload.cpu_ops.kv_cache import KvCache
from offload.cpu_ops.packing import pack_rows
from offload.cpu_ops.program import program_kernels
from offload.cpu_ops.rope import Rope
from offload.cpu_ops.warm import layer_kernels
from offload.errors import OffloadError
from offload.io.pack_manifest import Layout
from offload.models.attach import Attachment
from offload.models.lean_cache import LeanCache
from offload.models.lean_detect import Lean, detect
from offload.models.lean_layer import rope_of
from offload.models.lean_program import TokenProgram
from offload.models.lean_verify import twin_kernels, verify
from offload.models.pack_reader import PackedModel
from offload.models.packed_modules import PackedExperts, PackedLinear
from offload.models.units import unit_modules

logger = logging.getLogger(__name__)

TOLERANCE = 1e-4
"""Of a twin's output: float32 sums in another order differ by about 1e-6."""

_MATRICES = frozenset({"q", "k", "v", "o", "gate", "up", "down"})


@dataclass(frozen=True, slots=True)
class LeanModel:
    """Every decoder layer's plan, by its path, in order; none if the model runs as it is."""

    layers: dict[str, Lean]
    why_not: str = ""

    def scratch_bytes(self, capacity: int) -> int:
        """Of kernels, for ``capacity`` cached tokens."""
        return max((scratch_need(lean.plan, capacity) for lean in self.layers.values()), default=0)


def find_lean(model: Any, pack: PackedModel) -> LeanModel:
    """Plan the layers of a model (on meta, its modules still its own), or say why not.

    All or none: one cache serves the whole model.
    """
    return prove_lean(model, detect_lean(model, pack))


def detect_lean(model: Any, pack: PackedModel) -> LeanModel:
    """``find_lean`` before anything is tried: what the structure says. Runs no kernel."""
    found: dict[str, Lean] = {}
    for path, layer in unit_modules(model):
        lean = detect(layer, partial(_format_of, pack, path))
        if isinstance(lean, str):
            return LeanModel({}, f"{path}: {lean}")
        found[path] = lean
    if len(found) != model.config.get_text_config().num_hidden_layers:
        return LeanModel({}, f"{len(found)} layers were found")
    heads = {(n.plan.attention.key_heads, n.plan.attention.dim) for n in found.values()}
    if len(heads) != 1:
        return LeanModel({}, "layers have heads of different sizes")
    return LeanModel(found)


def prove_lean(model: Any, lean: LeanModel) -> LeanModel:
    """The same plan if a twin of every kind of layer computes what it says, else why not."""
    tried: list[tuple[type, Lean]] = []
    for path, found in lean.layers.items():
        layer = model.get_submodule(path)
        if any(kind is type(layer) and _alike(found, other) for kind, other in tried):
            continue
        try:
            error = verify(layer, found)
        except (OffloadError, RuntimeError, AttributeError, TypeError, ValueError) as why:
            return LeanModel({}, f"{path}: its twin cannot be tried: {why}")
        logger.debug("%s: the twin differs by %.1e", path, error)
        if not error < TOLERANCE:
            return LeanModel({}, f"{path}: its twin differs by {error:.1e}")
        tried.append((type(layer), found))
    return lean


def lean_kernels(lean: LeanModel) -> list[Kernel]:
    """What the layers run on, and before them their twins."""
    plans = [found.plan for found in lean.layers.values()]
    found = [kernel for plan in plans for kernel in (*layer_kernels(plan), *twin_kernels(plan))]
    return list(dict.fromkeys([*found, *program_kernels()])) if found else []


def _alike(a: Lean, b: Lean) -> bool:
    """Whether a twin of one tells about the other: formats do not matter."""
    window = a.plan.attention.window > 0, b.plan.attention.window > 0
    return a.parts == b.parts and a.layer_type == b.layer_type and window[0] == window[1]


def _format_of(pack: PackedModel, path: str, name: str) -> Format:
    located = pack.tensors.get(f"{path}.{name}")
    if located is None or located.part.layout is not Layout.PACKED:
        return FORMATS["f32"]
    return get_format(located.part.format)


class LeanRun:
    """The lean layers of an open model. ``detach`` of its attachment removes them."""

    def __init__(
        self,
        model: Any,
        lean: LeanModel,
        attachment: Attachment,
        capacity: int,
        caches: int = 1,
    ) -> None:
        """``caches``: that live at the same time, each for ``capacity`` tokens."""
        first = next(iter(lean.layers.values())).plan.attention
        self._model = model
        self._shape = len(lean.layers), first.key_heads, first.dim, capacity
        self._store = KvCache(*self._shape)
        self._free = [self._store]
        self._most = caches
        self._caches: list[LeanCache] = []
        scratch = Scratch.of([found.plan for found in lean.layers.values()], capacity)
        ropes: dict[str | None, Rope] = {}
        rotary = next(m for n, m in model.named_modules() if n.endswith("rotary_emb"))
        steps: list[tuple[Any, _Step]] = []
        for i, (path, found) in enumerate(lean.layers.items()):
            if found.layer_type not in ropes:
                ropes[found.layer_type] = rope_of(rotary, found.layer_type)
            layer = model.get_submodule(path)
            step = _Step(layer, found, ropes[found.layer_type], self._store, i, scratch)
            before = layer.__dict__.get("forward")
            layer.__dict__["forward"] = partial(_forward, step, layer.forward)
            attachment.on_detach(partial(_restore, layer, "forward", before))
            steps.append((layer, step))
        self.program: TokenProgram | None = None
        """All layers at once; None: some layers' weights come and go."""
        if all(step.stays for _, step in steps):
            self.program = TokenProgram(steps, first.hidden)
        before = model.__dict__.get("generate")
        model.__dict__["generate"] = partial(self._generate, model.generate)
        attachment.on_detach(partial(_restore, model, "generate", before))

    def new_cache(self) -> LeanCache:
        """An empty cache for one sequence, to give to ``model`` or ``generate`` as
        ``past_key_values``. If there are as many as may live (one, unless more were asked for), the
        oldest loses its memory; ``release`` gives one's back before."""
        while len(self._caches) >= self._most:
            self.release(self._caches[0])
        # Only memory where tokens were stored counts, so a used one goes first.
        store = self._free.pop() if self._free else KvCache(*self._shape)
        store.crop(0)
        self._caches.append(LeanCache(store))
        return self._caches[-1]

    def release(self, cache: LeanCache) -> None:
        """A cache is not needed any more. No-op if its memory has gone already."""
        if cache in self._caches:
            self._caches.remove(cache)
            cache.live = False
            self._free.append(cache.store)

    def _generate(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if "past_key_values" not in kwargs and self._fits(args, kwargs):
            kwargs["past_key_values"] = self.new_cache()
        return inner(*args, **kwargs)

    def _fits(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether a generation is one sequence that the cache has room for."""
        ids = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        config = kwargs.get("generation_config") or self._model.generation_config

        def setting(name: str) -> Any:
            return kwargs[name] if kwargs.get(name) is not None else getattr(config, name, None)

        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape[0] != 1:
            return False
        mask = kwargs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and not bool(mask.all()):
            return False
        single = (setting("num_beams") or 1) == 1 and (setting("num_return_sequences") or 1) == 1
        plain = setting("use_cache") is not False and setting("cache_implementation") is None
        new = setting("max_new_tokens")
        total = ids.shape[1] + new if new is not None else setting("max_length") or 20
        return single and plain and total <= self._store.capacity


class _Step:
    """One layer for one token."""

    def __init__(
        self, layer: Any, lean: Lean, rope: Rope, store: KvCache, index: int, scratch: Scratch
    ) -> None:
        plan, parts = lean.plan, lean.parts
        self._keep: list[Any] = []
        self._moving: list[tuple[Any, str, PackedLinear]] = []
        self.attention = AttentionHalf(plan.attention, rope, store, index, scratch)
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
            value = module._parameters[leaf].detach().float().contiguous()
            if slot in _MATRICES:
                rows = value.numpy().view(np.uint8)
                packed = pack_rows(FORMATS["f32"], rows, value.shape[1])
                self._keep.append(packed)
                region.place(**{slot: address_of(packed)})
            else:
                self._keep.append(value)
                region.place(**{slot: value.data_ptr()})

    @property
    def stays(self) -> bool:
        """Whether its weights, but for experts, are where they are for good."""
        return not self._moving

    def __call__(self, hidden: torch.Tensor, position: int | None, store: KvCache) -> torch.Tensor:
        self.attention.read(store)
        for region, slot, module in self._moving:
            region.place(**{slot: module.packed.data_ptr()})
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


def _forward(
    step: _Step, inner: Callable[..., Any], hidden_states: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    cache = kwargs.get("past_key_values")
    if isinstance(cache, LeanCache) and hidden_states.shape[:2] == (1, 1):
        cache.check_live()
        positions = kwargs.get("position_ids")
        position = None if positions is None else int(positions.reshape(-1)[0])
        return step(hidden_states, position, cache.store)
    return inner(hidden_states, *args, **kwargs)


def _restore(module: Any, name: str, before: Any) -> None:
    module.__dict__.pop(name, None)
    if before is not None:
        module.__dict__[name] = before
