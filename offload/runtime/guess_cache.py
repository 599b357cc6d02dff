"""How often a model's guesses were right, kept for predictions in the user's cache folder.

Which experts the next layer will use is guessed from this layer's input. A random model's layers
change it so little that nearly all guesses are right; of a trained one's, a quarter are wrong. That
is a fact of the weights, and nothing tells it but having run them. Imports no torch.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from offload.io.whole_file import PRIVATE, whole_file
from offload.runtime.hardware_cache import cache_path

log = logging.getLogger(__name__)

VERSION = 1
FEWEST = 100
"""Guesses below which nothing is said."""
MOST = 20_000
"""Earlier guesses count as so many at most: the model under a path may have changed."""
MODELS = 200
"""Those that ran last are kept."""


def guesses_path() -> Path:
    """Beside the hardware's rates."""
    return cache_path().with_name("guesses.json")


def recall(model: str | os.PathLike[str]) -> float | None:
    """The share of right guesses of the model in a directory, 0 to 1; None if not known.

    A damaged file is logged and ignored.
    """
    guessed, right = _entries().get(_key(model), (0, 0))
    return right / guessed if guessed >= FEWEST else None


def remember(model: str | os.PathLike[str], guessed: int, right: int) -> None:
    """Add a run's guesses. Where the folder cannot be written, that is logged: a prediction is
    a little worse."""
    if guessed <= 0:
        return
    entries = _entries()
    key = _key(model)
    before, right_before = entries.pop(key, (0, 0))
    share = min(1.0, MOST / before) if before else 1.0
    entries[key] = (round(before * share) + guessed, round(right_before * share) + right)
    kept = dict(list(entries.items())[-MODELS:])
    path = guesses_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, PRIVATE) as file:
            file.write(json.dumps({"version": VERSION, "models": kept}, indent=1).encode())
    except OSError as error:
        log.info("%s cannot be written (%s): guesses are not remembered", path, error)


def _key(model: str | os.PathLike[str]) -> str:
    return str(Path(model).resolve())


def _entries() -> dict[str, tuple[int, int]]:
    path = guesses_path()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["version"] != VERSION:
            return {}
        found = {str(k): (int(n), int(right)) for k, (n, right) in data["models"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        log.warning("%s cannot be read (%s); ignored", path, error)
        return {}
    return {k: (n, right) for k, (n, right) in found.items() if 0 <= right <= n}


__all__ = ["guesses_path", "recall", "remember"]
