"""What control groups say of processor time, in both of their versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.runtime import hardware_cache
from offload.runtime.cgroups import cpu_quota


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    cgroup.mkdir()
    return proc, cgroup


def _write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_no_group_no_quota(roots: tuple[Path, Path]) -> None:
    assert cpu_quota(*roots) is None
    (roots[0] / "self/cgroup").write_text("0::/a\n")
    assert cpu_quota(*roots) is None


def test_v2_the_least_of_the_groups_above(roots: tuple[Path, Path]) -> None:
    proc, cgroup = roots
    (proc / "self/cgroup").write_text("0::/user/run\n")
    _write(cgroup / "user" / "run", cpu__max="max 100000\n")
    assert cpu_quota(proc, cgroup) is None
    _write(cgroup / "user", cpu__max="250000 100000\n")
    assert cpu_quota(proc, cgroup) == 2.5
    _write(cgroup / "user" / "run", cpu__max="30000 20000\n")
    assert cpu_quota(proc, cgroup) == 1.5


def test_v1_in_a_container_whose_path_is_the_hosts(roots: tuple[Path, Path]) -> None:
    proc, cgroup = roots
    (proc / "self/cgroup").write_text("3:cpu,cpuacct:/docker/0815\n0::/\n")
    _write(cgroup / "cpu", **{"cpu__cfs_quota_us": "-1\n", "cpu__cfs_period_us": "100000\n"})
    assert cpu_quota(proc, cgroup) is None
    _write(cgroup / "cpu", **{"cpu__cfs_quota_us": "50000\n"})
    assert cpu_quota(proc, cgroup) == 0.5
    _write(cgroup / "cpu", **{"cpu__cfs_quota_us": "much\n"})
    assert cpu_quota(proc, cgroup) is None


@pytest.mark.parametrize(("quota", "threads"), [(None, 8), (0.5, 1), (1.0, 1), (1.5, 2), (99.0, 8)])
def test_threads_that_a_quota_pays_for(
    quota: float | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(hardware_cache, "cpu_quota", lambda: quota)
    monkeypatch.setattr(hardware_cache.psutil, "cpu_count", lambda logical: 8)
    monkeypatch.setattr(hardware_cache.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(hardware_cache.os, "sched_getaffinity", lambda _: set(range(8)))
    assert hardware_cache.default_threads() == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert hardware_cache.default_threads() == 5
