"""Tiles in a dict, with the protocol of the durable ones."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from offload.blocks import align_up


class MemoryTiles:
    def __init__(self, parts: list[tuple[int, ...]]) -> None:
        self.parts = parts
        self.slots: dict[int, tuple[bytes, list[bool]]] = {}
        self.read_bytes = self.written_bytes = 0

    def _offsets(self, tile: int) -> list[int]:
        out = [0]
        for size in self.parts[tile]:
            out.append(out[-1] + align_up(size))
        return out

    def written(self, tile: int) -> bool:
        return tile in self.slots

    def has(self, tile: int, part: int) -> bool:
        return self.slots[tile][1][part]

    def read_into(
        self, tile: int, first: int, last: int, dst: memoryview, priority: int = 0
    ) -> Future[Any]:
        data, present = self.slots[tile]
        assert all(present[first : last + 1]), (tile, first, last)
        at = self._offsets(tile)
        end = at[last] + self.parts[tile][last]
        dst[: end - at[first]] = data[at[first] : end]
        self.read_bytes += end - at[first]
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    def write_from(self, tile: int, src: memoryview, parts: Any = None) -> Future[Any]:
        present = [True] * len(self.parts[tile]) if parts is None else list(parts)
        self.slots[tile] = bytes(src), present
        self.written_bytes += len(src)
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    def close(self) -> None:
        pass
