"""Fine-tuning on a machine that is not here, from a model's config alone.

What lives where follows from sizes, as in a run. Seconds come of the other machine's rates: a
unit's computing is its products, at that machine's rate of products, or the stream of its weights
through memory, whichever takes longer. Norms, softmax and activation functions are not in it: on
the machines where they were measured they added a third to a half to computing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.errors import OffloadError
from offload.models.meta import instantiate, read_config, resolve
from offload.models.naming import model_name
from offload.models.request import expert_top_k
from offload.scheduler.hardware import Card, Hardware
from offload.train.causal import check_causal
from offload.train.choosing import Chosen, Shape, choose
from offload.train.describe import copied_text, seconds_text, stays_text
from offload.train.layout import Block, TrainLayout
from offload.train.options import TrainOptions
from offload.train.pace import Beside
from offload.train.predicting import StepRates
from offload.train.router_loss import check_router_loss
from offload.train.updates import update_workers
from offload.units import format_bytes, format_count

PROCESS_BYTES = 96 << 20
"""Of Python, data and tokenizer above the bare process; a run measures its own."""


@dataclass(frozen=True, slots=True)
class _OnMeta:
    model: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """A plan for another machine."""

    chosen: Chosen
    options: TrainOptions
    hardware: Hardware
    directory: Path
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """For people."""
        plan, layout = self.chosen.plan, self.chosen.layout
        assert self.chosen.prediction is not None
        weights = sum(b.nbytes for b in layout.blocks)
        place = plan.placement.device
        return [
            f"model   {model_name(self.directory)}: {format_count(layout.elements)} parameters "
            f"trained ({self.options.method}), {format_bytes(weights)} of weights",
            f"machine {self.hardware.name}: a plan from its rates, without norms, softmax and "
            f"activation functions",
            f"RAM     {format_bytes(plan.ram_bytes)} of {format_bytes(plan.budget)}: "
            + ", ".join(
                f"{format_bytes(v)} {k}" for k, v in sorted(plan.ram.items(), key=lambda i: -i[1])
            ),
            *([] if place is None else [f"device  {place.describe()}"]),
            stays_text(layout, plan),
            f"disk    {format_bytes(plan.disk_bytes)} ({self.options.states} states)"
            + (f", {format_bytes(plan.spill_bytes)} of gradients" if plan.spill_bytes else "")
            + (f", {format_bytes(plan.inputs_bytes)} of inputs" if plan.inputs_bytes else ""),
            f"step    reads {format_bytes(plan.read_bytes)}, writes "
            f"{format_bytes(plan.written_bytes)}{copied_text(plan)}",
            f"time    {seconds_text(self.chosen.prediction)}",
            *(f"note    {note}" for note in self.notes),
        ]

    def to_json(self) -> dict[str, Any]:
        plan, found = self.chosen.plan, self.chosen.prediction
        assert found is not None
        place = plan.placement.device
        return {
            "machine": self.hardware.name, "method": self.options.method, "budget": plan.budget,
            "ram": dict(plan.ram), "disk_bytes": plan.disk_bytes, "spill_bytes": plan.spill_bytes,
            "inputs_bytes": plan.inputs_bytes,
            "device": None if place is None else {
                "budget": place.budget, "bytes": dict(place.parts), "layers": len(place.units),
                "layers_at_a_time": place.slots, "head": place.head is not None,
                "head_why": place.head_why,
                "updates_every": None if place.updates is None else place.updates.every,
            },
            "step": {
                "seconds": found.seconds, "phases": dict(found.phases),
                "lanes": {phase: dict(lanes) for phase, lanes in found.lanes.items()},
                "busiest": found.busiest,
                "read_bytes": plan.read_bytes, "written_bytes": plan.written_bytes,
                "link": {
                    phase: {"up_bytes": up, "down_bytes": down}
                    for phase, (up, down) in plan.link.items()
                },
            },
        }  # fmt: skip


def outlook(options: TrainOptions, hardware: Hardware, ram: int) -> Outlook:
    """Plan fine-tuning ``options.model`` in ``ram`` bytes of ``hardware``, layers on its card if
    ``options.gpu`` says how much of that they may take. Reads the model's config only.

    Raises:
        OffloadError: the model cannot be trained, or the plan does not fit.
    """
    directory = resolve(options.model)
    config = read_config(directory)
    check_causal(config)
    dtype = getattr(torch, options.dtype or _dtype_of(config))
    model, _ = instantiate(config, dtype)
    model.tie_weights()
    model.train()
    notes: list[str] = []
    check_router_loss(model, options.router_aux_loss)
    chosen = choose(
        _OnMeta(model), options, ram=ram, versions=1, notes=notes,
        process_bytes=lambda: PROCESS_BYTES,
        rates_of=lambda shape: rates_of(shape, model, options, hardware), gpu=options.gpu,
        card_flash=None if options.gpu is None else True,
    )  # fmt: skip
    return Outlook(
        chosen=chosen, options=options, hardware=hardware, directory=directory, notes=tuple(notes)
    )


def _dtype_of(config: Any) -> str:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    named = getattr(config, "dtype", None) or getattr(text, "dtype", None)
    return str(named or "bfloat16").removeprefix("torch.")


def rates_of(shape: Shape, model: Any, options: TrainOptions, hardware: Hardware) -> StepRates:
    """A machine's rates for the units of a model.

    Raises:
        OffloadError: the machine's file has no rate of products in the model's dtype.
    """
    layout = shape.layout
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    here = _products_of(hardware, dtype)
    there = here if hardware.card is None or not shape.away else _products_of(hardware.card, dtype)
    config = model.config.get_text_config()
    tokens = options.batch_size * options.seq_len
    head = None if shape.form is None else model.get_submodule(shape.form.head)
    head_unit = next((u.index for u in layout.units if u.module is head), None)
    # Running again, gradients of inputs, gradients of weights; adapters' weights are few.
    turns = 3 if options.method == "full" else 2

    def seconds(flops: float, nbytes: int, rates: tuple[float, float] = here) -> float:
        flops_s, stream = rates
        return options.grad_accum * max(flops / flops_s, nbytes / stream)

    attention = _attention_width(config) * 2.0 * tokens * options.seq_len
    units = {}
    for unit in layout.units:
        if unit.index == head_unit or (flops := _products(layout, unit.index, config)) is None:
            continue
        flops = flops * 2.0 * tokens + attention
        nbytes = sum(layout.blocks[b].nbytes for b in unit.blocks)
        nbytes += sum(layout.blocks[b].nbytes for ids in unit.experts.values() for b in ids)
        forward = seconds(flops, nbytes, there if unit.index in shape.away else here)
        units[unit.index] = forward, turns * forward
    loss = away = 0.0
    if shape.form is not None:
        size = shape.form.vocabulary * shape.form.width
        loss, away = (
            seconds((turns + 1) * 2.0 * tokens * size, 2 * size, site) for site in (here, there)
        )
    workers = update_workers(card=bool(shape.away), cores=hardware.cores)
    mixed = 2.0 / hardware.ssd_mixed.median
    read, write = hardware.ssd_read.median, hardware.ssd_write.median
    together = (1 / read + 1 / write) / mixed  # below 1: a mix is slower than its parts
    return StepRates(
        units=units, head=loss, head_away=away, head_unit=head_unit,
        disk_read=read * together, disk_write=write * together,
        update=2 * hardware.memcpy.median * workers / hardware.cores,
        beside=Beside(disk=1 / hardware.read_beside),
        update_away=None if hardware.card is None else hardware.card.read.median,
        up=(hardware.h2d or hardware.memcpy).median, down=(hardware.d2h or hardware.memcpy).median,
    )  # fmt: skip


def _products_of(site: Hardware | Card, dtype: str) -> tuple[float, float]:
    """(operations per second of products, bytes per second of its memory).

    Raises:
        OffloadError: it has no rate of products in the dtype.
    """
    rate = site.matmul.get(dtype)
    if rate is None:
        known = ", ".join(sorted(site.matmul))
        raise OffloadError(f"{site.name} has no rate of products in {dtype}, only {known}")
    return rate.median, (site.ram_read if isinstance(site, Hardware) else site.read).median


def _products(layout: TrainLayout, unit: int, config: Any) -> float | None:
    """Weights that a token is multiplied with in a unit; None where there are no products (an
    embedding)."""
    spec = layout.units[unit]
    if isinstance(spec.module, torch.nn.Embedding):
        return None
    dense = sum(_matrices(layout.blocks[b]) for b in spec.blocks)
    top = expert_top_k(config) if spec.experts else 0
    experts = sum(
        _matrices(layout.blocks[b]) * top / len(ids) for ids in spec.experts.values() for b in ids
    )
    return float(dense + experts)


def _matrices(block: Block) -> int:
    return sum(_each(block))


def _each(block: Block) -> Iterator[int]:
    for piece in block.pieces:
        if len(piece.shape) >= 2:
            yield piece.count


def _attention_width(config: Any) -> int:
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    width = getattr(config, "head_dim", None) or (
        int(getattr(config, "hidden_size", 0)) // heads if heads else 0
    )
    return heads * int(width)


__all__ = ["Outlook", "outlook", "rates_of"]
