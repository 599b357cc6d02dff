"""A token's products with unquantised weights, by a kernel of ours that has torch's bits.

torch multiplies a single bfloat16 row at half to two thirds of what the memory gives (12 to 17 of
26 GB/s on two Zen 4 cores); ``cpu_ops.row_products`` at 20 to 24, and with the same bits, which is
found out for each kind of matrix. Whatever is not known to come out the same is torch's: several
rows, other dtypes and processors, gradients, autocast, and calls that somebody looks at.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from offload.models.shadow import STANDS_IN, shadow
from offload.runtime.known import Known
from offload.runtime.memory import HostMemory
from offload.runtime.probe_together import SIZES, TorchProducts

logger = logging.getLogger(__name__)

LEAST_BYTES = 1 << 30
"""Of a model's weights: with fewer, tokens are quick, and a second of imports (Numba's 50 MiB among
them) is not won back soon."""

_LINE = 64
"""Bytes; torch's own tensors begin at multiples of it."""

_SETTINGS = ("ONEDNN_", "DNNL_", "MKL_", "OMP_")
"""Environment variables by which libraries choose how they multiply."""

_INSTRUCTION = "avx512_bf16"


class Blocks(dict[tuple[Any, ...], int | None]):
    """How products with a kind of matrix are added up, of those that were tried."""


class Assumed(Blocks):
    """As if all of them were known: for toys, whose results nobody looks at."""

    def __missing__(self, kind: tuple[Any, ...]) -> int | None:
        (rows, columns), dtype, bias, contiguous = kind[:4]
        plain = dtype == torch.bfloat16 and bias in (None, torch.bfloat16) and contiguous
        return 512 if plain and rows % 32 == columns % 32 == 0 else None


def worth(nbytes: int, dtype: torch.dtype, device: str) -> bool:
    """Whether a model's tokens should be multiplied so.

    Args:
        nbytes: of its weights.
        dtype: that it runs in.
        device: who computes, by ``Choice.kind``.
    """
    return nbytes >= LEAST_BYTES and dtype == torch.bfloat16 and device == "cpu" and _has_kernel()


@functools.cache
def _has_kernel() -> bool:
    if _INSTRUCTION not in _processor_flags():
        return False  # said without Numba
    from offload.cpu_ops import row_products, threads

    # Our threads are torch's, or there is one.
    shared = threads.openmp() is not None or torch.get_num_threads() == 1
    one = row_products.PANEL_ROWS
    return shared and row_products.fits(torch.zeros(one, one, dtype=torch.bfloat16))


def _processor_flags() -> Sequence[str]:
    """As Linux names them; none where nobody says."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            return value.split()
    return ()


def prepare(compiling: Callable[[Any], None] | None = None) -> None:
    """Have the kernel there before anybody measures what the process weighs without a model.

    Args:
        compiling: see ``offload.cpu_ops.warm.compile_ahead``.
    """
    from offload.cpu_ops.row_products import row_products_kernel
    from offload.cpu_ops.warm import compile_ahead

    compile_ahead([row_products_kernel()], compiling)


class SingleRows:
    """The products of one model."""

    def __init__(self, blocks: Blocks | None = None) -> None:
        """``blocks``: what is known already, and grows."""
        self.blocks = Blocks() if blocks is None else blocks

    def linear(
        self, x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``F.linear``, bit for bit. Takes [..., K]."""
        found = self.product(x, weight_NK, bias_N)
        return F.linear(x, weight_NK, bias_N) if found is None else found

    def product(
        self, x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """``linear`` of a single row; None: it is not one, or not known to come out the same."""
        if (
            type(x) is not torch.Tensor
            or x.is_nested  # which has no sizes to ask for
            or type(weight_NK) not in _PLAIN
            or not is_single(x, weight_NK)
            or x.dtype is not torch.bfloat16
            or not (x.is_cpu and weight_NK.is_cpu)
            or x.dim() < 2
            or not _as_it_lies(x)
            or looked_at()
        ):
            return None
        block = block_of(weight_NK, bias_N, self.blocks)
        if block is None or x.shape[-1] != weight_NK.shape[1]:
            return None
        found = multiplied(x.view(1, -1), weight_NK, bias_N, block)
        return found.view(*x.shape[:-1], -1)

    def install(self, model: nn.Module) -> list[Callable[[], Any]]:
        """Have the linear layers of a model compute so, before anything else is in front of their
        forward: those of a model inside that is streamed by itself are not touched. Returns what
        undoes it."""
        plain = [m for m in model.modules() if is_plain(m) and "forward" not in m.__dict__]
        return [shadow(module, "forward", self._forward(module)) for module in plain]

    def _forward(self, module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        inner, own = module.forward, module._parameters

        @wraps(inner)
        def forward(input: torch.Tensor) -> torch.Tensor:  # named as in torch's own
            if "weight" in own and "bias" in own:  # else made of others since: pruned, normed
                found = self.product(input, own["weight"], own["bias"])
                if found is not None:
                    return found
            return inner(input)  # type: ignore[no-any-return]

        setattr(forward, STANDS_IN, True)
        return forward


_PLAIN = (torch.Tensor, nn.Parameter)


def _as_it_lies(x: torch.Tensor) -> bool:
    """Whether torch would take a row for the matrix that it is: the last token of a prompt, by its
    strides, is multiplied another way."""
    width = x.shape[-1]
    strides = x.stride()
    return strides[-1] == 1 and strides[:-1] == (width,) * (len(strides) - 1)


def looked_at() -> bool:
    """Whether somebody watches, records or differentiates what torch is called with."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.maybe_current_level() is not None  # type: ignore[attr-defined]
        or forward_ad._current_level >= 0
    )


def is_single(row: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a product is of one row, as it lies: the kernel reads bytes, and what torch would
    convert first, or refuse, is not for it."""
    return (
        not torch.is_grad_enabled()
        and row.dim() > 0  # else it has no last dimension
        and row.shape[-1] == row.numel()
        and row.dtype == weight.dtype
        and not torch.is_autocast_enabled("cpu")
    )


def is_plain(module: nn.Module) -> bool:
    """Whether a layer computes what its class does. A forward of its own in place of the class's
    may keep autograd out, where it streams by itself, and its weights in."""
    forward = inner = module.__dict__.get("forward")
    while (behind := getattr(inner, "__wrapped__", None)) is not None:
        inner = behind
    plain = forward is None or getattr(inner, "__func__", None) is nn.Linear.forward
    return type(module) is nn.Linear and plain and {"weight", "bias"} <= module._parameters.keys()


def block_of(weight: torch.Tensor, bias: torch.Tensor | None, blocks: Blocks) -> int | None:
    """How products with these weights are added up; tried with the first of a kind, and kept in
    ``blocks``. None: that is not known."""
    at = weight.data_ptr() % _LINE
    biased = None if bias is None else bias.dtype
    threads = torch.get_num_threads()
    kind = (weight.shape, weight.dtype, biased, weight.is_contiguous(), at, threads)
    try:
        return blocks[kind]
    except KeyError:
        found = _tried(weight.detach(), None if bias is None else bias.detach(), kind)
        blocks[kind] = found
        logger.debug("products of single rows %s: block %s", kind, found)
        return found


def _tried(weight: torch.Tensor, bias: torch.Tensor | None, kind: tuple[Any, ...]) -> int | None:
    """What a kind of matrix is added up by. A second and more for a large model's, once: what was
    found on this machine is only looked at again."""
    from offload.cpu_ops.row_products import find_block, fits
    from offload.runtime.hardware_cache import cpu_name

    if not fits(weight, bias):
        return None
    known = Known("single_rows.json")
    said = {name: v for name, v in os.environ.items() if name.startswith(_SETTINGS)}
    key = json.dumps([torch.__version__, cpu_name(), *map(str, kind), said], sort_keys=True)
    expected = known.get(key)
    if type(expected) is int and find_block(weight, bias, expected) is not None:
        return expected
    found = find_block(weight, bias)
    if found is not None and found != expected:
        known.put(key, found)
    return found


def multiplied(
    x_TK: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, block: int
) -> torch.Tensor:
    """Every row's own product, [T, N]."""
    return _multiply_rows()(x_TK.contiguous(), weight, block, bias)


@functools.cache
def _multiply_rows() -> Callable[..., torch.Tensor]:
    # A statement would look for its module each time, of hundreds in a token.
    from offload.cpu_ops.row_products import multiply_rows

    return multiply_rows


def probed(memory: HostMemory) -> TorchProducts:
    """Such products, for ``runtime.probe_together``, of weights as they are read here."""
    rows, toys = SingleRows(), SingleRows(Assumed())
    products = TorchProducts(memory, "bfloat16", rows.linear, toys.linear)
    with torch.no_grad():
        for size in range(len(SIZES)):
            products.one(size)  # how they are added up is found out before anybody looks at a clock
    return products


__all__ = [
    "LEAST_BYTES", "Assumed", "Blocks", "SingleRows", "block_of", "is_plain", "is_single",
    "looked_at", "multiplied", "prepare", "probed", "worth",
]  # fmt: skip
