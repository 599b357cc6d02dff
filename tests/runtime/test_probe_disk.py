"""The disk probe moves what it says, leaves nothing, and tells what is wrong."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from pathlib import Path

import pytest

from offload.errors import StoreError
from offload.runtime import probe_disk
from offload.runtime.probe_disk import DiskRates, Request, measure_disk

KIB = 1 << 10


def measure(directory: Path, **changes: object) -> DiskRates:
    kwargs = {"file_bytes": 4096 * KIB, "request_bytes": 64 * KIB, "depth": 4, "samples": 3}
    return measure_disk(directory, **(kwargs | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("sequential", [False, True])
def test_rates_have_a_spread_and_nothing_is_left(tmp_path: Path, sequential: bool) -> None:
    fds, threads = os.listdir("/proc/self/fd"), threading.active_count()
    shares: list[float] = []
    rates = measure(tmp_path, sequential=sequential, progress=shares.append)
    for rate in rates:
        assert rate.n == 3
        assert rate.unit == "B/s"
        assert 0 < rate.low <= rate.median <= rate.high
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == len(fds)
    assert threading.active_count() == threads
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_the_file_has_no_name_while_it_is_measured(tmp_path: Path) -> None:
    seen: list[list[Path]] = []
    measure(tmp_path, progress=lambda _: seen.append(list(tmp_path.iterdir())))
    assert len(seen) == 9
    assert all(files == [] for files in seen)


def test_every_lane_of_a_mixed_sample_reads_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples: list[list[list[Request]]] = []
    real = probe_disk._transfer

    def spy(fd: int, lanes: list[list[Request]], buffers: list[memoryview]) -> float:
        samples.append(lanes)
        return real(fd, lanes, buffers)

    monkeypatch.setattr(probe_disk, "_transfer", spy)
    measure(tmp_path)
    fill, *rest = samples
    assert sorted(r.offset for lane in fill for r in lane) == [i * 64 * KIB for i in range(64)]
    for kind, lanes in zip(("read", "write", "mixed") * 3, rest, strict=True):
        requests = [r for lane in lanes for r in lane]
        assert len(requests) == len({r.offset for r in requests}) == 16
        writes = Counter(r.write for r in requests)[True]
        assert writes == {"read": 0, "write": 16, "mixed": 8}[kind]
        if kind == "mixed":
            assert all({r.write for r in lane} == {True, False} for lane in lanes)
    offsets = [r.offset for r in samples[1][0]]
    assert offsets != sorted(offsets)


def test_a_missing_directory_and_a_full_disk_are_store_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreError, match="absent"):
        measure(tmp_path / "absent")

    class Usage:
        free = 100 * KIB

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    with pytest.raises(StoreError, match=r"needs 2.0 MiB free, 100.0 KiB are"):
        measure(tmp_path)


def test_the_file_shrinks_to_half_of_the_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 2560 * KIB

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    sizes: list[int] = []
    real = probe_disk._settle

    def spy(fd: int) -> None:
        sizes.append(os.fstat(fd).st_size)
        real(fd)

    monkeypatch.setattr(probe_disk, "_settle", spy)
    measure(tmp_path)
    assert sizes[0] == 1280 * KIB


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_io_errors_and_short_transfers_are_store_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(StoreError, match="No space left"):
            measure(tmp_path)
    monkeypatch.setattr(os, call, lambda *_: 512)
    with pytest.raises(StoreError, match="moved 512 of 65536 bytes"):
        measure(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_o_direct_it_measures_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refuse(path: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    assert measure(tmp_path).read.n == 3
    assert "has no O_DIRECT" in caplog.text


def test_bad_parameters(tmp_path: Path) -> None:
    for changes in ({"request_bytes": 1000}, {"depth": 0}, {"samples": 0}):
        with pytest.raises(ValueError, match="not measurable"):
            measure(tmp_path, **changes)
