"""How a GGUF file's model is meant to be sampled, and where it stops."""

from __future__ import annotations

import logging
import math
from typing import Any

from offload.io.gguf import GGUFFile
from offload.models.gguf_metadata import shortest
from offload.models.gguf_tokenizer import TokenType, Vocabulary
from offload.units import brief

log = logging.getLogger(__name__)

# Tokens that end a turn, by llama.cpp's list; files state only some of them.
_ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>",
    "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>", "<｜end▁of▁sentence｜>",
)  # fmt: skip

_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
             "penalty_repeat": "repetition_penalty"}  # fmt: skip

_LEFT_OUT = ("sequence", "xtc_probability", "mirostat", "penalty_last_n")


def generation_defaults(gguf: GGUFFile) -> dict[str, Any]:
    """Arguments for ``GenerationConfig``: where to stop, and how to sample if the file says so.

    ``eos_token_id`` is one id or a list, as in published generation configs: the file's EOS, end
    of turn and end of message, and the control tokens that end a turn in every model that has
    them.

    Raises:
        CheckpointError: an id that is not in the vocabulary, or a malformed number.
    """
    vocabulary = Vocabulary(gguf)
    ends = [vocabulary.special(key) for key in ("eos", "eot", "eom")]
    names = set(_ENDS)
    if {"<|return|>", "<|call|>"} <= vocabulary.ids.keys():
        names.discard("<|end|>")  # Harmony: it ends a message, and the answer goes on
    ends += [
        i
        for name in _ENDS
        if name in names
        and (i := vocabulary.ids.get(name)) is not None
        and vocabulary.types[i] in (TokenType.CONTROL, TokenType.USER_DEFINED)
    ]
    stops = list(dict.fromkeys(i for i in ends if i is not None))
    out: dict[str, Any] = {
        "bos_token_id": vocabulary.special("bos"),
        "eos_token_id": stops[0] if len(stops) == 1 else stops or None,
        "pad_token_id": vocabulary.special("padding"),
    }
    sampling = {
        field: value
        for key, field in _SAMPLING.items()
        if (value := gguf.metadata.get(f"general.sampling.{key}")) is not None
    }
    for field, value in sampling.items():
        if type(value) not in (int, float) or not math.isfinite(value):
            found = brief(value, 40)
            vocabulary.meta.fail(f"general.sampling for {field} is {found}, not a number")
        if (value < 0 and field == "temperature") or (value <= 0 and field == "repetition_penalty"):
            vocabulary.meta.fail(f"general.sampling for {field} is {value:g}, which is too small")
        out[field] = _in_bounds(vocabulary, field, value)
    _say_left_out(gguf)
    if sampling:
        out["do_sample"] = out.get("temperature", 1.0) > 0
    if out.get("temperature") == 0:
        del out["temperature"]  # greedy: nothing is divided by it
    return out


def _in_bounds(vocabulary: Vocabulary, field: str, value: float) -> float:
    """As transformers takes it: what llama.cpp has for "off" is often beyond its bounds."""
    if field == "top_k":
        if value != int(value):
            vocabulary.meta.fail(f"general.sampling for top_k is {value:g}, not a whole number")
        return max(0, int(value))
    if field == "min_p":
        value = max(0, value)
    elif field == "top_p":
        value = min(1, value)
    return value if type(value) is int else shortest(value)


def _say_left_out(gguf: GGUFFile) -> None:
    """Warn of ways to sample that nobody here has, where they are on."""
    found = {key: gguf.metadata.get(f"general.sampling.{key}") for key in _LEFT_OUT}
    if gguf.metadata.get("general.sampling.penalty_repeat") in (None, 1):
        del found["penalty_last_n"]
    on = [key for key, value in found.items() if value not in (None, 0, "")]
    if on:
        names = ", ".join(f"general.sampling.{key}" for key in on)
        log.warning("%s: not known, and without effect: %s", gguf.name, names)
