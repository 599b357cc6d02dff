"""The routes, by OpenAI's own client and by hand, in this process."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from serve_support import (
    CONTEXT,
    Alone,
    get,
    make_engine,
    make_guarded,
    openai_client,
    post,
    refused,
    run,
)

from offload.serve.engine import Engine
from offload.serve.schema import ChatBody, CompletionBody

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "What is a list?"}]


@pytest.fixture(scope="module")
def served(model: Any, alone: Alone) -> Iterator[tuple[Any, Engine]]:
    engine = make_engine(model, alone.tokenizer)
    engine.start()
    app, prompts = make_guarded(engine, alone.tokenizer)
    yield app, engine
    engine.close()
    prompts.close()


def test_eight_at_once_answer_as_if_alone(served: Any, alone: Alone) -> None:
    app, _ = served

    async def work(http: httpx.AsyncClient) -> list[str]:
        client = openai_client(http)

        async def whole(i: int) -> str:
            done = await client.chat.completions.create(
                model="tiny_moe", messages=MESSAGES, max_tokens=10, temperature=0.9, top_p=1, seed=i
            )
            assert done.usage is not None
            assert done.usage.prompt_tokens == len(alone.chat_ids(MESSAGES))
            return done.choices[0].message.content or ""

        async def streamed(i: int) -> str:
            stream = await client.completions.create(
                model="tiny_moe", prompt=f"The list {i}", max_tokens=10, temperature=0, stream=True
            )
            return "".join([part.choices[0].text async for part in stream])

        return await asyncio.gather(*(whole(i) if i % 2 else streamed(i) for i in range(8)))

    for i, text in enumerate(run(app, work)):
        if i % 2:
            expected = alone.answer(
                alone.chat_ids(MESSAGES), 10, temperature=0.9, top_p=1.0, seed=i
            )
        else:
            expected = alone.answer(alone.ids(f"The list {i}"), 10)
        assert text == expected


def test_a_stream_ends_with_its_usage(served: Any, alone: Alone) -> None:
    app, _ = served

    async def work(http: httpx.AsyncClient) -> list[Any]:
        stream = await openai_client(http).chat.completions.create(
            model="tiny_moe",
            messages=MESSAGES,
            max_completion_tokens=7,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        return [part async for part in stream]

    parts = run(app, work)
    assert parts[0].choices[0].delta.role == "assistant"
    assert [p.choices[0].finish_reason for p in parts[:-1]][-1] == "length"
    text = "".join(p.choices[0].delta.content or "" for p in parts[:-1])
    assert text == alone.answer(alone.chat_ids(MESSAGES), 7)
    usage = parts[-1].usage
    assert parts[-1].choices == []
    assert (usage.completion_tokens, usage.total_tokens) == (7, usage.prompt_tokens + 7)


def test_lines_of_a_stream(served: Any) -> None:
    app, _ = served
    body = {"prompt": [40, 41], "max_tokens": 3, "stream": True, "ignore_eos": True}
    response = post(app, "/v1/completions", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    last = json.loads(lines[-2].removeprefix("data: "))
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["timings"]["first_token_s"] > 0


def test_a_stop_sequence_ends_before_itself(served: Any, alone: Alone) -> None:
    app, _ = served
    full = alone.answer(alone.ids("The list"), 24)
    stop = full[8:12]
    body = {"prompt": "The list", "max_tokens": 24, "temperature": 0, "stop": [stop, "\0"]}
    choice = post(app, "/v1/completions", body).json()["choices"][0]
    assert choice == {
        "index": 0, "text": full[: full.index(stop)], "finish_reason": "stop", "logprobs": None
    }  # fmt: skip


def test_what_answers_carry(served: Any) -> None:
    app, _ = served
    answer = post(app, CHAT, {"messages": MESSAGES, "max_tokens": 4}).json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny_moe"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    timings = answer["timings"]
    assert timings["queue_s"] >= 0
    assert timings["first_token_s"] > 0
    # An answer is what the next question is asked after, as a client keeps it.
    more = [*MESSAGES, answer["choices"][0]["message"], {"role": "user", "content": "Why?"}]
    assert post(app, CHAT, {"messages": more, "max_tokens": 2}).status_code == 200
    parts = [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, *MESSAGES]
    assert post(app, CHAT, {"messages": parts, "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": MESSAGES, "max_token": 3}, "max_token"),
        (CHAT, {"messages": MESSAGES, "max_tokens": "3"}, "max_tokens"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        (CHAT, {"messages": MESSAGES, "n": 2}, "n"),
        (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"messages": MESSAGES, "temperature": True}, "temperature"),
        (CHAT, {"messages": MESSAGES, "temperature": -1}, "temperature"),
        (CHAT, {"messages": MESSAGES, "top_p": 0}, "top_p"),
        (CHAT, {"messages": MESSAGES, "seed": 2**63}, "seed"),
        (CHAT, {"messages": MESSAGES, "stop": ""}, "stop.0"),
        (CHAT, {"messages": MESSAGES, "stop": 7}, "stop"),
        (CHAT, {"messages": MESSAGES, "stream": "yes"}, "stream"),
        (CHAT, {"messages": MESSAGES, "stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "Hello"}, "messages"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages.0.content"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages.0.mood"),
        (CHAT, {}, "messages"),
        ("/v1/completions", {"prompt": ["one", "two"]}, "prompt"),
        ("/v1/completions", {"prompt": [1, -1]}, "prompt"),
        ("/v1/completions", {"prompt": [10**6]}, "prompt"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": "x", "echo": True}, "echo"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_body_is_named(
    served: Any, path: str, body: dict[str, Any], param: str
) -> None:
    app, _ = served
    error = refused(post(app, path, body), 400)
    assert error["param"] == param
    assert "at most 0" not in error["message"]


@pytest.mark.parametrize(
    ("path", "more", "message"),
    [
        (CHAT, {"n": 2}, "n: this server takes only 1 here, not 2"),
        (CHAT, {"logprobs": True}, "logprobs: this server takes only false here, not true"),
        (CHAT, {"response_format": {"type": "json_object"}},
         'response_format.type: this server takes only "text" here, not "json_object"'),
        (CHAT, {"tools": [{"type": "function"}]},
         "tools: this server does not do that; leave it out"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]},
         "messages.0.content: only text is understood: no images, audio or files"),
        ("/v1/completions", {"logprobs": 2},
         "logprobs: this server does not do that; leave it out"),
        ("/v1/completions", {"service_tier": "x" * 99},
         "service_tier: this server knows no such field"),
        (CHAT, {"service_tier": "x" * 99},
         'service_tier: this server takes only "auto" or "default" here, not "' + "x" * 38 + "…"),
    ],
)  # fmt: skip
def test_what_is_not_done_is_said_in_words(
    served: Any, path: str, more: dict[str, Any], message: str
) -> None:
    app, _ = served
    asked = {"messages": MESSAGES} if path == CHAT else {"prompt": "x"}
    assert refused(post(app, path, asked | more), 400)["message"] == message


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000, b'{"prompt": NaN}',
     b'{"prompt": "\\ud800"}', b'{"prompt": "x", "stop": "\\udfff"}',
     b'{"prompt": "x", "temperature": 1e999}'],
)  # fmt: skip
def test_what_is_no_body_at_all(served: Any, content: bytes) -> None:
    app, engine = served
    kind = {"Content-Type": "application/json"}
    send = lambda http: http.post("/v1/completions", content=content, headers=kind)  # noqa: E731
    refused(run(app, send), 400)
    assert engine.state == "ok"


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"{", "not JSON: Expecting property name"), (b"\xc3(", "not UTF-8 text (byte 0)"),
     (b"[" * 100_000, "nested too deeply"), (b'{"prompt": ' + b"1" * 5000 + b"}", "digits"),
     (b'{"prompt": "x", "n": 1, "prompt": "y"}', "prompt: it stands there twice"),
     (b"[1]", "the body: it should be a JSON object, not [1]"),
     (b'{"prompt": "x", "stream_options": {"a": 1, "a": 2}}', "a: it stands there twice")],
)  # fmt: skip
def test_why_a_body_cannot_be_read(served: Any, content: bytes, said: str) -> None:
    app, _ = served
    kind = {"Content-Type": "application/json"}
    send = lambda http: http.post("/v1/completions", content=content, headers=kind)  # noqa: E731
    refused(run(app, send), 400, said)


def test_a_null_asks_for_nothing(served: Any) -> None:
    """Clients send all fields of their classes, also those of a newer interface."""
    app, _ = served
    said = [*MESSAGES, {"role": "assistant", "content": "It", "reasoning_content": None}]
    body = {
        "messages": [*said, *MESSAGES], "max_tokens": 2, "prediction": None, "web_search": None,
        "verbosity": "medium", "reasoning_effort": None,
    }  # fmt: skip
    assert post(app, CHAT, body).status_code == 200
    for kind, least in ((ChatBody, {"messages": MESSAGES}), (CompletionBody, {"prompt": "x"})):
        known = dict.fromkeys(kind.model_fields.keys() - least.keys())
        assert kind.model_validate(known | least) == kind.model_validate(least)


def test_settings_of_the_chat_template(
    served: Any, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, engine = served

    def prompt_tokens(**more: Any) -> int:
        answer = post(app, CHAT, {"messages": MESSAGES, "max_tokens": 1, **more})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens"])

    kwargs: Any = {"enable_thinking": False}
    error = refused(
        post(app, CHAT, {"messages": MESSAGES, "reasoning_effort": "low"}), 400,
        "knows no such setting",
    )  # fmt: skip
    assert error["param"] == "chat_template_kwargs"
    more = (
        "{{ reasoning_effort | default('') }}{% if not enable_thinking | default(true) %}"
        "<think>{% endif %}"
    )
    before = str(alone.tokenizer.chat_template)
    monkeypatch.setattr(alone.tokenizer, "chat_template", before + more)
    plain = prompt_tokens()
    assert plain == len(alone.chat_ids(MESSAGES))
    low = prompt_tokens(reasoning_effort="low")
    assert low > plain
    assert prompt_tokens(chat_template_kwargs={"reasoning_effort": "low"}) == low
    assert prompt_tokens(chat_template_kwargs=kwargs) > plain
    both = {"messages": MESSAGES, "reasoning_effort": "low",
            "chat_template_kwargs": {"reasoning_effort": "high"}}  # fmt: skip
    refused(post(app, CHAT, both), 400, "contradict")
    # Some templates write who speaks.
    own = "{% for m in messages %}{{ m.name | default(m.role) }}: {{ m.content }}{% endfor %}"
    monkeypatch.setattr(alone.tokenizer, "chat_template", own)
    named = [message | {"name": "A name of several words"} for message in MESSAGES]
    assert prompt_tokens(messages=named) == len(alone.chat_ids(named)) > prompt_tokens()
    monkeypatch.setattr(alone.tokenizer, "chat_template", before + more)
    # The server's own settings hold where a request has none.
    served_so, prompts = make_guarded(engine, alone.tokenizer, settings=kwargs)
    try:
        body = {"messages": MESSAGES, "max_tokens": 1}
        got = post(served_so, CHAT, body).json()["usage"]["prompt_tokens"]
        assert got == prompt_tokens(chat_template_kwargs=kwargs)
        off = {"chat_template_kwargs": {"enable_thinking": True}}
        assert post(served_so, CHAT, body | off).json()["usage"]["prompt_tokens"] == plain
    finally:
        prompts.close()


def test_what_is_switched_off_is_off() -> None:
    """Whatever the checkpoint says; what is left out is as the checkpoint says."""

    def in_force(**asked: Any) -> tuple[int, float, float]:
        body = CompletionBody(prompt="x", temperature=1.0, seed=0, **asked)
        settings = SimpleNamespace(temperature=0.6, top_k=20, top_p=0.9, min_p=0.1)
        body.sampling(0.0).apply(settings, 2048)
        return settings.top_k, settings.top_p, settings.min_p

    with torch.random.fork_rng(devices=[]):
        assert in_force() == (20, 0.9, 0.1)
        assert in_force(top_k=0, top_p=1, min_p=0) == (0, 1.0, 0.0)
        assert in_force(top_k=2048)[0] == 0, "all of them"
        assert in_force(top_k=2047)[0] == 2047


def test_a_value_that_is_no_text_is_refused_and_repeated(served: Any) -> None:
    """JSON can escape half of a surrogate pair, which no encoding has."""
    app, _ = served
    kind = {"Content-Type": "application/json"}
    content = b'{"prompt": "x", "n": {"\\ud800": 1}}'
    send = lambda http: http.post("/v1/completions", content=content, headers=kind)  # noqa: E731
    refused(run(app, send), 400, "takes only 1 here", "\ud800")


def test_a_name_that_is_no_text(served: Any, alone: Alone) -> None:
    """A directory may be called what is no UTF-8; clients hear of it and can ask for it."""
    name = os.fsdecode(b"caf\xe9")
    app, prompts = make_guarded(served[1], alone.tokenizer, name=name)
    try:
        (described,) = get(app, "/v1/models").json()["data"]
        assert described["id"] == name
        body = {"prompt": "The list", "max_tokens": 2, "model": name}
        content = json.dumps(body).encode()  # escapes it
        kind = {"Content-Type": "application/json"}
        send = lambda http: http.post("/v1/completions", content=content, headers=kind)  # noqa: E731
        assert run(app, send).json()["model"] == name
        lines = post(app, "/v1/completions", {"prompt": "x", "max_tokens": 1, "stream": True})
        assert json.loads(lines.text.split("\n\n")[0].removeprefix("data: "))["model"] == name
        assert get(app, "/stats").json()["model"] == name
        refused(get(app, "/v1/models/other"), 404)
        refused(post(app, "/v1/completions", {"prompt": "x", "model": "gpt"}), 404, "caf")
    finally:
        prompts.close()


def test_other_refusals(served: Any) -> None:
    app, _ = served
    refused(post(app, CHAT, {"messages": MESSAGES, "model": "gpt"}), 404, "gpt", "tiny_moe")
    refused(get(app, "/chat/completions"), 404, "/chat/completions", "/v1")
    refused(get(app, "/" + "x" * 2000), 404, "xx…")
    assert refused(get(app, CHAT), 405, CHAT, "POST")["message"].count("POST") == 1
    error = refused(
        post(app, "/v1/completions", {"prompt": [7] * (CONTEXT + 3)}),
        400, str(CONTEXT + 3), str(CONTEXT),
    )  # fmt: skip
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    long = {"prompt": [7] * 10, "max_tokens": CONTEXT}
    refused(post(app, "/v1/completions", long), 400, "10", str(CONTEXT + 10), str(CONTEXT))
    huge = {"prompt": "x" * 2**21}
    refused(post(app, "/v1/completions", huge), 413, str(2**18))
    plain = lambda http: http.post(CHAT, content=b"{}", headers={"Content-Type": "text/plain"})  # noqa: E731
    refused(run(app, plain), 415, "text/plain")
    packed = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    body = gzip.compress(json.dumps({"messages": MESSAGES}).encode())
    refused(run(app, lambda http: http.post(CHAT, content=body, headers=packed)), 415, "gzip")
    refused(get(app, "/health", base="http://rebound.example"), 403, "rebound.example")


def test_a_body_without_a_length_is_cut_off(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    app, _ = served
    monkeypatch.setattr("offload.serve.guard.LINGER_BYTES", 2**20)
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        while sent < 100:
            sent += 1
            yield b" " * 2**16

    async def work(http: httpx.AsyncClient) -> httpx.Response:
        kind = {"Content-Type": "application/json"}
        return await http.post(CHAT, content=endless(), headers=kind)

    refused(run(app, work), 413)
    assert sent < 40  # 256 KiB are taken, 1 MiB thrown away, the rest never asked for


@pytest.mark.parametrize(
    "path", ["/", "/health", "/stats", "/metrics", "/v1/models", "/v1/models/tiny_moe"]
)
def test_what_can_be_read_can_be_asked_after(served: Any, path: str) -> None:
    app, _ = served
    head = run(app, lambda http: http.head(path))
    assert (head.status_code, head.headers["content-type"]) == (
        200, get(app, path).headers["content-type"],
    )  # fmt: skip


def test_models_figures_and_page(served: Any) -> None:
    app, engine = served
    post(app, CHAT, {"messages": MESSAGES, "max_tokens": 3})
    assert [m["id"] for m in get(app, "/v1/models").json()["data"]] == ["tiny_moe"]
    assert get(app, "/v1/models/tiny_moe").json()["object"] == "model"
    refused(get(app, "/v1/models/other"), 404)
    stats = get(app, "/stats").json()
    assert stats["tiers"]["disk"] == {"weights": 2000}
    assert stats["requests"]["active"] == 0
    lines = get(app, "/metrics").text.splitlines()
    figures = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(figures['offload_tokens_total{kind="generated"}']) == stats["tokens"]["generated"]
    assert figures['offload_tier_bytes{tier="RAM",part="weights"}'] == "1000"
    count = figures["offload_token_seconds_count"]
    assert figures['offload_token_seconds_bucket{le="+Inf"}'] == count
    assert int(count) > 0
    page = get(app, "/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http://" not in page.text
    assert "https://" not in page.text
    assert engine.state == "ok"


def test_a_model_without_a_template(
    served: Any, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, _ = served
    monkeypatch.setattr(alone.tokenizer, "chat_template", None)
    refused(post(app, CHAT, {"messages": MESSAGES}), 400, "/v1/completions")
