"""Which models cannot have several examples in a row.

Examples are kept apart by attention masks alone. What passes from one position to the next by any
other way (recurrent states, convolutions, compressed memories), or does not read ``position_ids``,
would carry one example into the next without an error.

Two questions are asked: what config and class say, and what a toy of the family does. Neither is
enough. Configs decide which layers there are, a toy has its class's defaults; and some families of
transformers take ``position_ids`` but make their masks without them (gpt_oss and afmoe in 5.23).
"""

from __future__ import annotations

import inspect
import logging
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MASKED_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layers, as configs name them, that see other positions through the mask only."""

MASKED_ATTENTION = frozenset({"eager", "sdpa"})
"""Attention whose masks transformers makes from ``position_ids`` for any number of rows. Flash
attention finds packed examples only where there is one row."""

_EXAMPLES = (13, 3, 21)
"""Tokens of the toy's examples: one is shorter, one longer than its windows."""
_ROUNDING = 1e-4
"""Of the largest logit. Rounding is some 1e-6, an example that is seen by another some 1e-1."""


def packing_obstacle(model_class: Any, config: Any) -> str | None:
    """Why models of this class cannot be packed; None if they can.

    Builds and runs a toy of the family (about half a second), so torch is imported. The global
    random state is left as it was.

    Args:
        model_class: of transformers.
        config: the model's.
    """
    return _stated(model_class, config) or _shown(model_class, config)


def _stated(model_class: Any, config: Any) -> str | None:
    text = config.get_text_config(decoder=True)
    kind = text.model_type
    if getattr(model_class, "_is_stateful", False):
        return f"{kind} keeps a state from token to token"
    layers = getattr(text, "layer_types", None) or ()
    others = sorted({str(layer) for layer in layers} - MASKED_LAYERS)
    if others:
        return f"{kind} has layers of type {', '.join(others)}, which no mask keeps apart"
    if getattr(text, "alibi", False):
        return f"{kind} knows positions by ALiBi, which does not restart"
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        return f"{kind} takes no position_ids"
    attention = getattr(text, "_attn_implementation", None)
    if attention is not None and attention not in MASKED_ATTENTION:
        return f"{kind} runs with {attention}, whose packing works for one row only"
    return None


def _shown(model_class: Any, config: Any) -> str | None:
    import torch

    from offload.models.toy import toy_config

    kind = config.get_text_config(decoder=True).model_type
    toy = toy_config(config)
    if toy is None:
        return f"{kind} has no toy to try it on"
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        try:
            chosen = getattr(config, "_attn_implementation", None)
            how = {} if chosen is None else {"attn_implementation": chosen}
            model = model_class._from_config(toy, dtype=torch.float32, **how).eval()
            model.set_experts_implementation("eager")
            for p in model.parameters():
                if p.dim() > 1:  # unit gain: as initialised, a toy hardly looks at other tokens
                    p.normal_(std=p.shape[-1] ** -0.5)
            apart, mixed = _differences(model)
        except Exception as error:  # noqa: BLE001  whatever a family raises, it was not shown
            logger.info("packing %s: %s", kind, error)
            return f"a toy of {kind} does not run on packed rows ({type(error).__name__})"
    logger.debug("packing %s: examples differ by %.1e, unseparated by %.1e", kind, apart, mixed)
    if mixed < 10 * _ROUNDING:
        return f"a toy of {kind} cannot tell whether examples see each other"
    if not apart < _ROUNDING:
        return f"examples in one row see each other in a toy of {kind}"
    return None


def _differences(model: Any) -> tuple[float, float]:
    """Largest difference between an example's logits alone and in a packed row, and in the same
    row as one sequence; in units of the largest logit."""
    import torch

    ends = [sum(_EXAMPLES[:i]) for i in range(len(_EXAMPLES) + 1)]
    ids = torch.randint(3, 200, (2, ends[-1]))
    positions = torch.cat([torch.arange(n) for n in _EXAMPLES]).expand(2, -1)
    packed = model(ids, position_ids=positions, use_cache=False).logits
    mixed = model(ids, use_cache=False).logits
    alone = torch.cat(
        [model(ids[:, begin:end], use_cache=False).logits for begin, end in pairwise(ends)], dim=1
    )

    def error(found: torch.Tensor) -> float:
        return float((found - alone).abs().max() / alone.abs().max())

    return error(packed), error(mixed)
