"""What changes the numbers of an open model's keys and values, and can be changed by a program.

Stored keys and values stand for passes that are not made, so whatever a pass would have done
otherwise has to be noticed before. Modules are Python objects and anything may be put into them:
all that they hold that can be compared is compared. What is noticed without need costs a hit.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.overrides import _get_current_function_mode_stack
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from offload.models.shadow import CAPTURES, STANDS_IN

_TORCHS = frozenset(nn.Module().__dict__) - {"training"}
_OTHERS = frozenset(
    {
        "forward",
        "offload",
        "generate",
        "_prefill",
        "_output_capturing_hooks_installed",
        "_previous_max_cache_length",
    }
)
"""What the runtime puts into a model; and transformers, once hidden states or a static cache were
asked for."""
_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CALLABLES = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, partial)
_BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary embeddings that write their own frequencies, by the length of the text."""


class _Is:
    """An object that is equal to nothing but itself, and not kept."""

    __slots__ = ("_kept", "_ref")

    def __init__(self, thing: Any) -> None:
        self._ref: weakref.ref[Any] | None = None
        self._kept: Any = None
        try:
            self._ref = weakref.ref(thing)
        except TypeError:
            self._kept = thing

    def _thing(self) -> Any:
        return self._kept if self._ref is None else self._ref()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Is):
            return NotImplemented
        mine = self._thing()
        return mine is other._thing() and (mine is not None or self._ref is None)

    def __hash__(self) -> int:
        return id(type(self._thing()))


class _StandsIn:
    """Does what it stands for does, whatever that is."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


def live_facts(model: Any) -> dict[str, Any]:
    """What changes numbers and has a name: a part of a stored prefix's, as JSON."""
    text = model.config.get_text_config()
    return {
        "threads": torch.get_num_threads(),
        "attention": getattr(text, "_attn_implementation", None),
        "experts": getattr(text, "_experts_implementation", None),
        "training": model.training,
        "onednn": torch.backends.mkldnn.enabled,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "kernels of attention": [
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ],
        # Adapters and other layers come as modules of their own.
        "modules": sum(1 for _ in model.modules()),
    }


def marks(model: Any) -> dict[str, Any]:
    """What a program changes of an open model where no name can say it, for as long as the process
    lives. Not seen is what is written through ``.data``, or into what weights stream from."""
    modules = list(model.modules())
    return {
        "modules in place": [(_Is(type(m)), _Is(m)) for m in modules],
        "hooks": _hooks(modules),
        "weights": [_tensor(p) for m in modules for p in m._parameters.values() if _is_kept(p)],
        "buffers": [_tensor(b) for m in modules for b in _buffers(m)],
        "attributes of modules": [sorted(_attributes(m)) for m in modules],
        "config": [_config(config) for config in _configs(model)],
        "attention functions": [
            _Is(table.get(kind))
            for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
            for kind in {getattr(c, "_attn_implementation", None) for c in _configs(model)}
            if kind in table
        ],
        "torch's modes": _modes(),
    }


def _hooks(modules: list[nn.Module]) -> list[Any]:
    """Those that may change something. A hook behind the model itself gets no keys and values: a
    pass has ended."""
    behind = [hook for m in modules[1:] for hook in m._forward_hooks.values()]
    before = [hook for m in modules for hook in m._forward_pre_hooks.values()]
    found: list[Any] = [_Is(hook) for hook in (*behind, *before) if not _is_harmless(hook)]
    return [*found, torch_modules._has_any_global_hook()]


def _is_harmless(hook: Any) -> bool:
    """Those that transformers leaves on layers once somebody has asked for hidden states only look,
    and by our own sequences wait for each other."""
    return _owner(hook) == CAPTURES or _is_ours(hook)


def _is_kept(parameter: nn.Parameter | None) -> bool:
    """Whether it is in memory; others are the runtime's."""
    return type(parameter) is nn.Parameter


def _buffers(module: nn.Module) -> Iterator[torch.Tensor]:
    if any(kind in _BY_LENGTH for kind in _rope_types(module)):
        return
    for buffer in module._buffers.values():
        if type(buffer) is torch.Tensor:
            yield buffer


def _rope_types(module: nn.Module) -> list[Any]:
    found = module.__dict__.get("rope_type")
    return list(found.values()) if isinstance(found, dict) else [found]


def _tensor(tensor: Any) -> tuple[_Is, int]:
    return _Is(tensor), 0 if tensor.is_inference() else tensor._version


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Numbers (scales, epsilons, how many experts), words, functions, and what stands in the place
    of a method, by name."""
    forward = module.__dict__.get("forward")
    yield "forward", _StandsIn() if _is_ours(forward) else _Is(forward)
    for name, value in module.__dict__.items():
        if name in _TORCHS or name in _OTHERS:
            continue
        several = value if isinstance(value, tuple | list) else (value,)
        if all(isinstance(x, _VALUES) for x in several):
            yield name, repr(value)
        elif isinstance(value, _CALLABLES) and not _is_ours(value):
            yield name, _Is(value)


def _is_ours(function: Any) -> bool:
    return getattr(function, STANDS_IN, False) is True or _owner(function).startswith("offload.")


def _owner(function: Any) -> str:
    """Whose code it is: what ``functools.wraps`` says is whose it stands for."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    made = getattr(function, "__globals__", {}).get("__name__")
    return str(made or getattr(function, "__module__", ""))


def _configs(model: nn.Module) -> list[Any]:
    """Each one that a module reads, once."""
    found = {id(c): c for m in model.modules() if (c := m.__dict__.get("config")) is not None}
    return list(found.values())


def _config(config: Any) -> list[tuple[str, str]]:
    return sorted((name, repr(value)) for name, value in vars(config).items())


def _modes() -> list[Any]:
    """What changes the meaning of torch's functions around a call."""
    others = [
        mode
        for mode in _get_current_function_mode_stack()
        if not type(mode).__module__.startswith("offload.")
    ]
    return [
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        *map(_Is, others),
    ]


__all__ = ["live_facts", "marks"]
