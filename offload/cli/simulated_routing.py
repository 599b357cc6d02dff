"""``--routing`` of ``simulate``: words, or a file of weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from offload.errors import OffloadError

MOST_ZIPF = 5.0


@dataclass(frozen=True, slots=True)
class Routing:
    """Weights of a layer's experts by rank (an exponent of Zipf's law, or as given), and the chance
    that an expert of the last token is used again."""

    weights: float | tuple[float, ...] = 0.0
    repeat: float = 0.0
    said: str = "even"


def parse_routing(text: str) -> Routing:
    """The routing that a flag's text means.

    Raises:
        OffloadError: it means none.
    """
    if text == "even":
        return Routing()
    kind, _, rest = text.partition(":")
    if kind == "zipf":
        exponent, _, repeat = rest.partition(":")
        try:
            found = Routing(float(exponent or 1.0), float(repeat or 0.0), text)
        except ValueError:
            found = None
        if found is None or not (0 <= _exponent(found) <= MOST_ZIPF and 0 <= found.repeat < 1):
            raise OffloadError(
                f"--routing {text}: zipf:S:R takes an exponent S from 0 to {MOST_ZIPF:g} and a "
                "chance R from 0 to below 1, e.g. zipf:1:0.3"
            )
        return found
    path = Path(text).expanduser()
    if not path.is_file():
        raise OffloadError(f"--routing {text} is neither even, zipf:S, zipf:S:R nor a file")
    return Routing(_weights(path), said=path.name)


def _exponent(found: Routing) -> float:
    return found.weights if isinstance(found.weights, float) else 0.0


def _weights(path: Path) -> tuple[float, ...]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise OffloadError(f"--routing {path} cannot be read as JSON: {error}") from error
    good = isinstance(data, list) and all(
        isinstance(x, (int, float)) and not isinstance(x, bool) and 0 <= x < float("inf")
        for x in data
    )
    if not good or not data:
        raise OffloadError(
            f"--routing {path} must be a JSON list with a weight for every expert of a layer"
        )
    return tuple(map(float, data))
