"""tiny_moe with templates to test a chat with, and a terminal to type into."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from cli_support import Cli

MIB = 2**20
TINY = Path(__file__).parents[2] / "examples" / "tiny_moe"
END = "<|endoftext|>"
TURNS = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}" + END + "{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""What was generated comes back as it was, up to how its text is tokenised again."""


def checkpoint(directory: Path, template: str | None) -> Path:
    """tiny_moe with another chat template, or none; the weights are links."""
    directory.mkdir(parents=True)
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        (directory / file).write_bytes((TINY / file).read_bytes())
    for file in ("model.safetensors", "tokenizer.json"):
        (directory / file).symlink_to(TINY / file)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def tight(cli: Cli, path: Path, target: Path, context: int, *words: object) -> int:
    """A budget that has room for less than half of the weights."""
    report = target / "plan.json"
    plan = ("plan", "-m", path, "--no-predict", "-c", context, "--json", report, *words)
    assert cli(*plan).code == 0
    # The least counts the process's heap, which differs a little from one moment to the next.
    ram = int(json.loads(report.read_text())["minimum_bytes"]["ram"]) + 4 * MIB
    return ram


def assert_streams(plan: dict[str, Any]) -> None:
    """The plan left less than half of the weights in memory."""
    ram = plan["tiers"]["ram"]
    held = ram["pinned_bytes"] + ram["ring_bytes"] + ram["slots"] * ram["slot_bytes"]
    assert held < plan["weight_bytes"] / 2, (held, plan["weight_bytes"])
    assert plan["streams"]


START = """
import fcntl, os, signal, sys, termios
# The terminal's Ctrl-C reaches the session that has it as its controlling terminal.
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)
from offload.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


PASTE_SWITCHES = ("\x1b[?2004h", "\x1b[?2004l\r")
"""How the terminal is asked to mark what is pasted, before each prompt and after its line."""


class Typist:
    """A process at a pseudo-terminal. Waits for what it shows, never for a time."""

    def __init__(self, words: Sequence[object]) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *map(str, words)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
        )
        os.close(slave)
        self.seen = ""
        """Everything shown so far."""
        self._from = 0

    def __enter__(self) -> Typist:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str) -> str:
        """Until ``text`` is shown after what was waited for last; returns what came up to it."""
        while (at := self.seen.find(text, self._from)) < 0:
            if not self._read():
                raise AssertionError(f"it ended without showing {text!r}:\n{self.seen}")
        before = self.seen[self._from : at]
        self._from = at + len(text)
        return before

    def end(self) -> int:
        """Until it ends by itself; returns its exit code."""
        while self._read():
            pass
        return self.process.wait(timeout=240)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._master], [], [], 120)
        if not ready:
            raise AssertionError(f"nothing was shown for two minutes:\n{self.seen}")
        try:
            data = os.read(self._master, 65536)
        except OSError:  # EIO: the last process at the terminal is gone
            return False
        self.seen += data.decode(errors="replace").replace("\r\n", "\n")
        for switch in PASTE_SWITCHES:
            self.seen = self.seen.replace(switch, "")
        return bool(data)
