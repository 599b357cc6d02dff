"""A training loop that is not ours: what torch's own interface says about steps and gradients.

A foreign loop calls ``backward``, reads ``p.grad``, clips, steps and zeroes as it likes. It does
not say which backward is the step's last, so each is taken for it: a block's gradients are measured
as soon as its unit is through, and again when more are added. The end of a backward pass is told by
autograd itself (``queue_callback``).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from offload.errors import OffloadError
from offload.train.engine import Engine, Group, StepResult, take_own_gradient
from offload.train.layout import Piece
from offload.train.lazy_grad import GradientError, LazyGrad, norm_of
from offload.train.streamed import adopt, disown

Tensor = torch.Tensor


class Owner(Protocol):
    """What an optimizer asks about its states."""

    def stepped(self) -> None:
        """A step was taken."""
        ...

    def reference(self) -> dict[str, Any]:
        """Commit, and say where."""
        ...

    def check_reference(self, reference: Mapping[str, Any]) -> None:
        """Raise OffloadError unless these are the states there are."""
        ...


class ForeignLoop:
    """Between an engine and the model's parameters: ``streamed.Source`` of them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.owner: Owner | None = None
        """Who makes states durable."""
        self.steps = 0
        """Steps taken since the model was loaded."""
        self.in_backward = False
        """Updates are made inside backward: gradients cannot be scaled any more."""
        self.accumulating = False
        """The next backward is not its step's last. Matters to updates inside backward only."""
        self.stepped_by: dict[str, object] = {}
        """Whose moments each parameter has, once an optimizer here has taken or loaded any."""
        self._pass = -1
        """The backward pass that has been noticed, by autograd's number."""
        self._handles: dict[str, LazyGrad] = {}
        self._age: dict[str, int] = {}
        self._places = {
            name: engine.places_of(name)
            for name in engine.params
            if engine.layout.params[name].tensor.numel()
        }
        pieces = (piece for block in engine.layout.trained for piece in block.pieces)
        self._trained = {piece.param for piece in pieces if piece.param in self._places}
        self._rest = {
            p.param: b for b in engine.layout.rest for p in engine.layout.blocks[b].pieces
        }
        self._hooks: list[Any] = []
        engine.on_backward = self._in_backward
        engine.compares = True
        for name, param in engine.params.items():
            if name in self._places:
                if name in self._trained and not self.comes_whole(name):
                    # Units use it expert by expert, and this is of whoever reads all of it beside
                    # them: a penalty on weights, say.
                    self._hooks.append(
                        param.register_post_accumulate_grad_hook(self._take_whole(name))
                    )
                adopt(param, self, name)

    def close(self) -> None:
        self.engine.on_backward = None
        for hook in self._hooks:
            hook.remove()
        for name, param in self.engine.params.items():
            if name in self._places:
                disown(param)

    # -- streamed.Source --------------------------------------------------------------------

    def present(self, name: str) -> bool:
        engine = self.engine
        if name not in engine.present:
            return False
        block = self._rest.get(name)
        if block is not None and block in engine.weights.stale:
            engine.begin_forward()  # used outside of all units: nothing else waits for its update
        return True

    def trained(self, name: str) -> bool:
        return name in self._trained

    def comes_whole(self, name: str) -> bool:
        pieces = (self.engine.layout.blocks[b].pieces[i] for b, i in self._places[name])
        return all(piece.expert is None for piece in pieces)

    def read(self, name: str, start: int, count: int) -> Tensor:
        return self.engine.read_elements(name, start, count)

    def gradient(self, name: str) -> Tensor | None:
        if not self.has_gradient(name):
            return None
        handle = self._handles.get(name)
        if handle is None:
            param = self.engine.params[name]
            with torch._C.DisableTorchFunctionSubclass():
                handle = LazyGrad(_Gradient(self, name, self._age.get(name, 0)), param)
            self._handles[name] = handle
        return handle

    def set_gradient(self, name: str, value: Tensor | None) -> None:
        if value is not None and value is self._handles.get(name):
            return
        if value is not None and not self.trained(name):
            raise GradientError(f"{name} was frozen when the model was loaded: it has no gradient")
        new = None if value is None else value.detach().clone()  # a handle of our own may be in it
        self.drop(name)
        if new is None:
            return
        param = self.engine.params[name]
        if tuple(new.shape) != tuple(param.shape):
            raise GradientError(
                f"a gradient of {name} is {tuple(param.shape)}, not {tuple(new.shape)}"
            )
        # No forward needs to come between two steps of such gradients: an update of the step before
        # that is pending would find these in the place of its own.
        self.engine.updater.wait_for([block for block, _ in self._places[name]])
        self._add(name, new)

    def _add(self, name: str, gradient: Tensor) -> None:
        flat = gradient.reshape(-1)
        for block, piece in self._places[name]:
            spec = self.engine.layout.blocks[block].pieces[piece]
            part = flat[spec.start : spec.start + spec.count]
            self.engine.gradients.add(block, piece, part.clone())

    def _take_whole(self, name: str) -> Callable[[Tensor], None]:
        def take(param: Tensor) -> None:
            gradient = take_own_gradient(param)
            self._in_backward()
            if gradient is not None:
                self._add(name, gradient)

        return take

    # -- gradients --------------------------------------------------------------------------

    def has_gradient(self, name: str) -> bool:
        gradients = self.engine.gradients
        return any(
            i in gradients.pieces(b) or gradients.squares(b, i) is not None
            for b, i in self._places[name]
        )

    def with_gradients(self) -> set[str]:
        """The parameters that have gradients now."""
        return {name for name in self._trained if self.has_gradient(name)}

    def drop(self, name: str) -> None:
        """Forget a parameter's gradient. What ``p.grad`` was says so when it is used."""
        self._age[name] = self._age.get(name, 0) + 1
        self._handles.pop(name, None)
        for block, piece in self._places[name]:
            self.engine.gradients.discard(block, piece)

    def check_age(self, name: str, age: int) -> None:
        if self._age.get(name, 0) != age:
            raise GradientError(
                f"this gradient of {name} is gone: a step or zero_grad has taken it. Read p.grad "
                f"again after the next backward, and copy (.clone()) what is to be kept"
            )

    def settle(self) -> None:
        """Measure what backward has left unmeasured."""
        if torch._C._current_graph_task_id() != -1:
            raise GradientError("a streamed gradient can be used only after backward, not in it")
        self.engine.end_backward()

    def norm(self, name: str) -> float:
        self.settle()
        gradients = self.engine.gradients
        squares, factors = [], []
        for block, piece in self._places[name]:
            found = gradients.squares(block, piece)
            if found is not None:
                squares.append(found)
                factors.append(gradients.factor(block, piece))
        return norm_of(squares, factors)

    def multiply(self, name: str, factor: float) -> None:
        if factor == 1.0:
            return
        if self.in_backward:
            raise GradientError(
                f"gradients are to be multiplied by {factor:.6g}, but in_backward=True has used "
                f"them already: drop in_backward=True, or do not clip (max_grad_norm=0)"
            )
        for block, piece in self._places[name]:
            self.engine.gradients.multiply(block, piece, factor)

    def value(self, name: str) -> Tensor:
        self.settle()
        if self.in_backward:
            raise GradientError(
                f"the gradient of {name} was used inside backward (in_backward=True) and is gone; "
                f"only its norm is known"
            )
        param, gradients = self.engine.params[name], self.engine.gradients
        with torch._C.DisableTorchFunctionSubclass():
            out = torch.zeros(tuple(param.shape), dtype=param.dtype)
        flat = out.view(-1)
        for block, piece in self._places[name]:
            part = gradients.value(block, piece)
            if part is not None:
                start = self.engine.layout.blocks[block].pieces[piece].start
                flat[start : start + part.numel()] = part * gradients.factor(block, piece)
        return out

    # -- backward and steps -----------------------------------------------------------------

    def _in_backward(self) -> None:
        """In a backward pass, before anything of it was taken."""
        task = torch._C._current_graph_task_id()
        if task == self._pass:
            return
        self._pass = task
        self.engine.last_micro_batch = not self.in_backward or (
            not self.accumulating and _completes_step()
        )
        torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        self._pass = -1
        self.engine.end_backward()

    def step(self, group_of: Callable[[Piece], Group], owned: Sequence[str]) -> StepResult:
        """Take a step of the parameters ``owned``.

        Raises:
            GradientError: there are no gradients, or some that nobody owns.
            NotFinite: a gradient is NaN or infinite; nothing is updated.
        """
        self.engine.last_micro_batch = True
        self.settle()
        there = self.with_gradients()
        if not there:
            raise GradientError(
                "there are no gradients to step with: nothing was backpropagated through this "
                "model since the last step or zero_grad"
            )
        lost = sorted(there - set(owned))
        if lost:
            raise GradientError(
                f"{len(lost)} parameters have gradients but are not in the optimizer ({lost[0]}, "
                f"...): they would stay as they are, silently. Give them to it, or freeze them: "
                f"requires_grad_(False)"
            )
        if math.isfinite(self.engine.gradients.norm()):  # else the engine says what is wrong
            for name in there:
                self._check_factors(name)
        result = self.engine.step(group_of)
        for name in there:
            self._age[name] = self._age.get(name, 0) + 1
            self._handles.pop(name, None)
        self.steps += 1
        return result

    def _check_factors(self, name: str) -> None:
        for block, piece in self._places[name]:
            factor = self.engine.gradients.factor(block, piece)
            if not (math.isfinite(factor) and factor >= 0):
                raise GradientError(
                    f"the gradient of {name} is to be multiplied by {factor}; a factor is a number "
                    f"from 0 on"
                )

    def names_of(self, params: Iterable[Any]) -> list[str]:
        """The names of streamed parameters; those without elements are none.

        Raises:
            OffloadError: one is not of this model, or is not streamed.
        """
        known = {id(p): name for name, p in self.engine.params.items() if name in self._places}
        out = []
        for param in params:
            if not param.numel():
                continue
            name = known.get(id(param))
            if name is None:
                raise OffloadError(
                    f"a parameter of shape {tuple(param.shape)} is not one of the streamed "
                    f"model's; give it to an optimizer of its own (torch.optim.AdamW)"
                )
            out.append(name)
        return out


def _completes_step() -> bool:
    """Whether the backward pass that runs is its step's last, as accelerate says it, if it is in
    use."""
    state = sys.modules.get("accelerate.state")
    if state is None or not state.GradientState._shared_state:
        return True
    return bool(state.GradientState().sync_gradients)


class _Gradient:
    """``lazy_grad.Gradient`` of one parameter between a backward and the step that takes it."""

    def __init__(self, loop: ForeignLoop, name: str, age: int) -> None:
        self.loop = loop
        self.name = name
        self._age = age

    def norm(self) -> float:
        self.loop.check_age(self.name, self._age)
        return self.loop.norm(self.name)

    def multiply(self, factor: float) -> None:
        self.loop.check_age(self.name, self._age)
        self.loop.multiply(self.name, factor)

    def value(self) -> Tensor:
        self.loop.check_age(self.name, self._age)
        return self.loop.value(self.name)

    def drop(self) -> None:
        self.loop.check_age(self.name, self._age)
        self.loop.drop(self.name)


__all__ = ["ForeignLoop"]
