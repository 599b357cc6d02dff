"""Which linear layers' weights a model's code reads by itself, beside the layers' own forward.

Mamba and Jamba multiply ``self.dt_proj.weight`` by hand. Such a weight has to be a tensor when its
layer runs; packed bytes that only the layer's own forward can multiply would not do.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from offload.models.footprint import meta_forward

logger = logging.getLogger(__name__)

TOKENS = 3
_FACTS = {
    "size", "dim", "numel", "element_size", "stride", "is_floating_point", "is_contiguous",
    "untyped_storage",
}  # fmt: skip
_PRODUCTS = (functional.linear, functional.embedding, torch.embedding)
_VALUES = {"T", "mT", "H", "mH", "data", "real"}


def read_by_hand(model: Any) -> set[int]:
    """Identities of the weights of ``nn.Linear`` layers that something else than the product of
    such a layer takes. ``model`` is on the meta device; where the code of a class names a weight,
    it runs once, without data, and again for one more token: not every path of the code is taken.
    A model that cannot run so is taken to read none.
    """
    watch = _Watch(_named_in_code(model))
    if not watch.weights:
        return set()
    try:
        with watch:
            meta_forward(model, TOKENS, decode=True)
    except Exception as error:  # noqa: BLE001  any op may refuse meta tensors
        logger.info("which weights are read outside of their layers is not known: %s", error)
    return watch.found


def _named_in_code(model: nn.Module) -> set[int]:
    """Identities of weights that a method of the module around their layer may read."""
    found = set()
    for parent in model.modules():
        for leaf, child in parent.named_children():
            if isinstance(child, nn.Linear) and _mentions(type(parent), leaf):
                found.add(id(child.weight))
    return found


def _mentions(cls: type, leaf: str) -> bool:
    for base in cls.__mro__:
        if base.__module__.startswith("torch."):
            continue
        for name, member in vars(base).items():
            code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
            if code is not None and "init" not in name and {leaf, "weight"} <= set(code.co_names):
                return True
    return False


class _Watch(TorchFunctionMode):
    """Notes which weights are given to operations that are no product of a linear layer."""

    def __init__(self, weights: set[int]) -> None:
        super().__init__()
        self.weights = weights
        self.found = set[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS and _takes_values(func):
            self.found |= {id(a) for a in (*args, *kwargs.values())} & self.weights
        return func(*args, **kwargs)


def _takes_values(func: Any) -> bool:
    """Whether ``func`` does more than to ask a tensor for its shape, dtype or place."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") in _VALUES
    return name not in _FACTS
