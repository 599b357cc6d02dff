"""An output appears whole, whatever happens, and replaces nothing that is not one."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offload.errors import OffloadError, StoreError
from offload.io.safetensors import CheckpointIndex, read_header
from offload.train import output, output_target
from offload.train.output import check_target, write_model


@pytest.fixture
def base(tmp_path: Path) -> Path:
    source = tmp_path / "base"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "none"}')
    return source


def put(target: Path, base: Path, fill: int = 1, count: int = 3, size: int = 5000) -> None:
    plan = [(f"t{i}", "uint8", (size,)) for i in range(count)]
    write_model(target, base, plan, lambda _: memoryview(bytes([fill]) * size), run_id=f"r{fill}",
                shard_bytes=size)  # fmt: skip


def whole(target: Path, fill: int) -> bool:
    index = CheckpointIndex.open(target)
    return all(
        set((target / f).read_bytes()[index.headers[0].data_start :]) == {fill} for f in index.files
    )


def hidden(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.name.startswith(".")]


def test_an_empty_directory_and_an_earlier_output_are_replaced(tmp_path: Path, base: Path) -> None:
    out = tmp_path / "deep" / "out"
    assert check_target(out) is None
    put(out, base, 1)
    assert check_target(out) == "r1"
    put(out, base, 2, count=2)
    assert check_target(out) == "r2"
    assert whole(out, 2)
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        "model.safetensors.index.json", "offload_training.json",
    ]  # fmt: skip
    assert [p.name for p in out.parent.iterdir()] == ["out"]
    empty = tmp_path / "empty"
    empty.mkdir()
    put(empty, base)
    assert whole(empty, 1)


def test_what_is_not_ours_is_refused(tmp_path: Path, base: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years")
    with pytest.raises(OffloadError, match=r"other files in it \(thesis.tex\)"):
        put(other, base)
    (other / "offload_training.json").write_text('{"format": "something"}')
    with pytest.raises(OffloadError, match="not replaced"):
        check_target(other)
    with pytest.raises(OffloadError, match="is a file"):
        check_target(other / "thesis.tex")
    with pytest.raises(OffloadError, match="is the model that is trained"):
        put(base, base)
    with pytest.raises(StoreError, match="not a directory one can write to"):
        check_target(other / "thesis.tex" / "out")
    with pytest.raises(OffloadError, match="mount point"):
        check_target(Path("/"))
    assert (other / "thesis.tex").read_text() == "years"


def test_a_name_that_is_too_long_while_it_is_written(tmp_path: Path, base: Path) -> None:
    """Said before the work: it was the last thing that a training of days found out."""
    longest = tmp_path / ("x" * (os.pathconf(tmp_path, "PC_NAME_MAX") - 14))
    put(longest, base, 1)
    put(longest, base, 2)
    assert whole(longest, 2)
    for name in (longest.name + "x", "ö" * 125):
        with pytest.raises(OffloadError, match=r"2[45]\d bytes.* another 14 .*one of 241"):
            check_target(tmp_path / name)
    left = os.pathconf(tmp_path, "PC_PATH_MAX") - len(os.fsencode(tmp_path))
    deep = Path(*["y" * 200] * (left // 201))
    with pytest.raises(OffloadError, match="shorter path"):
        check_target(tmp_path / deep)


def test_files_of_others_in_an_output_are_kept(
    tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    put(out, base, 1)
    (out / "notes").mkdir()
    (out / "notes" / "scores.txt").write_text("mine")
    put(out, base, 2)
    assert whole(out, 2)
    (kept,) = [p for p in tmp_path.iterdir() if p.suffix == ".kept"]
    assert [str(p.relative_to(kept)) for p in kept.rglob("*") if p.is_file()] == [
        "notes/scores.txt"
    ]
    assert kept.name in caplog.text


def test_a_marker_cannot_delete_elsewhere(tmp_path: Path, base: Path) -> None:
    out = tmp_path / "out"
    put(out, base, 1)
    victim = tmp_path / "victim"
    victim.write_text("here")
    marker = json.loads((out / "offload_training.json").read_text())
    marker["files"].append("../victim")
    (out / "offload_training.json").write_text(json.dumps(marker))
    with pytest.raises(OffloadError, match="not replaced"):
        put(out, base, 2)
    assert victim.exists()


@pytest.mark.parametrize("exchanges", [True, False])
def test_both_ways_to_replace(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    out = tmp_path / "out"
    put(out, base, 1)
    if exchanges:
        assert output_target.exchange(out, base)
        assert output_target.exchange(out, base)
    else:
        monkeypatch.setattr(output_target, "exchange", lambda *_: False)
    put(out, base, 2)
    assert whole(out, 2)
    assert not hidden(tmp_path)


def test_a_failure_leaves_the_old_one(tmp_path: Path, base: Path) -> None:
    out = tmp_path / "out"
    put(out, base, 1)

    def short(name: str) -> memoryview:
        return memoryview(b"123" if name == "b" else b"1234")

    plan = [("a", "uint8", (4,)), ("b", "uint8", (4,))]
    with pytest.raises(ValueError, match="b has 4 bytes, 3 were given"):
        write_model(out, base, plan, short, run_id="r")
    with pytest.raises(ValueError, match=r"is to be uint8, values of torch\.int8"):
        write_model(out, base, plan, lambda _: torch.ones(4, dtype=torch.int8), run_id="r")
    assert whole(out, 1)
    assert not hidden(tmp_path)


def test_a_full_disk(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huge = [("a", "uint8", (2**60,))]
    with pytest.raises(StoreError, match="too little"):
        write_model(tmp_path / "out", base, huge, lambda _: pytest.fail("asked"), run_id="r")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output, "_settle", full)
    with pytest.raises(StoreError, match="No space left"):
        put(tmp_path / "out", base)
    assert [p.name for p in tmp_path.iterdir()] == ["base"]


def test_filled_by_somebody_else_in_the_meantime(tmp_path: Path, base: Path) -> None:
    out = tmp_path / "out"

    def meanwhile(_: str) -> memoryview:
        out.mkdir(exist_ok=True)
        (out / "theirs").write_text("x")
        return memoryview(b"1")

    with pytest.raises(StoreError, match="the output is complete and lies in"):
        write_model(out, base, [("a", "uint8", (1,))], meanwhile, run_id="r")
    (ours,) = tmp_path.glob("out-*")
    assert read_header(ours / "model.safetensors").tensors.keys() == {"a"}
    assert [p.name for p in out.iterdir()] == ["theirs"]


def test_leftovers_go_and_what_is_in_use_stays(tmp_path: Path, base: Path) -> None:
    out = tmp_path / "out"
    dead, other = tmp_path / ".out.0123abcd.tmp", tmp_path / ".out2.0123abcd.tmp"
    for folder in (dead, other):
        folder.mkdir()
        (folder / "half").write_text("")
    with output_target.new_directory(out, "living") as living:
        put(out, base, 1)
        assert living.is_dir()
    assert not dead.exists()
    assert other.exists()
    assert check_target(out) == "living"


def test_an_old_output_that_had_stepped_aside_is_put_back(tmp_path: Path, base: Path) -> None:
    out = tmp_path / "out"
    put(out, base, 1)
    out.rename(tmp_path / ".out.0123abcd.old")
    output_target.remove_leftovers(out)
    assert whole(out, 1)


def test_permissions_follow_the_umask(tmp_path: Path, base: Path) -> None:
    before = os.umask(0o027)
    try:
        put(tmp_path / "out", base)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750
    modes = {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "out").iterdir()}
    assert modes == {0o640}


def test_a_link_is_followed(tmp_path: Path, base: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "out")
    put(tmp_path / "link", base, 1)
    put(tmp_path / "link", base, 2)
    assert (tmp_path / "link").is_symlink()
    assert whole(tmp_path / "disk" / "out", 2)


KILLED = '''
import os, signal, sys
from pathlib import Path

from offload.train import output_target
from offload.train.output import write_model

root, exchanges = Path(sys.argv[1]), sys.argv[2] == "True"
if not exchanges:
    output_target.exchange = lambda *_: False
assert "torch" not in sys.modules  # so that a fork is cheap, and safe

def put(fill, target=root / "out"):
    plan = [(f"t{i}", "uint8", (5000,)) for i in range(3)]
    data = memoryview(bytes([fill]) * 5000)
    write_model(target, root / "base", plan, lambda _: data, run_id=str(fill), shard_bytes=5000)

def state():
    out = root / "out"
    if not out.exists():
        return None
    names = {p.name for p in out.iterdir()}
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    want = {*shards, "model.safetensors.index.json", "config.json", "offload_training.json"}
    assert names == want, names
    fills = {b for s in shards for b in (out / s).read_bytes()[-5000:]}
    (fill,) = fills
    assert output_target.read_marker(out).run == str(fill)
    return fill

def armed(at):
    """Every call that changes the disk counts down, before and after; then SIGKILL."""
    left = [at]
    def tick():
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    def counted(call):
        def with_ticks(*args, **kwargs):
            tick()
            result = call(*args, **kwargs)
            tick()
            return result
        return with_ticks
    for name in ("write", "fsync", "rename", "mkdir", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    output_target.exchange = counted(output_target.exchange)

seen, deaths, fill = set(), 0, 1
put(fill)
while True:
    old, new = fill, fill % 200 + 1
    pid = os.fork()
    if pid == 0:
        armed(deaths)
        put(new)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    found = state()
    assert found in (old, new) or (found is None and not exchanges), (deaths, found)
    seen.add("old" if found == old else "new" if found == new else "none")
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
    deaths += 1
    output_target.remove_leftovers(root / "out")
    fill = state()  # what had stepped aside is back
    assert fill in (old, new), (deaths, fill)
    assert sorted(os.listdir(root)) == ["base", "out"]
print(deaths, *sorted(seen))
'''


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_kill_at_any_point_leaves_a_whole_output(
    tmp_path: Path, base: Path, exchanges: bool
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), str(exchanges)],
        capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    deaths, *seen = done.stdout.split()
    assert int(deaths) > 30
    assert seen == (["new", "old"] if exchanges else ["new", "none", "old"])


@pytest.mark.parametrize(("nbytes", "spare"), [(8 * 2**20, 2**20), (2**40, 64 * 2**20)])
def test_what_is_left_free_is_in_proportion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int, spare: int
) -> None:
    class Disk:
        f_bavail = nbytes + spare
        f_frsize = 1

    monkeypatch.setattr(os, "statvfs", lambda _: Disk)
    output.check_space(tmp_path / "out", nbytes, {}, {})
    with pytest.raises(StoreError, match="too little"):
        output.check_space(tmp_path / "out", nbytes + 1, {}, {})
