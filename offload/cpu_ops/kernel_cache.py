"""Numba's disk cache, made safe for several processes and honest about what is in it.

Numba numbers a function's data files by what the index says: two processes that compile different
kernels at once can both choose the same number, and one of them would later run the other's code.
So storing takes a lock on the directory. What cannot be stored costs time and nothing else: the
kernel runs, and a warning says what to change.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
from numba.core import caching, registry
from numba.core import config as numba_config

log = logging.getLogger(__name__)

VARIABLE = "NUMBA_CACHE_DIR"
"""Environment variable that names another directory. Without it Numba takes ``__pycache__`` beside
the sources, or the user's cache directory if that is not writable."""

# Numba's own annotations are partial and differ between versions.
_FunctionCache: Any = caching.FunctionCache
_config: Any = numba_config

_LOCK = "offload-kernels.lock"

_NOWHERE = (
    "compiled kernels cannot be kept and are compiled again next time: no directory for them can "
    "be written"
)
"""Numba's own error names the function: one line for each would be dozens."""

_warned: set[str] = set()


class KernelCache(_FunctionCache):  # type: ignore[misc]
    """The stored versions of one kernel's body."""

    @classmethod
    def of(cls, body: Callable[[int], None]) -> KernelCache | None:
        """None (and, once, a warning) if there is no directory that can be written."""
        try:
            cache = cls(body)
        except RuntimeError:  # Numba's "no locator available"
            _warn(_NOWHERE)
            return None
        if not cache.as_asked:
            _warn(f"{_config.CACHE_DIR} cannot be written: kernels are kept in {cache.cache_path}")
        return cache

    @property
    def as_asked(self) -> bool:
        """Whether it lies in the directory that the environment names, if it names one."""
        asked = _config.CACHE_DIR
        return not asked or Path(self.cache_path).is_relative_to(asked)

    def has(self, signature: Any) -> bool:
        """Whether this machine's code for ``signature`` is stored. Loads nothing."""
        try:
            file = self._cache_file
            key = self._index_key(signature, registry.cpu_target.target_context.codegen())
            name = file._load_index().get(key)
            return name is not None and os.path.exists(file._data_path(name))
        except (OSError, EOFError, pickle.UnpicklingError):
            return False

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            log.warning("a stored kernel cannot be read and is compiled again: %s", error)
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            with _alone(Path(self.cache_path)):
                super().save_overload(sig, data)
        except OSError as error:
            _warn(
                f"compiled kernels cannot be kept and are compiled again next time: "
                f"{self.cache_path}: {error.strerror}"
            )


def kept(function: Callable[..., Any]) -> Any:
    """``function`` compiled by Numba (no lock held, no bounds checked) and stored, if there is a
    directory that can be written; without one ``njit(cache=True)`` fails where it is imported."""
    compiled: Any = numba.njit(nogil=True, boundscheck=False, error_model="numpy")(function)
    try:
        compiled.enable_caching()
    except RuntimeError:  # Numba's "no locator available"
        _warn(_NOWHERE)
    return compiled


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """No other process stores anything in ``directory``. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _warn(why: str) -> None:
    if why not in _warned:
        _warned.add(why)
        log.warning("%s; set %s to a directory that can be written", why, VARIABLE)
