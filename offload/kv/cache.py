"""transformers' cache over blocks: the same tokens and logits as its ``DynamicCache``.

    B sequences, H heads, T tokens, D head size

A model's own attention wants a layer's keys and values in one piece. They are gathered into one
buffer that all layers share, one after the other: bit for bit what ``DynamicCache`` concatenates,
with the same strides. Attention "offload" reads blocks where they are (``in_place``): it gets the
step's own keys and values, with a handle to all of them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol, SupportsIndex

import torch
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    get_layer_types_and_kwargs,
)

from offload.cpu_ops.kv_cache import refuse_copy, refuse_stale
from offload.errors import OffloadError, UnsupportedModelError
from offload.kv.homes import upcoming
from offload.kv.in_place import TierHandle, tag
from offload.kv.keep import WATCH_EVERY, Keep
from offload.kv.kernel_layout import is_latent, kernel_layout
from offload.kv.shape import KvShape
from offload.kv.store import Block
from offload.kv.table import LayerTable

logger = logging.getLogger(__name__)


class Backing(Protocol):
    """What a cache stands on; ``offload.kv.tiers.KvTiers``."""

    @property
    def in_place(self) -> bool:
        """Whether attention reads blocks where they are."""
        ...

    @property
    def keep(self) -> Keep | None:
        """How many tokens stay; None: all."""
        ...

    def note_error(self, error: float) -> None:
        """A layer's attention is off by that part of its largest number, from quantising."""
        ...

    def note_evicted(self, tokens: int) -> None:
        """So many tokens of a layer have gone."""
        ...

    def table(self, layer: int, shape: KvShape, sequences: int) -> LayerTable: ...

    def lives(self) -> list[Life]:
        """Of all caches, in the order in which they take turns at every layer."""
        ...

    def gather_buffers(
        self, shape: KvShape, sequences: int, tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class Life:
    """What the layers of one cache share, whoever holds the cache itself."""

    def __init__(self, backing: Backing) -> None:
        self.backing = backing
        self.layers: list[TieredLayer] = []
        self.live = True
        self.handed: TierHandle | None = None
        """What attention was given last."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """See ``refuse_copy``."""
        refuse_copy()

    def check_live(self) -> None:
        """Raises OffloadError: another generation has taken the memory."""
        if not self.live:
            refuse_stale()

    def check_attended(self) -> None:
        """Raises UnsupportedModelError: the model did something else with the last handle's keys
        than to hand them to attention, and went on without those that are in blocks."""
        if self.handed is not None and not self.handed.used:
            raise UnsupportedModelError(
                "this model does not pass its keys to attention as the KV cache returned them, and "
                "attention 'offload' did not find their blocks; drop that (--attention offload)"
            )
        self.handed = None

    def behind(self, index: int) -> Iterator[Block]:
        """The blocks that are read after those of a layer: of the caches behind this one, then of
        all at the layers behind it."""
        turns = self.backing.lives()
        layers = [life.layers[i] for i in range(len(self.layers)) for life in turns]
        return upcoming(
            lambda at: layers[at].blocks(), len(layers), index * len(turns) + turns.index(self)
        )

    def release(self) -> None:
        """Give all blocks back; the cache cannot be used any more."""
        if self.live:
            self.live = False
            for layer in self.layers:
                layer.reset()


class TieredLayer(CacheLayerMixin):  # type: ignore[misc,no-untyped-call,unused-ignore]
    """One layer's keys and values in blocks."""

    is_sliding = False
    is_croppable = True
    """Whether what ``crop`` leaves is as it was before the tokens that go: not once some have been
    evicted since."""
    is_compileable = False
    supports_early_init = False
    appends_exactly = True
    """Whatever pieces tokens come in; see ``offload.kv.prefix_layers``."""

    def __init__(self, life: Life, index: int) -> None:
        """``index``: among the layers that are kept in blocks."""
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._life = life
        self._index = index
        self.table: LayerTable | None = None
        """Its blocks; None before the first token."""
        self._first = 0
        """No token before it was attended to by the last step: a window that slides."""
        self._keep = life.backing.keep
        self._importance = None if self._keep is None else self._keep.importance()
        self._heard: Callable[[torch.Tensor, torch.Tensor, int], None] | None = None
        self.error: float | None = None
        """By what part of its largest number attention to these tokens is off, from quantising, as
        it was measured when they were read; None: it was not."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if key_states.dim() != 4 or value_states.dim() != 4:
            raise UnsupportedModelError(
                f"the KV cache takes [batch, heads, tokens, size], and a layer of this model "
                f"caches {list(key_states.shape)} and {list(value_states.shape)}; drop kv_ram "
                f"(--kv-ram)"
            )
        self.dtype, self.device = key_states.dtype, key_states.device
        self._shape = shape_of(key_states, value_states)
        self.table = self._life.backing.table(self._index, self._shape, key_states.shape[0])
        self.table.heard = self._heard
        self._attended = self._life.backing.in_place and not is_latent(self._shape)
        if self._attended:
            kernel_layout(self.table.layout)
        self.is_initialized = True

    def blocks(self) -> Iterator[Block]:
        """Those that a step reads, in its order."""
        if self.table is not None:
            for use in self.table.uses():
                if use.first + use.filled > self._first:
                    yield use.block

    def _behind(self, first: int) -> Iterator[Block]:
        self._first = first
        return self._life.behind(self._index)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store what is new; returns all there is, ``[B, H, T, D]``, in a buffer that the next
        layer's call overwrites; or, for attention that reads blocks, what is new, with a handle to
        all there is on the keys.

        Raises:
            OffloadError: gradients are wanted, the memory belongs to another cache, no room is
                left, or the disk failed.
        """
        self._life.check_live()
        self._life.check_attended()
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise OffloadError(
                "this KV cache is for inference: its buffer is used again for every layer; run "
                "the model under torch.no_grad(), or with use_cache=False"
            )
        if self.table is None:
            self.lazy_initialization(key_states, value_states)
        table = self.table
        if table is None:
            raise AssertionError("lazy_initialization makes it")
        if self._attended:
            table.append(key_states, value_states)
            handle = TierHandle(table, self._behind, self.note_error)
            first = table.length == key_states.shape[-2]
            if table.coarse is not None and first and table.length >= table.layout.tokens:
                handle.whole = key_states, value_states
            if self._keep is not None:
                handle.watched = key_states.shape[-2] > 1 or not table.seen % WATCH_EVERY
                handle.attended = self._attended_to
            self._life.handed = handle
            return tag(key_states, handle), value_states
        past, new = table.length, key_states.shape[-2]
        keys, values = self._life.backing.gather_buffers(
            self._shape, key_states.shape[0], past + new
        )
        # The new tokens from where they are: a block of them may be on its way to the disk soon.
        keys[:, :, past:].copy_(key_states)
        values[:, :, past:].copy_(value_states)
        if past:
            table.gather(keys, values, self._life.behind(self._index))
        table.append(key_states, value_states)
        return keys, values

    def _attended_to(self, shares: Sequence[float] | None, queries: int) -> None:
        """A step has attended: note to what, and let go of what is too much."""
        table, keep, importance = self.table, self._keep, self._importance
        if table is None or keep is None or importance is None:
            raise AssertionError("is asked for by update")
        if shares is not None:
            importance.observe(shares, queries)
        before = table.evicted
        while columns := keep.candidates(table.length):
            column = min(columns, key=importance.score)
            importance.forget(column)
            table.evict(column)
        self.is_croppable = not table.evicted
        self._life.backing.note_evicted(table.evicted - before)

    def extend(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """``update`` for what nobody attends to yet: nothing is gathered."""
        self._life.check_live()
        if self.table is None:
            self.lazy_initialization(key_states, value_states)
        if self.table is None:
            raise AssertionError("lazy_initialization makes it")
        self.table.append(key_states, value_states)

    @property
    def rounds(self) -> bool:
        """Whether full blocks are kept in 8 or 4 bits; known with the first token. See
        ``offload.kv.prefix_layers``."""
        return self.table is not None and self.table.coarse is not None

    @property
    def stored_dtype(self) -> torch.dtype:
        """What the newest tokens are rounded to, known with the first token."""
        if self.table is None:
            raise OffloadError("no token has come yet")
        found: torch.dtype = getattr(torch, self.table.layout.shape.dtype)
        return found

    def listen(self, heard: Callable[[torch.Tensor, torch.Tensor, int], None] | None) -> None:
        """Tell of every block as it is rounded: bytes of keys and values, and its tokens."""
        self._heard = heard
        if self.table is not None:
            self.table.heard = heard

    def check_rounded(
        self, runs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        like: tuple[torch.Tensor | None, torch.Tensor | None], tokens: int,
    ) -> None:  # fmt: skip
        """``like``: keys and values [1, H, 0, D] as ``update`` takes them.

        Raises:
            OffloadError: those are not ``tokens`` tokens as ``listen`` told of them.
        """
        keys, values = like
        if self.table is None and keys is not None and values is not None:
            self.lazy_initialization(keys, values)
        table = self.table
        if table is None:
            raise OffloadError("what its keys and values are like is not said")
        if table.coarse is None or table.layout.tokens * len(runs) != tokens:
            raise OffloadError(
                f"{len(runs)} blocks of {table.layout.tokens} tokens are not {tokens} tokens"
            )

    def extend_rounded(self, runs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """``extend`` for what is rounded already, after ``check_rounded``."""
        self._life.check_live()
        if self.table is None:
            raise OffloadError("nothing is known of these blocks yet")
        for keys, values in runs:
            self.table.append_rounded(keys, values)

    def note_error(self, error: float) -> None:
        """That is what was measured when those tokens were read."""
        self.error = max(self.error or 0.0, error)
        self._life.backing.note_error(error)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return 0 if self.table is None else self.table.seen

    def get_max_length(self) -> int:
        return -1

    def offload(self) -> None:
        """Blocks have their homes."""

    def prefetch(self) -> None:
        """Blocks are read ahead anyway."""

    def reset(self) -> None:
        self._first = 0
        self.error = None
        self.is_croppable = True
        self._importance = None if self._keep is None else self._keep.importance()
        if self.table is not None:
            self.table.clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget ``-tokens_to_remove`` tokens at the end."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative number of tokens, got {tokens_to_remove}")
        table = self.table
        if not tokens_to_remove or table is None:
            return
        if table.seen + tokens_to_remove <= 0:
            self.reset()
            return
        size, before = table.layout.tokens, table.length
        table.truncate(before + tokens_to_remove)
        if self._importance is not None:  # other tokens come where these were
            for column in reversed(range(-(-table.length // size), -(-before // size))):
                self._importance.forget(column)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.table is not None and self.table.length:
            count = self.table.sequences
            self.table.select([row for row in range(count) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select(indices)

    def _select(self, indices: torch.Tensor) -> None:
        if self.table is None or not self.table.length:
            return
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        count = self.table.sequences
        self.table.select([row % count for row in indices.tolist()])


class TieredCache(Cache):  # type: ignore[misc,no-untyped-call,unused-ignore]
    """The cache of one generation. Its backing serves one at a time: a new one takes the memory.

    Layers that are plain attention over all tokens (a latent cache included) are kept in blocks.
    Windows that forget and recurrent states are small; they keep transformers' own classes.
    """

    def __init__(self, config: Any, backing: Backing) -> None:
        """``config``: of a transformers model."""
        self.life = Life(backing)
        tiered = self.life.layers
        layers: list[Any] = []
        for make, in_blocks in layer_makers(config):
            if in_blocks:
                tiered.append(TieredLayer(self.life, len(tiered)))
                layers.append(tiered[-1])
            else:
                layers.append(make())
        super().__init__(layers=layers)

    def describe(self) -> list[str]:
        """Which layers use what, in words."""
        return describe_layers(type(n).__name__ for n in self.layers)


def layer_makers(config: Any) -> list[tuple[Any, bool]]:
    """For each layer a function that makes transformers' own cache layer, and whether it is kept in
    blocks instead."""
    text = config.get_text_config(decoder=True)
    kinds, arguments = get_layer_types_and_kwargs(text)
    if isinstance(arguments, dict):  # the same of every layer, in transformers 5.17
        arguments = [arguments] * len(kinds)
    shared = getattr(text, "kv_sharing_modes", None) or [None] * len(kinds)
    found = []
    for kind, kwargs, mode in zip(kinds, arguments, shared, strict=True):
        cls = DYNAMIC_LAYER_TYPE_MAPPING[kind]
        # Later layers read what a layer that "stores" got back: not from a buffer used again.
        in_blocks = cls is DynamicLayer and mode is None
        found.append((lambda cls=cls, kwargs=kwargs: cls(**kwargs), in_blocks))
    return found


def describe_layers(names: Any) -> list[str]:
    """``["16 layers: TieredLayer"]``."""
    return [f"{n} layer(s): {name}" for name, n in Counter(names).items()]


def shape_of(keys: torch.Tensor, values: torch.Tensor) -> KvShape:
    """Of keys and values ``[B, H, T, D]``."""
    return KvShape(
        key_heads=keys.shape[1],
        key_dim=keys.shape[3],
        value_heads=values.shape[1],
        value_dim=values.shape[3],
        dtype=str(keys.dtype).removeprefix("torch."),
    )
