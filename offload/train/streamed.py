"""A parameter whose bytes are elsewhere, and come when somebody reads it.

While its unit runs, a streamed parameter is an ordinary one: its memory is in place. At any other
time an operation on it sees a *copy* of its current values (pending updates waited for) that lives
as long as the result needs it; autograd reaches the parameter through that copy, and does not keep
it for backward, where it is read again. Shape, dtype and the like are answered without reading.
What would change a weight behind the optimizer's back, or hand out its address, raises.

Mechanics: ``__torch_function__`` sees every operation of torch's Python interface. Standing in for
the *data* instead (a tensor on the meta device, a lazy storage) is not open to us: ``param.data =
x`` keeps the parameter's identity and its autograd hooks only between tensors of one kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from offload.errors import OffloadError

Tensor = torch.Tensor


class StreamedAccessError(OffloadError):
    """A streamed weight was used in a way that only memory allows; the message says what
    instead."""


class Source(Protocol):
    """What a streamed parameter needs from the training run."""

    def present(self, name: str) -> bool:
        """Whether the parameter's memory is in place; then its pending updates are through."""
        ...

    def trained(self, name: str) -> bool:
        """Whether gradients of the parameter have somewhere to go."""
        ...

    def comes_whole(self, name: str) -> bool:
        """Whether autograd has the parameter's gradient in one piece."""
        ...

    def read(self, name: str, start: int, count: int) -> Tensor:
        """A copy of these elements' current values, flat."""
        ...

    def gradient(self, name: str) -> Tensor | None:
        """What ``p.grad`` is."""
        ...

    def set_gradient(self, name: str, value: Tensor | None) -> None:
        """``p.grad = value``"""
        ...


_FACTS = frozenset(
    "size dim ndimension numel nelement element_size __len__ is_floating_point is_complex "
    "get_device register_hook register_post_accumulate_grad_hook retain_grad is_same_size "
    "is_pinned is_shared has_names is_inference is_signed is_tensor is_neg is_conj _is_view "
    "__hash__ __dir__ empty_like zeros_like ones_like full_like rand_like randn_like randint_like "
    "new_empty new_zeros new_ones new_full new_tensor backward "
    "is_distributed _is_zerotensor "
    "_is_any_true result_type can_cast".split()
)
"""Answered by the stand-in: shape, dtype and device, nothing of the values."""

_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")

_VALUES = frozenset("data T mT H mH real imag".split())
"""Attributes that are values; all others are facts."""

_SAME = frozenset("contiguous cpu __deepcopy__".split())

_LIKE = frozenset("to type_as view_as expand_as reshape_as".split())
"""What other tensors ask of one, of which its values are no part."""

_ADDRESSES = frozenset(
    "data_ptr untyped_storage storage _typed_storage storage_offset __cuda_array_interface__ "
    "share_memory_ set_ resize_ resize_as_ unsafe_set_".split()
)

_WAYS = (
    "To start from other weights (resized embeddings, a base that pissa or olora prepare), save "
    "them as a checkpoint first, and load that; to merge PEFT's adapters save these, and merge "
    "them with the model in memory (PeftModel.from_pretrained), or train them with offload "
    "finetune --method lora --merge"
)
"""What else to do, of changes to weights that libraries make."""

_PLAIN = torch._C.DisableTorchFunctionSubclass


class StreamedTensor(Tensor):
    """See the module. Also what ``p.detach()`` and ``p.data`` are: still not read."""

    _source: Source
    _name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            return _attribute(func, name, args)
        if name in _HOOKS and _is_own(args):
            _check_hook(args[0], name)
        if name in _FACTS and _is_own(args):
            with _PLAIN():
                return func(*args, **kwargs)
        return _operation(func, name, args, kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        with _PLAIN():
            return f"{type(self).__name__}({self._name}, {tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # torch.save of a state_dict: as ordinary tensors, one after the other.
        return self.detach().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class StreamedParameter(StreamedTensor, nn.Parameter):
    """A parameter of a streamed model. Made of the engine's by ``adopt``."""

    @property
    def grad(self) -> Tensor | None:
        """None, or a ``LazyGrad``: gradients leave autograd at once and live in the run's
        buffer."""
        return self._source.gradient(self._name)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._source.set_gradient(self._name, value)

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As what it is: of a tensor in its place a module that is unpickled would train nothing.
        return nn.Parameter(self.detach().clone(), self.requires_grad).__reduce_ex__(protocol)


def adopt(param: nn.Parameter, source: Source, name: str) -> None:
    """Make a parameter without memory a streamed one; it stays the same object."""
    param.__class__ = StreamedParameter
    param._source = source  # type: ignore[attr-defined]
    param._name = name  # type: ignore[attr-defined]


def disown(param: nn.Parameter) -> None:
    """Make it an ordinary parameter again."""
    param.__class__ = nn.Parameter
    del param._source, param._name  # type: ignore[attr-defined]


# -- attributes -------------------------------------------------------------------------------


def _attribute(func: Any, name: str, args: Any) -> Any:
    what = getattr(func.__self__, "__name__", "") or func.__self__.fget.__name__
    tensor = args[0]
    if name == "__get__":
        if what == "data":
            return _detached(tensor)
        if what in _VALUES:
            return func(_value(tensor))
    elif what == "data":
        if args[1] is tensor:
            return None
        raise StreamedAccessError(
            f"the weights of {tensor._name} are streamed; they are changed by offload.AdamW only, "
            f"not by assignment (a dtype is chosen when the model is loaded: dtype=...). "
            f"{_WAYS}"
        )
    elif what == "requires_grad" and args[1]:
        _check_trainable(tensor)
    with _PLAIN():
        return func(*args)


def _check_trainable(tensor: Any) -> None:
    if not tensor._source.trained(tensor._name):
        raise StreamedAccessError(
            f"{tensor._name} was frozen when the model was loaded, so its gradients and states "
            f"have no place; leave it frozen (of PEFT's adapters with bias='none'), or load the "
            f"model with a train= that includes it, and have it trained by offload.AdamW"
        )


def _check_hook(tensor: Any, name: str) -> None:
    if not tensor._source.comes_whole(tensor._name):
        raise StreamedAccessError(
            f"{name}: the gradient of {tensor._name} comes expert by expert and never whole, so "
            f"the hook would not be called; change it after backward: p.grad = f(p.grad)"
        )


def _detached(tensor: Any) -> Tensor:
    """A lazy alias; while the memory is in place, a plain one."""
    with _PLAIN():
        plain = Tensor.detach(tensor)
        if tensor._source.present(tensor._name):
            return plain
        lazy = plain.as_subclass(StreamedTensor)
    lazy._source, lazy._name = tensor._source, tensor._name
    return lazy


# -- operations -------------------------------------------------------------------------------


def _operation(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    found: list[Any] = list(_streamed(args))
    if kwargs:
        found += _streamed(tuple(kwargs.values()))
    first: Any = found[0]
    if not _is_own(args) and name in _LIKE:
        with _PLAIN():  # it gives a dtype, a device or a shape to another tensor
            return func(*args, **kwargs)
    if name == "requires_grad_":
        if args[1] if len(args) > 1 else kwargs.get("requires_grad", True):
            _check_trainable(first)
        with _PLAIN():
            return func(*args, **kwargs)
    if name == "grad":  # torch.autograd's
        raise StreamedAccessError(
            f"torch.autograd.grad cannot be asked for the gradient of {first._name}, which leaves "
            f"autograd as it comes: call backward() and read p.grad"
        )
    if name == "backward":  # torch.autograd's, and with inputs=: these are in no graph
        raise StreamedAccessError(
            f"backward(inputs=...) cannot be asked for the gradient of {first._name}, which leaves "
            f"autograd as it comes: call backward() without them, and read p.grad; of weights that "
            f"shall have none set requires_grad_(False) before, or p.grad = None after"
        )
    if name in _ADDRESSES:
        if first._source.present(first._name):
            with _PLAIN():
                return func(*args, **kwargs)
        raise StreamedAccessError(
            f"{first._name} is streamed: it has no memory of its own to ask {name} of; take a copy "
            f"with .detach().clone(), or save the model with save_pretrained (of PEFT's, with "
            f"adapters of embeddings: save_pretrained(..., save_embedding_layers=False))"
        )
    if _changes(name, args, kwargs):
        raise StreamedAccessError(
            f"{name} would change {first._name}, whose weights are streamed: only offload.AdamW "
            f"does (another optimizer cannot train them). {_WAYS}"
        )
    if name == "detach":
        return _detached(first)
    if name in ("is_contiguous", "_has_compatible_shallow_copy_type"):
        # The latter: a module that converts its parameters shall assign to ``data``, which says no,
        # and not put new parameters in their places.
        return True
    if name == "stride":
        with _PLAIN():
            strides = torch.empty(tuple(first.shape), device="meta").stride()
        return strides if len(args) < 2 else strides[args[1]]
    if _is_own(args) and (name in _SAME or (name == "to" and _keeps(first, args[1:], kwargs))):
        return first
    if all(t._source.present(t._name) and isinstance(t, StreamedParameter) for t in found):
        with _PLAIN():
            return func(*args, **kwargs)
    return _with_values(func, name, args, kwargs, found)


def _is_own(args: Any) -> bool:
    """Whether the operation is one of a streamed tensor, not of another that is given one."""
    return bool(args) and isinstance(args[0], StreamedTensor)


def _streamed(args: Any) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, StreamedTensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from _streamed(arg)


_IN_PLACE = frozenset(
    "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ipow__ __ior__".split()
)


def _changes(name: str, args: Any, kwargs: Any) -> bool:
    if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
        # Of other tensors with a weight on the right-hand side there is nothing to say.
        # What is changed comes first; torch.nn.init hands all over by name.
        return any(True for _ in _streamed(args[:1] or tuple(kwargs.values())))
    return "out" in kwargs and any(True for _ in _streamed((kwargs["out"],)))


def _keeps(tensor: Tensor, args: Any, kwargs: Any) -> bool:
    """Whether ``tensor.to(...)`` gives ``tensor`` itself."""
    if kwargs.get("copy"):
        return False
    kwargs = {k: v for k, v in kwargs.items() if k not in ("copy", "non_blocking", "memory_format")}
    with _PLAIN():
        probe = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        moved = probe.to(*args, **kwargs)
        return moved.dtype == tensor.dtype and moved.device == tensor.device


def _value(tensor: Any) -> Tensor:
    """A plain tensor with the values: a copy that its user owns, or what is in place."""
    if isinstance(tensor, StreamedParameter) and tensor._source.present(tensor._name):
        with _PLAIN():
            return tensor.as_subclass(Tensor)
    with _PLAIN():
        shape, count = tuple(tensor.shape), tensor.numel()
    return tensor._source.read(tensor._name, 0, count).view(shape)  # type: ignore[no-any-return]


def _rows(tensor: Any, key: Any) -> Tensor | None:
    """``tensor[a:b]``, only these rows read; None for any other key. Losses that go through a head
    slice by slice ask so."""
    if not isinstance(key, slice) or key.step not in (None, 1):
        return None
    with _PLAIN():
        shape = tuple(tensor.shape)
    if not shape:
        return None
    start, stop, _ = key.indices(shape[0])
    rows = max(0, stop - start)
    width = 1
    for n in shape[1:]:
        width *= n
    if not rows or not width:
        return None
    flat = tensor._source.read(tensor._name, start * width, rows * width)
    return flat.view(rows, *shape[1:])  # type: ignore[no-any-return]


def _with_values(func: Any, name: str, args: Any, kwargs: Any, found: list[Tensor]) -> Any:
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in found)
    if name == "__getitem__" and not recorded and len(found) == 1:
        rows = _rows(args[0], args[1])
        if rows is not None:
            return rows
    values: dict[int, Tensor] = {}
    stores: dict[int, Any] = {}
    for tensor in found:
        if id(tensor) in values:
            continue
        value = _value(tensor)
        if not tensor._source.present(tensor._name):  # type: ignore[attr-defined]
            stores[value.untyped_storage().data_ptr()] = tensor
        if recorded and tensor.requires_grad:
            value = _Fetched.apply(tensor, value)  # type: ignore[no-untyped-call]
        values[id(tensor)] = value
    args, kwargs = _replaced(args, values), {k: _replaced(v, values) for k, v in kwargs.items()}
    if not recorded:
        return func(*args, **kwargs)
    with torch.autograd.graph.saved_tensors_hooks(_packer(stores), _unpack):
        return func(*args, **kwargs)


def _replaced(value: Any, values: dict[int, Tensor]) -> Any:
    if isinstance(value, StreamedTensor):
        return values[id(value)]
    if type(value) in (list, tuple):
        return type(value)(_replaced(v, values) for v in value)
    return value


class _Fetched(torch.autograd.Function):
    """The parameter's values, as autograd sees them: a gradient goes through to the parameter."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _Place:
    """A saved view of a copy: which part of which parameter."""

    __slots__ = ("offset", "shape", "stride", "tensor")

    def __init__(self, tensor: Any, view: Tensor) -> None:
        self.tensor = tensor
        self.shape, self.stride = tuple(view.shape), view.stride()
        self.offset = view.storage_offset()


def _packer(stores: dict[int, Any]) -> Callable[[Tensor], Any]:
    def pack(tensor: Tensor) -> Any:
        of = stores.get(tensor.untyped_storage().data_ptr())
        return tensor if of is None else _Place(of, tensor)

    return pack


def _unpack(saved: Any) -> Tensor:
    if not isinstance(saved, _Place):
        return saved  # type: ignore[no-any-return]
    with torch.no_grad():
        return _value(saved.tensor).as_strided(saved.shape, saved.stride, saved.offset)


__all__ = [
    "Source",
    "StreamedAccessError",
    "StreamedParameter",
    "StreamedTensor",
    "adopt",
    "disown",
]
