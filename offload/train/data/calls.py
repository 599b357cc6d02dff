"""Arguments of tool calls, in the form in which a chat template shows them right.

OpenAI's format has them as JSON in a string, transformers' templates take objects. Some templates
take both, and some take strings alone. Most do not look: they write a string as JSON once more
(``"{\\"city\\": ...}"``), or an object as Python prints it, and a model would learn to answer so.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from offload.train.data.bad_rows import BadRow
from offload.train.data.shapes import Message

Render = Callable[[tuple[Message, ...]], str]
"""Messages through a template. Raises BadRow if it refuses them."""

_NAME = "offload-probe"
_PROBE = {_NAME: "1"}
_AS_JSON = json.dumps(_PROBE)


class Calls:
    """Which forms of arguments a template shows right. What is found of one is kept."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, type], bool] = {}

    def fitted(
        self, messages: tuple[Message, ...], template: str, render: Render
    ) -> tuple[Message, ...]:
        """``messages`` whose calls have their arguments in a form that ``template`` shows right:
        as they are where that is one, else in the other. Where neither is, they stay: a template
        may show no arguments at all."""
        given = {type(call["arguments"]) for call in _calls(messages)} & {str, dict}
        for form, other in ((str, dict), (dict, str)):
            if (
                form in given
                and not self._right(messages, template, form, render)
                and self._right(messages, template, other, render)
            ):
                messages = _changed(messages, _read if form is str else _written)
        return messages

    def _right(
        self, messages: tuple[Message, ...], template: str, form: type, render: Render
    ) -> bool:
        key = template, form
        if key not in self._found:
            probe: Any = _AS_JSON if form is str else _PROBE
            try:
                shown = render(_changed(messages, lambda _: probe))
            except BadRow:
                return False  # of these messages; the reason may be another one
            if _NAME not in shown:
                return False  # nor is it known of others: these may be left out for their place
            # Of objects some write neither JSON nor Python but a form of their own, key by key.
            self._found[key] = _AS_JSON in shown if form is str else str(_PROBE) not in shown
        return self._found[key]


def _calls(messages: tuple[Message, ...]) -> list[dict[str, Any]]:
    """What has the name and the arguments of each call."""
    found = []
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict):
                held = call.get("function", call)
                if isinstance(held, dict) and "arguments" in held:
                    found.append(held)
    return found


def _changed(messages: tuple[Message, ...], change: Callable[[Any], Any]) -> tuple[Message, ...]:
    """A copy of ``messages`` with other arguments."""
    copy: tuple[Message, ...] = tuple(
        {**m, "tool_calls": deepcopy(m["tool_calls"])} if m.get("tool_calls") else m
        for m in messages
    )
    for call in _calls(copy):
        call["arguments"] = change(call["arguments"])
    return copy


def _read(arguments: Any) -> Any:
    """The object in a string; what is none stays."""
    if isinstance(arguments, str):
        try:
            found = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return arguments
        return found if isinstance(found, dict) else arguments
    return arguments


def _written(arguments: Any) -> Any:
    if isinstance(arguments, dict):
        # A table may hold what JSON has no form for, such as dates.
        return json.dumps(arguments, ensure_ascii=False, default=str)
    return arguments
