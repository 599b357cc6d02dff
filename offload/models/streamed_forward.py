"""How a module's forward runs while its weights come and go.

In one thread at a time, because there is one set of slots; without autograd, whose graph would keep
views of slots that are filled anew; without autocast's cache of casts, which knows a weight by its
tensor, and a slot's tensor is one block's weight now and another's later; and with a result that
does not lie in the slots itself.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import MethodType, TracebackType
from typing import Any

import torch
from torch import nn

from offload.errors import OffloadError
from offload.models.shadow import shadow
from offload.models.torch_choices import without_autograd
from offload.runtime.arena import outside_transforms


class Turn:
    """Who runs a model: one thread at a time. Whoever is in may come in again, and the sequences of
    a thread that take turns in it count as one."""

    __slots__ = ("__weakref__", "_depth", "_failed", "_lock", "_thread")

    def __init__(self, failed: Callable[[], None]) -> None:
        """``failed``: called when a thread goes because of an error, while it still is in."""
        self._failed = failed
        self._lock = threading.RLock()
        self._depth = 0
        self._thread = 0
        _ALIVE.add(self)

    @property
    def mine(self) -> bool:
        """Whether the calling thread is in."""
        return self._depth > 0 and self._thread == threading.get_ident()

    @contextmanager
    def soon(self, seconds: float) -> Iterator[bool]:
        """Come in as soon as whoever is in has gone, or after ``seconds`` all the same: False."""
        if not self._lock.acquire(timeout=seconds):
            yield False
            return
        try:
            with self:
                yield True
        finally:
            self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        self._thread = threading.get_ident()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is not None and self._depth == 1:
                self._failed()
        finally:
            self._depth -= 1
            self._lock.release()


_ALIVE: weakref.WeakSet[Turn] = weakref.WeakSet()


def _forked() -> None:
    """In a child: whoever was in is not here, unless it is the thread that has forked."""
    for turn in list(_ALIVE):
        if not turn.mine:
            turn._lock, turn._depth = threading.RLock(), 0


os.register_at_fork(after_in_child=_forked)


def stream_forward(module: nn.Module, turn: Turn) -> Callable[[], Any]:
    """Have a module's forward run as the module's text says, and make ``backward()`` through its
    output an error instead of a silent non-event. Returns what undoes it.

    Around ``forward`` and not in hooks: torch runs none after a Ctrl-C, and autograd would stay off
    for whatever the user does next.
    """
    inner: Callable[..., Any] = module.forward

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with turn:
            kept = torch.is_autocast_cache_enabled()
            if kept:
                torch.set_autocast_cache_enabled(False)
            try:
                if not torch.is_grad_enabled():
                    return inner(*args, **kwargs)
                if differentiates():
                    raise OffloadError(
                        f"{_INFERENCE}, and torch.func (grad, vjp, jacrev, ...) would be told that "
                        f"all of them are 0. {_TO_TRAIN}; jvp works under torch.no_grad()"
                    )
                with without_autograd() as wanted:
                    output = inner(*args, **kwargs)
                ends = _ends(module, (args, kwargs)) if wanted else ()
            finally:
                if kept:
                    torch.set_autocast_cache_enabled(True)
        return _guarded(output, ends) if ends else output

    return shadow(module, "forward", not_compiled(forward))


def not_compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` as it is, whoever asked torch.compile for the model: what it would trace are
    waits for a disk, views of slots that are others' soon, and kernels of another compiler.

    Where nobody has imported torch's compiler (70 MiB), as with a model that is wrapped, it is not
    imported for this; compiled, such a model is an error of its own.
    """
    if "torch._dynamo" not in sys.modules:
        return forward
    own = forward if isinstance(forward, MethodType) else getattr(forward, "__wrapped__", forward)
    return wraps(own, updated=())(torch.compiler.disable(forward))  # type: ignore[no-any-return]


def differentiates() -> bool:
    """Whether one of torch.func's transforms other than vmap is around the caller."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() != torch._C._functorch.TransformType.Vmap for level in levels)


_INFERENCE = (
    "backward through a streamed model: this one streams for inference, and no gradient would "
    "reach its weights"
)
_TO_TRAIN = (
    "To train, use offload.load(path, train=True) and backward(); for inference, torch.no_grad()"
)


class _NoBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: torch.Tensor, *ends: torch.Tensor) -> torch.Tensor:
        return value.detach()  # and no view, which torch would not let anybody write to

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)  # weights that are elsewhere have no zeros like them

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor | None, *_: Any) -> torch.Tensor | None:
        return None if tangent is None else tangent.view_as(tangent)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise OffloadError(f"{_INFERENCE}. {_TO_TRAIN}")


def _ends(module: nn.Module, inputs: Any) -> list[torch.Tensor]:
    """What an output's gradient would reach in the resident model: inputs and weights that ask for
    one. Whoever asks for the gradient of any has to come by the error: to autograd, what is in no
    graph has none, or 0. Nothing, if the resident model's output asked for none."""
    ends: list[torch.Tensor] = []

    def look(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return _replaced(value, look)
        if value.requires_grad and not value.is_inference():
            ends.append(value)
        return value

    look(inputs)
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    kept = [weight for weight in trained if isinstance(weight, nn.Parameter)]
    if len(kept) < len(trained):
        # What runs now are views of slots, which no graph may keep: one stands for all of them.
        kept.append(nn.Parameter(torch.zeros(())))
    return [*ends, *kept]


def _guarded(value: Any, ends: Sequence[torch.Tensor]) -> Any:
    """The same structure, with every float tensor's backward, from which all of ``ends`` are
    reached, an error."""
    if isinstance(value, torch.Tensor):
        floats = value.is_floating_point() or value.is_complex()
        return value if not floats or value.is_inference() else _NoBackward.apply(value, *ends)
    return _replaced(value, lambda part: _guarded(part, ends))


def _replaced(value: Any, new: Callable[[Any], Any]) -> Any:
    """A structure of tensors with ``new`` of its parts in their place, however deep they are. The
    very object if all stay."""
    if isinstance(value, dict):  # ModelOutput is one, and must keep its class
        for key, old in list(value.items()):
            if (part := new(old)) is not old:
                value[key] = part
        return value
    if isinstance(value, (tuple, list)):
        parts = [new(v) for v in value]
        if all(a is b for a, b in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            old = getattr(value, field.name, None)
            if (part := new(old)) is not old:
                object.__setattr__(value, field.name, part)  # a frozen one, too
    return value


def apart(value: Any, memory: int) -> Any:
    """``value``, with copies of the tensors in it that lie in ``memory``, an address of a storage:
    a module may return a part of its weight, whose slot has other bytes soon; and so have those
    that a graph has saved, where its forward switches autograd on. The very object if there are
    none."""
    if isinstance(value, torch.Tensor):
        if value.grad_fn is not None:
            with torch.enable_grad():
                return _NoBackward.apply(apart(value.detach(), memory), value)
        if type(value) not in (torch.Tensor, nn.Parameter) or value.layout != torch.strided:
            return value  # has no storage of its own, or none that a slot could be
        try:
            there = value.untyped_storage().data_ptr() == memory
        except NotImplementedError:  # within torch.vmap
            return value
        return value.detach().clone() if there else value
    return _replaced(value, lambda part: apart(part, memory))


def as_trained(view: torch.Tensor, trained: bool) -> torch.Tensor:
    """A lease's view with ``requires_grad`` as its parameter has it."""
    if view.requires_grad is not trained:
        with outside_transforms():  # which refuse to have it set, as if it were of their inputs
            view.requires_grad_(trained)
    return view


def refuse_recorders() -> None:
    """Raises OffloadError if torch records what runs, to run it again without the model: it would
    keep views of slots that others' bytes come to, and knows nothing of kernels. For where weights
    that come and go are used, or packed ones."""
    keys, found = torch._C._TorchDispatchModeKey, torch._C._get_dispatch_mode
    if (
        torch._C._get_tracing_state() is None
        and found(keys.PROXY) is None
        and found(keys.FAKE) is None
    ):
        return
    raise OffloadError(
        "a streamed or packed model cannot be traced or exported (torch.jit.trace, torch.export, "
        "torch.onnx, make_fx, torch.func.linearize): what is recorded would read memory that holds "
        "other weights later, and lacks what kernels compute. Use the resident model for it; "
        "offload.unwrap(model) gives that of a model that is not packed"
    )


__all__ = [
    "Turn",
    "apart",
    "as_trained",
    "differentiates",
    "not_compiled",
    "refuse_recorders",
    "stream_forward",
]
