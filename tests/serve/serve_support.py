"""What the tests of the server share: a streamed model, requests, and what unmodified transformers
answers to the same."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from offload.blocks import Tier
from offload.cli.sampling import Sampling
from offload.models.load import Options, prepare
from offload.models.meta import read_config
from offload.serve.app import make_app
from offload.serve.engine import Engine, Handle
from offload.serve.events import Ended, Event, Failed, Piece, Request
from offload.serve.guard import Guard
from offload.serve.prompts import Prompts, body_limit

TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny_moe"
CONTEXT, CHUNK, PARALLEL = 160, 16, 3
WAIT_S = 120.0


def open_streaming(**more: Any) -> Any:
    """tiny_moe in a budget that has no room for half of its weights."""
    wish: dict[str, Any] = {"context": CONTEXT, "prompt_tokens": CHUNK, "sequences": PARALLEL}
    # Measured, what Python takes would differ from one test to the next.
    wish |= {"pass_rows": CHUNK, "overhead_bytes": 4 * 2**20, **more}
    least = prepare(TINY, Options(**wish)).minimum[Tier.RAM]
    prepared = prepare(TINY, Options(ram=least + 2**20, **wish))
    ram = prepared.plan.tiers[Tier.RAM]
    held = ram.pinned_bytes + ram.ring_bytes + ram.slots * ram.slot_bytes
    assert held < prepared.plan.weight_bytes / 2, (held, prepared.plan.weight_bytes)
    return prepared.open()


class Alone:
    """The reference: one prompt at a time, all weights resident, no code of ours."""

    def __init__(self) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            TINY, dtype="auto", experts_implementation="eager"
        ).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(TINY)

    def chat_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        ids: list[int] = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=False
        )
        return ids

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def answer(self, ids: Sequence[int], new_tokens: int, **how: Any) -> str:
        """``how``: ``seed`` with ``temperature`` and the like; greedy without."""
        seed = how.pop("seed", None)
        sampled = {"do_sample": True, "top_k": 0, **how} if how else {"do_sample": False}
        if seed is not None:
            torch.manual_seed(seed)
        given = torch.tensor([list(ids)])
        out = self._model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=new_tokens,
            prefill_chunk_size=CHUNK,
            **sampled,
        )
        text: str = self.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)
        return text


class Listener:
    """The events of one request, waited for."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._events: queue.Queue[Event] = queue.Queue()
        self.handle: Handle = engine.submit(request, self._events.put)

    def next(self) -> Event:
        return self._events.get(timeout=WAIT_S)

    def result(self) -> tuple[str, Ended | Failed]:
        text = ""
        while isinstance(event := self.next(), Piece):
            text += event.text
        return text, event


def request(ids: Sequence[int], new_tokens: int = 8, client: str = "a", **more: Any) -> Request:
    settings: dict[str, Any] = {"sampling": Sampling(), "ignore_eos": True, **more}
    return Request(client=client, prompt=tuple(ids), new_tokens=new_tokens, **settings)


def make_engine(
    model: Any, tokenizer: Any, *, parallel: int = PARALLEL, max_queue: int = 64
) -> Engine:
    return Engine(
        model,
        tokenizer=tokenizer,
        parallel=parallel,
        max_queue=max_queue,
        prefill_chunk=CHUNK,
        tiers={"RAM": {"weights": 1000}, "disk": {"weights": 2000}},
    )


def make_guarded(
    engine: Engine,
    tokenizer: Any,
    keys: Sequence[str] = (),
    name: str = "tiny_moe",
    settings: Mapping[str, Any] | None = None,
) -> tuple[Guard, Prompts]:
    prompts = Prompts(
        tokenizer, directory=TINY, config=read_config(TINY), context=CONTEXT, settings=settings
    )
    app = make_app(engine, prompts, model=name)
    return Guard(app, keys=keys, body_limit=body_limit(CONTEXT), local_only=not keys), prompts


def http_client(
    app: Any, key: str | None = None, base: str = "http://localhost"
) -> httpx.AsyncClient:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url=base, headers=headers, timeout=WAIT_S
    )


def openai_client(http: httpx.AsyncClient, key: str = "none") -> AsyncOpenAI:
    return AsyncOpenAI(base_url="http://localhost/v1", api_key=key, http_client=http, max_retries=0)


def run(app: Any, work: Callable[[httpx.AsyncClient], Awaitable[Any]], **how: Any) -> Any:
    """``work`` with a client of the application."""

    async def main() -> Any:
        async with http_client(app, **how) as http:
            return await work(http)

    return asyncio.run(main())


def post(app: Any, path: str, body: Any, **how: Any) -> httpx.Response:
    async def work(http: httpx.AsyncClient) -> httpx.Response:
        return await http.post(path, json=body)

    found: httpx.Response = run(app, work, **how)
    return found


def get(app: Any, path: str, **how: Any) -> httpx.Response:
    async def work(http: httpx.AsyncClient) -> httpx.Response:
        return await http.get(path)

    found: httpx.Response = run(app, work, **how)
    return found


def refused(response: httpx.Response, status: int, *words: str) -> dict[str, Any]:
    """Check OpenAI's shape of an error; returns it."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    for word in words:
        assert word in error["message"], error
    return error
