"""What tokens cannot be chosen by: logits that are no numbers, settings that are nothing."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch

from offload.errors import OffloadError
from offload.units import brief

LEAST_TEMPERATURE = 1e-20
"""What smaller ones become: one token has all the probability by then, and logits that are divided
by much less leave float32."""


class FiniteLogits:
    """A logits processor that changes nothing. Every token after a NaN would be an accident."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``input_ids`` [B, S] int64; ``scores`` [B, V], where -inf means "never".

        Raises:
            OffloadError: a NaN, an infinite logit, or no token that is possible.
        """
        # A NaN wins every comparison of max(), and so does an infinity.
        largest = float(scores.max())
        if largest == -math.inf:
            raise OffloadError(
                f"no token can follow the {input_ids.shape[1]} that are there: the logits of all "
                f"are -inf; allow some in the checkpoint's generation_config.json, if it forbids "
                f"them (suppress_tokens, bad_words_ids, sequence_bias), or check the download"
            )
        if not math.isfinite(largest):
            raise OffloadError(
                f"the logits of the token after {input_ids.shape[1]} are {largest}: weights "
                f"that are damaged, or numbers beyond the compute dtype (float16 ends at 65504); "
                f"try --dtype float32, and check the download"
            )
        return scores


_ALONE: dict[str, Any] = {
    "num_beams": 1, "num_return_sequences": 1, "penalty_alpha": None, "dola_layers": None,
    "constraints": None, "force_words_ids": None, "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None, "is_assistant": False, "token_healing": False,
    "cache_implementation": None, "use_cache": True,
    # Nobody reads them, and no plan has room for what all layers of a prompt give.
    "output_attentions": False, "output_hidden_states": False, "output_scores": False,
    "output_logits": False,
}  # fmt: skip
"""Ways to generate that need several sequences, another model, code from the hub, the tokenizer, or
a cache of another kind than the plan's. None at all is what trainers leave in the files they save:
with a cache that is there all the same, transformers reads the whole text again for each token."""


def vocabulary_of(model: Any) -> int:
    """How many logits a model gives for each token."""
    head = model.get_output_embeddings()
    rows = getattr(head, "out_features", None)
    return int(rows or model.config.get_text_config().vocab_size)


def choose_alone(settings: Any, vocabulary: int | None = None) -> None:
    """Have a ``GenerationConfig`` generate one sequence, each token from its logits, whatever ways
    the checkpoint's file wishes; what it says of logits stays.

    Args:
        vocabulary: logits of a token; None: any id is one.

    Raises:
        OffloadError: what it says of them is nothing.
    """
    for name, value in _ALONE.items():
        if hasattr(settings, name):
            setattr(settings, name, value)
    for name in ("repetition_penalty", "encoder_repetition_penalty", "guidance_scale"):
        value = getattr(settings, name, None)
        if value is not None and not (type(value) in (int, float) and 0 < value < math.inf):
            _refuse(name, value, "not a number above 0")
    for name in (
        "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens",
    ):  # fmt: skip
        value = getattr(settings, name, None)
        if value is not None and type(value) is not int:
            _refuse(name, value, "not a number of tokens")
    piece = getattr(settings, "prefill_chunk_size", None)
    if piece is not None and not (type(piece) is int and piece > 0):
        _refuse("prefill_chunk_size", piece, "not a number of tokens")
    seconds = getattr(settings, "max_time", None)
    if seconds is not None and not _is_number(seconds):
        _refuse("max_time", seconds, "not a number of seconds")
    own_stops(settings)
    vocabulary = 2**63 if vocabulary is None else vocabulary
    words = getattr(settings, "bad_words_ids", None)
    if words is not None and not (
        isinstance(words, list) and words and all(_are_ids(ids, vocabulary) for ids in words)
    ):
        _refuse("bad_words_ids", words, f"not a list of lists of ids below {vocabulary}")
    _check_forced(settings, vocabulary)


def _check_forced(settings: Any, vocabulary: int) -> None:
    """What the file says of single tokens."""
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        one = getattr(settings, name, None)
        many = one if isinstance(one, list) and name == "forced_eos_token_id" else [one]
        if one is not None and not _are_ids(many, vocabulary):
            _refuse(name, one, f"not an id below {vocabulary}")
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        never = getattr(settings, name, None)
        # Beyond the vocabulary they suppress nothing, in transformers as here.
        if never is not None and not (isinstance(never, list) and all(map(_is_id, never))):
            _refuse(name, never, "not a list of ids")
    decay = getattr(settings, "exponential_decay_length_penalty", None)
    if decay is not None and not (
        isinstance(decay, (list, tuple))
        and len(decay) == 2
        and type(decay[0]) is int
        and _is_number(decay[1])
    ):
        why = "not a number of tokens and a factor"
        _refuse("exponential_decay_length_penalty", decay, why)
    if decay is not None and getattr(settings, "eos_token_id", None) is None:
        settings.exponential_decay_length_penalty = None  # transformers fails without an end
    bias = getattr(settings, "sequence_bias", None)
    if bias is not None and not (
        isinstance(bias, list)
        and bias
        and all(
            isinstance(pair, list)
            and len(pair) == 2
            and _are_ids(pair[0], vocabulary)
            and type(pair[1]) is float
            for pair in bias
        )
    ):
        why = f"not a list of pairs [[ids below {vocabulary}], bias]"
        _refuse("sequence_bias", bias, why)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_id(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_ids(values: Any, vocabulary: int) -> bool:
    some = isinstance(values, list) and bool(values)
    return some and all(_is_id(value) and value < vocabulary for value in values)


def own_temperature(settings: Any) -> float:
    """The temperature of a ``GenerationConfig``: the checkpoint's own, 0 if it does not sample.

    Raises:
        OffloadError: what the checkpoint's file says is nothing to sample by.
    """
    if not settings.do_sample:
        return 0.0
    value = settings.temperature
    if value is None:
        return 1.0
    if not (type(value) in (int, float) and 0 <= value <= 100):
        _refuse("temperature", value, "not a number between 0 and 100")
    return float(value)


def own_stops(settings: Any) -> tuple[str, ...]:
    """The stop strings of a ``GenerationConfig``: the checkpoint's own.

    Raises:
        OffloadError: what the checkpoint's file says is no list of texts.
    """
    stops = getattr(settings, "stop_strings", None)
    if stops is None or stops == "":
        return ()
    many = [stops] if isinstance(stops, str) else stops
    if not (isinstance(many, list) and all(isinstance(stop, str) and stop for stop in many)):
        _refuse("stop_strings", stops, "not a list of texts")
    return tuple(many)


def _refuse(name: str, value: Any, why: str) -> NoReturn:
    raise OffloadError(f"generation_config.json says {name} {brief(value)}, {why}; correct it")


def check_settings(settings: Any) -> None:
    """Of a ``GenerationConfig`` that samples.

    Raises:
        OffloadError: what the checkpoint's file says is nothing to sample by.
    """
    for name in ("top_k", "top_p", "min_p"):
        value = getattr(settings, name)
        if value is None:
            continue
        if name == "top_k":
            good = type(value) is int and value >= 0
        else:
            good = _is_number(value) and 0 <= value <= 1
        if not good:
            raise OffloadError(
                f"generation_config.json says {name} {value!r}, which is nothing to sample by; "
                f"correct it, or give {name} yourself"
            )
    # The cutoffs do nothing outside of 0 to 1, nor does typical_p from 1 on.
    for name, low, high in (
        ("typical_p", 0.0, math.inf), ("top_h", 0.0, 1.0),
        ("epsilon_cutoff", -math.inf, math.inf), ("eta_cutoff", -math.inf, math.inf),
    ):  # fmt: skip
        value = getattr(settings, name, None)
        if value is not None and not (_is_number(value) and low < value <= high):
            _refuse(name, value, "nothing to sample by")


def check_tokens(settings: Any) -> None:
    """Of a ``GenerationConfig``: ids are numbers (-1 stands for none in some checkpoints).

    Raises:
        OffloadError: what the checkpoint's file says is no id.
    """
    lists = ("eos_token_id", "decoder_start_token_id")
    for name in ("bos_token_id", "pad_token_id", *lists):
        value = getattr(settings, name, None)
        many = value if isinstance(value, list) and name in lists else [value]
        if value is not None and not all(type(i) is int and -(2**63) <= i < 2**63 for i in many):
            raise OffloadError(
                f"generation_config.json says {name} {value!r}, which is no token's id; correct it"
            )


__all__ = [
    "LEAST_TEMPERATURE",
    "FiniteLogits",
    "check_settings",
    "check_tokens",
    "choose_alone",
    "own_stops",
    "own_temperature",
    "vocabulary_of",
]
