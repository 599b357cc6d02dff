"""From a GGUF file's metadata to the transformers config of the same model.

One function per architecture names every field that decides a number, also where it equals the
class's default: defaults are one checkpoint's values. What the metadata does not say is fixed by
llama.cpp's graph for the architecture (``src/models/*.cpp``) and noted where it is set.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from offload.errors import CheckpointError
from offload.io.gguf import GGUFFile
from offload.models.gguf_metadata import Metadata
from offload.models.gguf_rope import rope_parameters
from offload.models.gguf_unread import check_unread
from offload.units import brief

log = logging.getLogger(__name__)

_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = 1, 2, 3  # llama.cpp's codes of expert_gating_func
_GEMMA3_27B_LAYERS = 62
_TINY = 1e-9  # no attention is scaled by less, and its square can still be divided by


def config_from_gguf(gguf: GGUFFile) -> Any:
    """The config, an instance of the class that ``AutoConfig`` has for the model's type.

    ``dtype`` is the type of most of the weights' bytes, or bfloat16 where they are quantised.

    Raises:
        CheckpointError: a metadata key is missing, malformed, or contradicts the tensors.
        UnsupportedModelError: an architecture, or a variant of one, that is not supported.
    """
    from transformers import CONFIG_MAPPING

    meta = Metadata(gguf)
    make = _ARCHITECTURES.get(meta.arch)
    if make is None:
        meta.refuse(
            f"the architecture {brief(meta.arch)} is not supported; supported are "
            f"{', '.join(sorted(_ARCHITECTURES))}"
        )
    kind, fields = make(meta)
    fields = _common(meta) | fields
    check_unread(meta)
    layers, rope = fields["num_hidden_layers"], fields["rope_parameters"]
    log.debug("%s: %s, %d layers, rope %s", gguf.name, kind, layers, rope)
    try:
        config = CONFIG_MAPPING[kind](**fields)
    except Exception as error:  # whatever a family's code makes of its fields
        message = " ".join(str(error).split())
        raise CheckpointError(
            f"{gguf.name}: transformers cannot make a config of its metadata: "
            f"{message or type(error).__name__}"
        ) from error
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    config.architectures = [name if isinstance(name, str) else name[0]]
    return config


def _common(meta: Metadata) -> dict[str, Any]:
    tensors, tokens = meta.gguf.tensors, meta.gguf.metadata
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        meta.fail("there is no matrix token_embd.weight; is this a model, or only its vocabulary?")
    hidden = meta.integer("embedding_length")
    vocabulary, width = embedding.shape
    if vocabulary < 1:
        meta.fail("token_embd.weight has no rows: there are no tokens")
    if width != hidden:
        meta.fail(
            f"token_embd.weight has rows of {width}, {meta.arch}.embedding_length is {hidden}"
        )
    out: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": _layers(meta),
        "num_attention_heads": _at_least_one(meta, "attention.head_count"),
        "max_position_embeddings": _at_least_one(meta, "context_length"),
        "rms_norm_eps": _epsilon(meta),
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": _dtype(meta.gguf),
    }
    for field, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        found = tokens.get(f"tokenizer.ggml.{key}_token_id")
        out[f"{field}_token_id"] = found if type(found) is int and found < vocabulary else None
    return out


def _dtype(gguf: GGUFFile) -> str:
    nbytes: dict[str, int] = {}
    for t in gguf.tensors.values():
        nbytes[t.type] = nbytes.get(t.type, 0) + t.nbytes
    most = max(nbytes, key=lambda kind: nbytes[kind])
    return {"f32": "float32", "f16": "float16"}.get(most, "bfloat16")


def _epsilon(meta: Metadata) -> float:
    key = "attention.layer_norm_rms_epsilon"
    epsilon = meta.real(key)
    if epsilon < 0:
        meta.fail(f"{meta.arch}.{key} is {epsilon:g}, not a number from 0 on")
    return epsilon


def _at_least_one(meta: Metadata, key: str) -> int:
    n = meta.integer(key)
    if n < 1:
        meta.fail(f"{meta.arch}.{key} is {n}, at least 1 is needed")
    return n


def _layers(meta: Metadata) -> int:
    """Without the layers that only predict tokens ahead: transformers leaves them out."""
    n = meta.integer("block_count") - meta.integer("nextn_predict_layers", 0)
    if n < 1:
        meta.fail(f"{meta.arch}.block_count leaves {n} layers")
    if n > len(meta.gguf.tensors):  # before anything is made for each of them
        meta.fail(
            f"{meta.arch}.block_count leaves {n} layers, and the file has "
            f"{len(meta.gguf.tensors)} tensors"
        )
    return n


def _kv_heads(meta: Metadata) -> int:
    key = "attention.head_count_kv"
    return _at_least_one(meta, key if meta.has(key) else "attention.head_count")


def _head_dim(meta: Metadata) -> int:
    """Elements per head; keys and values alike."""
    key, value = meta.optional("attention.key_length"), meta.optional("attention.value_length")
    if key and value and key != value:
        meta.refuse(f"keys of {key} and values of {value} elements per head are not supported")
    heads = _at_least_one(meta, "attention.head_count")
    return key or value or meta.integer("embedding_length") // heads


def _intermediate(meta: Metadata) -> dict[str, Any]:
    return {"intermediate_size": _at_least_one(meta, "feed_forward_length")}


def _attention(meta: Metadata, head_dim: int | None = None) -> dict[str, Any]:
    head_dim = head_dim or _head_dim(meta)
    _whole_heads(meta, head_dim)
    return {
        "num_key_value_heads": _kv_heads(meta),
        "head_dim": head_dim,
        "rope_parameters": rope_parameters(meta, head_dim),
    }


def _whole_heads(meta: Metadata, head_dim: int) -> None:
    rotated = meta.optional("rope.dimension_count")
    if rotated and rotated != head_dim:
        meta.refuse(f"rotating {rotated} of the {head_dim} elements of a head is not supported")


def _expert_counts(meta: Metadata) -> tuple[int, int]:
    """Number of experts, and how many of them a token uses."""
    n, used = _at_least_one(meta, "expert_count"), _at_least_one(meta, "expert_used_count")
    if used > n:
        meta.fail(f"{meta.arch}.expert_used_count is {used} of only {n} experts")
    return n, used


def _gates(meta: Metadata, *known: int) -> int:
    """What makes weights of a router's scores; the first of ``known`` where the file does not say,
    which is what llama.cpp's graph has then."""
    key = "expert_gating_func"
    code = meta.integer(key, 0) or known[0]
    if code not in known:
        meta.refuse(
            f"{meta.arch}.{key} is {code}, which is not supported for it; supported are "
            f"{', '.join(map(str, known))} (1: softmax, 2: sigmoid, 3: softmax of the chosen)"
        )
    return code


def _expert_width(meta: Metadata) -> int:
    """Files from before ``expert_feed_forward_length`` say it by the tensors only."""
    key = "expert_feed_forward_length"
    shapes = (t.shape for n, t in meta.gguf.tensors.items() if n.endswith(".ffn_down_exps.weight"))
    stored = next((shape[-1] for shape in shapes if shape), None)
    return meta.optional(key) or stored or _at_least_one(meta, key)


def _llama(meta: Metadata) -> tuple[str, dict[str, Any]]:
    # Whole heads are rotated; older files say the size of a head only by that.
    rotated = None if meta.has("attention.key_length") else meta.optional("rope.dimension_count")
    fields = _attention(meta, rotated) | _intermediate(meta)
    window = meta.optional("attention.sliding_window")
    if meta.optional("expert_count"):
        n, used = _expert_counts(meta)
        _gates(meta, _SOFTMAX)
        return "mixtral", fields | {
            "num_local_experts": n,
            "num_experts_per_tok": used,
            "sliding_window": window,
        }
    biased = {n for n in meta.gguf.tensors if n.startswith("blk.0.") and n.endswith(".bias")}
    if window and not biased:
        return "mistral", fields | {"sliding_window": window}
    fields |= {
        "attention_bias": any(".attn_" in n for n in biased),
        "mlp_bias": any(".ffn_" in n for n in biased),
    }
    if window:
        meta.refuse(f"a sliding window of {window} together with biases is not supported")
    return "llama", fields


def _qwen2(meta: Metadata) -> tuple[str, dict[str, Any]]:
    fields = _attention(meta) | _intermediate(meta)
    return "qwen2", fields | {"use_sliding_window": False, "sliding_window": None}


def _qwen3(meta: Metadata) -> tuple[str, dict[str, Any]]:
    _, fields = _qwen2(meta)
    return "qwen3", fields | {"attention_bias": False}


def _qwen_moe(meta: Metadata) -> dict[str, Any]:
    (n, used), width = _expert_counts(meta), _expert_width(meta)
    _gates(meta, _SOFTMAX)
    return _attention(meta) | {
        "intermediate_size": meta.optional("feed_forward_length") or width,
        "num_experts": n,
        "num_experts_per_tok": used,
        "moe_intermediate_size": width,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "sliding_window": None,
    }


def _qwen2moe(meta: Metadata) -> tuple[str, dict[str, Any]]:
    fields = _qwen_moe(meta)
    shared = meta.gguf.tensors.get("blk.0.ffn_down_shexp.weight")
    width = meta.optional("expert_shared_feed_forward_length")
    if width is None:
        width = shared.shape[-1] if shared is not None else fields["intermediate_size"]
    return "qwen2_moe", fields | {
        "shared_expert_intermediate_size": width,
        "norm_topk_prob": meta.flag("expert_weights_norm", False),  # by llama.cpp's graph
    }


def _qwen3moe(meta: Metadata) -> tuple[str, dict[str, Any]]:
    return "qwen3_moe", _qwen_moe(meta) | {
        "attention_bias": False,
        "norm_topk_prob": meta.flag("expert_weights_norm", True),  # by llama.cpp's graph
    }


def _gpt_oss(meta: Metadata) -> tuple[str, dict[str, Any]]:
    (n, used), width = _expert_counts(meta), _expert_width(meta)
    _gates(meta, _SOFTMAX_OF_CHOSEN)
    meta.has("expert_weights_norm")  # such weights add up to one as they are
    fields = _attention(meta)
    if fields["rope_parameters"]["rope_type"] == "yarn":
        fields["rope_parameters"]["truncate"] = False  # as published; not in the metadata
    return "gpt_oss", fields | {
        "intermediate_size": width,
        "num_local_experts": n,
        "num_experts_per_tok": used,
        "sliding_window": _at_least_one(meta, "attention.sliding_window"),
        "layer_types": _alternating(meta, 2),
        "attention_bias": True,
    }


def _alternating(meta: Metadata, period: int) -> list[str]:
    """Every ``period``-th layer attends to everything; a list in the file says otherwise."""
    n = _layers(meta)
    key = "attention.sliding_window_pattern"
    slides = meta.array(key, n)
    if slides is None:
        period = meta.integer(key, period)
        slides = [(i + 1) % period != 0 if period else False for i in range(n)]
    return ["sliding_attention" if s else "full_attention" for s in slides]


def _gemma3(meta: Metadata) -> tuple[str, dict[str, Any]]:
    heads, layers = _at_least_one(meta, "attention.head_count"), _layers(meta)
    head_dim = meta.optional("attention.key_length") or 256
    _whole_heads(meta, head_dim)
    scaled = rope_parameters(meta, head_dim, base=1_000_000.0)
    local = {"rope_type": "default", "rope_theta": meta.positive("rope.freq_base_swa", 10_000.0)}
    # By llama.cpp's graph: only the model of 62 layers scales by hidden size over heads.
    whole = layers == _GEMMA3_27B_LAYERS
    scalar = meta.integer("embedding_length") // heads if whole else head_dim
    if scale := meta.real("attention.scale", 0.0):
        exact = 1.0 / scale / scale if abs(scale) > _TINY else 0.0
        scalar = round(exact)
        if scale < 0 or scalar < 1 or not math.isclose(exact, scalar, rel_tol=1e-5):
            meta.refuse(
                f"{meta.arch}.attention.scale is {scale:g}, which is not supported: it is not 1 by "
                "the root of a whole number"
            )
    return "gemma3_text", _intermediate(meta) | {
        "num_key_value_heads": _kv_heads(meta),
        "head_dim": head_dim,
        "query_pre_attn_scalar": scalar,
        "sliding_window": _at_least_one(meta, "attention.sliding_window"),
        "layer_types": _alternating(meta, 6),
        "rope_parameters": {"full_attention": scaled, "sliding_attention": local},
        "attention_bias": False,
        "final_logit_softcapping": meta.real("final_logit_softcapping", 0.0) or None,
        "attn_logit_softcapping": meta.real("attn_logit_softcapping", 0.0) or None,
        "use_bidirectional_attention": False,
    }


def _routing(meta: Metadata) -> dict[str, Any]:
    """Experts as DeepSeek has them: shared ones, groups, dense layers first, a scale."""
    (n, used), width = _expert_counts(meta), _expert_width(meta)
    return {
        "n_routed_experts": n,
        "num_experts_per_tok": used,
        "moe_intermediate_size": width,
        "n_shared_experts": meta.integer("expert_shared_count", 0),
        "first_k_dense_replace": meta.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": meta.real("expert_weights_scale", 1.0) or 1.0,
        **_groups(meta, n),
    }


def _groups(meta: Metadata, experts: int) -> dict[str, int]:
    """The groups that experts are chosen by first, and of how many of them."""
    groups = meta.optional("expert_group_count") or 1
    used = meta.integer("expert_group_used_count") if groups > 1 else 1
    if experts % groups or not 1 <= used <= groups:
        meta.fail(
            f"{meta.arch} has {experts} experts in {groups} groups, of which {used} are used; "
            f"groups are of one size, and at least one is used"
        )
    return {"n_group": groups, "topk_group": used}


def _deepseek2(meta: Metadata) -> tuple[str, dict[str, Any]]:
    if not meta.optional("expert_count"):
        meta.refuse("a deepseek2 model without experts is not supported")
    rope = _at_least_one(meta, "rope.dimension_count")
    # Files since 2025 describe the compressed cache by key_length, the heads by key_length_mla.
    mla = "_mla" if meta.has("attention.key_length_mla") else ""
    key = _at_least_one(meta, f"attention.key_length{mla}")
    if key <= rope:
        meta.fail(f"{meta.arch}.attention.key_length{mla} is {key}, of which {rope} are rotated")
    sigmoid = _gates(meta, _SOFTMAX, _SIGMOID) == _SIGMOID
    normalised = meta.flag("expert_weights_norm", False)
    fields = _routing(meta) | {
        "intermediate_size": _at_least_one(meta, "feed_forward_length"),
        # In the metadata the heads share one key; the model has as many as there are queries.
        "num_key_value_heads": _at_least_one(meta, "attention.head_count"),
        "q_lora_rank": meta.optional("attention.q_lora_rank"),
        "kv_lora_rank": _at_least_one(meta, "attention.kv_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope,
        "v_head_dim": _at_least_one(meta, f"attention.value_length{mla}"),
        "rope_parameters": rope_parameters(meta, rope),
        "attention_bias": False,
        "norm_topk_prob": normalised,
    }
    if sigmoid:
        if not meta.has("expert_group_count"):
            log.warning(
                "%s says nothing of expert groups (%s.expert_group_count): routing without groups, "
                "as llama.cpp does; a newer conversion has them",
                meta.gguf.name,
                meta.arch,
            )
        return "deepseek_v3", fields | {"rope_interleave": True, "num_mtp_layers": 0}
    if normalised:
        meta.refuse("deepseek2 with softmax gates that are normalised again is not supported")
    grouped = fields["n_group"] > 1
    return "deepseek_v2", fields | {
        "topk_method": "group_limited_greedy" if grouped else "greedy",
        "mlp_bias": False,
    }


def _glm4moe(meta: Metadata) -> tuple[str, dict[str, Any]]:
    _gates(meta, _SIGMOID)
    head_dim = _head_dim(meta)
    rotary = meta.optional("rope.dimension_count") or head_dim // 2
    rope = rope_parameters(meta, rotary)
    rope["partial_rotary_factor"] = rotary / head_dim
    return "glm4_moe", _routing(meta) | _intermediate(meta) | {
        "num_key_value_heads": _kv_heads(meta),
        "head_dim": head_dim,
        "rope_parameters": rope,
        "attention_bias": "blk.0.attn_q.bias" in meta.gguf.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in meta.gguf.tensors,
        "norm_topk_prob": meta.flag("expert_weights_norm", True),
        "num_mtp_layers": 0,
    }


_ARCHITECTURES: dict[str, Callable[[Metadata], tuple[str, dict[str, Any]]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "gpt-oss": _gpt_oss,
    "deepseek2": _deepseek2,
    "glm4moe": _glm4moe,
    "gemma3": _gemma3,
}

ARCHITECTURES = tuple(sorted(_ARCHITECTURES))
"""What ``general.architecture`` may say."""
