"""Micro-batches layer by layer: a step moves every weight twice, whatever its number of them.

GreedySnake (Yue et al. 2025) schedules a step "vertically": all micro-batches pass a layer before
any goes on. Here each micro-batch runs the model's own forward and backward, untouched, in a thread
of its own, and a baton decides who runs: at the door of the next unit a thread hands it on, and
gets it back when all others stand before that door, too. Only the holder of the baton runs, so a
model's code and torch's random generator see one thread at a time, and gradients of a unit are
added in the order of micro-batches, as in the usual order. (A weight of several units, tied
embeddings, gets all of one unit's before the other's: its sum may be rounded otherwise.)
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from offload.errors import OffloadError


class _Abort(BaseException):
    """Another micro-batch failed: unwind this thread, too."""


class Rounds:
    """Runs functions in turns. Threads are kept: OpenMP has a pool of workers for each."""

    def __init__(self, width: int) -> None:
        """``width``: how many functions run in turns."""
        if width < 1:
            raise OffloadError(f"a step needs at least one micro-batch, not {width}")
        self.width = width
        self.index = 0
        """Who runs now."""
        self._changed = threading.Condition()
        self._turn = -1
        self._error: BaseException | None = None
        self._done = 0
        self._results: list[Any] = []
        self._first: list[bool] = []
        self._work: list[queue.SimpleQueue[Callable[[], Any] | None]] = [
            queue.SimpleQueue() for _ in range(width)
        ]
        self._alive: list[bool] = [False] * width
        self._local = threading.local()
        self._threads = [
            threading.Thread(target=self._serve, args=(i,), name=f"offload-micro-{i}", daemon=True)
            for i in range(width)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def size(self) -> int:
        """How many functions run in turns now."""
        return len(self._alive)

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run them in turns, the first one first; returns their results.

        Raises what the first one to fail has raised, after all have ended.
        """
        if len(functions) > self.width:
            raise OffloadError(f"{len(functions)} micro-batches in rounds of {self.width}")
        with self._changed:
            self._error = None
            self._done = 0
            self._results = [None] * len(functions)
            self._first = [True] * len(functions)
            self._alive = [True] * len(functions)
            self._turn = self.index = 0
        for work, function in zip(self._work, functions, strict=False):
            work.put(function)
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._done == len(functions))
        except BaseException as stop:
            # A signal in the thread that waits: let the others unwind before it goes on.
            with self._changed:
                self._error = self._error or stop
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._done == len(functions))
            raise
        finally:
            self._alive = []
        if self._error is not None:
            raise self._error
        return self._results

    def door(self) -> None:
        """Called before a unit, by the thread that has the baton: hand it on, wait to get it back.

        At its first door a thread goes on: it has only just begun.
        """
        me: int | None = getattr(self._local, "index", None)
        if me is None:
            return
        with self._changed:
            if self._first[me]:
                self._first[me] = False
                return
            self._pass_on(me)
            self._wait(me)

    def _pass_on(self, me: int) -> None:
        n = len(self._alive)
        for step in range(1, n + 1):
            nxt = (me + step) % n
            if self._alive[nxt]:
                self._turn = self.index = nxt
                break
        self._changed.notify_all()

    def _wait(self, me: int) -> None:
        self._changed.wait_for(lambda: self._turn == me or self._error is not None)
        if self._error is not None:
            raise _Abort

    def _serve(self, me: int) -> None:
        self._local.index = me
        while (function := self._work[me].get()) is not None:
            try:
                with self._changed:
                    self._wait(me)
                result = function()
            except BaseException as error:  # noqa: BLE001  ``run`` raises it
                with self._changed:
                    if self._error is None and not isinstance(error, _Abort):
                        self._error = error
                    self._end(me)
            else:
                with self._changed:
                    self._results[me] = result
                    self._end(me)

    def _end(self, me: int) -> None:
        self._alive[me] = False
        self._done += 1
        self._pass_on(me)

    def close(self) -> None:
        """End the threads."""
        for work in self._work:
            work.put(None)
        for thread in self._threads:
            thread.join()
