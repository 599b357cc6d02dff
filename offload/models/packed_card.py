"""Packed weights on a card: what computes them there, in place of the CPU's kernels.

    T tokens, k experts of a token, H hidden size

The simulated device computes on the CPU, in the device's memory, with the CPU's kernels: the same
blocks take the same way there, and only this module is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from offload.blocks import Tier
from offload.cpu_ops.experts import ExpertLayout
from offload.cpu_ops.formats import get_format
from offload.errors import OffloadError, UnsupportedModelError
from offload.gpu_ops import experts as routed
from offload.gpu_ops import linear as dense
from offload.gpu_ops.launch import CupyLauncher, Launcher
from offload.gpu_ops.records import Scratch
from offload.gpu_ops.source import Kernel, kernel
from offload.models.absent import AbsentTensor, absent
from offload.models.hybrid import Rows
from offload.models.packed_modules import PackedLinear, PackedSession
from offload.models.shadow import shadow
from offload.runtime.device import Device
from offload.scheduler.plan import Plan

if TYPE_CHECKING:
    from offload.models.pack_reader import PackedModel


SCRATCH = "kernels' scratch"
"""What plans call it."""


class PackedCard:
    """The kernels of one card and the scratch memory that they share."""

    def __init__(self, launcher: Launcher, scratch_bytes: int) -> None:
        self.launcher = launcher
        self.scratch = Scratch(scratch_bytes, launcher.device)

    def prepare(self, pack: PackedModel) -> None:
        """Compile what the pack needs. Raises OffloadError: a kernel does not compile here."""
        for one in kernels_of(pack):
            self.launcher.prepare(one)

    def linear(self, module: PackedLinear, x_TK: torch.Tensor, out_TN: torch.Tensor) -> None:
        """A linear layer's output on the card."""
        dense.linear(
            self.launcher, self.scratch, module.format, module.packed.data_ptr(), x_TK, out_TN,
            module.bias,
        )  # fmt: skip

    def take(self, model: Any, on_detach: Callable[[Callable[[], None]], None]) -> None:
        """Have a model's packed linear layers computed here, until what ``on_detach`` is given is
        called: then they do not keep the scratch memory any more."""
        for module in model.modules():
            if isinstance(module, PackedLinear):
                on_detach(shadow(module, "product", self.linear))


def kernels_of(pack: PackedModel) -> list[Kernel]:
    """What a pack's matrices and experts are multiplied by on a card."""
    wanted = [kernel("quantize")]
    for fmt in pack.matrix_formats():
        wanted += [kernel("linear", fmt, n) for n in (1, 4)] + [kernel("dequantize", fmt)]
    for gate_up, down in (map(get_format, pair) for pair in pack.expert_formats()):
        wanted += [kernel("gate_up", gate_up, n) for n in (1, 4)]
        wanted += [kernel("down", down, n) for n in (1, 4)]
        wanted += [kernel("dequantize", fmt) for fmt in (gate_up, down)] + [kernel("merge")]
    return list(dict.fromkeys(wanted))


def compile_for(device: torch.device, pack: PackedModel) -> None:
    """Compile what a pack needs on a card, before the process is weighed: the compiler stays in it,
    and it is of the program. CuPy keeps what it has compiled for who asks next.

    Raises:
        OffloadError: CuPy is missing, or a kernel does not compile; says what to install or do.
        UnsupportedModelError: the card is none for them.
    """
    _check_maker()
    launcher = CupyLauncher(device)
    for one in kernels_of(pack):
        launcher.prepare(one)


def stand_in_on(device: torch.device, model: Any) -> None:
    """Stand-ins of packed weights say that they are on ``device``: transformers asks them, and what
    is moved there is not to touch them."""
    for module in model.modules():
        own = module._parameters
        for attr, tensor in list(own.items()):
            if isinstance(tensor, AbsentTensor):
                own[attr] = absent(tensor._offload_name, tensor, device)
        if isinstance(module, PackedLinear):
            like: Any = module.weight
            module.__dict__["weight"] = absent(like._offload_name, like, device)


class CardExperts:
    """As ``PackedExperts``, on a card: routed by the host, which waits for nothing but that."""

    def __init__(self, layout: ExpertLayout, session: PackedSession, card: PackedCard) -> None:
        self.layout = layout
        self.session = session
        self._card = card

    def __call__(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """As ``PackedExperts``, with tensors on the card."""
        x_TH = hidden.detach().reshape(-1, self.layout.hidden).float().contiguous()
        heard = self.session.heard
        said = heard[1] if heard is not None and heard[0] is top_k_index else None
        if said is None:
            said = top_k_index.cpu().numpy()
        index_Tk = said.reshape(len(x_TH), -1)
        weights_Tk = top_k_weights.detach().reshape(len(x_TH), -1).float().contiguous()
        out_TH = torch.empty_like(x_TH)
        add = False
        for some, bases in self.session.batches():
            routed.expert_ffn(
                self._card.launcher, self._card.scratch, self.layout, some, bases, x_TH, index_Tk,
                weights_Tk, out_TH, add=add,
            )  # fmt: skip
            add = True
        if not add:
            out_TH.zero_()
        return out_TH.view(hidden.shape).to(hidden.dtype)


class CardMerge:
    """A layer's sum where the CPU has a part of the experts: the card's own first, in the order in
    which they come up, then the CPU's, in the order of the schedule (see ``packed_hybrid.Merge``).
    """

    def __init__(
        self, card: PackedCard, layout: ExpertLayout, x_TH: torch.Tensor, index_Tk: torch.Tensor,
        weights_Tk: torch.Tensor, rows: Rows,
    ) -> None:  # fmt: skip
        self._card, self._layout, self._rows = card, layout, rows
        self._x, self._weights = x_TH, weights_Tk
        self._index = index_Tk.cpu().numpy()
        self._out = torch.zeros_like(x_TH)

    def on_device(self, experts: Sequence[int], bases: npt.NDArray[np.int64]) -> None:
        """See ``Merge``."""
        routed.expert_ffn(
            self._card.launcher, self._card.scratch, self._layout, experts, bases, self._x,
            self._index, self._weights, self._out, add=True,
        )  # fmt: skip

    def from_cpu(self, expert: int, rows_nH: torch.Tensor) -> None:
        """See ``Merge``. An expert's tokens are distinct: no two rows go to the same place."""
        device = self._out.device
        tokens, places = (torch.tensor(some, device=device) for some in self._rows.of[expert])
        weights_n = self._weights[tokens, places]
        self._out.index_add_(0, tokens, rows_nH * weights_n[:, None])

    def result(self) -> torch.Tensor:
        """See ``Merge``."""
        return self._out


def card_scratch(pack: PackedModel, layouts: list[ExpertLayout], rows: int, top_k: int) -> int:
    """Bytes of scratch for passes of up to ``rows`` tokens."""
    most = 0
    for fmt, outputs, inputs, seen in pack.matrices(rows):
        most = max(most, dense.scratch_bytes(fmt, outputs, inputs, seen))
    for layout in layouts:
        most = max(most, routed.scratch_bytes(layout, rows, top_k))
    return most


def card_outputs(pack: PackedModel, layouts: list[ExpertLayout], rows: int) -> int:
    """Bytes that torch's allocator gives for a product's float32 input and output, and for an
    expert with all of a prompt's tokens."""
    most = 0
    for _, outputs, inputs, seen in pack.matrices(rows):
        most = max(most, 4 * seen * (outputs + inputs))
    for layout in layouts:
        most = max(most, 8 * rows * layout.hidden + routed.many_bytes(layout, rows))
    return most


def open_card(device: Device, pack: PackedModel, plan: Plan) -> PackedCard | None:
    """Kernels for a pack on a card, compiled; None where the CPU computes.

    Raises:
        OffloadError: CuPy is missing, or a kernel does not compile; says what to install or do.
        UnsupportedModelError: the card is none for them.
    """
    if device.kind != "cuda":
        return None
    _check_maker()
    scratch_bytes = plan.reserves[Tier.DEVICE][SCRATCH]
    card = PackedCard(CupyLauncher(device.torch_device), scratch_bytes)
    card.prepare(pack)
    return card


def _check_maker() -> None:
    if torch.version.hip is not None:
        raise UnsupportedModelError(
            "packed weights are computed by CUDA kernels, and this torch is for AMD's cards: run "
            "the checkpoint itself with --gpu, or the pack without"
        )


def check_options(kind: str, kernels: str | None) -> None:
    """Raises OffloadError: the device cannot do what else was asked for, or CuPy is missing. Before
    anything is read."""
    if kernels == "fast":
        raise OffloadError(
            "--kernels fast compares the CPU's kernels with torch's: drop it, or --gpu and --device"
        )
    if kind == "cuda":
        check_card()


def check_card() -> None:
    """Whether packed weights can be computed with on a card here.

    Raises:
        OffloadError: CuPy is missing; names the extra.
        UnsupportedModelError: torch is for cards of another maker.
    """
    from offload.gpu_ops.launch import import_cupy

    _check_maker()
    import_cupy()


__all__ = [
    "SCRATCH", "CardExperts", "CardMerge", "PackedCard", "card_outputs", "card_scratch",
    "check_card", "check_options", "compile_for", "open_card", "stand_in_on",
]  # fmt: skip
