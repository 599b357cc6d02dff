"""The same figures as ``/stats``, in Prometheus' text format (version 0.0.4).

Written here: it is forty lines, and the client library's process-wide registry would mix the
servers of one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from offload.serve.counters import Counters, Histogram

MEDIA_TYPE = "text/plain; version=0.0.4"


def render(stats: Mapping[str, Any], counters: Counters) -> str:
    """
    Args:
        stats: of the engine.
        counters: the engine's.
    """
    lines: list[str] = []
    requests, tokens, memory = stats["requests"], stats["tokens"], stats["memory"]
    ends = ("completed", "cancelled", "failed", "rejected")
    lines += _metric(
        "requests_total", "counter", "Requests by how they ended.",
        {f'outcome="{name}"': requests[name] for name in ends},
    )  # fmt: skip
    lines += _metric("requests_waiting", "gauge", "In the queue.", {"": requests["queued"]})
    lines += _metric("requests_active", "gauge", "Being answered.", {"": requests["active"]})
    lines += _metric(
        "tokens_total", "counter", "Tokens read, not read again, and made.",
        {f'kind="{kind}"': tokens[kind] for kind in ("prompt", "reused", "generated")},
    )  # fmt: skip
    lines += _metric("passes_total", "counter", "Passes over the model.", {"": stats["passes"]})
    weights = stats["weights"]
    lines += _metric(
        "disk_read_bytes_total", "counter", "Read from the disk.", {"": weights["disk_read_bytes"]}
    )
    lines += _metric("stall_seconds_total", "counter", "Waited for data.", {"": weights["stall_s"]})
    lines += _metric(
        "experts_total", "counter", "Routed experts that were in memory, or were not.",
        {f'found="{k}"': weights[v] for k, v in (("yes", "hits"), ("no", "misses"))},
    )  # fmt: skip
    lines += _metric(
        "tier_bytes", "gauge", "What the plan keeps where.",
        {
            f'tier="{tier}",part="{part}"': size
            for tier, parts in stats["tiers"].items()
            for part, size in parts.items()
        },
    )  # fmt: skip
    lines += _metric(
        "resident_bytes", "gauge", "Of the process.",
        {f'when="{when}"': memory[f"{when}_bytes"] for when in ("now", "peak")},
    )  # fmt: skip
    for name, what, found in (
        ("queue_seconds", "From a request to its start.", counters.queue_s),
        ("first_token_seconds", "From its start to its first token.", counters.first_token_s),
        ("token_seconds", "From one token to the next.", counters.token_s),
    ):
        lines += _histogram(name, what, found)
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, what: str, values: Mapping[str, Any]) -> Iterator[str]:
    yield f"# HELP offload_{name} {what}"
    yield f"# TYPE offload_{name} {kind}"
    for labels, value in values.items():
        if value is not None:
            yield f"offload_{name}{'{' + labels + '}' if labels else ''} {value:.17g}"


def _histogram(name: str, what: str, found: Histogram) -> Iterator[str]:
    yield f"# HELP offload_{name} {what}"
    yield f"# TYPE offload_{name} histogram"
    # The engine goes on counting meanwhile: from one copy, so that the sums agree.
    counts, total = list(found.counts), 0
    for bound, count in zip((*map(str, found.bounds), "+Inf"), counts, strict=True):
        total += count
        yield f'offload_{name}_bucket{{le="{bound}"}} {total}'
    yield f"offload_{name}_sum {found.sum:.17g}"
    yield f"offload_{name}_count {total}"
