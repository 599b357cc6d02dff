"""One run of ``serve``: plan, load, serve, report."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.blocks import Tier
from offload.cli import console, decode, output, report, session, view
from offload.cli.chat_session import chat_context
from offload.cli.planning import Wanted, context_limit, find_model, make_plan
from offload.cli.signals import raise_received, signals_wait
from offload.cli.template import check_settings
from offload.cli.threads import use_threads
from offload.models.meta import model_class, read_config
from offload.models.naming import model_name
from offload.models.pieces import why_not_in_pieces
from offload.models.prepared import Prepared
from offload.runtime.heap import share_one_heap
from offload.scheduler.plan import Plan

# Before anything is measured: what a server weighs is the bare process's.
from offload.serve import server
from offload.serve.app import make_app
from offload.serve.bodies import PYTHON_BYTES
from offload.serve.engine import Engine
from offload.serve.guard import Guard
from offload.serve.prompts import Prompts, body_limit

HTTP_BYTES = 4 << 20
"""What the server grows by with its first requests: 2 to 5 MiB were seen, with 1 to 8 clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The flags of ``serve``."""

    model: str
    quant: str | None
    host: str
    port: int
    keys: tuple[str, ...]
    template: Mapping[str, Any]
    context: int | None
    parallel: int
    max_queue: int
    prefill_chunk: int
    grace_s: float
    wanted: Wanted
    json_file: Path | None
    verbose: bool


def run_serve(wish: Wish) -> None:
    """Plan, load, serve until a signal comes, report.

    Raises:
        OffloadError: anything for the user to change.
    """
    # The engine computes on a thread of its own: on a heap of its own it would keep what the main
    # thread's has free already, 6 MiB of 30 with a small model.
    share_one_heap()
    local = server.check_host(wish.host, wish.keys)
    with server.listen(wish.host, wish.port) as listening:
        _run(wish, listening, local)


def _run(wish: Wish, listening: socket.socket, local: bool) -> None:
    options = wish.wanted.options()
    options.sequences, options.pass_rows = wish.parallel, wish.prefill_chunk
    options.in_pieces = True
    use_threads(wish.wanted.threads)
    directory = find_model(wish.model, wish.quant, wish.wanted.kernels)
    name = model_name(directory)
    config = read_config(directory)
    decode.check_can_generate(model_class(config), name)
    tokenizer, tokenizer_bytes = session.measured_tokenizer(directory)
    check_settings(wish.template, tokenizer, directory)
    context = chat_context(wish.context, None, context_limit(config))
    chunk = min(wish.prefill_chunk, context)
    options.caller_bytes = HTTP_BYTES + PYTHON_BYTES * body_limit(context)
    prepared = make_plan(
        directory, wish.wanted, options,
        prompt_tokens=chunk, context=context, tokenizer_bytes=tokenizer_bytes,
    )  # fmt: skip
    if chunk < context and (why := why_not_in_pieces(prepared.meta.model)) is not None:
        console.note(f"prompts are read whole, whatever --prefill-chunk says: {why}")
        prepared = make_plan(
            directory, wish.wanted, options,
            prompt_tokens=context, context=context, tokenizer_bytes=tokenizer_bytes,
        )  # fmt: skip
    view.show_summary(console.err(), prepared)
    with signals_wait():
        model = session.open_model(prepared)
        try:
            session.say_kernel_error(prepared, model)
            session.say_lost_stops(model, tokenizer)
            prompts = Prompts(
                tokenizer,
                directory=directory,
                config=config,
                context=context,
                settings=wish.template,
            )
            engine = Engine(
                model,
                tokenizer=tokenizer,
                parallel=wish.parallel,
                max_queue=wish.max_queue,
                prefill_chunk=wish.prefill_chunk,
                tiers=tier_bytes(prepared.plan),
            )
            app = Guard(
                make_app(engine, prompts, model=name),
                keys=wish.keys,
                body_limit=body_limit(context),
                local_only=local,
            )
            raise_received()
            engine.start()
            try:
                server.run(
                    app,
                    engine,
                    listening,
                    grace_s=wish.grace_s,
                    started=lambda: console.note(server.url(listening), "listening on"),
                    verbose=wish.verbose,
                )
            finally:
                engine.close()
                prompts.close()
                stats, end = engine.stats(), model.offload.stats()
        finally:
            session.close_model(prepared, model)
    _report(wish, prepared, stats, end)


def tier_bytes(plan: Plan) -> dict[str, dict[str, int]]:
    """What the plan keeps in each tier, by what it is."""
    found: dict[str, dict[str, int]] = {}
    for tier in sorted(plan.tiers, reverse=True):
        layout = plan.tiers[tier]
        parts = {
            "weights": layout.pinned_bytes,
            "ring": layout.ring_bytes,
            "expert slots": layout.slots * layout.slot_bytes,
            **plan.reserves.get(tier, {}),
        }
        found["RAM" if tier is Tier.RAM else "device"] = {k: n for k, n in parts.items() if n}
    held = sum(
        n
        for parts in found.values()
        for name, n in parts.items()
        if name in ("weights", "ring", "expert slots")
    )
    found["disk"] = {"weights": max(0, plan.weight_bytes - held)}
    return found


def _report(wish: Wish, prepared: Prepared, stats: dict[str, Any], end: dict[str, Any]) -> None:
    requests, tokens = stats["requests"], stats["tokens"]
    said = [
        f"{requests['completed']} answers",
        f"{requests['cancelled']} cancelled, {requests['rejected']} refused, "
        f"{requests['failed']} failed",
        f"{tokens['generated']} tokens from {tokens['prompt'] + tokens['reused']}"
        + (f", {tokens['reused']} of them reused" if tokens["reused"] else ""),
        report.memory_text(end),
    ]
    console.note(" · ".join(said), "stats")
    output.write_json(
        wish.json_file,
        {**stats, **report.surroundings(end, prepared, {}, torch.get_num_threads())},
    )
