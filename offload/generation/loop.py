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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from transformers import GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria, streamers

from offload.generation.draw import draw
from offload.generation.scores import Scores, faster
from offload.generation.tap import TokenTap
from offload.kv.generation import by_name
from offload.kv.named import CACHE, NAMES, given_cache

_OTHER_WAYS = (
    "assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens", "tokenizer",
    "assistant_tokenizer", "penalty_alpha", "dola_layers", "constraints", "force_words_ids",
    "compile_config", "custom_generate",
)  # fmt: skip
"""Settings of ``generate`` that want another loop if they are there at all. With a loop of the
caller's transformers passes no tokenizer on."""
_IF_TRUE = ("use_mtp", "return_dict_in_generate", "synced_gpus", "is_assistant")
_ONE = ("num_beams", "num_return_sequences")

_REPLACED = (
    "_sample", "_has_unfinished_sequences", "get_compiled_call", "_valid_auto_compile_criteria",
)  # fmt: skip
"""What ``decode`` stands for or leaves out."""
_FOLLOWS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
"""What makes the arguments of a next token's pass."""
_NEEDED = ("_prefill", "_optimize_model_for_decode", *_REPLACED, *_FOLLOWS)
_PLAIN = {*NAMES, "use_cache", "position_ids", "logits_to_keep"}
"""Of those arguments, what follows from the cache."""
_MODES = ("greedy_search", "sample")


def looped(model: Any) -> Callable[..., Any] | None:
    """``model.generate``, decoding in ``decode`` where that is the same; None: the model does not
    generate, or as nothing that is known here does."""
    kind: Any = type(model)
    inner = getattr(model, "generate", None)
    if inner is None or not isinstance(model, GenerationMixin):
        return None
    if not all(hasattr(kind, name) for name in _NEEDED):
        return None
    if "custom_generate" not in inspect.signature(kind.generate).parameters:
        return None

    @wraps(inner)
    def generate(*args: Any, **kwargs: Any) -> Any:
        if not _is_plain(model, kwargs):
            return inner(*args, **kwargs)
        # Transformers keeps the streamer from a loop that it is given, and takes arguments that
        # its own does not have for the caller's.
        given = kwargs.get("streamer")

        def loop(
            self: Any,
            input_ids: Any,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            synced_gpus: bool = False,
            streamer: Any = None,
            **model_kwargs: Any,
        ) -> Any:
            return decode(
                self, input_ids, logits_processor, stopping_criteria, generation_config,
                given, model_kwargs,
            )  # fmt: skip

        return inner(*args, custom_generate=loop, **kwargs)

    return by_name(model, generate)


def _is_transformers(kind: Any, name: str) -> bool:
    """Whether a method is the one that transformers gives all models: not a class's own, and not
    put there by somebody."""
    method: Any = getattr(kind, name)
    owner, _, last = getattr(method, "__qualname__", "").partition(".")
    theirs = str(method.__module__).partition(".")[0] == "transformers"
    return theirs and owner in ("GenerationMixin", "PreTrainedModel") and last == name


def _is_plain(model: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of ``generate`` may be for ``decode``, which looks closer."""

    def setting(name: str) -> Any:
        for where in (kwargs, kwargs.get("generation_config"), model.generation_config):
            value = where.get(name) if where is kwargs else getattr(where, name, None)
            if value is not None:
                return value
        return None

    if any(setting(name) is not None for name in _OTHER_WAYS) or any(map(setting, _IF_TRUE)):
        return False
    if any(setting(name) not in (None, 1) for name in _ONE):
        return False
    # Of several processes transformers tells its own loop alone.
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not several and all(_is_transformers(type(model), name) for name in _REPLACED)


def decode(
    model: Any,
    input_ids: torch.Tensor,
    processors: Any,
    criteria: Any,
    settings: Any,
    streamer: Any,
    kwargs: dict[str, Any],
) -> Any:
    """As ``GenerationMixin._sample``: ``input_ids`` int64 [1, S] with the new tokens behind."""
    mode = settings.get_generation_mode()
    ends = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    plain = (
        getattr(mode, "value", mode) in _MODES
        and (input_ids.dim(), len(input_ids)) == (2, 1)
        and input_ids.device.type == "cpu"
        and type(processors) is LogitsProcessorList
        and type(criteria) is StoppingCriteriaList
        # Finished sequences go on with padding, whether there is a second one or not.
        and not (ends and settings._pad_token_tensor is None)
    )
    if not plain:
        return type(model)._sample(
            model,
            input_ids,
            logits_processor=processors,
            stopping_criteria=criteria,
            generation_config=settings,
            streamer=streamer,
            **kwargs,
        )
    ours = all(map(_is_ours, [*processors, *criteria, *_listeners(model, streamer)]))
    passes = _Passes(model, kwargs, ours)
    ids, steps = input_ids, _Steps(processors)
    outputs = model._prefill(ids, settings, kwargs, is_first_iteration=True)
    with model._optimize_model_for_decode(), passes.vouched():
        while True:
            scores = passes.follow(outputs)
            del outputs  # a prompt's can be large
            for step in steps.now():
                scores = step(ids, scores)
            if len(scores) != 1:
                raise RuntimeError(f"1 sequence, and logits processors gave {len(scores)}")
            if settings.do_sample:
                token = draw(torch.softmax(scores, dim=-1)[0])
            else:
                token = _largest(scores[0])
            new = torch.tensor([token], device="cpu")  # whatever a program's default
            ids = torch.cat([ids, new[:, None]], dim=-1)
            # All are asked, also behind the first that ends it.
            stops = [_stops(criterion, ids, token) for criterion in criteria]
            if streamer is not None:
                streamer.put(new)
            if any(stops):
                break
            outputs = passes.next(ids)
    if streamer is not None:
        streamer.end()
    return ids


def _largest(row: torch.Tensor) -> int:
    """As torch's argmax: of several the first one, and a NaN before all."""
    return int(row.numpy().argmax() if row.dtype == torch.float32 else row.argmax())


class _Steps:
    """The twins of a list of logits processors, which a program may change meanwhile."""

    def __init__(self, processors: Any) -> None:
        self._processors = processors
        self._known: list[Any] | None = None
        self._twins: list[Scores] = []

    def now(self) -> list[Scores]:
        """Raises ValueError of transformers: one of them needs more arguments than it gets."""
        known, now = self._known, list(self._processors)
        if known is None or list(map(id, known)) != list(map(id, now)):
            self._known, self._twins = now, faster(now)
        return self._twins


def _stops(criterion: Any, ids: torch.Tensor, token: int) -> bool:
    """Whether ``criterion`` ends a text [1, S] behind ``token``, its last one."""
    kind = type(criterion)
    if isinstance(criterion, TokenTap):
        return criterion.take(token)
    if kind is stopping_criteria.EosTokenCriteria:
        return token in criterion.eos_token_id.reshape(-1).tolist()
    if kind is stopping_criteria.MaxLengthCriteria:
        most, positions = criterion.max_length, criterion.max_position_embeddings
        if positions is None or ids.shape[1] <= positions:  # beyond, it says something
            return bool(ids.shape[1] >= most)
    done = criterion(ids, None)
    if isinstance(done, torch.Tensor) and (done.shape, done.dtype) == ((1,), torch.bool):
        return bool(done)
    # In transformers' arithmetic, whatever it is.
    going = torch.ones(1, dtype=torch.int64, device="cpu")
    going = going & ~(torch.full((1,), False, device="cpu") | done)
    return bool(going.max() == 0)


class _Passes:
    """A model's passes for one new token after the other."""

    def __init__(self, model: Any, kwargs: dict[str, Any], ours: bool) -> None:
        """``kwargs``: of the prompt's pass; ``ours``: nobody else's code runs between tokens."""
        self._model, self._kwargs, self._ours = model, kwargs, ours
        self._both = bool(model.config.is_encoder_decoder)
        self._short: dict[str, Any] | None = None
        self._cache: Any = None
        self._began = False

    def follow(self, outputs: Any) -> torch.Tensor:
        """Go on behind a pass; returns the last token's logits, float32 [1, V], on the CPU, the
        caller's to write to."""
        if self._short is None:
            self._kwargs = self._model._update_model_kwargs_for_generation(
                outputs, self._kwargs, is_encoder_decoder=self._both
            )
        if not self._began:
            self._began = True
            self._short = self._all_in_cache()
        last: torch.Tensor = outputs.logits[:, -1]
        return last.to(copy=True, dtype=torch.float32, device="cpu")

    def next(self, ids: torch.Tensor) -> Any:
        """The pass for the last token of ``ids``."""
        if self._short is not None:
            return self._model(input_ids=ids[:, -1:].clone(), **self._short)
        inputs = self._model.prepare_inputs_for_generation(
            ids, next_sequence_length=1 if self._kwargs["use_cache"] else None, **self._kwargs
        )
        return self._model(**inputs, return_dict=True)

    @contextmanager
    def vouched(self) -> Iterator[None]:
        """Whoever looks before each token whether the layers are as they were need not
        meanwhile."""
        try:
            yield
        finally:
            if self._cache is not None:
                self._cache.vouch(False)

    def _all_in_cache(self) -> dict[str, Any] | None:
        """What a pass gets beside its token if all else follows from the cache; None: it does
        not, or somebody might look at what passes get."""
        cache, model = given_cache(self._kwargs), self._model
        given = {k: v for k, v in self._kwargs.items() if v is not None}
        if not hasattr(cache, "vouch") or not self._ours or not given.keys() <= _PLAIN:
            return None
        for name in _FOLLOWS:
            if name in model.__dict__ or not _is_transformers(type(model), name):
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
        short: dict[str, Any] = {CACHE: cache, "use_cache": True, "return_dict": True}
        if "logits_to_keep" in given:
            short["logits_to_keep"] = given["logits_to_keep"]
        return short


def _listeners(model: Any, streamer: Any) -> list[Any]:
    """Who runs between tokens, or in a pass, beside processors and criteria."""
    hooks = [
        hook
        for module in model.modules()
        for table in (module._forward_hooks, module._forward_pre_hooks)
        for hook in table.values()
    ]
    return hooks if streamer is None else [*hooks, streamer]


_OTHERS_CODE = (
    logits_process.PrefixConstrainedLogitsProcessor,
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    streamers.TextIteratorStreamer,  # another thread has the text, and does what it likes
)


def _is_ours(thing: Any) -> bool:
    """Whether it is transformers' or this package's, and does not run a program's code."""
    if isinstance(thing, TokenTap):
        return thing.is_ours
    if isinstance(thing, _OTHERS_CODE):
        return False
    owner = thing if inspect.isroutine(thing) else type(thing)
    known = str(getattr(owner, "__module__", "")).partition(".")[0] in ("transformers", "offload")
    # A function of somebody else that says it is another one.
    return known and not hasattr(thing, "__wrapped__")


__all__ = ["decode", "looped"]
