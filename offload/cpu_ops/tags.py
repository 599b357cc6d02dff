"""Values that exist only while compiling: a kernel's format and instruction set.

A tag is an argument without bytes whose *type* carries the choice, so one Python function is
compiled once per (format, instruction set) and branches cost nothing. Tags also carry a digest of
this package's sources: Numba's disk cache looks at the time stamp of one file only and would go
on using code inlined from another that has changed.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from numba.core import types
from numba.core.datamodel.models import OpaqueModel
from numba.core.imputils import lower_constant
from numba.core.registry import CPUDispatcher
from numba.extending import overload, register_model, typeof_impl

from offload.cpu_ops.linking import LinkedCompiler

F = TypeVar("F", bound=Callable[..., Any])

# Numba's own annotations are partial and differ between versions.
_lower_constant: Any = lower_constant
_overload: Any = overload

# Only kernels call these functions: without the wrappers by which Python and C would call each one,
# compiling takes a fifth less.
OUTLINE: dict[str, Any] = {
    "nopython": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True,
}  # fmt: skip
OPTIONS: dict[str, Any] = {**OUTLINE, "forceinline": True}


@functools.cache
def sources_digest() -> str:
    """Of all modules beside this one."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Tag:
    """``kind``: "format" or "isa"; ``name``: which."""

    kind: str
    name: str
    sources: str


def tag(kind: str, name: str) -> Tag:
    return Tag(kind, name, sources_digest())


class TagType(types.Type):  # type: ignore[misc, unused-ignore]
    """Numba's type of a tag."""

    def __init__(self, kind: str, choice: str) -> None:
        self.choice = choice
        super().__init__(name=f"Tag({kind}, {choice})")


register_model(TagType)(OpaqueModel)


def _typeof(value: Tag, _context: Any) -> TagType:
    return TagType(value.kind, value.name)


def _constant(context: Any, _builder: Any, _type: Any, _value: Tag) -> Any:
    return context.get_dummy_value()


typeof_impl.register(Tag)(_typeof)
_lower_constant(TagType)(_constant)


class KernelFunction(CPUDispatcher):  # type: ignore[misc, unused-ignore]
    """What only compiled code can call. Numba's own dispatcher would jump to the missing wrapper,
    at address 0. The function as Python is ``py_func``, as ever."""

    def __call__(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise TypeError(f"{self.py_func.__qualname__} is called by kernels, not by Python")


def inline(function: F) -> F:
    """A function of the kernels, always inlined by LLVM."""
    return cast(F, KernelFunction(function, targetoptions=OPTIONS, pipeline_class=LinkedCompiler))


def outline(function: F) -> F:
    """A function of the kernels that is compiled once per kernel and called."""
    return cast(F, KernelFunction(function, targetoptions=OUTLINE, pipeline_class=LinkedCompiler))


def by_format(stub: F) -> Callable[[Callable[[str], Callable[..., Any]]], None]:
    """Implement ``stub(fmt, ...)`` by a function chosen from the format's name."""

    def register(choose: Callable[[str], Callable[..., Any]]) -> None:
        def implementation(fmt: TagType, *_: Any) -> Callable[..., Any]:
            return choose(fmt.choice)

        options = {**OPTIONS, "pipeline_class": LinkedCompiler}
        _overload(stub, jit_options=options, strict=False)(implementation)

    return register


def by_format_and_isa(stub: F) -> Callable[[Callable[[str, str], Callable[..., Any]]], None]:
    """Implement ``stub(fmt, isa, ...)`` by a function chosen from both names."""

    def register(choose: Callable[[str, str], Callable[..., Any]]) -> None:
        def implementation(fmt: TagType, isa: TagType, *_: Any) -> Callable[..., Any]:
            return choose(fmt.choice, isa.choice)

        options = {**OPTIONS, "pipeline_class": LinkedCompiler}
        _overload(stub, jit_options=options, strict=False)(implementation)

    return register
