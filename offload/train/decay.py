"""Which parameters decay, and everybody's hyper-parameters in a step."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import nn

from offload.train.engine import Group
from offload.train.layout import Piece
from offload.train.options import TrainOptions

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def decaying(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that weight decay applies to: all but biases and those of norms, as
    transformers' Trainer chooses (``get_decay_parameter_names``)."""
    names = set()
    for path, module in model.named_modules():
        if isinstance(module, nn.LayerNorm):
            continue
        for attr in module._parameters:
            name = f"{path}.{attr}" if path else attr
            if not _NO_DECAY.search(name.lower()):
                names.add(name)
    return frozenset(names)


def group_maker(
    model: nn.Module, options: TrainOptions
) -> Callable[[float], Callable[[Piece], Group]]:
    """A function that gives for a learning rate every piece's hyper-parameters."""
    decays = decaying(model)
    beta1, beta2 = options.betas

    def at(lr: float) -> Callable[[Piece], Group]:
        def group(decay: float) -> Group:
            return Group(lr=lr, beta1=beta1, beta2=beta2, eps=options.eps, weight_decay=decay)

        with_decay, without = group(options.weight_decay), group(0.0)
        return lambda piece: with_decay if piece.param in decays else without

    return at
