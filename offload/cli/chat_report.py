"""What a chat's turns took: a table for /stats, lines for people, and JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload.cli.chat_talk import Talk, Turn
from offload.cli.report import (
    figures,
    hit_rate,
    memory_text,
    prediction_parts,
    rate_text,
    streaming_parts,
    surroundings,
    tokens_text,
)
from offload.models.prepared import Prepared
from offload.scheduler.plan import Plan
from offload.units import format_bytes


@dataclass(frozen=True, slots=True)
class Sum:
    """Several turns as if they were one run; times in seconds."""

    turns: Sequence[Turn]

    @property
    def kept_tokens(self) -> int:
        return sum(turn.run.reused_tokens for turn in self.turns)

    @property
    def read_tokens(self) -> int:
        return sum(turn.read_tokens for turn in self.turns)

    @property
    def new_tokens(self) -> int:
        return sum(len(turn.run.token_ids) for turn in self.turns)

    @property
    def ttft_s(self) -> float | None:
        """The mean, of those turns that came to a first token."""
        times = self._ttfts()
        return sum(times) / len(times) if times else None

    @property
    def prefill_tok_s(self) -> float | None:
        """Of the turns that computed tokens of a prompt; None if there were none."""
        timed = [(t.read_tokens, t.run.ttft_s) for t in self.turns if t.run.prefill_tok_s]
        took = sum(s for _, s in timed if s is not None)
        return sum(read for read, _ in timed) / took if took else None

    @property
    def decode_steps(self) -> int:
        return sum(turn.run.decode_steps for turn in self.turns)

    @property
    def decode_tok_s(self) -> float | None:
        took = sum(turn.run.decode_s for turn in self.turns)
        return self.decode_steps / took if self.decode_steps and took else None

    def during_decode(self, key: str) -> float:
        """Growth of a counter while answers were decoded."""
        return sum(turn.run.during_decode(key) for turn in self.turns)

    def during_run(self, key: str) -> float:
        """Growth of a counter while prompts were read and answers decoded."""
        return sum(turn.run.during_run(key) for turn in self.turns)

    def _ttfts(self) -> list[float]:
        return [turn.run.ttft_s for turn in self.turns if turn.run.ttft_s is not None]


def turn_line(talk: Talk, plan: Plan) -> str:
    """The last turn, separated by dots."""
    return " · ".join(
        [
            *_speed_parts(Sum(talk.turns[-1:])),
            *streaming_parts(talk.turns[-1].run, plan),
            *_reuse_parts(Sum(talk.turns[-1:])),
            _context(talk),
        ]
    )


def stats_line(talk: Talk, prepared: Prepared, end: Mapping[str, Any]) -> str:
    """The whole chat, separated by dots; ``end``: the model's counters."""
    total, plan = Sum(talk.turns), prepared.plan
    turns = len(talk.turns)
    return " · ".join(
        [
            f"load {end['load_s']:.2f} s",
            f"{turns} turn{'' if turns == 1 else 's'}",
            *_speed_parts(total),
            *streaming_parts(total, plan),
            *_reuse_parts(total),
            memory_text(end),
            *prediction_parts(total.decode_tok_s, plan),
        ]
    )


def stats_rows(talk: Talk) -> list[tuple[str, str, str]]:
    """For /stats: what, the last turn, all turns."""
    last, total = Sum(talk.turns[-1:]), Sum(talk.turns)

    def row(what: str, text: Callable[[Sum], str]) -> tuple[str, str, str]:
        return what, text(last), text(total)

    return [
        row("prompt tokens kept from before", lambda t: str(t.kept_tokens)),
        row("prompt tokens read", lambda t: str(t.read_tokens)),
        row("time to the first token", lambda t: _or_dash(t.ttft_s, "{:.2f} s")),
        row("reading", lambda t: rate_text(t.prefill_tok_s)),
        row("answer tokens", lambda t: str(t.new_tokens)),
        row("decoding", lambda t: rate_text(t.decode_tok_s)),
        row("expert hits", lambda t: _or_dash(_hits(t), "{:.1%}")),
        row("from disk", lambda t: _or_dash(_disk_mib(t), "{:.3g} MiB/token")),
        row("stall", lambda t: _or_dash(_per_token(t, "stall_s"), "{:.3g} s/token")),
    ]


def stats_notes(talk: Talk, end: Mapping[str, Any]) -> list[str]:
    """Below the table: memory and context."""
    return [memory_text(end), _context(talk)]


def chat_json(
    talk: Talk,
    prepared: Prepared,
    sampling: Mapping[str, float | int],
    *,
    threads: int,
    end: Mapping[str, Any],
    ended: str,
) -> dict[str, Any]:
    """All turns and their sum. Sizes in bytes, times in seconds; see ``report.figures``."""
    total = Sum(talk.turns)
    return {
        "ended": ended,
        "load_s": end["load_s"],
        "context": talk.terms.context,
        "context_tokens": _used(talk),
        "forgotten_exchanges": talk.conversation.forgotten,
        "turns": [
            {
                "reused_tokens": turn.run.reused_tokens,
                "read_tokens": turn.read_tokens,
                "context_tokens": turn.context_tokens,
                "newly_forgotten_exchanges": turn.forgotten,
                **figures(turn.run),
            }
            for turn in talk.turns
        ],
        "total": {
            "reused_tokens": total.kept_tokens,
            "read_tokens": total.read_tokens,
            "mean_ttft_s": total.ttft_s,
            "prefill_tok_s": total.prefill_tok_s,
            "new_tokens": total.new_tokens,
            "decode_tok_s": total.decode_tok_s,
            "decode_hit_rate": _hits(total),
            "decode_disk_read_bytes": int(total.during_decode("disk_read_bytes")),
            "decode_stall_s": total.during_decode("stall_s"),
            "disk_read_bytes": int(total.during_run("disk_read_bytes")),
            "stall_s": total.during_run("stall_s"),
        },
        **surroundings(end, prepared, sampling, threads),
    }


def _speed_parts(turns: Sum) -> list[str]:
    parts = []
    if turns.ttft_s is not None:
        kept = f", {turns.kept_tokens} kept" if turns.kept_tokens else ""
        parts += [
            f"TTFT {turns.ttft_s:.2f} s",
            f"prompt {rate_text(turns.prefill_tok_s)} ({turns.read_tokens} read{kept})",
        ]
    parts.append(f"decode {rate_text(turns.decode_tok_s)} ({tokens_text(turns.new_tokens)})")
    return parts


def _reuse_parts(turns: Sum) -> list[str]:
    """What came from the disk instead of being read; nothing without a prompt cache."""
    found = [turn.run.reuse for turn in turns.turns if turn.run.reuse is not None]
    read = sum(reuse.read_bytes for reuse in found)
    if not found or not read:
        return []
    took, saved = sum(n.read_s for n in found), sum(n.saved_s for n in found)
    return [f"prompt cache: {format_bytes(read)} read in {took:.3g} s, {saved:.3g} s saved"]


def _used(talk: Talk) -> int:
    """Tokens of the context that the last turn came to; what was taken back since still counts."""
    return talk.turns[-1].context_tokens if talk.turns else 0


def _context(talk: Talk) -> str:
    return f"context {_used(talk)} of {talk.terms.context} tokens"


def _hits(turns: Sum) -> float | None:
    return hit_rate(turns.during_decode("hits"), turns.during_decode("misses"))


def _disk_mib(turns: Sum) -> float | None:
    nbytes = _per_token(turns, "disk_read_bytes")
    return None if nbytes is None else nbytes / 2**20


def _per_token(turns: Sum, key: str) -> float | None:
    steps = turns.decode_steps
    return turns.during_decode(key) / steps if steps else None


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
