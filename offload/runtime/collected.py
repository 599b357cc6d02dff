"""What is closed when a model that nobody has closed is collected."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any


def when_collected(owner: Any, close: Callable[[], Any]) -> None:
    """Have ``close`` called when ``owner`` is collected, or at the end of the program."""
    weakref.finalize(owner, _close, close)


def _close(close: Callable[[], Any]) -> None:
    """The collector runs in any thread, the workers that ``close`` waits for included."""
    if threading.current_thread() is threading.main_thread():
        close()
    else:
        threading.Thread(target=close, name="offload-close", daemon=True).start()


__all__ = ["when_collected"]
