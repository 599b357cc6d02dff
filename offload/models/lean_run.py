"""One sequence through a packed model's decoder layers without the layers' own code.

transformers spends 0.4 ms of Python per layer and token, more than the weights of a small MoE layer
take from memory. Where a layer's structure is known (``lean_detect``) and a small twin of it gives
what the kernels give (``lean_verify``), its forward for one token becomes three calls: attention,
router, experts. A prompt's tokens take the same three steps at once (``cpu_ops.prompt``). Batches
and beams run the layer as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from offload.blocks import align_up
from offload.cpu_ops.block_layout import PART
from offload.cpu_ops.decode import Scratch, scratch_need
from offload.cpu_ops.entries import Kernel
from offload.cpu_ops.formats import FORMATS, Format, get_format
from offload.cpu_ops.kv_cache import KvType, kv_cache_bytes
from offload.cpu_ops.kv_quantised import QuantisedKv, make_kv, quantised_bytes
from offload.cpu_ops.layer_plan import LayerPlan
from offload.cpu_ops.program import program_kernels
from offload.cpu_ops.prompt import CHUNK, fits, room_bytes
from offload.cpu_ops.rope import Rope
from offload.cpu_ops.warm import layer_kernels
from offload.errors import OffloadError
from offload.io.pack_manifest import Layout
from offload.kv.generation import by_name
from offload.kv.named import CACHE, NAMES, given_cache
from offload.models.attach import Attachment
from offload.models.lean_cache import LeanCache
from offload.models.lean_detect import Lean, detect
from offload.models.lean_layer import rope_of
from offload.models.lean_many import Join, Rooms, Row, RowLayers
from offload.models.lean_program import TokenProgram
from offload.models.lean_step import LayerStep
from offload.models.lean_verify import twin_kernels, verify
from offload.models.lean_watch import Around
from offload.models.pack_reader import PackedModel
from offload.models.units import unit_modules

logger = logging.getLogger(__name__)

TOLERANCE = 1e-4
"""Of a twin's output: float32 sums in another order differ by about 1e-6."""

LEAST_ELEMENT = 1.2
"""Bytes of keys and values that are read in the time of an element's products: fewer bits than
that do not make attention faster (four queries per key, 8 bits and 4 alike)."""


@dataclass(frozen=True, slots=True)
class LeanModel:
    """Every decoder layer's plan, by its path, in order; none if the model runs as it is."""

    layers: dict[str, Lean]
    why_not: str = ""
    kv: KvType = KvType.F32
    """How keys and values are kept."""

    @property
    def plans(self) -> list[LayerPlan]:
        """Of the layers, in order."""
        return [lean.plan for lean in self.layers.values()]

    @property
    def runs_prompts(self) -> bool:
        """Whether prompts take the kernels too; if not, they run as they are."""
        return bool(self.layers) and all(fits(plan) for plan in self.plans)

    def scratch_bytes(self, capacity: int) -> int:
        """Of kernels, for ``capacity`` cached tokens."""
        return max((scratch_need(plan, capacity) for plan in self.plans), default=0)

    def prompt_bytes(self, tokens: int, capacity: int) -> int:
        """Of a prompt's pass through a layer: buffers, its input, its output, and between them the
        experts' input and output. 0 if prompts run as they are."""
        plans = self.plans
        if not self.runs_prompts:
            return 0
        first, some = plans[0].attention, min(tokens, CHUNK)
        rows = 4 * first.hidden * tokens
        room = room_bytes(plans, some, capacity, quantised=self.kv.quantised)
        # Keys and values as they were, in whole parts, while the error of rounding is measured.
        exact = 8 * align_up(some, PART) * first.key_heads * first.dim if self.kv.quantised else 0
        return room + exact + 4 * rows

    def attended_bytes(self, context: int) -> float:
        """Of keys and values that a token behind ``context`` others sees, or as many as take as
        long."""
        each = {"q8": 1.0, "q4": 0.5}.get(self.kv.value, float(self.kv.nbytes))
        seen = sum(
            plan.attention.key_heads * plan.attention.dim
            * min(context, plan.attention.window or context)
            for plan in self.plans
        )  # fmt: skip
        return 2 * max(each, LEAST_ELEMENT) * seen

    def kv_bytes(self, capacity: int) -> int:
        """Of a sequence's keys and values. Raises OffloadError: no kernel takes such heads in
        ``kv``."""
        first = self.plans[0].attention
        shape = len(self.layers), first.key_heads, first.dim, capacity, self.kv
        return quantised_bytes(*shape) if self.kv.quantised else kv_cache_bytes(*shape)


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
    found = [
        kernel
        for plan in lean.plans
        for kernel in (*layer_kernels(plan, lean.kv), *twin_kernels(plan))
    ]
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
        self._shape = len(lean.layers), first.key_heads, first.dim, capacity, lean.kv
        self._store = make_kv(*self._shape)
        self._stores = [self._store]
        self._free = [self._store]
        self._most = caches
        self._caches: list[LeanCache] = []
        scratch = Scratch.of(lean.plans, capacity)
        rooms = None
        if lean.runs_prompts:
            rooms = Rooms(lean.plans, capacity, quantised=lean.kv.quantised)
        ropes: dict[str | None, Rope] = {}
        rotary = next(m for n, m in model.named_modules() if n.endswith("rotary_emb"))
        self._around, self._changed = Around(model, rotary), False
        steps: list[tuple[Any, LayerStep]] = []
        for i, (path, found) in enumerate(lean.layers.items()):
            if found.layer_type not in ropes:
                ropes[found.layer_type] = rope_of(rotary, found.layer_type)
            layer = model.get_submodule(path)
            rope = ropes[found.layer_type]
            step = LayerStep(layer, found, rope, self._store, i, scratch, rooms)
            before = layer.__dict__.get("forward")
            row_layers = RowLayers(path, [step], i)
            layer.__dict__["forward"] = partial(self._layer, step, row_layers, layer.forward)
            attachment.on_detach(partial(_restore, layer, "forward", before))
            steps.append((layer, step))
        self.join: Join | None = None
        """Asked for every single token, while several sequences run in turns."""
        self.joins = rooms is not None
        """Whether it may be."""
        self.program: TokenProgram | None = None
        """All layers at once; None: some layers' weights come and go."""
        if all(step.stays for _, step in steps):
            self.program = TokenProgram(steps, first.hidden)
        self._steps = [step for _, step in steps]
        self._all_layers = RowLayers("all layers", self._steps, 0)
        self._turn = attachment.turn
        before = model.__dict__.get("generate")
        model.__dict__["generate"] = by_name(model, partial(self._generate, model.generate))
        attachment.on_detach(partial(_restore, model, "generate", before))

    def new_cache(self) -> LeanCache:
        """An empty cache for one sequence, to give to ``model`` or ``generate`` as
        ``past_key_values``. If there are as many as may live (one, unless more were asked for), the
        oldest loses its memory; ``release`` gives one's back before."""
        self._look()
        while len(self._caches) >= self._most:
            self.release(self._caches[0])
        # Only memory where tokens were stored counts, so a used one goes first.
        store = self._free.pop() if self._free else make_kv(*self._shape)
        if store not in self._stores:
            self._stores.append(store)
        store.crop(0)
        self._caches.append(LeanCache(store))
        return self._caches[-1]

    def release(self, cache: LeanCache) -> None:
        """A cache is not needed any more. No-op if its memory has gone already."""
        if cache in self._caches:
            self._caches.remove(cache)
            cache.live = False
            self._free.append(cache.store)

    def kv_stats(self) -> dict[str, Any] | None:
        """Of keys and values that are rounded to fewer bits, as ``KvTiers.stats`` has them; None:
        they are not."""
        stores = [store for store in self._stores if isinstance(store, QuantisedKv)]
        if not stores:
            return None
        none = dict.fromkeys(
            ("blocks_on_disk", "hits", "ahead", "late", "copies", "read_bytes", "written_bytes"), 0
        )
        parts = sum(s.done(layer) // PART for s in stores for layer in range(s.layers))
        return {
            "ram_bytes": sum(store.nbytes for store in stores),
            "kind": self._store.kind.value,
            "attention_error": max((s.error for s in stores if s.error is not None), default=None),
            "keep_tokens": None,
            "evicted_tokens": 0,
            "slot_bytes": stores[0].layout.nbytes // stores[0].layout.parts,
            "blocks_in_ram": parts,
            **none,
            "stall_s": 0.0,
        }

    def untouched(self) -> bool:
        """Whether every layer is as it was opened: no hook inside, no module replaced."""
        if self._changed or not self._around.untouched():
            return False
        return all(step.untouched() for step in self._steps)

    def _look(self) -> None:
        """See whether a program has changed numbers that layers keep; as a text begins, as there
        are many."""
        self._changed = not all(step.watch.unchanged() for step in self._steps)

    def token(
        self, hidden: torch.Tensor, position: int | None, cache: LeanCache
    ) -> torch.Tensor | None:
        """The last layer's output for one token's ``hidden`` [1, 1, H], all layers at once; None:
        it is to go layer by layer."""
        program = self.program
        if program is None or not (cache.is_as_seen() or program.unwatched()):
            return None
        if self.join is not None:
            program.pause()
            joined = self.join(self._all_layers, Row(hidden, position, cache.store))
            if joined is not None:
                return joined
        return program(hidden, position, cache.store) if program.fits() else None

    def _layer(
        self, step: LayerStep, row_layers: RowLayers, inner: Callable[..., Any],
        hidden_states: torch.Tensor, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """A layer's forward; ``inner``: its own."""
        cache, hidden = given_cache(kwargs), hidden_states
        if not isinstance(cache, LeanCache) or hidden.shape[0] != 1 or hidden.dim() != 3:
            return inner(hidden_states, *args, **kwargs)
        if step.attention.layer == 0 and hidden.shape[1] > 1:
            self._look()
        if self._changed or not step.untouched() or not self._around.untouched():
            cache.check_live()
            return inner(hidden_states, *args, **kwargs)
        positions = kwargs.get("position_ids")
        if hidden.shape[1] == 1 and not args and step.sees_past(cache, kwargs):
            position = None if positions is None else int(positions.reshape(-1)[0])
            if self.join is not None:
                joined = self.join(row_layers, Row(hidden, position, cache.store))
                if joined is not None:
                    return joined
            return step(hidden, position, cache.store)
        if step.rooms is not None:
            if not args and not torch.is_grad_enabled() and step.sees_all(cache, hidden, kwargs):
                return step.prompt(hidden, positions, cache.store)
            step.rooms.forget()  # the layer's own code takes as much
        return inner(hidden_states, *args, **kwargs)

    def _generate(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if any(name in kwargs for name in NAMES):
            return inner(*args, **kwargs)
        if self._fits(args, kwargs):
            with self._turn:  # to its end: another thread's generation would take the memory
                return inner(*args, **kwargs, **{CACHE: self.new_cache()})
        if self._store.kind is not KvType.F32:
            raise OffloadError(
                f"keys and values are kept in {self._store.kind.value} for one sequence of up "
                f"to {self._store.capacity} tokens, without padding or beams, and this is "
                f"something else; load the model with attention='offload' for it, or with a "
                f"longer context"
            )
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
        pad = setting("pad_token_id")
        if mask is None and pad is not None and bool((ids == pad).any()):
            return False  # generate would take them for padding
        single = (setting("num_beams") or 1) == 1 and (setting("num_return_sequences") or 1) == 1
        plain = setting("use_cache") is not False and setting("cache_implementation") is None
        new = setting("max_new_tokens")
        total = ids.shape[1] + new if new is not None else setting("max_length") or 20
        return single and plain and total <= self._store.capacity


def _restore(module: Any, name: str, before: Any) -> None:
    module.__dict__.pop(name, None)
    if before is not None:
        module.__dict__[name] = before
