"""LoRA adapters as peft reads them, and weights with an adapter merged in.

What peft expects (0.17.1 to 0.21.2 were read, the last was run), where ``P`` is a module's path in
the model:

- ``adapter_model.safetensors`` has ``base_model.model.P.lora_A.weight`` ``[r, in]`` and
  ``...lora_B.weight`` ``[out, r]``; the layer adds ``x Aᵀ Bᵀ · alpha / r``. This holds for Conv1D
  (GPT-2), whose weight is stored ``[in, out]``, too; the config says ``fan_in_fan_out`` then.
- A parameter that is no module's ``weight`` (the fused experts ``P.gate_up_proj`` ``[E, ., .]``) is
  named in ``target_parameters``. Each wraps the module that holds it (``ParamWrapper``), the next
  one wraps that wrapper, in the order in which the module registers its parameters. So of
  ``gate_up_proj`` and ``down_proj`` the first is ``P.base_layer.lora_A.weight`` and the last
  ``P.lora_A.weight``; alone, either is ``P.lora_A.weight``.
- For E experts, ``lora_A.weight`` is ``[E·r, in]``, one expert after the other, but
  ``lora_B.weight`` is ``[out, r·E]`` with the experts *innermost*: it is read as ``[out, r, E]``.
- peft takes a fused parameter for ``[E, out, in]`` unless its module has ``is_transposed``. Llama 4
  stores ``[E, in, out]`` without saying so; there A and B change places. This is peft from 0.19.1
  on: 0.17 and 0.18 take every one for ``[E, in, out]``, 0.19.0 has it the wrong way round, and all
  of these refuse such adapters for their shapes unless the weights are square. (Adapters of linear
  layers load everywhere.)
- When peft loads for a family whose experts transformers 5 fuses, it rewrites targets that end in
  the experts' old names (``gate_proj``, ``w1``, ``gate``, ...) into ``target_parameters`` of the
  fused ones. A shared expert's or a dense layer's ``gate_proj`` would be lost by that, so in such
  families these are targeted as parameters, ``P.weight``: same shapes, same keys.
- A ``ParamWrapper`` refuses dropout. It matters in training only, so the config then says 0.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from offload.errors import UnsupportedModelError
from offload.train.output import check_space, write_files, write_shards
from offload.train.output_files import companions
from offload.train.output_header import plan_shards
from offload.train.output_target import check_target, new_directory

log = logging.getLogger(__name__)

BLOCK_ELEMENTS = 2**20
"""Merged at once, in whole rows; fixed, so that how values are asked for never changes them."""

_REWRITTEN = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The factors of one weight, or of one per expert: the layer adds ``x Aᵀ Bᵀ · scale``.

    ``a`` is ``[r, in]`` or ``[E, r, in]``, ``b`` is ``[out, r]`` or ``[E, out, r]``.
    ``transposed``: the model stores the weight as ``[in, out]`` (Conv1D; the experts of gpt-oss
    and Llama 4).
    """

    a: torch.Tensor
    b: torch.Tensor
    transposed: bool = False

    @property
    def r(self) -> int:
        return self.a.shape[-2]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of the weight in the model."""
        sizes = (self.b.shape[-2], self.a.shape[-1])
        return (*self.a.shape[:-2], *(sizes[::-1] if self.transposed else sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """What ``adapter_config.json`` says besides the targets, which follow from the pairs."""

    base: str
    """Path or hub name of the model it belongs to."""
    r: int
    """The usual rank; pairs of another are listed in ``rank_pattern``."""
    alpha: float
    dropout: float = 0.0
    alphas: Mapping[str, float] = field(default_factory=dict)
    """Of pairs with another alpha, by their name."""

    def scale(self, name: str, pair: LoraPair) -> float:
        """``alpha / r`` of one pair."""
        return self.alphas.get(name, self.alpha) / pair.r


def write_adapter(
    target: Path,
    model: Any,
    pairs: Mapping[str, LoraPair],
    options: AdapterOptions,
    *,
    run_id: str,
    source: Path | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors``, whole or not at all.

    Args:
        target: as of ``output.write_model``.
        model: the base model, as transformers builds it; may be on the meta device.
        pairs: by the path of a linear module, or the name of a parameter (fused experts).
        options: rank, alpha, base.
        run_id: written into ``offload_training.json``; makes the directory replaceable.
        source: a model directory whose tokenizer and templates come along.
        metadata: into the file's ``__metadata__``.

    Raises:
        ValueError: a pair does not fit its weight.
        UnsupportedModelError: peft could not load it: a name that is neither a linear layer nor a
            parameter, or Conv1D and linear layers in one adapter.
        OffloadError, StoreError: as of ``output.write_model``.
    """
    check_target(target, source)
    layout = _Layout(model, pairs)
    config = layout.config(pairs, options)
    tensors = layout.tensors(pairs)
    plan = [(k, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for k, t in tensors.items()]
    shards = plan_shards(plan, 2**62, metadata, stem="adapter_model")
    copied = companions(source) if source is not None else {}
    copied.pop("generation_config.json", None)
    files = {"adapter_config.json": (json.dumps(config, indent=2) + "\n").encode()}
    check_space(target, sum(s.nbytes for s in shards), files, copied)
    with new_directory(target, run_id, facts={"adapter_of": options.base}) as partial:
        write_shards(partial, shards, tensors.__getitem__)
        write_files(partial, files, copied)


class _Layout:
    """Under which keys, and in which layout, peft finds each pair in ``model``."""

    def __init__(self, model: Any, pairs: Mapping[str, LoraPair]) -> None:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        from transformers.pytorch_utils import Conv1D

        self._all_modules = [name for name, _ in model.named_modules()]
        modules = dict(model.named_modules())
        kind = getattr(getattr(model, "config", None), "model_type", None)
        conversions: Any = get_checkpoint_conversion_mapping
        rewritten = conversions(kind) is not None
        self.modules: list[str] = []
        self.parameters: dict[str, str] = {}  # name as peft has it -> name of the pair
        conv: set[bool] = set()
        weight: Any
        for name, pair in pairs.items():
            module = modules.get(name)
            if isinstance(module, torch.nn.Linear | Conv1D):
                weight, is_conv = module.weight, isinstance(module, Conv1D)
                if rewritten and name.rpartition(".")[2] in _REWRITTEN and not is_conv:
                    self.parameters[f"{name}.weight"] = name
                else:
                    self.modules.append(name)
                    conv.add(is_conv)
            else:
                owner, _, leaf = name.rpartition(".")
                # Not the attribute: while an engine streams experts, that is its stand-in.
                weight = getattr(modules.get(owner), "_parameters", {}).get(leaf)
                if not isinstance(weight, torch.nn.Parameter) or not owner:
                    raise UnsupportedModelError(
                        f"{name} is neither a linear layer nor a parameter of a module of this "
                        f"model, so peft has no adapter for it"
                    )
                self.parameters[name] = name
            _check_shapes(name, pair, tuple(weight.shape))
        if len(conv) > 1:
            raise UnsupportedModelError(
                "the adapter has Conv1D and linear layers; peft's fan_in_fan_out is one for all"
            )
        self.fan_in_fan_out = conv == {True}
        self._keys = {name: name for name in self.modules}
        self._swapped: set[str] = set()
        self._place_parameters(modules, pairs)

    def _place_parameters(self, modules: Mapping[str, Any], pairs: Mapping[str, LoraPair]) -> None:
        owners: dict[str, list[str]] = {}
        for parameter in self.parameters:
            owners.setdefault(parameter.rpartition(".")[0], []).append(parameter)
        for owner, targeted in owners.items():
            order = [
                f"{owner}.{leaf}" for leaf, _ in modules[owner].named_parameters(recurse=False)
            ]
            for depth, parameter in enumerate(sorted(targeted, key=order.index, reverse=True)):
                name = self.parameters[parameter]
                self._keys[name] = owner + ".base_layer" * depth
                pair = pairs[name]
                known = pair.a.dim() == 3 and getattr(modules[owner], "is_transposed", False)
                if pair.transposed != bool(known):
                    self._swapped.add(name)

    def tensors(self, pairs: Mapping[str, LoraPair]) -> dict[str, torch.Tensor]:
        """What ``adapter_model.safetensors`` holds; views where possible."""
        out = {}
        for name, pair in pairs.items():
            a, b = pair.a, pair.b
            if name in self._swapped:
                a, b = b.transpose(-1, -2), a.transpose(-1, -2)
            if a.dim() == 3:
                a = a.reshape(-1, a.shape[-1])
                b = b.permute(1, 2, 0).reshape(b.shape[1], -1)
            key = f"base_model.model.{self._keys[name]}"
            out[f"{key}.lora_A.weight"] = a.contiguous()
            out[f"{key}.lora_B.weight"] = b.contiguous()
        return out

    def config(self, pairs: Mapping[str, LoraPair], options: AdapterOptions) -> dict[str, Any]:
        """The content of ``adapter_config.json``."""
        found = {name: key for key, name in self.parameters.items()}
        keys = {name: re.escape(found.get(name, name)) for name in pairs}
        dropout = options.dropout
        if self.parameters and dropout:
            log.info("the adapter says no dropout: peft has none for parameters it targets")
            dropout = 0.0
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": options.base,
            "r": options.r,
            "lora_alpha": _plain(options.alpha),
            "lora_dropout": dropout,
            "target_modules": _shortest(self.modules, self._all_modules),
            "target_parameters": sorted(self.parameters) or None,
            "rank_pattern": {keys[n]: p.r for n, p in pairs.items() if p.r != options.r},
            "alpha_pattern": {keys[n]: _plain(v) for n, v in options.alphas.items()},
            "fan_in_fan_out": self.fan_in_fan_out,
            "bias": "none",
            "use_rslora": False,
            "use_dora": False,
            "init_lora_weights": True,
            "modules_to_save": None,
            "inference_mode": True,
        }


def _check_shapes(name: str, pair: LoraPair, stored: tuple[int, ...]) -> None:
    a, b = pair.a, pair.b
    fits = a.dim() == b.dim() == len(stored) and a.dim() in (2, 3)
    if not fits or a.shape[-2] != b.shape[-1] or pair.stored_shape != stored:
        raise ValueError(
            f"{name} is {stored}: A {tuple(a.shape)} and B {tuple(b.shape)}"
            f"{' transposed' if pair.transposed else ''} do not fit it"
        )


def _shortest(paths: Iterable[str], everything: Iterable[str]) -> list[str]:
    """The last parts of ``paths`` if they select exactly these modules, else ``paths``."""
    wanted = set(paths)
    leaves = {path.rpartition(".")[2] for path in wanted}
    chosen = {name for name in everything if name.rpartition(".")[2] in leaves}
    return sorted(leaves if chosen == wanted else wanted)


def _plain(number: float) -> float:
    return int(number) if float(number).is_integer() else number


def merged(
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    *,
    transposed: bool = False,
) -> torch.Tensor:
    """``weight + scale · B A``, computed in float32 and rounded once to the weight's dtype.

    ``weight`` ``[out, in]`` (``[in, out]`` if ``transposed``), ``a`` ``[r, in]``, ``b``
    ``[out, r]``; of fused experts, one expert's. peft's ``merge_and_unload`` computes the same for
    a linear layer with a float32 adapter. It rounds the product to the weight's dtype before it
    adds where the adapter is bfloat16, and for every parameter target: up to one unit in the last
    place of the product more.
    """
    delta = (b.float() @ a.float()) * scale
    return (weight.float() + (delta.T if transposed else delta)).to(weight.dtype)


class MergedValues:
    """A model's parameters with an adapter merged in: what ``OutputTensors`` asks for values.

    ``parameter(name, start, count)`` gives the base's values; ``pairs`` and ``scales`` are by the
    same names as for ``write_adapter``. Rows are merged in blocks of 1 Mi elements, one expert at
    a time, so a large weight is never whole in memory, let alone in float32. (Products of whole
    matrices may differ from these by the rounding of float32.)
    """

    def __init__(
        self,
        parameter: Callable[[str, int, int], torch.Tensor],
        pairs: Mapping[str, LoraPair],
        scales: Mapping[str, float],
        names: Mapping[str, str],
    ) -> None:
        """``names``: a parameter's name -> that of its pair, for each of a tied one's names."""
        self._parameter = parameter
        self._pairs = pairs
        self._scales = scales
        self._names = names
        self._block: tuple[tuple[str, int, int], torch.Tensor] | None = None

    def __call__(self, name: str, start: int, count: int) -> torch.Tensor:
        """Elements ``start:start+count`` of the merged parameter, in the base's dtype."""
        if name not in self._names:
            return self._parameter(name, start, count)
        pair = self._pairs[self._names[name]]
        rows, columns = pair.stored_shape[-2:]
        per_block = max(1, BLOCK_ELEMENTS // columns)
        out: list[torch.Tensor] = []
        at, end = start, start + count
        while at < end:
            expert, inside = divmod(at, rows * columns)
            first = inside // columns // per_block * per_block
            last = min(rows, first + per_block)
            begin = (expert * rows + first) * columns
            stop = min(end, (expert * rows + last) * columns)
            block = self._rows(name, pair, expert, first, last)
            out.append(block[at - begin : stop - begin])
            at = stop
        return out[0] if len(out) == 1 else torch.cat(out)

    def _rows(self, name: str, pair: LoraPair, expert: int, first: int, last: int) -> torch.Tensor:
        key = (name, expert, first)
        if self._block is not None and self._block[0] == key:
            return self._block[1]
        rows, columns = pair.stored_shape[-2:]
        begin = (expert * rows + first) * columns
        weight = self._parameter(name, begin, (last - first) * columns).reshape(-1, columns)
        a = pair.a[expert] if pair.a.dim() == 3 else pair.a
        b = pair.b[expert] if pair.b.dim() == 3 else pair.b
        if pair.transposed:
            a = a[:, first:last]
        else:
            b = b[first:last]
        scale = self._scales[self._names[name]]
        value = merged(weight, a, b, scale, transposed=pair.transposed).reshape(-1)
        self._block = (key, value)
        return value
