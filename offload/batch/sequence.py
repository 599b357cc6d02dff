"""One of several generations that run through a model together: a greenlet and what is its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import greenlet
import torch

from offload.errors import OffloadError
from offload.models.module_state import OwnState

logger = logging.getLogger(__name__)


class Cancelled(OffloadError):
    """Raised where a sequence waits that nobody wants any more."""


class Sequence:
    """One generation. Made by ``Conductor.start``; everything but ``cancel`` belongs to the
    conductor's thread.

    Attributes:
        result: what ``work`` returned, once ``done``.
        error: what it raised instead.
        done: it has returned or raised.
    """

    def __init__(
        self,
        work: Callable[[], Any],
        seed: int | None,
        on_end: Callable[[Sequence], None] | None,
        state: OwnState,
    ) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = False
        self.on_end = on_end
        self.cancelled = False
        # Where it waits: what it has called, the stop's name, its place among a layer's experts.
        self.call = ""
        self.stop: Hashable = None
        self.rank = -1
        self.payload: Any = None
        self.rows = 0
        """Tokens that the forward pass before which it waits will read."""
        self.visits: dict[Hashable, int] = {}
        self.local: dict[object, Any] = {}
        self._work = work
        self._seed = seed
        self._greenlet = greenlet.greenlet(self._run)
        self._answer: Any = None
        self._throw: BaseException | None = None
        self._state = state
        self._grad = torch.is_grad_enabled()
        # A row of a packed table is waited for within an operation, where torch leaves out autograd
        # until the operation ends; that is not to be so for the others meanwhile.
        self._keys = _dispatch_keys()
        self._rng: torch.Tensor | None = None  # its own generator's state, and everybody's
        self._others = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._draws = seed is not None
        """The random numbers that are drawn now are its own: outside of forward passes."""

    def cancel(self) -> None:
        """Have it end with ``Cancelled`` the next time the conductor comes by. From any thread."""
        self.cancelled = True

    @property
    def running(self) -> bool:
        """Whether the caller is this sequence."""
        return bool(greenlet.getcurrent() is self._greenlet)

    # -- by the conductor -----------------------------------------------------------------

    def resume(self, answer: Any = None, error: BaseException | None = None) -> None:
        """Run it up to where it waits next, or to its end. ``answer`` is what ``wait`` returns
        there, ``error`` what it raises."""
        self._answer, self._throw = answer, error
        grad = torch.is_grad_enabled()
        if self._draws:
            self._swap_in()
        if self._grad != grad:
            torch._C._set_grad_enabled(self._grad)
        try:
            self._state.swap()
            with torch._C._ForceDispatchKeyGuard(*self._keys):
                self._greenlet.switch()
                self._keys = _dispatch_keys()
        finally:
            self._state.swap()
            self._grad = torch.is_grad_enabled()
            if self._grad != grad:
                torch._C._set_grad_enabled(grad)
            if self._draws:
                self._swap_out()
        self.done = self._greenlet.dead

    def _run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:  # noqa: BLE001  the conductor looks at it
            self.error = error
        finally:
            self.local.clear()

    # -- by the sequence itself -----------------------------------------------------------

    def wait(self) -> Any:
        """Let the others run until the conductor comes by."""
        if torch.is_inference_mode_enabled():
            raise OffloadError(
                "torch.inference_mode() inside of a sequence would be in force for the others, "
                "too; use torch.no_grad()"
            )
        parent = self._greenlet.parent
        if parent is None:
            raise AssertionError("every greenlet but the first has a parent")
        parent.switch()
        error, self._throw = self._throw, None
        if self.cancelled:
            raise Cancelled("this sequence was cancelled")
        if error is not None:
            raise error
        answer, self._answer = self._answer, None
        return answer

    def draw(self, on: bool) -> None:
        """Called when a forward pass ends and begins: only outside of it are random numbers drawn,
        and swapping their state at every stop would cost more than the rest of a switch."""
        if self._seed is None or self._draws == on:
            return
        self._draws = on
        if on:
            self._swap_in()
        else:
            self._swap_out()

    # -- random numbers -------------------------------------------------------------------

    def _swap_in(self) -> None:
        self._others = torch.get_rng_state()
        if self._rng is None:
            torch.manual_seed(self._seed or 0)
        else:
            torch.set_rng_state(self._rng)

    def _swap_out(self) -> None:
        self._rng = torch.get_rng_state()
        torch.set_rng_state(self._others)


__all__ = ["Cancelled", "Sequence"]


def _dispatch_keys() -> tuple[Any, Any]:
    """What torch's dispatcher takes in and leaves out in this thread now."""
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
