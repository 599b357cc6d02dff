"""What a pass leaves in a cache, layer by layer, and how another is brought to the same state.

Layers that keep tokens are recorded by what ``update`` is given: the pass's own keys and values,
whatever the layer makes of them. Given the same again, it is in the same state: a full layer, a
window that forgets, blocks on two tiers. Those that kernels write to (``STORED``) tell afterwards
what the pass has left. Layers with a running state (convolutions, linear attention) are recorded by
that state at the end of the pass. Tokens that came by another road end the recording: a group
without them would bring nothing back.

A kind of layer that is not known here is refused: nothing says that the same calls bring it to the
same state, and a wrong state is worse than none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from offload.errors import UnsupportedModelError
from offload.kv.prefix_format import DamagedGroupError

Put = Callable[[int, str, torch.Tensor], None]
"""``put(layer, part, tensor)``: copy a tensor now."""

Parts = Mapping[str, torch.Tensor]

_WHOLE = (DynamicLayer, DynamicIndexedLayer, LinearAttentionAndFullAttentionLayer)
"""They concatenate: many calls or one with all tokens leave the same."""

_WINDOWS = (DynamicSlidingWindowLayer, LinearAttentionAndSlidingWindowAttentionLayer)

_STATES = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

_DUMMY: Any = getattr(cache_utils, "DummyLayer", None)
"""Of a layer that caches nothing; not every transformers that we run on has one (5.17 has not)."""

APPENDS = "appends_exactly"
"""An attribute of our own layers: whatever pieces tokens come in, the state is the same; and
``extend(keys, values)``, where there is one, is ``update`` without what it returns."""

STORED = "stored"
"""A method of those of our own layers that kernels append to without ``update``: ``stored(start,
stop)`` gives these tokens' keys and values [1, H, T, D], just as ``update`` takes them."""


def check_layers(cache: Any) -> None:
    """Refuse a cache that cannot be stored and brought back exactly.

    Raises:
        UnsupportedModelError: names the kind of layer.
    """
    if not isinstance(cache, Cache) or not hasattr(cache, "layers"):
        raise UnsupportedModelError(f"its cache is a {type(cache).__name__}")
    for layer in cache.layers:
        if type(layer) is _DUMMY or _keeps_tokens(layer) or type(layer) in _STATES:
            continue
        raise UnsupportedModelError(
            f"it caches in a {type(layer).__name__}, whose state is not known to be the same after "
            f"the same calls"
        )
    if not any(_keeps_tokens(layer) for layer in cache.layers):
        raise UnsupportedModelError("no layer of its cache knows how many tokens it holds")


def check_config(config: Any) -> None:
    """``check_layers`` for what transformers would make of a model's config."""
    check_layers(DynamicCache(config=config.get_text_config(decoder=True)))


def _keeps_tokens(layer: Any) -> bool:
    return type(layer) in (*_WHOLE, *_WINDOWS) or bool(getattr(layer, APPENDS, False))


@contextmanager
def recording(cache: Any, tokens: int, put: Put) -> Iterator[None]:
    """Record one pass over ``tokens`` tokens of one sequence.

    Raises:
        UnsupportedModelError: at the end: a layer was given something else than these tokens, once
            each; or keeps what is not recorded.
    """
    seen: dict[tuple[int, str], int] = {}
    wrapped: list[tuple[Any, str]] = []
    before = [n.get_seq_length() if _keeps_tokens(n) else 0 for n in cache.layers]

    def wrap(index: int, layer: Any, method: str, *parts: str) -> None:
        inner = getattr(layer, method)

        def recorded(*states: Any, **kwargs: Any) -> Any:
            for part, state in zip(parts, states, strict=False):
                # Indexers keep [B, T, D], all others [B, H, T, D].
                if state is None or state.shape[0] != 1 or state.shape[-2] != tokens:
                    seen[index, part] = -1
                elif (index, part) in seen:
                    seen[index, part] += 1
                else:
                    seen[index, part] = 1
                    put(index, part, state)
            return inner(*states, **kwargs)

        layer.__dict__[method] = recorded
        wrapped.append((layer, method))

    try:
        for index, layer in enumerate(cache.layers):
            if _keeps_tokens(layer) and not hasattr(layer, STORED):
                wrap(index, layer, "update", "keys", "values")
            if type(layer) is DynamicIndexedLayer:
                wrap(index, layer, "update_indexer", "indexer")
        yield
    finally:
        for layer, method in wrapped:
            del layer.__dict__[method]
    for (index, part), count in seen.items():
        if count != 1:
            raise UnsupportedModelError(
                f"layer {index} does not get {part} of {tokens} tokens once"
            )
    for index, layer in enumerate(cache.layers):
        if _keeps_tokens(layer) and (index, "keys") not in seen:
            more = layer.get_seq_length() - before[index]
            if hasattr(layer, STORED) and more == tokens:
                for part, state in zip(
                    ("keys", "values"), layer.stored(before[index], before[index] + tokens),
                    strict=True,
                ):  # fmt: skip
                    put(index, part, state)
            elif hasattr(layer, STORED) or more:
                raise UnsupportedModelError(f"layer {index} got {more} of {tokens} tokens unseen")
        if getattr(layer, "indexer_position_ids", None) is not None:
            raise UnsupportedModelError(f"layer {index} keeps positions of its indexer")
        if type(layer) in _STATES:
            _put_states(index, layer, put)


def _put_states(index: int, layer: Any, put: Put) -> None:
    if layer.record_past:
        raise UnsupportedModelError(f"layer {index} keeps its past for going back")
    for i in range(layer.number_of_states):
        if layer.is_conv_states_initialized[i]:
            put(index, f"conv {i}", layer.conv_states[i])
        if layer.is_recurrent_states_initialized[i]:
            put(index, f"recurrent {i}", layer.recurrent_states[i])
        put(index, f"started {i}", torch.tensor(layer.has_previous_state[i], dtype=torch.uint8))


class Restorer:
    """Brings a cache, group by group, to where the recorded passes left another one."""

    def __init__(self, cache: Any, most: int) -> None:
        """``most``: tokens that may come; memory for them is taken layer by layer."""
        self._cache = cache
        self._most = most
        self._growing: dict[tuple[int, str], torch.Tensor] = {}
        self._done = 0

    def add(self, parts: Mapping[int, Parts], tokens: int) -> None:
        """The next group; ``parts``: of each layer, in memory that may be used again after.

        Raises:
            DamagedGroupError: a layer would stay empty; nothing has been added.
        """
        for index, layer in enumerate(self._cache.layers):
            if hasattr(layer, STORED) and "keys" not in parts.get(index, {}):
                raise DamagedGroupError(f"it has no keys of layer {index}")
        for index, found in parts.items():
            layer = self._cache.layers[index]
            if "keys" in found and type(layer) in _WHOLE:
                for part in ("keys", "values"):
                    self._grow(index, part, found[part])
            elif "keys" in found:
                extend = getattr(layer, "extend", layer.update)
                extend(found["keys"], found["values"])
            if "indexer" in found:
                self._grow(index, "indexer", found["indexer"])
            if type(layer) in _STATES:
                _set_states(layer, found)
        self._done += tokens

    def _grow(self, index: int, part: str, new: torch.Tensor) -> None:
        key = index, part
        if key not in self._growing:
            shape = (*new.shape[:-2], self._most, new.shape[-1])
            self._growing[key] = torch.empty(shape, dtype=new.dtype)
        self._growing[key][..., self._done : self._done + new.shape[-2], :].copy_(new)

    def finish(self) -> None:
        """Give the layers what was gathered for them: once, since each call of theirs copies all
        that came before."""
        for index in sorted({index for index, _ in self._growing}):
            layer = self._cache.layers[index]
            if (index, "keys") in self._growing:
                keys, values = self._take(index, "keys"), self._take(index, "values")
                if not layer.is_initialized:
                    layer.lazy_initialization(keys, values)
                if layer.keys.numel():
                    layer.update(keys, values)
                else:  # what update would make, without the copy
                    layer.keys, layer.values = keys, values
            if (index, "indexer") in self._growing:
                layer.update_indexer(self._take(index, "indexer"))

    def _take(self, index: int, part: str) -> torch.Tensor:
        whole = self._growing.pop((index, part))
        return whole if self._done == self._most else whole[..., : self._done, :].clone()


def _set_states(layer: Any, found: Parts) -> None:
    for i in range(layer.number_of_states):
        if (conv := found.get(f"conv {i}")) is not None:
            if not layer.is_conv_states_initialized[i]:
                layer.lazy_initialization(conv_states=conv, state_idx=i)
            layer.conv_states[i].copy_(conv)
        if (recurrent := found.get(f"recurrent {i}")) is not None:
            if not layer.is_recurrent_states_initialized[i]:
                layer.lazy_initialization(recurrent_states=recurrent, state_idx=i)
            layer.recurrent_states[i].copy_(recurrent)
        layer.has_previous_state[i] = bool(found[f"started {i}"].item())


def cached_tokens(cache: Any) -> int:
    """Tokens that every layer holds.

    Raises:
        UnsupportedModelError: they do not agree: a pass was broken off.
    """
    lengths = {n.get_seq_length() for n in cache.layers if _keeps_tokens(n)}
    if len(lengths) > 1:
        raise UnsupportedModelError(f"its layers hold {sorted(lengths)} tokens")
    return lengths.pop() if lengths else 0


def crop_to(cache: Any, tokens: int) -> bool:
    """Take all tokens but the first so many off a cache; False, and nothing is done: a window that
    has forgotten or a running state cannot go back (nor can anybody tell where that one is)."""
    if any(type(layer) in _STATES for layer in cache.layers):
        return False
    surplus = []
    for layer in cache.layers:
        if not _keeps_tokens(layer):
            continue
        more = layer.get_seq_length() - tokens
        window = getattr(layer, "sliding_window", None) if layer.is_sliding else None
        if more < 0 or (more and window is not None and layer.get_seq_length() >= window):
            return False
        surplus.append((layer, more))
    for layer, more in surplus:
        if more:
            layer.crop(-more)
    return True
