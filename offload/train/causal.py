"""Which models ``offload finetune`` can train: those that predict the next token.

Its data becomes sequences whose labels are the tokens that follow. An encoder takes these inputs,
too, and learns nothing but to copy what it sees, and so does a model whose loss does not shift
labels; a classifier fails somewhere in its own loss. All are trained in a loop of the user's
(``offload.load(path, train=True)``), which knows their labels.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F

from offload.errors import UnsupportedModelError
from offload.models.meta import model_class

logger = logging.getLogger(__name__)

TOKENS = 12
_ROUNDING = 1e-4
"""Of the largest logit. Rounding is some 1e-6, a token that is seen by an earlier one some 1e-1."""


def check_causal(config: Any) -> None:
    """Refuse a config whose model is no causal language model.

    Raises:
        UnsupportedModelError: says why, and how such a model is trained.
    """
    cls = model_class(config)
    why = _named_otherwise(cls) or _shown(cls, config)
    if why is not None:
        raise UnsupportedModelError(
            f"{cls.__name__} cannot be trained to predict the next token: {why}; train it in a "
            f"loop of your own, with offload.load(path, train=True) and offload.AdamW"
        )


def _named_otherwise(cls: type) -> str | None:
    from transformers.models.auto import modeling_auto as auto

    known: set[str] = set()
    for task in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"):
        # Mappings come and go with releases; the first is always there.
        for names in getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}).values():
            known.update((names,) if isinstance(names, str) else names)
    if cls.__name__ in known:
        return None
    return "transformers has it under another task"


def _shown(cls: Any, config: Any) -> str | None:
    """What a toy shows: an encoder with a causal class (BERT's) is causal only if its config says
    so, and decoders of translators (Marian's) leave it to their caller to shift labels."""
    from offload.models.toy import toy_config

    if (toy := toy_config(config)) is None:
        return None
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        try:
            model = cls._from_config(toy, dtype=torch.float32).eval()
            for p in model.parameters():
                if p.dim() > 1:  # unit gain: as initialised, a toy hardly looks at other tokens
                    p.normal_(std=p.shape[-1] ** -0.5)
            ids = torch.randint(3, 200, (1, TOKENS))
            ahead = not getattr(config, "is_decoder", False) and _sees_ahead(model, ids)
            model(ids)  # a toy may fail for what it is
            try:
                unshifted = _learns_itself(model, ids)
            except Exception as error:  # noqa: BLE001  GIT wants logits of an image beside those
                return f"its loss fails on text alone ({type(error).__name__}: {error})"
        except Exception as error:  # noqa: BLE001  whatever a family raises, it was not shown
            logger.info("a toy of %s does not run: %s", cls.__name__, error)
            return None
    if ahead:
        return "its tokens see those that follow (config.json: is_decoder)"
    return "its loss compares each token's logits with the token itself" if unshifted else None


def _sees_ahead(model: Any, ids: torch.Tensor) -> bool:
    other = ids.clone()
    other[:, TOKENS // 2 :] = other[:, TOKENS // 2 :].flip(1)
    before, after = (model(x).logits[:, : TOKENS // 2] for x in (ids, other))
    return float((before - after).abs().max()) > _ROUNDING * float(before.abs().max())


def _learns_itself(model: Any, ids: torch.Tensor) -> bool:
    out = model(ids, labels=ids)
    itself = F.cross_entropy(out.logits.float().flatten(0, 1), ids.flatten())
    return abs(float(out.loss) - float(itself)) <= _ROUNDING * float(itself)


__all__ = ["check_causal"]
