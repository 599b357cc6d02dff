"""What a decoder layer computes for one token: shapes and kinds, never addresses.

A plan is data: layers of one model mostly share one. Where weights lie is told to the object that
runs it (``decode.py``), as it changes when weights are streamed. A matrix is [rows, columns] in a
packed format; norms, biases and sinks are float32.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from offload.cpu_ops.attention import GROUP
from offload.cpu_ops.formats import Format
from offload.cpu_ops.functions import Glu
from offload.cpu_ops.routing_choice import MOST_GROUPS, Scoring
from offload.errors import OffloadError


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixPlan:
    """A packed matrix, ``bias``: with a bias [rows]."""

    format: Format
    rows: int
    columns: int
    bias: bool = False

    def __post_init__(self) -> None:
        self.format.blocks(self.columns)
        if self.rows < 1:
            raise OffloadError(f"a matrix of {self.rows} rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class NormPlan:
    """RMS norms of a layer: x / sqrt(mean square + eps) * (weight + plus)."""

    eps: float
    plus: float = 0.0


class QkNorm(enum.Enum):
    """What is normed between the projections and the rotation."""

    NONE = "none"
    HEAD = "head"
    """Each head by itself, one weight [dim] for all: Qwen3, Gemma 3."""
    WIDE = "wide"
    """All heads as one vector, weight [heads * dim]: OLMoE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Norm, q, k, v, norms of heads, rotation, cache, attention, o, residual.

    ``rotary``: columns of a head that are rotated (the first); ``pairs``: interleaved, else
    rotate-half. ``window``: tokens that are seen, the present one included; 0: all. ``softcap``:
    0: none. ``post_norm``: the result is normed before it is added.

    Raises:
        OffloadError: shapes do not fit each other or the kernels.
    """

    hidden: int
    heads: int
    key_heads: int
    dim: int
    q: MatrixPlan
    k: MatrixPlan
    v: MatrixPlan
    o: MatrixPlan
    norm: NormPlan
    rotary: int
    scaling: float
    pairs: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    post_norm: bool = False

    def __post_init__(self) -> None:
        _multiple_of_16("hidden size", self.hidden)
        _multiple_of_16("head size", self.dim)
        if self.key_heads < 1 or self.heads % self.key_heads:
            raise OffloadError(f"{self.heads} heads cannot share {self.key_heads} key heads")
        if self.heads // self.key_heads > GROUP:
            raise OffloadError(
                f"{self.heads // self.key_heads} query heads per key head; kernels take {GROUP}"
            )
        if not 0 <= self.rotary <= self.dim or self.rotary % 2:
            raise OffloadError(f"cannot rotate {self.rotary} of {self.dim} columns")
        queries, keys = self.heads * self.dim, self.key_heads * self.dim
        for name, matrix, rows, columns in (
            ("q", self.q, queries, self.hidden),
            ("k", self.k, keys, self.hidden),
            ("v", self.v, keys, self.hidden),
            ("o", self.o, self.hidden, queries),
        ):
            _shape(name, matrix, rows, columns)

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of what needs an address."""
        return (
            "norm", "q", "k", "v", "o", *_biases(q=self.q, k=self.k, v=self.v, o=self.o),
            *(("q_norm", "k_norm") if self.qk_norm is not QkNorm.NONE else ()),
            *(("sinks",) if self.sinks else ()), *(("post_norm",) if self.post_norm else ()),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterPlan:
    """Norm, scores of experts, the best ``top_k`` and their weights.

    ``renorm``: weights are divided by their sum; then come times ``factor``. ``choice_bias``,
    ``groups`` and ``keep_groups``: of ``Scoring.SIGMOID``; only experts of the best
    ``keep_groups`` of ``groups`` groups are chosen.
    """

    hidden: int
    gate: MatrixPlan
    norm: NormPlan
    top_k: int
    scoring: Scoring
    renorm: bool = False
    factor: float = 1.0
    choice_bias: bool = False
    groups: int = 1
    keep_groups: int = 1

    def __post_init__(self) -> None:
        _multiple_of_16("hidden size", self.hidden)
        _shape("gate", self.gate, self.gate.rows, self.hidden)
        experts = self.gate.rows
        if not 1 <= self.groups <= MOST_GROUPS or experts % self.groups:
            raise OffloadError(f"{experts} experts in {self.groups} groups")
        if not 1 <= self.keep_groups <= self.groups:
            raise OffloadError(f"{self.keep_groups} of {self.groups} groups of experts")
        if not 1 <= self.top_k <= experts // self.groups * self.keep_groups:
            raise OffloadError(f"{self.top_k} of {experts} experts cannot be chosen")

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of what needs an address."""
        bias = ("choice_bias",) if self.choice_bias else ()
        return ("norm", "gate", *_biases(gate=self.gate), *bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpPlan:
    """Norm, down(glu(gate, up)), residual.

    ``norm`` None: the input is normed already and the result added to something else; so shared
    experts. ``share``: with a vector [hidden] whose product with the input, through a sigmoid,
    weights the result (Qwen2-MoE). ``post_norm``: the result is normed before it is added.
    """

    hidden: int
    gate: MatrixPlan
    up: MatrixPlan
    down: MatrixPlan
    norm: NormPlan | None
    glu: Glu = Glu.SILU
    alpha: float = 1.702
    limit: float = 7.0
    share: bool = False
    post_norm: bool = False

    def __post_init__(self) -> None:
        _multiple_of_16("hidden size", self.hidden)
        inner = self.gate.rows
        _shape("gate", self.gate, inner, self.hidden)
        _shape("up", self.up, inner, self.hidden)
        _shape("down", self.down, self.hidden, inner)
        if self.gate.format != self.up.format:
            raise OffloadError(
                f"gate is in {self.gate.format.name}, up in {self.up.format.name}; kernels take "
                f"the two in one format"
            )
        if self.post_norm and self.norm is None:
            raise OffloadError("a norm of results needs the plan of norms")

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of what needs an address."""
        return (
            *(("norm",) if self.norm else ()), "gate", "up", "down",
            *_biases(gate=self.gate, up=self.up, down=self.down),
            *(("share",) if self.share else ()), *(("post_norm",) if self.post_norm else ()),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """A decoder layer: attention, then a dense feed-forward ``mlp``, or a ``router`` and routed
    experts (``experts.py``) with perhaps a ``shared`` expert.

    ``glu``, ``alpha``, ``limit``, ``inner``, ``expert_biases``: of the routed experts.
    """

    attention: AttentionPlan
    mlp: MlpPlan | None = None
    router: RouterPlan | None = None
    shared: MlpPlan | None = None
    inner: int = 0
    glu: Glu = Glu.SILU
    alpha: float = 1.702
    limit: float = 7.0
    expert_biases: bool = False

    def __post_init__(self) -> None:
        if (self.mlp is None) == (self.router is None):
            raise OffloadError("a layer has either a dense feed-forward part or a router")
        if self.shared is not None and (self.router is None or self.shared.norm is not None):
            raise OffloadError("a shared expert goes with a router, and without a norm")


def common_columns(*formats: Format) -> int:
    """The fewest columns, a multiple of 16, that are whole blocks in all formats."""
    return math.lcm(16, *(f.block for f in formats))


def _biases(**matrices: MatrixPlan) -> tuple[str, ...]:
    return tuple(f"{name}_bias" for name, matrix in matrices.items() if matrix.bias)


def _multiple_of_16(name: str, n: int) -> None:
    if n < 16 or n % 16:
        raise OffloadError(f"kernels take a {name} that is a multiple of 16, not {n}")


def _shape(name: str, matrix: MatrixPlan, rows: int, columns: int) -> None:
    if (matrix.rows, matrix.columns) != (rows, columns):
        raise OffloadError(
            f"{name} must be {rows} x {columns}, the plan has {matrix.rows} x {matrix.columns}"
        )
