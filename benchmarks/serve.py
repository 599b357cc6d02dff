"""``offload serve`` under load: latencies, throughput, errors, memory over time.

    python benchmarks/serve.py --model MODEL --rates 0.5 1 2
    python benchmarks/serve.py --model MODEL --soak 600 --clients 16

Load is open loop: requests arrive at the given mean rates (Poisson), whether or not earlier ones
have been answered, so that a server that falls behind shows it. A latency is counted from when the
request was due, not from when the client came to send it (Tene's "coordinated omission").

The soak has clients that ask, hang up in the middle, and send what is no request. Errors that are
ours are counted, every answer is compared with the one that the same prompt got alone, and the
growth of the server's memory over the second half is a slope.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from common import facts, record, settings

PROMPTS = (
    "What is a list?", "The interpreter", "for x in range(10):", "How do I open a file?",
    "A class has", "Modules are", "Exceptions that are raised", "The function returns",
)  # fmt: skip
BROKEN: tuple[tuple[bytes, int], ...] = (
    (b"{", 400), (b'{"prompt": 7}', 400), (b'{"prompt": "x", "max_token": 3}', 400),
    (b'{"prompt": "x", "n": 2}', 400), (b" " * 2**23, 413),
)  # fmt: skip
JSON = {"Content-Type": "application/json"}
RSS_EVERY_S = 1.0


@dataclass
class Seen:
    """What the clients of one run have measured; seconds."""

    first_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    tokens: int = 0


class Server:
    """The server as a process, with its memory over time."""

    def __init__(self, args: argparse.Namespace) -> None:
        command = [
            sys.executable, "-m", "offload", "serve", "-m", args.model, "--port", "0",
            "-c", args.context, "--parallel", args.parallel, "--max-queue", args.max_queue,
            "--prefill-chunk", args.prefill_chunk, *args.more,
        ]  # fmt: skip
        if args.ram is not None:
            command += ["--ram", args.ram]
        self._process = subprocess.Popen(
            [str(word) for word in command], stderr=subprocess.PIPE, text=True
        )
        self.rss: list[tuple[float, int]] = []
        self.url = ""
        lines: list[str] = []
        if self._process.stderr is None:
            raise AssertionError("it is a pipe")
        for line in self._process.stderr:
            lines.append(line)
            if line.startswith("listening on: "):
                self.url = line.removeprefix("listening on: ").strip()
                return
        raise SystemExit("the server did not start:\n" + "".join(lines))

    async def watch(self) -> None:
        """Note the resident bytes until cancelled."""
        statm = Path(f"/proc/{self._process.pid}/statm")
        page = os.sysconf("SC_PAGE_SIZE")
        while True:
            self.rss.append((time.monotonic(), int(statm.read_text().split()[1]) * page))
            await asyncio.sleep(RSS_EVERY_S)

    def end(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        # Read on: a full pipe would keep it from ending.
        self._process.communicate(timeout=120)
        return self._process.returncode

    def slope(self) -> float | None:
        """Bytes per second over the second half; None for too few samples."""
        late = self.rss[len(self.rss) // 2 :]
        if len(late) < 3:
            return None
        times, sizes = [t - late[0][0] for t, _ in late], [n for _, n in late]
        return statistics.linear_regression(times, sizes).slope


async def ask(
    http: httpx.AsyncClient, body: dict[str, Any], seen: Seen, due: float, leave: int | None = None
) -> str | None:
    """One streamed answer; with ``leave``, hang up after so many pieces. None: there is none."""
    text, last, pieces = "", due, 0
    try:
        async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            if response.status_code != 200:
                seen.outcomes[str(response.status_code)] += 1
                return None
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                data = json.loads(line[6:])
                if "error" in data:
                    seen.outcomes["failed"] += 1
                    return None
                choice = data["choices"][0]
                if choice["finish_reason"] is not None:
                    seen.whole_s.append(time.monotonic() - due)
                    seen.outcomes["answered"] += 1
                    return text
                now = time.monotonic()
                (seen.token_s if pieces else seen.first_s).append(now - last)
                text, last, pieces = text + choice["text"], now, pieces + 1
                seen.tokens += 1
                if leave is not None and pieces >= leave:
                    seen.outcomes["hung up"] += 1
                    return None
    except httpx.HTTPError as error:
        seen.outcomes[type(error).__name__] += 1
        return None
    seen.outcomes["cut off"] += 1
    return None


async def load(http: httpx.AsyncClient, rate: float, args: argparse.Namespace) -> dict[str, Any]:
    """Open loop at ``rate`` requests per second."""
    chance, seen, tasks = random.Random(args.seed), Seen(), []
    began = due = time.monotonic()
    while (due := due + chance.expovariate(rate)) < began + args.seconds:
        if (wait := due - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        body = {"prompt": chance.choice(PROMPTS), **_how(args)}
        tasks.append(asyncio.create_task(ask(http, body, seen, due)))
    await asyncio.gather(*tasks)
    took = time.monotonic() - began
    return {
        "rate_per_s": rate,
        "requests": len(tasks),
        "outcomes": dict(seen.outcomes),
        "answers_per_s": seen.outcomes["answered"] / took,
        "tokens_per_s": seen.tokens / took,
        "first_token_s": percentiles(seen.first_s),
        "token_s": percentiles(seen.token_s),
        "answer_s": percentiles(seen.whole_s),
    }


async def soak(http: httpx.AsyncClient, args: argparse.Namespace) -> dict[str, Any]:
    """Many clients for a while, some of which misbehave."""
    seen, ours, wrong = Seen(), Counter[str](), 0
    alone: dict[str, str | None] = {}
    for prompt in PROMPTS:
        alone[prompt] = await ask(http, {"prompt": prompt, **_how(args)}, Seen(), time.monotonic())
    end = time.monotonic() + args.soak

    async def client(number: int) -> None:
        nonlocal wrong
        chance = random.Random(args.seed + number)
        while time.monotonic() < end:
            what, prompt = chance.random(), chance.choice(PROMPTS)
            body = {"prompt": prompt, **_how(args)}
            if what < 0.6:
                text = await ask(http, body, seen, time.monotonic())
                wrong += text is not None and text != alone[prompt]
            elif what < 0.8:
                await ask(http, body, seen, time.monotonic(), leave=chance.randint(1, 5))
            else:
                content, status = chance.choice(BROKEN)
                reply = await http.post("/v1/completions", content=content, headers=JSON)
                seen.outcomes[f"malformed {reply.status_code}"] += 1
                ours["wrong status"] += reply.status_code != status

    await asyncio.gather(*(client(i) for i in range(args.clients)))
    stats = (await http.get("/stats")).json()
    known = ("answered", "hung up", "429")
    for outcome, count in seen.outcomes.items():
        if outcome not in known and not outcome.startswith("malformed 4"):
            ours[outcome] += count
    ours["left active"] = stats["requests"]["active"] + stats["requests"]["queued"]
    return {
        "clients": args.clients,
        "seconds": args.soak,
        "outcomes": dict(seen.outcomes),
        "errors_of_ours": {k: n for k, n in ours.items() if n},
        "answers_unlike_alone": wrong,
        "first_token_s": percentiles(seen.first_s),
        "token_s": percentiles(seen.token_s),
        "requests": stats["requests"],
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    ranked = sorted(values)
    return {f"p{p}": ranked[min(len(ranked) - 1, len(ranked) * p // 100)] for p in (50, 90, 95, 99)}


def _how(args: argparse.Namespace) -> dict[str, Any]:
    return {"max_tokens": args.new_tokens, "temperature": 0, "ignore_eos": True}


async def run(args: argparse.Namespace, server: Server) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as http:
        watching = asyncio.create_task(server.watch())
        await ask(http, {"prompt": PROMPTS[0], **_how(args)}, Seen(), 0.0)  # kernels are warm
        if args.soak:
            result: dict[str, Any] = {"soak": await soak(http, args)}
        else:
            result = {"load": [await load(http, rate, args) for rate in args.rates]}
        watching.cancel()
        stats = (await http.get("/stats")).json()
    rss = [n for _, n in server.rss]
    result["memory"] = {
        "budget_bytes": stats["memory"]["budget_bytes"],
        "baseline_bytes": stats["memory"]["baseline_bytes"],
        "rss_bytes": {"first": rss[0], "last": rss[-1], "most": max(rss)},
        "slope_bytes_per_s": server.slope(),
    }
    result["weights"] = stats["weights"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--ram", help="of the server")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--max-queue", type=int, default=64)
    parser.add_argument("--prefill-chunk", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rates", type=float, nargs="*", default=[0.5, 1, 2])
    parser.add_argument("--seconds", type=float, default=60, help="of arrivals, for each rate")
    parser.add_argument("--soak", type=float, default=0, help="seconds; instead of load")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--more", nargs=argparse.REMAINDER, default=[], help="for offload serve")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    server = Server(args)
    try:
        result = asyncio.run(run(args, server))
    finally:
        code = server.end()
    result["exit_code"] = code
    result = {"settings": settings(args), "facts": facts(), **result}
    name = "serve-soak" if args.soak else "serve"
    print(json.dumps(result, indent=1))
    print(record(name, result, args.output))


if __name__ == "__main__":
    main()
