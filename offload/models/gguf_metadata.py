"""The metadata of a GGUF file, read by key with its type checked and the key named when it fails.

Keys of an architecture carry its name (``qwen3moe.block_count``). Numbers that most models have
once may be lists with one value per layer; lists of equal values count as that value.
"""

from __future__ import annotations

import math
import struct
from typing import Any, NoReturn

from offload.errors import CheckpointError, UnsupportedModelError
from offload.io.gguf import GGUFFile
from offload.units import brief


class Metadata:
    """``gguf.metadata`` under the prefix of its architecture.

    Raises:
        CheckpointError: a key is missing (on a method without default) or of the wrong type; the
            message has its full name.
        UnsupportedModelError: a number differs from layer to layer.
    """

    def __init__(self, gguf: GGUFFile) -> None:
        self.gguf = gguf
        arch = gguf.metadata.get("general.architecture")
        if not isinstance(arch, str) or not arch:
            raise CheckpointError(
                f"{gguf.name}: the metadata key general.architecture is missing; the file does "
                "not say what model it is"
            )
        self.arch = arch
        self.asked: set[str] = set()
        """Keys that were read or looked for, without the architecture's name."""

    def fail(self, why: str) -> NoReturn:
        raise CheckpointError(f"{self.gguf.name}: {why}")

    def refuse(self, why: str) -> NoReturn:
        raise UnsupportedModelError(f"{self.gguf.name}: {why}")

    def has(self, key: str) -> bool:
        self.asked.add(key)
        return f"{self.arch}.{key}" in self.gguf.metadata

    def integer(self, key: str, default: int | None = None) -> int:
        """A size or a count: an integer that is not negative."""
        value = self._value(key, default)
        if type(value) is not int or value < 0:
            self.fail(f"{self.arch}.{key} is {brief(value)}, not a count")
        return value

    def optional(self, key: str) -> int | None:
        """``integer``, or ``None`` where the key is missing or 0."""
        return self.integer(key, 0) or None

    def real(self, key: str, default: float | None = None) -> float:
        """A number; one stored as float32 gives the shortest decimal that rounds to it."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            self.fail(f"{self.arch}.{key} is {brief(value)}, not a number")
        return shortest(float(value))

    def positive(self, key: str, default: float | None = None) -> float:
        """``real`` of something that is divided by, or whose logarithm is taken."""
        value = self.real(key, default)
        if value <= 0:
            self.fail(f"{self.arch}.{key} is {value:g}, not above 0")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if type(value) is not bool:
            self.fail(f"{self.arch}.{key} is {brief(value)}, not true or false")
        return value

    def text(self, key: str, default: str = "") -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            self.fail(f"{self.arch}.{key} is {brief(value)}, not text")
        return value

    def array(self, key: str, length: int) -> list[Any] | None:
        """A list of ``length`` values (one per layer), or ``None`` where there is none."""
        self.asked.add(key)
        value = self.gguf.metadata.get(f"{self.arch}.{key}")
        if not isinstance(value, list):
            return None
        if len(value) < length:
            self.fail(f"{self.arch}.{key} has {len(value)} values for {length} layers")
        return value[:length]

    def _value(self, key: str, default: Any) -> Any:
        self.asked.add(key)
        full = f"{self.arch}.{key}"
        value = self.gguf.metadata.get(full, default)
        if value is None:
            self.fail(f"the metadata key {full} is missing; convert the model again")
        if isinstance(value, list):
            if not value:
                self.fail(f"{full} is an empty list")
            if any(v != value[0] for v in value):
                self.refuse(f"{full} differs from layer to layer ({brief(value)}): not supported")
            return value[0]
        return value


def shortest(x: float) -> float:
    """The shortest decimal that rounds to ``x`` as float32, or ``x`` if it is no float32.

    A file has 1e-6 as float32; read as a double it is 9.99999997e-07, and configs would differ.
    """
    try:
        single = struct.pack("<f", x)
    except OverflowError:
        return x
    if struct.unpack("<f", single)[0] != x:
        return x
    return next(y for d in range(1, 10) if struct.pack("<f", y := float(f"{x:.{d}g}")) == single)
