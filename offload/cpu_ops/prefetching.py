"""Memory asked for ahead of the loads."""

from __future__ import annotations

from offload.cpu_ops.tags import inline
from offload.cpu_ops.vectors import prefetch


@inline
def ask(at: int, nbytes: int) -> None:
    """Prefetch so many bytes. Inner loops call it for a few lines each: a burst of them would fill
    the processor's list of open requests, and computing would wait as if it had loaded them."""
    stop = at + nbytes
    while at < stop:
        prefetch(at)
        at += 64
