"""Footprints that are measured once for each model, however often a test run plans it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from offload.models import load, packed_load
from offload.models.footprint import Footprint, measure

_found: dict[Any, Footprint] = {}


@contextmanager
def measured_once() -> Iterator[None]:
    """Planning passes a model through the meta device, which takes longer than all the rest of it:
    a quarter of a second, three times in a test that compares budgets. What comes out depends on
    nothing but what is in the key."""

    def once(model: Any, tokens: int, batch: int = 1) -> Footprint:
        config = model.config
        dtypes = tuple((name, p.dtype, tuple(p.shape)) for name, p in model.named_parameters())
        ways = (getattr(config, f"_{of}_implementation", None) for of in ("attn", "experts"))
        key = (type(model), config.to_json_string(use_diff=False), dtypes, *ways, tokens, batch)
        if key not in _found:
            _found[key] = measure(model, tokens, batch)
        return _found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "measure", once)
        patch.setattr(packed_load, "measure", once)
        yield
