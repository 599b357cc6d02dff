"""Metadata keys of a GGUF file that nobody has read when its config is made.

Some change what a model computes, and leaving them out would give other tokens in silence: they
must have the value with which they do not. Some say what is known anyway. Of any other it is said
that it has no effect.
"""

from __future__ import annotations

import logging

from offload.models.gguf_metadata import Metadata
from offload.units import brief

log = logging.getLogger(__name__)

_NEUTRAL: dict[str, tuple[float, ...]] = {
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "attention.scale": (0,),
    "attention.output_scale": (0, 1),
    "attention.temperature_scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.causal": (True,),
    "attention.shared_kv_layers": (0,),
    "attention.indexer.top_k": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "router_logit_softcapping": (0,),
    "rope.scaling.alpha": (0, 1),
    "use_parallel_residual": (False,),
    "swin_norm": (False,),
    "swiglu_clamp_exp": (0,),
    "swiglu_clamp_shexp": (0,),
    "activation_sparsity_scale": (0,),
    "embedding_length_per_layer_input": (0,),
    "n_deepstack_layers": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_gating_func": (0,),
    "expert_weights_scale": (0, 1),
    "expert_weights_norm": (True,),
    "expert_group_count": (0, 1),
    "expert_group_scale": (0, 1),
    "experts_per_group": (0,),
    "leading_dense_block_count": (0,),
    "moe_every_n_layers": (0, 1),
    "moe_latent_size": (0,),
    "interleave_moe_layer_step": (0, 1),
}
"""Keys that change what a model computes, and the values with which they do not; of a list with
one value per layer, each."""

_SAME = {
    "attention.key_length_swa": "attention.key_length",
    "attention.value_length_swa": "attention.value_length",
    "rope.dimension_count_swa": "rope.dimension_count",
    "rope.freq_base_swa": "rope.freq_base",
}
"""Of layers with a window: as that of the others, where both are there."""

_IDLE = {
    "vocab_size", "tensor_data_layout", "pooling_type", "feed_forward_length",
    "expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_shared_count",
    "expert_group_used_count", "nextn_predict_layers", "attention.head_count_kv",
    "attention.key_length", "attention.value_length", "attention.layer_norm_epsilon",
    "attention.temperature_length", "rope.dimension_count", "rope.dimension_sections",
    "rope.scale_linear", "rope.scaling.factor", "rope.scaling.finetuned",
    "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_log_multiplier",
}  # fmt: skip
"""What tensors say as well, or what counts beside others that were read or checked."""


def check_unread(meta: Metadata) -> None:
    """Refuse what would be left out and change the model; warn of what nobody knows.

    Raises:
        UnsupportedModelError: a key has a value that the architecture is not supported with.
    """
    unknown = []
    for full, value in meta.gguf.metadata.items():
        key = full.removeprefix(f"{meta.arch}.")
        if key == full or key in meta.asked or key in _IDLE:
            continue
        if key in _SAME:
            known = [meta.gguf.metadata.get(f"{meta.arch}.{_SAME[key]}", value)]
        elif key in _NEUTRAL:
            known = list(_NEUTRAL[key])
        else:
            unknown.append(full)
            continue
        if any(v not in known for v in (value if isinstance(value, list) else [value])):
            meta.refuse(f"{full} is {brief(value, 40)}, which is not supported for it")
    if unknown:
        log.warning("%s: not known, and without effect: %s", meta.gguf.name, ", ".join(unknown))
