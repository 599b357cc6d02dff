"""A unit as one node of autograd: forward keeps its inputs only, backward runs it again.

Activation checkpointing at the units' boundaries (Chen et al. 2016, "Training Deep Nets with
Sublinear Memory Cost", section 4.1), in its re-entrant form: when the inner backward returns, all
gradients of the unit are there and its weights can go. torch's own checkpointing would leave both
to hooks that nobody calls in time.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any, NoReturn, Protocol, SupportsIndex

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from offload.errors import OffloadError
from offload.models.shadow import CAPTURES
from offload.models.streamed_forward import differentiates
from offload.train.as_called import Autocast, Buffer, changeable_buffers
from offload.train.captured import Capture, hand_over_captured
from offload.train.forward_kernels import ForwardKernels
from offload.train.inputs import Waits
from offload.train.landing import Landing
from offload.train.passing import Watch, hand_over, refuse_filled, saved_inputs, without_caches
from offload.train.same_again import Sums, check_same
from offload.train.ties import tied
from offload.train.visit import AT_HOME, Tensors, Visit

log = logging.getLogger(__name__)


class Runtime(Protocol):
    """What a unit needs from the engine."""

    def running(self, unit: int, *, backward: bool) -> contextlib.AbstractContextManager[None]:
        """The unit's weights are in place inside."""
        ...

    def visiting(self, unit: int) -> contextlib.AbstractContextManager[Visit]:
        """What is inside runs where the unit does: on the device, if there is one."""
        ...

    def kind(self, unit: int) -> str:
        """Torch's name of the kind of device that the unit computes on."""
        ...

    def forward_key(self, unit: int) -> Any:
        """What makes dropout of a unit's forward repeatable; seeds torch's generators by it."""
        ...

    def rewind(self, unit: int, key: Any) -> None:
        """The random numbers of that forward from here on, which begins once more."""
        ...

    def replay(self, unit: int, key: Any) -> contextlib.AbstractContextManager[None]:
        """The random numbers of that forward again inside; the generators as they were behind
        it."""
        ...

    def keep(self, unit: int, tensor: torch.Tensor) -> Waits | None:
        """Put a unit's input away until its backward; None: autograd keeps it in RAM."""
        ...

    def keeps_graph(self, unit: int) -> bool:
        """Whether backward finds the unit's graph instead of running it again."""
        ...

    def saving(self, unit: int) -> contextlib.AbstractContextManager[Any]:
        """What autograd saves inside must not hold the unit's weights in memory."""
        ...

    def lookups(self, unit: int) -> contextlib.AbstractContextManager[None]:
        """Gradients of the unit's tables that are looked up inside leave by rows."""
        ...

    @property
    def compares(self) -> bool:
        """Whether a unit that backward runs again is held to what it has returned in forward."""
        ...

    def extra_losses(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(loss, its gradient) of what the unit that was run again adds to the step's loss."""
        ...

    def backward_done(self, unit: int) -> None:
        """All gradients of this run of the unit have been taken."""
        ...


class Segment:
    """Replaces ``module.forward``. Without autograd it runs the unit with its weights in place."""

    def __init__(self, runtime: Runtime, unit: int, module: nn.Module, *, trains: bool) -> None:
        """``trains``: whether any of the unit's weights wants a gradient."""
        self.runtime = runtime
        self.trains = trains
        self.unit = unit
        self.module = module
        self.inner = module.forward
        self.repeatable = True
        """As far as is known: run twice, it comes to the same."""
        self.rounds_otherwise = False
        """In backward than in forward."""
        self.kernels = ForwardKernels()
        self._before = module.__dict__.get("forward")
        module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        grad = training = torch.is_grad_enabled()
        # Adapters that were put into the unit later are nobody's but autograd's.
        if grad and not self.trains and not any(p.requires_grad for p in self.module.parameters()):
            # Below the first trained unit there is nothing to go back for.
            leaves, _ = tree_flatten((args, kwargs))
            grad = any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves)
        if training:
            refuse_filled(args, kwargs)
        self._check_forward(grad)
        if not grad:
            with (
                torch.no_grad(),
                self.runtime.running(self.unit, backward=False),
                Autocast.now(self.runtime.kind(self.unit)).entered(),
            ):
                if self.module.training:  # dropout below the first adapter is the unit's own, too
                    self.runtime.forward_key(self.unit)
                with self.runtime.visiting(self.unit) as visit:
                    return self._without_autograd(visit, args, kwargs, caches=not training)
        self._warn_of_hooks()
        leaves, spec = tree_flatten(without_caches(args, kwargs))
        # Embeddings have no input with a gradient.
        own = self.runtime.compares  # loops that are not ours put modules of their own into units
        anchor = tied(self.module) if own else torch.zeros((), requires_grad=True)
        call = _Call(self, spec, leaves)
        out = _Run.apply(
            call, anchor, *[x if isinstance(x, torch.Tensor) else None for x in leaves]
        )
        result, stored, captured = tree_unflatten(
            [call.fixed[i] if t is None else t for i, t in enumerate(out)], call.out_spec
        )
        hand_over(stored, args, kwargs)
        hand_over_captured(captured)
        return result

    def _without_autograd(self, visit: Visit, args: Any, kwargs: Any, *, caches: bool) -> Any:
        if visit is AT_HOME and caches:
            return self.inner(*args, **kwargs)
        leaves, spec = tree_flatten(without_caches(args, kwargs))
        place = next((i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)), -1)
        same = [i for i in range(len(leaves)) if i != place]
        up, more = tree_unflatten(_tensors(leaves, partial(visit.up, same=same)), spec)
        watch = Watch(up, more)
        with Capture().apart() as found:
            out = self.inner(*up, **more)
        leaves, spec = tree_flatten((out, watch.stored(), found))
        left = partial(visit.leave, wanted=False)  # unless somebody asks
        result, stored, captured = tree_unflatten(_tensors(leaves, left), spec)
        hand_over(stored, args, kwargs)
        hand_over_captured(captured)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the unit is an ordinary module with weights of its own in memory (what peft
        makes of ``modules_to_save``): its ``forward`` is what ours was put in the place of."""
        copied = memo.get(id(self.module))
        if copied is None or not isinstance(self.inner, MethodType):
            raise OffloadError(
                f"{type(self.module).__name__} of a streamed model cannot be copied with what was "
                f"put in the place of its forward"
            )
        return MethodType(self.inner.__func__, copied)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise OffloadError(
            f"a streamed model and its {type(self.module).__name__} cannot be pickled: write the "
            f"weights with model.save_pretrained(directory), tensor by tensor, or pickle "
            f"state_dict(), of tensors in memory"
        )

    def _warn_of_hooks(self) -> None:
        """Say once that what hooks inside of units keep is no part of a loss."""
        if self.runtime in _WARNED:
            return
        for path, module in self.module.named_modules():
            if module is not self.module and any(map(_is_foreign, module._forward_hooks.values())):
                _WARNED.add(self.runtime)
                log.warning(
                    "a forward hook is on %s inside of a streamed %s: it sees the forward pass "
                    "without gradients, and once more the one that backward runs. It may look and "
                    "replace; but what it keeps trains nothing in a loss. For that put it on the "
                    "%s itself, or ask for output_hidden_states",
                    path, type(self.module).__name__, type(self.module).__name__,
                )  # fmt: skip
                return

    def weights(self) -> list[torch.Tensor]:
        """What its modules find in the places of their parameters now."""
        found = [t for m in self.module.modules() for t in m._parameters.values()]
        return [t for t in found if t is not None]

    def _check_forward(self, grad: bool) -> None:
        """Raise OffloadError for a forward pass that streamed weights cannot be in."""
        kind = type(self.module).__name__
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        if transformed and (grad or differentiates()):
            raise OffloadError(
                f"torch.func's transforms (grad, vjp, jvp, vmap, ...) do not go through a streamed "
                f"{kind}, whose weights come and go outside of them. For gradients call backward() "
                f"and read p.grad; under torch.no_grad() there are vmap, and with "
                f"torch.autograd.forward_ad what jvp gives"
            )
        if grad and any(
            t.requires_grad and not isinstance(t, nn.Parameter) for t in self.weights()
        ):
            raise OffloadError(_OTHER_WEIGHTS.format(kind=kind))

    def check_weights(self, before: Sequence[torch.Tensor]) -> None:
        """Raise OffloadError if weights that forward has used are not the unit's any more."""
        now = {id(t) for t in self.weights()}
        if not now.issuperset(map(id, before)):
            raise OffloadError(_OTHER_WEIGHTS.format(kind=type(self.module).__name__))

    def check_backward(self) -> None:
        """Raise OffloadError for a backward pass that would leave gradients where nobody asked for
        them, or without what is asked for: the unit goes through one of its own."""
        kind = type(self.module).__name__
        if torch.is_grad_enabled():
            raise OffloadError(
                f"create_graph=True: gradients of gradients do not go through a streamed "
                f"{kind}, whose graph is gone when its backward has ended; leave such a penalty out"
            )
        engine: Any = torch.autograd.Variable._execution_engine
        if engine.is_checkpoint_valid():
            return
        if self.trains or any(p.requires_grad for p in self.module.parameters()):
            raise OffloadError(
                f"torch.autograd.grad and backward(inputs=...) cannot go through a streamed "
                f"{kind} that trains: its weights' gradients are added to p.grad whoever is asked "
                f"for. Call backward() and read .grad (of an input, too), and optimizer.zero_grad()"
                f" where the weights' are not wanted"
            )

    def restore(self) -> None:
        self.module.__dict__.pop("forward", None)
        if self._before is not None:
            self.module.__dict__["forward"] = self._before


_OTHER_WEIGHTS = (
    "a streamed {kind} was called with other weights than its own (torch.func.functional_call, or "
    "an assignment before backward): backward runs it again when they are gone, so they would get "
    "no gradients. Under torch.no_grad() such a call works. To train something on top of the "
    "weights, put it in as a module (PEFT's adapters); weights that are computed anew in each "
    "step need the model in memory (transformers' from_pretrained)"
)

_WARNED: weakref.WeakSet[Any] = weakref.WeakSet()
"""Runtimes of models whose user has been told of hooks."""


def _is_foreign(hook: Any) -> bool:
    """Not transformers', whose results are handed on (``captured``), nor ours."""
    owner = getattr(hook, "__module__", None) or ""
    return owner != CAPTURES and not owner.startswith("offload.")


class _Call:
    """One call of a unit: its inputs that are no tensors, the shape of its output, its randomness,
    what it is cast to."""

    def __init__(self, segment: Segment, spec: TreeSpec, leaves: list[Any]) -> None:
        self.segment = segment
        self.spec = spec
        self.others = [None if isinstance(x, torch.Tensor) else x for x in leaves]
        self.out_spec: Any = None
        self.fixed: list[Any] = []
        """Output leaves that are no tensors; None where there is one."""
        self.key: Any = None
        self.autocast = Autocast.now(segment.runtime.kind(segment.unit))
        self.capture = Capture()
        self.weights = segment.weights()
        self.buffers: list[Buffer] | None = None
        """Those that forward has changed, as they were before; None: it has not run yet."""
        self.sums: Sums | None = None
        """Of what forward has returned, to compare with; None: nobody does."""

    def run(self, tensors: list[torch.Tensor | None]) -> list[Any]:
        leaves = [o if t is None else t for o, t in zip(self.others, tensors, strict=True)]
        args, kwargs = tree_unflatten(leaves, self.spec)
        watch = Watch(args, kwargs)
        with self._buffers(), self.autocast.entered(), self.capture.apart() as captured:
            result = self.segment.inner(*args, **kwargs)
        out, spec = tree_flatten((result, watch.stored(), captured))
        if self.out_spec is None:
            self.out_spec = spec
        elif self.out_spec != spec:
            raise OffloadError(
                f"{type(self.segment.module).__name__} returns another structure when it is run "
                f"again; it cannot be trained with recomputation"
            )
        return out

    def run_forward(self, tensors: list[torch.Tensor | None], needs: Sequence[bool]) -> list[Any]:
        """Without a graph. ``needs``: which of ``tensors`` want a gradient."""
        rewind = partial(self.segment.runtime.rewind, self.segment.unit, self.key)
        return self.segment.kernels.run(self.run, tensors, needs, self.weights, rewind)

    @contextlib.contextmanager
    def _buffers(self) -> Iterator[None]:
        """Run again, a unit finds its buffers as forward did, and what it makes of them is dropped:
        batch norm would count a batch twice, spectral norm come to another weight."""
        if self.buffers is None:
            before = changeable_buffers(self.segment.module)
            yield
            self.buffers = [b for b in before if b.changed()]
            return
        places = [(b, b.module._buffers[b.name]) for b in self.buffers]
        try:
            for buffer in self.buffers:
                buffer.module._buffers[buffer.name] = buffer.value.clone()
            yield
        finally:
            for buffer, now in places:
                buffer.module._buffers[buffer.name] = now

    def run_again(self, tensors: list[torch.Tensor | None], visit: Visit) -> list[Any]:
        """With autograd, and the same randomness. Raises: see ``check_same``."""
        segment = self.segment
        segment.check_weights(self.weights)
        if self.sums is None:
            return self._with_autograd(tensors)
        if not segment.rounds_otherwise:
            out = self._with_autograd(tensors)
            if visit.same(self.sums, Sums(out)):
                return out
            del out
        kind = type(segment.module).__name__
        segment.repeatable = check_same(kind, self.sums, partial(self._sums_again, tensors))
        segment.rounds_otherwise = True
        return self._with_autograd(tensors)

    def _with_autograd(self, tensors: list[torch.Tensor | None]) -> list[Any]:
        runtime, unit = self.segment.runtime, self.segment.unit
        with torch.enable_grad(), runtime.replay(unit, self.key), runtime.lookups(unit):
            return self.run(tensors)

    def _sums_again(self, tensors: Sequence[torch.Tensor | None]) -> Sums:
        runtime, unit = self.segment.runtime, self.segment.unit
        needs = [t is not None and t.requires_grad for t in tensors]
        with torch.no_grad(), runtime.replay(unit, self.key):
            given = [None if t is None else t.detach() for t in tensors]
            return Sums(self.run_forward(given, needs))


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: torch.Tensor, *tensors: torch.Tensor | None) -> Any:
        runtime, unit = call.segment.runtime, call.segment.unit
        if runtime.keeps_graph(unit):
            return _keep_graph(ctx, call, list(tensors))
        ctx.graph = None
        place = next((i for i, t in enumerate(tensors) if t is not None), -1)
        ctx.kept = None
        with runtime.running(unit, backward=False):
            call.key = runtime.forward_key(unit)  # inside: other micro-batches may run at the door
            hidden = tensors[place] if place >= 0 else None
            if hidden is not None:  # the first one; the others are the same for all units
                ctx.kept = runtime.keep(unit, hidden)
            for tensor in tensors:
                if isinstance(tensor, Landing):
                    tensor.home.begin()  # backward will ask for it
            with runtime.visiting(unit) as visit:
                same = [i for i in range(len(tensors)) if i != place]
                left = partial(visit.leave, wanted=True)
                found = call.run_forward(visit.up(tensors, same=same), ctx.needs_input_grad[2:])
                if runtime.compares and call.segment.repeatable:
                    call.sums = Sums(found)
                out = _tensors(found, left)
        ctx.call = call
        ctx.present = [t is not None for t in tensors]
        ctx.place = place
        away = -1 if ctx.kept is None else place
        ctx.save_for_backward(*[t for i, t in enumerate(tensors) if t is not None and i != away])
        return _results(ctx, call, out, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        call: _Call = ctx.call
        runtime, unit = call.segment.runtime, call.segment.unit
        call.segment.check_backward()
        if ctx.graph is not None:
            return None, None, *_backward_of_graph(ctx, call, grads)
        saved = saved_inputs(ctx, type(call.segment.module).__name__)
        needs = ctx.needs_input_grad[2:]
        with runtime.running(unit, backward=True), runtime.visiting(unit) as visit:
            tensors: list[torch.Tensor | None] = []
            for i, present in enumerate(ctx.present):
                tensor = None
                if i == ctx.place and ctx.kept is not None:
                    tensor = ctx.kept.take()  # inside: at the door, others' would be in RAM, too
                elif present:
                    tensor = next(saved)
                tensors.append(tensor)
            n = len(tensors)
            same = [i for i in range(n) if i != ctx.place]
            there = visit.up([*tensors, *grads], same=same, kept=(ctx.place,))
            tensors = [None if t is None else t.detach() for t in there[:n]]
            for tensor, need in zip(tensors, needs, strict=True):
                if tensor is not None and need:
                    tensor.requires_grad_()
            out = call.run_again(tensors, visit)
            pairs = _pairs(out, there[n:])
            del out, there
            pairs += runtime.extra_losses()
            # On this thread: autograd has one of its own for a card's part, on which gradients
            # would leave, beside whatever this one does.
            with torch.autograd.set_multithreading_enabled(False):
                if pairs:
                    torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
            del pairs
            result = visit.leave(
                [
                    None if t is None or not need else t.grad
                    for t, need in zip(tensors, needs, strict=True)
                ],
                wanted=False,
            )
        runtime.backward_done(unit)
        return None, None, *result


def _tensors(leaves: Sequence[Any], move: Callable[[Tensors], Tensors]) -> list[Any]:
    """``leaves`` with their tensors moved."""
    moved = move([x if isinstance(x, torch.Tensor) else None for x in leaves])
    return [x if t is None else t for x, t in zip(leaves, moved, strict=True)]


def _results(ctx: Any, call: _Call, out: list[Any], tensors: Sequence[Any]) -> tuple[Any, ...]:
    """What a unit returns, as autograd wants it."""
    call.fixed = [None if isinstance(x, torch.Tensor) else x for x in out]
    given = {id(t) for t in tensors if t is not None}
    # A unit may hand an input through; autograd wants to be told, or given another tensor.
    result = [_alone(x, given) if isinstance(x, torch.Tensor) else None for x in out]
    ctx.mark_non_differentiable(*[x for x in result if x is not None and not x.is_floating_point()])
    ctx.set_materialize_grads(False)
    return tuple(result)


def _alone(x: torch.Tensor, given: Collection[int]) -> torch.Tensor:
    """``x`` as a result of its own: who gets it may write to it (speech models mask some times in
    place), which autograd refuses for views that a node has made."""
    if id(x) in given:
        return x.view_as(x)
    # A landing is no view, and to be asked is to be brought down.
    return x.detach() if not isinstance(x, Landing) and x._is_view() else x


def _pairs(
    out: Sequence[Any], grads: Sequence[torch.Tensor | None]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        (o, g)
        for o, g in zip(out, grads, strict=True)
        if isinstance(o, torch.Tensor) and o.requires_grad and g is not None
    ]


def _keep_graph(ctx: Any, call: _Call, tensors: list[torch.Tensor | None]) -> tuple[Any, ...]:
    """Forward with autograd, on leaves of its own; the graph waits in ``ctx``."""
    runtime, unit = call.segment.runtime, call.segment.unit
    needs = ctx.needs_input_grad[2:]
    leaves = [
        None if t is None else t.detach().requires_grad_(need)
        for t, need in zip(tensors, needs, strict=True)
    ]
    with runtime.running(unit, backward=False):
        call.key = runtime.forward_key(unit)
        with torch.enable_grad(), runtime.saving(unit), runtime.lookups(unit):
            out = call.run(list(leaves))
    ctx.call, ctx.graph = call, (leaves, out)
    return _results(
        ctx, call, [x.detach() if isinstance(x, torch.Tensor) else x for x in out], tensors
    )


def _backward_of_graph(
    ctx: Any, call: _Call, grads: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Gradients of the inputs; those of the weights leave on their way."""
    runtime, unit = call.segment.runtime, call.segment.unit
    leaves, out = ctx.graph
    ctx.graph = ()  # freed as backward goes, and not to be gone through again
    with runtime.running(unit, backward=True):
        pairs = _pairs(out, grads)
        del out
        if pairs:
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        del pairs
    runtime.backward_done(unit)
    return [None if t is None else t.grad for t in leaves]
