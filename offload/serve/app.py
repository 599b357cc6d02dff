"""The routes. Everything about HTTP that is not in ``guard`` is here; nothing about models is."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from offload.serve import answers, events, metrics, page
from offload.serve.bodies import BODY, BODY_READ
from offload.serve.connection import ON_PROBE
from offload.serve.engine import Engine, Handle
from offload.serve.guard import CLIENT
from offload.serve.problems import Problem, failed
from offload.serve.prompts import Prompts
from offload.serve.schema import Body, ChatBody, CompletionBody

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Body)

COMPLETION_TOKENS = 16
"""Of a plain completion, unless said otherwise: OpenAI's own."""
KEEP_ALIVE_S = 10.0
MOST_SHOWN = 40
"""Characters of a value that an error repeats."""
GONE = 499
"""nginx's status for a client that left; nobody reads it, logs do."""


class Mailbox:
    """Brings events from the engine's thread to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[events.Event | None] = asyncio.Queue()

    def post(self, event: events.Event) -> None:
        """From any thread. An answer that outlives its event loop has no reader."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:
            logger.debug("an event came after the server's loop had ended")

    def probe(self) -> None:
        """On the loop: have something sent, to see whether anybody is there."""
        if self._events.empty():
            self._events.put_nowait(None)

    async def get(self) -> events.Event | None:
        """None: there is none yet, but something is to be sent."""
        return await self._events.get()


class EventStream(StreamingResponse):
    """Server-sent events. However it ends, also before its first line, the engine is told."""

    media_type = "text/event-stream"

    def __init__(self, lines: AsyncIterator[bytes], engine: Engine, handle: Handle) -> None:
        super().__init__(lines, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._engine, self._handle = engine, handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._engine.cancel(self._handle)


def make_app(engine: Engine, prompts: Prompts, *, model: str) -> FastAPI:
    """The application without its ``Guard``.

    Args:
        model: the name it goes by.
    """
    # No pages about the interface: FastAPI's load scripts from elsewhere.
    app = FastAPI(title="offload", docs_url=None, redoc_url=None, openapi_url=None)
    created = int(time.time())
    # FastAPI takes HEAD for another route; whoever watches a server, or looks before fetching, asks
    # by it, and HTTP wants it wherever GET is.
    readable = partial(app.api_route, methods=["GET", "HEAD"])
    described = {"id": model, "object": "model", "created": created, "owned_by": "offload"}

    async def answer(http: Request, kind: type[ChatBody] | type[CompletionBody]) -> Response:
        body = _read(http, kind)
        if body.model not in (None, model):
            raise Problem(
                404,
                f"the model {body.model!r} is not served here; {model!r} is",
                param="model",
                code="model_not_found",
            )
        if body.stream_options is not None and not body.stream:
            raise Problem(400, "stream_options needs stream: true", param="stream_options")
        engine.check_open()  # before a long prompt is encoded for nothing
        wanted = body.max_tokens
        chat = isinstance(body, ChatBody)
        if isinstance(body, ChatBody):
            wanted = _agreed(wanted, body.max_completion_tokens)
            said = [message.said for message in body.messages]
            ids = await prompts.of_messages(said, _settings(body))
            del said
        else:
            ids = await prompts.of_prompt(body.prompt)
        mailbox = Mailbox()
        handle = engine.submit(
            events.Request(
                client=http.scope[CLIENT],
                prompt=ids,
                new_tokens=prompts.fit(
                    ids,
                    wanted,
                    None if chat else COMPLETION_TOKENS,
                    param="messages" if chat else "prompt",
                ),
                sampling=body.sampling(engine.temperature),
                stops=body.stops,
                ignore_eos=bool(body.ignore_eos),
            ),
            mailbox.post,
        )
        shape = answers.Shape(model, chat=chat)
        stream, include_usage = body.stream, body.include_usage
        del body  # which may be large, and the answer may take long
        http.scope[BODY_READ].give()
        if stream:
            http.scope.get(ON_PROBE, []).append(mailbox.probe)
            return EventStream(_lines(mailbox, shape, include_usage), engine, handle)
        return await _whole(http, mailbox, shape, engine, handle)

    @app.post("/v1/chat/completions")
    async def chat_completions(http: Request) -> Response:
        return await answer(http, ChatBody)

    @app.post("/v1/completions")
    async def completions(http: Request) -> Response:
        return await answer(http, CompletionBody)

    @readable("/v1/models")
    async def models() -> Response:
        return answers.Reply({"object": "list", "data": [described]})

    @readable("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if name != model:
            raise Problem(404, f"the model {name!r} is not served here", code="model_not_found")
        return answers.Reply(described)

    @readable("/health")
    async def health() -> Response:
        state = engine.state
        return answers.Reply({"status": state}, 200 if state == "ok" else 503)

    @readable("/stats")
    async def stats() -> Response:
        return answers.Reply({"model": model, **engine.stats()})

    @readable("/metrics")
    async def prometheus() -> Response:
        return PlainTextResponse(
            metrics.render(engine.stats(), engine.counters), media_type=metrics.MEDIA_TYPE
        )

    @readable("/")
    async def chat_page() -> Response:
        return page.response()

    app.add_exception_handler(Problem, _problem)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _bug)
    return app


async def _lines(
    mailbox: Mailbox, shape: answers.Shape, include_usage: bool
) -> AsyncIterator[bytes]:
    """An answer as server-sent events."""
    if (first := shape.first()) is not None:
        yield answers.line(first)
    while True:
        try:
            event = await asyncio.wait_for(mailbox.get(), KEEP_ALIVE_S)
        except TimeoutError:
            yield answers.STILL_HERE
            continue
        match event:
            case None:
                yield answers.STILL_HERE
            case events.Piece(text):
                yield answers.line(shape.piece(text))
            case events.Failed(problem):
                yield answers.error_line(problem)
                return
            case events.Ended():
                yield answers.line(shape.last(event))
                if include_usage:
                    yield answers.line(shape.usage(event))
                yield answers.DONE
                return


async def _whole(
    http: Request, mailbox: Mailbox, shape: answers.Shape, engine: Engine, handle: Handle
) -> Response:
    """An answer in one piece, unless the client leaves before."""
    collecting = asyncio.ensure_future(_collect(mailbox))
    leaving = asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            return Response(status_code=GONE)
        return answers.Reply(shape.whole(*collecting.result()))
    finally:
        engine.cancel(handle)
        collecting.cancel()
        leaving.cancel()


async def _collect(mailbox: Mailbox) -> tuple[str, events.Ended]:
    texts: list[str] = []
    while True:
        match await mailbox.get():
            case events.Piece(text):
                texts.append(text)
            case events.Failed(problem):
                raise problem
            case events.Ended() as end:
                return "".join(texts), end


async def _gone(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _read(http: Request, kind: type[T]) -> T:
    """The request's body, which nobody else holds from then on.

    Raises:
        Problem: the first thing that is wrong with it.
    """
    try:
        return kind.model_validate(http.scope.pop(BODY))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        said = f"{param or 'the body'}: {_said(first)}"
    raise Problem(400, said, param=param)


def _agreed(one: int | None, other: int | None) -> int | None:
    if one is not None and other is not None and one != other:
        raise Problem(
            400,
            f"max_tokens {one} and max_completion_tokens {other} contradict each other",
            param="max_tokens",
        )
    return one if other is None else other


def _settings(body: ChatBody) -> dict[str, Any]:
    """What a request wants the chat template to read besides the messages."""
    found = dict(body.chat_template_kwargs or {})
    effort = body.reasoning_effort
    if effort is not None and found.setdefault("reasoning_effort", effort) != effort:
        raise Problem(
            400,
            f"reasoning_effort {effort!r} and that of chat_template_kwargs contradict each other",
            param="reasoning_effort",
        )
    return found


def _reply(problem: Problem) -> Response:
    return answers.Reply(problem.body, problem.status, problem.headers)


async def _problem(_: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return _reply(error)


def _said(error: Mapping[str, Any]) -> str:
    """What is wrong with a field, for whoever sent it."""
    about = error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            return "this server knows no such field"
        case "model_type":  # pydantic's words name our classes
            return f"it should be a JSON object, not {_short(error['input'])}"
        case "none_required":
            return "this server does not do that; leave it out"
        case "too_long" if about.get("max_length") == 0:
            return "this server does not do that; leave it out"
        case "literal_error":
            only = _as_json(about["expected"])
            return f"this server takes only {only} here, not {_short(error['input'])}"
    return str(error["msg"]).removeprefix("Value error, ")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 1]}…"


def _as_json(expected: str) -> str:
    """Python's ``False`` and ``'text'`` as who sends JSON writes them."""
    return expected.replace("False", "false").replace("'", '"')


async def _http_error(http: Request, error: Exception) -> Response:
    """No such path, or not by this method."""
    assert isinstance(error, HTTPException)
    path = _short(http.url.path)
    match error.status_code:
        case 404:
            said = f"there is no {path} here; clients of OpenAI's want a base URL that ends in /v1"
        case 405:
            said = f"{path} takes only {(error.headers or {}).get('Allow')}"
        case _:
            said = error.detail
    return _reply(Problem(error.status_code, said, headers=error.headers))


async def _bug(_: Request, error: Exception) -> Response:
    return _reply(failed(f"an error of the server: {type(error).__name__}"))
