"""``model.generate`` with prefixes from the disk.

A prompt of one sequence is brought into the cache on the grid of ``PrefixCache``: groups that are
stored are read, the others are passes of ``chunk`` tokens that are stored on the way; ``generate``
gets the cache with what is left of the prompt, of which the same holds (``prompt_end``). The passes
are those of transformers' own ``prefill_chunk_size``: the same logits to the bit, with any number
of groups from the disk.

What is not one plain sequence (batches, padding, beams, drafts, embeddings as input) runs as if
there were no prompt cache.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers.cache_utils import Cache

from offload.errors import UnsupportedModelError
from offload.kv.generation import take_place
from offload.kv.named import CACHE, NAMES, given_cache
from offload.kv.prefix_cache import PrefixCache, Reuse
from offload.kv.prefix_layers import cached_tokens, crop_to
from offload.models.prompt_end import PromptEnds
from offload.models.prompt_marks import live_facts, marks
from offload.models.prompt_plan import PromptPlan

logger = logging.getLogger(__name__)

_OTHERS = (
    "assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens", "prefill_chunk_size",
    "cache_implementation", "use_mtp", "custom_generate",
)  # fmt: skip
"""Settings of ``generate`` that bring a prompt in by another way."""


class PromptReuse:
    """The prompt cache of an open model."""

    def __init__(
        self,
        model: Any,
        plan: PromptPlan,
        new_cache: Callable[[], Any],
        capacity: int | None,
        *,
        lean: bool = False,
    ) -> None:
        """
        Args:
            capacity: tokens that a cache of ``new_cache`` takes at most; None: any number.
            lean: kernels compute whole layers (``LeanRun``), and round otherwise than the model's
                own code, which a smaller budget may leave them to.
        """
        self._model = model
        self._new_cache = new_cache
        self._capacity = capacity
        self._live = live_facts(model)
        self._marks = marks(model)
        self._exact: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
        accepted = inspect.signature(type(model).forward).parameters
        self._more = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._positions = "position_ids" in accepted
        self.prefixes = PrefixCache(
            plan.directory,
            {**plan.facts, "live": self._live, "lean": lean},
            chunk=plan.chunk,
            limit=plan.limit,
            group_bytes=plan.group_bytes,
            grain=plan.grain,
        )
        self.ends = PromptEnds(model, self.prefixes)
        self._used = False

    @property
    def last(self) -> Reuse | None:
        """Of the generation that began last, complete when its first token is there; None: it runs
        as without a prompt cache."""
        return self.prefixes.last if self._used else None

    def serve(self, on_detach: Callable[[Callable[[], None]], None]) -> None:
        """Have ``model.generate`` look here first; ``on_detach`` is called with what undoes it."""
        model, inner = self._model, self._model.generate
        self._marks = marks(model)

        def generate(*args: Any, **kwargs: Any) -> Any:
            self._used = False
            cache = self._cache_for(args, kwargs)
            if cache is not None:
                ids: Any = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
                tokens = ids[0].tolist()
                # A conversation that goes on in its cache is another prompt at each turn; and of
                # one that fits one pass nothing is stored, by whichever road it comes.
                whole = not self._exact.get(cache) and len(tokens) > self.prefixes.chunk
                self.fill(ids, cache)
                self._used = True
                for name in NAMES:
                    kwargs.pop(name, None)
                kwargs[CACHE] = cache
                if whole:
                    self.ends.expect(cache, tokens, partial(self._setting, kwargs))
            return inner(*args, **kwargs)

        self.ends.serve(on_detach)
        on_detach(take_place(model, generate))

    def new_cache(self) -> Any:
        """An empty cache that ``generate`` may be given again and again: it knows which of its
        tokens were read on the grid."""
        cache = self._new_cache()
        self._exact[cache] = []
        return cache

    def keep(self, cache: Any, ids: Sequence[int]) -> bool:
        """Take everything off a cache of ``new_cache`` that is not the beginning of ``ids`` as
        passes on the grid leave it, so that ``generate`` can go on with it. False: it has something
        that cannot be taken off, and must not be used."""
        exact = self._exact.get(cache)
        if exact is None:
            return False
        same = next((i for i, (a, b) in enumerate(zip(exact, ids, strict=False)) if a != b), None)
        shared = min(len(exact), len(ids)) if same is None else same
        group = self.prefixes.group
        kept = min(shared // group * group, self.prefixes.whole(len(ids)))
        if not crop_to(cache, kept):
            return False
        self._exact[cache] = exact[:kept]
        return True

    def fill(self, ids: torch.Tensor, cache: Any) -> Reuse:
        """Bring a prompt into ``cache``, whole groups of it from the disk or by passes, and what
        passes leave of the others; at least one token is left to ``generate``.

        Args:
            ids: ``[1, S]`` int64.
            cache: empty, or of ``new_cache`` after ``keep``.

        Raises: whatever a pass raises.
        """
        tokens = ids[0].tolist()
        prefixes = self.prefixes
        reuse = prefixes.restore(tokens, cache)
        known = self._exact
        if cache in known:
            known[cache] = tokens[: reuse.tokens]
        for at in range(reuse.tokens, prefixes.whole(len(tokens)), prefixes.group):
            end = at + prefixes.group
            with prefixes.recording(tokens, at, cache):
                self._passes(ids, at, end, cache)
            if cache in known:
                known[cache] = tokens[:end]
        # What is no whole group is read again next time, but on the same grid.
        begin = prefixes.whole(len(tokens))
        end = (len(tokens) - 1) // prefixes.chunk * prefixes.chunk
        self._passes(ids, begin, end, cache)
        if cache in known:
            known[cache] = tokens[:end]
        return reuse

    def _passes(self, ids: torch.Tensor, begin: int, end: int, cache: Any) -> None:
        chunk = self.prefixes.chunk
        with torch.no_grad():
            for at in range(begin, end, chunk):
                self._pass(ids[:, at : at + chunk], at, cache)

    def _pass(self, ids: torch.Tensor, at: int, cache: Any) -> None:
        """The pass that ``generate`` makes of a chunk of a prompt without padding."""
        more: dict[str, Any] = dict(self._more)
        if self._positions:
            places = torch.arange(at, at + ids.shape[1], device=ids.device)
            more["position_ids"] = places[None]
        inputs = self._model.prepare_inputs_for_generation(
            ids, use_cache=True, is_first_iteration=True, **{CACHE: cache}, **more
        )
        self._model(**inputs, return_dict=True)

    def _cache_for(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A cache to fill for this call; None if it is not one plain sequence."""
        ids = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape[0] != 1:
            return None
        given = given_cache(kwargs)
        if not self._plain(ids, kwargs):
            return None
        if given is not None:
            return given if self._on_grid(given) else None
        # Before the first pass there is nothing to reuse, and none would be stored.
        return self.new_cache() if ids.shape[1] > self.prefixes.chunk else None

    def _on_grid(self, cache: Any) -> bool:
        """Whether it is one of ours, and holds what it had when the last pass on the grid ended."""
        exact = self._exact.get(cache) if isinstance(cache, Cache) else None
        if exact is None:
            return False
        try:
            return cached_tokens(cache) == len(exact)
        except UnsupportedModelError as error:
            logger.debug("a cache is not gone on with: %s", error)
            return False

    def _plain(self, ids: torch.Tensor, kwargs: Mapping[str, Any]) -> bool:
        setting = partial(self._setting, kwargs)
        if any(setting(name) is not None for name in _OTHERS) or setting("use_cache") is False:
            return False
        if (setting("num_beams") or 1) != 1 or (setting("num_return_sequences") or 1) != 1:
            return False
        mask = kwargs.get("attention_mask")
        pad = setting("pad_token_id")
        if mask is None and pad is not None and bool((ids == pad).any()):
            return False  # generate would take them for padding
        if mask is not None and (mask.shape != ids.shape or not bool(mask.all())):
            return False
        known = ("inputs", "input_ids", "attention_mask", *NAMES)
        if any(isinstance(v, torch.Tensor) for k, v in kwargs.items() if k not in known):
            return False  # images, embeddings
        new = setting("max_new_tokens")
        total = ids.shape[1] + new if new is not None else setting("max_length") or 20
        if self._capacity is not None and total > self._capacity:
            return False
        now, before = live_facts(self._model) | marks(self._model), self._live | self._marks
        if now != before:
            changed = ", ".join(k for k in now if now[k] != before[k])
            logger.warning("prompts are not reused: %s changed since the model was opened", changed)
            return False
        return True

    def _setting(self, kwargs: Mapping[str, Any], name: str) -> Any:
        """Of a call of ``generate``, as it will understand it."""
        for where in (kwargs, kwargs.get("generation_config"), self._model.generation_config):
            value = where.get(name) if where is kwargs else getattr(where, name, None)
            if value is not None:
                return value
        return None

    def close(self) -> None:
        """Finish writing. Idempotent."""
        self.prefixes.close()
