"""What a run did, in one line and as JSON."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping
from typing import Any, Protocol

from offload.cli.decode import Run
from offload.cli.view import goes_up, plan_json, streams
from offload.models.prepared import Prepared
from offload.scheduler.plan import Plan
from offload.units import format_bytes, format_rate
from offload.version import __version__

RESIDENT = (
    "everything was resident: nothing was streamed, so this says nothing about streaming from disk"
)
FROM_RAM = (
    "all weights were in RAM and streamed from there to the device: nothing came from disk, so "
    "this says nothing about that"
)
RESIDENT_WEIGHTS = (
    "all weights were resident: only keys and values were streamed, so this says nothing about "
    "streaming weights from disk"
)


def resident_note(plan: Plan, end: Mapping[str, Any]) -> str | None:
    """What a speed does not show if no weight was streamed; None if some were.

    ``end``: the counters at the end.
    """
    if streams(plan):
        return None
    if goes_up(plan):
        return FROM_RAM
    kv = end.get("kv")
    return RESIDENT_WEIGHTS if kv and kv["read_bytes"] else RESIDENT


def stats_line(run: Run, prepared: Prepared) -> str:
    """All that counts, separated by dots."""
    end, plan = run.at_end, prepared.plan
    parts = [f"load {end['load_s']:.2f} s"]
    if run.ttft_s is not None:
        read = rate_text(run.prefill_tok_s) if run.prefill_tok_s else "from the prompt cache"
        parts += [f"TTFT {run.ttft_s:.2f} s", f"prompt {read} ({tokens_text(run.prompt_tokens)})"]
    parts.append(f"decode {rate_text(run.decode_tok_s)} ({tokens_text(len(run.token_ids))})")
    parts += streaming_parts(run, plan)
    parts += kv_parts(run)
    parts += reuse_parts(run)
    parts.append(memory_text(end))
    return " · ".join([*parts, *prediction_parts(run.decode_tok_s, plan)])


def prediction_parts(measured_tok_s: float | None, plan: Plan) -> list[str]:
    """The predicted speed and how far off it was; nothing without a prediction."""
    if plan.predicted_pass_s is None or plan.predicted_pass_s.mid <= 0:
        return []
    predicted = 1 / plan.predicted_pass_s.mid
    said = f"predicted {format_rate(predicted)} tok/s"
    if measured_tok_s is not None:
        said += f", measured {measured_tok_s / predicted - 1:+.0%}"
    return [said]


class Measured(Protocol):
    """One run, or several together."""

    @property
    def decode_steps(self) -> int: ...

    def during_decode(self, key: str) -> float: ...


def streaming_parts(run: Measured, plan: Plan) -> list[str]:
    """What the CPU did beside a device while decoding, what came from the disk, and what waited;
    nothing if all was resident."""
    steps = run.decode_steps
    parts: list[str] = []
    if not steps:
        return parts
    for key, what in ("cpu_experts", "experts"), ("cpu_products", "products"):
        if count := run.during_decode(key):
            parts.append(f"{count / steps:.3g} {what}/token on the CPU")
    up = run.during_decode("h2d_bytes") / steps
    if goes_up(plan):
        parts.append(f"{up / 2**20:.3g} MiB/token up to the device")
    if not streams(plan):
        return parts
    if (hit := hit_rate(run.during_decode("hits"), run.during_decode("misses"))) is not None:
        parts.append(f"hits {hit:.1%}")
    if guessed := run.during_decode("guessed"):
        right = run.during_decode("guessed_right") / guessed
        parts.append(f"{guessed / steps:.3g} guesses/token, {right:.0%} right")
    per_token = run.during_decode("disk_read_bytes") / steps
    parts += [
        f"{per_token / 2**20:.3g} MiB/token from disk",
        f"stall {run.during_decode('stall_s') / steps:.3g} s/token",
    ]
    return parts


def kv_parts(run: Run) -> list[str]:
    """What keys and values took from the disk while decoding; nothing if they did not."""
    end, first = run.at_end.get("kv"), (run.at_first or run.at_start).get("kv")
    parts = []
    if end and end["kind"] in ("q8", "q4"):
        error = end["attention_error"]
        off = "" if error is None else f"attention off by {error:.1%} at most"
        unknown = "attention's error not measured, no block was full after the prompt's first pass"
        parts.append(f"KV in {end['kind']}: {off or unknown}")
    if end and end.get("evicted_tokens"):
        parts.append(
            f"KV keeps {end['keep_tokens']} tokens: {tokens_text(end['evicted_tokens'])} evicted, "
            f"lossy"
        )
    return [*parts, *_moved(run, end, first)]


def _moved(run: Run, end: Any, first: Any) -> list[str]:
    if not end or not first or not run.decode_steps or not end["read_bytes"]:
        return []
    read = end["read_bytes"] - first["read_bytes"]
    stall_s = end["stall_s"] - first["stall_s"]
    return [
        f"KV {format_bytes(end['written_bytes'])} spilled, "
        f"{read / run.decode_steps / 2**20:.3g} MiB/token back, "
        f"stall {stall_s / run.decode_steps:.3g} s/token"
    ]


def reuse_parts(run: Run) -> list[str]:
    """What the prompt cache gave; nothing if there is none."""
    found = run.reuse
    if found is None:
        return []
    if not found.tokens:
        return ["prompt cache: nothing to reuse"]
    said = f"prompt cache: {found.tokens} of {tokens_text(run.prompt_tokens)} reused"
    if found.read_bytes:
        said += (
            f", {format_bytes(found.read_bytes)} read in {found.read_s:.3g} s, "
            f"{found.saved_s:.3g} s saved"
        )
    return [said]


def memory_text(end: Mapping[str, Any]) -> str:
    """The peak against the budget, from the counters at the end."""
    above = end["peak_rss_bytes"] - end["baseline_rss_bytes"]
    budget, simulated = end["ram_budget_bytes"], simulated_bytes(end)
    said = f"peak RSS {format_bytes(above)} above the process, budget {format_bytes(budget)}"
    if simulated:
        said += f" and {format_bytes(simulated)} of the simulated device, which are RAM, too"
    over = above - budget - simulated
    return said + (f" (over by {format_bytes(over)})" if over > 0 else "")


def simulated_bytes(end: Mapping[str, Any]) -> int:
    """Of the budget of a device whose memory is the process's own, and so a part of its peak; 0
    where there is none, or a card."""
    if end.get("device_peak_bytes") is not None:
        return 0
    return end.get("device_budget_bytes") or 0


def run_json(
    run: Run, prepared: Prepared, sampling: Mapping[str, float | int], threads: int
) -> dict[str, Any]:
    """``figures`` of a run, and what it ran with. Sizes in bytes, times in seconds."""
    error = prepared.kernel_error
    return {
        "load_s": run.at_end["load_s"],
        "load_read_bytes": run.at_start["disk_read_bytes"] - (error.read_bytes if error else 0),
        **figures(run),
        **surroundings(run.at_end, prepared, sampling, threads),
    }


def figures(run: Run) -> dict[str, Any]:
    """Sizes in bytes, times in seconds. ``disk_read_bytes``, ``hit_rate`` and ``stall_s`` are of
    the whole generation (the load is apart), ``decode_*`` of what came after the first token."""
    return {
        "ttft_s": run.ttft_s,
        "prompt_tokens": run.prompt_tokens,
        "prefill_tok_s": run.prefill_tok_s,
        "new_tokens": len(run.token_ids),
        "decode_s": run.decode_s,
        "decode_tok_s": run.decode_tok_s,
        "finished": run.finished,
        "hit_rate": hit_rate(run.during_run("hits"), run.during_run("misses")),
        "disk_read_bytes": int(run.during_run("disk_read_bytes")),
        "stall_s": run.during_run("stall_s"),
        "decode_hits": int(run.during_decode("hits")),
        "decode_misses": int(run.during_decode("misses")),
        "decode_guessed": int(run.during_decode("guessed")),
        "decode_guessed_right": int(run.during_decode("guessed_right")),
        "decode_cpu_experts": int(run.during_decode("cpu_experts")),
        "decode_cpu_products": int(run.during_decode("cpu_products")),
        "decode_hit_rate": hit_rate(run.during_decode("hits"), run.during_decode("misses")),
        "decode_disk_read_bytes": int(run.during_decode("disk_read_bytes")),
        "decode_payload_read_bytes": int(run.during_decode("payload_read_bytes")),
        "decode_h2d_bytes": int(run.during_decode("h2d_bytes")),
        "decode_stall_s": run.during_decode("stall_s"),
        "fewer_threads": run.at_end["fewer_threads"],
        "token_ids": run.token_ids,
        "text": run.text,
        "kv": run.at_end.get("kv"),
        "prompt_cache": None if run.reuse is None else dataclasses.asdict(run.reuse),
    }


def surroundings(
    end: Mapping[str, Any],
    prepared: Prepared,
    sampling: Mapping[str, float | int],
    threads: int,
) -> dict[str, Any]:
    """Memory, predictions, settings and versions; ``end``: the counters at the end."""
    import torch
    import transformers

    plan = prepared.plan
    predicted = plan.predicted_pass_s
    error = prepared.kernel_error
    return {
        "kernel_error": None if error is None else error.to_json(),
        "streamed": streams(plan),
        "baseline_rss_bytes": end["baseline_rss_bytes"],
        "peak_rss_bytes": end["peak_rss_bytes"],
        "ram_budget_bytes": end["ram_budget_bytes"],
        "device_peak_bytes": end.get("device_peak_bytes"),
        "device_budget_bytes": end.get("device_budget_bytes"),
        "predicted_decode_tok_s": 1 / predicted.mid if predicted and predicted.mid else None,
        "bound_decode_tok_s": 1 / plan.bound_pass_s if plan.bound_pass_s else None,
        "sampling": dict(sampling),
        "threads": threads,
        "versions": {
            "offload": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "plan": plan_json(prepared),
    }


def hit_rate(hits: float, misses: float) -> float | None:
    """Share of routed experts that were there; None if none was routed."""
    return hits / (hits + misses) if hits + misses else None


def tokens_text(n: int) -> str:
    """``1 token``, ``2 tokens``."""
    return f"{n} token{'' if n == 1 else 's'}"


def rate_text(value: float | None) -> str:
    """Tokens per second; a dash where nothing was measured."""
    return "-" if value is None else f"{format_rate(value)} tok/s"
