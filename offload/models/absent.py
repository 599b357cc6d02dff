"""Stand-ins for parameters that are not in memory: they know their shape, and refuse to be read.

A table that is only ever looked up (an embedding) has one that answers look-ups: it reads the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from offload.errors import ClosedError, OffloadError

UNPACKED = "load the checkpoint that it was made from, without quant= and kernels="
WHOLE_MODEL = (
    "To get the whole model back call offload.unwrap(model), or load it without a budget (of a "
    f"packed model: {UNPACKED})"
)
CHANGE = (
    "Put the new one into the checkpoint, and load or pack that again; a model that is not packed "
    "can be changed after offload.unwrap(model), and wrapped again"
)
"""Ways out, for messages."""

_SHAPE_ONLY = {
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
}


class AbsentTensor(torch.Tensor):
    """A parameter's name, shape, dtype and device without its data.

    Reading one is an error, never zeros or stale bytes: an operation that sees it was reached
    outside of the unit that streams the parameter.
    """

    _offload_name: str
    _offload_closed: bool = False
    """Whether the model it belonged to has been closed."""
    _offload_trained: bool = False
    """``requires_grad``, for those who ask at each use of a layer: torch takes its time."""

    @staticmethod
    def __new__(cls, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Any:
        make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        tensor = make(cls, shape, dtype=dtype, device=device)
        tensor._offload_name = name
        return tensor

    def __init__(self, *_: Any) -> None:
        super().__init__()
        # Its values are elsewhere, not missing: a family's own initialisation leaves it alone.
        self._is_hf_initialized = True

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        source = next((a for a in args if isinstance(a, AbsentTensor)), None)
        if func in _SHAPE_ONLY and source is not None:
            alias = AbsentTensor(source._offload_name, source.shape, source.dtype, source.device)
            alias._offload_closed = source._offload_closed
            return alias
        name = source._offload_name if source is not None else "a streamed parameter"
        if source is not None and source._offload_closed:
            raise ClosedError(f"{name} belongs to a model that has been closed; load it again")
        raise OffloadError(
            f"{name} is streamed and not in memory now ({func}); its data can be read only while "
            f"its layer runs. {WHOLE_MODEL}"
        )

    def data_ptr(self) -> int:
        """Refused: a kernel would read address 0."""
        raise OffloadError(
            f"{self._offload_name} is streamed and not in memory now; its address can be had only "
            f"while its layer runs and before the model is closed"
        )

    @property
    def data(self) -> Any:
        """Another one of the same name. Refuses to be set: the layer would never see the value."""
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        raise OffloadError(
            f"{self._offload_name} is streamed and cannot be given other data: what comes for its "
            f"layer is the weight from before. {CHANGE}"
        )

    @property
    def requires_grad(self) -> bool:
        return bool(torch.Tensor.requires_grad.__get__(self))  # type: ignore[attr-defined]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        torch.Tensor.requires_grad.__set__(self, value)  # type: ignore[attr-defined]
        self._offload_trained = bool(value)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        self.requires_grad = requires_grad
        return self

    def storage(self) -> Any:
        """Refused, as ``data_ptr``: safetensors asks for it."""
        self.data_ptr()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape = tuple(self.shape)
        return f"AbsentTensor({self._offload_name!r}, shape={shape}, dtype={self.dtype})"

    def __deepcopy__(self, memo: Any) -> AbsentTensor:
        raise OffloadError(
            f"{self._offload_name} is streamed: a streamed model cannot be copied; load it twice"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OffloadError(
            f"{self._offload_name} is streamed: a streamed model cannot be saved; its weights are "
            f"those of its checkpoint"
        )


class RowTable(AbsentTensor):
    """An absent table ``[V, D]`` whose rows are read at each look-up, wherever that happens.

    ``torch.embedding``, ``table[i]`` and ``table[ids]`` gather the rows asked for, each read once,
    and give what they would with the table in memory; everything else is refused. With it in
    memory, what is written to ``table[i]`` would be in the table: here that is refused, too.
    """

    _offload_read: Callable[[Sequence[int]], torch.Tensor]

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        parts = index if isinstance(index, tuple) else (index,)
        # Lists and tensors of ids give a copy, with the table in memory as well.
        return table_row(found, self._offload_name) if all(map(_is_number, parts[:1])) else found

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        _refuse_write(self._offload_name)

    def select(self, dim: Any, index: Any) -> Any:
        return table_row(super().select(dim, index), self._offload_name)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        table = next((a for a in args if isinstance(a, RowTable)), None)
        if table is None or args[0] is not table:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func in _SHAPE_ONLY:
            return row_table(table._offload_name, table, table.device, table._offload_read)
        if func is aten.embedding.default:
            return table._look_up(args[1])
        if func is aten.select.int and args[1] == 0:
            return table._look_up(table._from_the_end(torch.tensor(args[2], device="cpu")))
        if func is aten.index_select.default and args[1] == 0:
            return table._look_up(args[2])
        if func is aten.index.Tensor and len(args[1]) == 1 and args[1][0].dtype == torch.int64:
            return table._look_up(table._from_the_end(args[1][0]))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _from_the_end(self, ids: torch.Tensor) -> torch.Tensor:
        """Indices with the negative ones counted from the end, as brackets count them."""
        return torch.where(ids < 0, ids + self.shape[0], ids)

    def _look_up(self, ids: torch.Tensor) -> torch.Tensor:
        # ids: any shape; returns (*ids.shape, D)
        height, width = self.shape
        if ids.numel() == 1 and 0 <= (row := int(ids)) < height:  # each token of a text
            return self._offload_read((row,)).reshape(*ids.shape, width)
        unique, inverse = torch.unique(ids, return_inverse=True)
        rows = unique.tolist()
        if rows and not (rows[0] >= 0 and rows[-1] < height):
            raise IndexError(
                f"ids from {rows[0]} to {rows[-1]} for the {height} rows of {self._offload_name}"
            )
        if not rows:
            return torch.empty((*ids.shape, width), dtype=self.dtype, device=self.device)
        return self._offload_read(rows)[inverse]


class TableRow(torch.Tensor):
    """A row of a ``RowTable``, or what a program has made of it that lies in the same memory: read
    as any tensor, but not written to, as the table is elsewhere."""

    _offload_name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = kwargs.get("out", args[0] if _writes(func.__name__) else None)
        if isinstance(written, cls):
            _refuse_write(written._offload_name)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            row = next((a for a in args if isinstance(a, cls)), None)
            return result if row is None else _same_memory(result, row)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.detach().clone()


def table_row(value: torch.Tensor, name: str) -> torch.Tensor:
    """``value``, which lies in a row of the table ``name``, as one that is not written to."""
    row = value.as_subclass(TableRow)
    row._offload_name = name
    return row


def _same_memory(value: Any, row: TableRow) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_same_memory(part, row) for part in value)
    if type(value) is torch.Tensor and value.layout == torch.strided:
        at = value.untyped_storage().data_ptr()
        if at == row.untyped_storage().data_ptr():
            return table_row(value, row._offload_name)
    return value


def _writes(name: str) -> bool:
    """Whether a tensor's method of this name changes the tensor's values."""
    if name in ("requires_grad_", "detach_", "share_memory_"):
        return False
    return name == "__setitem__" or name in _AUGMENTED or (name[-1] == "_" and name[-2:] != "__")


_AUGMENTED = frozenset(
    f"__i{name}__"
    for name in "add sub mul div truediv floordiv mod pow and or xor lshift rshift".split()
)


def _is_number(index: Any) -> bool:
    """Whether an index takes one row, and no list of them."""
    return getattr(index, "ndim", None) == 0 or isinstance(index, int)


def _refuse_write(name: str) -> NoReturn:
    raise OffloadError(
        f"rows of {name} are read from the disk when they are used: what is written to one would "
        f"be lost. {CHANGE}"
    )


def row_table(
    name: str,
    like: torch.Tensor,
    device: torch.device,
    read: Callable[[Sequence[int]], torch.Tensor],
) -> RowTable:
    """A table that is not in memory; ``read(rows)`` returns ascending rows as ``[n, D]``."""
    table = RowTable(name, like.shape, like.dtype, device)
    table._offload_read = read
    return table


def absent(
    name: str, like: torch.Tensor, device: torch.device, *, closed: bool = False
) -> torch.nn.Parameter:
    """A parameter that is not in memory; trainable if ``like`` is: to those who count, that says
    what a model is. ``closed``: and never will be again."""
    tensor = AbsentTensor(name, like.shape, like.dtype, device)
    tensor._offload_closed = closed
    return torch.nn.Parameter(tensor, requires_grad=like.requires_grad)
