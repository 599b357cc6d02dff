"""Where the rows of each tensor of an outline lie in a GGUF file.

A matrix of the model is whole rows of one stored tensor wherever that is possible at all, so that
quantised rows keep their bits. A few tensors are not, and are put together from values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NoReturn

from offload.errors import UnsupportedModelError
from offload.io.pack_manifest import Kind
from offload.models.gguf_entries import GGUFEntry, Transform
from offload.models.pack_source import FLOATS, Experts, Outline, Slice, Tensor
from offload.models.recipes import split_rows
from offload.models.sources import Ranges, Source

__all__ = ["Made", "Places", "Stored", "find_places"]


@dataclass(frozen=True, slots=True)
class Stored:
    """Row ``r`` is row ``first + r`` of ``entry`` (by its permutation), to the bit."""

    entry: GGUFEntry
    first: int

    @property
    def format(self) -> str:
        return self.entry.type


@dataclass(frozen=True, slots=True)
class Made:
    """Rows of values in ``format`` (f32, f16 or bf16), made of ``entries``."""

    entries: tuple[GGUFEntry, ...]
    format: str


@dataclass(frozen=True, slots=True)
class Places:
    """Where each tensor (of each expert, or None) is; ``converted`` as in ``Outline``."""

    of: Mapping[tuple[Tensor, int | None], Stored | Made]
    converted: Mapping[str, str]


def find_places(
    outline: Outline, sources: Mapping[str, Source], entries: Iterable[GGUFEntry]
) -> Places:
    """Places of all tensors of ``outline``.

    Args:
        sources: of each parameter, in the published checkpoint that the entries describe.

    Raises:
        UnsupportedModelError: a parameter is not rows of the file and would have to be computed.
    """
    finder = _Finder(sources, entries)
    of: dict[tuple[Tensor, int | None], Stored | Made] = {}
    for item in outline.items:
        if isinstance(item, Experts):
            for tensor in item.parts:
                places = finder.experts(tensor, item.count)
                of.update(((tensor, e), place) for e, place in enumerate(places))
        else:
            of[item, None] = finder.tensor(item)
    return Places(of, finder.converted)


class _Finder:
    def __init__(self, sources: Mapping[str, Source], entries: Iterable[GGUFEntry]) -> None:
        self._sources = sources
        self._entries: dict[str, list[GGUFEntry]] = {}
        self._of_expert: dict[tuple[str, int | None], list[GGUFEntry]] = {}
        for entry in entries:
            self._entries.setdefault(entry.hf_name, []).append(entry)
            self._of_expert.setdefault((entry.hf_name, entry.expert), []).append(entry)
        self.converted: dict[str, str] = {}

    def _found(self, names: Sequence[str]) -> Ranges:
        source = next(self._sources[name] for name in names if name in self._sources)
        if source.found is None:
            _refuse(names[0], f"transformers computes it ({source.why_not})")
        return source.found

    def tensor(self, tensor: Tensor) -> Stored | Made:
        runs = self._found(tensor.names).runs
        entries = tuple(self._entries[runs[0].name])
        if len(runs) != 1 or runs[0].count != prod(entries[0].hf_shape):
            _refuse(tensor.name, f"it is joined from {len(runs)} places")
        if len(entries) == 1 and _rows_as_they_are(tensor, entries[0]):
            return Stored(entries[0], 0)
        return self._made(tensor, entries)

    def _made(self, tensor: Tensor, entries: tuple[GGUFEntry, ...]) -> Made:
        types = {entry.type for entry in entries}
        exact = len(types) == 1 and types <= FLOATS
        if exact and all(e.transform is not Transform.MINUS_ONE for e in entries):
            return Made(entries, types.pop())
        # float32 holds every format's values exactly; half as many bytes would round them.
        if types != {"f32"}:
            why = "its rows are not rows of the file" if len(entries) > 1 else "it is not a matrix"
            self.converted[str(tensor)] = f"{why}: {', '.join(sorted(types))} became f32"
        return Made(entries, "f32")

    def experts(self, tensor: Tensor, count: int) -> list[Stored]:
        if tensor.slice is None:
            _refuse(str(tensor), "it has no place in the experts' stack")
        found = self._found((tensor.slice.param,))
        runs = split_rows(found)
        shape = found.shape[1:]
        places = [
            self._expert(tensor, tensor.slice, e, Ranges(shape, found.dtype, runs[e]))
            for e in range(count)
        ]
        formats = {place.format for place in places}
        if len(formats) > 1:
            _refuse(str(tensor), f"experts of one layer are in {', '.join(sorted(formats))}")
        return places

    def _expert(self, tensor: Tensor, where: Slice, e: int, found: Ranges) -> Stored:
        """``found``: all of the expert that its parameter has."""
        outputs = tensor.shape[0] if tensor.shape else 1
        name = found.runs[0].name
        if len(self._entries[name]) > 1:  # a stack that is published as such
            indices = range(where.base, where.base + where.step * (outputs - 1) + 1, where.step)
            entries = [x for x in self._of_expert[name, e] if _outputs(x) == indices]
            first = 0
        else:
            mine = found.narrow(0, where.base, outputs).runs
            if len(mine) != 1 or where.step != 1 or mine[0].start % tensor.columns:
                _refuse(str(tensor), "its rows are not one behind the other")
            entries = self._entries[mine[0].name]
            first = mine[0].start // tensor.columns
        turned = Transform.TRANSPOSE if where.transposed else Transform.NONE
        if len(entries) != 1 or entries[0].transform is not turned:
            _refuse(str(tensor), f"expert {e} of it is in {len(entries)} pieces of the file")
        if len(tensor.shape) < 2 and entries[0].type not in FLOATS:
            _refuse(str(tensor), f"it is in {entries[0].type} and no matrix")
        return Stored(entries[0], first)


def _rows_as_they_are(tensor: Tensor, entry: GGUFEntry) -> bool:
    """Whether the rows of ``tensor`` are rows of ``entry``, in a type that a pack can hold."""
    if entry.hf_index or entry.transform is not Transform.NONE:
        return False
    if tensor.kind is Kind.PLAIN and entry.type not in FLOATS:
        return False
    return entry.row_permutation is None or len(tensor.shape) == 2


def _outputs(entry: GGUFEntry) -> range:
    """Which outputs of an expert's matrix an entry is; the last dimension of a stack."""
    last = entry.hf_index[-1]
    if not isinstance(last, slice):
        return range(0)
    return range(*last.indices(entry.hf_shape[-1]))


def _refuse(name: str, why: str) -> NoReturn:
    raise UnsupportedModelError(f"{name} cannot be taken from a GGUF file: {why}")
