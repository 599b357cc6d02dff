"""Whether a decoder layer, and what is around it, is still what its lean form was made of.

Kernels call no module, so a hook inside a layer, or a module that a program has put in another's
place, would be passed over without a word. Such a layer runs as it is.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch._C import _len_torch_function_stack
from torch.nn.modules import module as torch_modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from offload.models.shadow import CAPTURES, STANDS_IN


class LayerWatch:
    """What a layer had inside when it was opened."""

    def __init__(self, layer: nn.Module, kept: list[tuple[nn.Module, str]]) -> None:
        """``kept``: parameters that the lean form has a copy of."""
        inside = [module for module in layer.modules() if module is not layer]
        hooks = [table for m in inside for table in (m._forward_hooks, m._forward_pre_hooks)]
        self._hooks, self._lengths = hooks, [len(table) for table in hooks]
        found: list[tuple[dict[str, Any], str]] = [
            (module._modules, name) for module in (layer, *inside) for name in module._modules
        ]
        # A packed layer's forward is also the runtime's own to take over.
        found += [(m.__dict__, "forward") for m in inside if type(m).__name__ != "PackedLinear"]
        found += [(module._parameters, name) for module, name in kept]
        self._tables, self._names = [table for table, _ in found], [name for _, name in found]
        self._there = list(map(dict.get, self._tables, self._names))
        self._numbers = [
            (module.__dict__, name, value)
            for module in (layer, *inside)
            for name, value in module.__dict__.items()
            if isinstance(value, int | float)
        ]

    def untouched(self) -> bool:
        """Whether nobody listens inside, and all is in its place."""
        # Without a loop as long as all is the same: this is asked for every layer and token, and
        # 16 layers' loops were 1.5 % of a token of 28 ms.
        if list(map(len, self._hooks)) != self._lengths:
            for hooks, length in zip(self._hooks, self._lengths, strict=True):
                if len(hooks) != length and _foreign(hooks) != length:
                    return False
        now = list(map(dict.get, self._tables, self._names))
        return all(map(operator.is_, now, self._there)) or all(map(_is_same, now, self._there))

    def unchanged(self) -> bool:
        """Whether the numbers that modules keep (scales, epsilons, how many experts) are what they
        were. There are hundreds of them: not for every token."""
        return all(table.get(name) == there for table, name, there in self._numbers)


class Copied:
    """A parameter of which a kernel reads a copy."""

    def __init__(self, module: nn.Module, name: str, copy: Callable[[torch.Tensor], Any]) -> None:
        """``copy`` puts the parameter's values where the kernel has them."""
        self._table, self._name = module._parameters, name
        self._copy = copy
        self._version = self._now()

    def _now(self) -> int:
        parameter = self._table[self._name]
        return 0 if parameter is None or parameter.is_inference() else parameter._version

    def refresh(self) -> None:
        """Have the kernel's values be the parameter's, if a program has written to it."""
        if (version := self._now()) != self._version:
            parameter = self._table[self._name]
            assert parameter is not None
            self._copy(parameter.detach())
            self._version = version


class Around:
    """What layers share: the rotary embedding, of which kernels have a copy, and the function that
    attends, in whose place they are."""

    def __init__(self, model: Any, rotary: nn.Module) -> None:
        self._config = model.config.get_text_config()
        self._rotary = rotary
        self._scales = [n for n in rotary.__dict__ if n.endswith("attention_scaling")]
        self._there = self._now()
        self._copies = [None if b is None else b.clone() for b in rotary._buffers.values()]
        self._written, self._equal = self._versions(), True

    def _now(self) -> list[Any]:
        own = self._rotary.__dict__
        hooks = len(own["_forward_hooks"]), len(own["_forward_pre_hooks"])
        return [own.get("forward"), *hooks, *map(own.get, self._scales)]

    def _versions(self) -> list[Any]:
        return [
            None if b is None or b.is_inference() else (id(b), b._version)
            for b in self._rotary._buffers.values()
        ]

    def _frequencies(self) -> bool:
        """Whether they have the values that kernels have."""
        written = self._versions()
        if written != self._written:
            now = self._rotary._buffers.values()
            self._equal = len(now) == len(self._copies) and all(
                b is copy if b is None or copy is None else torch.equal(b, copy)
                for b, copy in zip(now, self._copies, strict=True)
            )
            self._written = written
        return self._equal

    def untouched(self) -> bool:
        """Whether positions and attention are as they were, and nobody listens to every module."""
        if torch_modules._has_any_global_hook() or self._now() != self._there:
            return False
        if torch.is_autocast_enabled("cpu") or (_len_torch_function_stack() and _is_in_a_mode()):
            return False
        attention = getattr(self._config, "_attn_implementation", None)
        return self._frequencies() and _is_stock(attention)


class DecoderWatch:
    """What a model had around its layers when it was opened: which modules, in which order, whose
    forward, and a config."""

    def __init__(self, model: nn.Module, base: nn.Module, layers: nn.Module) -> None:
        """``layers``: the list of ``base`` that has them."""
        self._lists = [(m._modules, list(m._modules.items())) for m in (model, base, layers)]
        self._forward = base.__dict__, base.__dict__.get("forward")
        config: Any = model.config
        self._config = vars(config.get_text_config())
        self._settings = dict(self._config)

    def untouched(self) -> bool:
        """Whether all is in its place."""
        own, forward = self._forward
        if not _is_same(own.get("forward"), forward) or self._config != self._settings:
            return False
        # Modules are equal to themselves alone.
        return all(list(now.items()) == there for now, there in self._lists)


def _is_in_a_mode() -> bool:
    """Whether somebody listens to torch's functions. A default device does so, too, and makes of
    none another one."""
    stack = _get_current_function_mode_stack()
    return any(type(mode) is not DeviceContext for mode in stack)


def _is_stock(name: Any) -> bool:
    """Whether attention of that name is transformers' own or ours, which kernels stand in for."""
    if name in (None, "eager"):
        return True
    function = ALL_ATTENTION_FUNCTIONS.get(name)
    return str(getattr(function, "__module__", "")).startswith(("transformers.", "offload."))


def _foreign(table: Mapping[int, Any]) -> int:
    """Hooks that may want something now."""
    captured = _captured_inside()
    return sum(captured or getattr(h, "__module__", None) != CAPTURES for h in table.values())


def _captured_inside() -> bool:
    """Whether transformers records more of this pass than what layers give to each other."""
    collector = getattr(sys.modules.get(CAPTURES), "_active_collector", None)
    if collector is None:
        return True  # it keeps that elsewhere: nothing is known
    wanted = collector.get() or {}
    return any("hidden_states" not in name for name in wanted)


def _is_same(now: Any, there: Any) -> bool:
    return now is there or getattr(now, STANDS_IN, False) is True


__all__ = ["Around", "Copied", "DecoderWatch", "LayerWatch"]
