"""Bodies: large ones take turns, and none is held for longer than it is needed."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Awaitable, Callable, MutableMapping
from types import SimpleNamespace
from typing import Any

import pytest
from serve_support import WAIT_S

from offload.serve.app import _read
from offload.serve.bodies import BODY, BODY_READ, PYTHON_BYTES, SMALL_BODY, read_json
from offload.serve.guard import Guard
from offload.serve.problems import Problem
from offload.serve.schema import ChatBody

Message = MutableMapping[str, Any]
PIECES = 4
PIECE = b" " * SMALL_BODY


class Client:
    """Sends a body in pieces, each when the test says so, and keeps what comes back."""

    def __init__(self, end: bytes = b"{}") -> None:
        self.pieces = [*[PIECE] * PIECES, end]
        self.asked = asyncio.Semaphore(0)
        self.more = asyncio.Semaphore(0)
        self.status: int | None = None

    async def receive(self) -> Message:
        self.asked.release()
        await self.more.acquire()
        piece = self.pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(self.pieces)}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]

    async def through(self, guard: Guard) -> None:
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "headers": headers,
            "client": ("127.0.0.1", 1),
        }  # fmt: skip
        await guard(scope, self.receive, self.send)

    async def push(self, count: int) -> None:
        """``count`` pieces, each after it was asked for."""
        for _ in range(count):
            await self.asked.acquire()
            self.more.release()


def guarded(work: Callable[[Any], Awaitable[None]]) -> Guard:
    async def app(scope: Any, _receive: Any, send: Any) -> None:
        await work(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    return Guard(app, keys=(), body_limit=2**20, local_only=True)


def test_large_bodies_take_turns() -> None:
    """The next one is not read from before the last one is in tokens; small ones do not wait."""

    async def main() -> None:
        held, begun, tokens = 0, asyncio.Event(), asyncio.Event()

        async def work(scope: Any) -> None:
            nonlocal held
            assert scope.pop(BODY) == {}
            held += 1
            begun.set()
            await tokens.wait()
            held -= 1
            scope[BODY_READ].give()

        guard = guarded(work)
        first, second, small = Client(), Client(), Client()
        small.pieces = [b"{}"]
        one = asyncio.create_task(first.through(guard))
        await first.push(PIECES + 1)
        await begun.wait()
        other = asyncio.create_task(second.through(guard))
        await second.push(2)  # then it is known to be large
        third = asyncio.create_task(small.through(guard))
        await small.push(1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert second.asked.locked()  # nothing more is asked for
        assert held == 2  # the first and the small one
        tokens.set()
        await second.push(PIECES - 1)
        await asyncio.gather(one, other, third)
        assert [c.status for c in (first, second, small)] == [200] * 3

    asyncio.run(asyncio.wait_for(main(), WAIT_S))


@pytest.mark.parametrize("end", ["slow", "refused", "gone"])
def test_a_turn_ends_with_its_request(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever does not send the rest, sends what is no JSON, or hangs up, keeps nobody waiting."""
    if end == "slow":
        monkeypatch.setattr("offload.serve.bodies.TURN_S", 0.0)
        monkeypatch.setattr("offload.serve.guard.LINGER_S", 0.0)

    async def main() -> None:
        async def work(scope: Any) -> None:
            assert scope.pop(BODY) == {}

        guard = guarded(work)
        bad, good = Client(b"{"), Client()
        one = asyncio.create_task(bad.through(guard))
        await bad.push(3)
        if end == "refused":
            await bad.push(PIECES - 2)
        if end == "gone":
            one.cancel()
        await asyncio.wait([one])
        assert bad.status == {"slow": 408, "refused": 400, "gone": None}[end]
        monkeypatch.undo()
        other = asyncio.create_task(good.through(guard))
        await good.push(PIECES + 1)
        await other
        assert good.status == 200

    asyncio.run(asyncio.wait_for(main(), WAIT_S))


@pytest.mark.parametrize("part", [b"[],", b"{},", b"999,", b"1.5,", b'"ab",'])
def test_what_json_becomes_is_within_what_is_set_aside(part: bytes) -> None:
    body = b"[" + part * (200_000 // len(part)) + b"0]"
    tracemalloc.start()
    try:
        found = read_json(body)
        size = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert json.loads(body) == found
    assert size + len(body) <= PYTHON_BYTES * len(body)


MANY = 2**16
ONE = '"messages": [{"role": "user", "content": "x"}]'
FIELDS = ",".join(f'"{i}":1' for i in range(MANY // 9))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"messages": [' + "{}," * (MANY // 3) + "{}]}", "messages.0.role"),
        ('{"messages": [' + "1," * (MANY // 2) + "1]}", "messages.0: "),
        ("{" + ONE + ',"stop": [' + "1," * (MANY // 2) + "1]}", "stop.0"),
        ("{" + ONE + ',"modalities": [' + "1," * (MANY // 2) + "1]}", "modalities.0"),
        ("{" + ONE + "," + FIELDS + "}", "0: this server knows no such field"),
        ('{"messages": [{"role": "user", "content": "x",' + FIELDS + "}]}", "messages.0.0: "),
        ("{" + ONE + ',"metadata": {' + FIELDS + "}}", "metadata: "),
        ("{" + ONE + ',"logit_bias": {' + FIELDS + "}}", "logit_bias: "),
        ("{" + ONE + ',"response_format": {' + FIELDS + "}}", "response_format.type"),
        (
            '{"messages": [' + ",".join(['{"role":"user","content":""}'] * (MANY // 30)) + "]}",
            None,
        ),
    ],
)
def test_what_is_wrong_with_a_body_is_within_what_is_set_aside(body: str, said: str | None) -> None:
    """However many things are: one of them is said."""
    raw = body.encode()
    found = None
    tracemalloc.start()
    try:
        http: Any = SimpleNamespace(scope={BODY: read_json(raw)})
        _read(http, ChatBody)
    except Problem as problem:
        found = problem.message
    finally:
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert size + len(raw) <= PYTHON_BYTES * len(raw)
    assert found is None if said is None else found is not None and found.startswith(said)


def test_a_small_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.serve.bodies.SMALL_S", 0.0)
    monkeypatch.setattr("offload.serve.guard.LINGER_S", 0.0)

    async def main() -> None:
        async def work(scope: Any) -> None:
            raise AssertionError("it has no body")

        client = Client()
        await client.through(guarded(work))
        assert client.status == 408

    asyncio.run(asyncio.wait_for(main(), 10))
