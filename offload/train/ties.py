"""An edge of a unit's node to the adapters in it.

Gradients of modules that were put into a unit later leave its own backward, and not its node: to
autograd they have nothing to do with the loss. Asked for these alone (``backward(inputs=...)``,
``torch.autograd.grad``) it would go through no unit and find nothing, without a word.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def tied(module: nn.Module) -> torch.Tensor:
    """What makes autograd record a unit, and pass it on its way to what is trained in it.

    Not to weights with hooks, which would be called with no gradient: the engine's own have one.
    """
    with torch._C.DisableTorchFunctionSubclass():
        found = [
            p for p in module.parameters()
            if p.requires_grad and not p._backward_hooks and not p._post_accumulate_grad_hooks
        ]  # fmt: skip
    return _Tied.apply(*found) if found else torch.zeros((), requires_grad=True)  # type: ignore[no-untyped-call]


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *params: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return (None,) * len(ctx.needs_input_grad)


__all__ = ["tied"]
