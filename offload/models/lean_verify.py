"""Does a plan compute what its decoder layer computes? Both are run and compared.

At full size the copies alone would be gigabytes, so a *twin* is run: the same class made from the
same configuration with smaller sizes, and random weights in float32. It has the layer's activation,
norms, biases, routing, rotation and kind of window, which is what a plan can get wrong.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import numpy as np

from offload.cpu_ops.entries import Kernel, ffn_kernel, gemm_kernel
from offload.cpu_ops.isa import choose
from offload.cpu_ops.kv_cache import KvCache, KvType
from offload.cpu_ops.layer_entries import attention_kernels, mlp_kernel, router_kernel
from offload.cpu_ops.layer_plan import LayerPlan
from offload.cpu_ops.prompt import fits, prompt_kernels
from offload.errors import UnsupportedModelError
from offload.models.lean_detect import Lean, detect
from offload.models.lean_layer import PackedLayer, rope_of

TOKENS, WINDOW, DIM, INNER, EXPERTS, TOP_K = 12, 5, 32, 48, 8, 3
_INNER_NAMES = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


def verify(layer: Any, lean: Lean, *, seed: int = 0) -> float:
    """The largest difference between a layer's twin and its plan over TOKENS tokens, one by one and
    as a prompt, relative to the largest output. About 1e-6 if the plan is right. The layer itself
    is not read.

    Raises:
        UnsupportedModelError: the twin's plan is of another kind than ``lean``.
    """
    import torch

    config = small_config(layer.self_attn.config, lean)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        twin = type(layer)(config, layer.self_attn.layer_idx).float().eval()
        for parameter in twin.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        x = torch.randn(1, TOKENS, config.hidden_size, dtype=torch.float32)
    found = detect(twin)
    if isinstance(found, str) or found.parts != lean.parts:
        raise UnsupportedModelError(
            f"a small {type(layer).__name__} has another plan than the layer: {found}"
        )
    rotary = _rotary_class(layer)(config=config)
    expected = _stock(twin, rotary, found, x)[0].numpy()
    attention = found.plan.attention
    cache = KvCache(1, attention.key_heads, attention.dim, TOKENS)
    lean_twin = PackedLayer(twin, found, rope_of(rotary, found.layer_type), cache, 0)
    got = [np.stack([lean_twin(row.copy()) for row in x[0].numpy()])]
    if fits(found.plan):
        cache.crop(0)
        got.append(lean_twin.prompt(x[0].numpy().copy(), TOKENS))
    return float(np.abs(np.stack(got) - expected).max() / np.abs(expected).max())


def twin_kernels(plan: LayerPlan) -> list[Kernel]:
    """What ``verify`` runs for a layer of this plan."""
    isa, name = choose(), "f32"
    found = attention_kernels(name, name, name, name, KvType.F32, isa)
    if plan.router is not None:
        found += [router_kernel(name, isa), ffn_kernel(name, name, isa)]
    if plan.mlp is not None or plan.shared is not None:
        found.append(mlp_kernel(name, name, isa))
    if fits(plan):
        found += [gemm_kernel(name, isa), *prompt_kernels(KvType.F32)]
    return found


def small_config(config: Any, lean: Lean) -> Any:
    """A copy with small sizes; ratios of heads are kept."""
    plan, small = lean.plan.attention, copy.deepcopy(config)
    key_heads = min(2, plan.key_heads)
    heads = plan.heads // plan.key_heads * key_heads
    small.num_attention_heads, small.num_key_value_heads = heads, key_heads
    small.head_dim = DIM
    small.hidden_size = heads * DIM if plan.heads * plan.dim == plan.hidden else 96
    for name in _INNER_NAMES:
        if isinstance(getattr(small, name, None), int):
            setattr(small, name, INNER)
    for name in ("num_experts", "num_local_experts"):
        if isinstance(getattr(small, name, None), int):
            setattr(small, name, min(EXPERTS, getattr(small, name)))
    if lean.plan.router is not None:
        small.num_experts_per_tok = min(TOP_K, lean.plan.router.top_k)
    if getattr(small, "sliding_window", None):
        small.sliding_window = WINDOW
    small._attn_implementation = "eager"
    small._experts_implementation = "eager"
    return small


def _rotary_class(layer: Any) -> Any:
    module = sys.modules[type(layer).__module__]
    name = type(layer).__name__.replace("DecoderLayer", "RotaryEmbedding")
    return getattr(module, name)


def _stock(twin: Any, rotary: Any, lean: Lean, x: Any) -> Any:
    """The module's own output for all tokens at once."""
    import torch

    positions = torch.arange(TOKENS)[None]
    of_type = () if lean.layer_type is None else (lean.layer_type,)
    back = positions[0][:, None] - positions
    hidden = (back < 0) | ((back >= lean.plan.attention.window) & (lean.plan.attention.window > 0))
    mask = torch.zeros(1, 1, TOKENS, TOKENS, dtype=torch.float32)
    mask = mask.masked_fill(hidden, float("-inf"))
    with torch.no_grad():
        out = twin(
            x, attention_mask=mask, position_ids=positions,
            position_embeddings=rotary(x, positions, *of_type),
        )  # fmt: skip
    return out[0] if isinstance(out, tuple) else out
