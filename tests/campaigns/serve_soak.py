"""A server that many clients use and misuse for minutes, and what is left of it.

    python tests/campaigns/serve_soak.py --model examples/tiny_moe --ram 96MiB --json soak.json

One server; its clients come in *pieces* of some minutes, each a process of its own (``--under``:
run it by that command, where a machine is shared). Clients ask, hang up in the middle of answers,
and send what is no request: broken JSON, wrong types, unknown fields, bodies that are too large.

Exit code 0: no error is the server's, every answer is the one that its prompt got alone, nothing is
left active, the server's memory did not grow over the second half, and it ended with code 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import httpx  # noqa: E402
import serve  # noqa: E402
from common import facts, settings  # noqa: E402

GROWTH_BYTES_PER_S = 4096
"""Of the server's resident memory over the second half; the noise of an allocator."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--ram")
    parser.add_argument("--pieces", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=120, help="of a piece")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--max-queue", type=int, default=64)
    parser.add_argument("--prefill-chunk", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--under", default="", help="a command that runs a piece, e.g. a lock")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--piece", help=argparse.SUPPRESS)
    parser.add_argument("--more", nargs=argparse.REMAINDER, default=[], help="for offload serve")
    return parser.parse_args()


async def one_piece(url: str, args: argparse.Namespace) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    args.soak = args.seconds
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        return await serve.soak(http, args)


async def watched(server: serve.Server, command: list[str]) -> dict[str, Any]:
    watching = asyncio.create_task(server.watch())
    piece = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    out, _ = await piece.communicate()
    watching.cancel()
    if piece.returncode:
        raise SystemExit(f"a piece ended with code {piece.returncode}")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def main() -> int:
    args = parse()
    if args.piece:
        print(json.dumps(asyncio.run(one_piece(args.piece, args))))
        return 0
    server = serve.Server(args)
    pieces = []
    began = time.monotonic()
    try:
        for number in range(args.pieces):
            own = [*sys.argv, "--seed", args.seed + 1000 * number, "--piece", server.url]
            words = [*args.under.split(), sys.executable, *own]
            pieces.append(asyncio.run(watched(server, [str(word) for word in words])))
            print(f"piece {number + 1}: {json.dumps(pieces[-1])}", file=sys.stderr, flush=True)
    finally:
        code = server.end()
    outcomes, ours = Counter[str](), Counter[str]()
    for piece in pieces:
        outcomes.update(piece["outcomes"])
        ours.update(piece["errors_of_ours"])
    slope = server.slope()
    result = {
        "settings": settings(args),
        "facts": facts(),
        "seconds": sum(piece["seconds"] for piece in pieces),
        "wall_s": time.monotonic() - began,
        "clients": args.clients,
        "outcomes": dict(outcomes),
        "errors_of_ours": dict(ours),
        "answers_unlike_alone": sum(piece["answers_unlike_alone"] for piece in pieces),
        "requests": pieces[-1]["requests"],
        "first_token_s": [piece["first_token_s"] for piece in pieces],
        "token_s": [piece["token_s"] for piece in pieces],
        "rss_bytes": {
            "first": server.rss[0][1],
            "half": server.rss[len(server.rss) // 2][1],
            "last": server.rss[-1][1],
            "most": max(n for _, n in server.rss),
        },
        "slope_bytes_per_s": slope,
        "exit_code": code,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    good = not ours and not result["answers_unlike_alone"] and code == 0
    return 0 if good and (slope or 0.0) < GROWTH_BYTES_PER_S else 1


if __name__ == "__main__":
    sys.exit(main())
