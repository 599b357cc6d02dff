"""Which modules hold the fused experts of a layer, and which matrix scores them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from offload.models.params import Param, Place


@dataclass(slots=True)
class ExpertGroup:
    """The fused experts of one layer: parameters ``[E, ...]`` that its forward indexes."""

    name: str
    module: nn.Module
    n_experts: int
    params: list[Param]
    blocks: tuple[str, ...] = ()
    gate: Param | None = None
    """The matrix ``[E, hidden]`` that scores the experts, where one stands beside them."""


def expert_groups(model: nn.Module) -> list[ExpertGroup]:
    """Fused experts whose own eager forward takes them one by one.

    Found by structure: the class dispatches through transformers' experts interface (its forward
    wraps the eager loop), and has parameters whose first dimension is the number of experts.
    """
    groups = []
    for path, module in model.named_modules():
        forward = getattr(type(module), "forward", None)
        if getattr(forward, "__wrapped__", None) is None or not hasattr(module, "has_gate"):
            continue
        n = getattr(module, "num_experts", None)
        own = [(a, t) for a, t in module._parameters.items() if t is not None and t.dim() >= 3]
        if n is None and own:
            n = own[0][1].shape[0]
        params = [
            Param(f"{path}.{a}", t, [Place(module, a)], [f"{path}.{a}"])
            for a, t in own
            if t.shape[0] == n
        ]
        if params and isinstance(n, int) and n > 1:
            groups.append(ExpertGroup(path, module, n, params))
    return groups


def find_gate(model: nn.Module, group: ExpertGroup, params: Mapping[int, Param]) -> Param | None:
    """The gate of a group: the only ``[E, hidden]`` matrix beside its experts, in whatever module.

    Small against a single expert, and needed by every token: it stays resident, so that a layer's
    experts can be guessed before the layer runs.
    """
    parent = model.get_submodule(group.name.rpartition(".")[0])
    inside = set(map(id, group.module.modules()))
    found = {
        id(tensor)
        for module in parent.modules()
        if id(module) not in inside
        for tensor in module._parameters.values()
        if tensor is not None and tensor.dim() == 2 and tensor.shape[0] == group.n_experts
    }
    return params.get(found.pop()) if len(found) == 1 else None
