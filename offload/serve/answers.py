"""Answers as OpenAI's clients expect them, whole and in pieces."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

from starlette.responses import JSONResponse

from offload.serve.events import Ended
from offload.serve.problems import Problem

DONE = b"data: [DONE]\n\n"
STILL_HERE = b": waiting\n\n"
"""A comment, which clients skip: proxies close a stream in which nothing moves."""


class Shape:
    """One answer's envelope: chat or plain completion."""

    def __init__(self, model: str, *, chat: bool) -> None:
        self.chat = chat
        self._kind = "chat.completion" if chat else "text_completion"
        self._envelope = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, text: str, end: Ended) -> dict[str, Any]:
        """All at once, with ``usage`` and ``timings``."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": end.finish, "logprobs": None}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        return self._with(self._kind, [choice]) | {"usage": usage(end), "timings": timings(end)}

    def first(self) -> dict[str, Any] | None:
        """What a stream begins with: who speaks; None where that is no question."""
        return self._chunk({"role": "assistant", "content": ""}, None) if self.chat else None

    def piece(self, text: str) -> dict[str, Any]:
        return self._chunk({"content": text}, None)

    def last(self, end: Ended) -> dict[str, Any]:
        return self._chunk({}, end.finish) | {"timings": timings(end)}

    def usage(self, end: Ended) -> dict[str, Any]:
        """After the last piece, for those who asked."""
        kind = f"{self._kind}.chunk" if self.chat else self._kind
        return self._with(kind, []) | {"usage": usage(end)}

    def _chunk(self, delta: dict[str, str], finish: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
        if self.chat:
            return self._with(f"{self._kind}.chunk", [choice | {"delta": delta}])
        return self._with(self._kind, [choice | {"text": delta.get("content", "")}])

    def _with(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._envelope, "object": kind, "choices": choices}


def usage(end: Ended) -> dict[str, Any]:
    """Numbers of tokens."""
    return {
        "prompt_tokens": end.prompt_tokens,
        "completion_tokens": end.new_tokens,
        "total_tokens": end.prompt_tokens + end.new_tokens,
        "prompt_tokens_details": {"cached_tokens": end.reused_tokens},
    }


def timings(end: Ended) -> dict[str, float | None]:
    """Seconds, and tokens per second; None where nothing was measured."""
    read, steps = end.prompt_tokens - end.reused_tokens, end.new_tokens - 1
    return {
        "queue_s": end.queue_s,
        "first_token_s": end.first_s,
        "decode_s": end.decode_s,
        "prompt_tokens_per_s": read / end.first_s if read and end.first_s > 0 else None,
        "tokens_per_s": steps / end.decode_s if steps > 0 and end.decode_s > 0 else None,
    }


def line(data: dict[str, Any]) -> bytes:
    """A server-sent event. JSON escapes line ends, so that it is one line."""
    return b"data: " + encoded(data) + b"\n\n"


def encoded(data: Any) -> bytes:
    """JSON in UTF-8. Half of a surrogate pair (of a directory's name that is no UTF-8, of what a
    client has escaped) comes as JSON's escape for it, which happens to be Python's."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


class Reply(JSONResponse):
    """Any answer that is no stream."""

    def render(self, content: Any) -> bytes:
        return encoded(content)


def error_line(problem: Problem) -> bytes:
    """An error after the stream has begun; OpenAI's client raises it."""
    return line(problem.body)
