"""The training text: the prose of Python's own documentation, as Debian packages it.

``apt-get install python3.11-doc`` puts the HTML under ``/usr/share/doc/python3.11/html``. Only
headings and paragraphs are kept: code listings, signatures, tables and navigation are left out,
because a model of a few million parameters learns prose *or* code from a few megabytes, not both.
The text is (c) Python Software Foundation, under the PSF License Agreement, version 2.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

HTML_ROOT = Path("/usr/share/doc/python3.11/html")
DEBIAN_PACKAGE = "python3.11-doc"
SECTIONS = (
    "tutorial", "howto", "faq", "using", "reference", "library", "extending", "c-api",
    "whatsnew", "installing", "distributing",
)  # fmt: skip
# The change log (misc/NEWS) is larger than everything else together and reads like commit titles.
SKIPPED_PAGES = frozenset({"whatsnew/changelog.html"})
HELD_OUT_ONE_IN = 20


@dataclass(frozen=True, slots=True)
class Page:
    """One page of the documentation: ``text`` has one heading or paragraph per line."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the page is kept for validation; decided by its name, never by chance."""
        digest = hashlib.sha256(self.name.encode()).digest()
        return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


class _Prose(HTMLParser):
    """Collects the text of ``<p>`` and ``<h1>``..``<h4>`` inside the page's body."""

    _KEPT = frozenset({"p", "h1", "h2", "h3", "h4"})
    _DROPPED = frozenset({"pre", "table", "script", "style", "nav", "footer", "dt"})
    _VOID = frozenset({"br", "img", "input", "link", "meta", "hr", "col"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.lines: list[str] = []
        self._open: list[tuple[str, bool]] = []  # (tag, whether it hides its text)
        self._body_depth: int | None = None
        self._current: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self._VOID:
            return
        given = dict(attrs)
        classes = (given.get("class") or "").split()
        if tag == "div" and (given.get("role") == "main" or "body" in classes):
            self._body_depth = self._body_depth or len(self._open) + 1
        hidden = tag in self._DROPPED or "headerlink" in classes or "versionmodified" in classes
        self._open.append((tag, hidden or bool(self._open and self._open[-1][1])))
        if tag in self._KEPT and self._body_depth and not self._open[-1][1]:
            self._flush()
            self._current = []

    def handle_endtag(self, tag: str) -> None:
        # Tolerate unclosed tags: close back to the matching one, or ignore a stray end tag.
        for depth in range(len(self._open) - 1, -1, -1):
            if self._open[depth][0] == tag:
                del self._open[depth:]
                break
        if tag in self._KEPT:
            self._flush()
        if self._body_depth and len(self._open) < self._body_depth:
            self._body_depth = None

    def handle_data(self, data: str) -> None:
        if self._current is not None and not (self._open and self._open[-1][1]):
            self._current.append(data)

    def _flush(self) -> None:
        if self._current is not None:
            line = re.sub(r"\s+", " ", "".join(self._current)).strip()
            if line:
                self.lines.append(line)
        self._current = None


def read_pages(root: Path = HTML_ROOT) -> list[Page]:
    """All pages with prose, sorted by name.

    Raises:
        SystemExit: the documentation is not installed.
    """
    if not root.is_dir():
        raise SystemExit(f"{root} is missing; run: apt-get install {DEBIAN_PACKAGE}")
    pages = []
    for section in SECTIONS:
        for path in sorted((root / section).glob("*.html")):
            name = path.relative_to(root).as_posix()
            if name in SKIPPED_PAGES:
                continue
            parser = _Prose()
            parser.feed(path.read_text(encoding="utf-8"))
            parser.close()
            if parser.lines:
                pages.append(Page(name, "\n".join(parser.lines) + "\n"))
    return sorted(pages, key=lambda page: page.name)
