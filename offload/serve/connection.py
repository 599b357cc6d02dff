"""A connection whose client has shut down its writing side, and still reads.

Such a client (``nc -N``, a script that ends its input) gets its answer. At first it looks like one
that has hung up: both send their end of the stream and no more. Who has hung up answers what is
sent with a reset, so something is sent from time to time: ``100 Continue``, which every client of
HTTP/1.1 skips, before an answer has begun, and a comment between the lines of a stream.

One whose client does not send a request is closed after ``HEAD_S``: a server takes so many at once,
and those that only hold a place would keep everybody else out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

ON_PROBE = "offload.on_probe"
"""Where the scope has a list: what is called when a client that may have left is to be sent
something; to be filled by who can send between two parts of an answer."""

PROBE_S = 1.0
"""Between two probes. The first one provokes the reset, the second one meets it."""

HEAD_S = 20.0
"""For a request's first line and its headers, 64 KiB at most, from the moment that they are due."""


class Connection(H11Protocol):
    """uvicorn's, which takes the end of what a client sends for its leaving, and waits for ever for
    a request's headers."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._half_closed = False
        self._probing: asyncio.TimerHandle | None = None
        self._head_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_head()

    def handle_events(self) -> None:
        super().handle_events()
        if self.scope is not None:
            self._probes()
        if self._half_closed and not self._goes_on():
            self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        self._half_closed = True
        return self._goes_on()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._probing is not None:
            self._probing.cancel()
        if self._head_due is not None:
            self._head_due.cancel()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        """Have the time run while a request's headers are due, however slowly they come. Between
        two requests it is uvicorn's own that runs, until there is a first byte."""
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            if self._head_due is None:
                self._head_due = self.loop.call_later(HEAD_S, self.timeout_keep_alive_handler)
        elif self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    def _goes_on(self) -> bool:
        """Whether an answer is still due to a client that sends no more."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        if not self.conn.trailing_data[0]:  # no request behind this one
            cycle.keep_alive = False
        if self._probing is None:
            self._probe()
        return True

    def _probe(self) -> None:
        self._probing = self.loop.call_later(PROBE_S, self._probe)
        cycle = self.cycle
        if cycle.response_complete or self.transport.is_closing():
            return
        if cycle.response_started:
            for probe in self._probes():
                probe()
        elif self.conn.their_http_version == b"1.1":
            going_on = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(going_on))

    def _probes(self) -> list[Callable[[], None]]:
        scope = cast(dict[str, Any], self.scope)
        found: list[Callable[[], None]] = scope.setdefault(ON_PROBE, [])
        return found
