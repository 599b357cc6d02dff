"""Reading a model that is trained, parameter by parameter, to write it."""

from __future__ import annotations

from types import TracebackType

import torch

from offload.errors import OffloadError
from offload.train.engine import Engine
from offload.train.weights import Entry


class HeldReader:
    """Elements of parameters and buffers, current. The block that was read last is held until
    another is: it is asked for piece by piece, and unpacking it each time would take hours."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._held: Entry | None = None

    def __call__(self, name: str, start: int, count: int) -> torch.Tensor:
        """Elements ``start:start+count`` of a parameter (by any of its names), flat."""
        try:
            places = self._engine.places_of(name)
        except OffloadError:
            buffers = dict(self._engine.model.named_buffers(remove_duplicate=False))
            if name not in buffers:
                raise
            return buffers[name].reshape(-1)[start : start + count]
        out: list[torch.Tensor] = []
        for block, i in places:
            piece = self._engine.layout.blocks[block].pieces[i]
            low, high = max(start, piece.start), min(start + count, piece.start + piece.count)
            if low < high:
                at = piece.offset - piece.start
                out.append(self._hold(block).copy(at + low, at + high))
        if sum(t.numel() for t in out) != count:
            raise OffloadError(f"{name} has no elements {start} to {start + count}")
        return out[0] if len(out) == 1 else torch.cat(out)

    def _hold(self, block: int) -> Entry:
        if self._held is None or self._held.block.index != block:
            self._let_go()
            self._held = self._engine.weights.acquire(block)
        return self._held

    def _let_go(self) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            self._engine.weights.release(held.block.index)

    def __enter__(self) -> HeldReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._let_go()


__all__ = ["HeldReader"]
