"""What a packed model takes beside its weights: on the host, and on the device that computes."""

from __future__ import annotations

from typing import Any

from offload.blocks import Tier
from offload.cpu_ops import prefill
from offload.cpu_ops.activations import scratch_bytes
from offload.cpu_ops.formats import get_format
from offload.cpu_ops.prefill import crossover
from offload.models.footprint import Footprint
from offload.models.kv_plan import KvPlan
from offload.models.options import Options
from offload.models.pack_reader import PackedModel
from offload.models.packed_card import SCRATCH, card_outputs, card_scratch
from offload.models.packed_modules import expert_layout_of
from offload.models.request import (
    activation_bytes,
    cache_reserves,
    expert_top_k,
    staging_shape,
)
from offload.models.units import Cut
from offload.models.workspace import CARD_BYTES

ROWS_BYTES = 2**20
"""Rows of an embedding are read and decoded so many bytes at a time: those of a tied one come
sixteen for each that is wanted, and a long prompt's would take more than all of its activations."""

MOST_TOGETHER = 8
"""Experts that a prompt computes in one call."""

HOST = ("I/O staging", "embedding rows", "model structure and slack", "tokenizer")
"""What stays in the host's memory if a device computes."""


def reserves(
    model: Any,
    pack: PackedModel,
    chosen: Cut,
    options: Options,
    footprint: Footprint,
    *,
    cache: int,
    prompt: int,
    ram: int,
    kept: int,
    overhead: int,
    lean_bytes: int,
    prompt_bytes: int,
    kv: KvPlan | None,
) -> dict[str, int]:
    """What is not packed weights, in bytes.

    Args:
        lean_bytes: of kernels that compute whole layers.
        prompt_bytes: of a prompt's pass through them, in place of the model's own activations, or
            of a token of each sequence.
    """
    n_layers = max(1, len(chosen.units))
    largest = max((s.slot_nbytes for s in chosen.blocks.values()), default=0)
    chunks, chunk = staging_shape(options, largest, ram, False)
    config = model.config.get_text_config()
    vocabulary, width = int(config.vocab_size), int(config.hidden_size)
    rows = prompt * options.batch
    return {
        **cache_reserves(cache, n_layers, kv),
        "activations": max(activation_bytes(footprint, kv, options, prompt), prompt_bytes),
        SCRATCH: _scratch(pack, max(rows, options.sequences)) + lean_bytes,
        "logits": 4 * 4 * options.batch * options.sequences * vocabulary,
        "I/O staging": chunks * chunk,
        "embedding rows": max(rows, options.parked_rows(prompt)) * width * 8 + ROWS_BYTES,
        "model structure and slack": overhead,
        "tokenizer": options.tokenizer_bytes,
        "norms, routers, biases": kept,
    }


def _scratch(pack: PackedModel, rows: int) -> int:
    """What kernels and their callers need for ``rows`` tokens at once: inputs in float32 and
    quantised, outputs, and what is between an expert's matrices."""
    most = 0
    for format, outputs, inputs, seen in pack.matrices(rows):
        each = 4 * (inputs + outputs) + scratch_bytes(format, inputs)
        least = crossover(format)
        slab = 0
        if least is not None and seen >= least:
            slab = prefill.scratch_bytes(format, outputs, inputs, seen)
        most = max(most, each * seen + slab)
    for group in pack.experts.values():
        names = {p.name: p for p in group.parts}
        if {"gate", "down"} <= names.keys():
            inner, hidden = names["gate"].shape
            slot = 4 * inner + scratch_bytes(get_format(names["down"].format), inner) + 32
            each = 3 * 4 * hidden + scratch_bytes(get_format(names["gate"].format), hidden)
            most = max(most, rows * (each + MOST_TOGETHER * slot))
    return most


def on_device(
    all_of_it: dict[str, int],
    chosen: Cut,
    pack: PackedModel,
    config: Any,
    rows: int,
    kind: str,
) -> dict[Tier, dict[str, int]]:
    """The reserves shared out between the host and the device that computes."""
    host = {name: n for name, n in all_of_it.items() if name in HOST}
    compute = {name: n for name, n in all_of_it.items() if name not in HOST}
    if kind == "cuda":
        layouts = [expert_layout_of(pack.experts[g.name], g.module) for g in chosen.groups]
        compute[SCRATCH] = card_scratch(pack, layouts, rows, expert_top_k(config))
        compute["products"] = card_outputs(pack, layouts, rows)
        compute["matrix workspace"] = CARD_BYTES
    return {Tier.RAM: host, Tier.DEVICE: compute}


__all__ = ["MOST_TOGETHER", "ROWS_BYTES", "on_device", "reserves"]
