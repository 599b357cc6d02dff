"""Measured hardware, kept per machine and disk in the user's cache folder. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import os
import platform
from pathlib import Path

import psutil

from offload.io.whole_file import PRIVATE, whole_file
from offload.runtime.cache_folder import cache_folder
from offload.runtime.cgroups import cpu_quota
from offload.runtime.rss import ram_limit
from offload.scheduler.hardware import Hardware

log = logging.getLogger(__name__)

VERSION = 1
"""Of the file's format and of what the probe measures. Another one is ignored."""


def cache_path() -> Path:
    """``$XDG_CACHE_HOME/offload/hardware.json``, by default under ``~/.cache``."""
    return cache_folder() / "hardware.json"


def default_threads() -> int:
    """Physical cores this process may use; ``OMP_NUM_THREADS`` if it is set, as torch does.

    Of a quota of processor time no more than it pays for, rounded up: with threads that it does
    not, all stand still for the rest of each period. On two cores one thread decoded 1.3 times as
    fast as two with a quota of 1.0, and 0.8 times with one of 1.5.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    logical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return max(1, min(logical, cores()))


def cores() -> int:
    """Logical ones that this process may use at once: what it is bound to, and a quota pays for."""
    logical = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    return max(1, min(allowed, math.ceil(cpu_quota() or logical)))


def cpu_name() -> str:
    """The CPU's model as it names itself."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError as e:
        log.debug("no /proc/cpuinfo: %s", e)
    return platform.processor() or platform.machine() or "unknown CPU"


def disk_name(directory: str | os.PathLike[str]) -> str:
    """The disk of a directory (of its nearest parent, if it does not exist): type and device."""
    path = Path(directory).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    dev = path.stat().st_dev
    numbers = f"{os.major(dev)}:{os.minor(dev)}"
    return f"{_filesystem(numbers)} on {numbers}"


def _filesystem(numbers: str) -> str:
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "file system"
    for line in lines:
        fields = line.split()  # id parent major:minor root point options [tags] - type source ...
        if fields[2] == numbers and "-" in fields:
            return fields[fields.index("-") + 1]
    return "file system"


def machine_key(directory: str | os.PathLike[str], threads: int | None = None) -> str:
    """What measurements depend on: CPU, threads, RAM, torch, disk."""
    return " | ".join(
        (
            cpu_name(),
            f"{os.cpu_count()} cores",
            f"{threads or default_threads()} threads",
            f"{ram_limit()} bytes of RAM",
            f"torch {importlib.metadata.version('torch')}",
            disk_name(directory),
        )
    )


def load_cached(
    directory: str | os.PathLike[str], *, threads: int | None = None
) -> Hardware | None:
    """What was measured for this machine and the disk of ``directory``, or None.

    A damaged cache is logged and ignored: it is measured anew.
    """
    entry = _entries().get(machine_key(directory, threads))
    if entry is None:
        return None
    try:
        return Hardware.from_json(entry)
    except ValueError as e:
        log.warning("%s: this machine's entry is damaged (%s); ignored", cache_path(), e)
        return None


def _entries() -> dict[str, object]:
    path = cache_path()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as e:  # ValueError: bad JSON or bad UTF-8
        log.warning("%s cannot be read (%s); ignored", path, e)
        return {}
    if not isinstance(data, dict) or not isinstance(data.get("machines"), dict):
        log.warning("%s is not a hardware cache; ignored", path)
        return {}
    if data.get("version") != VERSION:
        log.info("%s is of version %s, not %d; ignored", path, data.get("version"), VERSION)
        return {}
    return dict(data["machines"])


def save(
    directory: str | os.PathLike[str], hardware: Hardware, *, threads: int | None = None
) -> Path:
    """Keep ``hardware`` for this machine and disk; returns the file (mode 0600).

    The file is replaced as a whole: a crash leaves the old one. Two savers at once: the last wins,
    which costs the other a probe.

    Raises:
        OSError: the cache folder cannot be written.
    """
    path = cache_path()
    entries = _entries() | {machine_key(directory, threads): hardware.to_json()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, PRIVATE) as file:
        file.write(json.dumps({"version": VERSION, "machines": entries}, indent=1).encode())
    return path
