"""A model on meta cut into what a pack holds.

Modules that compute on packed bytes take the place of linear layers; each block knows where it
goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from offload.blocks import BlockSpec
from offload.cpu_ops.formats import get_format
from offload.errors import CheckpointError, UnsupportedModelError
from offload.io.pack_manifest import Kind, Layout, again
from offload.models.absent import absent
from offload.models.expert_groups import ExpertGroup, expert_groups, find_gate
from offload.models.meta import note_unused
from offload.models.naming import model_name
from offload.models.pack_reader import PackedModel
from offload.models.packed_modules import PackedLinear, expert_layout_of
from offload.models.params import Param, Place, parameters
from offload.models.units import Cut, RowEmbedding, Unit, unit_modules


def cut_packed(model: Any, pack: PackedModel) -> tuple[Cut, dict[str, Param]]:
    """Replace what is packed by modules that compute on it; returns the blocks and where they go,
    and what stays resident.

    Raises:
        CheckpointError: a weight of the model is not in the pack, or has another shape there.
        UnsupportedModelError: experts that no kernel can compute.
    """
    units = {id(m): Unit(path, m) for path, m in unit_modules(model)}
    groups = {g.name: g for g in expert_groups(model)}
    names = model.state_dict().keys()
    unused = [n for n in pack.tensors if n not in names]
    note_unused(model_name(pack.path), model, unused + [n for n in pack.experts if n not in groups])
    params = parameters(model)
    in_group = {id(t) for g in groups.values() for t in g.module.parameters()}
    result = Cut([], {}, {}, [], [], None, None, [])
    outside: list[Unit] = []
    embedding = _embedding(model)
    for param in params.values():
        if id(param.tensor) in in_group:
            continue
        found = next((pack.tensors[n] for n in param.names if n in pack.tensors), None)
        if found is None:
            raise CheckpointError(
                f"{model_name(pack.path)}: {param.name} is not in the pack; {again(pack.path)}"
            )
        if found.part.shape != tuple(param.tensor.shape):
            raise CheckpointError(
                f"{model_name(pack.path)}: {param.name} is {list(found.part.shape)} in the "
                f"pack and {list(param.tensor.shape)} in config.json; {again(pack.path)}"
            )
        if found.part.layout is Layout.PLAIN:
            continue
        spec = found.block.spec()
        for place in param.places:
            if place.module is embedding:
                continue
            linear = place.module
            if not isinstance(linear, nn.Linear) or place.attr != "weight":
                raise UnsupportedModelError(
                    f"{param.name} is packed but used by a {type(linear).__name__}"
                )
            path = _path_of(model, linear)
            packed = PackedLinear(
                param.name, get_format(found.part.format), linear, found.part.nbytes
            )
            _put(model, path, packed)
            spot = Param(
                found.part.name, packed.packed, [Place(packed, "packed")], [f"{path}.packed"]
            )
            result.blocks[spec.id] = spec
            result.params.setdefault(spec.id, []).append(spot)
            owner = _owner(units, path)
            if owner is None:
                owner = Unit(path, packed)
                outside.append(owner)
            if spec.id not in owner.blocks:
                owner.blocks += (spec.id,)
    _cut_table(embedding, params, pack, result)
    _cut_experts(model, pack, groups, units, result)
    # Now: a linear layer's bias has moved to the module that took its place.
    resident: dict[str, Param] = {}
    for param in parameters(model).values():
        found = next((pack.tensors[n] for n in param.names if n in pack.tensors), None)
        if found is not None and found.part.layout is Layout.PLAIN:
            # A tied pair on meta may be two parameters, and is stored once.
            first = resident.setdefault(found.part.name, param)
            if first is not param:
                first.places += param.places
                first.names += param.names
    result.units = [u for u in (*units.values(), *outside) if u.blocks or u.groups]
    return result, resident


def _cut_table(embedding: Any, params: Mapping[int, Param], pack: PackedModel, result: Cut) -> None:
    """A table of rows gets a place in the plan: in memory if there is room left, else on disk."""
    param = params.get(id(getattr(embedding, "weight", None)))
    if param is None:
        return
    name = next(n for n in param.names if n in pack.tensors)
    found = pack.tensors[name]
    if found.part.layout is not Layout.ROWS or found.block.name in result.blocks:
        return  # small and plain, or tied to the head, whose block it is
    spec = found.block.spec()
    result.blocks[spec.id] = spec
    result.params[spec.id] = []
    path = name.rpartition(".")[0]
    result.embedding = RowEmbedding(path, embedding, param, spec.id)


def _cut_experts(
    model: Any,
    pack: PackedModel,
    groups: Mapping[str, ExpertGroup],
    units: Mapping[int, Unit],
    result: Cut,
) -> None:
    known = parameters(model)
    for name, group in groups.items():
        if name not in pack.experts:
            raise CheckpointError(
                f"{model_name(pack.path)}: the experts {name} are not in the pack"
            )
        packed = pack.experts[name]
        if len(packed.blocks) != group.n_experts:
            raise CheckpointError(
                f"{model_name(pack.path)}: {name} has {len(packed.blocks)} experts in the pack and "
                f"{group.n_experts} in config.json"
            )
        expert_layout_of(packed, group.module)
        owner = _owner(units, name)
        if owner is None:
            raise UnsupportedModelError(f"the experts {name} are outside of every layer")
        group.gate = find_gate(model, group, known)
        own = group.module._parameters
        for attr, tensor in list(own.items()):
            if tensor is not None:
                own[attr] = absent(f"{name}.{attr}", tensor, torch.device("cpu"))
        group.params = []
        group.blocks = packed.blocks
        owner.groups.append(group)
        result.groups.append(group)
    specs: dict[str, BlockSpec] = {b.name: b.spec() for b in pack.blocks(Kind.EXPERT)}
    for group in result.groups:
        for block in group.blocks:
            result.blocks[block] = specs[block]
            result.params[block] = []


def _embedding(model: Any) -> Any:
    try:
        return model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def _path_of(model: nn.Module, module: nn.Module) -> str:
    return next(path for path, found in model.named_modules() if found is module)


def _owner(units: Mapping[int, Unit], path: str) -> Unit | None:
    return next(
        (u for u in units.values() if path == u.name or path.startswith(u.name + ".")), None
    )


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    owner = model.get_submodule(parent) if parent else model
    owner._modules[leaf] = module


__all__ = ["cut_packed"]
