"""One sequence's decoding loop, in the place of transformers' own.

transformers spends 1.4 ms per token beside the model, and what it spends in logits processors and
in torch's draw grows with the vocabulary: 8 to 18 ms for 152,000 tokens, where a small MoE model
takes 10 ms for everything else. For one sequence that is drawn or taken greedily, and of which only
the tokens are wanted, this loop asks the model for the same passes, the same processors and
criteria for the same answers, and draws the same tokens from the same random numbers. All else
goes to transformers' loop (``GenerationMixin._sample``), which ``custom_generate`` is made to
replace.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from transformers import GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process
from transformers.generation import stopping_criteria as theirs

from offload.generation.scores import faster
from offload.generation.tap import TokenTap
from offload.kv.generation import by_name
from offload.kv.named import CACHE, NAMES, given_cache

logger = logging.getLogger(__name__)

_OTHER_WAYS = (
    "assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens", "use_mtp", "tokenizer",
    "penalty_alpha", "dola_layers", "constraints", "force_words_ids", "compile_config",
    "return_dict_in_generate", "synced_gpus",
)  # fmt: skip
"""Settings of ``generate`` that want another loop, or more of this one than tokens. With a loop of
the caller's it passes on neither a tokenizer nor whether to wait for other processes."""

_STOCK: Any = getattr(GenerationMixin, "_sample", None)
_MODES = ("greedy_search", "sample")
_NEEDED = (
    "_sample", "_prefill", "_update_model_kwargs_for_generation", "prepare_inputs_for_generation",
)  # fmt: skip
_PLAIN = {*NAMES, "use_cache", "position_ids", "logits_to_keep"}
"""What a next token's pass is given by transformers, all of which follows from the cache."""


Draw = Callable[[torch.Tensor], int]
"""Probabilities, float32 [V] → a token."""


def torchs_draw(probabilities: torch.Tensor) -> int:
    """A ``Draw`` that needs nothing compiled."""
    return int(torch.multinomial(probabilities, num_samples=1))


def looped(model: Any, draw: Draw | None = None) -> Callable[..., Any] | None:
    """``model.generate``, decoding in ``decode`` where that is the same; None: the model does not
    generate, or as nothing that is known here does. ``draw``: None is ``torchs_draw``."""
    kind: Any = type(model)
    inner = getattr(model, "generate", None)
    if inner is None or not isinstance(model, GenerationMixin):
        return None
    if not all(hasattr(kind, name) for name in _NEEDED) or kind._sample is not _STOCK:
        return None
    if "custom_generate" not in inspect.signature(kind.generate).parameters:
        return None
    draw = draw or torchs_draw

    @wraps(inner)
    def generate(*args: Any, **kwargs: Any) -> Any:
        if _is_plain(model, kwargs):
            kwargs["custom_generate"] = partial(decode, streamer=kwargs.get("streamer"), draw=draw)
        return inner(*args, **kwargs)

    return by_name(model, generate)


def _is_plain(model: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of ``generate`` may be for ``decode``, which looks closer."""

    def setting(name: str) -> Any:
        for where in (kwargs, kwargs.get("generation_config"), model.generation_config):
            value = where.get(name) if where is kwargs else getattr(where, name, None)
            if value is not None:
                return value
        return None

    if kwargs.get("custom_generate") is not None or any(setting(name) for name in _OTHER_WAYS):
        return False
    return all((setting(name) or 1) == 1 for name in ("num_beams", "num_return_sequences"))


def decode(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    draw: Draw = torchs_draw,
    **model_kwargs: Any,
) -> Any:
    """As ``GenerationMixin._sample``: ``input_ids`` int64 [1, S] with the new tokens behind."""
    mode = generation_config.get_generation_mode()
    plain = (
        getattr(mode, "value", mode) in _MODES
        and (input_ids.dim(), len(input_ids)) == (2, 1)
        and input_ids.device.type == "cpu"
        and not (synced_gpus or generation_config.return_dict_in_generate)
        and generation_config.compile_config is None
        and type(logits_processor) is LogitsProcessorList
        and type(stopping_criteria) is StoppingCriteriaList
    )
    if not plain:
        return _STOCK(
            model,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )
    steps, criteria = faster(logits_processor), [_criterion(c) for c in stopping_criteria]
    others = [*logits_processor, *stopping_criteria, *_listeners(model, streamer)]
    ours = all(map(_is_known, others))
    is_assistant = getattr(generation_config, "is_assistant", False)
    passes = _Passes(model, model_kwargs, ours)
    optimised = getattr(model, "_optimize_model_for_decode", nullcontext)
    text, sample = _Text(input_ids), generation_config.do_sample
    outputs = model._prefill(
        input_ids, generation_config, model_kwargs, is_first_iteration=not is_assistant
    )
    with optimised(), passes.vouched():
        while True:
            scores = passes.follow(outputs)
            del outputs  # a prompt's can be large
            for step in steps:
                scores = step(text.ids, scores)
            token = draw(torch.softmax(scores, dim=-1)[0]) if sample else _largest(scores[0])
            text.add(token)
            ends = [criterion(text.ids, token) for criterion in criteria]
            if streamer is not None:
                streamer.put(torch.tensor([token], device="cpu"))
            if any(ends):
                break
            outputs = passes.next(text.ids, token)
    if streamer is not None:
        streamer.end()
    return text.ids.clone()  # a view would keep the room alive, and be saved with it


def _largest(row: torch.Tensor) -> int:
    """As torch's argmax: of several the first one, and a NaN before all."""
    return int(row.numpy().argmax() if row.dtype == torch.float32 else row.argmax())


class _Text:
    """A prompt and what follows, with room for more."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids
        """int [1, S]; the prompt itself is not written to."""
        self._room = ids.new_empty((1, 0), dtype=torch.promote_types(ids.dtype, torch.int64))

    def add(self, token: int) -> None:
        count = self.ids.shape[1]
        if count >= self._room.shape[1]:
            self._room = self._room.new_empty((1, count + count // 2 + 64))
            self._room[:, :count] = self.ids
        self._room[0, count] = token
        self.ids = self._room[:, : count + 1]


class _Passes:
    """A model's passes for one new token after the other."""

    def __init__(self, model: Any, kwargs: dict[str, Any], ours: bool) -> None:
        """``kwargs``: of the prompt's pass; ``ours``: nobody else's code runs between tokens."""
        self._model, self._kwargs, self._ours = model, kwargs, ours
        self._both = bool(model.config.is_encoder_decoder)
        self._short: dict[str, Any] | None = None
        self._cache: Any = None
        self._began = self._unheard = False

    def follow(self, outputs: Any) -> torch.Tensor:
        """Go on behind a pass; returns the last token's logits, float32 [1, V], on the CPU, the
        caller's to write to."""
        if isinstance(outputs, torch.Tensor):
            return outputs[:, -1].float()  # memory of its own already
        if self._short is None:
            self._kwargs = self._model._update_model_kwargs_for_generation(
                outputs, self._kwargs, is_encoder_decoder=self._both
            )
        if not self._began:
            self._began = True
            self._short = self._all_in_cache()
        last: torch.Tensor = outputs.logits[:, -1]
        return last.to(copy=True, dtype=torch.float32, device="cpu")

    def next(self, ids: torch.Tensor, token: int) -> Any:
        """The pass for ``token``, the last of ``ids``: the model's output, or its logits alone."""
        if self._short is not None:
            last = torch.tensor([[token]], device="cpu")  # whatever a program's default
            if self._unheard and (direct := self._cache.direct) is not None:
                return direct(last)
            return self._model(input_ids=last, **self._short)
        inputs = self._model.prepare_inputs_for_generation(
            ids, next_sequence_length=1 if self._kwargs["use_cache"] else None, **self._kwargs
        )
        return self._model(**inputs, return_dict=True)

    @contextmanager
    def vouched(self) -> Iterator[None]:
        """Whoever looks before each token whether the model is as it was need not meanwhile."""
        try:
            yield
        finally:
            if self._cache is not None:
                self._cache.vouch(False)

    def _all_in_cache(self) -> dict[str, Any] | None:
        """What a pass gets beside its token if all else follows from the cache; None: it does
        not, or a program listens to what passes get."""
        cache = given_cache(self._kwargs)
        kinds = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
        model, given = self._model, {k: v for k, v in self._kwargs.items() if v is not None}
        if not hasattr(cache, "vouch") or not self._ours or not given.keys() <= _PLAIN:
            return None
        for name in kinds:
            if getattr(type(model), name) is not getattr(GenerationMixin, name):
                return None
            if name in model.__dict__:
                return None
        positions, seen = given.get("position_ids"), cache.get_seq_length()
        if positions is not None and (
            positions.dim() != 2 or positions.shape[0] != 1 or int(positions[0, -1]) != seen
        ):
            return None
        if given.get("use_cache") is not True:
            return None
        cache.vouch(True)
        self._cache = cache
        self._unheard = not (model._forward_hooks or model._forward_pre_hooks)
        short: dict[str, Any] = {CACHE: cache, "use_cache": True, "return_dict": True}
        if "logits_to_keep" in given:
            short["logits_to_keep"] = given["logits_to_keep"]
        return short


def _criterion(criterion: Any) -> Callable[[torch.Tensor, int], bool]:
    """Whether to stop behind a token, the last of ``ids`` [1, S]."""
    kind = type(criterion)
    if isinstance(criterion, TokenTap):
        return lambda _, token: criterion.take(token)
    if kind is theirs.EosTokenCriteria:
        ends = set(criterion.eos_token_id.reshape(-1).tolist())
        return lambda _, token: token in ends
    if kind is theirs.MaxLengthCriteria:
        most, positions = criterion.max_length, criterion.max_position_embeddings
        if positions is None or most <= positions:
            return lambda ids, _: ids.shape[1] >= most

    def asked(ids: torch.Tensor, _: int) -> bool:
        done = criterion(ids, None)
        if not isinstance(done, torch.Tensor) or (done.shape, done.dtype) != ((1,), torch.bool):
            done = (torch.full((1,), False, device="cpu") | done).all()
        return bool(done)

    return asked


def _listeners(model: Any, streamer: Any) -> list[Any]:
    """Who runs between tokens beside processors and criteria."""
    hooks = [*model._forward_hooks.values(), *model._forward_pre_hooks.values()]
    return hooks if streamer is None else [*hooks, streamer]


_ASK_OTHERS = (
    logits_process.PrefixConstrainedLogitsProcessor,
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor,
)


def _is_known(thing: Any) -> bool:
    """Whether it is transformers' own, or ours, and calls nobody else."""
    if isinstance(thing, _ASK_OTHERS):
        return False
    owner = thing if hasattr(thing, "__qualname__") else type(thing)
    return str(getattr(owner, "__module__", "")).partition(".")[0] in ("transformers", "offload")


__all__ = ["Draw", "decode", "looped", "torchs_draw"]
