"""Inputs to where a model computes, so that the same three lines run anywhere.

A user's tokens are made on the CPU. A resident model is moved to its card by hand, and so are its
inputs; a streamed one is where it was loaded for, and fetches them itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from offload.models.shadow import shadow
from offload.runtime.cuda_api import telling


def to_device(value: Any, device: torch.device) -> Any:
    """``value`` with every tensor in it (in lists, tuples, dicts) on ``device``. Tensors that are
    there already, and whatever else there is, are passed on as they are."""
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        moved = [to_device(v, device) for v in value]
        same = all(a is b for a, b in zip(moved, value, strict=True))
        return value if same else type(value)(moved)
    if type(value) is dict:
        return {k: to_device(v, device) for k, v in value.items()}
    return value


def take_inputs(model: nn.Module, device: torch.device) -> list[Callable[[], Any]]:
    """Have the model's forward and ``generate`` move their arguments to ``device``, and say what to
    do if its memory runs out; what undoes it. Nothing to do on the CPU."""
    if device.type == "cpu":
        return []

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return to_device(args, device), to_device(kwargs, device)

    undo: list[Callable[[], Any]] = [
        model.register_forward_pre_hook(before, with_kwargs=True).remove,
        _say_what_is_full(model, device),
    ]
    inner = getattr(model, "generate", None)
    if inner is not None:

        @wraps(inner)
        def generate(*args: Any, **kwargs: Any) -> Any:
            return inner(*to_device(args, device), **to_device(kwargs, device))

        model.__dict__["generate"] = generate
        undo.append(partial(model.__dict__.pop, "generate", None))
    return undo


FULL = (
    "plan for the tokens and sequences that you use (context, prompt_tokens, batch), lower the GPU "
    "budget, or end what else uses the card"
)


def _say_what_is_full(model: nn.Module, device: torch.device) -> Callable[[], Any]:
    """A plan holds what it was made for: more tokens or sequences, or somebody else on the card,
    are the user's to act on, and a traceback of the allocator does not say so."""
    inner = model.forward

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with telling(str(device), "a pass", FULL):
            return inner(*args, **kwargs)

    return shadow(model, "forward", forward)


__all__ = ["take_inputs", "to_device"]
