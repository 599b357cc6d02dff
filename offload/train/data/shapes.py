"""What a row says: a text, a prompt with its completion, or a conversation.

No tokenizer here: whatever is wrong with a row's shape is found before anything is encoded.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from offload.train.data.bad_rows import BadRow
from offload.train.data.json_rows import Repeated

KEYS = ("text", "prompt", "completion", "messages", "conversations", "tools")
"""What is read of a row. Other keys are ignored; a key whose value is null counts as absent."""

Message = dict[str, Any]

_SHAREGPT = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "model": "assistant", "system": "system", "tool": "tool",
    "function_call": "assistant", "observation": "tool",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Text:
    """All of it is to be learnt."""

    text: str


@dataclass(frozen=True, slots=True)
class Completion:
    """Only the completion is to be learnt."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Chat:
    """What assistants say from message ``first`` on is to be learnt."""

    messages: tuple[Message, ...]
    first: int
    tools: list[Any] | None


Shape = Text | Completion | Chat


def shape_of(row: Mapping[str, Any]) -> Shape:
    """Read a row.

    Raises:
        BadRow: keys are missing or ambiguous, or a value has the wrong type or is empty.
    """
    _once(row, KEYS, "")
    there = {key for key in KEYS if row.get(key) is not None}
    shapes: list[str] = [key for key in ("text", "messages", "conversations") if key in there]
    if {"prompt", "completion"} <= there:
        shapes.append("prompt and completion")
    if len(shapes) > 1:
        raise BadRow(f"has {' and also '.join(shapes)}: which one is meant? Keep one of them")
    if not shapes:
        raise BadRow(_missing(row))
    match shapes[0]:
        case "text":
            return Text(_string(row, "text"))
        case "messages":
            return _chat(_messages(row, "messages"), 0, row)
        case "conversations":
            return _chat(_messages(row, "conversations"), 0, row)
    if isinstance(row["prompt"], list) or isinstance(row["completion"], list):
        prompt, completion = _messages(row, "prompt"), _messages(row, "completion")
        return _chat(prompt + completion, len(prompt), row)
    prompt = row["prompt"]
    if not isinstance(prompt, str):
        raise BadRow(f"prompt is {_kind(prompt)}, not a string or a list of messages")
    return Completion(sound(prompt, "prompt"), _string(row, "completion"))


def _once(entry: Mapping[str, Any], keys: Collection[str], where: str) -> None:
    """Raise BadRow if one of ``keys`` is there twice: readers differ in which one they take."""
    for key in sorted(entry.keys_again.intersection(keys)) if isinstance(entry, Repeated) else ():
        raise BadRow(f"{where}has {key!r} twice: which one is meant? Keep one of them")


def _missing(row: Mapping[str, Any]) -> str:
    null = [key for key in KEYS if key in row and row[key] is None]
    names = ", ".join(repr(str(key)[:40]) for key in list(row)[:8]) or "(none)"
    more = ", …" if len(row) > 8 else ""
    for key, other in (("prompt", "completion"), ("completion", "prompt")):
        if row.get(key) is not None:
            return f"has {key} but no {other}; its keys are {names}{more}"
    if null:
        return f"{' and '.join(null)} is null; its keys are {names}{more}"
    return f"has no text, prompt and completion, or messages; its keys are {names}{more}"


def _string(row: Mapping[str, Any], key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise BadRow(f"{key} is {_kind(value)}, not a string")
    if not value.strip():
        raise BadRow(f"{key} is empty")
    return sound(value, key)


def sound(text: str, key: str) -> str:
    """``text``, if it is one that can be tokenised.

    Raises:
        BadRow: it has half a character.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise BadRow(f"{key} has half a surrogate pair at character {e.start + 1}") from e
    return text


def _messages(row: Mapping[str, Any], key: str) -> tuple[Message, ...]:
    value = row[key]
    if not isinstance(value, list):
        raise BadRow(f"{key} is {_kind(value)}, not a list of messages")
    if not value:
        raise BadRow(f"{key} is empty")
    return tuple(_message(entry, f"{key}[{i}]") for i, entry in enumerate(value))


def _message(entry: Any, where: str) -> Message:
    if not isinstance(entry, Mapping):
        raise BadRow(f"{where} is {_kind(entry)}, not an object with role and content")
    _once(entry, entry, f"{where} ")
    # Tables fill the fields that a message lacks with nulls; templates test what is defined.
    found = {str(key): value for key, value in entry.items() if value is not None}
    if "from" in found and "value" in found and "role" not in found:
        role, said = found.pop("from"), found.pop("value")
        if not isinstance(role, str) or role not in _SHAREGPT:
            raise BadRow(f"{where} is from {role!r}; known are {', '.join(_SHAREGPT)}")
        found = {**found, "role": _SHAREGPT[role], "content": said}
    role, content = found.get("role"), found.get("content")
    if not isinstance(role, str):
        raise BadRow(f"{where} has no role; its keys are {', '.join(map(repr, found)) or '(none)'}")
    if content is None:
        if not found.get("tool_calls"):
            raise BadRow(f"{where} ({role}) has no content")
        content = ""
    elif isinstance(content, list):
        content = "".join(_text_part(part, where) for part in content)
    elif not isinstance(content, str):
        raise BadRow(f"{where} ({role}): content is {_kind(content)}, not a string")
    weight = found.get("weight", 1)
    if weight not in (0, 1):
        raise BadRow(f"{where} has weight {weight!r}; 0 (not to be learnt) and 1 are known")
    return {**found, "role": role, "content": sound(content, where)}


def learnt(message: Message) -> bool:
    """Whether a message is to be learnt: an assistant's, without the weight 0 that OpenAI's format
    has for those that are not."""
    return message["role"] == "assistant" and bool(message.get("weight", 1))


def _says_nothing(message: Message) -> bool:
    # Thoughts, tool calls: whatever a template may show besides.
    more = message.keys() - {"role", "content", "name", "weight", "id"}
    return not message["content"].strip() and not any(message[key] for key in more)


def _text_part(part: Any, where: str) -> str:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
    raise BadRow(f"{where} has a part of type {kind!r}; only text can be learnt")


def _chat(messages: tuple[Message, ...], first: int, row: Mapping[str, Any]) -> Chat:
    if not any(map(learnt, messages[first:])):
        roles = ", ".join(m["role"] + " (weight 0)" * (not m.get("weight", 1)) for m in messages)
        raise BadRow(f"has no assistant's message to learn; its roles are {roles}")
    for i, message in enumerate(messages[first:]):
        if learnt(message) and _says_nothing(message):
            raise BadRow(
                f"the assistant's message {first + i} is empty: the model would learn to say "
                'nothing; "weight": 0 in it keeps the others'
            )
    tools = row.get("tools")
    if isinstance(tools, str):  # tables have no type for objects that differ from row to row
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as e:
            raise BadRow(f"tools is no JSON: {e}") from e
    if tools is not None and not isinstance(tools, list):
        raise BadRow(f"tools is {_kind(tools)}, not a list")
    return Chat(messages, first, tools or None)


def _kind(value: Any) -> str:
    names = {str: "a string", list: "a list", bool: "a boolean", int: "a number",
             float: "a number", type(None): "null"}  # fmt: skip
    return names.get(type(value), "an object" if isinstance(value, Mapping) else "something else")
