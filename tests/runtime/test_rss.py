"""Resident memory and what is left of it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from offload.runtime import rss
from offload.runtime.memory import HostMemory

MIB = 1 << 20


def test_current_rss_agrees_with_psutil() -> None:
    assert abs(rss.current_rss() - psutil.Process().memory_info().rss) < 16 * MIB


def test_the_peak_remembers_what_was_given_back_until_it_is_reset() -> None:
    before = rss.current_rss()
    m = HostMemory(96 * MIB, "m")
    m.fill(1)
    m.close()
    assert rss.peak_rss() >= before + 90 * MIB
    if not rss.reset_peak_rss():
        pytest.skip("this system does not let a process reset its peak")
    assert rss.peak_rss() < before + 48 * MIB


def test_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rss, "_PROC", tmp_path / "absent")
    assert rss.current_rss() > 16 * MIB
    assert rss.peak_rss() > 16 * MIB
    assert not rss.reset_peak_rss()
    assert 0 < rss.available_ram() <= psutil.virtual_memory().total
    assert rss.ram_limit() == psutil.virtual_memory().total


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path / "proc", tmp_path / "cgroup"


def test_cgroup_v2_counts_every_group_above(roots: tuple[Path, Path]) -> None:
    proc, cgroup = roots
    (proc / "self/cgroup").write_text("0::/a/b\n")
    write(cgroup / "a/b", memory__max="max", memory__current="10", memory__stat="inactive_file 1")
    write(
        cgroup / "a",
        memory__max=str(100 * MIB),
        memory__current=str(70 * MIB),
        memory__stat=f"anon 5\ninactive_file {20 * MIB}",
    )
    assert list(rss._cgroup_room(proc, cgroup)) == [50 * MIB]


def test_cgroup_v1_in_a_container_whose_path_is_the_hosts(roots: tuple[Path, Path]) -> None:
    proc, cgroup = roots
    (proc / "self/cgroup").write_text("5:cpu:/\n4:memory:/docker/123\n0::/\n")
    write(
        cgroup / "memory",
        memory__limit_in_bytes=str(64 * MIB),
        memory__usage_in_bytes=str(65 * MIB),
        memory__stat="inactive_file 0\ntotal_inactive_file 0",
    )
    assert list(rss._cgroup_room(proc, cgroup)) == [0]
    write(cgroup / "memory", memory__limit_in_bytes="9223372036854771712")
    assert list(rss._cgroup_room(proc, cgroup)) == []


def test_available_ram_is_the_least(
    roots: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    proc, cgroup = roots
    (proc / "self/cgroup").write_text("0::/\n")
    write(cgroup, memory__max="4096", memory__current="96", memory__stat="")
    monkeypatch.setattr(rss, "_PROC", proc)
    monkeypatch.setattr(rss, "_CGROUP", cgroup)
    assert rss.available_ram() == 4000
    assert rss.ram_limit() == 4096
