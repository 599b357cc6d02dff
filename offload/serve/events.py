"""What goes into the engine and what comes out of it. Times in seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offload.cli.sampling import Sampling
from offload.serve.problems import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to continue.

    Attributes:
        client: who asks; clients are served in turn.
        prompt: token ids, at least one, at most one less than the context.
        new_tokens: to generate at most; fits the context together with the prompt.
    """

    client: str
    prompt: tuple[int, ...]
    new_tokens: int
    sampling: Sampling
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is certain: it is part of no stop string, and no character is cut."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The last event of an answer.

    Attributes:
        finish: ``stop`` (an end-of-text token or a stop string) or ``length``.
        reused_tokens: of the prompt, that were not read again.
        queue_s: from the request to the start.
        first_s: from the start to the first token.
        decode_s: from the first token to the last.
    """

    finish: str
    prompt_tokens: int
    reused_tokens: int
    new_tokens: int
    queue_s: float
    first_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """Instead of ``Ended``: no more comes."""

    problem: Problem


Event = Piece | Ended | Failed
Deliver = Callable[[Event], None]
"""Called on the engine's thread for each event; must neither wait nor raise."""
