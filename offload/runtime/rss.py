"""How much memory this process holds, held at most, and may still take."""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from offload.runtime.cgroups import CGROUP as _CGROUP
from offload.runtime.cgroups import PROC as _PROC
from offload.runtime.cgroups import folders

log = logging.getLogger(__name__)


def current_rss() -> int:
    """Resident bytes of this process now (file pages it maps included)."""
    return _status_bytes("VmRSS") or int(psutil.Process().memory_info().rss)


def peak_rss() -> int:
    """The most resident bytes since the start, or since ``reset_peak_rss`` returned True.

    Without /proc: ``getrusage``, which cannot be reset and includes what the process was before
    exec.
    """
    peak = _status_bytes("VmHWM")
    if peak is None:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return peak


def reset_peak_rss() -> bool:
    """Start the peak anew from the current RSS; False where the system does not allow it."""
    try:
        (_PROC / "self/clear_refs").write_text("5")
    except OSError as e:
        log.info("the peak RSS cannot be reset here (%s): it counts from the process's start", e)
        return False
    return True


def _status_bytes(key: str) -> int | None:
    try:
        text = (_PROC / "self/status").read_text()
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024  # "  1234 kB"
    return None


def available_ram() -> int:
    """Bytes this process can still take without swapping or being killed, as far as one can know.

    The least of the system's ``MemAvailable`` and, for the process's cgroup (v1 or v2) and every
    group above it, limit − usage + clean cache (``inactive_file``, which the kernel drops under
    pressure). ``MemAvailable`` over-promises: it knows nothing of cgroups and counts page cache
    that other processes will read again at once. Leave a margin.
    """
    return min([int(psutil.virtual_memory().available), *_cgroup_room(_PROC, _CGROUP)])


def ram_limit() -> int:
    """Bytes of RAM this process could ever have: the machine's, or its cgroup's limit."""
    limits = (limit for limit, _ in _cgroup_limits(_PROC, _CGROUP))
    return min([int(psutil.virtual_memory().total), *limits])


def _cgroup_room(proc: Path, cgroup: Path) -> Iterator[int]:
    for limit, used in _cgroup_limits(proc, cgroup):
        yield max(limit - used, 0)


def _cgroup_limits(proc: Path, cgroup: Path) -> Iterator[tuple[int, int]]:
    """(limit, usage without clean cache) in bytes of every limited group around this process."""
    for version, folder in folders("memory", proc, cgroup):
        names = ("memory.max", "memory.current", "inactive_file")
        if version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        found = _group(folder, *names)
        if found is not None:
            yield found


def _group(
    folder: Path, limit_name: str, usage_name: str, cache_key: str
) -> tuple[int, int] | None:
    try:
        limit = (folder / limit_name).read_text().strip()
        usage = int((folder / usage_name).read_text())
        stat = (folder / "memory.stat").read_text()
    except (OSError, ValueError):
        return None
    # v1 says "none" with the largest multiple of a page, v2 with a word.
    if not limit.isdigit() or int(limit) >= 1 << 62:
        return None
    pairs = (line.split() for line in stat.splitlines())
    cache = next((int(p[1]) for p in pairs if len(p) == 2 and p[0] == cache_key), 0)
    return int(limit), max(usage - cache, 0)
