"""Damage, kills, full disks and neighbours: never a wrong number, never a stuck run."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import Cache, DynamicLayer

from offload.errors import OffloadError
from offload.kv import prefix_thread
from offload.kv.prefix_cache import PrefixCache
from offload.kv.prefix_folder import LEFT_S, PrefixFolder, open_directory
from offload.kv.prefix_format import group_names

CHUNK = 8
LAYERS, HEADS, DIM = 3, 2, 64


def empty() -> Cache:
    return Cache(layers=[DynamicLayer() for _ in range(LAYERS)])


def states(tokens: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What a pass computes: a function of the tokens."""
    base = torch.tensor(tokens, dtype=torch.float32)[None, None, :, None]
    scale = torch.arange(1, DIM + 1)[None, None, None, :]
    return [
        (
            (base * scale * (layer + 1)).sin().repeat(1, HEADS, 1, 1),
            (base * scale * (layer + 2)).cos().repeat(1, HEADS, 1, 1),
        )
        for layer in range(LAYERS)
    ]


def read(prompts: PrefixCache, ids: list[int]) -> int:
    """Bring a prompt into a cache, check all of it; returns the tokens that came from the disk."""
    cache = empty()
    found = prompts.restore(ids, cache).tokens
    for at in range(found, prompts.whole(len(ids)), CHUNK):
        with prompts.recording(ids, at, cache):
            for layer, (k, v) in zip(cache.layers, states(ids[at : at + CHUNK]), strict=True):
                layer.update(k, v)
    want = states(ids[: prompts.whole(len(ids))])
    for layer, (k, v) in zip(cache.layers, want, strict=True):
        assert torch.equal(layer.keys, k)
        assert torch.equal(layer.values, v)
    return found


USED = LAYERS * 2 * HEADS * CHUNK * DIM * 4
GROUP = USED + 2 * 4096
"""Bytes of a file: keys and values, a page of footer, the last page."""


def opened(directory: Path, limit: int = 2**26, **more: Any) -> PrefixCache:
    return PrefixCache(directory, {}, chunk=CHUNK, limit=limit, group_bytes=GROUP, **more)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def prompts(tmp_path: Path, said: list[str]) -> Iterator[PrefixCache]:
    found = opened(tmp_path / "prompts", say=said.append)
    yield found
    found.close()


def ids(groups: int, start: int = 0) -> list[int]:
    return list(range(start, start + groups * CHUNK + 1))


def files(prompts: PrefixCache, tokens: list[int]) -> list[Path]:
    """Of the groups of a prompt, in order."""
    names = group_names(prompts.root, tokens, CHUNK, prompts.whole(len(tokens)))
    return [prompts._folder.path / f"{name}.kv" for name in names]


def test_every_flipped_byte_is_found_said_and_computed_again(
    prompts: PrefixCache, said: list[str]
) -> None:
    prompt = ids(2)
    read(prompts, prompt)
    prompts.flush()
    first, second = files(prompts, prompt)
    good = second.read_bytes()
    assert len(good) == GROUP
    ends = [USED + i for i in range(0, 900, 37)]
    places = [0, 4095, USED - 1, *ends, GROUP - 4096, GROUP - 4090, GROUP - 4060]
    caught = 0
    for place in places:
        bad = bytearray(good)
        bad[place] ^= 0x10
        second.write_bytes(bad)
        said.clear()
        found = read(prompts, prompt)
        prompts.flush()
        if found == CHUNK:
            caught += 1
            assert len(said) == 1
            assert "computed again" in said[0]
            assert "tokens 8 to 16" in said[0]
            assert second.read_bytes()[:USED] == good[:USED]
        else:
            assert found == 2 * CHUNK
            assert place >= USED, "only padding is not checked: nothing reads it"
    assert caught >= 12
    assert prompts.stats.damaged_groups == caught
    for length in (0, 5, 4096, GROUP - 4096, GROUP - 1):
        second.write_bytes(good[:length])
        assert read(prompts, prompt) == CHUNK, length
        prompts.flush()
        assert second.read_bytes()[:USED] == good[:USED]
    first.unlink()  # without its beginning the rest is of no use
    assert read(prompts, prompt) == 0


def test_evicted_while_it_is_read(prompts: PrefixCache) -> None:
    """A reader that has counted on a group computes it."""
    prompt = ids(4)
    read(prompts, prompt)
    prompts.flush()
    holds = prompts._folder.holds

    def then_evicted(name: str) -> bool:
        found = holds(name)
        if name in files(prompts, prompt)[2].name:
            files(prompts, prompt)[2].unlink()
        return found

    prompts._folder.holds = then_evicted  # type: ignore[method-assign]
    cache = empty()
    reuse = prompts.restore(prompt, cache)
    assert (reuse.tokens, reuse.damaged) == (2 * CHUNK, 0)
    assert cache.get_seq_length() == 2 * CHUNK
    prompts._folder.holds = holds  # type: ignore[method-assign]
    assert read(prompts, prompt) == 2 * CHUNK
    prompts.flush()
    assert read(prompts, prompt) == 4 * CHUNK


def test_least_recently_used_go_first_and_the_limit_holds(tmp_path: Path) -> None:
    said: list[str] = []
    limit = 6 * GROUP
    prompts = opened(tmp_path, limit=limit, say=said.append)
    (tmp_path / "mine.txt").write_text("not of the cache")

    def size() -> int:
        return sum(p.stat().st_size for p in tmp_path.rglob("*.kv"))

    a, b, c = ids(3), ids(3, 1000), ids(3, 2000)
    for prompt in (a, b, a, c):
        read(prompts, prompt)
        prompts.flush()
        assert size() <= limit
    assert prompts.stored(a) == 3 * CHUNK, "used after b"
    assert prompts.stored(b) == 0
    assert prompts.stored(c) == 3 * CHUNK
    # Of a prompt its end goes first: what is left can be used.
    read(prompts, c)
    read(prompts, ids(1, 3000))
    prompts.flush()
    assert prompts.stored(a) == 2 * CHUNK
    assert said == []
    prompts.close()
    # Another model's groups count, and go, too.
    other = PrefixCache(tmp_path, {"x": 1}, chunk=CHUNK, limit=limit, group_bytes=GROUP)
    read(other, ids(5))
    other.flush()
    other.close()
    again = opened(tmp_path, limit=limit)
    assert size() <= limit
    assert again.stored(c) < 3 * CHUNK
    again.close()
    assert (tmp_path / "mine.txt").read_text() == "not of the cache"


def test_a_prompt_larger_than_the_limit_keeps_its_beginning(tmp_path: Path) -> None:
    said: list[str] = []
    prompts = opened(tmp_path, limit=3 * GROUP, say=said.append)
    read(prompts, ids(6))
    prompts.flush()
    assert prompts.stored(ids(6)) == 3 * CHUNK
    assert len(said) == 1
    assert "--prompt-cache-limit" in said[0]
    assert "from 24 on" in said[0]
    # That ends nothing for others, which a server reads next: they take its place.
    for start in (1000, 2000):
        read(prompts, ids(2, start))
        prompts.flush()
        assert prompts.stored(ids(2, start)) == 2 * CHUNK
    read(prompts, ids(6, 3000))
    prompts.flush()
    assert prompts.stored(ids(6, 3000)) == 3 * CHUNK
    assert len(said) == 1
    prompts.close()


def test_a_full_disk_is_said_once(
    prompts: PrefixCache, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, nbytes: int, directory: str, **_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("offload.kv.prefix_folder.reserve", full)
        for start in (0, 100, 200):
            assert read(prompts, ids(3, start)) == 0
        prompts.flush()
    assert len(said) == 1
    assert "No space left" in said[0]
    assert list(prompts._folder.path.iterdir()) == []
    # Somebody has cleared it: a server goes on.
    for want in (0, 3 * CHUNK):
        assert read(prompts, ids(3)) == want
    assert len(said) == 1


def test_a_disk_that_hangs_is_waited_for_once(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [*range(3 * CHUNK + 1)]
    prompts = opened(tmp_path / "prompts", say=said.append)
    read(prompts, ids)
    prompts.flush()
    comes_back, whole = threading.Event(), PrefixFolder.read

    def hanging(*args: Any) -> Any:
        comes_back.wait()
        return whole(*args)

    monkeypatch.setattr(PrefixFolder, "read", hanging)
    monkeypatch.setattr(prefix_thread, "WAIT_S", 0.1)
    try:
        assert read(prompts, ids) == 0
        monkeypatch.setattr(prefix_thread, "WAIT_S", 3600.0)
        assert read(prompts, ids) == 0  # at once
        assert len(said) == 1
        assert "not used" in said[0]
        comes_back.set()
        prompts.flush()
        while prompts._thread.hangs:
            os.sched_yield()
        assert read(prompts, ids) == 3 * CHUNK
        comes_back.clear()
        monkeypatch.setattr(prefix_thread, "WAIT_S", 0.1)
        assert read(prompts, ids) == 0
        prompts.close()  # at once
    finally:
        comes_back.set()
        prompts.close()


def test_a_disk_that_hangs_in_a_write_ends_nothing(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither ``flush`` nor ``close`` waits for it for ever."""
    comes_back, whole = threading.Event(), PrefixFolder.publish

    def hanging(*args: Any) -> Any:
        comes_back.wait()
        return whole(*args)

    monkeypatch.setattr(PrefixFolder, "publish", hanging)
    monkeypatch.setattr(prefix_thread, "WAIT_S", 0.1)
    flushed, closed = (opened(tmp_path / name, say=said.append) for name in ("one", "two"))
    try:
        for prompts in (flushed, closed):
            read(prompts, ids(1))
        flushed.flush()
        assert len(said) == 1
        closed.close()
        assert len(said) == 2
        assert all("not used" in text for text in said)
    finally:
        comes_back.set()
        flushed.close()
        closed.close()


def test_a_pipe_in_the_place_of_a_group_is_not_waited_for(
    prompts: PrefixCache, said: list[str]
) -> None:
    ids = [*range(2 * CHUNK + 1)]
    read(prompts, ids)
    prompts.flush()
    for file in prompts._folder.path.iterdir():
        file.unlink()
        os.mkfifo(file)
    assert read(prompts, ids) == 0
    assert "not a regular file" in said[0]


def test_bad_directories_and_limits(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(OffloadError, match="is not a directory"):
        open_directory(file)
    with pytest.raises(OffloadError, match="cannot be made"):
        open_directory(file / "below")
    with pytest.raises(OffloadError, match=r"below one group.*8 tokens take 32\.0 KiB"):
        opened(tmp_path, limit=GROUP - 1)
    with pytest.raises(OffloadError, match="too short"):
        PrefixCache(tmp_path, {}, chunk=1, limit=2**20, group_bytes=10)


SCRIPT = """
import os, signal, sys
sys.path[:0] = {path!r}
import test_prefix_faults as t
from pathlib import Path
from offload.io.files import DirectFile
directory, how = Path(sys.argv[1]), sys.argv[2]
def write(self, offset, buf, whole=DirectFile.write):
    whole(self, offset, buf[: buf.nbytes // 8192 * 4096])
    os.kill(os.getpid(), signal.SIGKILL)
def fill_until_killed(how):
    replace = os.replace
    def killed(*args, **kwargs):
        if how == "kill-after":
            replace(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "kill-write":
        DirectFile.write = write
    else:
        os.replace = killed
    prompts = t.opened(directory / how)
    t.read(prompts, t.ids(3))
    prompts.flush()
if how.startswith("kill"):
    # A process each, from one that has imported everything and begun nothing.
    for one in how.split():
        child = os.fork()
        if child == 0:
            try:
                fill_until_killed(one)
            finally:
                os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    sys.exit()
prompts = t.opened(directory, limit=12 * t.GROUP)
print("ready", flush=True)
sys.stdin.readline()
found = 0
for turn in range(40):
    found += t.read(prompts, t.ids(1 + turn % 5, 10000 * (turn % 4)))
prompts.close()
print(found)
"""


def start(directory: Path, how: str) -> subprocess.Popen[str]:
    code = textwrap.dedent(SCRIPT).format(path=[str(Path(__file__).parent), os.getcwd()])
    return subprocess.Popen(
        [sys.executable, "-c", code, str(directory), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_killed_in_a_write(tmp_path: Path) -> None:
    cases = (("kill-write", 0), ("kill-before", 1), ("kill-after", 1))
    process = start(tmp_path, " ".join(how for how, _ in cases))
    shown, _ = process.communicate(timeout=240)
    assert shown.split() == [str(-signal.SIGKILL)] * len(cases)
    for how, left in cases:
        directory = tmp_path / how
        found = list(directory.rglob("*.kv*"))
        assert len(found) == left, found
        prompts = opened(directory)
        kept = read(prompts, ids(3))
        assert kept == (CHUNK if how == "kill-after" else 0)
        prompts.flush()
        assert read(prompts, ids(3)) == 3 * CHUNK
        if how == "kill-before":  # a whole file without its own name
            assert [p.name[0] for p in found] == ["."]
            old = found[0].stat().st_mtime - 2 * LEFT_S
            os.utime(found[0], (old, old))
            read(prompts, ids(1, 500))
            prompts.flush()
            assert not found[0].exists()
        prompts.close()


def test_two_processes_on_one_directory(tmp_path: Path) -> None:
    """They write, read, evict and damage nothing of each other's."""
    both = [start(tmp_path, "share") for _ in range(2)]
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    shown = []
    for process in both:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in both:
        shown.append(process.communicate(timeout=240)[0])
        assert process.returncode == 0
    assert sum(int(text) for text in shown) > 0
    kept = sum(p.stat().st_size for p in tmp_path.rglob("*.kv"))
    assert 0 < kept <= 14 * GROUP, "each may be one group over for a moment"
