"""Who compiles and launches kernels: ``Launcher``, and the one that does it with CuPy.

Kernels go on torch's current stream and nothing waits for them. Tests have a launcher of their own
that runs the same sources on the CPU.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import warnings
from typing import Any, Protocol

import numpy as np
import torch

from offload.errors import DeviceError, OffloadError
from offload.gpu_ops.arguments import Arguments
from offload.gpu_ops.source import DIRECTORY, Kernel

log = logging.getLogger(__name__)

OPTIONS = ("-std=c++17", f"-I{DIRECTORY}")
LOG_LINES = 6
"""Of a compiler's log, what a message shows."""


class Launcher(Protocol):
    """Compiles and launches kernels for one device.

    Attributes:
        device: where the memory lies that kernels are given.
    """

    device: torch.device

    def prepare(self, kernel: Kernel) -> None:
        """Compile a kernel, if it is not. Raises OffloadError: that fails."""
        ...

    def launch(
        self, kernel: Kernel, grid: tuple[int, int], threads: int, arguments: Arguments
    ) -> None:
        """Queue a kernel behind all that was queued on the stream that torch computes on."""
        ...

    def floats_at(self, address: int, count: int) -> torch.Tensor:
        """``count`` float32 on the device that the caller keeps alive."""
        ...


class CupyLauncher:
    """Kernels compiled by NVRTC, for the card that is there, and kept in CuPy's cache on disk.

    Raises:
        OffloadError: CuPy is missing or does not work; the message names the extra to install.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cupy = import_cupy()
        self._place = self._cupy.cuda.Device(device.index)
        self._functions: dict[Kernel, Any] = {}
        self._streams: dict[int, Any] = {}
        self._last: Any = None  # torch's stream of the last launch
        self._lock = threading.Lock()

    def prepare(self, kernel: Kernel) -> None:
        """See ``Launcher``."""
        with self._lock:
            if kernel not in self._functions:
                self._functions[kernel] = self._compile(kernel)

    def _compile(self, kernel: Kernel) -> Any:
        with self._place:
            module = self._cupy.RawModule(
                code=kernel.text(), options=(*OPTIONS, *kernel.defines), backend="nvrtc"
            )
            try:
                return module.get_function(kernel.name)
            # NVRTC's own error and the driver's have no common base but Exception.
            except Exception as error:
                raise compile_error(kernel, error) from error

    def launch(
        self, kernel: Kernel, grid: tuple[int, int], threads: int, arguments: Arguments
    ) -> None:
        """See ``Launcher``.

        Raises:
            DeviceError: the card has failed.
        """
        if kernel not in self._functions:
            self.prepare(kernel)
        # An array of one element is passed by value.
        buffer: Any = arguments
        by_value = np.frombuffer(buffer, np.dtype((np.void, ctypes.sizeof(arguments))))
        try:
            # torch leaves another card current than the one whose tensors it computes on, and CuPy
            # loads a module where it is.
            with self._place, self._stream():
                self._functions[kernel](grid, (threads,), (by_value,))
        except Exception as error:
            raise DeviceError(
                f"the card did not take kernel {kernel} ({grid[0]} x {grid[1]} blocks of {threads} "
                f"threads): {_first_lines(str(error), 1)}"
            ) from error

    def floats_at(self, address: int, count: int) -> torch.Tensor:
        """See ``Launcher``."""
        return torch.as_tensor(_Floats(address, count), device=self.device)

    def _stream(self) -> Any:
        """Torch's current stream as CuPy's. Scratch memory is used again by the next call, so what
        moves to another stream comes after what was queued on the one before."""
        current = torch.cuda.current_stream(self.device)
        if self._last is not None and current != self._last:
            current.wait_stream(self._last)
        self._last = current
        handle = current.cuda_stream
        if handle not in self._streams:
            self._streams[handle] = self._external(current)
        return self._streams[handle]

    def _external(self, stream: Any) -> Any:
        """A stream of torch's as CuPy takes it."""
        cuda = self._cupy.cuda
        if hasattr(cuda, "ExternalStream"):
            # CuPy 14 warns that 15 will not have it; 13 has nothing else.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                return cuda.ExternalStream(stream.cuda_stream, self.device.index)
        return cuda.Stream.from_external(stream)


class _Floats:
    """Memory of a card as torch takes it (the CUDA array interface, version 3)."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,), "typestr": "<f4", "data": (address, False), "version": 3,
        }  # fmt: skip


def import_cupy() -> Any:
    """CuPy. Raises OffloadError that says how to get it."""
    wanted = torch.version.cuda or ""
    extra = "cuda13" if wanted.startswith("13") else "cuda12"
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()  # fails where the driver is older than CuPy needs
    # Also what its own libraries raise where the CUDA runtime is missing.
    except Exception as error:
        what = "is missing" if isinstance(error, ModuleNotFoundError) else f"failed: {error}"
        raise OffloadError(
            f"packed weights and optimizer steps on the card need kernels that CuPy compiles, and "
            f"CuPy {what}; install it with: pip install 'offload[{extra}]', or drop --gpu and "
            f"--device"
        ) from error
    return cupy


def compile_error(kernel: Kernel, error: BaseException) -> OffloadError:
    """The compiler's complaint, shortened, with what it was about."""
    log.debug("kernel %s does not compile: %s", kernel, error)
    said = [line for line in str(error).splitlines() if "error" in line.lower()]
    text = "\n".join(said) if said else str(error)
    return OffloadError(
        f"kernel {kernel} does not compile for this card:\n{_first_lines(text, LOG_LINES)}\n"
        f"run the model without --gpu, and report this with the versions of CuPy and the driver"
    )


def _first_lines(text: str, count: int) -> str:
    lines = [line.rstrip()[:200] for line in text.strip().splitlines() if line.strip()]
    rest = len(lines) - count
    return "\n".join(lines[:count] + ([f"(and {rest} more lines)"] if rest > 0 else []))


__all__ = ["CupyLauncher", "Launcher", "compile_error", "import_cupy"]
