"""The prompts of a batch: one JSON object per line, checked before any work starts."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offload.batch.generation import Sampling
from offload.errors import OffloadError
from offload.io.whole_file import expanded

FIELDS = (
    "prompt", "messages", "id", "max_new_tokens", "temperature", "top_k", "top_p", "seed", "stop",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One line. What is None was not given.

    Attributes:
        index: of the prompt, from 0; blank lines do not count.
        line: in the file, from 1.
        messages: each with ``role`` and ``content``; either these or ``prompt``.
    """

    index: int
    line: int
    id: str | int | None
    prompt: str | None
    messages: tuple[Mapping[str, str], ...] | None
    max_new_tokens: int | None
    sampling: Sampling
    seed: int | None
    stops: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """For what a line leaves out."""

    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int | None = None
    stops: tuple[str, ...] = ()


def read_jobs(path: Path, defaults: Defaults) -> list[Job]:
    """All lines of a file.

    Raises:
        OffloadError: it cannot be read, has no prompt, or a line is not as it should be; says
            which one and what is wrong.
    """
    try:
        data = expanded(path).read_bytes()
    except OSError as error:
        raise OffloadError(f"--batch {path}: {error.strerror}") from error
    jobs: list[Job] = []
    ids: dict[str | int, int] = {}
    lines = data.removeprefix(codecs.BOM_UTF8).split(b"\n")
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        try:
            job = _job(_parse(raw), len(jobs), number, defaults)
            if job.id is not None and ids.setdefault(job.id, number) != number:
                raise OffloadError(f"id {job.id!r} is that of line {ids[job.id]}, too")
        except OffloadError as error:
            raise OffloadError(f"{path.name} line {number}: {error}") from None
        jobs.append(job)
    if not jobs:
        raise OffloadError(f'{path} has no prompts; give lines such as {{"prompt": "..."}}')
    return jobs


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        found = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_twins)
    except UnicodeDecodeError as error:
        raise OffloadError(f"not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise OffloadError(f"not JSON: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise OffloadError("not JSON that can be read: nested too deeply") from None
    except ValueError as error:  # a number with thousands of digits
        raise OffloadError(f"not JSON that can be read: {error}") from None
    if not isinstance(found, dict):
        raise OffloadError('not a JSON object; give e.g. {"prompt": "..."}')
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        # JSON can escape what is no character.
        raise OffloadError("not Unicode text: it escapes half of a surrogate pair") from None
    return found


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twin = next(n for n in names if names.count(n) > 1)
        raise OffloadError(f"{twin!r} is there twice")
    return found


def _job(line: dict[str, Any], index: int, number: int, defaults: Defaults) -> Job:
    unknown = [name for name in line if name not in FIELDS]
    if unknown:
        raise OffloadError(f"unknown field {unknown[0]!r}; known are {', '.join(FIELDS)}")
    prompt: str | None = _get(line, "prompt", "text", lambda v: isinstance(v, str) and v != "")
    messages = _get(line, "messages", "a list of messages", lambda v: isinstance(v, list) and v)
    if (prompt is None) == (messages is None):
        raise OffloadError("give either prompt or messages")
    general = defaults.sampling
    sampling = Sampling(
        temperature=_number(line, "temperature", 0.0, 100.0, general.temperature) or 0.0,
        top_k=_whole(line, "top_k", 1, general.top_k),
        top_p=_number(line, "top_p", 0.0, 1.0, general.top_p),
        min_p=general.min_p,
    )
    seed = _whole(line, "seed", 0, None)
    if sampling.top_p == 0.0:
        raise OffloadError("top_p 0 keeps no token")
    if sampling.temperature == 0.0:
        useless = [n for n in ("top_k", "top_p", "seed") if line.get(n) is not None]
        if useless:
            raise OffloadError(
                f"{', '.join(useless)} cannot take effect: without a temperature the likeliest "
                f"token is taken"
            )
    return Job(
        index=index,
        line=number,
        id=_get(line, "id", "text or a whole number", _is_id),
        prompt=prompt,
        messages=None if messages is None else tuple(_message(m) for m in messages),
        max_new_tokens=_whole(line, "max_new_tokens", 1, defaults.max_new_tokens),
        sampling=sampling,
        seed=seed,
        stops=_stops(line, defaults.stops),
    )


def _get(line: dict[str, Any], name: str, what: str, fits: Callable[[Any], Any]) -> Any:
    value = line.get(name)
    if value is not None and not fits(value):
        raise _wrong(name, value, what)
    return value


def _wrong(name: str, value: Any, what: str) -> OffloadError:
    if value in ("", [], [""]):
        return OffloadError(f"{name} is empty; give {what}, or leave it out")
    return OffloadError(f"{name} is {_short(value)} and should be {what}")


def _is_id(value: Any) -> bool:
    return isinstance(value, str) or _is_whole(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(line: dict[str, Any], name: str, least: int, default: int | None) -> int | None:
    value: int | None = _get(
        line,
        name,
        f"a whole number, {least} or more and below 2**63",
        lambda v: _is_whole(v) and least <= v < 2**63,
    )
    return default if value is None else value


def _number(
    line: dict[str, Any], name: str, low: float, high: float, default: float | None
) -> float | None:
    value = _get(
        line,
        name,
        f"a number between {low:g} and {high:g}",
        lambda v: (_is_whole(v) or isinstance(v, float)) and low <= v <= high,
    )
    return default if value is None else float(value)


def _stops(line: dict[str, Any], default: tuple[str, ...]) -> tuple[str, ...]:
    value = line.get("stop")
    if value is None:
        return default
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise _wrong("stop", value, "text or a list of texts")
    return tuple(stops)


def _message(value: Any) -> Mapping[str, str]:
    good = (
        isinstance(value, dict)
        and value.keys() == {"role", "content"}
        and all(isinstance(v, str) for v in value.values())
    )
    if not good:
        raise OffloadError(
            f'a message is {_short(value)} and should be like {{"role": "user", "content": "..."}}'
        )
    found: Mapping[str, str] = value
    return found


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."


__all__ = ["FIELDS", "Defaults", "Job", "read_jobs"]
