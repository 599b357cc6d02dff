"""Bodies of requests: read one after the other, as what they become in Python is many times larger.

What one body takes is set aside in the plan. Small ones are read as they come; a larger one takes
turns with the others from the moment that it is known to be large until its prompt is in tokens,
and whoever waits for that is not read from.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

from offload.serve.problems import Problem

T = TypeVar("T")

BODY = "offload.body"
"""Where the scope has what the body says; whoever takes it out is its only owner."""

BODY_READ = "offload.body_read"
"""Where the scope has the request's ``Turn``, to be given back when the body is no longer held."""

SMALL_BODY = 2**14
"""Bytes; so large is a prompt of some thousand tokens."""

PYTHON_BYTES = 32
"""Of a byte of JSON at most, itself, its text and what is made of it included: an empty dictionary
is ``{},`` and takes 26, a message without a word 30. Numbers take ten, and the copies of a text
with an emoji in it a dozen."""

TURN_S = 60.0
"""For the rest of a large body to come: others may be waiting."""

SMALL_S = 60.0
"""For a small one: a server takes so many connections at once."""


class Turn:
    """One request's right to hold a large body."""

    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock = lock
        self._held = False
        self._limit_s = SMALL_S
        self._until = asyncio.get_running_loop().time() + SMALL_S

    async def take(self) -> None:
        """Wait for it; nothing happens if it is there."""
        if not self._held:
            await self._lock.acquire()
            self._held, self._limit_s = True, TURN_S
            self._until = asyncio.get_running_loop().time() + TURN_S

    def give(self) -> None:
        """For the next one. Idempotent."""
        if self._held:
            self._held = False
            self._lock.release()

    async def within(self, coming: Coroutine[Any, Any, T], size: int) -> T:
        """The next part of a body of which ``size`` bytes are there.

        Raises:
            Problem: it does not come in time.
        """
        try:
            async with asyncio.timeout_at(self._until):
                return await coming
        except TimeoutError:
            raise Problem(
                408,
                f"only {size} bytes of the body have come in {self._limit_s:.0f} s, "
                f"and others may wait; send it again, at once",
                code="body_too_slow",
                headers={"Connection": "close"},
            ) from None


def read_json(body: bytes | bytearray) -> Any:
    """What a body says.

    Raises:
        Problem: it is not JSON, or a field stands in it twice: one of the two would not count.
    """
    twice: list[str] = []

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            twice.extend(key for key, times in counts.items() if times > 1)
        return found

    try:
        found = json.loads(body, object_pairs_hook=once)
    except UnicodeDecodeError as error:
        raise Problem(400, f"the body is not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise Problem(400, f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise Problem(400, "the body is nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise Problem(400, f"the body cannot be read: {error}") from None
    if twice:
        raise Problem(400, f"{twice[0]}: it stands there twice; give it once", param=twice[0])
    return found
