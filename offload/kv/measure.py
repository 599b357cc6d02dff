"""A cache without data, to find out what a token at the end of a long context needs."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from offload.kv.cache import layer_makers


class _Full(DynamicLayer):  # type: ignore[misc,no-untyped-call,unused-ignore]
    """Holds ``tokens`` tokens, all of them views of the newest: they take nothing, so that what
    attention makes of them is what a measurement sees."""

    def __init__(self, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._tokens = tokens

    def get_seq_length(self) -> int:
        return self._tokens - 1

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def whole(new: torch.Tensor) -> torch.Tensor:
            return new[:, :, :1].expand(-1, -1, self._tokens, -1)

        return whole(key_states), whole(value_states)


def whole_cache(model: Any, tokens: int, sequences: int) -> Any:
    """All but the last of ``tokens`` tokens, on meta: layers that attend to all of them are full,
    the others empty."""
    cache = DynamicCache(config=model.config)
    for i, (_, in_blocks) in enumerate(layer_makers(model.config)):
        if in_blocks:
            cache.layers[i] = _Full(tokens)
    return cache
