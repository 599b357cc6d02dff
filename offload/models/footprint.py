"""How much memory a model needs besides its weights, found without running it.

One forward pass on the meta device, with every tensor it creates watched, gives the peak of live
activations and the exact size of the KV cache for any family, sliding windows and recurrent
states included. What data-dependent code cannot run on meta falls back to a formula.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offload.kv.named import CACHE
from offload.kv.shape import KvShape
from offload.models.expert_groups import expert_groups
from offload.models.meta_attention import CardAttention, CpuAttention
from offload.models.meta_ops import KnownResults, run

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """What a layer of the cache holds after the tokens that were measured.

    Attributes:
        shape: of the keys and values that ``offload.kv`` can keep in blocks; None: others.
        nbytes: of all its tensors.
        window: tokens that a sliding window keeps; 0: a state that does not grow; None: all.
    """

    shape: KvShape | None
    nbytes: int
    window: int | None


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes besides weights, for one batch. ``measured`` is False if a formula had to do."""

    activation_bytes: int
    cache_bytes: int
    measured: bool
    layers: tuple[CachedLayer, ...] = ()
    """Of the cache, if it is transformers' own and could be measured."""
    parked_bytes: int | None = None
    """Alive between two modules, at most: what a sequence keeps while it waits for another. None:
    as much as ``activation_bytes``."""

    def parked(self, rows: int, measured_rows: int) -> int:
        """Bytes of ``rows`` tokens that wait, if this was measured with ``measured_rows``."""
        most = self.activation_bytes if self.parked_bytes is None else self.parked_bytes
        return -(-most * rows // max(1, measured_rows))


class LiveBytes(TorchDispatchMode):
    """Sums the storages that are alive, op by op; those of the weights (whose transposes and
    slices come out of ops too) do not count."""

    def __init__(self, weights: set[int]) -> None:
        super().__init__()
        self._weights = weights
        self._live: dict[int, tuple[int, StorageWeakRef]] = {}
        self._total = 0
        self.peak = 0
        self.parked = 0
        """The most that was alive when a module began."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = run(func, args, kwargs or {})
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                key = storage._cdata
                if key in self._weights:
                    continue
                known = self._live.get(key)
                if known is None or known[1].expired():
                    if known is not None:
                        self._total -= known[0]
                    self._live[key] = (storage.nbytes(), StorageWeakRef(storage))
                    self._total += storage.nbytes()
        if self._total > self.peak:
            self._purge()
            self.peak = max(self.peak, self._total)
        return out

    def live(self) -> int:
        """Bytes that are alive now."""
        self._purge()
        return self._total

    def park(self, *_: Any) -> None:
        """A module begins: another sequence may run meanwhile. Takes any arguments: a hook."""
        if self._total > self.parked:
            self._purge()
            self.parked = max(self.parked, self._total)

    def _purge(self) -> None:
        for key in [k for k, (_, ref) in self._live.items() if ref.expired()]:
            self._total -= self._live.pop(key)[0]


def measure(
    model: Any, tokens: int, batch: int = 1, *, card: bool = False, flash: bool = True
) -> Footprint:
    """The footprint of one forward over ``batch`` × ``tokens`` ids with a KV cache.

    Args:
        model: a transformers model on the meta device (it is not changed).
        card: a card computes; else the CPU, or a simulated device, which has the CPU do it.
        flash: and torch's flash attention runs on it.
    """
    element = next((p.element_size() for p in model.parameters()), 4)
    try:
        held: list[Any] = []
        peak, cache = meta_forward(model, tokens, batch, held=held, card=card, flash=flash)
        parked = max(0, held[1] - cache)
        # Rows of several lengths are padded; the mask that says so is made of values, which meta
        # tensors lack: as bool, with what it is put together from, and in the compute dtype.
        padding = batch * tokens * tokens * (3 + element) if batch > 1 else 0
        activations = int(peak * 1.05) + padding
        return Footprint(activations, cache, True, _layers(model, held[0]), parked)
    except Exception as error:  # noqa: BLE001  any op may refuse meta tensors
        logger.info("activations are estimated by formula: %s", error)
    config = (
        model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    )
    hidden = int(getattr(config, "hidden_size", 1024))
    inner = widest(getattr(config, "intermediate_size", None)) or 4 * hidden
    layers = int(getattr(config, "num_hidden_layers", 24))
    rows = tokens * batch
    vocabulary = int(getattr(config, "vocab_size", 0))
    activations = rows * (12 * hidden + 3 * inner) * max(element, 4) + 12 * batch * vocabulary
    return Footprint(activations, 2 * layers * rows * hidden * element, False)


def widest(size: Any) -> int:
    """A size of a config, of which some families have one for each layer; 0 for none."""
    return max(map(int, size), default=0) if isinstance(size, list | tuple) else int(size or 0)


def meta_forward(
    model: Any,
    tokens: int,
    batch: int = 1,
    *,
    decode: bool = False,
    held: list[Any] | None = None,
    card: bool = False,
    flash: bool = True,
) -> tuple[int, int]:
    """Run one forward on meta; returns (peak bytes of activations, bytes of the cache).

    ``decode``: then run one more token with the cache, whose code may be another than a prompt's.
    ``held`` gets the cache, and what was alive at most when a module began, the cache included.
    Raises whatever an operation raises that cannot work without data.
    """
    with contextlib.ExitStack() as stack:
        for group in expert_groups(model):
            stack.enter_context(stub_experts(group.module, group.n_experts))
        return _run(model, tokens, batch, decode, held, card, flash)


def decode_peak(model: Any, cache: Any, batch: int = 1) -> int:
    """Peak bytes of activations for one more token of each sequence of ``cache``, which is on meta,
    holds what came before and does not grow. Raises as ``meta_forward``."""
    ids = torch.zeros((batch, 1), dtype=torch.int64, device="meta")
    with contextlib.ExitStack() as stack:
        for group in expert_groups(model):
            stack.enter_context(stub_experts(group.module, group.n_experts))
        stack.enter_context(torch.no_grad())
        stack.enter_context(buffers_on_meta(model))
        stack.enter_context(CpuAttention())
        weights = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}
        watch = LiveBytes(weights)
        with watch:
            model(input_ids=ids, use_cache=True, **{CACHE: cache})
    return watch.peak


def _run(
    model: Any, tokens: int, batch: int, decode: bool, held: list[Any] | None = None,
    card: bool = False, flash: bool = True,
) -> tuple[int, int]:  # fmt: skip
    ids = torch.zeros((batch, tokens), dtype=torch.int64, device="meta")
    accepted = inspect.signature(type(model).forward).parameters
    kwargs: dict[str, Any] = {"input_ids": ids}
    if "use_cache" in accepted:
        kwargs["use_cache"] = True
    if "logits_to_keep" in accepted:
        kwargs["logits_to_keep"] = 1
    if getattr(model.config, "is_encoder_decoder", False):
        kwargs["decoder_input_ids"] = ids[:, :1]
    attention = CardAttention(flash) if card else CpuAttention()
    with torch.no_grad(), buffers_on_meta(model), attention:
        weights = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}
        watch = LiveBytes(weights)
        hooks = [m.register_forward_pre_hook(watch.park) for m in _places(model)]
        try:
            with watch:
                out = model(**kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        cache = _cache_bytes(getattr(out, CACHE, None))
        if held is not None:
            held += [getattr(out, CACHE, None), watch.parked]
        if decode and model.can_generate():
            # One after the other: the old name of a new output's is warned of.
            kept = next((n for n in (CACHE, "cache_params") if getattr(out, n, None)), None)
            if kept is None:
                raise NotImplementedError(
                    f"{type(model).__name__} returned no cache to decode with"
                )
            last = "decoder_input_ids" if "decoder_input_ids" in kwargs else "input_ids"
            with KnownResults():
                model(**{**kwargs, last: ids[:, :1], kept: getattr(out, kept)})
    return watch.peak - cache, cache


def _places(model: Any) -> list[Any]:
    """Where a sequence may have to wait for weights: layers, products, experts."""
    groups = {id(g.module) for g in expert_groups(model)}
    return [
        m
        for m in model.modules()
        if isinstance(m, (torch.nn.Linear, torch.nn.ModuleList)) or id(m) in groups
    ]


def _cache_bytes(cache: Any) -> int:
    """Bytes of all tensors a transformers cache holds."""
    return sum(_layer_bytes(layer) for layer in getattr(cache, "layers", None) or ())


def _layer_bytes(layer: Any) -> int:
    total = 0
    for value in vars(layer).values():
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                total += leaf.numel() * leaf.element_size()
    return total


def _layers(model: Any, cache: Any) -> tuple[CachedLayer, ...]:
    """Of a cache of transformers' own kind; empty for any other."""
    from transformers import DynamicCache

    from offload.kv.cache import layer_makers, shape_of

    if type(cache) is not DynamicCache or model.config.is_encoder_decoder:
        return ()
    plans = layer_makers(model.config)
    if len(plans) != len(cache.layers):
        return ()
    found = []
    for layer, (_, in_blocks) in zip(cache.layers, plans, strict=True):
        keys: Any = getattr(layer, "keys", None)
        values: Any = getattr(layer, "values", None)
        grows = isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor)
        whole = in_blocks and grows and keys.dim() == values.dim() == 4
        found.append(
            CachedLayer(
                shape=shape_of(keys, values) if whole else None,
                nbytes=_layer_bytes(layer),
                window=getattr(layer, "sliding_window", None if grows else 0),
            )
        )
    return tuple(found)


@contextlib.contextmanager
def buffers_on_meta(model: Any) -> Iterator[None]:
    """Real buffers (rotary frequencies) move to meta for the pass: devices must not mix.

    What modules note down of themselves meanwhile is forgotten behind it, whatever it is: RWKV that
    it has divided its weights (which were on meta), and would go on as if the real ones were
    divided; LongRoPE the frequencies of long texts (which are on meta), and would use those.
    """
    before = [(m.__dict__, dict(m.__dict__), dict(m._buffers)) for m in model.modules()]
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device="meta")
    try:
        yield
    finally:
        for own, noted, buffers in before:
            for name in own.keys() - noted.keys():
                del own[name]
            own.update(noted)
            own["_buffers"].clear()
            own["_buffers"].update(buffers)


@contextlib.contextmanager
def stub_experts(module: Any, n_experts: int) -> Iterator[None]:
    """Experts choose rows by value, which meta tensors have none of. Allocate what their eager
    loop would in its worst case: every token routed to the same expert."""
    sizes = [
        max(p.shape[1:]) if p.dim() == 3 else p.shape[-1]
        for p in module._parameters.values()
        if p is not None and p.dim() >= 2
    ]
    inner = max(sizes, default=1)

    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        index = next(
            (
                a
                for a in (*args, *kwargs.values())
                if isinstance(a, torch.Tensor) and not a.is_floating_point()
            ),
            None,
        )
        rows = hidden.numel() // hidden.shape[-1]
        mask = hidden.new_empty(
            (index.numel() if index is not None else rows, n_experts + 1), dtype=torch.int64
        )
        joined = hidden.new_empty((rows, inner))
        halves = torch.empty_like(joined), torch.empty_like(joined)
        picked, out = torch.empty_like(hidden), torch.empty_like(hidden)
        del mask, joined, halves, picked
        return out

    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:  # experts with adapters have one of their own
            module.__dict__["forward"] = before
