"""How far the fast kernels' logits are from torch's: measured on the model that was just opened.

The same layers run three times over a few tokens. Once as they will: a prompt, then single tokens
over the cache. Once with every product made by torch in float32, from the very same bytes: what
the kernels should give. And once in the checkpoint's own dtype, norms and activations, too, which
is what ``exact`` computes: a bfloat16 model is itself some percent off its float32 result, and who
is told how far the two are apart should be told which of them is nearer to it.

Weights stay where they are: what torch is given is unpacked a slab at a time, so the whole model is
never held. Tokens are drawn evenly from the vocabulary; a text's are likelier and the error less.
"""

# T tokens, N rows, K columns

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from offload.cpu_ops.formats import TILE_ROWS, Format
from offload.cpu_ops.packing import packed_bytes, unpack_rows
from offload.io.pack_manifest import Layout
from offload.kv.named import CACHE
from offload.models.kernel_error import KernelError
from offload.models.options import Options
from offload.models.pack_reader import PackedModel
from offload.models.packed_modules import PackedExperts, PackedLinear

if TYPE_CHECKING:
    from offload.models.packed_load import PackedPrepared

logger = logging.getLogger(__name__)

TOKENS, COMPARED = 16, 4
"""Tokens that are read at most, and the last of them whose logits are compared."""

SLAB_BYTES = 1 << 20
"""Of weights that are unpacked at once, at most but for one tile."""

_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def tokens_to_check(options: Options) -> int:
    """Tokens that the check reads: as many as there is room for anyway."""
    return min(TOKENS, max(options.context, options.prompt_tokens or 0))


def reference_dtype(pack: PackedModel) -> torch.dtype | None:
    """What most of a pack's bytes are in; None if any weight is quantised."""
    nbytes: dict[str, int] = {}
    for block in pack.manifest.blocks:
        for part in block.parts:
            if part.layout is Layout.PACKED:
                nbytes[part.format] = nbytes.get(part.format, 0) + part.nbytes
    if not nbytes or not nbytes.keys() <= _DTYPES.keys():
        return None
    return _DTYPES[max(nbytes, key=lambda name: nbytes[name])]


def is_due(options: Options, pack: PackedModel) -> bool:
    """Whether the error is to be measured: quantised weights have another one, of their own."""
    return options.kernels == "fast" and reference_dtype(pack) is not None


def check_bytes(vocabulary: int) -> int:
    """What the check holds besides what any pass does: three kinds of logits and a difference,
    and a slab's bytes in the steps of unpacking."""
    return 4 * 4 * COMPARED * vocabulary + 6 * SLAB_BYTES


def measure(model: Any, prepared: PackedPrepared) -> KernelError:
    """Compare an open model whose weights are not quantised."""
    began = time.perf_counter()
    dtype, handle = reference_dtype(prepared.pack), model.offload
    assert dtype is not None
    read_before = handle.stats()["disk_read_bytes"]
    n = tokens_to_check(prepared.options)
    compared = min(COMPARED, n)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (1, n), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), handle.attachment.unrecorded():
        ours = _ours(model, ids, compared)
        with _torch_products(prepared, torch.float32):
            right = _logits(model, ids, compared)
        with _torch_products(prepared, dtype):
            exact = _logits(model, ids, compared)
    found = KernelError(
        error=_largest(ours, right),
        exact_error=_largest(exact, right),
        difference=_largest(ours, exact),
        same_choice=int((ours.argmax(1) == exact.argmax(1)).sum()),
        tokens=compared,
        dtype=str(dtype).removeprefix("torch."),
        seconds=time.perf_counter() - began,
        read_bytes=handle.stats()["disk_read_bytes"] - read_before,
    )
    logger.info("fast kernels: %s", found)
    return found


def _largest(logits: torch.Tensor, right: torch.Tensor) -> float:
    return float(((logits - right).abs().amax(1) / right.abs().amax(1)).max())


def _ours(model: Any, ids: torch.Tensor, compared: int) -> torch.Tensor:
    """Logits [compared, V] of the last tokens: the first of them ends the prompt."""
    cache, at = model.offload.new_cache(), ids.shape[1] - compared + 1
    rows = [_logits(model, ids[:, :at], 1, **{CACHE: cache})]
    for i in range(at, ids.shape[1]):
        rows.append(_logits(model, ids[:, i : i + 1], 1, **{CACHE: cache}))  # noqa: PERF401
    return torch.cat(rows)


def _logits(model: Any, ids: torch.Tensor, keep: int, **more: Any) -> torch.Tensor:
    if model._supports_logits_to_keep():
        more["logits_to_keep"] = keep
    out = model(input_ids=ids, use_cache=CACHE in more, **more)
    logits: torch.Tensor = out.logits[0, -keep:].float()
    return logits


@contextlib.contextmanager
def _torch_products(prepared: PackedPrepared, dtype: torch.dtype) -> Iterator[None]:
    """Inside, the model computes with torch, in ``dtype``."""
    model, pack = prepared.meta.model, prepared.pack
    with contextlib.ExitStack() as undo:
        if (ours := model.config._attn_implementation) == "offload":
            model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
            undo.callback(model.set_attn_implementation, ours)
        for name, param in prepared.resident.items():
            if pack.tensors[name].part.format != str(dtype).removeprefix("torch."):
                continue  # float32 in the checkpoint, too
            for place in param.places:
                own = place.module._parameters
                undo.callback(own.__setitem__, place.attr, own[place.attr])
                value: Any = own[place.attr]
                own[place.attr] = nn.Parameter(value.detach().to(dtype), requires_grad=False)
        table = model.get_input_embeddings()
        undo.callback(table.register_forward_hook(lambda _m, _x, out: out.to(dtype)).remove)
        for module in model.modules():
            before = module.__dict__.get("forward")
            now: Callable[..., Any]
            if isinstance(module, PackedLinear):
                now = partial(_linear, module)
            elif isinstance(before, PackedExperts):
                now = partial(_experts, module, before)
            else:
                continue
            module.__dict__["forward"] = now
            undo.callback(_restore, module, before)
        yield


def _restore(module: nn.Module, before: Any) -> None:
    if before is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = before


def _linear(module: PackedLinear, x: torch.Tensor) -> torch.Tensor:
    out = _product(
        x, module.format, module.packed.data_ptr(), module.out_features, module.in_features
    )
    return out if module.bias is None else out + module.bias


def _product(x: torch.Tensor, fmt: Format, packed: int, rows: int, columns: int) -> torch.Tensor:
    """x [..., K] W^T by torch, in x's dtype, of the packed weights at an address."""
    out = x.new_empty(*x.shape[:-1], rows)
    row_bytes = fmt.row_bytes(columns)
    step = max(1, SLAB_BYTES // (TILE_ROWS * row_bytes)) * TILE_ROWS
    for first in range(0, rows, step):
        n = min(step, rows - first)
        nbytes = packed_bytes(fmt, n, columns)
        raw: Any = (ctypes.c_uint8 * nbytes).from_address(packed + first * row_bytes)
        slab = unpack_rows(fmt, np.frombuffer(raw, np.uint8), n, columns)
        weights = torch.from_numpy(slab).view(_DTYPES[fmt.name])
        out[..., first : first + n] = F.linear(x, weights.to(x.dtype))
    return out


def _experts(
    module: Any,
    experts: PackedExperts,
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The eager loop of transformers: [T, H], int64 [T, k], [T, k] → [T, H]."""
    layout = experts.layout
    x = hidden.reshape(-1, layout.hidden)
    index, weights = (t.reshape(len(x), -1) for t in (top_k_index, top_k_weights))
    out = torch.zeros_like(x)

    def product(x: torch.Tensor, part: str, base: int) -> torch.Tensor:
        down = part == "down"
        fmt = layout.down if down else layout.gate_up
        rows, columns = layout.inner, layout.hidden
        if down:
            rows, columns = columns, rows
        found = _product(x, fmt, base + getattr(layout, f"{part}_offset"), rows, columns)
        at = getattr(layout, f"{part}_bias_offset")
        if at >= 0:
            raw: Any = (ctypes.c_uint8 * (4 * rows)).from_address(base + at)
            found += torch.frombuffer(raw, dtype=torch.float32).to(x.dtype)
        return found

    for some, bases in experts.session.batches():
        for expert, base in zip(some, bases.tolist(), strict=True):
            token, slot = torch.where(index == expert)
            gate, up = (product(x[token], part, base) for part in ("gate", "up"))
            if getattr(module, "is_concatenated", True):
                joined = torch.cat([gate, up], dim=-1)
            else:
                joined = torch.stack([gate, up], dim=-1).flatten(-2)
            y = product(module._apply_gate(joined), "down", base) * weights[token, slot, None]
            out.index_add_(0, token, y.to(out.dtype))
    return out.view(hidden.shape)
