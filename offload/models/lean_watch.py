"""Whether a decoder layer is still what its lean form was made of.

Kernels call no module, so a hook inside a layer, or a module that a program has put in another's
place, would be passed over without a word. Such a layer runs as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from offload.models.shadow import CAPTURES, STANDS_IN


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
        # A packed layer's forward is also the runtime's own to take over.
        found += [(m.__dict__, "forward") for m in inside if type(m).__name__ != "PackedLinear"]
        found += [(module._parameters, name) for module, name in kept]
        self._places = [(table, name, table.get(name)) for table, name in found]

    def untouched(self) -> bool:
        """Whether nobody listens inside, and all is in its place."""
        for table, length in self._hooks:
            if len(table) != length and _foreign(table) != length:
                return False
        return all(_is_same(table.get(name), there) for table, name, there in self._places)


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


__all__ = ["LayerWatch"]
