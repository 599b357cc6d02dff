"""Whether a mask of transformers hides just what the kernels hide by themselves."""

from __future__ import annotations

from typing import Any

import torch

_HIDDEN = -1e30
"""What masks add to scores that are hidden is below."""

_MASK_ROWS = 64
"""Of a mask that are looked at in one go."""


def is_causal(mask: Any, tokens: int, cached: int, window: int) -> bool:
    """Whether a mask of transformers, [1, 1, T, cached + T] of bool or of what is added to scores,
    hides from T tokens those behind each and those before its ``window`` (0: none), and no other.

    Without one its attention hides what comes later, if nothing is cached.
    """
    if mask is None:
        return cached == 0 and (window == 0 or tokens <= window)
    length = cached + tokens
    if not isinstance(mask, torch.Tensor) or mask.shape[-2:] != (tokens, length):
        return False
    if mask.numel() != tokens * length:
        return False
    given_TL = mask.reshape(tokens, length)
    columns_L = torch.arange(length, dtype=torch.int32, device=mask.device)
    # Of all rows at once the temporaries would be several times the mask, outside any budget.
    return all(
        _rows_causal(given_TL[t : t + _MASK_ROWS], columns_L, cached + t, window)
        for t in range(0, tokens, _MASK_ROWS)
    )


def _rows_causal(given_RL: torch.Tensor, columns_L: torch.Tensor, first: int, window: int) -> bool:
    """``is_causal`` of rows whose first token has ``first`` before it."""
    rows = first, first + len(given_RL)
    rows_R1 = torch.arange(*rows, dtype=torch.int32, device=given_RL.device)[:, None]
    seen_RL = columns_L <= rows_R1
    if window:
        seen_RL &= columns_L > rows_R1 - window
    if given_RL.dtype == torch.bool:
        return torch.equal(given_RL, seen_RL)
    right_RL = ((given_RL == 0) == seen_RL) & ((given_RL < _HIDDEN) != seen_RL)
    return bool(right_RL.all())
