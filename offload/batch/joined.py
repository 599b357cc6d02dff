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
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Listing
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from offload.batch.joined_layers import JOINED_BYTES, JoinedLayer, Kind, kind_of, layers_of
from offload.batch.row_attention import install
from offload.blocks import Tier
from offload.models.shadow import STANDS_IN, shadow
from offload.models.single_rows import Blocks, block_of, is_plain, is_single, multiplied

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
        handle: Any = getattr(model, "offload", None)
        attachment = getattr(handle, "attachment", None)
        rows = getattr(attachment, "rows", None)
        blocks = Blocks() if rows is None else rows.blocks
        find_head = getattr(model, "get_output_embeddings", None)
        head = None if find_head is None else find_head()
        for name, module in model.named_modules():
            # By name: its module brings Numba, which other models do without.
            if is_plain(module) or type(module).__name__ == "PackedLinear":
                product = LinearProduct(name, module, blocks, is_head=module is head)
                forward = partial(self._forward, product, module.forward)
                setattr(forward, STANDS_IN, True)
                self._undo.append(shadow(module, "forward", forward))
        if attachment is not None:
            attachment.join_head = partial(self._slice, blocks)
            self._undo.append(partial(setattr, attachment, "join_head", None))
            self._join_layers(model, attachment, blocks)
        lean = getattr(handle, "lean", None)
        if lean is not None and lean.joins:
            lean.join = join
            self._undo.append(partial(setattr, lean, "join", None))

    def _join_layers(self, model: nn.Module, attachment: Any, blocks: Blocks) -> None:
        """Decoder layers in one go, where the CPU computes them all."""
        plan = attachment.plan
        on_cpu = plan.compute_tier is Tier.RAM and plan.split is None and plan.sites is None
        layers = layers_of(model) if on_cpu else []
        if not layers:
            return
        kinds: dict[Any, Kind] = {}

        def multiply(x: Any, weight: Any, bias: Any = None) -> torch.Tensor | None:
            if not is_single(x[0], weight):
                return None
            block = block_of(weight, bias, blocks)
            return None if block is None else multiplied(x, weight, bias, block)

        self._undo.append(install())
        for name, layer in layers:
            made = kind_of(layer)
            kind = kinds[made] = kinds.get(made) or Kind()
            joined = JoinedLayer(name, layer, kind, self._join, multiply, attachment.unrecorded)
            forward = partial(joined.forward)
            setattr(forward, STANDS_IN, True)
            self._undo.append(shadow(layer, "forward", forward))

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

    def _slice(
        self,
        blocks: Blocks,
        name: str,
        row: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """A row's product with a slice of the head; None: it is multiplied alone."""
        found: torch.Tensor | None = self._join(SliceProduct(name, weight, bias, blocks), row)
        return found


class LinearProduct:
    """A linear layer's."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        blocks: Blocks,
        *,
        is_head: bool = False,
    ) -> None:
        """``blocks``: how products are joined, by kind; found out by the first layer of each.
        ``is_head``: its results are what the plan has room for at every sequence, the logits."""
        self.name = name
        self._module: Any = module
        self._blocks, self._is_head = blocks, is_head
        self._tried: tuple[Any, Any, tuple[int, int], int | None] | None = None
        """Of the weights that were there last: a reference to them and to their bias, threads and
        address, and how their products are joined. All sequences ask about the same ones."""

    def multiply(self, rows: Listing[torch.Tensor]) -> list[torch.Tensor]:
        """Each of ``rows`` [..., K] (one row) through a layer whose weights are there."""
        module = self._module
        if type(module) is nn.Linear:
            block = self._block()
            if block is not None:
                return _joined(rows, module.weight, module.bias, block)
        elif len(rows) > 1:
            return _split(module.rows(_together(rows)), rows)
        inner = type(module).forward
        return [inner(module, row) for row in rows]

    def takes(self, row: torch.Tensor) -> bool:
        """Whether a product is one of a single row, and worth waiting for."""
        module = self._module
        if type(module) is not nn.Linear:
            # What computes it elsewhere takes no rows of several.
            single = not torch.is_grad_enabled() and row.shape[-1] == row.numel()
            return single and module.product is None
        weight: Any = module._parameters["weight"]
        return is_single(row, weight) and self._block() is not None

    def at_once(self, sequences: int) -> int:
        """Rows that are multiplied together."""
        if self._is_head:
            return sequences
        return _at_once(sequences, self._module.in_features, self._module.out_features)

    def _block(self) -> int | None:
        """How the layer's products are joined; tried when the first of its shape is there."""
        parameters, threads = self._module._parameters, torch.get_num_threads()
        weight, bias, tried = parameters["weight"], parameters["bias"], self._tried
        if tried is not None:
            same = tried[0]() is weight and tried[2] == (threads, weight.data_ptr())
            if same and (None if tried[1] is None else tried[1]()) is bias:
                return tried[3]
        found = block_of(weight, bias, self._blocks)
        kept = None if bias is None else weakref.ref(bias)
        self._tried = weakref.ref(weight), kept, (threads, weight.data_ptr()), found
        return found


class SliceProduct:
    """A slice's of an LM head, whose weights are there."""

    def __init__(
        self,
        name: str,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        blocks: Blocks,
    ) -> None:
        """``blocks``: as ``LinearProduct``."""
        self.name = name
        self._weight, self._bias, self._blocks = weight, bias, blocks

    def multiply(self, rows: Listing[torch.Tensor]) -> list[torch.Tensor]:
        """Each of ``rows`` [..., K] (one row) times the slice."""
        block = block_of(self._weight, self._bias, self._blocks)
        if block is not None:
            return _joined(rows, self._weight, self._bias, block)
        return [nn.functional.linear(row, self._weight, self._bias) for row in rows]

    def takes(self, row: torch.Tensor) -> bool:
        """Whether a product is one of a single row, and worth waiting for."""
        weight = self._weight
        return is_single(row, weight) and block_of(weight, self._bias, self._blocks) is not None

    def at_once(self, sequences: int) -> int:
        """Rows that are multiplied together: of a slice, they are not yet the logits that the plan
        has room for."""
        return _at_once(sequences, self._weight.shape[1], self._weight.shape[0])


def _at_once(sequences: int, columns: int, rows: int) -> int:
    return max(1, sequences * JOINED_BYTES // (4 * (columns + rows)))


def _joined(
    rows: Listing[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None, block: int
) -> list[torch.Tensor]:
    return _split(multiplied(_together(rows), weight, bias, block), rows)


def _together(rows: Listing[torch.Tensor]) -> torch.Tensor:
    """[T, K] of single rows [..., K]; in one call where they are alike, as there is one for each
    layer of each sequence."""
    first = rows[0].shape
    if len(first) > 1 and all(row.shape == first for row in rows):
        return torch.cat(list(rows)).view(len(rows), -1)
    return torch.cat([row.reshape(1, -1) for row in rows])


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
    first, dtype = rows[0].shape, out_TN.dtype
    if not apart and all(row.shape == first and row.dtype == dtype for row in rows):
        return list(out_TN.view(len(rows), *first[:-1], -1).unbind(0))
    return [
        (one.clone() if apart else one).view(*row.shape[:-1], -1).to(row.dtype)
        for one, row in zip(out_TN, rows, strict=True)
    ]


__all__ = ["JOINED_BYTES", "Joins", "LinearProduct", "SliceProduct", "can_join"]
