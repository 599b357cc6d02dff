"""A model's parameters by identity, with every place that uses them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter slot of the model: ``module._parameters[attr]``."""

    module: nn.Module
    attr: str


@dataclass(slots=True)
class Param:
    """One parameter, wherever it is used."""

    name: str
    tensor: torch.Tensor
    places: list[Place]
    names: list[str]
    """Its name at each place; the first is ``name``."""
    phase: int = 0
    """Where the resident model's tensor starts within 64 bytes; see ``cut``."""

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


def parameters(model: nn.Module) -> dict[int, Param]:
    """Every parameter by identity, with all its places; in order of first appearance."""
    found: dict[int, Param] = {}
    for path, module in model.named_modules():
        for attr, tensor in module._parameters.items():
            if tensor is None:
                continue
            name = f"{path}.{attr}" if path else attr
            param = found.setdefault(id(tensor), Param(name, tensor, [], []))
            param.places.append(Place(module, attr))
            param.names.append(name)
    return found
