"""DirectFile: O_DIRECT, its refusal, short calls, the end of the file, descriptors."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from io_support import failing, filled

from offload.blocks import ALIGN
from offload.errors import ClosedError, StoreError
from offload.io.files import DirectFile, Syscalls, TransferError
from offload.io.memory import AlignedBuffer


def refuse_open(name: str, flags: int, mode: int) -> int:
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return os.open(name, flags, mode)


def refuse_flags(_fd: int, flags: int) -> None:
    if flags & os.O_DIRECT:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))


class RefuseCalls:
    """Like a filesystem that takes O_DIRECT at open and refuses it at the first transfer."""

    def __init__(self, code: int = errno.EINVAL) -> None:
        self.code = code
        self.refused = 0

    def _check(self, fd: int) -> None:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            self.refused += 1
            raise OSError(self.code, os.strerror(self.code))

    def preadv(self, fd: int, bufs: list[memoryview], offset: int) -> int:
        self._check(fd)
        return os.preadv(fd, bufs, offset)

    def pwritev(self, fd: int, bufs: list[memoryview], offset: int) -> int:
        self._check(fd)
        return os.pwritev(fd, bufs, offset)


class Advice:
    def __init__(self) -> None:
        self.given: list[tuple[int, int, int]] = []

    def __call__(self, fd: int, offset: int, nbytes: int, advice: int) -> None:
        self.given.append((offset, nbytes, advice))
        os.posix_fadvise(fd, offset, nbytes, advice)


def whole(file: DirectFile, path: Path) -> None:
    """Reads of every page range, and of the range that reaches past the end, are right."""
    content = path.read_bytes()
    with AlignedBuffer(len(content) // 4096 * 4096 + 8192) as buf:
        for start in range(0, len(content), 4096):
            for stop in range(start + 4096, len(buf) + 1, 4096):
                n = file.read(start, buf[: stop - start])
                assert n == min(stop, len(content)) - start
                assert bytes(buf[:n]) == content[start : start + n]


def test_direct(big_file: Path) -> None:
    with DirectFile.open(big_file) as file:
        assert file.size == 20580
        if file.mode == "buffered":
            pytest.skip("the temporary directory's filesystem refuses O_DIRECT")
        whole(file, big_file)


@pytest.mark.parametrize(
    "make",
    [
        lambda a: Syscalls(open=refuse_open, fadvise=a),
        lambda a: Syscalls(set_flags=refuse_flags, fadvise=a),
    ],
)
def test_refused_at_open(
    big_file: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Advice], Syscalls]
) -> None:
    advice = Advice()
    with caplog.at_level(logging.WARNING), DirectFile.open(big_file, syscalls=make(advice)) as file:
        assert file.mode == "buffered"
        whole(file, big_file)
    assert (0, 4096, os.POSIX_FADV_DONTNEED) in advice.given
    (record,) = caplog.records
    assert str(big_file) in record.getMessage()
    assert "refuses O_DIRECT" in record.getMessage()


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_refused_at_the_first_read(
    big_file: Path, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    calls, advice = RefuseCalls(code), Advice()
    syscalls = Syscalls(preadv=calls.preadv, fadvise=advice)
    with caplog.at_level(logging.WARNING), DirectFile.open(big_file, syscalls=syscalls) as file:
        assert file.mode == "direct"
        whole(file, big_file)
        assert file.mode == "buffered"
    assert calls.refused == 1
    assert len(caplog.records) == 1
    assert advice.given


def test_refused_at_the_first_write(big_file: Path) -> None:
    syscalls = Syscalls(pwritev=RefuseCalls().pwritev)
    with DirectFile.open(big_file, writable=True, syscalls=syscalls) as file:
        with filled(b"\x99" * 4096) as buf:
            assert file.write(4096, buf) == 4096
        assert file.mode == "buffered"
    content = big_file.read_bytes()
    assert content[4096:8192] == b"\x99" * 4096
    assert len(content) == 20580


def test_many_threads_meet_the_refusal_at_once(
    big_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    barrier = threading.Barrier(4)
    first = threading.local()

    def preadv(fd: int, bufs: list[memoryview], offset: int) -> int:
        if not hasattr(first, "done"):
            first.done = True
            barrier.wait(timeout=30)  # all are in the call while the file is still direct
            raise OSError(errno.EINVAL, "refused")
        return os.preadv(fd, bufs, offset)

    results: list[object] = []

    def read() -> None:
        try:
            with AlignedBuffer(4096) as buf:
                results.append(file.read(0, buf))
        except StoreError as e:
            results.append(e)

    with DirectFile.open(big_file, syscalls=Syscalls(preadv=preadv)) as file:
        threads = [threading.Thread(target=read) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert results == [4096] * 4
    assert len(caplog.records) == 1


def test_einval_without_o_direct_is_an_error(big_file: Path) -> None:
    syscalls = Syscalls(open=refuse_open, preadv=failing(errno.EINVAL))
    with (
        DirectFile.open(big_file, syscalls=syscalls) as file,
        AlignedBuffer(4096) as buf,
        pytest.raises(TransferError, match="Invalid argument"),
    ):
        file.read(0, buf)


@pytest.mark.parametrize("step", [1, 100, 4095, 4096, 5000])
def test_short_calls_are_continued(big_file: Path, step: int) -> None:
    offsets: list[int] = []

    def preadv(fd: int, bufs: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        # O_DIRECT itself never stops inside a page but at the end; a buffered read may.
        return min(os.preadv(fd, bufs, offset), max(step, 4096) + step % 4096)

    def pwritev(fd: int, bufs: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        n = min(bufs[0].nbytes, max(step, 4096) + step % 4096)
        return os.pwrite(fd, bufs[0][:n], offset)

    syscalls = Syscalls(open=refuse_open, preadv=preadv, pwritev=pwritev)
    with DirectFile.open(big_file, writable=True, syscalls=syscalls) as file:
        whole(file, big_file)
        new = bytes(range(256)) * 64
        with filled(new) as buf:
            assert file.write(0, buf) == len(new)
        with AlignedBuffer(len(new)) as buf:
            assert file.read(0, buf) == len(new)
            assert bytes(buf) == new
    assert not any(offset % 4096 for offset in offsets), "O_DIRECT would refuse to go on there"


def test_a_file_that_shrinks(big_file: Path) -> None:
    with DirectFile.open(big_file) as file, AlignedBuffer(24576) as buf:
        os.truncate(big_file, 9000)
        with pytest.raises(TransferError, match="shrank") as caught:
            file.read(0, buf)
        assert "20580" in str(caught.value)
        assert "9000" in str(caught.value)
        assert (caught.value.path, caught.value.offset) == (str(big_file), 9000)
        assert file.read(0, buf[:8192]) == 8192


def test_errors_carry_file_offset_and_errno(big_file: Path) -> None:
    preadv = failing(errno.EIO)
    with (
        DirectFile.open(big_file, syscalls=Syscalls(preadv=preadv)) as file,
        AlignedBuffer(4096) as buf,
    ):
        with pytest.raises(TransferError) as caught:
            file.read(8192, buf)
        e = caught.value
    assert (e.path, e.offset, e.errno) == (str(big_file), 8192, errno.EIO)
    for part in (str(big_file), "8192", "4096", os.strerror(errno.EIO)):
        assert part in str(e)


def test_a_full_disk_is_told_in_numbers(big_file: Path) -> None:
    pwritev = failing(errno.ENOSPC)
    with (
        DirectFile.open(big_file, writable=True, syscalls=Syscalls(pwritev=pwritev)) as file,
        AlignedBuffer(8192) as buf,
        pytest.raises(TransferError, match=r"8192 bytes at offset 4096.*iB are free") as caught,
    ):
        file.write(4096, buf)
    assert caught.value.errno == errno.ENOSPC


def test_a_write_that_stops_moving_is_an_error(big_file: Path) -> None:
    with (
        DirectFile.open(big_file, writable=True, syscalls=Syscalls(pwritev=lambda *_: 0)) as file,
        AlignedBuffer(4096) as buf,
        pytest.raises(TransferError, match="0 of 4096"),
    ):
        file.write(0, buf)


def test_alignment_is_asked_for_in_both_modes(big_file: Path) -> None:
    for syscalls in (Syscalls(), Syscalls(open=refuse_open)):
        with DirectFile.open(big_file, syscalls=syscalls) as file, AlignedBuffer(8192) as buf:
            for offset, part in ((100, buf), (0, buf[:100]), (0, buf[64 : 64 + 4096])):
                with pytest.raises(ValueError, match="4096"):
                    file.read(offset, part)


@pytest.mark.parametrize("what", ["missing", "folder"])
def test_cannot_open(tmp_path: Path, what: str) -> None:
    path = tmp_path if what == "folder" else tmp_path / "nothing"
    with pytest.raises(StoreError, match=str(path)):
        DirectFile.open(path)


def test_more_files_than_a_process_may_have_open(big_file: Path) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with pytest.raises(StoreError, match=r"Too many open files; .*ulimit -n"):
        DirectFile.open(big_file, syscalls=Syscalls(open=refuse))


def test_close_waits_for_a_read_and_keeps_others_out(big_file: Path) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def preadv(fd: int, bufs: list[memoryview], offset: int) -> int:
        inside.set()
        go_on.wait(timeout=30)
        return os.preadv(fd, bufs, offset)

    file = DirectFile.open(big_file, syscalls=Syscalls(preadv=preadv))
    with AlignedBuffer(4096) as buf:
        got: list[int] = []
        reader = threading.Thread(target=lambda: got.append(file.read(0, buf)))
        reader.start()
        assert inside.wait(timeout=30)
        closer = threading.Thread(target=file.close)
        closer.start()
        os.fstat(file.fileno())  # still open: the reader is in the call
        go_on.set()
        closer.join(timeout=30)
        reader.join(timeout=30)
        assert got == [4096]
        with pytest.raises(ClosedError):
            file.read(0, buf)
    file.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(file.fileno())


def test_what_others_did_to_a_file_can_be_asked_until_the_end(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(ALIGN))
    file = DirectFile.open(path)
    assert not file.changed()
    os.utime(path, (0, 0))
    assert file.changed()
    file.close()
    assert not file.changed()  # two may close a store at once, and either asks first
