"""In the place of a model's ``generate``, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def take_place(model: Any, generate: Callable[..., Any]) -> Callable[[], None]:
    """Have ``model.generate`` be ``generate``; returns what puts everything back.

    A checkpoint's wish for a kind of cache of its own is set aside meanwhile.
    """
    before = model.__dict__.get("generate")
    settings = getattr(model, "generation_config", None)
    wish = getattr(settings, "cache_implementation", None)
    if settings is not None:
        settings.cache_implementation = None
    model.__dict__["generate"] = generate

    def undo() -> None:
        model.__dict__.pop("generate", None)
        if before is not None:
            model.__dict__["generate"] = before
        if settings is not None:
            settings.cache_implementation = wish

    return undo


__all__ = ["take_place"]
