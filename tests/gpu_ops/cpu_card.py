"""A launcher that runs the kernels' own source on the CPU: shim.h and harness.cpp."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from built_once import once

from offload.gpu_ops.arguments import Arguments
from offload.gpu_ops.source import DIRECTORY, MOST_THREADS, Kernel

HERE = Path(__file__).resolve().parent


def build(out: Path) -> Path:
    """Compile the harness with every kernel for every format. Raises AssertionError with the
    compiler's words: a warning is an error."""
    command = [
        "g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra",
        "-Werror", "-Wno-unknown-pragmas", f'-DOFFLOAD_SHIM="{HERE / "shim.h"}"', f"-I{DIRECTORY}",
        str(HERE / "harness.cpp"), "-o", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


def built() -> Path:
    """What ``build`` makes: six seconds, but only the first time."""
    me = Path(__file__)  # has the compiler's words
    return once(
        "kernels", [me, *HERE.glob("*.cpp"), *HERE.glob("*.h"), *DIRECTORY.iterdir()], build
    )


class CpuCard:
    """A ``Launcher`` whose card is the CPU. ``give`` says what kernels may read.

    Attributes:
        backwards: run blocks, and warps between barriers, from the last to the first.
        launched: the kernels so far.
    """

    device = torch.device("cpu")

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.run.restype = ctypes.c_char_p
        self._library.size_of.restype = ctypes.c_uint64
        self._given: list[Any] = []
        self._bounds: list[int] = []
        self.backwards = False
        self.launched: list[Kernel] = []

    def give(self, *memory: torch.Tensor | np.ndarray[Any, Any]) -> None:
        for one in memory:
            if isinstance(one, torch.Tensor):
                start, nbytes = one.data_ptr(), one.numel() * one.element_size()
            else:
                start, nbytes = one.ctypes.data, one.nbytes
            self._given.append(one)
            self._bounds += [start, start + nbytes]

    def give_everything(self) -> None:
        """For whole models: their arenas and activations come and go."""
        self._bounds = [0, 2**64 - 1]

    def size_of(self, structure: str) -> int:
        return int(self._library.size_of(structure.encode()))

    def prepare(self, kernel: Kernel) -> None:
        assert kernel.text()

    def launch(
        self, kernel: Kernel, grid: tuple[int, int], threads: int, arguments: Arguments
    ) -> None:
        assert 0 < threads <= MOST_THREADS
        assert threads % 32 == 0
        assert 0 < grid[0] < 2**31
        assert 0 < grid[1] < 2**16
        self.launched.append(kernel)
        bounds = (ctypes.c_uint64 * len(self._bounds))(*self._bounds)
        wrong = self._library.run(
            kernel.name.encode(), kernel.structure.encode(), kernel.tokens, *grid, threads,
            ctypes.byref(arguments), bounds, len(self._bounds) // 2, int(self.backwards),
        )  # fmt: skip
        assert wrong is None, f"{kernel}: {wrong.decode()}"

    def floats_at(self, address: int, count: int) -> torch.Tensor:
        memory = (ctypes.c_float * count).from_address(address)
        return torch.frombuffer(memory, dtype=torch.float32)
