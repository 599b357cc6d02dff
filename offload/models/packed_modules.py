"""Modules that compute on packed weights, in place of the model's own.

A linear layer keeps its name and its shape and gets its weight as the bytes that a kernel takes. A
MoE layer's experts keep their router, their hooks and their order; the loop over them becomes one
call of a kernel for as many experts as are there. Activations are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from offload.cpu_ops.experts import ExpertLayout, expert_ffn
from offload.cpu_ops.formats import Format, get_format
from offload.cpu_ops.functions import Glu
from offload.cpu_ops.kernels import gemm
from offload.errors import UnsupportedModelError
from offload.io.pack_manifest import Layout
from offload.models.absent import absent
from offload.models.experts import ExpertSession
from offload.models.pack_reader import ExpertGroup as PackedGroup
from offload.runtime.executor import Views

GLU_TOLERANCE = 1e-5
"""Relative: what a kernel's activation may differ from the module's own, in float32."""


class PackedLinear(nn.Module):
    """``y = x W^T + b`` with W in packed form.

    Attributes:
        packed: uint8 [bytes]; put there by whoever streams it.
        weight: the weight's name, shape and dtype without its data.
    """

    def __init__(self, name: str, format: Format, linear: nn.Linear, nbytes: int) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.format = format
        packed = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        shape_only = torch.empty(linear.weight.shape, dtype=torch.float32, device="meta")
        # Not a parameter: families ask their weights for a dtype, and must not be told uint8.
        self.__dict__["weight"] = absent(name, shape_only, torch.device("cpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.detach().reshape(-1, self.in_features).float().contiguous()
        out = torch.empty(len(rows), self.out_features)
        gemm(
            self.format,
            self.packed.data_ptr(),
            self.out_features,
            self.in_features,
            rows.numpy(),
            out.numpy(),
        )
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], self.out_features).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.format.name}"


class PackedExperts:
    """A MoE layer's experts: fetched in order, computed as many at a time as are there."""

    def __init__(
        self, layout: ExpertLayout, first: tuple[str, int], session: PackedSession
    ) -> None:
        """``first``: a part's name and its offset, to find a bundle's address by."""
        self._layout = layout
        self._first = first
        self._session = session

    def __call__(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """``hidden`` [T, H], ``top_k_index`` int64 [T, k], ``top_k_weights`` [T, k] → [T, H].

        Experts come in ascending order, as in every eager loop, and the sum does not depend on
        how many of them are computed together.
        """
        x_TH = hidden.detach().reshape(-1, self._layout.hidden).float().contiguous().numpy()
        index_Tk = top_k_index.reshape(len(x_TH), -1).numpy()
        weights_Tk = top_k_weights.detach().reshape(len(x_TH), -1).float().numpy()
        experts = self._session.wanted
        out_TH = np.empty_like(x_TH)
        add = False
        for some, views in self._session.batches():
            weights_TE = np.zeros((len(x_TH), len(some)), np.float32)
            for column, expert in enumerate(some):
                chosen = index_Tk == expert
                weights_TE[:, column] = np.where(chosen, weights_Tk, 0.0).sum(1)
            name, offset = self._first
            bases = np.array([v[name].data_ptr() - offset for v in views], np.int64)
            expert_ffn(self._layout, bases, x_TH, weights_TE, out_TH, add=add)
            add = True
        if not experts:
            out_TH[:] = 0
        return torch.from_numpy(out_TH).view(hidden.shape).to(hidden.dtype)


class PackedSession(ExpertSession):
    """One MoE layer's run: its experts in order, several held at once."""

    def __init__(self, *args: Any, at_once: int) -> None:
        """``at_once``: experts held together; the others' slots are left for what comes next."""
        super().__init__(*args)
        self.wanted: list[int] = []
        self._at_once = at_once
        self._held: list[str] = []

    def begin(self, experts: list[int], *args: Any) -> None:
        self.wanted = experts
        super().begin(experts, *args)

    def batches(self) -> Iterator[tuple[list[int], list[Views]]]:
        """Yields (experts, their views): the next one, waited for, and those behind it that are
        there already. They are let go when the next batch is asked for."""
        left = list(self.wanted)
        executor, blocks = self.executor, self.group.blocks
        while left:
            self._let_go()
            some: list[int] = []
            views: list[Views] = []
            while left and len(some) < self._at_once:
                block = blocks[left[0]]
                if some and not executor.present(block):
                    break
                views.append(executor.acquire(block))
                self._held.append(block)
                some.append(left.pop(0))
            yield some, views
        self._let_go()

    def _let_go(self) -> None:
        super()._let_go()
        while self._held:
            self.executor.release(self._held.pop())


def expert_layout_of(group: PackedGroup, module: Any) -> ExpertLayout:
    """How a kernel finds its way in a bundle of ``group``, whose experts are ``module``'s.

    Raises:
        UnsupportedModelError: what an expert computes is nothing that the kernel can.
    """
    parts = {part.name: part for part in group.parts}
    if not {"gate", "up", "down"} <= parts.keys():
        raise UnsupportedModelError(
            f"{group.name}: packed experts have a gate, an up and a down matrix, these have "
            f"{', '.join(parts)}; run the model without --quant"
        )
    others = parts.keys() - {"gate", "up", "down", "gate_bias", "up_bias", "down_bias"}
    if others:
        raise UnsupportedModelError(
            f"{group.name}: no kernel for experts with {', '.join(sorted(others))}; run the model "
            f"without --quant"
        )
    for name, part in parts.items():
        right = part.layout is Layout.PACKED or (
            name.endswith("_bias") and part.format == "float32"
        )
        if not right:
            raise UnsupportedModelError(
                f"{group.name}: {name} is {part.format} {list(part.shape)} in {part.layout.value} "
                f"form, for which there is no kernel; run the model without --quant"
            )
    gate, up, down = parts["gate"], parts["up"], parts["down"]
    if gate.format != up.format:
        raise UnsupportedModelError(
            f"{group.name}: the gate is in {gate.format} and the up in {up.format}; the kernel "
            f"takes both in one format"
        )
    glu, alpha, limit = find_glu(module, gate.shape[0])
    offset = {name: part.offset for name, part in parts.items()}
    return ExpertLayout(
        gate_up=get_format(gate.format),
        down=get_format(down.format),
        hidden=gate.shape[1],
        inner=gate.shape[0],
        gate_offset=offset["gate"],
        up_offset=offset["up"],
        down_offset=offset["down"],
        gate_bias_offset=offset.get("gate_bias", -1),
        up_bias_offset=offset.get("up_bias", -1),
        down_bias_offset=offset.get("down_bias", -1),
        nbytes=group.nbytes,
        glu=glu,
        alpha=alpha,
        limit=limit,
    )


def find_glu(module: Any, inner: int) -> tuple[Glu, float, float]:
    """Which of the kernel's activations a module's own is, found by trying it, with its alpha and
    limit. Raises UnsupportedModelError."""
    alpha = float(getattr(module, "alpha", None) or 1.702)
    limit = float(getattr(module, "limit", None) or 7.0)
    generator = torch.Generator().manual_seed(0)
    gate, up = (4 * torch.randn(4, inner, generator=generator) for _ in range(2))
    if getattr(module, "is_concatenated", True):
        joined = torch.cat([gate, up], dim=-1)
    else:
        joined = torch.stack([gate, up], dim=-1).flatten(-2)
    try:
        with torch.no_grad():
            said = module._apply_gate(joined)
    except (AttributeError, RuntimeError, TypeError) as error:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not say how it activates: {error}"
        ) from error
    for glu, ours in _ACTIVATIONS.items():
        close = torch.allclose(
            said, ours(gate, up, alpha, limit), rtol=GLU_TOLERANCE, atol=GLU_TOLERANCE
        )
        if close:
            return glu, alpha, limit
    raise UnsupportedModelError(
        f"{type(module).__name__} activates its experts in a way that no kernel does; run the "
        f"model without --quant"
    )


def _clamped(g: torch.Tensor, u: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return g * torch.sigmoid(alpha * g) * (u + 1)


_ACTIVATIONS: dict[Glu, Callable[[torch.Tensor, torch.Tensor, float, float], torch.Tensor]] = {
    Glu.SILU: lambda g, u, _a, _l: nn.functional.silu(g) * u,
    Glu.GELU: lambda g, u, _a, _l: nn.functional.gelu(g) * u,
    Glu.GELU_TANH: lambda g, u, _a, _l: nn.functional.gelu(g, approximate="tanh") * u,
    Glu.CLAMPED: _clamped,
}


def held_at_once(slots: int | None, top_k: int) -> int:
    """Experts that a layer holds together. ``slots``: of the cache; None: all are resident."""
    if slots is None:
        return 1 << 30
    # The rest are free for what is still on its way: the plan has one more than a token uses.
    return max(1, min(top_k, slots - 1))


__all__ = [
    "PackedExperts",
    "PackedLinear",
    "PackedSession",
    "expert_layout_of",
    "find_glu",
    "held_at_once",
]
