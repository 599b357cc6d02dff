"""The control groups around this process: what limits it besides the machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


def folders(controller: str, proc: Path, cgroup: Path) -> Iterator[tuple[int, Path]]:
    """(1 or 2, folder) of every group around this process in each version's hierarchy that may
    know ``controller``; innermost first. Not every folder is there, or has the controller's files.
    """
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            # A hybrid system mounts v2 beside the v1 controllers, without most of them in it.
            version, root = 2, cgroup
        elif controller in controllers.split(","):
            version, root = 1, cgroup / controller
        else:
            continue
        # In a container the path may be the host's and not exist here: its mount's root then is
        # the container's group, and it is the last of the parents.
        group = Path(path.lstrip("/"))
        for part in (group, *group.parents) if group.parts else (group,):
            yield version, root / part


def cpu_quota(proc: Path = PROC, cgroup: Path = CGROUP) -> float | None:
    """Processors' worth of time that the groups allow this process; None if they do not say.

    What has used it up stands still until the next period (mostly 0.1 s), all threads at once.
    """
    quotas = []
    for version, folder in folders("cpu", proc, cgroup):
        try:
            if version == 2:
                quota, _, period = (folder / "cpu.max").read_text().partition(" ")
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text()
                period = (folder / "cpu.cfs_period_us").read_text()
            microseconds = int(quota), int(period)
        except (OSError, ValueError):  # not there, or "max"
            continue
        if min(microseconds) > 0:  # v1 has -1 for none
            quotas.append(microseconds[0] / microseconds[1])
    return min(quotas, default=None)


__all__ = ["CGROUP", "PROC", "cpu_quota", "folders"]
