"""A two-layer toy of a family: what a process weighs before any real weight is loaded.

Running one token through it imports the family's code, starts torch's threads and fills its
kernel caches; the resident set after that is the *baseline* above which a budget counts.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from offload.blocks import Tier
from offload.models import toy_times
from offload.runtime import choice
from offload.runtime.choice import Choice
from offload.runtime.rss import current_rss

logger = logging.getLogger(__name__)

TOY_BYTES = 8 * 2**20
"""A toy is at most this large."""

PROMPT = 64
"""Tokens of a toy's prompt on a card: as many as take the kernels of long ones."""

_SMALL: dict[str, Any] = {
    # depth
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "num_blocks": 2,
    "encoder_layers": 2, "decoder_layers": 2, "num_encoder_layers": 2, "num_decoder_layers": 2,
    # width
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "word_embed_proj_dim": 64, "emb_dim": 64,
    "embedding_size": 64, "input_embedding_size": 64, "output_embedding_size": 64,
    "embedding_dim": 64, "attention_hidden_size": 64, "lru_width": 64,
    "intermediate_size": 96, "ffn_dim": 96, "n_inner": 96, "d_ff": 96, "dff": 96, "d_inner": 96,
    "ffn_hidden_size": 96, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "feed_forward_size": 96,
    "dim_ff": 96, "intermediate_size_mlp": 96, "dense_intermediate_size": 96,
    # heads
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "attention_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "num_query_groups": 2,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16,
    "head_dim": 16, "d_kv": 16, "dim_head": 16, "d_head": 16, "attention_head_size": 16,
    "attention_head_dim": 16, "kv_channels": 16, "rotary_dim": 8, "query_pre_attn_scalar": 16,
    "q_lora_rank": 16, "kv_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "qk_head_dim": 24, "v_head_dim": 16,
    "index_head_dim": 16, "index_n_heads": 2, "index_topk": 16,
    # linear attention and state spaces
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_num_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_head_dim": 16,
    "state_size": 8, "mamba_d_state": 8, "ssm_state_size": 8, "time_step_rank": 4,
    "mamba_dt_rank": 4, "mamba_n_heads": 8, "mamba_num_heads": 8, "n_mamba_heads": 2,
    "mamba_d_head": 16, "mamba_head_dim": 16, "mamba_headdim": 16, "mamba_d_ssm": 128,
    "n_groups": 1, "mamba_n_groups": 1, "mamba_ngroups": 1, "chunk_size": 16,
    "mamba_chunk_size": 16, "adapter_rank": 8, "laurel_rank": 8,
    # experts
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32, "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32, "shared_experts_intermediate_size": 32,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2,
    "n_group": 1, "topk_group": 1, "num_expert_group": 1, "n_shared_experts": 1,
    "first_k_dense_replace": 0, "zero_expert_num": 2, "router_hidden_size": 32,
    # lengths and vocabulary
    "vocab_size": 256, "vocab_size_per_layer_input": 256, "decoder_vocab_size": 256,
    "hidden_size_per_layer_input": 16, "unpadded_vocab_size": 256,
    "max_position_embeddings": 256, "n_positions": 256, "max_seq_len": 256, "n_ctx": 256,
    "max_source_positions": 64, "max_target_positions": 256, "context_length": 256,
    "sliding_window": 8, "sliding_window_size": 8, "attention_window_size": 8, "window_size": 8,
    "local_attention": 8, "attention_chunk_size": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
"""Small numbers for every name that families give to the same few quantities."""


def small_config(kind: type, **overrides: Any) -> Any:
    """A tiny config of class ``kind``: few layers, narrow, a vocabulary of 256.

    Whatever the class calls its sizes is found by name among its attributes; nested configs
    (``text_config``, ...) are shrunk the same way. ``overrides`` go on top.

    Raises:
        Exception: whatever the class raises if these numbers do not go together.
    """
    default = kind()
    known = default.to_dict()
    small = {k: v for k, v in _SMALL.items() if k in known}
    if "qk_rope_head_dim" in known:
        # Latent attention: every head has its own keys, and ``head_dim`` is the rotary part's.
        small["num_key_value_heads"] = small.get("num_attention_heads", 4)
        small["head_dim"] = small["qk_rope_head_dim"]
    if "num_kv_shared_layers" in known:
        small["num_kv_shared_layers"] = 0
    layers = overrides.get("num_hidden_layers", _SMALL["num_hidden_layers"])
    for name, value in known.items():
        # One kind for each layer (attention, mamba, sparse, ...): the few there are, in turn.
        if isinstance(value, list) and len(value) == known.get("num_hidden_layers"):
            kinds = list(dict.fromkeys(v for v in value if isinstance(v, str)))
            if kinds:
                small[name] = [kinds[i % len(kinds)] for i in range(layers)]
    small = {k: v for k, v in small.items() if k in known}
    for name in getattr(kind, "sub_configs", {}):
        part = getattr(default, name, None)
        if part is not None and name not in overrides:
            small[name] = small_config(type(part))
    return kind(**{**small, **overrides})


def toy_config(config: Any) -> Any | None:
    """A tiny config of the same class, or None if the family refuses these numbers."""
    try:
        return small_config(type(config))
    except Exception as error:  # noqa: BLE001  config classes validate in their own ways
        logger.info("no toy of %s: %s", type(config).__name__, error)
        return None


def two_layers(config: Any, model_cls: Any, dtype: torch.dtype) -> Any | None:
    """The first two layers of a model that is small itself, so that the kernels compiled for its
    shapes count as what they are: code, not weights. None for large models and other families."""
    small = copy.deepcopy(config)
    if getattr(small, "num_hidden_layers", 0) <= 2:
        return None
    try:
        small.num_hidden_layers = 2
        for name in ("layer_types", "mlp_layer_types"):
            if isinstance(getattr(small, name, None), list):
                setattr(small, name, getattr(small, name)[:2])
        with torch.device("meta"):
            meta = model_cls._from_config(small, dtype=dtype)
    except Exception as error:  # noqa: BLE001  other depth-dependent lists may disagree
        logger.info("no two layers of %s: %s", type(config).__name__, error)
        return None
    nbytes = sum(p.numel() * p.element_size() for p in meta.parameters())
    return small if nbytes <= TOY_BYTES else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Warm:
    """What the toy has shown of this process, in bytes and in seconds per token.

    ``layer_s``, ``expert_s``: the time that one layer (without its experts) and one routed expert
    take when there is next to nothing to compute, that is, Python, dispatch and the books of what
    is where. ``fixed_s``: what ``generate`` adds to each token besides the layers. ``fetch_s``:
    what each block that is read from disk costs those who compute, besides the wait for its bytes:
    the way to the disk's queue and back, and threads that take turns with Python. Zero where there
    was no toy.
    """

    baseline_rss: int
    layer_s: float = 0.0
    expert_s: float = 0.0
    fixed_s: float = 0.0
    fetch_s: float = 0.0


def warm_up(config: Any, model_cls: Any, dtype: torch.dtype, timed: bool = True) -> Warm:
    """Run a toy of the family, by plain transformers and then streamed by this package from a few
    kilobytes on disk, and look at what the process weighs and, if ``timed``, how long it took.

    So the baseline is the bare process: imported code, started threads, warmed kernels and
    allocator pools, and nothing of any model. Falls back to the resident set as it is if the
    family has no toy.
    """
    times = Warm(baseline_rss=0)
    for toy in (two_layers(config, model_cls, dtype), toy_config(config)):
        if toy is None:
            continue
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                like = toy_times.Like.of(config, dtype) if timed else None
                times = _run_toy(toy, model_cls, dtype, like)
            break
        except Exception as error:  # noqa: BLE001  a warm-up must never stop the real run
            logger.info("the toy of %s does not run: %s", type(config).__name__, error)
    gc.collect()
    return replace(times, baseline_rss=current_rss())


def _run_toy(toy: Any, model_cls: Any, dtype: torch.dtype, like: toy_times.Like | None) -> Warm:
    """``like``: the model whose predictions need times; None: nobody asks."""
    from offload.models.load import Options, plan_model

    model = model_cls._from_config(toy, dtype=dtype).eval()
    model.set_experts_implementation("eager")
    _one_token(model)
    times = toy_times.Times()
    fetch_s = 0.0
    with tempfile.TemporaryDirectory() as directory, quiet():
        model.save_pretrained(directory)
        timed = like if model.can_generate() else None
        del model
        # All of it in memory, but asked for as ever: that is a quarter of an expert's time.
        options = Options(ram=2**30, context=32, overhead_bytes=0)
        with contextlib.closing(_Streamed(Path(directory), options)) as kept:
            _one_token(kept.model)
            if timed is not None:
                times = toy_times.measure(kept.model, timed)
        prepared = plan_model(Path(directory), options, Warm(baseline_rss=0))
        options.ram = prepared.minimum[Tier.RAM]
        with contextlib.closing(_Streamed(Path(directory), options)) as streamed:
            _one_token(streamed.model)
            if timed is not None:
                fetched = toy_times.measure(streamed.model, timed)
                more_s = fetched.token_s - fetched.wait_s - times.token_s
                fetch_s = max(0.0, more_s) / fetched.blocks if fetched.blocks else 0.0
    return Warm(
        baseline_rss=0,
        layer_s=times.layer_s,
        expert_s=times.expert_s,
        fixed_s=times.fixed_s,
        fetch_s=fetch_s,
    )


def warm_card(chosen: Choice, config: Any, model_cls: Any, dtype: torch.dtype) -> None:
    """Have the process weigh what it will with a card in use, before ``warm_up`` weighs it.

    CUDA loads each kernel's code when it is first called, and keeps a part of it in the host's
    memory: a toy of the family calls those that a model will, with a prompt, a token, and a draw.
    Nothing to do on the CPU.
    """
    choice.warm_up(chosen)
    toy = toy_config(config) if chosen.kind == "cuda" else None
    if toy is None:
        return
    place = torch.device(chosen.name)
    cards = [] if place.index is None else [place.index]
    try:
        with torch.random.fork_rng(devices=cards), torch.no_grad():
            model = model_cls._from_config(toy, dtype=dtype).eval()
            model.set_experts_implementation("eager")
            _on_card(model.to(place))
    except Exception as error:  # noqa: BLE001  a warm-up must never stop the real run
        logger.info("the toy of %s does not run on %s: %s", type(config).__name__, place, error)
    finally:
        model = None
        gc.collect()
        choice.release_cached(chosen)


def _on_card(model: Any) -> None:
    for tokens in (PROMPT, 4):
        ids = torch.ones((1, tokens), dtype=torch.int64, device=model.device)
        if not model.can_generate():
            model(ids)
            continue
        for drawn in ({"do_sample": False}, {"do_sample": True, "top_k": 20, "top_p": 0.9}):
            model.generate(ids, max_new_tokens=2, pad_token_id=0, **drawn)


class _Streamed:
    def __init__(self, directory: Path, options: Any) -> None:
        from offload.models.load import plan_model

        self.model = plan_model(directory, options, Warm(baseline_rss=0)).open()

    def close(self) -> None:
        self.model.offload.close()


def _one_token(model: Any) -> None:
    ids = torch.ones((1, 4), dtype=torch.int64)
    if model.can_generate():
        model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
    else:
        model(ids)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide transformers' progress bars: a toy is not what the user waits for."""
    from transformers.utils import logging as hf

    shown = hf.is_progress_bar_enabled()
    hf.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf.enable_progress_bar()
