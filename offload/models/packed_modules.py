"""Modules that compute on packed weights, in place of the model's own.

A linear layer keeps its name and its shape and gets its weight as the bytes that a kernel takes. A
MoE layer's experts keep their router, their hooks and their order; the loop over them becomes one
call of a kernel for as many experts as are there. Activations are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from offload.cpu_ops.experts import ExpertLayout, TokenExperts, expert_ffn
from offload.cpu_ops.formats import Format, get_format
from offload.cpu_ops.functions import Glu
from offload.cpu_ops.kernels import Floats, gemm
from offload.cpu_ops.prefill import linear
from offload.errors import UnsupportedModelError
from offload.io.pack_manifest import Layout
from offload.models.absent import absent
from offload.models.expert_groups import ExpertGroup
from offload.models.experts import ExpertSession
from offload.models.pack_reader import ExpertGroup as PackedGroup
from offload.models.streamed_forward import refuse_recorders
from offload.runtime.executor import Executor

GLU_TOLERANCE = 1e-5
"""Relative: what a kernel's activation may differ from the module's own, in float32."""


class PackedLinear(nn.Module):
    """``y = x W^T + b`` with W in packed form.

    Attributes:
        packed: uint8 [bytes]; put there by whoever streams it.
        weight: the weight's name, shape and dtype without its data.
        product: what computes the layer elsewhere, from float32 [T, K] into float32 [T, N]; None:
            the CPU's kernels.
    """

    product: Callable[[PackedLinear, torch.Tensor, torch.Tensor], None] | None = None

    def __init__(self, name: str, format: Format, like: nn.Linear, nbytes: int) -> None:
        super().__init__()
        self.in_features = like.in_features
        self.out_features = like.out_features
        self.format = format
        packed = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.bias = like.bias
        shape_only = torch.empty(like.weight.shape, dtype=torch.float32, device="meta")
        # Not a parameter: families ask their weights for a dtype, and must not be told uint8.
        self.__dict__["weight"] = absent(name, shape_only, torch.device("cpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        refuse_recorders()  # which see that memory is taken for the result, and not what fills it
        x_TK = x.detach().reshape(-1, self.in_features).float().contiguous()
        out_TN = torch.empty(len(x_TK), self.out_features, dtype=torch.float32, device=x_TK.device)
        if self.product is not None:
            self.product(self, x_TK, out_TN)
        else:
            self._on_cpu(linear, x_TK, out_TN)
        return out_TN.view(*x.shape[:-1], self.out_features).to(x.dtype)

    def multiply(self, address: int, x_TK: torch.Tensor, out_TN: torch.Tensor) -> None:
        """The product without the bias, with the weight's bytes at ``address`` in RAM. float32."""
        sizes = self.out_features, self.in_features
        linear(self.format, address, *sizes, x_TK.numpy(), out_TN.numpy())

    def rows(self, x_TK: torch.Tensor) -> torch.Tensor:
        """Several single rows: each gets the bits that ``forward`` gives it alone. float32."""
        inputs_TK = x_TK.detach().float().contiguous()
        out_TN = torch.empty(len(inputs_TK), self.out_features, dtype=torch.float32, device="cpu")
        self._on_cpu(gemm, inputs_TK, out_TN)
        return out_TN

    def _on_cpu(self, kernel: Any, x_TK: torch.Tensor, out_TN: torch.Tensor) -> None:
        address = self.packed.data_ptr()
        sizes = self.out_features, self.in_features
        kernel(self.format, address, *sizes, x_TK.numpy(), out_TN.numpy())
        if self.bias is not None:
            out_TN += self.bias

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.format.name}"


class PackedExperts:
    """A MoE layer's experts: fetched in order, computed as many at a time as are there."""

    def __init__(self, layout: ExpertLayout, session: PackedSession, token: TokenExperts) -> None:
        """``token``: for one token's calls; layers of one layout may share it."""
        self.layout = layout
        self.session = session
        self._token = token

    def __call__(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """``hidden`` [T, H], ``top_k_index`` int64 [T, k], ``top_k_weights`` [T, k] → [T, H].

        Experts come in ascending order, as in every eager loop, and the sum does not depend on
        how many of them are computed together.
        """
        x_TH = hidden.detach().reshape(-1, self.layout.hidden).float().contiguous().numpy()
        index_Tk = top_k_index.reshape(len(x_TH), -1).numpy()
        weights_Tk = top_k_weights.detach().reshape(len(x_TH), -1).float().numpy()
        return (
            torch.from_numpy(self.run(x_TH, index_Tk, weights_Tk))
            .view(hidden.shape)
            .to(hidden.dtype)
        )

    def for_token(
        self, ids: npt.NDArray[np.int64], weights: Floats, x: Floats, out: Floats | None = None
    ) -> Floats:
        """One token, from the routing on: ``ids`` [k] ascending, ``weights`` [k], ``x`` [H].
        Returns ``out`` [H], new memory if it is not given."""
        out = np.empty_like(x) if out is None else out
        at = 0
        self.session.begin(ids.tolist(), x)
        try:
            for some, bases in self.session.batches():
                end = at + len(some)
                self._token(bases, x, weights[at:end], out, add=at > 0)
                at = end
        finally:
            self.session.end()
        if not at:
            out.fill(0)
        return out

    def for_prompt(
        self, ids_Tk: npt.NDArray[np.int64], weights_Tk: Floats, x_TH: Floats, out_TH: Floats
    ) -> None:
        """Many tokens, from the routing on, to ``out`` [T, H]."""
        self.session.begin(np.unique(ids_Tk).tolist(), x_TH)
        try:
            self.run(x_TH, ids_Tk, weights_Tk, out_TH)
        finally:
            self.session.end()

    def run(
        self, x_TH: Floats, index_Tk: Any, weights_Tk: Floats, out_TH: Floats | None = None
    ) -> Floats:
        """The same on arrays, after the session has begun; returns ``out``, None: a new one."""
        if out_TH is None:
            out_TH = np.empty_like(x_TH)
        one = len(x_TH) == 1
        by_expert = dict(zip(index_Tk[0].tolist(), weights_Tk[0].tolist(), strict=True))
        add = False
        for some, bases in self.session.batches():
            if one:
                weights_TE = np.array([[by_expert[e] for e in some]], np.float32)
            else:
                chosen_TEk = index_Tk[:, None, :] == np.array(some)[:, None]
                weights_TE = np.where(chosen_TEk, weights_Tk[:, None, :], np.float32(0)).sum(2)
            expert_ffn(self.layout, bases, x_TH, weights_TE, out_TH, add=add)
            add = True
        if not add:
            out_TH[:] = 0
        return out_TH


class PackedSession(ExpertSession):
    """One MoE layer's run: its experts in order, several held at once."""

    def __init__(
        self,
        executor: Executor,
        group: ExpertGroup,
        after: Sequence[ExpertGroup],
        *,
        at_once: int,
        pinned: bool,
    ) -> None:
        """``at_once``: experts held together; the others' slots are left for what comes next.
        ``pinned``: all experts stay where they are, so that nobody has to be asked for them."""
        super().__init__(executor, group, after)
        self._at_once = at_once
        self._bases: npt.NDArray[np.int64] | None = None
        if pinned:
            self._bases = np.array([executor.address(b) for b in group.blocks], np.int64)

    @property
    def waits(self) -> bool:
        """Whether experts may have to be waited for, while other sequences run."""
        return self._bases is None

    @property
    def shared(self) -> bool:
        """Whether the caller is one of several sequences that run in turns."""
        return self.executor.road() is not self.executor

    @property
    def places(self) -> npt.NDArray[np.int64]:
        """Addresses of all experts, int64 [E]. Where they come and go: 0 of those that are not
        there, kept up to date; see ``Executor.places``."""
        if self._bases is None:
            return self.executor.places(self.group.blocks)
        return self._bases

    def count(self, experts: int) -> None:
        """So many uses of experts that stay in place."""
        self.executor.stats.hits += experts

    def expect(self, experts: list[int]) -> None:
        """Somebody else says to the executor what the layer routes to."""
        self._at()[1].wanted = experts
        self.opened()

    def begin(self, experts: list[int], *args: Any) -> None:
        self._at()[1].wanted = experts
        if self._bases is None:
            super().begin(experts, *args)
        else:
            self.count(len(experts))

    def batches(self) -> Iterator[tuple[list[int], npt.NDArray[np.int64]]]:
        """Yields experts and the addresses of their bundles: the next one, waited for, and those
        behind it that are there already. They are let go when the next batch is asked for."""
        wanted, most = self._at()[1].wanted, self._at_once
        if self._bases is None:
            yield from self.batches_of(wanted, most)
            return
        for at in range(0, len(wanted), most):
            some = wanted[at : at + most]
            yield some, self._bases[some]


def expert_layout_of(group: PackedGroup, module: Any) -> ExpertLayout:
    """How a kernel finds its way in a bundle of ``group``, whose experts are ``module``'s.

    Raises:
        UnsupportedModelError: what an expert computes is nothing that the kernel can.
    """
    parts = {part.name: part for part in group.parts}
    if not {"gate", "up", "down"} <= parts.keys():
        raise UnsupportedModelError(
            f"{group.name}: packed experts have a gate, an up and a down matrix, these have "
            f"{', '.join(parts)}; run the model without --quant or --kernels fast"
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
                f"form, for which there is no kernel; run the model without --quant or "
                f"--kernels fast"
            )
    gate, up, down = parts["gate"], parts["up"], parts["down"]
    if gate.format != up.format:
        raise UnsupportedModelError(
            f"{group.name}: the gate is in {gate.format} and the up in {up.format}; the kernel "
            f"takes both in one format: use a file that has them so, or the unquantised checkpoint "
            f"with --quant q4"
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
    gate, up = (
        4 * torch.randn(4, inner, generator=generator, dtype=torch.float32) for _ in range(2)
    )
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


__all__ = [
    "PackedExperts",
    "PackedLinear",
    "PackedSession",
    "expert_layout_of",
    "find_glu",
]
