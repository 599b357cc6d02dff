"""What a program may change of an open model of the Qwen3 MoE family, and back again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


@contextmanager
def instead(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def own_forward_inside(model: Any) -> Iterator[None]:
    attention = model.base_model.layers[1].self_attn
    inner = attention.forward
    attention.forward = lambda hidden_states, *a, **k: inner(hidden_states * 2, *a, **k)
    try:
        yield
    finally:
        del attention.forward


@contextmanager
def hook_before(model: Any) -> Iterator[None]:
    norm = model.base_model.layers[1].input_layernorm
    hook = norm.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def hook_on_all(model: Any) -> Iterator[None]:
    def halve(module: nn.Module, _: Any, out: Any) -> Any:
        return out / 2 if type(module).__name__.endswith("RMSNorm") else None

    hook = register_module_forward_hook(halve)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def rotary_buffer(model: Any) -> Iterator[None]:
    with torch.no_grad():
        model.base_model.rotary_emb.inv_freq.mul_(0.5)
    try:
        yield
    finally:
        with torch.no_grad():
            model.base_model.rotary_emb.inv_freq.mul_(2)


@contextmanager
def same_name(model: Any) -> Iterator[None]:
    """Another attention function, under the name of the one that was there."""
    name = model.config._attn_implementation
    stock = ALL_ATTENTION_FUNCTIONS[name]

    def sharper(module: Any, q: Any, k: Any, v: Any, mask: Any, **more: Any) -> Any:
        return stock(module, q * 2, k, v, mask, **more)

    ALL_ATTENTION_FUNCTIONS.register(name, sharper)
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS.register(name, stock)


class Shifted(TorchFunctionMode):
    """What nobody would expect of a function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        return out + 0.125 if func is torch.rsqrt else out
