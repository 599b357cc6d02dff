"""The hooks of one unit: views of its blocks are where its modules look for their parameters while
it runs, and stand-ins before and after."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn

from offload.errors import OffloadError, UnsupportedModelError
from offload.models.absent import CHANGE
from offload.models.host_products import HostProducts, tokens_of
from offload.models.params import Param
from offload.models.streamed_forward import apart, as_trained, refuse_recorders
from offload.models.units import Unit
from offload.runtime.executor import Executor
from offload.runtime.road import Road


class UnitHooks:
    """``enter`` is a unit's forward pre-hook, ``leave`` its forward hook, ``runs`` around its
    forward."""

    def __init__(
        self,
        unit: Unit,
        blocks: Sequence[str],
        params: Mapping[str, list[Param]],
        executor: Executor,
        host: HostProducts | None,
        spoiled: list[str],
    ) -> None:
        """
        Args:
            blocks: that come and go.
            params: of each block.
            host: who multiplies on the CPU with some of them at decode.
            spoiled: what has made views of memory useless, if anything has: no unit of the model
                runs any more. Units add to it.
        """
        self._unit, self._executor, self._spoiled = unit, executor, spoiled
        self._blocks = tuple(blocks)
        self._host = host if host is not None and not host.blocks.isdisjoint(blocks) else None
        self._above = self._blocks
        if self._host is not None:
            self._above = tuple(b for b in blocks if b not in self._host.blocks)
        modules = list(unit.module.modules())
        inside = set(map(id, modules))
        # (parameters dict, attribute, block, tensor name): all a hook has to touch
        self._spots = [
            (place.module._parameters, place.attr, block, param.name)
            for block in blocks
            for param in params[block]
            for place in param.places
            if id(place.module) in inside
        ]
        self._stand_ins: list[Any] = [parameters[attr] for parameters, attr, *_ in self._spots]
        # Embeddings that renormalise what they look up do so again with every use.
        exempt = {id(m._parameters) for m in modules if getattr(m, "max_norm", None)}
        self._watched = [spot for spot in self._spots if id(spot[0]) not in exempt]
        self._as_read: list[tuple[dict[str, Any], str, str, tuple[int, int, int]]] = []
        self._recurrent = [m for m in modules if isinstance(m, nn.RNNBase)]
        self._coming = threading.Lock()
        # Of the runs under way: whose, its ticket (0: it waits), and what it is entered with.
        self._tickets: dict[object, tuple[int, tuple[str, ...]]] = {}
        self._inside: dict[object, int] = {}  # calls of the unit's forward under way, of whom
        self._bound = 0  # the ticket whose views are in place
        self._memory = 0  # where all views lie
        self._modules, self._looked = modules, False
        self._lent: list[tuple[int, int]] = []  # addresses of the first run's views

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Wait for the blocks and put their views in place.

        Raises:
            UnsupportedModelError: two threads are in the unit at once, or a weight was changed.
            OffloadError: a weight has been replaced, or torch records what runs.
        """
        if self._spoiled:
            raise UnsupportedModelError(self._spoiled[0])
        executor = self._executor
        road = executor.road()
        who = road.who()
        if who in self._inside:
            return  # calls itself: all of it uses the views of the first
        refuse_recorders()
        few = self._host is not None and self._host.takes(tokens_of((*args, *kwargs.values())))
        needed = self._above if few else self._blocks
        self._begin(road, who, needed)
        try:
            if not self._bound:
                self._check_stand_ins()
            ticket = road.enter(self._unit.name, needed, self._unbind)
        except BaseException:
            self._tickets.pop(who, None)
            raise
        self._tickets[who] = ticket, needed
        if self._bound == ticket:
            return  # by another sequence
        self._bound = ticket
        views = {b: executor.views(b) for b in needed}
        for (parameters, attr, block, name), stand_in in zip(
            self._spots, self._stand_ins, strict=True
        ):
            if block in views:
                # As in the resident model, where a program may set it at any time: torch picks
                # kernels by this flag, also without grad.
                view = as_trained(views[block][name], stand_in._offload_trained)
                parameters[attr] = view  # type: ignore[assignment]
        for rnn in self._recurrent:
            refresh_flat_weights(rnn)
        self._as_read = [
            (parameters, attr, name, _mark(parameters[attr]))
            for parameters, attr, block, name in self._watched
            if block in views
        ]
        if not self._looked:
            self._lent = [
                (view.data_ptr(), view.data_ptr() + view.nbytes)
                for block in views.values()
                for view in block.values()
            ]
        if not self._memory:
            lie = [view.untyped_storage() for block in views.values() for view in block.values()]
            self._memory = lie[0].data_ptr() if lie else 0

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Take the views away; returns the output if it has to be another.

        Raises:
            UnsupportedModelError: the unit has changed a weight.
        """
        # Also called after an error, and then possibly without an ``enter``.
        road = self._executor.road()
        who = road.who()
        if who in self._inside:
            return None
        entered = self._tickets.pop(who, None)
        if entered is None or not entered[0]:
            return None
        name = self._changed() if self._bound == entered[0] and output is not None else None
        found = apart(output, self._memory)
        self._end(road, entered)
        if not self._looked and output is not None:
            self._looked = True
            self._check_kept()
        if name is not None:
            self._spoiled.append(
                f"{self._unit.name} changes its own {name} while it runs; weights that come and go "
                f"are as they were written, so the change would be lost. Raise the budget until "
                f"all stay in memory, or run this model as it is (offload.unwrap)"
            )
            raise UnsupportedModelError(self._spoiled[0])
        return None if found is output else found

    def runs(self, module: nn.Module) -> Callable[..., Any]:
        """``module.forward`` in a form that knows who is in it: a unit may call itself, and must
        not lose what it runs with when the inner call ends. Called without the module's hooks, it
        brings its blocks itself."""
        inside, forward = self._inside, module.forward

        @wraps(forward)
        def known(*args: Any, **kwargs: Any) -> Any:
            road = self._executor.road()
            who = road.who()
            # A conductor computes for its sequences, which are in the unit: they keep it in place.
            computes = self._bound and road is self._executor
            if who not in self._tickets and who not in inside and not computes:
                return self._by_itself(known, module, args, kwargs)
            inside[who] = inside.get(who, 0) + 1
            try:
                return forward(*args, **kwargs)
            finally:
                inside[who] -= 1
                if not inside[who]:
                    del inside[who]

        return known

    def _by_itself(
        self, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        self.enter(module, args, kwargs)
        output = None
        try:
            output = forward(*args, **kwargs)
        finally:
            apart_from_slots = self.leave(module, args, output)
        return output if apart_from_slots is None else apart_from_slots

    def abandon(self) -> None:
        """The calling thread's run has ended somewhere inside: give its blocks back."""
        entered = self._tickets.pop(self._executor.who(), None)
        if entered is not None and entered[0]:
            self._end(self._executor, entered)

    def _begin(self, road: Road, who: object, needed: tuple[str, ...]) -> None:
        """Say that somebody comes, when nobody else is there."""
        with self._coming:
            left = self._tickets.pop(who, None)
            if left is None and self._tickets and road is self._executor:
                alive = {thread.ident for thread in threading.enumerate()}
                gone = next((other for other in self._tickets if other not in alive), None)
                if gone is None:
                    raise UnsupportedModelError(
                        f"{self._unit.name} runs in two threads at once; call the whole model, in "
                        f"which they take turns"
                    )
                left = self._tickets.pop(gone)
            if left is not None and left[0]:
                # Left by a Ctrl-C in its forward: torch runs no hooks after one.
                self._end(road, left)
            self._tickets[who] = 0, needed

    def _end(self, road: Road, entered: tuple[int, tuple[str, ...]]) -> None:
        if road is self._executor:
            self._unbind()
        road.leave(*entered)

    def _unbind(self) -> None:
        self._bound = 0
        for (parameters, attr, *_), stand_in in zip(self._spots, self._stand_ins, strict=True):
            parameters[attr] = stand_in
        for rnn in self._recurrent:
            refresh_flat_weights(rnn)
        self._tickets.clear()  # of a sequence that a Ctrl-C has ended

    def _check_stand_ins(self) -> None:
        """Whoever gives a module another parameter between two runs wants it used."""
        for (parameters, attr, _, name), stand_in in zip(self._spots, self._stand_ins, strict=True):
            if parameters.get(attr) is not stand_in:
                raise OffloadError(replaced(name))

    def _check_kept(self) -> None:
        """After the first run: has a module kept a view of a weight for the next ones? Then there
        will be other bytes.

        Raises:
            UnsupportedModelError: it has.
        """
        for module in self._modules:
            own = {k: v for k, v in module.__dict__.items() if k not in ("_parameters", "_modules")}
            for name, value in (*own.items(), *module._buffers.items()):
                inside = value.values() if isinstance(value, dict) else value
                some = inside if isinstance(value, (dict, list, tuple)) else (value,)
                if not any(self._is_lent(one) for one in some):
                    continue
                self._spoiled.append(
                    f"{self._unit.name} keeps a part of its weights in the attribute {name} of a "
                    f"{type(module).__name__}, where there will be others' bytes later; weights "
                    f"that come and go cannot be kept. Raise the budget until all stay in memory, "
                    f"or run this model as it is (offload.unwrap)"
                )
                raise UnsupportedModelError(self._spoiled[0])

    def _is_lent(self, value: Any) -> bool:
        """Whether it is a tensor in the slots of this unit's weights, of its first run."""
        if type(value) not in (torch.Tensor, nn.Parameter) or value.layout != torch.strided:
            return False
        at = value.data_ptr()
        return any(first <= at < end for first, end in self._lent)

    def _changed(self) -> str | None:
        """A parameter that the forward has written to, or replaced."""
        for parameters, attr, name, mark in self._as_read:
            value = parameters[attr]
            if id(value) != mark[0] or _mark(value) != mark:
                return name
        return None


def replaced(name: str) -> str:
    """What to say of a parameter that is not the stand-in that was left in its place."""
    return (
        f"{name} is streamed and has been replaced: what comes for its layer is the weight from "
        f"before, so the new one would not be used. {CHANGE}"
    )


def refresh_flat_weights(module: nn.Module) -> None:
    """Recurrent modules keep a list of their parameters beside them."""
    if isinstance(module, nn.RNNBase):
        names: list[str] = module._flat_weights_names
        module._flat_weights = [module._parameters.get(n) for n in names]  # type: ignore[misc]


def _mark(value: Any) -> tuple[int, int, int]:
    """Differs if a lease's view was replaced, given other memory, or written to, unless through
    its ``.data``."""
    return id(value), value.data_ptr(), value._version


__all__ = ["UnitHooks", "refresh_flat_weights", "replaced"]
