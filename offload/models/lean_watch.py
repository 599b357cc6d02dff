"""Whether a decoder layer is still what its lean form was made of.

Kernels call no module, so a hook inside a layer, or a module that a program has put in another's
place, would be passed over without a word. Such a layer runs as it is.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from offload.models.packed_modules import PackedLinear


class LayerWatch:
    """What a layer had inside when it was opened."""

    def __init__(self, layer: nn.Module, kept: list[tuple[nn.Module, str]]) -> None:
        """``kept``: parameters that the lean form has a copy of."""
        inside = [module for module in layer.modules() if module is not layer]
        hooks = [table for m in inside for table in (m._forward_hooks, m._forward_pre_hooks)]
        self._hooks = [(table, len(table)) for table in hooks]
        found: list[tuple[dict[str, Any], str]] = [
            (module._modules, name) for module in (layer, *inside) for name in module._modules
        ]
        # A packed layer's forward is taken over where several sequences multiply together.
        found += [(m.__dict__, "forward") for m in inside if not isinstance(m, PackedLinear)]
        found += [(module._parameters, name) for module, name in kept]
        self._places = [(table, name, table.get(name)) for table, name in found]

    def untouched(self) -> bool:
        """Whether nobody listens inside, and all is in its place."""
        for table, length in self._hooks:
            if len(table) != length:
                return False
        return all(table.get(name) is there for table, name, there in self._places)


__all__ = ["LayerWatch"]
