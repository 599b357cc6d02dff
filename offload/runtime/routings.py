"""Recorded routings as the scheduler replays them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from offload.errors import OffloadError
from offload.io.routing_file import NO_EXPERT, Record, RoutingReader
from offload.scheduler.replay import Pass, hottest


class RecordedRouting:
    """A routing file as passes; every iteration reads the file once, in constant memory (plus one
    pass of all layers)."""

    def __init__(
        self,
        path: str | Path,
        *,
        blocks: Mapping[str, Sequence[str]] | None = None,
        as_run: bool = False,
    ) -> None:
        """
        Args:
            blocks: the experts' ids by layer; without, ids are made up.
            as_run: passes as they ran, a prompt in one. False: token by token, as if each had
                been decoded; causal attention routes it the same way.

        Raises:
            RoutingFileError: not a routing.
            OffloadError: of another model than ``blocks``.
        """
        self._reader = RoutingReader(path)
        self.header = header = self._reader.header
        self.path = Path(path)
        self.as_run = as_run
        if blocks is not None:
            here = {layer: len(ids) for layer, ids in blocks.items()}
            there = dict(zip(header.layers, header.experts, strict=True))
            for layer in [*there, *here]:
                if here.get(layer) != there.get(layer):
                    raise OffloadError(
                        f"the routing {path} is of another model"
                        + (f" ({header.model})" if header.model else "")
                        + f": layer {layer} has {there.get(layer, 'no')} experts there and "
                        f"{here.get(layer, 'none')} here; record one of this model with "
                        "--record-routing"
                    )
        self._blocks = [
            list(blocks[layer]) if blocks else [f"{i}.{e}" for e in range(n)]
            for i, (layer, n) in enumerate(zip(header.layers, header.experts, strict=True))
        ]

    @property
    def experts(self) -> int:
        """Experts of all layers."""
        return sum(self.header.experts)

    def __iter__(self) -> Iterator[Pass]:
        """Raises RoutingFileError at the place of the damage."""
        if self.as_run:
            for record in self._reader:
                yield self._pass(record, 0, record.tokens)
            return
        waiting: list[Record] = []
        for record in self._reader:
            same = waiting and waiting[-1].layer < record.layer
            if waiting and not (same and waiting[0].tokens == record.tokens):
                yield from self._by_token(waiting)
                waiting = []
            waiting.append(record)
        yield from self._by_token(waiting)

    def _by_token(self, records: Sequence[Record]) -> Iterator[Pass]:
        for t in range(records[0].tokens if records else 0):
            for record in records:
                yield self._pass(record, t, t + 1)

    def _pass(self, record: Record, start: int, stop: int) -> Pass:
        """Tokens [start, stop) of a record: experts ascending, as every eager loop takes them."""
        blocks, width, chosen = self._blocks[record.layer], record.width, record.chosen
        used: set[int] = set()
        rows = []
        for at in range(start * width, stop * width, width):
            experts = record.experts[at : at + width]
            used.update(experts[:chosen])
            scores = record.scores[at : at + width]
            rows.append(
                {blocks[e]: s for e, s in zip(experts, scores, strict=True) if e != NO_EXPERT}
            )
        used.discard(NO_EXPERT)
        layer = self.header.layers[record.layer]
        return Pass(layer, [blocks[e] for e in sorted(used)], rows)


def hot_experts(path: str | Path, blocks: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """All experts that a recorded routing has used, the most used first.

    Raises:
        OffloadError: no routing, or one of another model, or one without a use.
    """
    found = hottest(RecordedRouting(path, blocks=blocks), sum(map(len, blocks.values())))
    if not found:
        raise OffloadError(f"the routing {path} holds no tokens; record a longer run")
    return tuple(found)
