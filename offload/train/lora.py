"""LoRA (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1) on a
streamed model: the base is frozen and read from its checkpoint, and only adapters are trained.

``inject`` before ``layout.lay_out``: it freezes the model and gives each targeted module two more
parameters. These are ordinary pieces of their unit, in a float32 block beside the frozen ones, so
an engine trains them like anything else; a plan pins them (``Adapters.blocks``), for they are
small. No checkpoint holds them: their first values come of ``Adapters.initial``, their later ones
of the tiles. Units below the first adapter run without autograd.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offload.errors import OffloadError
from offload.models.params import parameters
from offload.train.layout import TrainLayout
from offload.train.lora_layers import FusedAdapters, LinearAdapter, Rule
from offload.train.lora_output import AdapterOptions, LoraPair, MergedValues
from offload.train.lora_targets import Target, find_targets

if TYPE_CHECKING:
    from offload.train.engine import Engine


class Adapters:
    """The adapters of a model; made by ``inject``."""

    def __init__(
        self, model: Any, targets: Sequence[Target], *, r: int, alpha: float, dropout: float,
        seed: int,
    ) -> None:  # fmt: skip
        self.model = model
        self.targets = tuple(targets)
        self.r = r
        self.alpha = alpha
        self.dropout = dropout
        self.scale = alpha / r
        self.initial: dict[str, Callable[[], Tensor]] = {}
        """By parameter name, what makes its first values: float32, in the parameter's shape."""
        self._undo: list[Callable[[], Any]] = []
        for target in self.targets:
            a, b = (f"{_stem(target)}{x}" for x in "AB")
            self.initial[a] = partial(uniform, a, self._shape(target, "A"), seed)
            self.initial[b] = partial(torch.zeros, self._shape(target, "B"), dtype=torch.float32)
        rule = Rule(self.scale, dropout)
        self._freeze()
        self._add_parameters()
        self._linear = [LinearAdapter(t, rule) for t in self.targets if t.experts is None]
        fused: dict[int, list[Target]] = {}
        for target in self.targets:
            if target.experts is not None:
                fused.setdefault(id(target.module), []).append(target)
        self._fused = [FusedAdapters(of_one, rule) for of_one in fused.values()]

    def _freeze(self) -> None:
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                self._undo.append(partial(parameter.requires_grad_, True))

    def _add_parameters(self) -> None:
        for target in self.targets:
            weight = target.module._parameters[target.attr]
            assert weight is not None
            for suffix in "AB":
                name = f"{_stem(target)}{suffix}"
                make = self.initial[name]
                shape = self._shape(target, suffix)
                value = (
                    torch.empty(shape, dtype=torch.float32, device="meta")
                    if weight.is_meta
                    else make().to(weight.device)
                )
                attr = name.rpartition(".")[2]
                target.module.register_parameter(attr, nn.Parameter(value))
                self._undo.append(partial(target.module._parameters.pop, attr, None))

    def _shape(self, target: Target, suffix: str) -> tuple[int, int]:
        count = target.experts or 1
        return (count * self.r, target.n_in) if suffix == "A" else (count * target.n_out, self.r)

    # -- what a plan and an engine need ---------------------------------------------------------

    @property
    def elements(self) -> int:
        """Trained numbers."""
        return sum(math.prod(self._shape(t, x)) for t in self.targets for x in "AB")

    def blocks(self, layout: TrainLayout) -> frozenset[int]:
        """The blocks that hold adapters and nothing else: what to pin, with their states."""
        return frozenset(
            b.index for b in layout.trained if all(p.param in self.initial for p in b.pieces)
        )

    def unused(self) -> list[str]:
        """Targets whose adapter no forward has asked for so far: after a step, those that would
        never be trained, because the model uses their weight and not their layer."""
        done = {a.target.name for a in self._linear if a.used}
        done |= {w.target.name for group in self._fused for w in group.weights if w.used}
        return [t.name for t in self.targets if t.name not in done]

    # -- results --------------------------------------------------------------------------------

    def values(self, engine: Engine) -> dict[str, Tensor]:
        """The current adapters of a model that ``engine`` trains, by parameter name; copies.
        Waits for their updates."""
        return {
            f"{_stem(t)}{x}": engine.read_elements(
                f"{_stem(t)}{x}", 0, math.prod(self._shape(t, x))
            ).view(self._shape(t, x))
            for t in self.targets
            for x in "AB"
        }

    def resident_values(self) -> dict[str, Tensor]:
        """The same of a model that is in memory; no copies."""
        named = dict(self.model.named_parameters())
        return {name: named[name].detach() for name in self.initial}

    def pairs(self, values: Mapping[str, Tensor]) -> dict[str, LoraPair]:
        """For ``lora_output.write_adapter``; views of ``values``."""
        out = {}
        for target in self.targets:
            a, b = (values[f"{_stem(target)}{x}"] for x in "AB")
            if target.experts is not None:
                a, b = (x.reshape(target.experts, -1, x.shape[-1]) for x in (a, b))
            out[target.name] = LoraPair(a, b, target.transposed)
        return out

    def options(self, base: str | Path) -> AdapterOptions:
        """For ``lora_output.write_adapter``."""
        return AdapterOptions(base=str(base), r=self.r, alpha=self.alpha, dropout=self.dropout)

    def merged_values(
        self, parameter: Callable[[str, int, int], Tensor], values: Mapping[str, Tensor]
    ) -> MergedValues:
        """The model with the adapters merged in, for ``OutputTensors``; ``parameter`` gives the
        base's values. See ``check_mergeable``."""
        self.check_mergeable()
        pairs = self.pairs(values)
        names = {t.weight: t.name for t in self.targets}
        return MergedValues(parameter, pairs, dict.fromkeys(pairs, self.scale), names)

    def check_mergeable(self) -> None:
        """Raise OffloadError for a target whose weight something else uses, too: merged, that would
        change with it. For before training starts."""
        shared = {
            name: param.names
            for param in parameters(self.model).values()
            if len(param.places) > 1
            for name in param.names
        }
        for target in self.targets:
            if target.weight in shared:
                others = [n for n in shared[target.weight] if n != target.weight]
                raise OffloadError(
                    f"{target.weight} is tied to {', '.join(others)}, so an adapter cannot be "
                    f"merged into it alone; leave it out of the LoRA targets, or do not merge"
                )

    def undo(self) -> None:
        """Make the model what it was before: no adapters, and trainable what was trainable. After
        the engine is closed. Idempotent."""
        for adapter in self._linear:
            adapter.undo()
        for group in self._fused:
            group.undo()
        self._linear, self._fused = [], []
        while self._undo:
            self._undo.pop()()


def inject(
    model: Any, *, r: int, alpha: float, dropout: float = 0.0,
    targets: Sequence[str] | str | None = None, seed: int = 0,
) -> Adapters:  # fmt: skip
    """Freeze ``model`` and give the targeted weights float32 adapters of rank ``r``.

    Args:
        model: as transformers builds it: on the meta device, where adapters have no memory until
            an engine brings it, or in memory (an ordinary resident LoRA model afterwards).
        r: at least 1.
        alpha: the low-rank path is multiplied by ``alpha / r``.
        dropout: of the low-rank path's input, in training; in [0, 1).
        targets: see ``lora_targets.find_targets``.
        seed: of the first values of A; each is a function of this and its own name alone.

    Raises:
        OffloadError: a number out of range, or a target that is not there.
    """
    if r < 1:
        raise OffloadError(f"a LoRA rank of {r} trains nothing; give at least 1")
    if not 0 <= dropout < 1:
        raise OffloadError(f"LoRA dropout must be at least 0 and below 1, not {dropout}")
    if not math.isfinite(alpha) or alpha == 0:
        raise OffloadError(f"a LoRA alpha of {alpha} trains nothing; twice the rank is usual")
    found = find_targets(model, targets)
    return Adapters(model, found, r=r, alpha=alpha, dropout=dropout, seed=seed)


def uniform(name: str, shape: tuple[int, int], seed: int) -> Tensor:
    """The first A ``[E·r, in]`` of parameter ``name``: ``kaiming_uniform(a=√5)``, peft's, which is
    uniform in ±1/√in.

    The generator is seeded with the first 8 bytes of SHA-256 of ``"seed:name"``: a value depends
    neither on other targets nor on the order in which values are made.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    out = torch.empty(shape, dtype=torch.float32)
    nn.init.kaiming_uniform_(out, a=math.sqrt(5), generator=generator)
    return out


def _stem(target: Target) -> str:
    """An adapter's parameters are this and "A" or "B"."""
    prefix = f"{target.path}." if target.path else ""
    return f"{prefix}lora_" if target.experts is None else f"{prefix}{target.attr}_lora_"


__all__ = ["Adapters", "inject", "uniform"]
