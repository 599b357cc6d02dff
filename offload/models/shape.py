"""A model by its config alone: every block it would be cut into, without a weight.

For plans and simulations of models that are not here. The structure is built on the meta device by
transformers itself, so any family works; unquantised it is cut as ``load`` does, quantised its
tensors are laid out as ``pack`` does.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from offload.blocks import BlockKind, BlockSpec, Tier, layout
from offload.errors import OffloadError
from offload.io.pack_manifest import Kind
from offload.models import host_products
from offload.models.footprint import Footprint, measure
from offload.models.host_products import ROWS
from offload.models.meta import instantiate
from offload.models.pack_outline import outline
from offload.models.pack_plan import QUANTS, part_bytes, target
from offload.models.pack_source import GGUF_OF, Experts, Tensor
from offload.models.request import expert_top_k, rows_of, trace_of
from offload.models.split import fine_units
from offload.models.synth_config import read_source
from offload.models.units import cut, unit_modules
from offload.scheduler.costs import CostModel
from offload.scheduler.inventory import PlanRequest
from offload.scheduler.plan import SITE_ACTIVATIONS
from offload.scheduler.policy import DEFAULT
from offload.scheduler.trace import Step, Trace

SLACK_BYTES = 64 * 2**20
"""For what a running model holds besides: its Python objects, allocator fragments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What there is to place. Sizes in bytes.

    Attributes:
        parameters: of the whole model; ``active``: of them, those that one token is multiplied
            with.
        flops: per token, of blocks that are packed.
        plain_bytes: what is always resident beside the blocks (norms, routers; packed only).
        apart: blocks that the CPU can compute where they lie in RAM, if that was asked for;
            ``product_bytes``: most that one product of theirs sends between the sites.
    """

    name: str
    family: str
    dtype: str
    quant: str | None
    parameters: int
    active: int
    blocks: Mapping[str, BlockSpec]
    steps: tuple[Step, ...]
    experts: Mapping[str, tuple[str, ...]]
    top_k: Mapping[str, int]
    always: frozenset[str]
    by_row: frozenset[str]
    flops: Mapping[str, int] = field(default_factory=dict)
    plain_bytes: int = 0
    vocabulary: int
    width: int
    """Of the residual stream."""
    apart: frozenset[str] = frozenset()
    product_bytes: int = 0
    footprint: Footprint
    prompt_tokens: int
    context: int

    @property
    def weight_bytes(self) -> int:
        return sum(s.nbytes for s in self.blocks.values())

    def reserves(
        self, *, top: Tier, queue_depth: int, split_rows: int = 0
    ) -> dict[Tier, dict[str, int]]:
        """What is not weights: for one sequence of ``context`` tokens."""
        cache = self.footprint.cache_bytes * self.context // max(1, self.prompt_tokens)
        layers = max(1, sum(1 for s in self.steps if s.blocks))
        staging = queue_depth * 2**20
        beside = {
            "KV cache": cache + cache // layers,
            "activations": self.footprint.activation_bytes,
            "logits": 8 * self.vocabulary,
        }
        host = {"I/O staging": staging, "model structure and slack": SLACK_BYTES}
        if self.plain_bytes:
            beside["norms, routers, biases"] = self.plain_bytes
        if top is Tier.RAM:
            return {Tier.RAM: beside | host}
        # Float32 rows of the residual stream: down once, up for each expert.
        nbytes = 4 * self.width * split_rows * (1 + max(self.top_k.values(), default=0))
        nbytes = max(nbytes, self.product_bytes)
        if nbytes:
            host[SITE_ACTIVATIONS] = beside[SITE_ACTIVATIONS] = nbytes
        return {Tier.RAM: host, Tier.DEVICE: beside}

    def request(
        self,
        budgets: Mapping[Tier, int],
        costs: CostModel,
        *,
        expert_policy: str = DEFAULT,
        guesses: bool = True,
        split_rows: int = 0,
    ) -> PlanRequest:
        """The planner's question: three tiers if there is a budget for the device."""
        top = max(budgets)
        return PlanRequest(
            blocks=self.blocks,
            trace=Trace(self.steps),
            experts=self.experts,
            top_k=self.top_k,
            always=self.always,
            by_row=self.by_row,
            budgets=budgets,
            reserves=self.reserves(top=top, queue_depth=costs.queue_depth, split_rows=split_rows),
            compute_tier=top,
            costs=costs,
            guesses=guesses,
            expert_policy=expert_policy,
            split_rows=split_rows,
            apart=self.apart,
            apart_rows=ROWS if self.apart else 0,
        )


def shape_of(
    config_path: str | Path,
    *,
    quant: str | None = None,
    layers: int | None = None,
    prompt_tokens: int = 512,
    tokens: int = 0,
    context: int | None = None,
    hybrid: bool = False,
) -> Shape:
    """Read a config and describe its model.

    Args:
        config_path: a ``config.json`` or a directory with one. Nothing else is read.
        quant: ``q4``, ``q8`` or ``none`` as in a pack; None: as a checkpoint in its own dtype.
        layers: keep only so many.
        tokens: of an answer behind the prompt, for which there has to be room.
        context: None: what these need, and 1024 if the model takes as many.
        hybrid: find out which dense blocks the CPU can compute beside a device.

    Raises:
        CheckpointError, UnsupportedModelError: the config cannot be used.
        OffloadError: a quantised config without ``quant``, or too long a context.
    """
    source = _read(config_path, quant, layers)
    dtype = torch.float32 if quant else getattr(torch, source.dtype)
    model, _ = instantiate(source.config, dtype)
    model.tie_weights(missing_keys=set(), recompute_mapping=False)
    text = source.config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    most = limit if isinstance(limit, int) and limit > 0 else None
    if context is None:
        context = max(min(1024, most or 1024), prompt_tokens + tokens)
        if most is not None and context > most:
            raise OffloadError(
                f"{prompt_tokens} tokens of prompt and {tokens} of answer are over the model's "
                f"limit of {most}; give fewer --prompt-tokens"
            )
    if most is not None and context > most:
        raise OffloadError(f"--context {context} is over the model's limit of {most} tokens")
    footprint = measure(model, prompt_tokens)
    found = _packed(model, source.dtype, quant, hybrid) if quant else _plain(model, hybrid)
    path = Path(config_path)
    return Shape(
        name=path.parent.name if path.name == "config.json" else path.stem,
        family=str(source.config.model_type),
        dtype=source.dtype,
        quant=quant,
        width=int(getattr(text, "hidden_size", 0) or 0),
        vocabulary=int(getattr(text, "vocab_size", 0)),
        footprint=footprint,
        prompt_tokens=prompt_tokens,
        context=context,
        **found,
    )


def _read(config_path: str | Path, quant: str | None, layers: int | None) -> Any:
    """The checked config. Published weights that are quantised in a way of their own have no size
    here until ``quant`` says in which format they would be run."""
    path = Path(config_path)
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raw = None  # read_source says what is wrong with it
    if not (isinstance(raw, dict) and raw.get("quantization_config")):
        return read_source(path, dtype=None, layers=layers)
    if quant is None:
        method = raw["quantization_config"]
        method = method.get("quant_method", "unnamed") if isinstance(method, dict) else method
        raise OffloadError(
            f"{file} describes weights quantised with {method!r}; say with --quant q4, q8 or none "
            "in which format the same model would be run"
        )
    del raw["quantization_config"]
    with tempfile.TemporaryDirectory(prefix="offload-shape-") as folder:
        copy = Path(folder) / "config.json"
        copy.write_text(json.dumps(raw), encoding="utf-8")
        return read_source(copy, dtype=None, layers=layers)


def _plain(model: Any, hybrid: bool) -> dict[str, Any]:
    """As ``load`` cuts a checkpoint; the head in slices."""
    modules = fine_units(model)
    apart = host_products.apart_layers(model, modules if hybrid else ())
    chosen = cut(model, stream_head=True, modules=modules)
    blocks, by_row = rows_of(chosen)
    k = expert_top_k(model.config)
    top_k = {g.name: min(k, g.n_experts) for g in chosen.groups}
    experts = {g.name: g.blocks for g in chosen.groups}
    counts = {b: sum(math.prod(t.shape) for t in spec.tensors) for b, spec in blocks.items()}
    routed = {b for found in experts.values() for b in found}
    active = sum(n for b, n in counts.items() if b not in routed and b not in by_row)
    active += sum(top_k[g] * counts[found[0]] for g, found in experts.items())
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "active": active,
        "blocks": blocks,
        "steps": tuple(trace_of(chosen)),
        "experts": experts,
        "top_k": top_k,
        "always": frozenset(chosen.resident),
        "by_row": by_row,
        "apart": host_products.apart_blocks(chosen, apart) & blocks.keys()
        if hybrid
        else frozenset(),
        "product_bytes": host_products.product_bytes(chosen, apart) if hybrid else 0,
    }


def _packed(model: Any, dtype: str, quant: str, hybrid: bool) -> dict[str, Any]:
    """As ``pack`` lays a model out, and a packed model runs it."""
    if quant not in QUANTS:
        raise OffloadError(f"quant {quant!r} is not one of {', '.join(QUANTS)}")
    native = GGUF_OF[dtype]
    units = unit_modules(model)
    paths = [path for path, _ in units]
    layers = host_products.apart_layers(model, units if hybrid else ())
    apart: dict[str, Any] = {}
    blocks: dict[str, BlockSpec] = {}
    flops: dict[str, int] = {}
    by_row: set[str] = set()
    of_unit: dict[str, list[str]] = {path: [] for path in paths}
    groups: dict[str, list[str]] = {path: [] for path in paths}
    experts: dict[str, tuple[str, ...]] = {}
    plain = active = 0
    k = expert_top_k(model.config)
    for item in outline(model, model.state_dict()).items:
        owner = _owner(paths, item.name)
        if isinstance(item, Experts):
            parts = [(t.name, _nbytes(t, native, quant)) for t in item.parts]
            count = sum(math.prod(t.shape) for t in item.parts)
            width = len(str(item.count - 1))
            ids = tuple(f"{item.name}#{e:0{width}}" for e in range(item.count))
            for block in ids:
                blocks[block] = layout(
                    block, BlockKind.EXPERT, [(n, "uint8", (size,)) for n, size in parts], item.name
                )
                flops[block] = 2 * count
            experts[item.name] = ids
            active += min(k, item.count) * count
            groups[owner or item.name] = [*groups.get(owner or item.name, []), item.name]
            continue
        count = math.prod(item.shape)
        if item.kind is Kind.PLAIN:
            plain += 4 * count
            continue
        nbytes = _nbytes(item, native, quant)
        shape = (item.rows, nbytes // item.rows) if item.kind is Kind.ROWS else (nbytes,)
        blocks[item.name] = layout(item.name, BlockKind.WEIGHT, [("packed", "uint8", shape)])
        if item.kind is Kind.ROWS:
            by_row.add(item.name)
            continue
        active += count
        flops[item.name] = 2 * count
        users = {_owner(paths, name) for name in item.names}
        if len(users) == 1 and all(name.removesuffix(".weight") in layers for name in item.names):
            apart[item.name] = model.get_submodule(item.name.removesuffix(".weight"))
        of_unit.setdefault(owner or item.name, []).append(item.name)
    steps: list[Step] = []
    for unit, own in of_unit.items():
        first, *others = groups.get(unit) or [""]
        if own or first:
            steps.append(Step(unit=unit, blocks=tuple(own), group=first))
            steps += [Step(unit=f"{unit}+{g}", blocks=(), group=g) for g in others]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "active": active,
        "blocks": blocks,
        "steps": tuple(steps),
        "experts": experts,
        "top_k": {g: min(k, len(ids)) for g, ids in experts.items()},
        "always": frozenset(),
        "by_row": frozenset(by_row),
        "flops": flops,
        "plain_bytes": plain,
        "apart": frozenset(apart),
        "product_bytes": host_products.packed_product_bytes(apart.values()),
    }


def _nbytes(tensor: Tensor, native: str, quant: str) -> int:
    format, where, _ = target(tensor, native, quant)
    return part_bytes(tensor, format, where)


def _owner(paths: list[str], name: str) -> str | None:
    return next((p for p in paths if name == p or name.startswith(p + ".")), None)
