"""What a model keeps between two passes in its own modules, and not in a cache.

A cache is one sequence's; a module is everybody's. Where a recurrent state (RecurrentGemma's), the
positions behind an image or a rotation that grows with the text are attributes of modules,
sequences that take turns need their own, and a cache alone does not bring a text back.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from offload.models.pieces import family_of, toys

logger = logging.getLogger(__name__)

_TORCHS = frozenset(nn.Module().__dict__)
"""Attributes of every module."""
_POSITIONS = "rope_deltas"
_ROTATION = ("inv_freq", "original_inv_freq", "max_seq_len_cached", "attention_scaling")
"""What transformers changes in a rotary embedding of the kind "dynamic", also behind a prefix for
each type of layers."""
_KIND, _CHILD = "attention_type", "self"
"""BigBird attends in blocks until it is given a text that is too short for it, and then never
again: it keeps the kind's name in every module, and puts another module where the attention was."""
_ABSENT = object()


class Place(NamedTuple):
    """Where a module keeps something: a dictionary of its own, and the name in there."""

    table: dict[str, Any]
    name: str


class OwnState:
    """What one of several sequences keeps in the modules, while others use them."""

    def __init__(self, places: Sequence[Place]) -> None:
        """It begins with what is there now."""
        self._places = places
        self._kept = [_copy(place.table.get(place.name, _ABSENT)) for place in places]

    def swap(self) -> None:
        """Its own go into the modules, and what is there is kept in their place; or back again."""
        for i, (table, name) in enumerate(self._places):
            now = table.get(name, _ABSENT)
            if self._kept[i] is _ABSENT:
                table.pop(name, None)
            else:
                table[name] = self._kept[i]
            self._kept[i] = now


def state_places(model: nn.Module) -> list[Place]:
    """Everything in a model's modules that a pass leaves there for the next one."""
    found: list[Place] = []
    kept = states_of(model)
    for module in model.modules():
        own = module.__dict__
        names = kept.get(type(module), ())
        found += [Place(own, name) for name in names if name in own]
        if _POSITIONS in own:
            found.append(Place(own, _POSITIONS))
        if _KIND in own and hasattr(module, f"set_{_KIND}"):
            found.append(Place(own, _KIND))
            if _CHILD in module._modules:
                found.append(Place(cast("dict[str, Any]", module._modules), _CHILD))
        for prefix in _growing(module):
            for name in _ROTATION:
                name = prefix + name
                table: dict[str, Any] = module._buffers if name in module._buffers else own
                found.append(Place(table, name))
    return found


def states_of(model: nn.Module) -> Mapping[type, tuple[str, ...]]:
    """The attributes of a model's modules, by their class, in which passes keep a state: those of a
    toy of its family that hold other tensors behind a token than before. Nothing where there is no
    toy, and for classes that transformers does not call stateful."""
    if not getattr(type(model), "_is_stateful", False):
        return {}
    return _states_of(*family_of(model))


@functools.cache
def _states_of(*family: Any) -> Mapping[type, tuple[str, ...]]:
    for model in toys(*family):
        before = _tensors(model)
        ids = torch.ones((1, 4), dtype=torch.int64)
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
        except Exception as error:  # noqa: BLE001  families refuse toys in their own ways
            logger.info("a toy of %s does not run: %s", family[0].__name__, error)
            continue
        after = _tensors(model)
        break
    else:
        return {}
    found: dict[type, dict[str, None]] = {}
    for (module, name), tensor in after.items():
        if before.get((module, name)) is not tensor:
            found.setdefault(type(module), {})[name] = None
    return {kind: tuple(names) for kind, names in found.items()}


def why_not_in_a_cache(model: nn.Module) -> str | None:
    """What a cache alone does not bring back, where a recurrent state is kept in modules."""
    for kind, names in states_of(model).items():
        return f"{kind.__name__} keeps its state ({', '.join(names)}) in itself, not in a cache"
    return None


def _tensors(model: nn.Module) -> dict[tuple[nn.Module, str], torch.Tensor]:
    return {
        (module, name): value
        for module in model.modules()
        for name, value in module.__dict__.items()
        if name not in _TORCHS and isinstance(value, torch.Tensor)
    }


def _growing(module: nn.Module) -> list[str]:
    """The prefixes of attributes of a module's rotations that grow with a text."""
    kind = module.__dict__.get("rope_type")
    kinds = kind if isinstance(kind, dict) else {"": kind}
    return [f"{name}_" if name else "" for name, k in kinds.items() if "dynamic" in str(k)]


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


__all__ = ["OwnState", "Place", "state_places", "states_of", "why_not_in_a_cache"]
