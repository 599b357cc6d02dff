"""The chat template: from messages to token ids, with the settings that some templates read."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.cli.flags import check_text
from offload.errors import OffloadError
from offload.models.naming import model_name

_MARKS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
_FUNCTIONS = ("raise_exception", "strftime_now")
"""What transformers gives every template besides."""
_WORDS: Mapping[str, Any] = {"true": True, "false": False, "none": None, "null": None}


def parse_settings(given: Sequence[str] | None) -> dict[str, Any]:
    """``["enable_thinking=false"]`` as a template gets it: JSON where it is JSON, else text.

    Raises:
        OffloadError: no name, no value, or a name given twice.
    """
    found: dict[str, Any] = {}
    for setting in given or ():
        check_text(setting, "--template")
        name, equals, text = setting.partition("=")
        if not (equals and name.isidentifier()):
            raise OffloadError(
                f"--template {setting!r} is not NAME=VALUE such as enable_thinking=false"
            )
        if name in found:
            raise OffloadError(f"--template {name} is given twice; give it once")
        found[name] = _value(text)
    return found


def _value(text: str) -> Any:
    # Python's spelling as well: a template would take the text "False" for true.
    if (word := text.strip().lower()) in _WORDS:
        return _WORDS[word]
    try:
        return json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return text


def check_settings(
    settings: Mapping[str, Any], tokenizer: Any | None, directory: Path, flag: str = "--template "
) -> None:
    """Refuse what the template would not look at: jinja takes any name, and a misspelt one would
    change nothing without a word.

    Args:
        flag: what stands before a name in an error.

    Raises:
        OffloadError: there is no template, or it does not read one of them.
    """
    if not settings:
        return
    if not getattr(tokenizer, "chat_template", None):
        raise OffloadError(
            f"{model_name(directory)} has no chat template; drop {flag}{next(iter(settings))}"
        )
    assert tokenizer is not None
    try:
        text = str(tokenizer.get_chat_template())
    except ValueError as error:  # several, by names, and none of them the default
        raise OffloadError(
            f"{flag}{next(iter(settings))}: the chat templates of {model_name(directory)} cannot "
            f"be read: {error}; call one of them default"
        ) from error
    ours = {"messages", *_FUNCTIONS, *inspect.signature(tokenizer.apply_chat_template).parameters}
    names = _names(text)
    for name in settings:
        if name in ours:
            raise OffloadError(f"{flag}{name}: the template gets that from offload; drop it")
        if names is not None and name not in names:
            known = names - ours - set(tokenizer.special_tokens_map)
            reads = f"it reads {', '.join(sorted(known))}" if known else "it reads none"
            raise OffloadError(
                f"{flag}{name}: the chat template of {model_name(directory)} knows no such "
                f"setting; {reads}"
            )


def _names(template: str) -> set[str] | None:
    """What a template takes from outside: not its own variables, nor words of its text, its
    comments and its messages' fields. None where jinja cannot read it: it will say why."""
    from jinja2 import Environment, TemplateError, meta

    env = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False)
    try:
        return set(meta.find_undeclared_variables(env.parse(_MARKS.sub("", template))))
    except TemplateError:
        return None


def template_ids(
    messages: Sequence[Mapping[str, str]],
    tokenizer: Any,
    directory: Path,
    *,
    way_out: str,
    settings: Mapping[str, Any] | None = None,
) -> list[int]:
    """Ids of messages put through the chat template, up to where the answer begins.

    Args:
        messages: each with ``role`` and ``content``.
        way_out: what the user can do if the template refuses them.
        settings: what the template reads besides, e.g. ``enable_thinking``.

    Raises:
        OffloadError: the template fails, or nothing comes of it.
    """
    try:
        ids = tokenizer.apply_chat_template(
            list(messages),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **(settings or {}),
        )
    except Exception as error:
        raise OffloadError(
            f"the chat template of {model_name(directory)} fails: {error!s:.500}; {way_out}"
        ) from error
    return some(ids)


def some(ids: Sequence[int]) -> list[int]:
    """The ids. Raises OffloadError where there are none."""
    if not ids:
        raise OffloadError("the prompt has no tokens; give some more text")
    return [int(i) for i in ids]
