"""Rows that cannot be used: what is wrong with each, and whether that ends the run."""

from __future__ import annotations

from collections.abc import Callable

from offload.errors import DataError


class BadRow(Exception):
    """One row cannot be used; the text says what was found, the caller knows where."""


class Tally:
    """Counts of what happened to rows, each with the place of the first.

    Args:
        skip: bad rows are counted instead of raised.
    """

    def __init__(self, skip: bool) -> None:
        self._skip = skip
        self.bad = 0
        self.cut = 0
        self.first_bad = ""
        self._first_cut = ""

    def reject(self, place: str, reason: BadRow) -> None:
        """A bad row.

        Raises:
            DataError: bad rows are not to be skipped.
        """
        if not self._skip:
            raise DataError(f"{place}: {reason}; --skip-bad-rows leaves such rows out")
        self.bad += 1
        self.first_bad = self.first_bad or f"{place}: {reason}"

    def truncate(self, place: str) -> None:
        """A row lost its end."""
        self.cut += 1
        self._first_cut = self._first_cut or place

    def tell(self, note: Callable[[str], None], name: str, seq_len: int) -> None:
        """One sentence per kind of loss, none if there was none."""
        if self.bad:
            rows = "1 bad row" if self.bad == 1 else f"{self.bad} bad rows"
            note(f"{name}: {rows} skipped; the first: {self.first_bad}")
        if self.cut:
            rows = "1 row is" if self.cut == 1 else f"{self.cut} rows are"
            note(
                f"{name}: {rows} longer than {seq_len} tokens and lost the end; "
                f"the first: {self._first_cut}; raise --seq-len to keep them whole"
            )
