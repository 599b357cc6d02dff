"""Keys and a full queue."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
from serve_support import (
    TINY,
    Alone,
    Listener,
    get,
    make_engine,
    make_guarded,
    openai_client,
    post,
    refused,
    request,
    run,
)

from offload.models.meta import read_config
from offload.serve.prompts import Prompts

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "What is a list?"}]
KEYS = ("first key", "s3cret")


def test_keys(model: Any, alone: Alone) -> None:
    engine = make_engine(model, alone.tokenizer)
    app, prompts = make_guarded(engine, alone.tokenizer, KEYS)
    try:
        for path in ("/v1/models", "/stats", "/metrics"):
            refused(get(app, path), 401, "needed")
            refused(get(app, path, key="s3cre"), 401, "wrong")
            for key in KEYS:
                assert get(app, path, key=key).status_code == 200
        refused(post(app, CHAT, {"messages": MESSAGES}, key="wrong"), 401)
        assert get(app, "/health").status_code == 200
        assert get(app, "/").status_code == 200

        async def wrong(http: httpx.AsyncClient) -> None:
            with pytest.raises(openai.AuthenticationError):
                await openai_client(http, "wrong").models.list()

        run(app, wrong)
    finally:
        engine.close()
        prompts.close()


def test_a_full_queue_is_said_with_a_time(model: Any, alone: Alone) -> None:
    engine = make_engine(model, alone.tokenizer, parallel=1, max_queue=2)
    app, prompts = make_guarded(engine, alone.tokenizer)
    try:
        waiting = [Listener(engine, request([5, 6], 2)) for _ in range(2)]
        response = post(app, CHAT, {"messages": MESSAGES})
        refused(response, 429, "2 requests")
        assert int(response.headers["retry-after"]) >= 1

        async def work(http: httpx.AsyncClient) -> None:
            with pytest.raises(openai.RateLimitError):
                await openai_client(http).chat.completions.create(
                    model="tiny_moe", messages=MESSAGES
                )  # type: ignore[arg-type]

        run(app, work)
        engine.start()
        for listener in waiting:
            listener.result()
        assert post(app, CHAT, {"messages": MESSAGES, "max_tokens": 1}).status_code == 200
    finally:
        engine.close()
        prompts.close()
    refused(post(app, CHAT, {"messages": MESSAGES}), 503)
    assert get(app, "/health").status_code == 503


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_far_too_long_prompt_is_never_encoded_as_one(
    model: Any, alone: Alone, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    kind = type(alone.tokenizer)
    call = kind.__call__

    def spy(self: Any, text: str, *args: Any, **how: Any) -> Any:
        seen.append(len(text))
        return call(self, text, *args, **how)

    monkeypatch.setattr(kind, "__call__", spy)
    engine = make_engine(model, alone.tokenizer)
    app, prompts = make_guarded(engine, alone.tokenizer)
    text = "x" * 200_000
    body = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    try:
        error = refused(post(app, path, body), 400, str(prompts.context))
    finally:
        prompts.close()
        engine.close()
    assert error["code"] == "context_length_exceeded"
    assert sum(seen) < 100_000


def test_a_long_prompt_that_fits_is_encoded_as_one(alone: Alone) -> None:
    prompts = Prompts(alone.tokenizer, directory=TINY, config=read_config(TINY), context=30_000)
    text = "Lists hold things. " * 3000
    try:
        ids = asyncio.run(prompts.of_prompt(text))
    finally:
        prompts.close()
    assert ids == tuple(alone.tokenizer(text)["input_ids"])
