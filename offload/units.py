"""Byte sizes as people write them."""

from __future__ import annotations

import math
import re

from offload.errors import OffloadError

_UNITS = {
    "": 1,
    "B": 1,
    "K": 2**10, "KIB": 2**10, "KB": 10**3,
    "M": 2**20, "MIB": 2**20, "MB": 10**6,
    "G": 2**30, "GIB": 2**30, "GB": 10**9,
    "T": 2**40, "TIB": 2**40, "TB": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int | float) -> int:
    """Bytes of ``"8GiB"``, ``"1500 MB"``, ``"512M"`` (binary) or a plain number of bytes.

    Raises:
        OffloadError: the text is not a size, or is not positive.
    """
    if isinstance(text, bool):
        raise OffloadError(f"{text!r} is not a size; write bytes or e.g. '8GiB'")
    if isinstance(text, (int, float)):
        value = float(text)
        if value != value or value in (float("inf"), float("-inf")):
            raise OffloadError(f"{text!r} is not a size; write bytes or e.g. '8GiB'")
        if value != int(value):
            raise OffloadError(f"{text!r} is no whole number of bytes; write e.g. '{text}GiB'")
        n = int(text)
    elif not isinstance(text, str):
        raise OffloadError(f"{text!r} is not a size; write bytes or e.g. '8GiB'")
    else:
        found = _SIZE.fullmatch(text)
        unit = found.group(2).upper() if found else None
        if found is None or unit not in _UNITS:
            raise OffloadError(f"{text!r} is not a size; write bytes or e.g. '8GiB', '1500MiB'")
        value = float(found.group(1)) * _UNITS[unit]
        if math.isinf(value):
            raise OffloadError(f"{brief(text, 40)} is not a size: no machine has so many bytes")
        n = int(value)
    if n <= 0:
        raise OffloadError(f"a size must be positive, got {text!r}")
    return n


def format_bytes(n: int | float) -> str:
    """``1536 MiB`` style: binary units, at most one decimal."""
    sign, n = ("-", -n) if n < 0 else ("", n)
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= scale * (10 if unit == "TiB" else 1):
            return f"{sign}{n / scale:.1f} {unit}"
    return f"{sign}{n:.0f} B"


def format_rate(value: float) -> str:
    """``9.87``, ``1,160``: three digits, and no exponent."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def format_count(n: int) -> str:
    """``117k``, ``5.66M``, ``1.24B``: three digits that count, powers of ten."""
    for unit, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if n >= scale * 0.9995:  # what would round to 1000 of the unit below
            return f"{float(f'{n / scale:.3g}'):,g}{unit}"
    return str(n)


def brief(value: object, most: int = 60) -> str:
    """What ``repr`` makes of ``value``, cut in the middle if it is longer than ``most`` characters:
    a message's quotes and brackets end where they should."""
    text = repr(value)
    if len(text) <= most:
        return text
    end = text[-1] if text[-1] in "\"')]}>" else ""
    return f"{text[: most - 1 - len(end)]}…{end}"
