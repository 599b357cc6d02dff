"""Results of units on a device that may never come down.

What a unit on the device returns is handed to the next one there (``visits``), while the model's
own code between them holds a tensor in RAM. That tensor is a ``Landing``: it has the result's shape
and its history, and memory only from the moment that somebody asks for its values, who then waits
for the copy; torch's own tensors of collectives under way (``AsyncCollectiveTensor``) are of the
same kind. Whatever does ask (an operation, a hook, autograd that adds two gradients, ``numpy``)
comes by one of the two functions below, so nothing can see bytes that have not come. And once
somebody has, what is on the device is not handed on any more: the values may have been changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_iter, tree_map_only

from offload.train.device_values import typed_storage


class Brings(Protocol):
    """Who has the results."""

    def begin(self, home: Home) -> None:
        """Begin to copy a result down; its place on the device may then be another's."""
        ...

    def land(self, home: Home) -> None:
        """Copy it down, if that has not been done, and wait for it."""
        ...


class Home:
    """Where a result is in RAM, or will be."""

    __slots__ = (
        "__weakref__",
        "_brings",
        "_then",
        "landed",
        "place",
        "plain",
        "touched",
        "version",
    )

    def __init__(self, brings: Brings, like: torch.Tensor) -> None:
        """Of the shape and dtype of ``like``, contiguous; without memory."""
        with torch.inference_mode(False), torch.no_grad():
            self.plain = torch.empty(like.shape, dtype=like.dtype, device="cpu")
            self.plain.untyped_storage().resize_(0)
        self.landed = False
        self.touched = False
        """Somebody has had its values, and may have changed them."""
        self.version = self.plain._version
        self.place: Any = None
        """Where it is on the device, for whoever has it there; None: nowhere any more."""
        self._brings = brings
        self._then: list[weakref.WeakMethod[Any]] = []

    @property
    def nbytes(self) -> int:
        return self.plain.nbytes

    @property
    def as_made(self) -> bool:
        """Whether its values are those that the device has."""
        return not self.touched and self.plain._version == self.version

    def begin(self) -> None:
        """It will be asked for: begin to copy it down."""
        self._brings.begin(self)

    def take(self) -> torch.Tensor:
        """The result in RAM; the copy is waited for."""
        if not self.landed:
            self._brings.land(self)
        return self.plain

    def fill(self, values: torch.Tensor) -> None:
        """It has come: ``values`` are copied. To autograd that is no change of it."""
        storage = self.plain.untyped_storage()
        storage.resize_(self.plain.nbytes)
        typed_storage(storage, 0, self.plain.shape, self.plain.dtype).copy_(values)
        self.landed = True
        for reference in self._then:
            call = reference()
            if call is not None:
                call()
        self._then.clear()

    def then(self, call: Callable[[], None]) -> None:
        """Call a method when it has landed, if its object still lives then."""
        self._then.append(weakref.WeakMethod(call))


class Landing(torch.Tensor):
    """See the module."""

    home: Home

    @staticmethod
    def __new__(cls, home: Home) -> Landing:
        with torch.inference_mode(False), torch.no_grad():
            made: Landing = torch.Tensor._make_subclass(cls, home.plain)
        made.home = home
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _NO_VALUES:
            mine = [x for x in tree_iter((args, kwargs)) if isinstance(x, Landing)]
            for landing in mine:
                _values(landing)
            if func in _NO_HISTORY or not any(x.requires_grad for x in mine):
                args, kwargs = tree_map_only(Landing, _values, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(Landing, _values, (args, kwargs or {}))
        return func(*args, **kwargs)


def _values(landing: Landing) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        landing.home.touched = True
        return landing.home.take()


def plain(tensor: Any) -> Any:
    """In RAM, waited for, without its history if it is a result of a device; else as it is."""
    return _values(tensor) if isinstance(tensor, Landing) else tensor


_T: Any = torch.Tensor
_NO_VALUES = {
    *(getattr(_T, name).__get__ for name in (
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf",
        "grad", "_grad", "_version", "itemsize", "nbytes", "is_cuda", "is_cpu", "is_meta",
        "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "output_nr",
    )),
    _T.requires_grad.__set__, _T.size, _T.dim, _T.numel, _T.nelement, _T.stride, _T.element_size,
    _T.is_floating_point, _T.is_complex, _T.is_contiguous, _T.storage_offset, _T.requires_grad_,
    _T.register_hook, _T.retain_grad, _T.backward, _T.__len__, _T.__hash__, _T.get_device,
    _T.ndimension, _T.is_signed, _T.is_inference, torch.is_floating_point, torch.is_complex,
    torch.numel, torch.is_tensor,
}  # fmt: skip
"""What asks for no values: they need not be there, and cannot be changed."""
_NO_HISTORY = {
    _T.detach, _T.data.__get__, _T.numpy, _T.tolist, _T.item, _T.data_ptr, _T.untyped_storage,
    _T.storage, _T.__reduce_ex__, _T.__repr__, _T.__format__, _T.__bool__, _T.__int__, _T.__float__,
    _T.__index__,
}  # fmt: skip
"""Whose results are no tensors of autograd."""

__all__ = ["Brings", "Home", "Landing", "plain"]
