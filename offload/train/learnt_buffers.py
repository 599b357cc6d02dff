"""Buffers that a forward changes (batch norm's statistics), from one process to the next.

They are no parameters, so no tile has them: a commit says their values itself, of those that are
other than the checkpoint's.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from offload.errors import OffloadError
from offload.io.checksum import xxh3

Saved = dict[str, dict[str, str]]
"""By name; JSON."""


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


class LearntBuffers:
    """The buffers ``names`` of ``model``, which are as its checkpoint has them now."""

    def __init__(self, model: Any, names: Iterable[str]) -> None:
        self._model = model
        self._first = {name: self._sum(name) for name in sorted(names)}

    def _sum(self, name: str) -> int:
        return xxh3(_bytes(self._model.get_buffer(name)).numpy().data)

    def save(self) -> Saved:
        """Those that have changed."""
        out: Saved = {}
        for name, first in self._first.items():
            buffer = self._model.get_buffer(name)
            if self._sum(name) != first:
                data = base64.b64encode(_bytes(buffer).numpy().tobytes()).decode("ascii")
                out[name] = {"dtype": str(buffer.dtype).removeprefix("torch."), "data": data}
        return out

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Mapping[str, str]]) -> None:
        """Put back what ``save`` gave in another process.

        Raises:
            OffloadError: they are of another model.
        """
        for name, entry in saved.items():
            data = bytearray(base64.b64decode(entry["data"]))
            value = torch.frombuffer(data, dtype=getattr(torch, entry["dtype"]))
            buffer = self._model.get_buffer(name) if name in self._first else None
            if buffer is None or buffer.numel() != value.numel():
                raise OffloadError(f"the commit to resume from has a buffer {name} of another size")
            buffer.copy_(value.view(buffer.shape))


__all__ = ["LearntBuffers", "Saved"]
