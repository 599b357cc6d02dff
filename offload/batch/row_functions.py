"""What a layer's code may do with rows of several sequences, if each is to keep its own bits.

A decoder layer that is called once for n sequences works on tensors [n, 1, ...], where alone each
is [1, 1, ...]. ``RowFunctions`` looks at every function of torch that it calls meanwhile:

* what moves values, or rounds each of them as IEEE 754 says, gives a row's bits whatever is beside
  it, and runs as it is;
* sums within a row do, too: torch adds up each one by itself;
* functions like exp are computed row by row: torch takes whole vectors of a tensor by another
  routine than what is left over, and more rows leave other values over (a few of them for several
  rows, where nothing is left over);
* products with weights are ``row_products``', which adds as torch does for a single row, or are
  computed row by row, as are those of complex numbers;
* anything else is ``NotJoined``: nothing is known of it.

Whether rows get mixed is no question of names: that shows when a layer is tried.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from offload.models.one_token import IN_FORCE, rows_at_once

_LINE = 64
"""Bytes; torch's own tensors begin at multiples of it."""

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor | None]
"""``multiply(x_TK, weight_NK, bias_N)``: every row's own product; None: not known for these."""


class NotJoined(Exception):
    """A layer does something that is not known to leave its rows' bits alone."""


_SAME = frozenset(
    """
    get set size dim ndimension numel nelement stride storage_offset data_ptr is_contiguous
    is_floating_point is_complex get_device element_size type type_as to float double half bfloat16
    int long short bool item tolist len view view_as reshape reshape_as flatten unflatten ravel
    transpose permute movedim moveaxis swapaxes swapdims t adjoint unsqueeze squeeze expand
    expand_as broadcast_to contiguous clone detach alias chunk split split_with_sizes tensor_split
    unbind cat concat concatenate stack hstack narrow select getitem setitem index_select gather
    take_along_dim scatter index_add index_copy masked_fill masked_scatter where nonzero one_hot
    repeat repeat_interleave tile pad zeros_like ones_like empty_like full_like new_zeros
    new_ones new_empty new_full new_tensor zeros ones empty full tensor arange copy fill zero
    add radd iadd sub rsub isub subtract mul rmul imul multiply div rdiv idiv truediv rtruediv
    itruediv true_divide divide neg negative pos abs absolute sign square sqrt rsqrt reciprocal
    clamp clip clamp_min clamp_max maximum minimum relu dropout identity
    eq ne lt le gt ge equal greater greater_equal less less_equal not_equal isnan isinf isfinite
    logical_and logical_or logical_not logical_xor and or xor invert iand ior ixor
    untyped_storage is_inference is_sparse is_meta
    any all topk argmax argmin amax amin max min sort argsort layer_norm rms_norm requires_grad_
    requires_grad view_as_complex view_as_real
    """.split()
)
_SUMS = frozenset("mean sum nansum var std norm vector_norm cumsum prod".split())
_ROW_BY_ROW = frozenset(
    """
    silu gelu sigmoid tanh exp exp2 expm1 log log2 log1p softplus logsigmoid softmax log_softmax
    softmin logsumexp mish hardswish hardsigmoid hardtanh relu6 leaky_relu elu selu celu erf sin cos
    normalize glu tanhshrink softsign
    """.split()
)
_GROUPED = frozenset("silu sigmoid".split())
"""Of those, ones that torch goes through two vectors at a time, each thread from the first value of
its share: rows of whole pairs of vectors are each begun anew, as long as one thread does it all."""
_WITH_WEIGHTS = frozenset("matmul mm addmm".split())
_PRODUCTS = frozenset("mul rmul imul multiply".split())
"""Of complex numbers: two roundings or three, as many are taken at once or few."""
_EXACT_POWERS = (1, 2, 3)
"""That torch multiplies out, the same way for all values."""


def row_of(x: torch.Tensor, i: int) -> torch.Tensor:
    """Row ``i`` of ``x`` [n, ...] as [1, ...], beginning where a tensor of its own might: in
    float32 products are added up in another order elsewhere."""
    row = x[i : i + 1]
    return row.clone() if row.data_ptr() % _LINE else row


def _plain(name: str) -> str:
    return name.strip("_")


class RowFunctions(TorchFunctionMode):
    """In force while a layer runs for several sequences. Raises ``NotJoined``."""

    def __init__(self, multiply: Multiply) -> None:
        super().__init__()
        self._multiply = multiply
        self._before: list[Any] = []

    def __enter__(self) -> RowFunctions:
        self._before.append(IN_FORCE.rows)
        IN_FORCE.rows = self
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        IN_FORCE.rows = self._before.pop()

    def multiply(self, x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor | None:
        """Every row's own product with [N, K]; None: not known for these."""
        return self._multiply(x_TK, weight_NK, None)

    def plain(self) -> AbstractContextManager[Any]:
        """Within ``self``: a context in which functions are not looked at."""
        return _pop_mode_temporarily()

    def watched(self) -> AbstractContextManager[Any]:
        """Within ``plain``: they are, again."""
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        how = _KNOWN.get(func)
        if how is None:
            how = _KNOWN[func] = _how(_plain(getattr(func, "__name__", "")))
        if how is _run:
            if kwargs.get("alpha", 1) != 1:
                raise NotJoined(f"{func.__name__} with alpha")  # one rounding, or two
            if _plain(func.__name__) in _PRODUCTS and any(map(_is_complex, args)):
                return _each_of_all(func, args, kwargs)
            return func(*args, **kwargs)
        return how(self, func, args, kwargs)

    def linear(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Every row's own product."""
        x, weight, bias = _arguments(args, kwargs)
        count = x.numel() // x.shape[-1] if x.dim() and x.shape[-1] else 0
        if count <= 1:
            return func(x, weight, bias)
        found = self._multiply(x.reshape(count, -1), weight, bias)
        if found is not None:
            return found.view(*x.shape[:-1], -1)
        if x.shape[0] != count:
            raise NotJoined(f"a product of {tuple(x.shape)}")
        return torch.cat([func(row_of(x, i), weight, bias) for i in range(count)])


def _run(mode: RowFunctions, func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _sum(mode: RowFunctions, func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    if x.is_floating_point() and func.__name__ != "cumsum":
        # norm has its power before the dimension
        at = 2 if func.__name__ in ("norm", "vector_norm") else 1
        dim = kwargs.get("dim", args[at] if len(args) > at else None)
        dims = dim if isinstance(dim, (tuple, list)) else (dim,)
        if not dims or any(d is None or d % x.dim() == 0 for d in dims):
            raise NotJoined(f"{func.__name__} over rows")
    return func(*args, **kwargs)


def _power(mode: RowFunctions, func: Any, args: Any, kwargs: Any) -> Any:
    exponent = args[1] if len(args) > 1 else kwargs.get("exponent")
    if isinstance(args[0], torch.Tensor) and exponent in _EXACT_POWERS:
        return func(*args, **kwargs)
    return _each(mode, func, args, kwargs)


def _each(mode: RowFunctions, func: Any, args: Any, kwargs: Any) -> Any:
    """Row by row."""
    x = args[0] if args else kwargs.pop("input", None)
    others = (*args[1:], *kwargs.values())
    if not isinstance(x, torch.Tensor) or any(isinstance(o, torch.Tensor) for o in others):
        raise NotJoined(f"{func.__name__} of several tensors")
    if not x.is_floating_point() or x.shape[:1] == (1,):
        return func(x, *args[1:], **kwargs)
    dim = kwargs.get("dim", -1)
    positional = [a for a in args[1:] if isinstance(a, int) and not isinstance(a, bool)]
    if x.dim() < 2 or dim == 0 or 0 in positional:
        raise NotJoined(f"{func.__name__} of {tuple(x.shape)}")
    name = func.__name__
    grouped = _plain(name) in _GROUPED and x.shape[0] and x.stride(-1) == 1
    some = (grouped and rows_at_once(x.numel() // x.shape[0], x.shape[-1])) or 1
    rows = [func(x[i : i + some], *args[1:], **kwargs) for i in range(0, x.shape[0], some)]
    if kwargs.get("inplace") or (name.endswith("_") and not name.startswith("__")):
        return x
    return torch.cat(rows) if rows else func(x, *args[1:], **kwargs)


def _each_of_all(func: Any, args: Any, kwargs: Any) -> Any:
    """Row by row, of all tensors that have as many as the widest."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    dims, count = max(t.dim() for t in tensors), max(t.shape[0] if t.dim() else 1 for t in tensors)
    if kwargs or any(
        t.dim() not in (0, dims) or t.shape[:1] not in ((1,), (count,), ()) for t in tensors
    ):
        raise NotJoined(f"{func.__name__} of {[tuple(t.shape) for t in tensors]}")

    def part(value: Any, i: int) -> Any:
        whole = not isinstance(value, torch.Tensor) or value.shape[:1] != (count,)
        return value if whole else value[i : i + 1]

    return torch.cat([func(*(part(a, i) for a in args)) for i in range(count)])


def _matmul(mode: RowFunctions, func: Any, args: Any, kwargs: Any) -> Any:
    """Rows times a matrix [K, N] of weights, which may be added to a bias [N]."""
    biased = func.__name__.startswith("addmm")
    if kwargs or len(args) != 2 + biased or func.__name__.startswith("__r"):
        raise NotJoined(func.__name__)
    bias, x, weight = args if biased else (None, *args)
    if x.dim() < 2 or weight.dim() != 2 or x.numel() != x.shape[0] * x.shape[-1]:
        raise NotJoined(f"a product of {tuple(x.shape)} and {tuple(weight.shape)}")
    if x.shape[0] <= 1:
        return func(*args)
    before = (bias,) if biased else ()
    return torch.cat([func(*before, row_of(x, i), weight) for i in range(x.shape[0])])


def _linear(mode: RowFunctions, func: Any, args: Any, kwargs: Any) -> Any:
    return mode.linear(func, args, kwargs)


def _unknown(mode: RowFunctions, func: Any, args: Any, kwargs: Any) -> Any:
    if any(_has_floats(value) for value in (*args, *kwargs.values())):
        raise NotJoined(getattr(func, "__name__", str(func)))
    return func(*args, **kwargs)  # of places and choices alone


How = Callable[[RowFunctions, Any, Any, Any], Any]
_KNOWN: dict[Any, How] = {}


def _how(name: str) -> How:
    if name in _SAME:
        return _run
    if name in _SUMS:
        return _sum
    if name in ("pow", "ipow"):
        return _power
    if name in _ROW_BY_ROW:
        return _each
    if name in _WITH_WEIGHTS:
        return _matmul
    return _linear if name == "linear" else _unknown


def _is_complex(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_complex()


def _has_floats(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() or value.is_complex()
    return isinstance(value, (tuple, list)) and any(_has_floats(v) for v in value)


def _arguments(args: Any, kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    named = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    return named["input"], named["weight"], named.get("bias")


__all__ = ["Multiply", "NotJoined", "RowFunctions", "row_of"]
