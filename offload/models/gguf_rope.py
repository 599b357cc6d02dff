"""Rotary embeddings of a GGUF file as transformers' ``rope_parameters``.

Base and scaling are metadata, except the scaling of Llama 3.1 and later, which llama.cpp stores
as what it comes to: ``rope_freqs.weight``, a divisor for each frequency.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from offload.models.gguf_metadata import Metadata, shortest
from offload.units import brief

FREQS = "rope_freqs.weight"
_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"

_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What every published Llama 3.x has; only ``factor`` differs (8, 16, 32)."""


def rope_parameters(
    meta: Metadata, rotary_dim: int, *, base: float | None = None
) -> dict[str, Any]:
    """``rope_parameters`` of the file.

    Args:
        rotary_dim: elements of a head that are rotated.
        base: the value of ``rope.freq_base`` to take where the file has none; llama.cpp's
            default (10000) if it is not given.

    Raises:
        CheckpointError: a key that the scaling needs is missing or malformed.
        UnsupportedModelError: a scaling we do not know.
    """
    out: dict[str, Any] = {
        "rope_theta": meta.positive("rope.freq_base", 10000.0 if base is None else base)
    }
    kind, factor_key = meta.text("rope.scaling.type", "none"), "rope.scaling.factor"
    if not meta.has("rope.scaling.type"):  # then llama.cpp takes a factor to be of linear scaling
        keys = (factor_key, "rope.scale_linear")  # the latter in files of 2023
        factor_key = next((key for key in keys if meta.has(key)), "")
        # ... and 0 to be none.
        kind = "linear" if factor_key and meta.real(factor_key, 0.0) not in (0, 1) else "none"
    if kind != "yarn":
        _without_yarn(meta, kind)
    if FREQS in meta.gguf.tensors:
        if kind != "none":
            meta.refuse(f"it has {FREQS} and {kind} scaling; the two together are not supported")
        return out | _from_factors(meta, out["rope_theta"], rotary_dim)
    if kind == "none":
        return out | _plain()
    if kind == "linear":
        return out | {"rope_type": "linear", "factor": meta.positive(factor_key)}
    if kind == "yarn":
        return out | _yarn(meta)
    meta.refuse(
        f"RoPE scaling of type {brief(kind)} is not supported; known are none, linear, yarn"
    )


def _plain() -> dict[str, Any]:
    return {"rope_type": "default"}


def _without_yarn(meta: Metadata, kind: str) -> None:
    """Refuse YaRN's keys where they change something although the type is another one: llama.cpp
    multiplies with both factors whatever the type."""
    _only(meta, "rope.scaling.attn_factor", 1.0)
    _only(meta, "rope.scaling.yarn_attn_factor", 1.0)
    if meta.real("rope.scaling.yarn_ext_factor", 0.0) > 0:  # below 0: not said
        _only(meta, "rope.scaling.yarn_ext_factor", 0.0)
    if kind != "none":  # it counts by the logarithm of the factor
        _only(meta, _LOG_MULTIPLIER, 0.0)


def _only(meta: Metadata, key: str, value: float) -> None:
    found = meta.real(key, value)
    if found != value:
        meta.refuse(f"{meta.arch}.{key} is {found:g}, which is not supported for it")


def _yarn(meta: Metadata) -> dict[str, Any]:
    factor = meta.positive("rope.scaling.factor")
    original = "rope.scaling.original_context_length"
    out: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": (
            meta.optional(original) or meta.integer("context_length")
        ),
        "beta_fast": meta.positive("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": meta.positive("rope.scaling.yarn_beta_slow", 1.0),
    }
    if meta.real("rope.scaling.yarn_ext_factor", 1.0) >= 0:  # below 0: not said
        _only(meta, "rope.scaling.yarn_ext_factor", 1.0)
    by_factor = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
    key = "rope.scaling.yarn_attn_factor"
    whole = meta.real(key, by_factor)
    if not math.isclose(whole, by_factor, rel_tol=1e-5):
        # The converter writes transformers' attention_factor there, which is the whole, or else
        # attn_factor, which transformers does not know; llama.cpp passes over either.
        meta.refuse(
            f"{meta.arch}.{key} is {whole:g}, where a factor of {factor:g} makes {by_factor:g}: "
            "what it means differs between programs, and is not supported"
        )
    attention = meta.real("rope.scaling.attn_factor", 1.0)
    if attention != 1.0:
        # llama.cpp multiplies it with what transformers takes for the whole.
        out["attention_factor"] = attention * by_factor
    if meta.arch != "deepseek2":  # of other architectures the converter's number is another one
        _only(meta, _LOG_MULTIPLIER, 0.0)
    elif multiplier := meta.real(_LOG_MULTIPLIER, 0.0):
        _only(meta, "rope.scaling.attn_factor", 1.0)
        # DeepSeek: the converter writes 0.1 * mscale_all_dim; published models have mscale equal.
        mscale = shortest(_single(10.0 * multiplier))
        out |= {"mscale": mscale, "mscale_all_dim": mscale}
    return out


def _single(x: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", x))[0])
    except OverflowError:
        return x


def _from_factors(meta: Metadata, base: float, rotary_dim: int) -> dict[str, Any]:
    tensor = meta.gguf.tensors[FREQS]
    n = rotary_dim // 2
    if tensor.type != "f32" or tensor.shape != (n,):
        meta.fail(f"{FREQS} is {tensor.type.upper()} {list(tensor.shape)}, not F32 [{n}]")
    factors = struct.unpack(f"<{n}f", meta.gguf.read(FREQS))
    if not all(math.isfinite(x) and x > 0 for x in factors):
        meta.fail(f"{FREQS} has factors that are not positive numbers")
    if all(x == 1.0 for x in factors):
        return _plain()
    factor = shortest(max(factors))
    expected = llama3_factors(base, rotary_dim, factor)
    if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(factors, expected, strict=True)):
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    # Any divisors at all: what transformers calls longrope, with one table for every length.
    listed = [shortest(x) for x in factors]
    return {
        "rope_type": "longrope",
        "long_factor": listed,
        "short_factor": listed,
        "attention_factor": 1.0,
        "original_max_position_embeddings": meta.integer("context_length"),
    }


def llama3_factors(base: float, rotary_dim: int, factor: float) -> list[float]:
    """The divisor of each frequency under Llama 3.1's scaling (``rope_type`` ``"llama3"``)."""
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    length = _LLAMA3["original_max_position_embeddings"]
    out = []
    for i in range(0, rotary_dim, 2):
        turns = length / (2 * math.pi * base ** (i / rotary_dim))  # within the original context
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        out.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return out
