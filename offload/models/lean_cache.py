"""transformers' cache over memory that is allocated once, which the decode kernels read directly.

A prompt goes through the model's own attention, which gets views of what is stored; single tokens
are appended by the kernels. Both see the same bytes, so a step may take either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache, CacheLayerMixin

from offload.cpu_ops.block_layout import PART
from offload.cpu_ops.kv_cache import Array, KvCache, refuse_stale
from offload.cpu_ops.kv_quantised import QuantisedKv
from offload.errors import OffloadError


def _copy(to: Array, new: torch.Tensor) -> None:
    _tensor(to).copy_(new)


def _tensor(rows: Array) -> torch.Tensor:
    """The same memory; numpy has no bfloat16."""
    tensor = torch.from_numpy(rows)
    return tensor.view(torch.bfloat16) if rows.dtype == np.uint16 else tensor


class LeanCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values ``[1, heads, tokens, dim]``, float32 or bfloat16."""

    is_sliding = False
    is_croppable = True
    is_compileable = False
    supports_early_init = False
    appends_exactly = True
    """Whatever pieces tokens come in; see ``offload.kv.prefix_layers``."""

    def __init__(self, store: KvCache, index: int) -> None:
        super().__init__()
        self._store = store
        self._index = index

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store what is new; returns all there is, as views, or as copies of what is rounded."""
        if key_states.shape[0] != 1:
            raise OffloadError(
                f"this cache is for one sequence, and got {key_states.shape[0]}; leave "
                f"past_key_values to generate"
            )
        self.extend(key_states, value_states)
        store, index = self._store, self._index
        self.keys, self.values = (_tensor(n(index))[None] for n in (store.keys, store.values))
        return self.keys.to(key_states.dtype), self.values.to(value_states.dtype)

    def extend(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Store what is new, by all of torch's threads: most of the time a long prompt that is
        brought back takes is the first touch of its memory.

        Raises:
            OffloadError: they are of another shape than the cache, and nothing is stored; or there
                is no room.
        """
        want = (1, self._store.heads, key_states.shape[-2], self._store.dim)
        for name, states in (("keys", key_states), ("values", value_states)):
            if tuple(states.shape) != want:  # a copy would spread one head over all
                raise OffloadError(f"{name} must be {list(want)}, got {list(states.shape)}")
        self.lazy_initialization(key_states, value_states)
        self._store.make_room(self._index, key_states.shape[-2])
        keys, values = key_states[0].detach(), value_states[0].detach()
        self._store.append_by(self._index, keys, values, _copy)

    def stored(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of tokens ``start`` to ``stop``, views; prompts' kernels append them
        without ``update``. See ``offload.kv.prefix_layers``."""
        store, index = self._store, self._index
        keys, values = (_tensor(n(index)) for n in (store.keys, store.values))
        return keys[None, :, start:stop], values[None, :, start:stop]

    @property
    def rounds(self) -> bool:
        """Whether full parts are kept in 8 or 4 bits; see ``offload.kv.prefix_layers``."""
        return self._store.kind.quantised

    def listen(self, heard: Callable[[torch.Tensor, torch.Tensor, int], None] | None) -> None:
        """Tell of every part as it is rounded: bytes of keys and values, and its tokens."""
        if not isinstance(self._store, QuantisedKv):
            return

        def told(keys: npt.NDArray[np.uint8], values: npt.NDArray[np.uint8]) -> None:
            assert heard is not None
            heard(torch.from_numpy(keys), torch.from_numpy(values), PART)

        self._store.listen(self._index, None if heard is None else told)

    def check_rounded(
        self, runs: Sequence[tuple[torch.Tensor, torch.Tensor]], _: Any, tokens: int
    ) -> None:
        """Raises OffloadError: they are not ``tokens`` tokens as ``listen`` told of them."""
        parts = sum(keys.shape[1] for keys, _ in runs)
        if not isinstance(self._store, QuantisedKv) or PART * parts != tokens:
            raise OffloadError(f"{parts} parts are not {tokens} tokens")
        for keys, values in runs:
            self._store.check_parts(self._index, keys.numpy(), values.numpy())

    def extend_rounded(self, runs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """``extend`` for what is rounded already.

        Raises:
            OffloadError: there is no room.
        """
        store = self._store
        if not isinstance(store, QuantisedKv):
            raise OffloadError(f"keys and values in {store.kind.value} are not kept rounded")
        for keys, values in runs:
            store.append_parts(self._index, keys.numpy(), values.numpy())
        # What the first tokens would set, had they come by ``update``.
        self.dtype, self.device, self.is_initialized = torch.float32, torch.device("cpu"), True

    @property
    def error(self) -> float | None:
        """By what part of its largest number attention is off; None: that is not known."""
        return self._store.error_of(self._index) if isinstance(self._store, QuantisedKv) else None

    def note_error(self, error: float) -> None:
        """That is what was measured when those tokens were read."""
        if isinstance(self._store, QuantisedKv):
            self._store.note_error(self._index, error)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self._store.length(self._index)

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self._store.truncate(self._index, 0)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget ``-tokens_to_remove`` tokens at the end."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative number of tokens, got {tokens_to_remove}")
        keep = max(0, self.get_seq_length() + tokens_to_remove)
        self._store.truncate(self._index, keep)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if repeats != 1:
            raise OffloadError("this cache is for one sequence; leave past_key_values to generate")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if indices.tolist() != [0]:
            raise OffloadError("this cache is for one sequence; leave past_key_values to generate")


class LeanCache(Cache):  # type: ignore[misc]
    """The cache of one sequence. A model has one at a time, unless it was opened for several: a new
    one takes the oldest one's memory."""

    def __init__(self, store: KvCache) -> None:
        super().__init__(layers=[LeanCacheLayer(store, i) for i in range(store.layers)])
        self.store, self.live = store, True
        self._vouched = False
        self._seen: int | None = None

    def update(self, *args: Any, **kwargs: Any) -> Any:
        self.check_live()
        return super().update(*args, **kwargs)

    def vouch(self, vouched: bool) -> None:
        """Whether from now on nobody but transformers and this package runs between tokens."""
        self._vouched, self._seen = vouched, None

    def saw(self) -> None:
        """The layers have been looked at, and are as they were."""
        self._seen = RemovableHandle.next_id

    def is_as_seen(self) -> bool:
        """Whether they are so still: a loop vouches that nobody runs who would replace a module,
        and every hook of any module has a number of its own."""
        return self._vouched and self._seen == RemovableHandle.next_id

    def check_live(self) -> None:
        """Raises OffloadError: another generation has taken the memory."""
        if not self.live:
            refuse_stale()
