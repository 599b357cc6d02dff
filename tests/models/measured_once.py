"""What a test run measures once for each model, however often it plans it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from offload.models import load, packed_load
from offload.models.baseline import warm_up
from offload.models.footprint import Footprint, measure
from offload.models.toy import Warm
from offload.runtime.rss import current_rss

_found: dict[Any, Footprint] = {}
_warmed: dict[Any, Warm] = {}


@contextmanager
def measured_once() -> Iterator[None]:
    """Planning passes a model through the meta device, which takes longer than all the rest of it:
    a quarter of a second, three times in a test that compares budgets. What comes out depends on
    nothing but what is in the key. And before it a toy of the family runs, to warm the process:
    with half a second that is most of what a command takes here, and the process stays warm."""

    def once(
        model: Any, tokens: int, batch: int = 1, *, card: bool = False, flash: bool = True
    ) -> Footprint:
        config = model.config
        dtypes = tuple((name, p.dtype, tuple(p.shape)) for name, p in model.named_parameters())
        key = (type(model), *ways(config), dtypes, tokens, batch, card, flash)
        if key not in _found:
            _found[key] = measure(model, tokens, batch, card=card, flash=flash)
        return _found[key]

    def warm(
        config: Any, model_cls: Any, dtype: torch.dtype, timed: bool = True, rows: bool = False
    ) -> Warm:
        key = (model_cls, *ways(config), dtype, torch.get_num_threads(), timed, rows)
        if key not in _warmed:
            _warmed[key] = warm_up(config, model_cls, dtype, timed, rows)
        # Everything but the times is of the moment.
        gc.collect()
        return replace(_warmed[key], baseline_rss=current_rss())

    with pytest.MonkeyPatch.context() as patch:
        for module in (load, packed_load):
            patch.setattr(module, "measure", once)
            patch.setattr(module, "warm_up", warm)
        yield


def ways(config: Any) -> tuple[Any, ...]:
    """All that a config says but where it was read: each test has its checkpoints elsewhere."""
    text = config.to_json_string(use_diff=False)
    said = [line for line in text.splitlines() if '"_name_or_path":' not in line]
    how = (getattr(config, f"_{of}_implementation", None) for of in ("attn", "experts"))
    return "\n".join(said), *how
