"""The real thing: sockets, signals, disconnects, exit codes."""

from __future__ import annotations

import json
import random
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from openai import OpenAI
from process_support import CONTEXT, Server
from serve_support import WAIT_S, Alone

from offload.cli import main as entry
from offload.errors import OffloadError
from offload.serve.server import check_host

MESSAGES = [{"role": "user", "content": "What is a list?"}]
ENDLESS = {"prompt": "The list", "max_tokens": CONTEXT - 50, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server("--parallel", 2, cache=tmp_path_factory.mktemp("cache")) as running:
        yield running


def ask(url: str, text: str, new_tokens: int = 8) -> str:
    """A greedy answer by OpenAI's client."""
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(
            model="tiny_moe", prompt=text, max_tokens=new_tokens, temperature=0, stream=True
        )
        return "".join(part.choices[0].text for part in stream)


def send(server: Server, body: bytes) -> socket.socket:
    """Ask for a completion, and leave the answer to be read."""
    where = urlsplit(server.url)
    connection = socket.create_connection((where.hostname, where.port), WAIT_S)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection


def test_the_official_client_streams(server: Server, alone: Alone) -> None:
    assert ask(server.url, "The list", 12) == alone.answer(alone.ids("The list"), 12)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_place(server: Server, alone: Alone, stream: bool) -> None:
    """Both places are taken by long answers; then both clients hang up."""
    body = json.dumps(ENDLESS | {"stream": stream}).encode()
    before = server.stats()["requests"]["cancelled"]
    connections = [send(server, body) for _ in range(2)]
    server.until("active", 2)
    for connection in connections:
        if stream:
            assert connection.recv(15) == b"HTTP/1.1 200 OK"
        connection.close()
    server.until("cancelled", before + 2)
    assert ask(server.url, "The list") == alone.answer(alone.ids("The list"), 8)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_sends_no_more_gets_its_answer(
    server: Server, alone: Alone, stream: bool
) -> None:
    """It shuts down its writing side behind the request, as ``nc -N`` does, and behind two."""
    what = {"prompt": "The list", "max_tokens": 12, "temperature": 0, "stream": stream}
    body = json.dumps(what).encode()
    with send(server, body) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        said = connection.makefile("rb").read().decode()
    _, first, second = said.split("HTTP/1.1 200 OK\r\n")
    lines = [t.removeprefix("data: ") for t in first.splitlines() if '"choices"' in t]
    text = "".join(json.loads(line)["choices"][0]["text"] for line in lines)
    assert text == alone.answer(alone.ids("The list"), 12)
    assert second.endswith('{"status":"ok"}')


def test_a_crowd_of_which_half_misbehaves(server: Server, alone: Alone) -> None:
    """Eight threads: answers, disconnects, and bytes that are no requests."""
    expected = {text: alone.answer(alone.ids(text), 8) for text in ("The list", "A tuple", "for x")}
    where = urlsplit(server.url)
    before = server.stats()["requests"]
    broken = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"",
    ]

    def visit(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(3):
            text = chance.choice(list(expected))
            assert ask(server.url, text) == expected[text]
            with socket.create_connection((where.hostname, where.port), WAIT_S) as raw:
                raw.sendall(chance.choice(broken))
            with httpx.stream(
                "POST", f"{server.url}/v1/completions", json=ENDLESS, timeout=WAIT_S
            ) as response:
                assert response.status_code == 200
                next(response.iter_bytes())
            bad = httpx.post(f"{server.url}/v1/completions", json={"prompt": 7}, timeout=WAIT_S)
            assert bad.status_code == 400

    with ThreadPoolExecutor(8) as crowd:
        list(crowd.map(visit, range(8)))
    server.until("active", 0)
    after = server.stats()["requests"]
    assert after["failed"] == before["failed"]
    assert after["completed"] - before["completed"] == 24
    assert after["cancelled"] - before["cancelled"] == 24
    assert not [line for line in server.said if "Traceback" in line or "ERROR" in line]


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_large_gets_its_answer(server: Server, announced: bool) -> None:
    """A client that writes first and reads then sees why, and no reset connection."""
    piece = b" " * 2**20

    def pieces() -> Iterator[bytes]:
        for _ in range(24):
            yield piece

    content = b"".join(pieces()) if announced else pieces()
    response = httpx.post(
        f"{server.url}/v1/completions",
        content=content,
        headers={"Content-Type": "application/json"},
        timeout=WAIT_S,
    )
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


def test_it_ends_well(tmp_path: Path, alone: Alone) -> None:
    """What runs is finished, what comes is refused, the code is 0, the report is there."""
    report = tmp_path / "report.json"
    with Server("--parallel", 1, "--grace", 50, "--json", report, cache=tmp_path) as server:
        body = {"prompt": "The list", "max_tokens": 60, "temperature": 0, "stream": True}
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body, timeout=WAIT_S
        ) as response:
            lines = response.iter_lines()
            texts = [next(lines)]
            server.process.send_signal(signal.SIGTERM)
            texts += list(lines)
        assert server.process.wait(WAIT_S) == 0
    pieces = [json.loads(t[6:]) for t in texts if t.startswith("data: {")]
    text = "".join(piece["choices"][0]["text"] for piece in pieces)
    assert text == alone.answer(alone.ids("The list"), 60)
    assert texts[-2:] == ["data: [DONE]", ""]
    assert json.loads(report.read_text())["requests"]["completed"] == 1


def test_what_was_reused_is_said(tmp_path: Path) -> None:
    """A prompt that comes again whole is read at no speed, and counts among those answered."""
    more = ("--prompt-cache", tmp_path / "prompts", "--prompt-cache-chunk", 16)
    body = {"prompt": list(range(40)), "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    with Server(*more, cache=tmp_path) as server:
        found = [
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_S).json()
            for _ in range(2)
        ]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(WAIT_S) == 0
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in found]
    assert cached == [0, 40]
    assert found[0]["timings"]["prompt_tokens_per_s"] > 0
    assert found[1]["timings"]["prompt_tokens_per_s"] is None
    assert found[0]["choices"] == found[1]["choices"]
    assert "4 tokens from 80, 40 of them reused" in server.said[-1]


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    with Server("--parallel", 1, "--grace", 3600, cache=tmp_path) as server:
        ended = threading.Event()
        texts: list[str] = []

        def read() -> None:
            with httpx.stream(
                "POST", f"{server.url}/v1/completions", json=ENDLESS, timeout=WAIT_S
            ) as response:
                texts.extend(response.iter_lines())
            ended.set()

        reader = threading.Thread(target=read)
        reader.start()
        server.until("active", 1)
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(WAIT_S) == 0
        reader.join()
        assert ended.is_set()
        assert "shutting down" in texts[-2]


def test_refusals_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*words: str) -> str:
        assert entry.main(["serve", "-m", "nowhere", *words]) == 2
        (line,) = [n for n in capsys.readouterr().err.splitlines() if n.startswith("error:")]
        return line

    monkeypatch.delenv("OFFLOAD_API_KEY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port} cannot be listened on" in refused("--port", str(port))
    assert "--api-key" in refused("--host", "0.0.0.0")
    assert "--api-key" in refused("--host", "::")
    assert "no address" in refused("--host", "no.such.host.invalid")
    for key in ("", " ", " padded", "schlüssel", "日本", "two\nlines"):
        with pytest.raises(OffloadError, match="--api-key is empty"):
            check_host("127.0.0.1", [key])
    assert "--api-key is empty" in refused("--api-key", " ")
    assert "nowhere" in refused("--port", "0")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "offload[serve]" in refused("--port", "0")
