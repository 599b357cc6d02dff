"""Listening, and ending well: uvicorn around the application, with our own signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from offload.errors import OffloadError
from offload.serve.connection import Connection
from offload.serve.engine import Engine
from offload.serve.guard import is_loopback

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 1024
AFTER_GRACE_S = 5
"""For answers that are cut off to reach their clients; then connections are closed."""


def check_host(host: str, keys: Sequence[str]) -> bool:
    """Whether ``host`` is this machine's own address only.

    Raises:
        OffloadError: it is not, and everybody who reaches it could use the model.
    """
    # Other characters clients write in ways of their own, or not at all; blanks around a header's
    # value are no part of it. Such a key would be asked for and never be right.
    if any(
        not key or key != key.strip() or not (key.isascii() and key.isprintable()) for key in keys
    ):
        raise OffloadError(
            "--api-key is empty, begins or ends with a blank, or has characters that not every "
            "header carries; take printable ASCII"
        )
    local = all(is_loopback(str(info[4][0])) for info in _addresses(host, 0))
    if not local and not keys:
        raise OffloadError(
            f"--host {host} can be reached from other machines, and without --api-key anybody "
            f"there could use the model; add a key, or listen on 127.0.0.1"
        )
    return local


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0: any that is free.

    Raises:
        OffloadError: it is taken, or may not be used.
    """
    family, kind, protocol, _, address = _addresses(host, port)[0]
    listening = socket.socket(family, kind, protocol)
    try:
        # The port of a server that has just ended may be taken again; one that runs keeps it.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise OffloadError(
            f"{host}:{port} cannot be listened on: {os.strerror(error.errno or 0)}; choose "
            f"another --port (0 takes any that is free)"
        ) from error
    return listening


def url(listening: socket.socket) -> str:
    """Where it is reached."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(
    app: ASGIApp,
    engine: Engine,
    listening: socket.socket,
    *,
    grace_s: float,
    started: Callable[[], None],
    verbose: bool = False,
) -> None:
    """Serve until SIGINT or SIGTERM; in the main thread.

    Then nothing new is taken, what waits is refused, what runs may go on for ``grace_s`` seconds
    (a second signal ends that at once) and is cut off after.

    Raises:
        BaseException: what ended the engine, if that did.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="info" if verbose else "critical",
        access_log=verbose,
        lifespan="off",
        loop="asyncio",
        http=Connection,
        ws="none",
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=int(grace_s) + AFTER_GRACE_S,
    )
    server = _Server(config, engine, started)
    asyncio.run(_serve(server, engine, listening, grace_s))
    if (error := engine.error) is not None:
        raise error


class _Server(uvicorn.Server):
    """Says when it listens, leaves signals alone, and ends if the engine does."""

    def __init__(self, config: uvicorn.Config, engine: Engine, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._engine, self._announce = engine, started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._engine.error is not None


async def _serve(server: _Server, engine: Engine, listening: socket.socket, grace_s: float) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if server.should_exit:
            engine.abandon()
            return
        server.should_exit = True
        engine.drain()
        loop.call_later(grace_s, engine.abandon)

    with _on_signals(loop, stop):
        await server.serve(sockets=[listening])


@contextlib.contextmanager
def _on_signals(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> Iterator[None]:
    """Signals that the parent ignores (a job in the background of a script) stay ignored."""
    before: dict[signal.Signals, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        if (handler := signal.getsignal(number)) is not signal.SIG_IGN:
            before[number] = handler
            loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def _addresses(host: str, port: int) -> list[Any]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise OffloadError(f"--host {host} is no address of this machine: {why}") from error
