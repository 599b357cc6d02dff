"""Weights that a model reads where they are not in memory.

While a unit runs its weights are in place; at any other time a number stands for each, NaN. Code
that reads a layer's weights past the layer (ProphetNet looks rows up in a table by itself) would
end in a loss that is none, for which the data would be blamed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from offload.errors import UnsupportedModelError


class HollowUse(TorchFunctionMode):
    """Inside, hears of every function of torch's that makes NaN of such a weight: those that only
    ask for its shape or type come to something else."""

    def __init__(self, params: Mapping[str, torch.Tensor], present: Collection[str]) -> None:
        """``present``: names of those in memory, as it changes."""
        super().__init__()
        self._names = {id(p): name for name, p in params.items()}
        self._params = params  # ids are theirs as long as they live
        self._present = present
        self.first: str | None = None
        """The weight that was read so."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.first is None and isinstance(out, torch.Tensor):
            for leaf in tree_leaves((args, kwargs)):
                name = self._names.get(id(leaf))
                if name is not None and name not in self._present and bool(out.isnan().any()):
                    self.first = name
                    break
        return out

    def blame(self, kind: str, error: BaseException) -> None:
        """Raise UnsupportedModelError if ``error`` comes of such a use."""
        if self.first is not None:
            raise UnsupportedModelError(
                f"{kind} reads {self.first} outside of the layer that has it, where it is not in "
                f"memory; train it in a loop of your own, with offload.load(path, train=True) and "
                f"offload.AdamW, where weights are read whenever they are asked for"
            ) from error
