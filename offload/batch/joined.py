"""One product for all sequences that wait at a linear layer, with each one's own bits.

A sequence that decodes brings a single row to every linear layer. Alone, each would read the
layer's weights again, which were just read for its neighbour: a pass over many sequences would
take as long as the memory takes for all of them. So they wait for each other at each layer, and its
weights are read once. That this changes no bit is not taken for granted: packed weights have a
kernel whose rows do not depend on each other, torch's bfloat16 products are tried
(``cpu_ops.row_products``), and where neither holds everybody multiplies by himself. Packed models
whose tokens go through whole layers at once (``models.lean_run``) wait for each other there:
between two layers, or before all of them where the layers' weights stay.

Prompts are not joined: they bring rows enough.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from collections.abc import Sequence as Listing
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from offload.models.shadow import STANDS_IN, shadow

logger = logging.getLogger(__name__)

JOINED_BYTES = 64 * 2**10
"""For each sequence, of the rows that go in and come out of a product: what the plan sets aside. Of
wider rows fewer are multiplied at once, and the matrix is read again for the others; but the plan
has a place of its own for logits."""

_LINE = 64
"""Bytes; torch's own tensors begin at multiples of it."""


class Product(Protocol):
    """What several sequences can compute in one go, each with a row of its own."""

    name: str
    """Of the place where they wait for each other."""

    def takes(self, row: Any) -> bool:
        """Whether a row is worth waiting for others; raises what is wrong with it."""
        ...

    def at_once(self, sequences: int) -> int:
        """Rows that are computed together, of so many sequences."""
        ...

    def multiply(self, rows: Listing[Any]) -> list[Any]:
        """What each row gets alone."""
        ...


class Joins:
    """What sequences compute together in one model, while a conductor runs it: its linear layers,
    and where a packed model's single tokens go through layers without their modules, those
    layers."""

    def __init__(self, model: nn.Module, join: Callable[[Product, Any], Any]) -> None:
        """``join(product, row)`` is asked at each single row's product; None: not joined."""
        self._join = join
        self._undo: list[Callable[[], Any]] = []
        blocks: dict[tuple[Any, ...], int | None] = {}
        find_head = getattr(model, "get_output_embeddings", None)
        head = None if find_head is None else find_head()
        for name, module in model.named_modules():
            own = module.__dict__.get("forward")
            # By name: its module brings Numba, which other models do without.
            if _is_plain(module, own) or type(module).__name__ == "PackedLinear":
                product = LinearProduct(name, module, blocks, is_head=module is head)
                forward = partial(self._forward, product, module.forward)
                setattr(forward, STANDS_IN, True)
                self._undo.append(shadow(module, "forward", forward))
        handle: Any = getattr(model, "offload", None)
        lean = getattr(handle, "lean", None)
        if lean is not None and lean.joins:
            lean.join = join
            self._undo.append(partial(setattr, lean, "join", None))

    def close(self) -> None:
        """The layers are as they were."""
        while self._undo:
            self._undo.pop()()

    def _forward(
        self,
        product: LinearProduct,
        inner: Callable[[torch.Tensor], torch.Tensor],
        input: torch.Tensor,  # named as in torch's own forward
    ) -> torch.Tensor:
        found: torch.Tensor | None = self._join(product, input)
        return inner(input) if found is None else found


class LinearProduct:
    """A linear layer's."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        blocks: dict[tuple[Any, ...], int | None],
        *,
        is_head: bool = False,
    ) -> None:
        """``blocks``: how products are joined, by kind; found out by the first layer of each.
        ``is_head``: its results are what the plan has room for at every sequence, the logits."""
        self.name = name
        self._module: Any = module
        self._blocks, self._is_head = blocks, is_head

    def multiply(self, rows: Listing[torch.Tensor]) -> list[torch.Tensor]:
        """Each of ``rows`` [..., K] (one row) through a layer whose weights are there."""
        module = self._module
        if len(rows) > 1 and type(module) is nn.Linear:
            block = self._block()
            if block is not None:
                from offload.cpu_ops.row_products import multiply_rows

                x_TK = torch.cat([row.reshape(1, -1) for row in rows])
                out = multiply_rows(x_TK, module.weight.detach(), block, module.bias)
                return _split(out, rows)
        elif len(rows) > 1:
            return _split(module.rows(torch.cat([row.reshape(1, -1) for row in rows])), rows)
        inner = type(module).forward
        return [inner(module, row) for row in rows]

    def takes(self, row: torch.Tensor) -> bool:
        """Whether a product is one of a single row, and worth waiting for."""
        module, x = self._module, row
        if torch.is_grad_enabled() or x.shape[-1] != x.numel():
            return False
        if type(module) is not nn.Linear:
            return module.product is None  # what computes it elsewhere takes no rows of several
        # The kernel reads bytes: what torch would convert first, or refuse, is not for it.
        if x.dtype != module.weight.dtype or torch.is_autocast_enabled("cpu"):
            return False
        return self._block() is not None

    def at_once(self, sequences: int) -> int:
        """Rows that are multiplied together."""
        if self._is_head:
            return sequences
        each = 4 * (self._module.in_features + self._module.out_features)
        return max(1, sequences * JOINED_BYTES // each)

    def _block(self) -> int | None:
        """How the layer's products are joined; tried when the first of its shape is there."""
        weight, bias = self._module.weight, self._module.bias
        at = weight.data_ptr() % _LINE
        dtypes = weight.dtype, None if bias is None else bias.dtype
        kind = (*weight.shape, *dtypes, weight.is_contiguous(), at, torch.get_num_threads())
        if kind not in self._blocks:
            from offload.cpu_ops.row_products import find_block

            found = find_block(weight.detach(), None if bias is None else bias.detach())
            self._blocks[kind] = found
            logger.debug("products of single rows %s: block %s", kind, found)
        return self._blocks[kind]


def _is_plain(module: nn.Module, forward: Any) -> bool:
    """Whether a layer computes what its class does; ``forward``: its own in place of the class's,
    which where a layer streams by itself only keeps autograd out."""
    inner = getattr(forward, "__wrapped__", None)
    plain = forward is None or getattr(inner, "__func__", None) is nn.Linear.forward
    return type(module) is nn.Linear and plain


def can_join(prepared: Any) -> bool:
    """Whether a planned model's linear layers will be joined; for estimates, as if all were alike.

    Of packed layers: unless a card computes them. Of others: if a stand-in with as many columns as
    the layers have is added in a known order.
    """
    kind = prepared.options.choice.kind
    if (lean := getattr(prepared, "lean", None)) is not None:
        return kind != "cuda" and (not lean.layers or lean.runs_prompts)
    if kind != "cpu":
        return False
    shapes = [m.weight for m in prepared.meta.model.modules() if type(m) is nn.Linear]
    return bool(shapes) and _order_is_known(
        max(weight.shape[1] for weight in shapes), shapes[0].dtype, torch.get_num_threads()
    )


@functools.cache
def _order_is_known(columns: int, dtype: torch.dtype, threads: int) -> bool:
    from offload.cpu_ops.row_products import find_block

    return find_block(torch.ones(256, columns, dtype=dtype)) is not None


def _split(out_TN: torch.Tensor, rows: Listing[torch.Tensor]) -> list[torch.Tensor]:
    """Each row by itself, and where a tensor of its own would begin: in float32, what comes next
    may be added up in another order elsewhere."""
    apart = out_TN.shape[1] * out_TN.element_size() % _LINE != 0
    return [
        (one.clone() if apart else one).view(*row.shape[:-1], -1).to(row.dtype)
        for one, row in zip(out_TN, rows, strict=True)
    ]


__all__ = ["JOINED_BYTES", "Joins", "can_join"]
