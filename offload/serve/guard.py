"""What stands before every route: keys, sizes, and who may ask at all.

Plain ASGI around the application: what is refused here is refused before a body is parsed, and a
body that is too large is never held. Bodies are read here, and not by FastAPI, which would keep
them for as long as the answer takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from offload.serve.answers import Reply
from offload.serve.bodies import BODY, BODY_READ, SMALL_BODY, Turn, read_json
from offload.serve.problems import Problem
from offload.units import format_bytes

CLIENT = "offload.client"
"""Where the scope says who asks."""

OPEN_PATHS = ("/", "/health")
"""The page asks for the key itself; a load balancer has none."""

LINGER_BYTES, LINGER_S = 256 * 2**20, 10.0
"""What is still read of a refused body, thrown away as it comes. A server that closes while its
client writes resets the connection, and most clients then never see the answer."""


class Guard:
    """Checks the key, the ``Host`` header, the kind of body and its size; reads the body."""

    def __init__(
        self, app: ASGIApp, *, keys: Sequence[str], body_limit: int, local_only: bool
    ) -> None:
        """
        Args:
            keys: any of them is right; none: everybody may ask.
            body_limit: bytes.
            local_only: the server listens on this machine only, so it has a local name: a web page
                that points a name of its own at this machine is not answered (DNS rebinding).
        """
        self._app = app
        self._digests = [_digest(key) for key in keys]
        self._limit = body_limit
        self._local_only = local_only
        self._reading = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {k.lower(): v for k, v in scope["headers"]}
        incoming = _Incoming(receive)
        scope[BODY_READ] = turn = Turn(self._reading)
        try:
            self._check_host(headers)
            scope[CLIENT] = self._check_key(scope, headers)
            if scope["method"] in ("POST", "PUT", "PATCH"):
                scope[BODY], stayed = await self._read(headers, incoming, turn)
                if not stayed:
                    return
        except Problem as problem:
            turn.give()
            await _refuse(problem, incoming, send)
            return
        else:
            await self._app(scope, receive, send)
        finally:
            turn.give()

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        host = headers.get(b"host", b"").decode("latin-1")
        if self._local_only and host and not is_loopback(_name(host)):
            raise Problem(
                403,
                f"this server answers as localhost only, and the request is for {host!r}; start "
                f"it with --host and --api-key to give it another name",
                code="wrong_host",
            )

    def _check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> str:
        """Who asks: the key's number and the address. Every key is compared, each in a time that
        says nothing about how much of it is right."""
        address = (scope.get("client") or ("unknown", 0))[0]
        if not self._digests:
            return str(address)
        kind, _, given = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        found = _digest(given.strip())
        right = [hmac.compare_digest(found, digest) for digest in self._digests]
        if kind.lower() == "bearer" and any(right):
            return f"{right.index(True)} {address}"
        if scope["path"] in OPEN_PATHS:
            return str(address)
        raise Problem(
            401,
            "the API key is wrong" if given else "an API key is needed: Authorization: Bearer …",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    async def _read(
        self, headers: dict[bytes, bytes], receive: _Incoming, turn: Turn
    ) -> tuple[object, bool]:
        """What the body says, and whether the client has stayed until its end."""
        # Without this any web page could have a browser on this machine post: what is not JSON
        # needs nobody's permission.
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != b"application/json":
            raise Problem(
                415,
                f"the body is {kind.decode('latin-1') or 'of no named kind'}; send "
                f"Content-Type: application/json",
                code="unsupported_media_type",
            )
        coding = headers.get(b"content-encoding", b"").strip().lower()
        if coding not in (b"", b"identity"):  # unpacked, its size would be known too late
            raise Problem(
                415,
                f"the body is packed ({coding.decode('latin-1')}); send it as it is, without "
                f"Content-Encoding",
                code="unsupported_media_type",
            )
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._limit:
            raise self._too_large(int(length))
        body = bytearray()
        while True:
            message = await turn.within(receive(), len(body))
            if message["type"] == "http.disconnect":
                return None, False
            body += message.get("body", b"")
            if len(body) > self._limit:
                raise self._too_large(len(body))
            if len(body) > SMALL_BODY:
                await turn.take()
            if receive.ended:
                return read_json(body), True

    def _too_large(self, size: int) -> Problem:
        return Problem(
            413,
            f"the body is {size} bytes or more, and {self._limit} ({format_bytes(self._limit)}) "
            f"are taken: a prompt that fits the context is smaller",
            code="body_too_large",
            headers={"Connection": "close"},
        )


class _Incoming:
    """A request's messages; ``ended``: there are no more of them."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.ended = False

    async def __call__(self) -> Message:
        message = await self._receive()
        self.ended = not message.get("more_body", False)
        return message


async def _refuse(problem: Problem, incoming: _Incoming, send: Send) -> None:
    """Answer at once, and end the answer when the client has sent its body, or enough of it."""
    response = Reply(problem.body, problem.status, problem.headers)
    start = {"status": response.status_code, "headers": response.raw_headers}
    await send({"type": "http.response.start", **start})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(_throw_away(incoming), LINGER_S)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _throw_away(incoming: _Incoming) -> None:
    left = LINGER_BYTES
    while left > 0 and not incoming.ended:
        left -= len((await incoming()).get("body", b""))


def _digest(key: str) -> bytes:
    # Of one length, whatever the key's: compare_digest tells lengths apart.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _name(host: str) -> str:
    """Without the port: ``localhost:8000``, ``[::1]:8000``."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def is_loopback(name: str) -> bool:
    """Whether an address or a name is this machine's own."""
    if name.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
