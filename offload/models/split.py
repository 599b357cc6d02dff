"""Units smaller than a layer, where it is safe.

A ring must hold the largest step whole, and what the ring takes cannot pin weights. A layer of a
large model is a coarse step; its projections, each a module of its own, are finer ones. That is
right only if nothing reads a projection's weight from outside of its forward, so it is tried: a
prompt and a decode step of the model on the meta device (convolutions of recurrent blocks are read
from outside in the latter only) with every parameter absent except inside its own unit.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from offload.models.absent import absent
from offload.models.expert_groups import expert_groups
from offload.models.footprint import meta_forward
from offload.models.units import unit_modules

logger = logging.getLogger(__name__)

STEP_BYTES = 32 * 2**20
"""Units above this size are split into their children, if they have any."""


def fine_units(model: Any) -> list[tuple[str, nn.Module]]:
    """The units to stream: layers, or the modules of large layers where that is shown safe."""
    layers = unit_modules(model)
    experts = {id(p.tensor) for g in expert_groups(model) for p in g.params}
    fine = split(layers, experts, STEP_BYTES)
    if len(fine) > len(layers) and is_closed(model, fine, experts):
        return fine
    return layers


def split(
    units: list[tuple[str, nn.Module]], experts: set[int], step_bytes: int
) -> list[tuple[str, nn.Module]]:
    """``units`` with the large ones replaced by their descendants, in order of registration.

    ``experts``: identities of parameters that are streamed by themselves and do not count.
    A module with large parameters of its own (not of a child) stays whole.
    """
    out: list[tuple[str, nn.Module]] = []
    for path, module in units:
        out += _split(path, module, experts, step_bytes)
    return out


def _split(
    path: str, module: nn.Module, experts: set[int], step_bytes: int
) -> list[tuple[str, nn.Module]]:
    size = _size(module.parameters(), experts)
    own = _size(module.parameters(recurse=False), experts)
    children = [(n, c) for n, c in module.named_children() if any(True for _ in c.parameters())]
    if size <= step_bytes or not children or own > step_bytes // 16:
        return [(path, module)]
    out: list[tuple[str, nn.Module]] = []
    for name, child in children:
        where = f"{path}.{name}"
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            for sub, grandchild in child.named_children():
                out += _split(f"{where}.{sub}", grandchild, experts, step_bytes)
        else:
            out += _split(where, child, experts, step_bytes)
    return out


def _size(parameters: Any, experts: set[int]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters if id(p) not in experts)


def is_closed(model: Any, units: list[tuple[str, nn.Module]], experts: set[int]) -> bool:
    """Whether a prompt and a decode step read the units' parameters only inside their forwards.

    ``model``: on the meta device; left as it was. False also if the pass cannot run on meta.
    """
    handles: list[Any] = []
    restore: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    try:
        for _, unit in units:
            spots = [
                (module._parameters, attr, tensor)
                for module in unit.modules()
                for attr, tensor in module._parameters.items()
                if tensor is not None and id(tensor) not in experts
            ]
            stand_ins = [absent(attr, tensor, tensor.device) for _, attr, tensor in spots]
            restore += spots

            def enter(_: nn.Module, __: Any, spots: Any = spots) -> None:
                for parameters, attr, tensor in spots:
                    parameters[attr] = tensor

            def leave(
                _: nn.Module, __: Any, ___: Any, spots: Any = spots, stand_ins: Any = stand_ins
            ) -> None:
                for (parameters, attr, _tensor), stand_in in zip(spots, stand_ins, strict=True):
                    parameters[attr] = stand_in

            leave(unit, None, None)
            handles.append(unit.register_forward_pre_hook(enter))
            handles.append(unit.register_forward_hook(leave, always_call=True))
        meta_forward(model, tokens=4, batch=1, decode=True)
        return True
    except Exception as error:  # noqa: BLE001  whatever fails: not shown to be safe
        logger.info("layers are streamed whole: %s", error)
        return False
    finally:
        for handle in handles:
            handle.remove()
        for parameters, attr, tensor in restore:
            parameters[attr] = tensor
