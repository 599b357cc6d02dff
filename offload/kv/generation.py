"""In the place of a model's ``generate``, and back."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any


def take_place(model: Any, generate: Callable[..., Any]) -> Callable[[], None]:
    """Have ``model.generate`` be ``generate``; returns what puts everything back.

    A checkpoint's wish for a kind of cache of its own, or for none, is set aside meanwhile: beside
    a cache that is given, none means that all that it holds is read again with each token.
    ``generate`` gets all arguments but the prompt by name (``by_name``).
    """
    before = model.__dict__.get("generate")
    settings = getattr(model, "generation_config", None)
    wish, cached = (getattr(settings, name, None) for name in ("cache_implementation", "use_cache"))
    if settings is not None:
        settings.cache_implementation, settings.use_cache = None, True
    model.__dict__["generate"] = by_name(model, generate)

    def undo() -> None:
        model.__dict__.pop("generate", None)
        if before is not None:
            model.__dict__["generate"] = before
        if settings is not None:
            settings.cache_implementation, settings.use_cache = wish, cached

    return undo


def by_name(model: Any, generate: Callable[..., Any]) -> Callable[..., Any]:
    """``generate``, given every argument but the first by its name in ``model``'s own, so that a
    ``generation_config`` is found however the caller passes it."""
    kinds = inspect.signature(type(model).generate).parameters.values()
    names = [p.name for p in kinds if p.kind is p.POSITIONAL_OR_KEYWORD][1:]  # without self

    @wraps(generate)
    def called(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names[1:], args[1:], strict=False))
        if len(args) > len(names) or given.keys() & kwargs.keys():
            return generate(*args, **kwargs)  # Python says what is wrong with it
        return generate(*args[:1], **given, **kwargs)

    return called


__all__ = ["by_name", "take_place"]
