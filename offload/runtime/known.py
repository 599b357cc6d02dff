"""What was found out once on this machine and need not be tried again: a small JSON file in the
user's cache directory."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path

from offload.runtime.cache_folder import cache_folder

logger = logging.getLogger(__name__)


class Known:
    """Answers by key, in the file ``name``. A file that cannot be read is an empty one; one that
    cannot be written costs another trial. Other processes may use it at the same time."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def path(self) -> Path:
        """The file, which need not be there."""
        return cache_folder() / self._name

    def get(self, key: str) -> object:
        """The answer, None if there is none."""
        return self._load().get(key)

    def put(self, key: str, answer: object) -> None:
        """Remember an answer, anything that ``json`` can write."""
        file, value = self.path, {**self._load(), key: answer}
        try:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, name = tempfile.mkstemp(dir=file.parent)
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                json.dump(value, out)
            os.replace(name, file)
        except OSError as error:
            logger.info("what was tried is not kept: %s", error)

    def _load(self) -> dict[str, object]:
        try:
            value = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


__all__ = ["Known"]
