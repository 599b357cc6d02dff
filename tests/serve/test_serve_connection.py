"""Connections that send no request keep nobody else out."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from offload.serve import connection
from offload.serve.connection import Connection

SOON_S = 10.0
"""Far more than it takes; without an end to them these tests would wait for ever."""
WHOLE = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def app(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def _visit(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """What comes back until the server closes the connection, when after ``sent`` it has no more
    patience."""
    config = uvicorn.Config(app, log_config=None, lifespan="off", timeout_keep_alive=3600)
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(config, state, {}), "127.0.0.1", 0
    )
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        got = b""
        if sent.startswith(WHOLE):
            writer.write(WHOLE)
            got = await reader.readuntil(b"\r\n\r\n")
            monkeypatch.setattr(connection, "HEAD_S", 0.0)
        writer.write(sent.removeprefix(WHOLE))
        with contextlib.suppress(ConnectionResetError):  # closed before it had read all
            got += await reader.read()
        writer.close()
        await writer.wait_closed()
    assert not state.connections
    return got


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: "])
def test_a_connection_without_a_request_is_closed(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.1)
    assert asyncio.run(asyncio.wait_for(_visit(sent, monkeypatch), SOON_S)) == b""


def test_so_is_one_whose_second_request_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    got = asyncio.run(asyncio.wait_for(_visit(WHOLE + WHOLE[:9], monkeypatch), SOON_S))
    assert got.startswith(b"HTTP/1.1 204")
