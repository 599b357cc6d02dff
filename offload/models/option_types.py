"""Whether an option is of the type its field is declared with: said in one sentence, and not by
whatever meets it later."""

from __future__ import annotations

import operator
import os
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

import torch

from offload.errors import OffloadError

_WANTED: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    torch.dtype: "a torch dtype",
}


def check_types(declared: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` by the fields of the dataclass ``declared``. Integers of other libraries become
    ``int``, other kinds of paths ``Path``.

    Raises:
        OffloadError: a value of another type than its field's.
    """
    hints = typing.get_type_hints(declared)
    return {name: _checked(name, value, hints[name]) for name, value in values.items()}


def check_progress(progress: Any) -> None:
    """Raises OffloadError: something that cannot be called."""
    if progress is not None and not callable(progress):
        raise OffloadError(
            f"progress is {progress!r}; give a function of (what, done_bytes, total_bytes)"
        )


def check_path(path: Any) -> Path:
    """Raises OffloadError: no path at all."""
    try:
        return Path(os.fsdecode(path))
    except TypeError:
        raise OffloadError(f"the model is {path!r}; give a directory, a file or a hub id") from None


def _checked(name: str, value: Any, hint: Any) -> Any:
    kinds = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    for kind in kinds:
        fits, taken = _take(value, kind)
        if fits:
            return taken
    wanted = " or ".join(_name(kind) for kind in kinds if kind is not NoneType)
    raise OffloadError(f"{name} is {value!r}; give {wanted}")


def _name(kind: Any) -> str:
    if typing.get_origin(kind) is Callable:
        return "a function"
    return _WANTED.get(kind) or f"a {kind.__name__}"


def _take(value: Any, kind: Any) -> tuple[bool, Any]:
    """Whether ``value`` is of ``kind``, and what to go on with."""
    origin = typing.get_origin(kind)
    if kind is Any:
        return True, value
    if origin is Callable:
        return callable(value), value
    if kind is bool:
        return isinstance(value, bool), value
    if kind is int:
        try:
            return not isinstance(value, bool), operator.index(value)
        except TypeError:
            return False, value
    if kind is Path and isinstance(value, (os.PathLike, bytes)):
        return True, Path(os.fsdecode(value))
    return isinstance(value, origin or kind), value


__all__ = ["check_path", "check_progress", "check_types"]
