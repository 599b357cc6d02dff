"""Which weights get an adapter: names as peft reads them, and fused experts beside them.

peft has two lists, ``target_modules`` and ``target_parameters``; here one names both, because to a
user ``down_proj`` is a weight of the model whether transformers keeps it in a layer of its own or
in one parameter for all experts. A name is a path or its last parts; what has other characters than
a path is a regular expression for the whole path. Every entry must find something: peft is content
if one of them does, and trains less than was asked for.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offload.errors import OffloadError
from offload.models.expert_groups import expert_groups

logger = logging.getLogger(__name__)

ALL_LINEAR = "all-linear"
"""Every linear layer of the model but the head, peft's shorthand."""

_MAMBA = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
_MAMBA_KERNELS = frozenset({"conv1d", "out_proj"})
"""Layers whose weights the kernels of these model types take without the layer: an adapter would be
passed over wherever such kernels are installed, and peft refuses to load one."""

_PATH = re.compile(r"[\w.]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A weight that gets an adapter."""

    name: str
    """Of the pair, as in ``lora_output``: a linear module's path, a fused parameter's name."""
    module: nn.Module
    path: str
    """Of ``module``."""
    attr: str
    """The weight is ``module._parameters[attr]``."""
    n_in: int
    n_out: int
    transposed: bool
    """It is stored as ``[in, out]`` (Conv1D; the experts of gpt-oss)."""
    experts: int | None
    """The first dimension of a fused weight; None: there is none."""

    @property
    def weight(self) -> str:
        """The weight's name among the model's parameters."""
        return f"{self.path}.{self.attr}" if self.path else self.attr


def find_targets(model: Any, wanted: Sequence[str] | str | None) -> list[Target]:
    """The targets of ``wanted`` in ``model`` (on any device), in the order of its modules.

    Args:
        wanted: names, regular expressions or ``"all-linear"``; a plain string is a single
            expression, as in peft. None: every linear layer of the decoder, without the head.

    Raises:
        OffloadError: an entry that finds nothing, or is no regular expression.
    """
    linear = _linear(model)
    head = _part(model, "get_output_embeddings")
    body = [t for t in linear if t.module is not head]
    if wanted is None:
        decoder = _part(model, "get_decoder") or model
        inside = set(map(id, decoder.modules()))
        # What some families call their decoder is the head.
        found = [t for t in body if id(t.module) in inside] or body
        if not found:
            raise OffloadError(
                f"{type(model).__name__} has no linear layer outside of its head to adapt"
            )
        return found
    everything = [*linear, *_fused(model)]
    taken = _taken_by_kernels(model)
    chosen: set[str] = set()
    for entry in [wanted] if isinstance(wanted, str) else wanted:
        if entry.lower() == ALL_LINEAR:
            matching = body
        else:
            matches = _matcher(entry, isinstance(wanted, str))
            matching = [t for t in everything if matches(t.name)]
            refused = [name for name in taken if matches(name)]
            if refused:
                raise OffloadError(
                    f"LoRA target {entry!r}: {refused[0]} cannot have an adapter, as kernels of "
                    f"{model.config.model_type} models take its weight without the layer (peft "
                    f"does not load one); leave it out"
                )
        if not matching:
            raise OffloadError(
                f"LoRA target {entry!r} is no weight of {type(model).__name__} that can have an "
                f"adapter; there are {', '.join(_leaves(everything))}"
            )
        chosen.update(t.name for t in matching)
    if not chosen:
        raise OffloadError("no LoRA targets were given; leave them out for every linear layer")
    order = {id(m): i for i, m in enumerate(model.modules())}
    found = [t for t in everything if t.name in chosen]
    return sorted(found, key=lambda t: order[id(t.module)])


def _matcher(entry: str, only_pattern: bool) -> Callable[[str], Any]:
    if not only_pattern and _PATH.fullmatch(entry):
        return lambda name: name == entry or name.endswith(f".{entry}")
    try:
        return re.compile(entry).fullmatch
    except re.error as error:
        raise OffloadError(
            f"LoRA target {entry!r} is neither a name nor a regular expression: {error}"
        ) from error


def _linear(model: Any) -> list[Target]:
    from transformers.pytorch_utils import Conv1D

    out = []
    taken = _taken_by_kernels(model)
    for path, module in model.named_modules():
        if (
            isinstance(module, nn.Linear | Conv1D)
            and path not in taken
            and _only_multiplies(module)
        ):
            flipped = isinstance(module, Conv1D)
            rows, columns = module.weight.shape
            n_in, n_out = (rows, columns) if flipped else (columns, rows)
            out.append(
                Target(name=path, module=module, path=path, attr="weight", n_in=n_in, n_out=n_out,
                       transposed=flipped, experts=None)
            )  # fmt: skip
    return out


def _taken_by_kernels(model: Any) -> list[str]:
    if getattr(getattr(model, "config", None), "model_type", None) not in _MAMBA:
        return []
    return [n for n, _ in model.named_modules() if n.rpartition(".")[2] in _MAMBA_KERNELS]


def _only_multiplies(module: nn.Module) -> bool:
    """Whether a linear layer is nothing else. Routers of Llama 4 and Phi-MoE inherit from one and
    return what they chose; others multiply groups apart."""
    from transformers.pytorch_utils import Conv1D

    if type(module).forward in (nn.Linear.forward, Conv1D.forward):
        return True
    weight: Any = module.weight
    columns, rows = weight.shape[::-1]
    x = torch.zeros((2, 3, columns), dtype=weight.dtype, device=weight.device)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            out = module(x)
    except Exception as error:  # noqa: BLE001  whatever it does, it is no plain product
        logger.debug("%s takes no [2, 3, %d]: %s", type(module).__name__, columns, error)
        return False
    return isinstance(out, torch.Tensor) and out.shape == (2, 3, rows)


def _fused(model: Any) -> list[Target]:
    """The matrices of experts that their layer takes one by one. Llama 4 multiplies all at once:
    there is no place where an adapter of one expert could come in."""
    out = []
    for group in expert_groups(model):
        flipped = bool(getattr(group.module, "is_transposed", False))
        for param in group.params:
            if param.tensor.dim() != 3:
                continue
            n_out, n_in = param.tensor.shape[1:][:: -1 if flipped else 1]
            out.append(
                Target(name=param.name, module=group.module, path=group.name,
                       attr=param.places[0].attr, n_in=n_in, n_out=n_out, transposed=flipped,
                       experts=group.n_experts)
            )  # fmt: skip
    return out


def _part(model: Any, accessor: str) -> Any:
    """What one of transformers' accessors gives; None where there is none."""
    get = getattr(model, accessor, None)
    return None if get is None else get()


def _leaves(targets: Iterable[Target]) -> list[str]:
    """The last parts of names: what a user writes."""
    return sorted({t.name.rpartition(".")[2] for t in targets})


__all__ = ["ALL_LINEAR", "Target", "find_targets"]
