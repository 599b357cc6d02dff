"""Values of a parsed JSON file, each refused unless it is what its place asks for.

A file that somebody edited, or a program of tomorrow wrote, passes every checksum; what it says
is checked before it becomes an offset or a size. All raise ValueError that says what was found.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, prod
from typing import Any

from offload.units import brief

_LARGEST = 2**63
"""Offsets and sizes are below it, as those of files are."""


def count(value: Any, what: str) -> int:
    """An integer from 0 on that a file's size could be."""
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise ValueError(f"{what} is {brief(value)}, not a count")
    return value


def moment(value: Any, what: str) -> int:
    """A time in nanoseconds, before 1970 too."""
    if type(value) is not int or not -_LARGEST <= value < _LARGEST:
        raise ValueError(f"{what} is {brief(value)}, not a time")
    return value


def text(value: Any, what: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise ValueError(f"{what} is {brief(value)}, not text")
    return value


def real(value: Any, what: str) -> float:
    """A number, not NaN or infinite."""
    if type(value) not in (int, float) or not isfinite(value):
        raise ValueError(f"{what} is {brief(value)}, not a number")
    return float(value)


def rows(value: Any, what: str) -> list[Any]:
    """A list."""
    if not isinstance(value, list):
        raise ValueError(f"{what} is {brief(value)}, not a list")
    return value


def table(value: Any, what: str) -> dict[str, Any]:
    """An object."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {brief(value)}, not an object")
    return value


def texts(value: Any, what: str) -> Mapping[str, str]:
    """An object of strings."""
    return {key: text(v, f"{what} of {key}") for key, v in table(value, what).items()}


def shape(value: Any, what: str) -> tuple[int, ...]:
    """A tensor's sizes, whose product is a count as well."""
    sizes = tuple(count(n, what) for n in rows(value, what))
    count(prod(sizes), what)
    return sizes
