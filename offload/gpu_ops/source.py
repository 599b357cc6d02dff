"""What is compiled: a kernel of ``kernels/`` for a format and a number of tokens."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path

from offload.cpu_ops.formats import FORMATS, Format

DIRECTORY = Path(__file__).resolve().parent / "kernels"
"""Where the sources lie; they include one another from here."""

TOKENS = (1, 4)
"""Tokens that a block can compute together. Eight take 180 to 255 registers of a thread, with which
a multiprocessor holds a block at a time and waits for memory; four take at most 128."""

MOST_THREADS = 256
"""Of a block; what the kernels are compiled for."""

OF_FORMAT = ("linear", "gate_up", "down", "dequantize")
"""Kernels that are compiled for a format, and all but the last for a number of tokens."""
PLAIN = ("quantize", "merge", "adam_fp32", "adam_bf16", "adam_8bit")


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel; ``format`` is empty and ``tokens`` 0 where it has none."""

    name: str
    format: str = ""
    tokens: int = 0

    def __post_init__(self) -> None:
        if self.name not in (*OF_FORMAT, *PLAIN):
            raise ValueError(f"there is no kernel {self.name!r}")
        if (self.name in OF_FORMAT) != (self.format in FORMATS):
            raise ValueError(f"kernel {self.name} for format {self.format!r}")

    @property
    def structure(self) -> str:
        """The format as the sources call it."""
        return self.format.upper()

    @property
    def defines(self) -> tuple[str, ...]:
        """Macros, as a compiler takes them."""
        words = [f"-DFORMAT={self.structure}"] if self.format else []
        return (*words, *([f"-DTOKENS={self.tokens}"] if self.tokens else []))

    def __str__(self) -> str:
        return f"{self.name} for weights in {self.format}" if self.format else self.name

    def text(self) -> str:
        """The source. Its last line is the digest of all files: CuPy's cache on disk knows a kernel
        by its text and options, and not by what it includes."""
        own = (DIRECTORY / f"{self.name}.cu").read_text(encoding="utf-8")
        return f"{own}// {digest()}\n"


@functools.cache
def digest() -> str:
    """Of all sources together."""
    total = hashlib.blake2b(digest_size=16)
    for file in sorted(DIRECTORY.iterdir()):
        total.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return total.hexdigest()


def kernel(name: str, format: Format | None = None, tokens: int = 1) -> Kernel:
    """The kernel that computes ``tokens`` tokens with as few passes over the weights as it can."""
    return _kernel(name, "" if format is None else format.name, tokens)


@functools.lru_cache(1024)
def _kernel(name: str, format: str, tokens: int) -> Kernel:
    if not format or name == "dequantize":
        return Kernel(name, format)
    return Kernel(name, format, next((n for n in TOKENS if n >= tokens), TOKENS[-1]))


def every_kernel() -> list[Kernel]:
    """All that there are, for tests."""
    found = [Kernel(name) for name in PLAIN]
    for name in FORMATS:
        found += [Kernel(k, name, n) for k in ("linear", "gate_up", "down") for n in TOKENS]
        found.append(Kernel("dequantize", name))
    return found
