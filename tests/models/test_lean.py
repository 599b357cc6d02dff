"""Decode kernels against transformers: whole models token by token, twins of layers, detection."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from offload.cpu_ops import threads
from offload.cpu_ops.kv_cache import KvCache
from offload.cpu_ops.layer_plan import QkNorm
from offload.cpu_ops.routing_choice import Scoring
from offload.models.lean_detect import Lean, detect
from offload.models.lean_layer import PackedLayer, rope_of
from offload.models.lean_verify import verify

COMMON: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 96, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 512,
}  # fmt: skip
MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
SLIDING = ["sliding_attention", "full_attention"]
WINDOWED: dict[str, Any] = {"layer_types": SLIDING, "sliding_window": 9, "use_sliding_window": True}

CONFIGS: dict[str, Any] = {
    "llama": lambda: tf.LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True),
    "llama3 rope": lambda: tf.LlamaConfig(
        **COMMON,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        },
    ),
    "mistral": lambda: tf.MistralConfig(**COMMON, sliding_window=7),
    "qwen2": lambda: tf.Qwen2Config(**COMMON, **WINDOWED, max_window_layers=0),
    "qwen3": lambda: tf.Qwen3Config(**COMMON),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(**COMMON, **MOE, norm_topk_prob=True),
    "qwen3_moe dense layer": lambda: tf.Qwen3MoeConfig(**COMMON, **MOE, mlp_only_layers=[1]),
    "qwen2_moe": lambda: tf.Qwen2MoeConfig(
        **COMMON, **MOE, shared_expert_intermediate_size=48, norm_topk_prob=False
    ),
    "mixtral": lambda: tf.MixtralConfig(
        **COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "olmoe": lambda: tf.OlmoeConfig(
        **{**COMMON, "num_attention_heads": 3, "num_key_value_heads": 3},
        num_experts=8, num_experts_per_tok=3,
    ),
    "gpt_oss": lambda: tf.GptOssConfig(
        **COMMON, num_local_experts=8, num_experts_per_tok=3, sliding_window=9, layer_types=SLIDING,
    ),
    "gemma3": lambda: tf.Gemma3TextConfig(
        **COMMON, sliding_window=9, layer_types=SLIDING, query_pre_attn_scalar=24,
    ),
}  # fmt: skip
STEPS = 50


@pytest.fixture(autouse=True)
def one_count_of_threads() -> Any:
    before = threads._threads
    threads.setup(torch.get_num_threads())
    yield
    threads._threads = before


def from_config(config: Any) -> Any:
    auto: Any = tf.AutoModel
    return auto.from_config(config)


def model_of(name: str, **changes: Any) -> Any:
    torch.manual_seed(1)
    config = CONFIGS[name]()
    for field, value in changes.items():
        assert hasattr(config, field)
        setattr(config, field, value)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = from_config(config).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    return model


def plan_of(layer: Any) -> Lean:
    found = detect(layer)
    assert isinstance(found, Lean), found
    return found


class LeanModel:
    """All layers of a model by kernels."""

    def __init__(self, model: Any, capacity: int = STEPS + 8) -> None:
        leans = [plan_of(layer) for layer in model.layers]
        plan = leans[0].plan.attention
        self.cache = KvCache(len(leans), plan.key_heads, plan.dim, capacity)
        ropes = {lean.layer_type: rope_of(model.rotary_emb, lean.layer_type) for lean in leans}
        self.layers = [
            PackedLayer(layer, lean, ropes[lean.layer_type], self.cache, i)
            for i, (layer, lean) in enumerate(zip(model.layers, leans, strict=True))
        ]

    def __call__(self, x: Any) -> list[Any]:
        """Every layer's output for one token's embedding [H]."""
        outs = []
        for layer in self.layers:
            x = layer(x.copy())
            outs.append(x)
        return outs


def hidden_states(model: Any, x: Any, cache: Any = None) -> list[Any]:
    """Of a model's layers, [T, H] each, before the last norm."""
    found: list[Any] = []
    hooks = [
        layer.register_forward_hook(
            lambda _m, _a, out: found.append((out[0] if isinstance(out, tuple) else out)[0].numpy())
        )
        for layer in model.layers
    ]
    with torch.no_grad():
        model(inputs_embeds=x, past_key_values=cache, use_cache=cache is not None)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_token_by_token_as_transformers(name: str) -> None:
    model = model_of(name)
    lean, cache = LeanModel(model), tf.DynamicCache(config=model.config)
    tokens = torch.randn(1, STEPS, model.config.hidden_size)
    for t in range(STEPS):
        expected = hidden_states(model, tokens[:, t : t + 1], cache)
        got = lean(tokens[0, t].numpy())
        assert len(expected) == len(got)
        for e, g in zip(expected, got, strict=True):
            assert np.abs(e[0] - g).max() <= 2e-5 * np.abs(e).max()


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma3"])
def test_after_a_prompt_of_the_stock_path(name: str) -> None:
    model = model_of(name)
    lean, prompt = LeanModel(model), 21
    tokens = torch.randn(1, prompt + 5, model.config.hidden_size)
    cache: Any = tf.DynamicCache()  # without the config: sliding layers keep all tokens
    hidden_states(model, tokens[:, :prompt], cache)
    for i, layer in enumerate(cache.layers):
        lean.cache.fill(i, layer.keys[0].numpy(), layer.values[0].numpy())
    whole = hidden_states(model, tokens)
    for t in range(prompt, prompt + 5):
        for e, g in zip(whole, lean(tokens[0, t].numpy()), strict=True):
            assert np.abs(e[t] - g).max() <= 2e-5 * np.abs(e[t]).max()
    lean.cache.crop(-4)
    again = lean(tokens[0, prompt + 1].numpy())
    assert np.abs(again[-1] - whole[-1][prompt + 1]).max() <= 2e-5 * np.abs(again[-1]).max()


@pytest.mark.parametrize("name", CONFIGS)
def test_twins_agree_and_detection_reads_no_weights(name: str) -> None:
    config = CONFIGS[name]()
    with torch.device("meta"):
        model = from_config(config)
    for layer in model.layers:
        assert verify(layer, plan_of(layer)) < 1e-5


def test_verify_finds_a_wrong_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    from offload.models import lean_detect

    family = lean_detect._FAMILIES["GptOssDecoderLayer"]
    model = model_of("gpt_oss")
    wrong = dataclasses.replace(family, scoring=Scoring.SOFTMAX)
    monkeypatch.setitem(lean_detect._FAMILIES, "GptOssDecoderLayer", wrong)
    assert verify(model.layers[0], plan_of(model.layers[0])) > 1e-3


def test_plans_of_layers() -> None:
    gemma = [plan_of(layer).plan for layer in model_of("gemma3").layers]
    assert [p.attention.window for p in gemma] == [9, 0]
    assert gemma[0].attention.qk_norm is QkNorm.HEAD
    assert gemma[0].attention.norm.plus == 1.0
    olmoe = plan_of(model_of("olmoe").layers[0]).plan
    assert olmoe.attention.qk_norm is QkNorm.WIDE
    assert olmoe.router is not None
    first, second = (plan_of(x).plan for x in model_of("qwen3_moe dense layer").layers)
    assert first.router is not None
    assert second.mlp is not None


def small(config: Any) -> Any:
    with torch.device("meta"):
        return from_config(config).layers[0]


def test_reasons() -> None:
    extra = model_of("llama").layers[0]
    extra.self_attn.gate = torch.nn.Linear(4, 4)
    assert "no place for: self_attn.gate.bias, self_attn.gate.weight" in str(detect(extra))
    assert "no plan is written after" in str(detect(torch.nn.Linear(2, 2)))
    clipped = tf.OlmoeConfig(**COMMON, num_experts=8, clip_qkv=8.0)
    assert "clip" in str(detect(small(clipped)))
    odd = tf.LlamaConfig(**{**COMMON, "hidden_size": 100, "num_attention_heads": 4})
    assert "multiple of 16, not 100" in str(detect(small(odd)))
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert "changes with the length" in str(
        detect(small(tf.LlamaConfig(**COMMON, rope_parameters=dynamic)))
    )
    relu = tf.LlamaConfig(**COMMON, hidden_act="relu")
    assert "activation" in str(detect(small(relu)))
