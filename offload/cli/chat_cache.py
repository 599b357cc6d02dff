"""The KV cache between turns: which tokens it holds, and how many of them the next turn keeps.

The chat template decides what the model reads; the cache only saves reading it again. What the
template makes of the whole conversation is compared with the tokens that the cache holds, and the
longest common prefix is kept: templates rewrite earlier turns (a thinking block left out, an
answer stripped), and decoded text may be tokenised otherwise than it was generated.

What is guaranteed: the model reads exactly the template's tokens, each at its own position. Keys
and values of an answer were computed one token at a time and not all at once; that is the same
arithmetic with another rounding, as with any split of a prompt. It can tip a choice between tokens
that are equally likely to the last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from offload.models.module_state import why_not_in_a_cache
from offload.models.pieces import why_not_in_pieces

if TYPE_CHECKING:
    from offload.models.prompt_reuse import PromptReuse


class KeptCache:
    """A transformers cache and the ids of the tokens in it, batch 1."""

    def __init__(self, make: Callable[[], Any]) -> None:
        """``make``: gives an empty cache of the model's kind; the one before is not used again."""
        self._make = make
        self._ids: list[int] = []
        self._cache: Any = None

    @property
    def ids(self) -> list[int]:
        """The tokens it holds."""
        return list(self._ids)

    def begin(self, ids: Sequence[int]) -> Any:
        """The cache for a prompt: it holds the first tokens of ``ids``, at least one less than
        all (a model cannot be asked without a token to read)."""
        kept = min(common_prefix(self._ids, ids), len(ids) - 1)
        surplus = len(self._ids) - kept
        if kept == 0 or (surplus and not can_crop(self._cache)):
            self.clear()
        elif surplus:
            self._cache.crop(-surplus)
            del self._ids[kept:]
        if self._cache is None:
            self._cache = self._make()
        return self._cache

    def end(self, fed: Sequence[int]) -> None:
        """Keep what a complete answer left: ``fed`` are all tokens that went through the model.

        A model that went on with a cache of its own leaves another length: nothing is kept then.
        """
        self._ids = list(fed)
        if self._cache.get_seq_length() != len(self._ids):
            self.clear()

    def broken(self, fed: Sequence[int]) -> None:
        """Keep what can be kept after an answer was stopped anywhere, in a pass too.

        Layers that ran have seen more than those that did not: all go back to the least. What a
        window or a recurrent state has dropped cannot come back: then nothing is kept.
        """
        if not can_crop(self._cache):
            self.clear()
            return
        # Layers that share another's keys and values have no length.
        layers = [n for n in self._cache.layers if hasattr(n, "get_seq_length")]
        least = min([len(fed), *(layer.get_seq_length() for layer in layers)])
        if least == 0 or not layers:
            self.clear()
            return
        for layer in layers:
            if (more := layer.get_seq_length() - least) > 0:
                layer.crop(-more)
        self._ids = list(fed[:least])

    def clear(self) -> None:
        """Hold nothing; the memory is free."""
        self._ids, self._cache = [], None


class StoredCache(KeptCache):
    """A cache between turns whose tokens all come from passes on the prompt cache's grid.

    An answer's own keys and values are not kept: they were computed one by one, and the next turn
    reads the answer again on the grid, with the message that follows. So every turn gives the
    tokens that a run gives that begins with the whole conversation, and what this run reads is
    what the next one finds on the disk.
    """

    def __init__(self, prompts: PromptReuse) -> None:
        super().__init__(prompts.new_cache)
        self._prompts = prompts

    def begin(self, ids: Sequence[int]) -> Any:
        if self._cache is not None and not self._prompts.keep(self._cache, ids):
            self.clear()
        if self._cache is None:
            self._cache = self._make()
        return self._cache

    def end(self, fed: Sequence[int]) -> None:
        """The cache itself knows what may stay."""

    broken = end


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first elements are equal."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))


def can_crop(cache: Any) -> bool:
    """Whether tokens can be taken off its end, with what remains as it was before them."""
    if cache is None:
        return False
    for layer in cache.layers:
        if hasattr(layer, "recurrent_states") or hasattr(layer, "conv_states"):
            return False  # a running state: what a token did to it cannot be undone
        if getattr(layer, "is_sliding", False):
            if layer.get_seq_length() >= layer.sliding_window:
                return False  # tokens have left the window, and would have to come back
        elif not getattr(layer, "is_croppable", hasattr(layer, "crop")):
            return False
    return True


def can_reuse(model: Any, context: int) -> str | None:
    """Why nothing can be kept between turns; None if it can.

    Args:
        model: a transformers model.
        context: tokens that a conversation may reach.
    """
    supported = getattr(type(model), "_supports_default_dynamic_cache", lambda: False)
    name = type(model).__name__
    if model.config.is_encoder_decoder or "mamba" in name.lower() or not supported():
        return f"{name} has a cache of its own kind"
    # A turn goes on behind the one before as behind a piece of a prompt.
    if (why := why_not_in_a_cache(model) or why_not_in_pieces(model)) is not None:
        return why
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    for entry in (rope, *(v for v in rope.values() if isinstance(v, dict))):
        kind = entry.get("rope_type")
        if kind not in ("dynamic", "longrope"):
            continue
        # Their rotation depends on how long the text is: keys of a short one are not those that
        # the same tokens have in a long one.
        limit = entry.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", config.max_position_embeddings
        )
        if context > limit:
            return f"its {kind} rotary positions change beyond {limit} tokens"
    return None
