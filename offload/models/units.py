"""Cut a model into units that run one after the other, and their weights into blocks.

A *unit* is a module whose parameters are used only inside its own forward: a layer of a repeated
list, or a large leaf outside of one. Its weights are needed when it is called and can go when it
returns. Inside a layer, fused experts are cut further: one block for each expert, so that only
routed ones are read. What is small or outside of any unit stays resident.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from offload.blocks import TENSOR_ALIGN, BlockKind, BlockSpec, align_up, layout
from offload.models.expert_groups import ExpertGroup, expert_groups, find_gate
from offload.models.params import Param, parameters
from offload.models.row_tables import rows_readable
from offload.models.sources import PHASED

PART_BYTES = 16 * 2**20
"""Parameters of a unit are packed into blocks of at most about this size: large enough for the
disk to run at full rate, small enough that the ring needs little more than one layer."""

PARTS = 6
"""A unit is cut into about as many blocks if it is small: the finer the blocks, the more of a
budget can be used for pinning, and the less a ring needs beyond one unit."""

SMALL_BYTES = 128 * 2**10
"""Parameters below this (norms, biases, routers of small models) stay resident: streaming them
costs a request each and saves next to nothing."""

LEAF_BYTES = 2**20
"""Leaf modules outside of the repeated lists are streamed from this size on."""

HEAD_SLICE_BYTES = 16 * 2**20
"""An LM head is streamed in slices of about this size."""

_LEAVES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LSTM, nn.GRU, nn.RNN, nn.Bilinear)


@dataclass(slots=True)
class Unit:
    """A module that is entered with its ``blocks`` in place and left when it returns."""

    name: str
    module: nn.Module
    blocks: tuple[str, ...] = ()
    groups: list[ExpertGroup] = field(default_factory=list)


@dataclass(slots=True)
class HeadSlices:
    """An LM head in slices: block ids and the output rows each covers."""

    name: str
    module: nn.Linear
    param: Param
    blocks: tuple[str, ...]
    rows: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class RowEmbedding:
    """An embedding whose rows are read at each use."""

    name: str
    module: nn.Embedding
    param: Param
    block: str


@dataclass(slots=True)
class Cut:
    """A model cut into units and blocks."""

    units: list[Unit]
    blocks: dict[str, BlockSpec]
    params: dict[str, list[Param]]
    """Block id -> the parameters it holds, in the order of ``BlockSpec.tensors``."""
    resident: list[str]
    """Blocks that stay in the compute tier whatever the plan."""
    groups: list[ExpertGroup]
    head: HeadSlices | None
    embedding: RowEmbedding | None
    notes: list[str]
    part_bytes: int = PART_BYTES

    def bytes_of(self, ids: Iterator[str] | list[str]) -> int:
        return sum(self.blocks[b].slot_nbytes for b in ids)


def unit_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children of repeated lists, in order; lists inside a unit are not opened, except
    where a few very large children (the stages of a vision backbone) are lists themselves."""
    total = sum(p.nbytes for p in parameters(model).values())
    units: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()

    def size(module: nn.Module) -> int:
        return sum(p.nbytes for p in parameters(module).values())

    def is_list(module: nn.Module) -> bool:
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            return False
        return sum(any(True for _ in c.parameters()) for c in module) >= 2

    def take(path: str, module: nn.Module) -> None:
        if id(module) in seen or not any(True for _ in module.parameters()):
            return
        own_forward = type(module).forward is not nn.Module.forward and not isinstance(
            module, (nn.ModuleList, nn.ModuleDict)
        )
        if not own_forward or (size(module) > total / 3 and has_dominant_list(module)):
            seen.add(id(module))
            walk(path, module)
            return
        seen.add(id(module))
        units.append((path, module))

    def has_dominant_list(module: nn.Module) -> bool:
        return any(
            is_list(m) and "expert" not in name and size(m) > 0.8 * size(module)
            for name, m in module.named_modules()
            if m is not module
        )

    def walk(path: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            where = f"{path}.{name}" if path else name
            if is_list(child):
                for sub, grandchild in child.named_children():
                    take(f"{where}.{sub}", grandchild)
            elif isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                take(where, child)
            else:
                walk(where, child)

    if is_list(model):
        for name, child in model.named_children():
            take(name, child)
    else:
        walk("", model)
    return units


def cut(
    model: nn.Module,
    *,
    stream_head: bool,
    threshold: float = 0.01,
    keep: Container[int] = (),
    modules: list[tuple[str, nn.Module]] | None = None,
    phases: Mapping[str, int] | None = None,
) -> Cut:
    """Cut ``model`` (on any device: only shapes are used) into units and blocks.

    ``stream_head``: put a large LM head into slices and read a large embedding by row; without,
    both stay whole (they fit, or the caller has not shown slices to be bit-equal).
    ``modules``: the units to cut into; None: the children of the repeated lists.
    ``keep``: identities of parameters that are left alone, where and as they are.
    ``phases``: by parameter name, where the resident model's tensor starts within 64 bytes; None:
    where this model's own tensors do. In float32 BLAS sums in another order if that is not a
    multiple of 16, and a model whose weights are views of a mapped file often has such.
    """
    params = {key: p for key, p in parameters(model).items() if key not in keep}
    modules = unit_modules(model) if modules is None else modules
    groups = [g for g in expert_groups(model) if all(id(p.tensor) in params for p in g.params)]
    for param in params.values():
        if phases is not None:
            param.phase = _phase(param.tensor, phases.get(param.name, 0))
        elif not param.tensor.is_meta:
            param.phase = _phase(param.tensor, param.tensor.data_ptr())
    for group in groups:
        for param in group.params:
            param.phase = params[id(param.tensor)].phase
    in_group = {id(p.tensor): (g, p) for g in groups for p in g.params}
    for group in groups:
        group.gate = find_gate(model, group, params)
    gates = {id(g.gate.tensor) for g in groups if g.gate is not None}
    users: dict[int, list[str]] = {key: [] for key in params}
    units: dict[str, Unit] = {}
    for path, module in modules:
        unit = units[path] = Unit(path, module)
        inside = set(map(id, module.modules()))
        unit.groups = [g for g in groups if id(g.module) in inside]
        for key, param in params.items():
            if any(id(place.module) in inside for place in param.places):
                users[key].append(path)
    inside_all = {id(m) for _, module in modules for m in module.modules()}
    notes: list[str] = []

    # A group outside of every unit, or shared by several, is not cut: its forward could run at a
    # time no hook sees.
    homeless = [g for g in groups if sum(g in u.groups for u in units.values()) != 1]
    for group in homeless:
        groups.remove(group)
        for param in group.params:
            in_group.pop(id(param.tensor), None)
        notes.append(f"experts of {group.name} are streamed with their layer")

    unit_bytes = [
        sum(params[k].nbytes for k in params if users[k] == [path] and k not in in_group)
        for path in units
    ]
    mean = sum(unit_bytes) / len(unit_bytes) if unit_bytes else 0
    small = min(SMALL_BYTES, int(mean * threshold))

    part = max(4096, min(PART_BYTES, int(mean / PARTS)))
    result = Cut(list(units.values()), {}, {}, [], groups, None, None, notes, part)
    _cut_embedding_and_head(model, params, inside_all, stream_head, result)
    taken = {id(p.tensor) for ps in result.params.values() for p in ps}

    resident: list[Param] = []
    by_users: dict[tuple[str, ...], list[Param]] = {}
    for key, param in params.items():
        if key in in_group or key in taken:
            continue
        outside = any(id(place.module) not in inside_all for place in param.places)
        if not users[key] or outside:
            leaf = _leaf_unit(model, param) if not users[key] else None
            if leaf is not None:
                by_users.setdefault((leaf.name,), []).append(param)
                if leaf.name not in units:
                    units[leaf.name] = leaf
            else:
                resident.append(param)
        elif param.nbytes <= small or key in gates:
            resident.append(param)
        else:
            by_users.setdefault(tuple(users[key]), []).append(param)

    for names, members in by_users.items():
        label = names[0] if len(names) == 1 else f"{names[0]}+{len(names) - 1}"
        ids = _pack(result, label, members)
        for name in names:
            units[name].blocks += tuple(ids)
    result.resident.extend(_pack(result, "resident", resident))

    for group in groups:
        width = len(str(group.n_experts - 1))
        ids = []
        for e in range(group.n_experts):
            tensors = [(p.name, _dtype(p.tensor), tuple(p.tensor.shape[1:])) for p in group.params]
            starts = [
                _phase(p.tensor, p.phase + e * (p.nbytes // group.n_experts)) for p in group.params
            ]
            spec = layout(
                f"{group.name}#{e:0{width}}", BlockKind.EXPERT, tensors, group.name, starts
            )
            result.blocks[spec.id] = spec
            result.params[spec.id] = group.params
            ids.append(spec.id)
        group.blocks = tuple(ids)
    result.units = [u for u in units.values() if u.blocks or u.groups]
    return result


def demote(result: Cut, bad: list[ExpertGroup]) -> None:
    """Stream the experts of these groups with their layer instead of one by one."""
    for group in bad:
        for block in group.blocks:
            del result.blocks[block], result.params[block]
        owner = next(u for u in result.units if group in u.groups)
        owner.groups.remove(group)
        result.groups.remove(group)
        ids = _pack(result, f"{owner.name}/experts", group.params)
        owner.blocks += tuple(ids)


def _cut_embedding_and_head(
    model: Any,
    params: dict[int, Param],
    inside: set[int],
    stream_head: bool,
    result: Cut,
) -> None:
    """Find the input embedding and the output head, by transformers' own accessors."""
    if not stream_head:
        return
    embedding = _call(model, "get_input_embeddings")
    head = _call(model, "get_output_embeddings")
    names = {id(m): path for path, m in model.named_modules()}
    if isinstance(head, nn.Linear) and _computes_plainly(head):
        param = params.get(id(head.weight))
        places = {id(p.module) for p in param.places} if param else set()
        alone = places <= {id(head), id(embedding)}
        if param and alone and id(head) not in inside and param.nbytes > HEAD_SLICE_BYTES // 4:
            rows, columns = head.weight.shape
            # Whole multiples of 64 rows: the blocking of every kernel divides it.
            per = max(64, HEAD_SLICE_BYTES // (columns * head.weight.element_size()) // 64 * 64)
            starts = range(0, rows, per)
            spans = tuple((s, min(s + per, rows)) for s in starts)
            ids = []
            path = names[id(head)]
            for i, (a, b) in enumerate(spans):
                tensors = [(param.name, _dtype(param.tensor), (b - a, columns))]
                start = _phase(param.tensor, param.phase + a * (param.nbytes // rows))
                spec = layout(f"{path}#{i}", BlockKind.WEIGHT, tensors, phases=[start])
                result.blocks[spec.id] = spec
                result.params[spec.id] = [param]
                ids.append(spec.id)
            result.head = HeadSlices(path, head, param, tuple(ids), spans)
    param = params.get(id(embedding.weight)) if isinstance(embedding, nn.Embedding) else None
    tied = param is not None and result.head is not None and result.head.param is param
    if (
        param
        and id(embedding) not in inside
        and (tied or len(param.places) == 1)
        and param.nbytes > HEAD_SLICE_BYTES // 4
        and rows_readable(embedding)
    ):
        path = names[id(embedding)]
        table = [(param.name, _dtype(param.tensor), tuple(param.tensor.shape))]
        spec = layout(f"{path}#rows", BlockKind.WEIGHT, table)
        result.blocks[spec.id] = spec
        result.params[spec.id] = [param]
        result.embedding = RowEmbedding(path, embedding, param, spec.id)
    elif result.head is not None and len(result.head.param.places) > 1:
        # Whoever else uses the head's weight would find slices of it: keep it whole.
        for block in result.head.blocks:
            del result.blocks[block], result.params[block]
        result.head = None


def _computes_plainly(head: nn.Linear) -> bool:
    """Whether a layer's forward is torch's own, with nobody else's in front of it."""
    return type(head).forward is nn.Linear.forward and "forward" not in head.__dict__


def _leaf_unit(model: nn.Module, param: Param) -> Unit | None:
    """A large standard leaf that is the only user of a parameter, as a unit of its own."""
    if param.nbytes < LEAF_BYTES or len(param.places) != 1:
        return None
    module = param.places[0].module
    if not isinstance(module, _LEAVES) or any(True for _ in module.children()):
        return None
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return None  # of torch's attention, which reads its weight and never calls it
    for path, found in model.named_modules():
        if found is module:
            return Unit(path, module)
    return None


def _pack(result: Cut, label: str, members: list[Param]) -> list[str]:
    """Put parameters, in order, into blocks of about ``PART_BYTES``."""
    ids: list[str] = []
    part: list[Param] = []
    size = 0

    def flush() -> None:
        nonlocal part, size
        if not part:
            return
        tensors = [(p.name, _dtype(p.tensor), tuple(p.tensor.shape)) for p in part]
        starts = [p.phase for p in part]
        spec = layout(f"{label}/{len(ids)}", BlockKind.WEIGHT, tensors, phases=starts)
        result.blocks[spec.id] = spec
        result.params[spec.id] = part
        ids.append(spec.id)
        part, size = [], 0

    for param in members:
        if part and size + param.nbytes > result.part_bytes:
            flush()
        part.append(param)
        size += align_up(param.nbytes, 64)
    flush()
    return ids


def _phase(tensor: torch.Tensor, address: int) -> int:
    """Where within 64 bytes an address is, if ``tensor`` is of a dtype where that changes results.

    Half precision goes through oneDNN, which copies operands into its own layout first.
    """
    return address % TENSOR_ALIGN if tensor.dtype in PHASED else 0


def _call(model: Any, accessor: str) -> Any:
    """An accessor of transformers; None where the model has no such thing."""
    method = getattr(model, accessor, None)
    if method is None:
        return None
    try:
        return method()
    except (NotImplementedError, AttributeError):
        return None


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def head_shape(model: Any) -> tuple[int, int] | None:
    """(vocabulary, width) of the LM head, None without one."""
    head = _call(model, "get_output_embeddings")
    weight = getattr(head, "weight", None)
    return (int(weight.shape[0]), math.prod(weight.shape[1:])) if weight is not None else None
