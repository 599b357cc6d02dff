"""Which tensors of a model are packed as what.

Read off the model's structure on the meta device, by the parameter names that the model itself
has: whoever runs a pack looks its tensors up by those, and any source can be made to fit them.

- Fused experts are cut into experts and those into gate, up and down, row-major ``[out, in]``,
  whether the family stores them transposed, one behind the other or interleaved.
- The weight of a linear layer is a matrix. The output head is one too, of a kind of its own.
- An embedding that is only looked up is a table of rows. Tied to the head it is not there: the
  rows of the packed head serve, sixteen at a time (see ``pack_reader``).
- Everything else is plain: norms, biases, routers, convolutions, small matrices,
  and weights that a model's code reads beside their layer.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import nn

from offload.io.pack_manifest import ROWS_PER_GROUP, Kind
from offload.models.expert_groups import ExpertGroup, expert_groups
from offload.models.pack_source import Experts, Outline, Slice, Tensor
from offload.models.params import Param, Place, parameters
from offload.models.row_tables import rows_readable
from offload.models.weight_reads import read_by_hand

_ORDER = ("gate", "up", "down")


def outline(model: Any, have: Container[str]) -> Outline:
    """The tensors of ``model`` whose names are in ``have``, in the order of its modules."""
    params = parameters(model)
    groups = {id(g.params[0].tensor): g for g in expert_groups(model)}
    inside = {id(p.tensor) for g in groups.values() for p in (*g.params, *_biases(g))}
    plain = _routers(model, list(groups.values()))
    # A matrix that a model multiplies by hand has to be a tensor for it.
    plain |= read_by_hand(model)
    head, embedding = _call(model, "get_output_embeddings"), _call(model, "get_input_embeddings")
    items: list[Tensor | Experts] = []
    for key, param in params.items():
        if key in groups:
            group = groups[key]
            fused = (*group.params, *_biases(group))
            parts = [t for p in fused for t in _expert_parts(group, p)]
            # The matrices first and in this order, whatever stands between them in the module.
            parts.sort(key=lambda t: _ORDER.index(t.name) if t.name in _ORDER else len(_ORDER))
            items.append(Experts(name=group.name, count=group.n_experts, parts=tuple(parts)))
        elif key not in inside and any(name in have for name in param.names):
            kind = Kind.PLAIN if key in plain else _kind(param, head, embedding)
            items.append(Tensor(names=_names(param, head), kind=kind, shape=_shape(param.tensor)))
    taken = {name for p in params.values() for name in p.names}
    for name, buffer in model.state_dict().items():
        if name not in taken and name in have:
            items.append(Tensor(names=(name,), kind=Kind.PLAIN, shape=_shape(buffer)))
    config = model.config
    facts = {
        "model_type": str(config.model_type),
        "architecture": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    return Outline(items=tuple(items), facts=facts)


def _biases(group: ExpertGroup) -> list[Param]:
    """Biases ``[E, outputs]``: streamed from a checkpoint they stay with their layer, because they
    are small; in a pack an expert has all that it computes with."""
    return [
        Param(f"{group.name}.{attr}", tensor, [Place(group.module, attr)], [f"{group.name}.{attr}"])
        for attr, tensor in group.module._parameters.items()
        if tensor is not None
        and attr.endswith("_bias")
        and tensor.dim() == 2
        and tensor.shape[0] == group.n_experts
    ]


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in tensor.shape)


def _call(model: Any, accessor: str) -> Any:
    try:
        return getattr(model, accessor)()
    except (AttributeError, NotImplementedError):
        return None


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _routers(model: nn.Module, groups: list[ExpertGroup]) -> set[int]:
    """Parameters that score experts: ``[E, hidden]``, in the module that holds the experts."""
    found = set()
    for group in groups:
        within = set(map(id, group.module.modules()))
        for module in model.get_submodule(group.name.rpartition(".")[0]).modules():
            if id(module) not in within:
                found |= {
                    id(tensor)
                    for tensor in module._parameters.values()
                    if tensor is not None and tensor.shape[:1] == (group.n_experts,)
                }
    return found


def _kind(param: Param, head: Any, embedding: Any) -> Kind:
    users = [place.module for place in param.places]
    if param.tensor.dim() != 2 or param.tensor.shape[0] < ROWS_PER_GROUP:
        return Kind.PLAIN
    looked_up = embedding is not None and embedding in users
    if looked_up and not rows_readable(embedding):
        return Kind.PLAIN
    others = [m for m in users if m is not embedding]
    if not all(_is_linear(m) for m in others):
        return Kind.PLAIN
    if head is not None and head in others:
        return Kind.HEAD
    if looked_up:
        return Kind.ROWS if not others else Kind.PLAIN
    return Kind.MATRIX


def _names(param: Param, head: Any) -> tuple[str, ...]:
    """All names of a parameter; the head's first, if it is the head's as well."""
    order = sorted(
        zip(param.places, param.names, strict=True), key=lambda p: p[0].module is not head
    )
    return tuple(name for _, name in order)


def _expert_parts(group: ExpertGroup, param: Param) -> list[Tensor]:
    """A fused parameter ``[E, ...]`` as parts of an expert."""
    module: Any = group.module
    leaf = param.places[0].attr
    shape = _shape(param.tensor)[1:]
    is_bias = len(shape) == 1
    base = leaf.removesuffix("_bias")
    transposed = bool(getattr(module, "is_transposed", False)) and not is_bias
    suffix = "_bias" if is_bias else ""

    def part(name: str, outputs: int, first: int, step: int) -> Tensor:
        where = Slice(param=param.name, base=first, step=step, transposed=transposed)
        inputs = shape[0] if transposed else shape[-1]
        new = (outputs,) if is_bias else (outputs, inputs)
        kind = Kind.PLAIN if is_bias else Kind.MATRIX
        return Tensor(names=(name,), kind=kind, shape=new, group=group.name, slice=where)

    if len(shape) > 2 or base not in ("gate_up_proj", "up_proj", "gate_proj", "down_proj"):
        # A norm behind the experts, or whatever a family adds: as it is, part of each expert.
        where = Slice(param=param.name)
        return [Tensor(names=(leaf,), kind=Kind.PLAIN, shape=shape, group=group.name, slice=where)]
    outputs = shape[-1] if transposed or is_bias else shape[0]
    if base != "gate_up_proj":
        return [part(base.removesuffix("_proj") + suffix, outputs, 0, 1)]
    half = outputs // 2
    if getattr(module, "is_concatenated", True):
        return [part(f"gate{suffix}", half, 0, 1), part(f"up{suffix}", half, half, 1)]
    return [part(f"gate{suffix}", half, 0, 2), part(f"up{suffix}", half, 1, 2)]
