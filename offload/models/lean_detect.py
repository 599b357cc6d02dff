"""Which decoder layers the decode kernels can compute, told from a module's structure.

Nothing is run and no weight is read: layers may be on the meta device. A layer fits if its class is
one of those whose forward the plan was written after, if its configuration asks for nothing beyond
the plan, and if *every* parameter has a place in it: a parameter left over means that the class
computes something the plan does not. ``lean_verify.py`` then compares numbers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from offload.cpu_ops.formats import FORMATS, Format
from offload.cpu_ops.functions import Glu
from offload.cpu_ops.layer_plan import (
    AttentionPlan,
    LayerPlan,
    MatrixPlan,
    MlpPlan,
    NormPlan,
    QkNorm,
    RouterPlan,
)
from offload.cpu_ops.routing_choice import Scoring
from offload.errors import OffloadError

FormatOf = Callable[[str], Format]
"""A parameter's name in the layer to the format it is packed in."""

_ROPES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose frequencies do not change with the length."""
_GLU = {
    "silu": Glu.SILU,
    "swish": Glu.SILU,
    "gelu": Glu.GELU,
    "gelu_pytorch_tanh": Glu.GELU_TANH,
}


class Window(enum.Enum):
    """Where a class takes its sliding window from."""

    NEVER = "never"
    CONFIG = "config"
    """All layers: ``config.sliding_window``."""
    LAYER_TYPE = "layer type"
    """Layers that ``config.layer_types`` calls sliding."""


@dataclass(frozen=True, slots=True)
class _Family:
    """What the code of a class does that its parameters do not tell."""

    window: Window = Window.NEVER
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    scoring: Scoring = Scoring.SOFTMAX
    renorm: bool | None = None
    """None: ``config.norm_topk_prob``."""
    plus: float = 0.0
    post_norms: bool = False
    wide_norm: bool = False
    transposed: bool = False


_FAMILIES = {
    "LlamaDecoderLayer": _Family(),
    "MistralDecoderLayer": _Family(Window.CONFIG),
    "Qwen2DecoderLayer": _Family(Window.LAYER_TYPE),
    "Qwen3DecoderLayer": _Family(Window.LAYER_TYPE),
    "Qwen2MoeDecoderLayer": _Family(Window.LAYER_TYPE),
    "Qwen3MoeDecoderLayer": _Family(Window.CONFIG),
    "MixtralDecoderLayer": _Family(Window.CONFIG, renorm=True),
    "OlmoeDecoderLayer": _Family(wide_norm=True),
    "GptOssDecoderLayer": _Family(
        Window.LAYER_TYPE,
        router="mlp.router",
        scoring=Scoring.AFTER,
        renorm=False,
        transposed=True,
    ),
    "Gemma3DecoderLayer": _Family(Window.LAYER_TYPE, plus=1.0, post_norms=True),
}


@dataclass(frozen=True, slots=True)
class Parts:
    """Names in the layer of the parameters that the plan's slots stand for."""

    attention: dict[str, str]
    mlp: dict[str, str] = field(default_factory=dict)
    router: dict[str, str] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    experts: str = ""
    """Name of the module with the routed experts."""
    transposed: bool = False
    """Their stacked weights are [experts, columns, rows], gate and up rows in turn (gpt-oss); else
    [experts, rows, columns], gate before up."""


@dataclass(frozen=True, slots=True)
class Lean:
    """A layer that the kernels can compute. ``layer_type``: of its rotary embedding, where a model
    has several (Gemma 3)."""

    plan: LayerPlan
    parts: Parts
    layer_type: str | None


class _Unfit(Exception):
    """Why a layer does not fit."""


def detect(layer: Any, format_of: FormatOf | None = None) -> Lean | str:
    """The plan of a decoder layer, or the reason why there is none.

    ``format_of``: formats of matrices by parameter name; default: float32.
    """
    try:
        return _detect(layer, format_of or (lambda name: FORMATS["f32"]))
    except (_Unfit, OffloadError) as why:
        return str(why)


def _detect(layer: Any, format_of: FormatOf) -> Lean:
    name = type(layer).__name__
    family = _FAMILIES.get(name)
    if family is None or not type(layer).__module__.startswith("transformers.models."):
        raise _Unfit(f"no plan is written after {type(layer).__module__}.{name}")
    attention = getattr(layer, "self_attn", None)
    config = getattr(attention, "config", None)
    if attention is None or config is None:
        raise _Unfit(f"{name} has no self_attn with a config")
    _check_config(config)
    shapes = {n: tuple(p.shape) for n, p in layer.named_parameters()}
    reader = _Reader(shapes, format_of, NormPlan(eps=_eps(layer, config), plus=family.plus))
    parts: dict[str, Any] = {}
    plan_a, parts["attention"], layer_type = _attention(layer, config, family, reader)
    plans: dict[str, Any] = {}
    if f"{family.router}.weight" in shapes:
        plans["router"], parts["router"] = _router(layer, config, family, reader)
        plans.update(_experts(layer, family, reader))
        parts["experts"], parts["transposed"] = family.experts, family.transposed
        if "mlp.shared_expert.gate_proj.weight" in shapes:
            shared = "mlp.shared_expert"
            plans["shared"], parts["shared"] = _mlp(layer, shared, family, reader, own_norm=False)
    else:
        plans["mlp"], parts["mlp"] = _mlp(layer, "mlp", family, reader, own_norm=True)
    rest = sorted(set(shapes) - reader.used)
    if rest:
        raise _Unfit(f"{name} has parameters that the plan has no place for: {', '.join(rest)}")
    return Lean(LayerPlan(attention=plan_a, **plans), Parts(**parts), layer_type)


def _check_config(config: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [r for r in rope.values() if isinstance(r, dict)]
    for kind in kinds:
        if kind.get("rope_type", "default") not in _ROPES:
            raise _Unfit(f"rotary embedding {kind['rope_type']!r} changes with the length")
        if kind.get("partial_rotary_factor", 1.0) != 1.0:
            raise _Unfit("these classes rotate whole heads, the config asks for a part")
    if not kinds:
        raise _Unfit("the config does not tell its rotary embedding")
    if getattr(config, "clip_qkv", None) is not None:
        raise _Unfit("clip_qkv: queries, keys and values are clipped")
    if getattr(config, "use_bidirectional_attention", False):
        raise _Unfit("attention looks ahead")


def _eps(layer: Any, config: Any) -> float:
    eps = {
        float(getattr(m, "variance_epsilon", getattr(m, "eps", float("nan"))))
        for n, m in layer.named_modules()
        if n.split(".")[-1].endswith("norm")
    }
    if eps != {float(config.rms_norm_eps)}:
        raise _Unfit(f"norms with eps {sorted(eps)}, the config has {config.rms_norm_eps}")
    return float(config.rms_norm_eps)


class _Reader:
    """Parameters of a layer by name, and which were asked for."""

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], format_of: FormatOf, norm: NormPlan
    ) -> None:
        self.shapes, self._format_of, self.norm = shapes, format_of, norm
        self.used: set[str] = set()

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.shapes:
            raise _Unfit(f"no parameter {name}")
        self.used.add(name)
        return self.shapes[name]

    def matrix(self, slot: str, module: str, parts: dict[str, str]) -> MatrixPlan:
        weight, bias = f"{module}.weight", f"{module}.bias"
        shape = self.shape(weight)
        if len(shape) != 2:
            raise _Unfit(f"{weight} is no matrix: {list(shape)}")
        parts[slot] = weight
        if bias in self.shapes:
            self.shape(bias)
            parts[f"{slot}_bias"] = bias
        return MatrixPlan(
            format=self._format_of(weight), rows=shape[0], columns=shape[1],
            bias=bias in self.shapes,
        )  # fmt: skip

    def vector(self, slot: str, name: str, n: int, parts: dict[str, str]) -> None:
        shape = self.shape(name)
        if shape != (n,):
            raise _Unfit(f"{name} is {list(shape)}, the plan wants [{n}]")
        parts[slot] = name


def _attention(
    layer: Any, config: Any, family: _Family, reader: _Reader
) -> tuple[AttentionPlan, dict[str, str], str | None]:
    module, parts = layer.self_attn, dict[str, str]()
    q, k, v, o = (reader.matrix(x, f"self_attn.{x}_proj", parts) for x in "qkvo")
    dim, hidden = int(module.head_dim), q.columns
    heads, key_heads = q.rows // dim, k.rows // dim
    reader.vector("norm", "input_layernorm.weight", hidden, parts)
    qk_norm = QkNorm.NONE
    if "self_attn.q_norm.weight" in reader.shapes:
        qk_norm = QkNorm.WIDE if family.wide_norm else QkNorm.HEAD
        wide = family.wide_norm
        reader.vector("q_norm", "self_attn.q_norm.weight", q.rows if wide else dim, parts)
        reader.vector("k_norm", "self_attn.k_norm.weight", k.rows if wide else dim, parts)
    sinks = "self_attn.sinks" in reader.shapes
    if sinks:
        reader.vector("sinks", "self_attn.sinks", heads, parts)
    if family.post_norms:
        reader.vector("post_norm", "post_attention_layernorm.weight", hidden, parts)
    layer_types = getattr(config, "layer_types", None)
    layer_type = layer_types[module.layer_idx] if layer_types else None
    window = 0
    if family.window is Window.CONFIG or (
        family.window is Window.LAYER_TYPE and layer_type == "sliding_attention"
    ):
        window = int(getattr(config, "sliding_window", None) or 0)
    elif layer_type not in (None, "full_attention"):
        raise _Unfit(f"no plan for a layer of type {layer_type!r}")
    plan = AttentionPlan(
        hidden=hidden, heads=heads, key_heads=key_heads, dim=dim, q=q, k=k, v=v, o=o,
        norm=reader.norm, rotary=dim, scaling=float(module.scaling), qk_norm=qk_norm,
        window=window, softcap=float(getattr(module, "attn_logit_softcapping", None) or 0.0),
        sinks=sinks, post_norm=family.post_norms,
    )  # fmt: skip
    several = "rope_type" not in config.rope_parameters
    return plan, parts, layer_type if several else None


def _feed_forward_norm(family: _Family) -> str:
    before = "pre_feedforward_layernorm" if family.post_norms else "post_attention_layernorm"
    return f"{before}.weight"


def _router(
    layer: Any, config: Any, family: _Family, reader: _Reader
) -> tuple[RouterPlan, dict[str, str]]:
    parts = dict[str, str]()
    gate = reader.matrix("gate", family.router, parts)
    reader.vector("norm", _feed_forward_norm(family), gate.columns, parts)
    renorm = family.renorm
    plan = RouterPlan(
        hidden=gate.columns, gate=gate, norm=reader.norm,
        top_k=int(layer.get_submodule(family.router).top_k), scoring=family.scoring,
        renorm=bool(config.norm_topk_prob) if renorm is None else renorm,
    )  # fmt: skip
    return plan, parts


def _experts(layer: Any, family: _Family, reader: _Reader) -> dict[str, Any]:
    module, name = layer.get_submodule(family.experts), family.experts
    gate_up = reader.shape(f"{name}.gate_up_proj")
    reader.shape(f"{name}.down_proj")
    if gate_up[0] < 2:
        raise _Unfit("a single expert is no choice: it is not streamed or packed as experts are")
    biases = f"{name}.gate_up_proj_bias" in reader.shapes
    if biases:
        reader.shape(f"{name}.gate_up_proj_bias")
        reader.shape(f"{name}.down_proj_bias")
    if family.transposed:
        return {
            "inner": gate_up[2] // 2, "expert_biases": biases, "glu": Glu.CLAMPED,
            "alpha": float(module.alpha), "limit": float(module.limit),
        }  # fmt: skip
    return {"inner": gate_up[1] // 2, "expert_biases": biases, "glu": _glu(module)}


def _glu(module: Any) -> Glu:
    """Of a module's ``act_fn``, by the class that transformers' table has for it."""
    from transformers.activations import ACT2FN

    act = module.act_fn
    for name, glu in _GLU.items():
        known = ACT2FN[name]
        if type(known) is type(act) and repr(known) == repr(act):
            return glu
    raise _Unfit(f"no kernel for the activation {act!r}")


def _mlp(
    layer: Any, name: str, family: _Family, reader: _Reader, *, own_norm: bool
) -> tuple[MlpPlan, dict[str, str]]:
    parts = dict[str, str]()
    gate, up, down = (reader.matrix(x, f"{name}.{x}_proj", parts) for x in ("gate", "up", "down"))
    hidden, share = gate.columns, False
    if own_norm:
        reader.vector("norm", _feed_forward_norm(family), hidden, parts)
        if family.post_norms:
            reader.vector("post_norm", "post_feedforward_layernorm.weight", hidden, parts)
    elif f"{name}_gate.weight" in reader.shapes:
        share, parts["share"] = True, f"{name}_gate.weight"
        if reader.shape(parts["share"]) != (1, hidden):
            raise _Unfit(f"{parts['share']} is no single row")
    plan = MlpPlan(
        hidden=hidden, gate=gate, up=up, down=down, norm=reader.norm if own_norm else None,
        glu=_glu(layer.get_submodule(name)), share=share,
        post_norm=own_norm and family.post_norms,
    )  # fmt: skip
    return plan, parts
