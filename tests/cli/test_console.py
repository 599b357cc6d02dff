"""What is printed is what was said: no markup, no emoji, and nothing is imported for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SAID = "/models/[red]a[/red]:smile:/m"

PRINTED = f"""
import sys
from offload.cli import console
said = {SAID!r}
console.err().print(said, soft_wrap=True)
console.err().print(console.rows([(said, "1", said)], heads=[said, "number", ""]))
console.note(said)
with console.byte_progress() as report:
    report(said, 0, 2)
    report(said, 2, 2)
with console.share_progress(said) as report:
    report(said, 0.5)
with console.waiting(said):
    pass
print([name for name in sys.modules if name == "rich._emoji_codes"])
"""


@pytest.mark.parametrize("terminal", [False, True])
def test_names_are_neither_markup_nor_emoji(terminal: bool) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PRINTED],
        capture_output=True, text=True, check=True,
        env=os.environ | {"COLUMNS": "200", "TERM": "xterm", "FORCE_COLOR": "1" * terminal},
    )  # fmt: skip
    assert run.stdout.strip() == "[]", "a table of emoji was compiled"
    # The line, the table's head and two cells, the note, and on a terminal three kinds of progress.
    assert run.stderr.count(SAID) >= (5 if not terminal else 8)
