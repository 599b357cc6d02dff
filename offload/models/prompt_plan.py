"""What a prompt cache on disk means for a model: whether it can be, its bytes, and its identity."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.blocks import align_up
from offload.errors import CheckpointError, UnsupportedModelError
from offload.io.pack_manifest import MANIFEST
from offload.kv.coarse import QUANTISED, coarse_layout, rounded_bytes, stored_shape
from offload.kv.kernel_layout import is_latent
from offload.kv.prefix_cache import SLOTS
from offload.kv.prefix_folder import open_directory
from offload.kv.prefix_format import footer_bytes
from offload.kv.prefix_layers import check_config
from offload.kv.prefix_slots import check_limit
from offload.models.footprint import CachedLayer, Footprint
from offload.models.meta import MetaModel
from offload.models.module_state import why_not_in_a_cache
from offload.models.naming import model_name
from offload.models.options import Options, check_device
from offload.models.pieces import why_not_in_pieces
from offload.units import format_bytes
from offload.version import __version__

HARMLESS = frozenset({
    "ram", "gpu", "disk", "prompt_tokens", "context", "batch", "engine", "queue_depth",
    "request_bytes", "hardware", "fewer", "guess", "expert_policy", "routing", "record_routing",
    "kv_ram", "sequences", "pass_rows", "seed", "overhead_bytes", "tokenizer_bytes", "caller_bytes",
    "prompt_cache", "prompt_cache_limit", "prompt_cache_chunk", "kv_block_tokens",
    "kv_keep", "kv_importance", "kv_spill", "elsewhere", "sample", "guess_precision", "recorder",
})  # fmt: skip
"""Options that change no number. All others are part of a stored prefix's name: an option that is
not known here costs a hit, and never a wrong one."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """Keys and values that are kept otherwise than they are computed, as ``--kv`` says."""

    kind: str
    tokens: int
    """Of a block."""
    each: int | None = None
    """Bytes of a block, if all layers have the same; None: by their shapes."""

    @property
    def together(self) -> int:
        """Tokens that are rounded together, once all are there; 1: each for itself."""
        return self.tokens if self.kind in QUANTISED else 1

    def layer_bytes(self, layer: CachedLayer, tokens: int) -> int | None:
        """Of whole blocks of a layer; None: it is kept as it is computed."""
        if self.each is not None:
            return self.each * (tokens // self.tokens)
        if layer.shape is None:
            return None
        if self.together == 1 or is_latent(layer.shape):
            return stored_shape(layer.shape, self.kind).token_bytes * tokens
        return rounded_bytes(coarse_layout(layer.shape, self.tokens, self.kind)) * (
            tokens // self.tokens
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPlan:
    """A prompt cache as it will be used. Sizes in bytes."""

    directory: Path
    limit: int
    chunk: int
    context: int
    group_bytes: int
    facts: Mapping[str, Any]
    grain: int = 1
    """Tokens whose keys and values are rounded together."""

    @property
    def group(self) -> int:
        """Tokens of a stored group: what is reused is a multiple of it."""
        return math.lcm(self.chunk, self.grain)

    @property
    def reserves(self) -> dict[str, int]:
        """Of RAM, by what takes it."""
        return {"prompt cache": SLOTS * self.group_bytes}

    @property
    def note(self) -> str:
        """One sentence for people."""
        passes = f"prompts are read in passes of {self.chunk} tokens (--prompt-cache-chunk), "
        each = f"{format_bytes(self.group_bytes)} each"
        if self.group == self.chunk:
            kept = f"whose keys and values ({each}) are kept"
        else:
            kept = (
                f"and keys and values of every {self.group} ({each}), as {self.grain} are rounded "
                f"together, are kept"
            )
        return (
            f"{passes}{kept} in {self.directory}, up to {format_bytes(self.limit)}"
            + ("; one that comes again whole needs none" if self.grain == 1 else "")
            + f"; weights that stream are read once for each pass{self._useless}"
        )

    @property
    def _useless(self) -> str:
        if self.context > self.group:
            return ""
        of, way = "a pass", "a smaller chunk"
        if self.group != self.chunk:
            of, way = f"{self.group} tokens", "a longer --context"
            if self.context > self.grain:
                way = f"a chunk that divides {self.grain}"
        return (
            f"; no prompt in a context of {self.context} is longer than {of}, so nothing can be "
            f"reused: give {way}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "directory": str(self.directory),
            "limit_bytes": self.limit,
            "chunk_tokens": self.chunk,
            "group_tokens": self.group,
            "group_bytes": self.group_bytes,
        }


def plan_prompts(
    options: Options,
    meta: MetaModel,
    footprint: Footprint,
    tokens: int,
    rounded: Rounded | None = None,
) -> PromptPlan | None:
    """The prompt cache that the options ask for; None if they do not.

    Args:
        tokens: that ``footprint`` was measured with.
        rounded: how keys and values are kept; None: as they are computed.

    Raises:
        UnsupportedModelError: the model's state cannot be brought back exactly; says why.
        OffloadError: the directory cannot be used, or the limit is below one group.
    """
    if options.prompt_cache is None:
        return None
    check_model(meta.model, model_name(meta.directory), check_device(options))
    chunk, grain = options.prompt_cache_chunk, 1 if rounded is None else rounded.together
    group = math.lcm(chunk, grain)
    group_bytes = _group_bytes(footprint, group, chunk, tokens * options.batch, rounded)
    if grain == 1:
        group_bytes += _logits_bytes(meta)
    check_limit(chunk, options.prompt_cache_limit, group_bytes, group)
    return PromptPlan(
        directory=open_directory(options.prompt_cache).resolve(),
        limit=options.prompt_cache_limit,
        chunk=chunk,
        context=max(options.context, tokens),
        group_bytes=group_bytes,
        facts=facts_of(meta, options),
        grain=grain,
    )


def check_model(model: Any, name: str, device: str) -> None:
    """Raises UnsupportedModelError: prefixes of this model cannot be used again exactly."""

    def refuse(why: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{name}: --prompt-cache cannot bring its prompts back exactly: {why}; drop it"
        )

    if device != "cpu":
        raise refuse("a simulated accelerator keeps keys and values itself")
    supported = getattr(type(model), "_supports_default_dynamic_cache", lambda: False)
    if model.config.is_encoder_decoder or not supported():
        raise refuse(f"{type(model).__name__} has a cache of its own kind")
    if any(hasattr(module, "rope_deltas") for module in model.modules()):
        raise refuse("it keeps positions of images apart from its cache")
    if (why := why_not_in_a_cache(model) or why_not_in_pieces(model)) is not None:
        raise refuse(why)
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    for entry in (rope, *(v for v in rope.values() if isinstance(v, dict))):
        if entry.get("rope_type") == "dynamic":
            raise refuse("its rotary positions depend on the texts it has read before")
    try:
        check_config(model.config)
    except UnsupportedModelError as error:
        raise refuse(str(error)) from None


def facts_of(meta: MetaModel, options: Options) -> dict[str, Any]:
    """Everything before the model is opened that changes a number of its keys and values."""
    chosen = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(options)
        if field.name not in HARMLESS
    }
    return {
        "source": _source(meta),
        "class": type(meta.model).__name__,
        "config": meta.model.config.to_dict(),
        "dtype": str(meta.dtype),
        "options": chosen,
        "versions": [_version(n) for n in ("offload", "torch", "transformers", "numba")],
        "machine": machine(),
        "kernels": _kernels() if meta.index is None else "",
    }


@functools.cache
def machine() -> list[str]:
    """Kernels are chosen by the processor, and round as they do."""
    from offload.cpu_ops.isa import choose, features

    return [
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
        choose().value,
        ",".join(sorted(features())),
        hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:16],
    ]


def _kernels() -> str:
    """Of the kernels that compute packed models: what they round may change between two builds of
    one version."""
    from offload.cpu_ops.tags import sources_digest

    return sources_digest()


def _version(package: str) -> str:
    if package == "offload":
        return __version__
    return importlib.metadata.version(package)


def _source(meta: MetaModel) -> str:
    """Of the weights: a pack's manifest has the sums of all it holds, a checkpoint's files are told
    apart by name, size, time, header and some bytes."""
    if meta.index is None:
        try:
            return hashlib.sha256((meta.directory / MANIFEST).read_bytes()).hexdigest()
        except OSError as error:
            raise CheckpointError(
                f"cannot read {meta.directory / MANIFEST}: {error.strerror}"
            ) from error
    from offload.models.pack_checkpoint import checkpoint_id

    return checkpoint_id(meta.directory, meta.index).fingerprint


def _group_bytes(
    footprint: Footprint, group: int, chunk: int, rows: int, rounded: Rounded | None
) -> int:
    """Of a file: what ``group`` tokens leave in every layer, running states whole."""
    payload = sum(_layer_bytes(layer, group, rows, rounded) for layer in footprint.layers)
    if not footprint.layers:
        payload = -(-footprint.cache_bytes * group // max(1, rows))
    # Of each pass or block keys and values apart, and one thing more of the layer.
    each = chunk if rounded is None or rounded.together == 1 else min(chunk, rounded.tokens)
    pieces = 2 + 2 * (group // each)
    return align_up(payload) + footer_bytes(pieces * max(1, len(footprint.layers)), group)


def _logits_bytes(meta: MetaModel) -> int:
    """Of one token, that are kept with a prompt's end; packed models give them in float32."""
    vocabulary = getattr(meta.model.config.get_text_config(), "vocab_size", 0) or 0
    return align_up(4 * vocabulary)


def _layer_bytes(layer: CachedLayer, tokens: int, rows: int, rounded: Rounded | None) -> int:
    if rounded is not None and (found := rounded.layer_bytes(layer, tokens)) is not None:
        return found
    if layer.shape is not None:
        return layer.shape.token_bytes * tokens
    if layer.window == 0:
        return layer.nbytes
    held = rows if layer.window is None else max(1, min(layer.window - 1, rows))
    return -(-layer.nbytes * tokens // held)
