"""Which models cannot have several examples in a row.

Examples are kept apart by attention masks alone. What passes from one position to the next by any
other way (recurrent states, convolutions, compressed memories), or does not read ``position_ids``,
would carry one example into the next without an error.
"""

from __future__ import annotations

import inspect
from typing import Any

MASKED_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layers, as configs name them, that see other positions through the mask only."""

MASKED_ATTENTION = frozenset({"eager", "sdpa"})
"""Attention whose masks transformers makes from ``position_ids`` for any number of rows. Flash
attention finds packed examples only where there is one row."""


def packing_obstacle(model_class: type, config: Any) -> str | None:
    """Why models of this class cannot be packed; None if they can.

    Args:
        model_class: of transformers.
        config: the model's; its text part decides.
    """
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    kind = getattr(text, "model_type", model_class.__name__)
    if getattr(model_class, "_is_stateful", False):
        return f"{kind} keeps a state from token to token"
    layers = getattr(text, "layer_types", None) or ()
    others = sorted({str(layer) for layer in layers} - MASKED_LAYERS)
    if others:
        return f"{kind} has layers of type {', '.join(others)}, which no mask keeps apart"
    if getattr(text, "alibi", False):
        return f"{kind} knows positions by ALiBi, which does not restart"
    if "position_ids" not in inspect.signature(getattr(model_class, "forward")).parameters:  # noqa: B009
        return f"{kind} takes no position_ids"
    if getattr(text, "is_encoder_decoder", False):
        return f"{kind} has an encoder"
    attention = getattr(text, "_attn_implementation", None)
    if attention is not None and attention not in MASKED_ATTENTION:
        return f"its attention implementation is {attention}, not eager or sdpa"
    return None
