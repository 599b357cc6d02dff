"""What the documents name is there: files, packages, nouns, commands and their flags."""

from __future__ import annotations

import re
import shlex
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import typer

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURE = ROOT / "docs" / "architecture.md"
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    ROOT / "benchmarks" / "gpu" / "README.md",
    ARCHITECTURE,
]
FILES = [
    path.relative_to(ROOT).as_posix()
    for top in ("offload", "tests", "benchmarks", "examples", "docs")
    for path in (ROOT / top).rglob("*")
    if "__pycache__" not in path.parts
]
NOT_OURS = {"config.json", "OUT/SECTION.json"}
"""Of a model, and what a user names."""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_are_there(document: Path) -> None:
    quoted = re.findall(r"`([^`\n]+)`|\]\(([^)#]+)\)", document.read_text())
    named = {
        name
        for pair in quoted
        for name in re.findall(r"[\w./*-]+\.(?:py|cu|cuh|cpp|json|md|png)\b", " ".join(pair))
    }
    assert named or document.name == "CONTRIBUTING.md"
    assert [
        name
        for name in sorted(named - NOT_OURS)
        if not any(fnmatch(path, name) or fnmatch(path, f"*/{name}") for path in FILES)
    ] == []


def test_the_architecture_names_every_package() -> None:
    packages = {
        path.parent.relative_to(ROOT / "offload").as_posix()
        for path in (ROOT / "offload").rglob("*.py")
    } - {"."}
    named = re.findall(r"^\| `([\w/]+)` \|", ARCHITECTURE.read_text(), re.MULTILINE)
    assert packages - set(named) == set()
    assert len(packages) > 10


def test_nouns_are_defined_where_the_architecture_says() -> None:
    """In one of the files that a row of the table names; a name without a folder is in the folder
    of the name before it."""
    rows = [line.split("|") for line in ARCHITECTURE.read_text().splitlines() if line[:1] == "|"]
    checked = 0
    for _, nouns, where, *_ in (row for row in rows if len(row) == 5):
        folder, text = "", ""
        for name in re.findall(r"`([^`]+\.py)`", where):
            folder = name.rpartition("/")[0] or folder
            for path in sorted((ROOT / "offload" / folder).glob(name.rpartition("/")[2])):
                text += path.read_text()
        for noun in re.findall(r"`([A-Z]\w+)`", nouns):
            assert re.search(rf"^(class {noun}\b|{noun} = )", text, re.MULTILINE), noun
            checked += 1
    assert checked > 60


def commands() -> dict[str, Any]:
    """By their words: ``generate``, ``bench cache``."""
    from offload.cli.main import app

    found: dict[str, Any] = {}

    def walk(command: Any, words: tuple[str, ...]) -> None:
        found[" ".join(words)] = command
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, (*words, name))

    walk(typer.main.get_command(app), ())
    return found


def flags_of(command: Any) -> set[str]:
    shared = {"--help", "-h"}
    return shared.union(*({*p.opts, *p.secondary_opts} for p in command.params))


def test_commands_of_the_readme_have_their_flags() -> None:
    known = commands()
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    lines = re.findall(r"^offload (\w.*)$", text, re.MULTILINE)
    assert len(lines) > 30
    for line in lines:
        words = shlex.split(line, comments=True)
        name = words[0] if words[0] != "bench" else " ".join(words[:2])
        asked = {word for word in words[1:] if word.startswith("-")}
        assert asked <= flags_of(known[name]), line


def test_flags_in_the_text_are_flags_of_a_command() -> None:
    known = set().union(*map(flags_of, commands().values()))
    for document in (ROOT / "README.md", ARCHITECTURE):
        quoted = re.findall(r"`([^`\n]+)`", document.read_text())
        asked = {flag for text in quoted for flag in re.findall(r"(?<!\w)--[a-z][a-z-]+", text)}
        assert asked - known == set(), document.name
