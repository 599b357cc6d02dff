"""Tokens of a text that goes on from another.

Tokenizers of SentencePiece put a blank before every text. Tokenised by itself, what follows "yes: "
would be " no", and a model would learn two blanks.
"""

from __future__ import annotations

from collections.abc import Callable

Ids = Callable[[str], list[int]]

_BEFORE = "\n"
"""Stands for what came before: tokenizers that put blanks have it as a token that joins no other,
and no text has its blank behind it."""


class Continued:
    """As ``ids``, without anything before the text.

    Args:
        ids: a text's tokens, without special ones.
    """

    def __init__(self, ids: Ids) -> None:
        self._ids = ids
        self._before = ids(_BEFORE)
        # Others are asked as they are: theirs may well have tokens for a newline and more.
        self._puts_blanks = self._behind("a") not in (None, ids("a"))

    def _behind(self, text: str) -> list[int] | None:
        n, found = len(self._before), self._ids(_BEFORE + text)
        return found[n:] if found[:n] == self._before and len(found) > n else None

    def __call__(self, text: str) -> list[int]:
        found = self._behind(text) if self._puts_blanks else None
        return self._ids(text) if found is None else found
