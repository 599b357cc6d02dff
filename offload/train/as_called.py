"""What a unit was called under, and is run again under: what torch casts to, and its buffers."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Autocast:
    """What torch casts to by itself; backward is not run under it, recomputation has to be."""

    kind: str
    """Of the device that computes. To its caller the model is the CPU's, wherever its layers run:
    what is cast there is cast on the device, too."""
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, kind: str) -> Autocast:
        meant = next((k for k in (kind, "cpu") if torch.is_autocast_enabled(k)), None)
        return cls(kind, meant is not None, torch.get_autocast_dtype(meant or kind))

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        """The same again; casts of weights are not kept, they would be all of the model."""
        if not self.enabled and not torch.is_autocast_enabled(self.kind):
            return contextlib.nullcontext()
        return torch.autocast(
            self.kind, dtype=self.dtype, enabled=self.enabled, cache_enabled=False
        )


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer of a unit, and a copy of its value."""

    module: nn.Module
    name: str
    value: torch.Tensor

    def changed(self) -> bool:
        # By its values: batch norm's kernels write past autograd's count of versions.
        now = self.module._buffers.get(self.name)
        return now is not None and not torch.equal(now, self.value)


def changeable_buffers(module: nn.Module) -> list[Buffer]:
    """The buffers that a forward may change: in training, and no masks."""
    return [
        Buffer(part, name, buffer.detach().clone())
        for part in module.modules()
        if part.training
        for name, buffer in part._buffers.items()
        if buffer is not None and buffer.dtype != torch.bool
    ]


__all__ = ["Autocast", "Buffer", "changeable_buffers"]
