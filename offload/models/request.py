"""From a cut model to the planner's question: what has to be placed, what is set aside."""

from __future__ import annotations

import gc
import re
from dataclasses import replace
from typing import Any

import torch

from offload.blocks import ALIGN, BlockSpec, TensorSpec, Tier, align_up
from offload.io.transfer import PLAN_BYTES, PLANS_KEPT
from offload.models.expert_options import listening_bytes
from offload.models.footprint import Footprint
from offload.models.host_cost import product_overhead_s
from offload.models.kv_plan import KvPlan
from offload.models.meta import MetaModel
from offload.models.options import LEAST_SLACK, MOST_SLACK, ROW_SHARE, SLACK_SHARE, Options
from offload.models.toy import Warm
from offload.models.units import Cut, head_shape
from offload.models.workspace import CARD_BYTES, Workspace, kernel_bytes, workspace_bytes
from offload.runtime.hardware_cache import cores
from offload.runtime.rss import current_rss
from offload.scheduler.costs import CostModel
from offload.scheduler.planner import PlanRequest
from offload.scheduler.policy import DEFAULT
from offload.scheduler.trace import Step, Trace

BOUNCE_BYTES = 256 * 2**10
"""A chunk of the staging where most bytes are read in place: for a page or two of a request, and
for tensors that are too small to lie as in the file."""


def staging_shape(options: Options, largest: int, ram: int, staged: bool = True) -> tuple[int, int]:
    """Chunks and their bytes: no larger than the largest block asks for, and together at most one
    part in 32 of a small budget. ``staged``: most bytes go through them, so a request each."""
    share = ram // 32 // options.queue_depth // ALIGN * ALIGN
    chunk = min(options.request_bytes, align_up(largest + 2 * ALIGN), share)
    if not staged:
        chunk = min(chunk, BOUNCE_BYTES)
    return options.queue_depth, max(4 * ALIGN, chunk)


def grown_bytes(options: Options, baseline: int) -> int:
    """What this process weighs by now above ``baseline``: the model's Python objects. 0 if the
    options say what to set aside."""
    if options.overhead_bytes is not None:
        return 0
    gc.collect()
    return max(0, current_rss() - baseline - options.tokenizer_bytes)


def overhead_bytes(options: Options, chosen: Cut, *, grown: int, ram: int, prompt: int) -> int:
    """What is set aside beside what the model computes with: Python's objects (``grown``, and of
    reads yet to come), slack, the routings of a pass that are listened to, and sequences."""
    found = options.overhead_bytes
    if found is None:
        found = grown + min(PLANS_KEPT, len(chosen.blocks)) * PLAN_BYTES
        found += min(MOST_SLACK, max(LEAST_SLACK, ram // SLACK_SHARE))
    found += listening_bytes(options, chosen, prompt * options.batch)
    return found + options.beside_bytes


def matrices(chosen: Cut) -> list[TensorSpec]:
    """What is multiplied with: everything but a table that is looked up."""
    table = chosen.embedding.block if chosen.embedding else None
    return [t for b, s in chosen.blocks.items() if b != table for t in s.tensors]


def reserves_of(
    meta: MetaModel,
    chosen: Cut,
    options: Options,
    *,
    footprint: Footprint,
    cache: int,
    prompt: int,
    device: str,
    overhead: int,
    ram: int,
    kept: int,
    workspace: Workspace,
    staged: bool,
    kv: KvPlan | None = None,
    copies: int = 0,
) -> dict[Tier, dict[str, int]]:
    """What is not weights. A device has a budget of its own, also the simulated one, which computes
    in RAM's address space: activations and KV are charged to it.

    ``workspace``: what products take beside their matrices. ``kv``: the cache is kept in blocks.
    ``copies``: bytes that copies to the device take on their way.
    """
    n_layers = max(1, len(getattr(meta.model, "base_model", meta.model)._modules))
    largest = max((s.slot_nbytes for s in chosen.blocks.values()), default=0)
    chunks, chunk = staging_shape(options, largest, ram, staged)
    shape = head_shape(meta.model)
    logits = 4 * 4 * options.batch * options.sequences * shape[0] if shape else 0
    rows = max(prompt * options.batch, 2 * options.parked_rows(prompt)) * (
        shape[1] * 4 if shape else 0
    )
    compute = {
        **cache_reserves(cache, n_layers, kv),
        "activations": activation_bytes(footprint, kv, options, prompt),
        "matrix workspace": CARD_BYTES
        if device == "cuda"
        else workspace_bytes(matrices(chosen), workspace)
        + kernel_bytes(
            (t for g in chosen.groups for t in chosen.blocks[g.blocks[0]].tensors), prompt, ram
        ),
        "logits": logits,
    }
    host = {
        "I/O staging": chunks * chunk,
        "embedding rows": rows,
        "model structure and slack": overhead,
        "tokenizer": options.tokenizer_bytes,
        "weights that no file holds": kept,
    }
    if copies:
        host["copies to the device"] = copies
    if device != "cpu":
        return {Tier.RAM: host, Tier.DEVICE: compute}
    return {Tier.RAM: compute | host}


def cache_reserves(cache: int, n_layers: int, kv: KvPlan | None) -> dict[str, int]:
    """For keys and values: ``cache`` bytes of transformers' own, or what ``kv`` says."""
    if kv is not None:
        return kv.reserves
    # Growing a cache copies one layer's keys and values while the old ones still exist.
    return {"KV cache": cache + cache // max(1, n_layers)}


def activation_bytes(footprint: Footprint, kv: KvPlan | None, options: Options, prompt: int) -> int:
    """Of the prompt, or of a token at the end of a context that is much longer, while other
    sequences wait with theirs."""
    runs = max(footprint.activation_bytes, kv.need.activation_bytes if kv is not None else 0)
    return runs + footprint.parked(options.parked_rows(prompt), prompt * options.batch)


def _takes_all_cores(options: Options) -> bool:
    """Whether compute leaves none to threads that read; of another machine nobody knows."""
    return not options.elsewhere and torch.get_num_threads() >= cores()


def request_of(
    meta: MetaModel,
    chosen: Cut,
    options: Options,
    warm: Warm,
    budgets: dict[Tier, int],
    reserves: dict[Tier, dict[str, int]],
    top: Tier,
    staged: bool,
    policy: tuple[str, tuple[str, ...]] = (DEFAULT, ()),
    split_rows: int = 0,
    apart: frozenset[str] = frozenset(),
    apart_rows: int = 0,
) -> PlanRequest:
    """``policy``: which experts leave, see ``offload.models.expert_options.policy_of``."""
    blocks, by_row = rows_of(chosen)
    top_k = expert_top_k(meta.model.config)
    costs = None
    if options.hardware is not None:
        costs = CostModel(
            hardware=options.hardware,
            queue_depth=options.queue_depth,
            staged=staged,
            expert_overhead_s=warm.expert_s,
            fetch_s=warm.fetch_s,
            crowd_s=warm.crowd_s if _takes_all_cores(options) else 0.0,
            product_overhead_s=_product_overhead_s(options, top) if apart_rows else None,
            on_card=computes_on_card(options, top),
        )
        if options.guess_precision is not None:
            costs = replace(costs, guess_precision=options.guess_precision)
    return PlanRequest(
        blocks=blocks,
        trace=Trace(trace_of(chosen)),
        experts={g.name: g.blocks for g in chosen.groups},
        top_k={g.name: min(top_k, g.n_experts) for g in chosen.groups},
        always=frozenset(chosen.resident),
        by_row=by_row,
        budgets=budgets,
        reserves=reserves,
        compute_tier=top,
        costs=costs,
        overhead_s=_overheads(chosen, warm),
        rows=options.sequences,
        row_share=ROW_SHARE,
        guesses=options.guess,
        expert_policy=policy[0],
        hot=policy[1],
        split_rows=split_rows,
        apart=apart & blocks.keys(),
        apart_rows=apart_rows,
    )


def _product_overhead_s(options: Options, top: Tier) -> float | None:
    """Measured here; None for another machine, and where there is no device to compute beside."""
    if options.elsewhere or top is not Tier.DEVICE:
        return None
    return product_overhead_s(options.choice)


def computes_on_card(options: Options, top: Tier) -> bool:
    """Whether the hardware's card computes: a simulated device has the CPU do it."""
    carded = options.hardware is not None and options.hardware.card is not None
    return carded and top is Tier.DEVICE and (options.elsewhere or options.choice.kind == "cuda")


def trace_of(chosen: Cut) -> list[Step]:
    """The steps of one pass, in the order in which the modules are registered (the executor
    learns the real order if it is another)."""
    steps: list[Step] = []
    for unit in chosen.units:
        groups = [g.name for g in unit.groups]
        steps.append(Step(unit=unit.name, blocks=unit.blocks, group=groups[0] if groups else ""))
        steps += [Step(unit=f"{unit.name}+{g}", blocks=(), group=g) for g in groups[1:]]
    if chosen.head:
        steps += [
            Step(unit=f"{chosen.head.name}#{i}", blocks=(b,))
            for i, b in enumerate(chosen.head.blocks)
        ]
    return steps


def rows_of(chosen: Cut) -> tuple[dict[str, BlockSpec], frozenset[str]]:
    """The blocks to place, and which of them may be read by row.

    The rows of an embedding that is tied to a sliced head are the head's own bytes: they are
    never pinned a second time, only read.
    """
    blocks = dict(chosen.blocks)
    if chosen.embedding is None:
        return blocks, frozenset()
    if chosen.head is not None and chosen.head.param is chosen.embedding.param:
        del blocks[chosen.embedding.block]
        return blocks, frozenset()
    return blocks, frozenset({chosen.embedding.block})


def _overheads(chosen: Cut, warm: Warm) -> dict[str, float]:
    """Seconds that each step takes besides its weights: its share of its layer's Python time,
    and, on the last one, what ``generate`` does between two tokens."""
    layers: dict[str, list[str]] = {}
    for unit in chosen.units:
        # model.layers.3.mlp.up_proj belongs to model.layers.3
        found = re.match(r"(.*?\.\d+)(\..*)?$", unit.name)
        layers.setdefault(found.group(1) if found else unit.name, []).append(unit.name)
    out = {name: warm.layer_s / len(names) for names in layers.values() for name in names}
    if out:
        last = chosen.units[-1].name
        out[last] += warm.fixed_s
    return out


def expert_top_k(config: Any) -> int:
    """Experts per token, by whichever name the family uses."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in (
        "num_experts_per_tok",
        "moe_topk",
        "moe_k",
        "top_k_experts",
        "num_selected_experts",
    ):
        value = getattr(text, name, None)
        if isinstance(value, (list, tuple)):
            value = max(value)
        if isinstance(value, int) and value > 0:
            return value
    return 2
