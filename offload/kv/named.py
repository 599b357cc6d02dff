"""By which name transformers' models are given a cache, and give it back."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

from transformers import GenerationMixin

BEFORE: Final = "past_key_values"
"""Until 5.23; later ones still take it, with a warning."""
_SINCE: Final = "cache"


def _name() -> str:
    known = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return _SINCE if _SINCE in known else BEFORE


CACHE: Final = _name()
NAMES: Final = tuple(dict.fromkeys((CACHE, BEFORE)))


def given_cache(kwargs: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a call; None: there is none."""
    return next((kwargs[name] for name in NAMES if kwargs.get(name) is not None), None)


__all__ = ["BEFORE", "CACHE", "NAMES", "given_cache"]
