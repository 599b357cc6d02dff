"""Modules of torch that choose how they compute by what streaming changes.

Recurrent layers and attention compute in another way where gradients may be asked for, and a
``TransformerEncoderLayer`` where a hook is on it. Streaming switches autograd off and puts hooks on
layers; what these modules see is what they would see without it, so that the bits are the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from torch import nn

from offload.models.shadow import shadow

_BY_GRAD = (nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)

_KEPT_OFF, _SHOWN = "kept off", "shown"
_asked: ContextVar[str | None] = ContextVar(
    "where a model was called with autograd on: what its modules see of that", default=None
)


@contextmanager
def without_autograd() -> Iterator[bool]:
    """``torch.no_grad()`` around a streamed forward that was called with autograd on. Gives whether
    somebody may ask its result for gradients: a program that called it, or a model's own forward
    that has switched autograd on again (forces are gradients of an energy), but not a module that
    is only shown how it was called."""
    wanted = _asked.get() != _SHOWN
    token = _asked.set(_KEPT_OFF)
    try:
        with torch.no_grad():
            yield wanted
    finally:
        _asked.reset(token)


def keep_choices(
    model: nn.Module, hooks: dict[int, set[int]], shown: Callable[[], bool]
) -> list[Callable[[], None]]:
    """Have such modules choose as in the resident model. Returns what undoes it.

    Args:
        hooks: by the identity of a module: the numbers of hooks that streaming has put there.
        shown: whether hooks must stay in sight now, because others may come to the module before
            its forward has ended.
    """
    return [
        shadow(module, "forward", _as_resident(module, hooks.get(id(module), set()), shown))
        for module in model.modules()
        if isinstance(module, _BY_GRAD)
    ]


def _as_resident(
    module: nn.Module, ours: set[int], shown: Callable[[], bool]
) -> Callable[..., Any]:
    inner: Callable[..., Any] = module.forward
    counted = isinstance(module, nn.TransformerEncoderLayer) and bool(ours)

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = counted and not shown()
        before = (module._forward_pre_hooks, module._forward_hooks)
        if hidden:
            module._forward_pre_hooks = _others(before[0], ours)
            module._forward_hooks = _others(before[1], ours)
        try:
            if not _asked.get() or torch.is_grad_enabled():
                return inner(*args, **kwargs)
            token = _asked.set(_SHOWN)
            try:
                with torch.enable_grad():
                    output = inner(*args, **kwargs)
            finally:
                _asked.reset(token)
            return _detached(output)
        finally:
            if hidden:
                module._forward_pre_hooks, module._forward_hooks = before

    return forward


def _others(hooks: Mapping[int, Any], ours: set[int]) -> OrderedDict[int, Any]:
    return OrderedDict((number, hook) for number, hook in hooks.items() if number not in ours)


def _detached(value: Any) -> Any:
    """What these modules return, without the graph that saw weights which are about to go."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, nn.utils.rnn.PackedSequence):
        return value._replace(data=value.data.detach())
    if isinstance(value, tuple):
        return tuple(_detached(v) for v in value)
    return value


__all__ = ["keep_choices", "without_autograd"]
