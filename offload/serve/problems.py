"""What is refused, in the shape that OpenAI's clients understand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

INVALID = "invalid_request_error"


class Problem(Exception):
    """A request that gets an error instead of an answer.

    Attributes:
        status: of HTTP.
        kind: OpenAI's ``type``.
        param: the field that is wrong, e.g. ``messages.0.role``.
        code: for programs, e.g. ``context_length_exceeded``.
        headers: to send with it, e.g. ``Retry-After``.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def busy(waiting: int, retry_s: int) -> Problem:
    """The queue is full. ``retry_s``: seconds after which a place may be free."""
    return Problem(
        429,
        f"{waiting} requests are waiting, which is as many as this server queues; try again in "
        f"{retry_s} s",
        kind="rate_limit_error",
        code="queue_full",
        headers={"Retry-After": str(retry_s)},
    )


def stopping() -> Problem:
    """The server is about to end."""
    return Problem(503, "the server is shutting down", kind="server_error", code="shutting_down")


def failed(why: str) -> Problem:
    """Ours: a read failed, a bug."""
    return Problem(500, why, kind="server_error", code="failed")


def too_long(prompt: int, new: int | None, context: int, param: str) -> Problem:
    """Prompt and answer do not fit. Numbers of tokens; ``new``: None if no number was asked for."""
    asked = (
        f"the prompt has {prompt} tokens"
        if new is None
        else f"the prompt has {prompt} tokens and max_tokens is {new}, together {prompt + new}"
    )
    least = "; at least one is for the answer" if new is None else ""
    return Problem(
        400,
        f"{asked}, and the context takes {context}{least}; shorten it or start the server with a "
        f"larger --context",
        param="max_tokens" if new is not None and prompt < context else param,
        code="context_length_exceeded",
    )


def far_too_long(context: int, param: str) -> Problem:
    """A prompt that was not read to its end, as its beginning is more than twice ``context``."""
    return Problem(
        400,
        f"the prompt has more than {2 * context} tokens, and the context takes {context}; shorten "
        f"it or start the server with a larger --context",
        param=param,
        code="context_length_exceeded",
    )
