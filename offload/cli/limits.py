"""What this process may take, where libraries say in their own ways that it is too little."""

from __future__ import annotations

from offload.io.workers import NO_THREAD, is_no_thread

_TORCH = "DefaultCPUAllocator: "
_NO_TEMPORARY = "No usable temporary directory"


def limit_reached(error: BaseException) -> str | None:
    """A line for the user if ``error`` is of a limit that the system or a shell has set; None if it
    is anything else, which may be a bug."""
    if is_no_thread(error):
        return NO_THREAD
    text = str(error)
    if isinstance(error, OSError):
        if _NO_TEMPORARY not in text:
            return None
        return (
            f"there is no place for temporary files ({error.strerror}); set TMPDIR to a directory "
            "that can be written to"
        )
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _TORCH in text):
        what = text.partition(_TORCH)[2] or text
        detail = f" ({what.splitlines()[0]})" if what else ""
        return (
            f"there is no more memory for this process{detail}: the machine's is used up, or a "
            "limit is reached (ulimit -v); give a smaller --ram, raise the limit, or end other "
            "programs"
        )
    return None


__all__ = ["limit_reached"]
