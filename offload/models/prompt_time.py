"""The time that chat templates see: one for a whole run, and for the runs that continue it.

Templates may write the date into a prompt (``strftime_now``; Llama 3.2's and gpt-oss's do). Work
that is stopped and goes on another day would then go on with other prompts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import datetime
from typing import Any


class PromptTime:
    """A clock that stands still, in local time.

    Attributes:
        asked: a template has looked at it, so that prompts depend on it.
    """

    def __init__(self, moment: datetime) -> None:
        self._moment = moment
        self.asked = False

    def now(self) -> datetime:
        """What ``datetime.now`` is to a template."""
        self.asked = True
        return self._moment

    @property
    def text(self) -> str | None:
        """For ``stopped_at`` in a later run: ISO 8601 in whole seconds; None if nobody asked."""
        return self._moment.isoformat(timespec="seconds") if self.asked else None


def read_time(text: object) -> datetime | None:
    """What ``PromptTime.text`` wrote; None for anything else."""
    if not isinstance(text, str):
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo is None else None


@contextlib.contextmanager
def stopped_at(moment: datetime | None = None) -> Iterator[PromptTime]:
    """Have chat templates that are rendered inside see one time. In one thread at a time.

    Args:
        moment: None: now.
    """
    from transformers.utils import chat_template_utils

    rendering: Any = chat_template_utils
    clock = PromptTime((moment or datetime.now()).replace(microsecond=0))
    # A template takes no function as an argument, and its own reads this name.
    before = rendering.datetime
    rendering.datetime = clock
    try:
        yield clock
    finally:
        rendering.datetime = before


__all__ = ["PromptTime", "read_time", "stopped_at"]
