"""One sequence's generation, as it is run alone and beside others: the same call, the same tokens.

Nothing here knows of a conductor. ``generate`` is what a sequence's ``work`` calls.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from offload.generation.tap import TokenTap
from offload.kv.named import CACHE
from offload.models.sampling import (
    LEAST_TEMPERATURE,
    FiniteLogits,
    check_settings,
    choose_alone,
    vocabulary_of,
)

OnToken = Callable[[int], bool]
"""Gets each new token; True ends the generation behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen: greedily at ``temperature`` 0. Above, what is None comes from
    the checkpoint's generation settings, or is off."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def apply(self, settings: Any, vocabulary: int) -> None:
        """Write it into a transformers ``GenerationConfig`` of a model with so many tokens."""
        choose_alone(settings, vocabulary)
        settings.do_sample = self.temperature > 0
        if not settings.do_sample:
            settings.temperature = settings.top_k = settings.top_p = settings.min_p = None
            return
        settings.temperature = max(self.temperature, LEAST_TEMPERATURE)
        # 0 and not None: transformers would fill a top-k of 50 in.
        settings.top_k = self.top_k or settings.top_k or 0
        settings.top_p = self.top_p or settings.top_p or 1.0
        settings.min_p = settings.min_p if self.min_p is None else self.min_p
        check_settings(settings)


@dataclass(slots=True)
class Generation:
    """What came out of one generation.

    Attributes:
        tokens: new ones, with the one that ended it.
        finish_reason: ``"stop"``: ``on_token`` said so; ``"eos"``: the model; ``"length"``.
    """

    tokens: list[int] = field(default_factory=list)
    finish_reason: str = "length"


class _Tap(TokenTap):
    """Not a streamer, which would end a run one token late: transformers asks its criteria before
    it hands a token to a streamer."""

    def __init__(self, out: Generation, on_token: OnToken | None) -> None:
        super().__init__()
        self._out, self._on_token = out, on_token
        self.hit = False
        owner = str(getattr(on_token, "__module__", ""))
        self.is_ours = on_token is None or owner.startswith("offload.")

    def take(self, token: int) -> bool:
        self._out.tokens.append(token)
        if self._on_token is not None and self._on_token(token):
            self.hit = True
        return self.hit


@contextmanager
def settings_apart(model: Any) -> Iterator[Any]:
    """The model's generation settings, and meanwhile the model has none: what a run takes out of
    its own (stop strings, ways to generate that need several sequences), transformers would fill
    in again from the model's."""
    from transformers import GenerationConfig

    before, blank = model.generation_config, GenerationConfig  # untyped
    model.generation_config = blank()
    try:
        yield before
    finally:
        model.generation_config = before


def generate(
    model: Any,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    ignore_eos: bool = False,
    on_token: OnToken | None = None,
    cache: Any = None,
    settings: Any = None,
    **more: Any,
) -> Generation:
    """Generate from one prompt with settings of its own; ``model.generation_config`` stays.

    Random numbers come from torch's default generator: seed it before (``torch.manual_seed``), or
    give ``Conductor.start`` the seed.

    Args:
        model: opened by ``offload``.
        prompt_ids: at least one.
        cache: that holds the first tokens of the prompt already, fewer than all; None: a fresh one,
            whose memory is given back at the end.
        settings: a ``GenerationConfig`` to start from in place of the model's; see
            ``settings_apart``.
        more: for ``model.generate`` (e.g. ``prefill_chunk_size``).

    Raises:
        OffloadError: e.g. a read failed.
    """
    from transformers import LogitsProcessorList, StoppingCriteriaList

    settings = copy.deepcopy(model.generation_config if settings is None else settings)
    (sampling or Sampling()).apply(settings, vocabulary_of(model))
    settings.max_new_tokens, settings.max_length = max_new_tokens, None
    settings.return_dict_in_generate = False
    settings.stop_strings = None  # whoever takes the tokens stops them
    if ignore_eos:
        # Not None, which generate() fills in from the checkpoint again.
        settings.eos_token_id = []
    if settings.pad_token_id is None:
        settings.pad_token_id = 0  # one sequence: nothing is padded, but its absence is warned of
    ends = settings.eos_token_id
    eos = set(ends) if isinstance(ends, list) else {ends}
    ids = torch.tensor([list(prompt_ids)], dtype=torch.int64, device="cpu")
    out = Generation()
    tap = _Tap(out, on_token)
    prompts = model.offload.prompts
    own = cache is None and (model.offload.make_cache is not None or prompts is not None)
    if own:
        cache = (prompts or model.offload).new_cache()
    if cache is not None:
        more[CACHE] = cache
    try:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=settings,
            logits_processor=LogitsProcessorList([FiniteLogits()]),
            stopping_criteria=StoppingCriteriaList([tap]),
            **more,
        )
    finally:
        if own:
            model.offload.release_cache(cache)
    last = out.tokens[-1] if out.tokens else None
    out.finish_reason = "stop" if tap.hit else "eos" if last in eos else "length"
    return out


__all__ = ["Generation", "OnToken", "Sampling", "generate", "settings_apart"]
