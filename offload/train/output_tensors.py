"""From the model's parameters back to the tensors of the checkpoint it came from.

``models.sources`` says for every parameter which runs of checkpoint elements it is made of. Read
the other way round, every checkpoint tensor is runs of parameters: an expert's ``w1`` is some rows
of a fused ``gate_up_proj``. What no parameter uses is copied from the source's files.

Where transformers' conversion is no placement (it transposes or permutes), its own reverse is
used, as ``save_pretrained`` does; whether that gives the checkpoint's names and shapes is tried
without data before training starts, and whether converting forth again gives the same values is
checked when they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from offload.blocks import DTYPE_BYTES
from offload.errors import CheckpointError, UnsupportedModelError
from offload.io.safetensors import TensorRange
from offload.io.source_files import SourceFiles
from offload.models.sources import CheckpointMap

CHUNK_ELEMENTS = 2**20
"""At most so many elements are asked for and held at once."""

Parameter = Callable[[str, int, int], torch.Tensor]
"""``parameter(name, start, count)``: these elements, row-major, of the parameter with this name in
the model's ``state_dict`` (a tied one has several), in any float dtype; valid until the next call.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """Elements ``start:start+count`` of a tensor are ``target``'s from ``at`` on.

    ``target`` None: those of the source's own file.
    """

    start: int
    count: int
    target: str | None
    at: int


def check_writable(mapping: CheckpointMap) -> None:
    """Raise UnsupportedModelError where ``OutputTensors`` could not write every tensor."""
    OutputTensors(mapping, _no_values)


def _no_values(name: str, start: int, count: int) -> torch.Tensor:
    raise NotImplementedError(f"no values of {name} were given")


class OutputTensors:
    """Every tensor of the source checkpoint, with the trained values: input of ``write_model``.

    ``tensors`` is ``(name, dtype, shape)`` in the order of the source's files; ``read(name)``
    yields a tensor's values in pieces.

    Floats are written in ``dtype`` (the compute dtype unless given), except parameters that the
    model keeps in another dtype than it computes in (a router's float32 bias): those keep it.
    Tensors the model does not use, and what is no float, are copied as they are.
    """

    def __init__(
        self,
        mapping: CheckpointMap,
        parameter: Parameter,
        *,
        dtype: torch.dtype | None = None,
        trained: Container[str] | None = None,
    ) -> None:
        """Make it before training starts: that is when it can say no, and see what is tied.

        Args:
            mapping: of the model that is trained.
            parameter: gives its values.
            dtype: what floats are written in; None: what the model computes in.
            trained: names to ask ``parameter`` for; the rest has the source's values. None: all
                but buffers.

        Raises:
            UnsupportedModelError: a conversion that cannot be reversed.
        """
        self._mapping = mapping
        self._parameter = parameter
        model = mapping.model
        named = dict(model.named_parameters(remove_duplicate=False))
        self._identity = {name: id(p) for name, p in named.items()}
        # Not "every parameter": a model whose experts are already streamed has given them away.
        buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        everything = mapping.map.sources.keys() - buffers
        self._trained: Container[str] = everything if trained is None else trained
        self._compute: torch.dtype = model.config.dtype
        self._dtype = dtype or self._compute
        self._parts: dict[str, list[Part]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._groups: dict[str, _Group] = {}
        self._last: tuple[_Group, dict[str, torch.Tensor]] | None = None
        self._converted: tuple[str, torch.Tensor] | None = None
        self._files: SourceFiles | None = None
        self._invert()
        self.tensors = self._list()

    def _invert(self) -> None:
        sources = self._mapping.map.sources
        converted: dict[tuple[str, ...], bool] = {}  # in order, each once
        for target, source in sources.items():
            wanted = self._dtype if source.dtype == self._compute else source.dtype
            for name in source.tensors:
                known = self._dtypes.setdefault(name, wanted)
                self._dtypes[name] = torch.promote_types(known, wanted)
            if target not in self._trained:
                continue
            if source.found is None:
                converted[source.tensors] = True
                continue
            at = 0
            for run in source.found.runs:
                self._parts.setdefault(run.name, []).append(Part(run.start, run.count, target, at))
                at += run.count
        for names in converted:
            targets = tuple(t for t, s in sources.items() if s.tensors == names)
            group = _Group(self._mapping, names, targets)
            self._groups.update((name, group) for name in names)
        for name in self._mapping.index.tensors:
            if name not in self._groups:
                self._parts[name] = self._fill(name, self._parts.get(name, []))

    def _fill(self, name: str, parts: list[Part]) -> list[Part]:
        """All elements once: sorted, a tied parameter's second copy dropped, gaps from the file."""
        out: list[Part] = []
        end = 0
        for part in sorted(parts, key=lambda p: (p.start, p.at)):
            if part.start > end:
                out.append(Part(end, part.start - end, None, end))
            elif part.start < end and not self._same(out, part):
                raise UnsupportedModelError(
                    f"{name} is both in {out[-1].target} and in {part.target}, which are trained "
                    f"apart; their values have no single place in a checkpoint like the source's"
                )
            if part.start >= end:
                out.append(part)
            end = max(end, part.start + part.count)
        total = _elements(self._where(name)[1])
        if end < total:
            out.append(Part(end, total - end, None, end))
        return out

    def _same(self, out: list[Part], part: Part) -> bool:
        first = next((p for p in out if p.start == part.start and p.count == part.count), None)
        if first is None or first.target is None or part.target is None:
            return False
        one, two = self._identity.get(first.target), self._identity.get(part.target)
        return one is not None and one == two and first.at == part.at

    def _list(self) -> list[tuple[str, str, tuple[int, ...]]]:
        index = self._mapping.index.tensors
        place = {name: (number, where.offset) for name, (number, where) in index.items()}
        # A group that is converted as a whole stays together: it is in memory once then.
        first = {n: min(place[k] for k in self._groups[n].names) for n in self._groups}
        names = sorted(index, key=lambda n: (first.get(n, place[n]), place[n]))
        return [(n, _name(self._written_as(n)), tuple(index[n][1].shape)) for n in names]

    def _written_as(self, name: str) -> torch.dtype:
        own: torch.dtype = getattr(torch, self._where(name)[1].dtype)
        return self._dtypes.get(name, own) if own.is_floating_point else own

    def _where(self, name: str) -> tuple[int, TensorRange]:
        return self._mapping.index.tensors[name]

    def read(self, name: str) -> Iterator[torch.Tensor]:
        """The values of tensor ``name`` in its dtype, flat, in pieces of at most 1 Mi elements.

        A tensor whose conversion is reversed by transformers comes whole, and everything that
        belongs to this conversion is in memory.

        Raises:
            CheckpointError: a source file cannot be read, or a conversion is not reversed exactly.
        """
        dtype = self._written_as(name)
        group = self._groups.get(name)
        if group is not None:
            if self._last is None or self._last[0] is not group:
                self._last = None  # before the next is made: one group at a time
                self._last = (group, group.values(self._whole))
            yield self._last[1][name].to(dtype).reshape(-1)
            return
        self._last = None
        for part in self._parts[name]:
            for done in range(0, part.count, CHUNK_ELEMENTS):
                count = min(CHUNK_ELEMENTS, part.count - done)
                if part.target is None:
                    values = self._from_file(name, part.at + done, count)
                else:
                    values = self._parameter(part.target, part.at + done, count).reshape(-1)
                yield values.to(dtype)

    def _whole(self, target: str) -> torch.Tensor:
        """A copy of a parameter, or its value in the source if it was not trained."""
        shape = self._mapping.map.sources[target].shape
        if target in self._trained:
            return self._parameter(target, 0, shape.numel()).reshape(shape).clone()
        return self._mapping.convert(target, self._tensor)

    def source(self, target: str, start: int, count: int) -> torch.Tensor:
        """Elements of a parameter as the source's files have them, flat.

        Raises:
            CheckpointError: a source file cannot be read.
        """
        source = self._mapping.map.sources[target]
        if source.found is None:
            if self._converted is None or self._converted[0] != target:
                self._converted = target, self._mapping.convert(target, self._tensor).reshape(-1)
            return self._converted[1][start : start + count]
        out, at = [], 0
        for run in source.found.runs:
            low, high = max(start, at), min(start + count, at + run.count)
            if low < high:
                out.append(self._from_file(run.name, run.start + low - at, high - low))
            at += run.count
        return out[0] if len(out) == 1 else torch.cat(out)

    def _tensor(self, name: str) -> torch.Tensor:
        where = self._where(name)[1]
        return self._from_file(name, 0, _elements(where)).reshape(where.shape)

    def _from_file(self, name: str, start: int, count: int) -> torch.Tensor:
        if self._files is None:
            self._files = SourceFiles(self._mapping.index.files)
        number, where = self._where(name)
        width = DTYPE_BYTES[where.dtype]
        raw = bytearray(count * width)
        self._files.read_into(number, where.offset + start * width, memoryview(raw))
        if not raw:
            return torch.empty(0, dtype=getattr(torch, where.dtype))
        return torch.frombuffer(raw, dtype=getattr(torch, where.dtype))

    def close(self) -> None:
        """Close the source's files. Idempotent."""
        if self._files is not None:
            self._files.close()
            self._files = None

    def __enter__(self) -> OutputTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Group:
    """Tensors and parameters that one conversion of transformers ties together."""

    def __init__(
        self, mapping: CheckpointMap, names: tuple[str, ...], targets: tuple[str, ...]
    ) -> None:
        self._mapping = mapping
        self.names = names
        self._targets = targets
        self._transforms = self._find()

    def _find(self) -> list[Any]:
        """The transforms whose reverse gives exactly the checkpoint's names and shapes."""
        from transformers.conversion_mapping import get_model_conversion_mapping

        model, sources = self._mapping.model, self._mapping.map.sources
        state = {t: torch.empty(sources[t].shape, device="meta") for t in self._targets}
        index = self._mapping.index.tensors
        wanted = {n: tuple(index[n][1].shape) for n in self.names}
        why = "the reverse gives other names or shapes"
        # The second without the renamings of old checkpoints: several old names may have become
        # one, and the reverse of that is a guess.
        for legacy in (True, False):
            transforms = list(get_model_conversion_mapping(model, add_legacy=legacy) or [])
            try:
                made = self._reverse(transforms, state)
            except Exception as error:  # noqa: BLE001 - whatever it raises, it cannot
                why = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
                continue
            if {n: tuple(v.shape) for n, v in made.items()} == wanted:
                return transforms
        raise UnsupportedModelError(
            f"{self.names[0]} and {len(self.names) - 1} more cannot be written after training: "
            f"transformers converts them when it loads ({sources[self._targets[0]].why_not}), and "
            f"its way back does not lead to this checkpoint ({why}); save the model once with "
            f"save_pretrained of transformers and train that"
        )

    def _reverse(
        self, transforms: list[Any], state: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        model = self._mapping.model
        had = "_weight_conversions" in model.__dict__
        before = model.__dict__.get("_weight_conversions")
        model._weight_conversions = transforms
        try:
            made: dict[str, torch.Tensor] = revert_weight_conversion(model, state)
        finally:
            if had:
                model._weight_conversions = before
            else:
                del model._weight_conversions
        if len(made) == len(self.names) == 1:
            return {self.names[0]: next(iter(made.values()))}  # no names to confuse
        return made

    def values(self, parameter: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Every tensor of the group, from the parameters' values now."""
        state = {target: parameter(target) for target in self._targets}
        made = self._reverse(self._transforms, state)
        for target, value in state.items():
            # convert() casts to the dtype the model computes in, so compare in that.
            again = self._mapping.convert(target, made.__getitem__)
            if not torch.equal(again, value.to(again.dtype)):
                raise CheckpointError(
                    f"{target} is not what transformers makes of its own reverse conversion; "
                    f"this version of transformers cannot write {self.names[0]}"
                )
        return made


def _elements(where: TensorRange) -> int:
    return where.nbytes // DTYPE_BYTES[where.dtype]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
