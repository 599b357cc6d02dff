"""What a pass leaves in a cache, layer by layer, and how another is brought to the same state.

Layers that keep tokens are recorded by what ``update`` is given: the pass's own keys and values,
whatever the layer makes of them. Given the same again, it is in the same state: a full layer, a
window that forgets, blocks on two tiers. Those that kernels write to (``STORED``) tell afterwards
what the pass has left. Those that round full blocks (``LISTEN``) tell of each as it is rounded: its
bytes are recorded, and brought back. Layers with a running state (convolutions, linear attention)
are recorded by that state at the end of the pass. Tokens that came by another road end the
recording: a group without them would bring nothing back.

A kind of layer that is not known here is refused: nothing says that the same calls bring it to the
same state, and a wrong state is worse than none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
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

from offload.errors import OffloadError, UnsupportedModelError
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

STORED_DTYPE = "stored_dtype"
"""An attribute of those of our own layers that round elements as they come: to that dtype."""

LISTEN = "listen"
"""A method of those of our own layers that keep full blocks in fewer bits while they say that they
``rounds``: ``listen(heard)``, and ``heard(keys, values, tokens)`` gets the bytes of every block as
it is rounded, uint8 [H, parts, record]. ``check_rounded(runs, like, tokens)`` and then
``extend_rounded(runs)`` bring them back as they are: what they were rounded from is not stored. So
a group ends where a block does. ``error`` is what rounding was measured to cost, if it was (only
who reads the tokens can), and ``note_error(error)`` says it of tokens from the disk."""


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
def recording(cache: Any, tokens: int, put: Put, chunk: int | None = None) -> Iterator[None]:
    """Record passes over ``tokens`` tokens of one sequence, of ``chunk`` each (None: all at once).

    Raises:
        UnsupportedModelError: at the end: a layer was given something else than these tokens, once
            each; or keeps what is not recorded.
    """
    recorder = _Recorder(cache, tokens, put, chunk or tokens)
    try:
        recorder.begin()
        yield
    finally:
        recorder.end()
    recorder.finish()


class _Recorder:
    """What ``recording`` does around passes."""

    def __init__(self, cache: Any, tokens: int, put: Put, chunk: int) -> None:
        self._layers = list(enumerate(cache.layers))
        self._tokens, self._put, self._chunk = tokens, put, chunk
        self._before = [n.get_seq_length() if _keeps_tokens(n) else 0 for n in cache.layers]
        self._seen: dict[tuple[int, str], int] = {}
        """By layer and part: tokens that were recorded; -1: they were not as they should be."""
        self._rounded: dict[int, tuple[int, int]] = {}
        """By layer: tokens in full blocks, and the number of blocks."""
        self._wrapped: list[tuple[Any, str]] = []

    def begin(self) -> None:
        for index, layer in self._layers:
            if hasattr(layer, LISTEN):
                layer.listen(partial(self._heard, index))
            if _keeps_tokens(layer) and not hasattr(layer, STORED):
                self._wrap(index, layer, "update", "keys", "values")
            if type(layer) is DynamicIndexedLayer:
                self._wrap(index, layer, "update_indexer", "indexer")

    def _wrap(self, index: int, layer: Any, method: str, *parts: str) -> None:
        inner = getattr(layer, method)

        def recorded(*states: Any, **kwargs: Any) -> Any:
            found = inner(*states, **kwargs)
            for part, state in zip(parts, states, strict=False):
                self._given(index, part, state, layer)
            return found

        layer.__dict__[method] = recorded
        self._wrapped.append((layer, method))

    def _given(self, index: int, part: str, state: Any, layer: Any) -> None:
        key, chunk = (index, part), self._chunk
        done = self._seen.get(key, 0)
        # Indexers keep [B, T, D], all others [B, H, T, D].
        if state is None or state.shape[0] != 1 or state.shape[-2] != chunk or done < 0:
            self._seen[key] = -1
            return
        self._seen[key] = done + chunk
        if not getattr(layer, "rounds", False):
            dtype = getattr(layer, STORED_DTYPE, state.dtype)
            self._put(index, _nth(part, done // chunk), state.to(dtype))
        elif not done:  # what they are like: the bytes do not say
            self._put(index, part, state[..., :0, :])

    def _heard(self, index: int, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> None:
        done, count = self._rounded.get(index, (0, 0))
        self._put(index, _nth("rounded keys", count), keys)
        self._put(index, _nth("rounded values", count), values)
        self._rounded[index] = done + tokens, count + 1

    def end(self) -> None:
        """Let the cache be as it was. Idempotent."""
        for layer, method in self._wrapped:
            del layer.__dict__[method]
        self._wrapped = []
        for _, layer in self._layers:
            if hasattr(layer, LISTEN):
                layer.listen(None)

    def finish(self) -> None:
        """Record what is only known now. Raises as ``recording``."""
        for (index, part), tokens in self._seen.items():
            if tokens != self._tokens:
                raise UnsupportedModelError(
                    f"layer {index} does not get {part} of {self._tokens} tokens once"
                )
        for index, layer in self._layers:
            if _keeps_tokens(layer):
                self._check(index, layer)
            if getattr(layer, "indexer_position_ids", None) is not None:
                raise UnsupportedModelError(f"layer {index} keeps positions of its indexer")
            if type(layer) in _STATES:
                _put_states(index, layer, self._put)

    def _check(self, index: int, layer: Any) -> None:
        before, tokens = self._before[index], self._tokens
        more = layer.get_seq_length() - before
        if getattr(layer, "rounds", False):
            whole, _ = self._rounded.get(index, (0, 0))
            if (more, whole) != (tokens, tokens):
                raise UnsupportedModelError(
                    f"layer {index} got {more} of {tokens} tokens, and {whole} in full blocks"
                )
            if layer.error is not None:
                self._put(
                    index, "error", torch.tensor(layer.error, dtype=torch.float32, device="cpu")
                )
        elif (index, "keys") in self._seen:
            return
        elif hasattr(layer, STORED) and more == tokens:
            for part, state in zip(
                ("keys", "values"), layer.stored(before, before + tokens), strict=True
            ):
                self._put(index, part, state)
        elif hasattr(layer, STORED) or more:
            raise UnsupportedModelError(f"layer {index} got {more} of {tokens} tokens unseen")


def _nth(part: str, n: int) -> str:
    """Of a pass's parts by this name, in the order in which they came."""
    return f"{part} {n}" if n else part


def _runs(found: Parts, *parts: str) -> list[tuple[torch.Tensor, ...]]:
    """What was recorded by those names, in that order."""
    runs: list[tuple[torch.Tensor, ...]] = []
    while all(_nth(part, len(runs)) in found for part in parts):
        runs.append(tuple(found[_nth(part, len(runs))] for part in parts))
    return runs


def _put_states(index: int, layer: Any, put: Put) -> None:
    if layer.record_past:
        raise UnsupportedModelError(f"layer {index} keeps its past for going back")
    for i in range(layer.number_of_states):
        if layer.is_conv_states_initialized[i]:
            put(index, f"conv {i}", layer.conv_states[i])
        if layer.is_recurrent_states_initialized[i]:
            put(index, f"recurrent {i}", layer.recurrent_states[i])
        put(
            index,
            f"started {i}",
            torch.tensor(layer.has_previous_state[i], dtype=torch.uint8, device="cpu"),
        )


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
            DamagedGroupError: a layer would stay empty, or its blocks are no such blocks; nothing
                has been added.
        """
        for index, layer in enumerate(self._cache.layers):
            self._check(index, layer, parts.get(index, {}), tokens)
        for index, found in parts.items():
            layer = self._cache.layers[index]
            if rounded := _runs(found, "rounded keys", "rounded values"):
                layer.extend_rounded(rounded)
                if "error" in found:
                    layer.note_error(float(found["error"]))
            elif type(layer) in _WHOLE:
                for part in ("keys", "values"):
                    self._grow(index, part, _runs(found, part))
            elif "keys" in found:
                extend = getattr(layer, "extend", layer.update)
                for keys, values in _runs(found, "keys", "values"):
                    extend(keys, values)
            self._grow(index, "indexer", _runs(found, "indexer"))
            if type(layer) in _STATES:
                _set_states(layer, found)
        self._done += tokens

    @staticmethod
    def _check(index: int, layer: Any, found: Parts, tokens: int) -> None:
        rounded = _runs(found, "rounded keys", "rounded values")
        if not rounded and not getattr(layer, "rounds", False):
            if hasattr(layer, STORED) and "keys" not in found:
                raise DamagedGroupError(f"it has no keys of layer {index}")
            return
        try:
            if not hasattr(layer, LISTEN):
                raise OffloadError("it rounds nothing")
            layer.check_rounded(rounded, (found.get("keys"), found.get("values")), tokens)
        except OffloadError as error:
            raise DamagedGroupError(f"it does not fit layer {index}: {error}") from error

    def _grow(self, index: int, part: str, runs: Sequence[tuple[torch.Tensor, ...]]) -> None:
        key, at = (index, part), self._done
        for (new,) in runs:
            if key not in self._growing:
                shape = (*new.shape[:-2], self._most, new.shape[-1])
                self._growing[key] = torch.empty(shape, dtype=new.dtype, device=new.device)
            self._growing[key][..., at : at + new.shape[-2], :].copy_(new)
            at += new.shape[-2]

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
