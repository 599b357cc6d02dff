"""Bytes that a training step needs besides weights, gradients and states; nothing is computed.

Each different unit is run forward and backward on the meta device, on inputs of the shapes that the
model really calls it with, and every storage that exists at a time is counted.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from offload.models.expert_groups import expert_groups
from offload.models.footprint import LiveBytes, buffers_on_meta, stub_experts, widest
from offload.models.meta_attention import CardAttention, CpuAttention
from offload.models.meta_ops import KnownResults
from offload.models.params import parameters
from offload.train.passing import without_caches
from offload.train.row_grads import RowGradient, taking_rows

logger = logging.getLogger(__name__)


class Given(NamedTuple):
    """A tensor that a unit is called with."""

    number: int
    """The same for the same tensor, whoever is called with it."""
    nbytes: int
    maker: int
    """The unit that returned it, in the order of modules; -1: none did."""


class Makers:
    """Which unit has returned a tensor. What has been returned stays, so that nothing else can be
    where it was."""

    def __init__(self) -> None:
        self._made: dict[Any, int] = {}
        self._alive: list[Any] = []

    @staticmethod
    def place(tensor: torch.Tensor) -> Any:
        """What tells tensors from each other."""
        storage = tensor.untyped_storage()._cdata
        return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype

    def returned(self, module: nn.Module, args: Any, out: Any) -> None:
        """A forward hook."""
        del args
        leaves = [x for x in tree_flatten(out)[0] if isinstance(x, torch.Tensor)]
        self._alive.append(leaves)
        self._made.update({self.place(x): id(module) for x in leaves})

    def of(self, tensor: torch.Tensor) -> int | None:
        """The identity of the module that returned it, the last one that did."""
        return self._made.get(self.place(tensor))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainFootprint:
    """Bytes for one micro-batch."""

    unit_bytes: int
    """Most that running a unit again and its backward holds at once, of the gradients of its
    weights one at a time."""
    boundary_bytes: int
    """Inputs of all units that are kept for backward."""
    shared_bytes: int
    """What all units get alike (masks, position embeddings), and what is outside of them."""
    measured: bool
    inputs: tuple[int, ...] = ()
    """Of each unit, bytes of its input if that can leave RAM until backward; else 0."""
    graphs: tuple[int, ...] = ()
    """Of each unit, bytes that autograd keeps of its forward for backward."""
    arguments: tuple[int, ...] = ()
    """Of each unit, bytes of all tensors that it is called with."""
    results: tuple[int, ...] = ()
    """Of each unit, bytes of all tensors that it returns."""
    given: tuple[tuple[Given, ...], ...] = ()
    """Of each unit, the tensors that it is called with, its input first."""


def measure_training(
    model: Any, units: list[nn.Module], rows: int, length: int,
    tables: Collection[torch.Tensor] = (), card_flash: bool | None = None,
) -> TrainFootprint:  # fmt: skip
    """The footprint of ``rows`` x ``length`` tokens. ``model`` is on meta and not changed.

    ``tables``: parameters whose gradients from lookups leave by rows. ``card_flash``: the units run
    on a card, and whether flash attention does; None: the CPU computes.
    """
    attention: contextlib.AbstractContextManager[Any] = CpuAttention()
    if card_flash is not None:
        attention = CardAttention(card_flash)
    try:
        return _measure(model, units, rows, length, tables, attention)
    except Exception as error:  # noqa: BLE001  data-dependent code refuses meta tensors
        logger.info("activations are estimated by formula: %s", error)
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else None
    hidden = int(getattr(config, "hidden_size", 1024))
    inner = widest(getattr(config, "intermediate_size", None)) or 4 * hidden
    heads = int(getattr(config, "num_attention_heads", 16))
    tokens = rows * length
    size = max((p.element_size() for p in model.parameters()), default=4)
    largest = max((sum(p.nbytes for p in parameters(u).values()) for u in units), default=0)
    return TrainFootprint(
        unit_bytes=tokens * (24 * hidden + 10 * inner) * size
        + 3 * rows * heads * length * length * size
        + largest
        + _expert_bytes(model, tokens),
        boundary_bytes=len(units) * tokens * hidden * size,
        shared_bytes=6 * tokens * hidden * size + rows * length * length * 4,
        measured=False,
    )


def unit_calls(
    model: Any, units: list[nn.Module], rows: int, length: int, *, masked: bool = True,
    makers: Makers | None = None,
) -> dict[int, tuple[Any, Any]]:  # fmt: skip
    """With what the model calls its units for ``rows`` x ``length`` tokens: by the identity of the
    module (args, kwargs) on meta, without caches. ``model`` is on meta.

    ``masked``: with a mask of four dimensions, as packed rows have; it is made of values, which
    meta tensors lack, so it is given from outside. Some families refuse it. ``makers``: told what
    units return.
    """
    ids = torch.zeros((rows, length), dtype=torch.int64, device="meta")
    given: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if masked:
        mask = torch.ones((rows, 1, length, length), dtype=torch.bool, device="meta")
        given["attention_mask"] = mask
        if "position_ids" in inspect.signature(type(model).forward).parameters:
            given["position_ids"] = torch.zeros_like(ids)  # each row's own
    else:
        # With a cache transformers asks no values whether rows are packed; units never get it.
        given["use_cache"] = True
    calls: dict[int, tuple[Any, Any]] = {}

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls[id(module)] = without_caches(args, kwargs)

    with contextlib.ExitStack() as stack:
        for unit in units:
            stack.callback(unit.register_forward_pre_hook(hook, with_kwargs=True).remove)
            if makers is not None:
                stack.callback(unit.register_forward_hook(makers.returned).remove)
        for group in expert_groups(model):
            stack.enter_context(stub_experts(group.module, group.n_experts))
        stack.enter_context(buffers_on_meta(model))
        with torch.no_grad(), KnownResults():
            model(**given)
    return calls


def any_unit_calls(
    model: Any, units: list[nn.Module], rows: int, length: int, makers: Makers | None = None
) -> dict[int, tuple[Any, Any]]:
    """``unit_calls`` with a mask, or without where the family takes none of that shape."""
    try:
        return unit_calls(model, units, rows, length, makers=makers)
    except Exception as error:  # noqa: BLE001  any code may refuse it in its own way
        logger.debug("no mask of four dimensions: %s", error)
    return unit_calls(model, units, rows, length, masked=False, makers=makers)


def _measure(
    model: Any, units: list[nn.Module], rows: int, length: int, tables: Collection[torch.Tensor],
    attention: contextlib.AbstractContextManager[Any],
) -> TrainFootprint:  # fmt: skip
    """Raises whatever an operation raises that cannot work without data."""
    makers = Makers()
    calls = any_unit_calls(model, units, rows, length, makers)
    with contextlib.ExitStack() as stack:
        for group in expert_groups(model):
            stack.enter_context(stub_experts(group.module, group.n_experts))
        stack.enter_context(buffers_on_meta(model))
        stack.enter_context(attention)
        stack.enter_context(taking_rows({id(table): _forget_rows for table in tables}))
        weights = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        kept: dict[int, int] = {}
        shared: dict[int, int] = {}
        inputs: dict[int, int] = {}
        peak = 0
        seen: dict[Any, tuple[int, int, int]] = {}
        graphs: dict[int, int] = {}
        arguments: dict[int, int] = {}
        results: dict[int, int] = {}
        given: dict[int, tuple[Given, ...]] = {}
        numbers: dict[Any, int] = {}
        order = {id(unit): i for i, unit in enumerate(units)}
        for unit in units:
            if id(unit) not in calls:
                continue
            leaves, spec = tree_flatten(calls[id(unit)])
            tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
            key = (type(unit), tuple((tuple(t.shape), t.dtype) for t in tensors),
                   sum(p.nbytes for p in parameters(unit).values()))  # fmt: skip
            for i, tensor in enumerate(tensors):
                storage = tensor.untyped_storage()
                (kept if i == 0 else shared)[storage._cdata if i else id(unit)] = storage.nbytes()
                if i == 0 and tensor.is_floating_point() and tensor.is_contiguous():
                    inputs[id(unit)] = min(tensor.nbytes, storage.nbytes())
            if key not in seen:
                seen[key] = _unit_peak(unit, leaves, spec, weights)
            peak = max(peak, seen[key][0])
            graphs[id(unit)] = seen[key][1]
            arguments[id(unit)] = sum(t.nbytes for t in tensors)
            results[id(unit)] = seen[key][2]
            given[id(unit)] = tuple(
                Given(
                    numbers.setdefault(place, len(numbers)),
                    t.nbytes,
                    -1 if maker is None else order[maker],
                )
                for t in tensors
                for place, maker in ((makers.place(t), makers.of(t)),)
            )
    return TrainFootprint(
        unit_bytes=peak + _expert_bytes(model, rows * length),
        boundary_bytes=sum(kept.values()),
        # The mask of packed or padded rows is made of their values, which meta tensors lack: as
        # bool, and in the compute dtype inside the attention.
        shared_bytes=sum(shared.values())
        + 4 * max(kept.values(), default=0)
        + rows * length * length * 4,
        measured=True,
        inputs=tuple(inputs.get(id(unit), 0) for unit in units),
        graphs=tuple(graphs.get(id(unit), 0) for unit in units),
        arguments=tuple(arguments.get(id(unit), 0) for unit in units),
        results=tuple(results.get(id(unit), 0) for unit in units),
        given=tuple(given.get(id(unit), ()) for unit in units),
    )


def _unit_peak(
    unit: nn.Module, leaves: list[Any], spec: Any, weights: set[int]
) -> tuple[int, int, int]:  # fmt: skip
    """(most bytes of forward and backward, bytes that are kept between the two, bytes that it
    returns)"""
    inputs = [
        x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, torch.Tensor) else x
        for x in leaves
    ]
    args, kwargs = tree_unflatten(inputs, spec)
    watch = LiveBytes(weights)
    # Gradients leave as they come; whoever keeps them counts them.
    handles = [
        p.register_post_accumulate_grad_hook(_forget) for p in unit.parameters() if p.requires_grad
    ]
    try:
        with torch.enable_grad(), watch:
            out, _ = tree_flatten(unit(*args, **kwargs))
            graph = watch.live()
            returned = sum(x.nbytes for x in out if isinstance(x, torch.Tensor))
            outs = [x for x in out if isinstance(x, torch.Tensor) and x.requires_grad]
            grads = [torch.empty_like(x) for x in outs]
            if outs:  # none of a frozen embedding's
                torch.autograd.backward(outs, grads)
    finally:
        for handle in handles:
            handle.remove()
    return watch.peak, graph, returned


def _forget_rows(rows: RowGradient) -> None:
    del rows


def _forget(param: torch.Tensor) -> None:
    param.grad = None


def _expert_bytes(model: Any, tokens: int) -> int:
    """What the experts' loop saves for backward: its inputs and inner values of all routed tokens.
    The stand-in that counts the rest has no loop."""
    groups = expert_groups(model)
    if not groups:
        return 0
    from offload.models.request import expert_top_k

    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else None
    top = expert_top_k(config)
    most = 0
    for group in groups:
        widths = [max(p.tensor.shape[1:]) for p in group.params]
        size = group.params[0].tensor.element_size()
        expert = sum(p.nbytes for p in group.params) // group.n_experts
        most = max(most, tokens * top * (3 * sum(widths)) * size + 3 * expert)
    return most
