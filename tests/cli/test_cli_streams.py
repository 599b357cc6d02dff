"""Streams that the shell has closed, or that nothing can be written to."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import START

import offload
from offload.cli.libraries import SPINS
from offload.cli.streams import standard_streams, write_words
from offload.errors import OffloadError

FULL = Path("/dev/full")


def run(words: str, redirected: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = f'exec "$0" -c "$1" {words} {redirected}'
    return subprocess.run(
        ["sh", "-c", command, sys.executable, START],
        capture_output=True, text=True, timeout=120, check=False, env=os.environ | env,
    )  # fmt: skip


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["--version", "doctor --help"])
def test_a_full_disk_behind_stdout_is_the_users_error(words: str, unbuffered: str) -> None:
    done = run(words, "> /dev/full", PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: stdout cannot be written: No space left on device; free some space or send it "
        "elsewhere"
    ]


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
def test_what_is_said_beside_the_result_may_be_lost() -> None:
    assert run("nonsense", "2> /dev/full").returncode == 2


def test_an_encoding_without_a_character(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a locale from before UTF-8: what is the result is an error, what is said is lost."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="latin-1") for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with standard_streams():
        print("\u2713", file=sys.stderr)
        print("\u00e9")
        with pytest.raises(OffloadError, match=r"latin-1, has no '\\u2713'; .*IOENCODING=utf-8"):
            print("\u2713")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_streams_are_no_reason_to_fail(closed: str) -> None:
    done = run("--version", closed)
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) == (">&-" not in closed.replace("2>&-", "").split())


FIRST_FILE = """
import os, sys
from offload.cli.streams import standard_streams, write_words
before = sys.stdin, sys.stdout, sys.stderr
with standard_streams():
    file = os.open(os.devnull, os.O_RDONLY)
    assert file > 2, file
    assert sys.stdin.read() == ""
    print("nowhere", flush=True)
    print("nowhere", file=sys.stderr, flush=True)
assert before == (sys.stdin, sys.stdout, sys.stderr)
"""


def test_no_file_gets_the_place_of_a_closed_stream() -> None:
    """What a library prints would end up in it."""
    command = 'exec "$0" -c "$1" <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", command, sys.executable, FIRST_FILE], timeout=60)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("before", "options", "said"),
    [
        ("mkdir gone; cd gone; rmdir ../gone", "", "the current directory cannot be used"),
        ("true", "-OO", "Python drops docstrings"),
    ],
)
def test_a_process_in_which_libraries_cannot_work(
    before: str, options: str, said: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        ["sh", "-c", f'{before}; exec "$0" {options} -m offload plan -m /nothing', sys.executable],
        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(offload.__file__).parents[1])},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {said}"), done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("said", "spins"), [({}, SPINS), ({"GOMP_SPINCOUNT": "77"}, "77"),
                        ({"OMP_WAIT_POLICY": "passive"}, "0")],
)  # fmt: skip
def test_how_threads_wait_for_each_other(said: dict[str, str], spins: str) -> None:
    """libgomp says what it goes by when torch is imported."""
    code = (
        "from offload.cli import libraries; libraries.set_up(verbose=False)\n"
        "import sys; assert 'torch' not in sys.modules\n"
        "import torch"
    )
    own = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=own | said | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("this torch has another OpenMP runtime than libgomp")
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_obeys_no_word_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "a\x1b]0;title\x07\r\x9b2J\x7f\u2028é\tb\n"
    for stream, seen in (
        (io.StringIO(), said),
        (_Terminal(), "a\\x1b]0;title\\x07\\x9b2J\\x7f\u2028é\tb\n"),
    ):
        monkeypatch.setattr(sys, "stdout", stream)
        write_words(said)
        assert stream.getvalue() == seen
