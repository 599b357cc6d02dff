"""What layers hand to each other beside their results.

Some families (Gemma 3n, Gemma 4) have later layers use the keys and values of an earlier one, which
puts them into a mapping that all layers are called with. To autograd of units (``segments``) such
a mapping is neither an argument nor a result: what is put into it would be a constant to whoever
reads it, and no gradient would come back. So a unit is called with a plain dictionary, whose
tensors are arguments like others, and what it puts there is a result.
"""

from __future__ import annotations

import weakref
from collections import UserDict
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from offload.errors import OffloadError

Stored = list[dict[Any, Any]]
"""What a unit put into each of its mappings, in their order."""


def without_caches(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A unit's arguments without caches: recomputing would append a step's keys a second time. Of
    mappings there are plain copies."""
    args = tuple(_own(x) for x in args)
    kwargs = {k: _own(v) for k, v in kwargs.items()}
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return args, kwargs


def _own(value: Any) -> Any:
    if _is_cache(value):
        return None
    return dict(value) if _is_mapping(value) else value


_UNFILLED: weakref.WeakSet[Any] = weakref.WeakSet()
"""Caches that a model which trains was called with, or has made; it has put nothing into them."""


def refuse_filled(args: Any, kwargs: Any) -> None:
    """Raise OffloadError for a cache that holds something: it would not be looked at. Of others
    remember that they stay empty."""
    for value in (*args, *kwargs.values()):
        if not _is_cache(value):
            continue
        if int(value.get_seq_length()):
            raise OffloadError(
                f"a {type(value).__name__} that holds keys and values cannot be passed to a model "
                f"that trains: its layers run again in backward, without it. Leave past_key_values "
                f"out, or give use_cache=False where the model makes one itself; instead of prefix "
                f"tuning, train LoRA or prompt tuning"
            )
        _UNFILLED.add(value)


def refuse_unfilled(model: Any, args: Any, kwargs: Any) -> None:
    """A forward pre-hook. Raises OffloadError for a cache that an earlier forward has left empty:
    that one's tokens would be missing. Of whole models, and not of layers, which may get a cache
    several times in one forward."""
    for value in (*args, *kwargs.values()) if _UNFILLED else ():
        if _is_cache(value) and value in _UNFILLED:
            raise OffloadError(
                f"this {type(value).__name__} is of an earlier forward with gradients, and empty: "
                f"layers that run again in backward fill no cache. Leave past_key_values out and "
                f"pass all tokens; to decode, run all of it (the forward that makes the cache, too)"
                f" under torch.no_grad()"
            )


def saved_inputs(ctx: Any, kind: str) -> Iterator[torch.Tensor]:
    """What a unit, a ``kind``, has saved for backward of the tensors it was given.

    Raises:
        OffloadError: one of them was changed in place since: the unit would run again with it.
    """
    try:
        return iter(ctx.saved_tensors)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise OffloadError(
            f"a tensor that a streamed {kind} was given has been changed in place since, and "
            f"backward runs it again with what it was given: give use_cache=False if it is a state "
            f"that the model keeps (xLSTM's), else change a copy (x = x + y, not x += y)"
        ) from error


def _is_cache(value: Any) -> bool:
    """Whether it is one of transformers' caches, by whatever argument it comes."""
    return any(kind.__name__ == "Cache" for kind in type(value).__mro__)


def mappings(args: Any, kwargs: Any) -> Iterator[MutableMapping[Any, Any]]:
    """Those among a unit's arguments that it may put something into."""
    for value in (*args, *kwargs.values()):
        if _is_mapping(value):
            yield value


def _is_mapping(value: Any) -> bool:
    """Not those that are results of a model: who takes one asks it for attributes."""
    return type(value) is dict or isinstance(value, UserDict)


class Watch:
    """Sees what a unit puts into the mappings among ``args`` and ``kwargs``, its own copies."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        self._seen = [(mapping, dict(mapping)) for mapping in mappings(args, kwargs)]

    def stored(self) -> Stored:
        """What is new or another than it was."""
        return [
            {k: v for k, v in now.items() if k not in before or not _same(v, before[k])}
            for now, before in self._seen
        ]


def hand_over(stored: Stored, args: Any, kwargs: Any) -> None:
    """Put what a unit stored into the mappings that it was called with."""
    for mapping, new in zip(mappings(args, kwargs), stored, strict=True):
        mapping.update(new)


def _same(one: Any, other: Any) -> bool:
    """Whether it is the same tensors, at the same places."""
    if one is other:
        return True
    (ones, spec), (others, like) = tree_flatten(one), tree_flatten(other)
    if spec != like:
        return False
    return all(
        a is b or (not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor) and a == b)
        for a, b in zip(ones, others, strict=True)
    )


__all__ = [
    "Stored",
    "Watch",
    "hand_over",
    "mappings",
    "refuse_filled",
    "refuse_unfilled",
    "saved_inputs",
    "without_caches",
]
