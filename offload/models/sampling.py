"""What tokens cannot be chosen by: logits that are no numbers, settings that are nothing."""

from __future__ import annotations

from typing import Any

import torch

from offload.errors import OffloadError


class FiniteLogits:
    """A logits processor that changes nothing. Every token after a NaN would be an accident."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``input_ids`` [B, S] int64; ``scores`` [B, V], where -inf means "never".

        Raises:
            OffloadError: a NaN, an infinite logit, or no token that is possible.
        """
        # A NaN wins every comparison of max(), and so does an infinity.
        largest = scores.max()
        if not torch.isfinite(largest):
            raise OffloadError(
                f"the logits of the token after {input_ids.shape[1]} are {float(largest)}: weights "
                f"that are damaged, or numbers beyond the compute dtype (float16 ends at 65504); "
                f"try --dtype float32, and check the download"
            )
        return scores


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
            good = isinstance(value, int) and value >= 0
        else:
            good = isinstance(value, (int, float)) and 0 <= value <= 1
        if not good:
            raise OffloadError(
                f"generation_config.json says {name} {value!r}, which is nothing to sample by; "
                f"correct it, or give {name} yourself"
            )


def check_tokens(settings: Any) -> None:
    """Of a ``GenerationConfig``: ids are numbers (-1 stands for none in some checkpoints).

    Raises:
        OffloadError: what the checkpoint's file says is no id.
    """
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(settings, name, None)
        many = value if isinstance(value, list) and name == "eos_token_id" else [value]
        if value is not None and not all(type(i) is int for i in many):
            raise OffloadError(
                f"generation_config.json says {name} {value!r}, which is no token's id; correct it"
            )


__all__ = ["FiniteLogits", "check_settings", "check_tokens"]
