"""Where each parameter's bytes lie in the checkpoint.

transformers converts checkpoints while loading: it renames, stacks per-expert tensors, joins gate
and up, splits fused tensors. Most of that only *places* bytes. ``Ranges`` is an array that knows
no values, only which bytes of the file each of its elements is; transformers' own conversion
operations run on it (through ``__torch_function__``), so whatever they do by stacking, joining
and splitting turns into a list of file ranges and the weights can be streamed from the original
files. An operation that computes or permutes finely raises ``NotAPlacement``; such parameters are
converted once by transformers itself and kept in a packed file.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch

from offload.blocks import TENSOR_ALIGN
from offload.errors import CheckpointError, UnsupportedModelError
from offload.io.safetensors import CheckpointIndex

_MAX_RUNS = 1_000_000
"""A finer placement than this is a permutation: cheaper to convert than to gather."""

PHASED = (torch.float32, torch.float64)
"""Dtypes in which results depend on where within 64 bytes a tensor starts."""


class NotAPlacement(Exception):
    """The operation does more than place whole runs of bytes."""


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` consecutive elements of checkpoint tensor ``name``, from element ``start``."""

    name: str
    start: int
    count: int


class Ranges:
    """An array of file ranges: a shape, and in row-major order the runs its elements come from."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, runs: list[Run]) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.runs = runs

    @classmethod
    def of(cls, name: str, shape: Sequence[int], dtype: torch.dtype) -> Ranges:
        """The checkpoint tensor ``name`` itself."""
        n = math.prod(shape)
        return cls(shape, dtype, [Run(name, 0, n)] if n else [])

    # What conversion operations read or call on a tensor, besides torch functions.

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return math.prod(self.shape)

    def contiguous(self) -> Ranges:
        return self

    def clone(self) -> Ranges:
        return self

    def reshape(self, *shape: Any) -> Ranges:
        want = list(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else list(shape)
        if -1 in want:
            known = -math.prod(want)
            want[want.index(-1)] = self.numel() // known if known else 0
        if math.prod(want) != self.numel():
            raise NotAPlacement(f"cannot reshape {tuple(self.shape)} to {tuple(want)}")
        return Ranges(want, self.dtype, self.runs)

    view = reshape

    def unsqueeze(self, dim: int) -> Ranges:
        shape = list(self.shape)
        shape.insert(dim if dim >= 0 else len(shape) + 1 + dim, 1)
        return Ranges(shape, self.dtype, self.runs)

    def squeeze(self, dim: int) -> Ranges:
        shape = list(self.shape)
        if shape[dim] == 1:
            del shape[dim]
        return Ranges(shape, self.dtype, self.runs)

    def narrow(self, dim: int, start: int, length: int) -> Ranges:
        """Elements ``start:start+length`` along ``dim``."""
        dim %= len(self.shape)
        inner = math.prod(self.shape[dim + 1 :])
        row = self.shape[dim] * inner
        outer = math.prod(self.shape[:dim])
        spans = [(i * row + start * inner, length * inner) for i in range(outer)]
        shape = list(self.shape)
        shape[dim] = length
        return Ranges(shape, self.dtype, _cut(self.runs, spans))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Ranges, ...]:
        n = self.shape[dim]
        return self.split(max(1, -(-n // chunks)), dim)

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple[Ranges, ...]:
        n = self.shape[dim]
        if isinstance(sizes, int):
            sizes = [min(sizes, n - i) for i in range(0, n, sizes)]
        out, at = [], 0
        for size in sizes:
            out.append(self.narrow(dim, at, size))
            at += size
        return tuple(out)

    def __getitem__(self, key: Any) -> Ranges:
        if key is Ellipsis:
            return self
        if isinstance(key, int) and self.shape:
            picked = self.narrow(0, key % self.shape[0], 1)
            return Ranges(self.shape[1:], self.dtype, picked.runs)
        if isinstance(key, slice) and key.step in (None, 1):
            start, stop, _ = key.indices(self.shape[0])
            return self.narrow(0, start, max(0, stop - start))
        raise NotAPlacement(f"indexing with {key!r}")

    def __getattr__(self, name: str) -> Any:
        raise NotAPlacement(name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLED.get(func)
        if handler is None:
            raise NotAPlacement(getattr(func, "__name__", str(func)))
        return handler(*args, **kwargs)


def _cut(runs: list[Run], spans: Iterable[tuple[int, int]]) -> list[Run]:
    """The runs of ascending ``(start, count)`` spans of a row-major array."""
    out: list[Run] = []
    i, at = 0, 0  # runs[i] starts at element ``at``
    for start, count in spans:
        end = start + count
        while start < end:
            while at + runs[i].count <= start:
                at += runs[i].count
                i += 1
            run = runs[i]
            n = min(end, at + run.count) - start
            out.append(Run(run.name, run.start + start - at, n))
            start += n
    return _join(out)


def _join(runs: Iterable[Run]) -> list[Run]:
    """Merge neighbours that are neighbours in the file too."""
    out: list[Run] = []
    for run in runs:
        last = out[-1] if out else None
        if last and last.name == run.name and last.start + last.count == run.start:
            out[-1] = Run(last.name, last.start, last.count + run.count)
        else:
            out.append(run)
    if len(out) > _MAX_RUNS:
        raise NotAPlacement(f"{len(out)} runs")
    return out


def _cat(tensors: Sequence[Ranges], dim: int = 0) -> Ranges:
    first = tensors[0]
    dim %= len(first.shape)
    if any(t.dtype != first.dtype for t in tensors):
        raise NotAPlacement("joining dtypes")
    for t in tensors:
        if t.shape[:dim] + t.shape[dim + 1 :] != first.shape[:dim] + first.shape[dim + 1 :]:
            raise NotAPlacement("joining shapes that do not fit")
    shape = list(first.shape)
    shape[dim] = sum(t.shape[dim] for t in tensors)
    outer = math.prod(shape[:dim])
    if outer == 1:
        return Ranges(shape, first.dtype, _join(r for t in tensors for r in t.runs))
    rows: list[list[list[Run]]] = []
    for t in tensors:
        n = t.numel() // outer if outer else 0
        rows.append([_cut(t.runs, [(i * n, n)]) for i in range(outer)])
    runs = _join(r for i in range(outer) for part in rows for r in part[i])
    return Ranges(shape, first.dtype, runs)


def _stack(tensors: Sequence[Ranges], dim: int = 0) -> Ranges:
    return _cat([t.unsqueeze(dim) for t in tensors], dim)


_HANDLED: dict[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.concat: _cat,
    torch.stack: _stack,
    torch.chunk: Ranges.chunk,
    torch.split: Ranges.split,
    torch.narrow: Ranges.narrow,
    torch.unsqueeze: Ranges.unsqueeze,
    torch.squeeze: Ranges.squeeze,
    torch.reshape: Ranges.reshape,
}


@dataclass(slots=True)
class Source:
    """How one parameter or buffer of the model is made from the checkpoint.

    ``placed`` is set when its bytes are the file's own bytes, possibly from several places.
    Otherwise ``convert()`` returns it as a tensor of the right dtype (reading the checkpoint).
    """

    target: str
    shape: torch.Size
    dtype: torch.dtype
    tensors: tuple[str, ...]
    placed: Ranges | None
    why_not: str = ""
    found: Ranges | None = None
    """Where its bytes are, also if they still have to be cast from the dtype they are in."""


@dataclass(slots=True)
class SourceMap:
    """All of a model's sources, and what does not match."""

    sources: dict[str, Source]
    missing: list[str]
    unexpected: list[str]
    mismatched: list[str] = field(default_factory=list)


class _Conversion:
    """One converter of transformers with the checkpoint tensors it takes."""

    def __init__(self, converter: Any, first_target: str) -> None:
        self.converter = converter
        self.first_target = first_target
        self.inputs: list[tuple[str, str, str]] = []  # (target, tensor, source pattern)
        self.cuts: dict[str, tuple[str, int]] | None = None  # see ``CheckpointMap._cuts``

    def run(self, model: Any, make: Callable[[str], Any]) -> dict[str, Any]:
        """Convert ``make(name)`` of every input; returns target -> result."""
        converter = deepcopy(self.converter)
        for target, name, pattern in self.inputs:
            converter.add_tensor(target, name, pattern, make(name))
        out = converter.convert(self.first_target, model=model, config=model.config)
        return {k: v[0] if isinstance(v, list) else v for k, v in out.items()}


class CheckpointMap:
    """The bridge between a model on the meta device and a checkpoint on disk."""

    def __init__(self, model: Any, index: CheckpointIndex) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        self.model = model
        self.index = index
        self._mapping = list(get_model_conversion_mapping(model) or [])
        self._conversions: dict[str, _Conversion] = {}
        self._conversion_of: dict[str, _Conversion] = {}
        self.map = self._build()

    def _build(self) -> SourceMap:
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        model = self.model
        expected: dict[str, torch.Tensor] = model.state_dict()
        renamings = [w for w in self._mapping if isinstance(w, WeightRenaming)]
        converters = [w for w in self._mapping if isinstance(w, WeightConverter)]
        by_pattern = {p: c for c in converters for p in c.source_patterns}
        sources: dict[str, Source] = {}
        unexpected: list[str] = []
        mismatched: list[str] = []
        prefix = model.base_model_prefix
        for name in sorted(self.index.tensors, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, expected)
            if target not in expected and name in expected:
                target, pattern = rename_source_key(name, [], [], prefix, expected)
            if target not in expected or target in sources:
                # Of two names that mean one parameter transformers takes the first.
                unexpected.append(name)
            elif pattern is not None:
                conversion = self._conversions.setdefault(
                    target, _Conversion(by_pattern[pattern], target)
                )
                conversion.inputs.append((target, name, pattern))
            elif target in self._conversions:  # it is there, and made of others as well
                self._conversions[target].inputs.append((target, name, name))
            else:
                self._add(
                    sources, mismatched, target, expected[target], self._ranges(name), (name,)
                )
        for conversion in self._conversions.values():
            names = tuple(name for _, name, _ in conversion.inputs)
            why = ""
            try:
                results = conversion.run(model, self._ranges)
            except NotAPlacement as reason:
                why = str(reason)
            except Exception as error:  # noqa: BLE001 - some operations ask for torch's own class
                why = f"{type(error).__name__}: {error}"
            if why:
                results = self._shapes(conversion, names)
            elif any(not _fits(r, expected.get(t)) for t, r in results.items()):
                with contextlib.suppress(CheckpointError):  # then they are mismatched, see below
                    results = self._shapes(conversion, names)
            for target, result in results.items():
                if target not in expected:
                    unexpected.append(target)
                    continue
                placed = result if isinstance(result, Ranges) else None
                self._add(
                    sources, mismatched, target, expected[target], placed or result, names, why
                )
                self._conversion_of[target] = conversion
        missing = [k for k in expected if k not in sources]
        return SourceMap(sources, missing, unexpected, mismatched)

    def _shapes(self, conversion: _Conversion, names: tuple[str, ...]) -> dict[str, Any]:
        """What a conversion makes, without data."""
        try:
            return conversion.run(self.model, self._meta)
        except Exception as error:
            raise CheckpointError(
                f"{conversion.first_target} cannot be made of the {len(names)} tensors "
                f"{names[0]} ... {names[-1]}: {str(error).splitlines()[0]}; some are missing, or "
                f"config.json and the weights are of different models"
            ) from error

    def _add(
        self,
        sources: dict[str, Source],
        mismatched: list[str],
        target: str,
        param: torch.Tensor,
        result: Any,
        names: tuple[str, ...],
        why: str = "",
    ) -> None:
        if tuple(result.shape) != tuple(param.shape):
            mismatched.append(
                f"{target}: {tuple(result.shape)} in the checkpoint, {tuple(param.shape)} in the "
                f"config's model"
            )
        if param.is_floating_point() and not result.dtype.is_floating_point:
            raise UnsupportedModelError(
                f"{names[0]} is in {_name(result.dtype)}, and the model computes with it in "
                f"{_name(param.dtype)}: these are codes, and config.json does not say of what; use "
                f"the unquantised checkpoint of the same model"
            )
        found = placed = result if isinstance(result, Ranges) else None
        if placed is not None and placed.dtype != param.dtype:
            why = f"cast from {_name(placed.dtype)} to {_name(param.dtype)}"
            placed = None
        sources[target] = Source(target, param.shape, param.dtype, names, placed, why, found)

    def _range(self, name: str) -> Any:
        return self.index.tensors[name][1]

    def _ranges(self, name: str) -> Ranges:
        tensor = self._range(name)
        return Ranges.of(name, tensor.shape, getattr(torch, tensor.dtype))

    def _meta(self, name: str) -> torch.Tensor:
        tensor = self._range(name)
        return torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")

    def phase(self, target: str) -> int:
        """Where transformers' own tensor starts within 64 bytes.

        What it neither casts nor converts is a view of the mapped file: wherever the file has it.
        What it converts by cutting alone (a fused projection in two) is a view of the tensor it was
        cut from. Everything else is allocated, and aligned.
        """
        source = self.map.sources[target]
        conversion = self._conversion_of.get(target)
        if conversion is None:
            name, start = source.tensors[0], 0
            if source.placed is None or not source.placed.runs:
                return 0
        elif source.dtype not in PHASED or (cut := self._cuts(conversion).get(target)) is None:
            return 0
        else:
            name, start = cut
        tensor = self.index.tensors[name][1]
        mapped = getattr(torch, tensor.dtype) == source.dtype  # a cast one is allocated
        return ((tensor.offset if mapped else 0) + start) % TENSOR_ALIGN

    def _cuts(self, conversion: _Conversion) -> dict[str, tuple[str, int]]:
        """Of what a conversion makes: which results are views of a tensor it takes, of which, and
        from which byte of it. Tensors without data say so, in transformers' own code."""
        if conversion.cuts is None:
            made: dict[int, str] = {}
            taken: list[torch.Tensor] = []  # alive until compared: storages are told apart by id

            def make(name: str) -> torch.Tensor:
                taken.append(self._meta(name))
                made[taken[-1].untyped_storage()._cdata] = name
                return taken[-1]

            try:
                results = conversion.run(self.model, make)
            except Exception:  # noqa: BLE001 - computed from values: nothing of it is a view
                results = {}
            conversion.cuts = {
                target: (name, result.storage_offset() * result.element_size())
                for target, result in results.items()
                if (name := made.get(result.untyped_storage()._cdata)) is not None
            }
        return conversion.cuts

    def convert(self, target: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """The value of ``target``, made by transformers' own conversion, in its final dtype.

        ``read(name)`` returns a checkpoint tensor. Everything the conversion takes is in memory
        at once.
        """
        source = self.map.sources[target]
        conversion = self._conversion_of.get(target)
        if conversion is None:
            return read(source.tensors[0]).to(source.dtype)
        # transformers casts before it converts; the order matters where an operation computes.
        results = conversion.run(self.model, lambda name: read(name).to(source.dtype))
        return results[target].contiguous()

    def convert_expert(
        self, target: str, expert: int, read_expert: Callable[[str, int], torch.Tensor]
    ) -> torch.Tensor:
        """Slice ``expert`` of a fused expert parameter, converted alone.

        ``read_expert(name, e)`` returns a per-expert checkpoint tensor whole, or rows ``e:e+1``
        of a fused one. Raises CheckpointError if the conversion cannot be done per expert.
        """
        source = self.map.sources[target]
        conversion = self._conversion_of.get(target)
        n_experts = source.shape[0]
        if conversion is None:
            return read_expert(source.tensors[0], expert).to(source.dtype)[0]
        single = _Conversion(conversion.converter, conversion.first_target)
        per_pattern: dict[str, list[tuple[str, str, str]]] = {}
        for item in conversion.inputs:
            per_pattern.setdefault(item[2], []).append(item)
        for pattern, items in per_pattern.items():
            if len(items) == n_experts:
                single.inputs.append(items[expert])
            elif len(items) == 1 and self._range(items[0][1]).shape[:1] == (n_experts,):
                single.inputs.append(items[0])
            else:
                raise CheckpointError(
                    f"{target}: {len(items)} tensors match {pattern!r} for {n_experts} experts"
                )
        results = single.run(self.model, lambda name: read_expert(name, expert).to(source.dtype))
        result = results[target]
        if tuple(result.shape) != (1, *source.shape[1:]):
            raise CheckpointError(f"{target} cannot be converted one expert at a time")
        return result[0].contiguous()


def _fits(result: Any, expected: torch.Tensor | None) -> bool:
    return expected is None or tuple(result.shape) == tuple(expected.shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
