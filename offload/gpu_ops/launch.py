"""Who compiles and launches kernels: ``Launcher``, and the one that does it with CuPy.

Kernels go on torch's current stream and nothing waits for them. Tests have a launcher of their own
that runs the same sources on the CPU.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

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


Raw = Callable[..., object]
"""The driver's ``cuLaunchKernel``."""
_Parameters = ctypes.c_void_p * 1


class CupyLauncher:
    """Kernels compiled by NVRTC, for the card that is there, and kept in CuPy's cache on disk.

    CuPy compiles and loads; a launch goes to the driver itself. By way of CuPy's functions it takes
    some 10 us more (a stream and a card made current and put back, an array for the arguments), as
    much as the kernel of a small matrix, and a token has hundreds of them.

    Raises:
        OffloadError: CuPy is missing or does not work; the message names the extra to install.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._index = device.index
        self._cupy = import_cupy()
        self._place = self._cupy.cuda.Device(device.index)
        self._raw: Raw = self._cupy.cuda.driver.launchKernel
        self._functions: dict[Kernel, int] = {}
        self._modules: list[Any] = []  # what functions belong to
        self._last = -1  # torch's stream of the last launch
        self._streams: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._known = threading.local()  # whether the calling thread is on the card

    def prepare(self, kernel: Kernel) -> None:
        """See ``Launcher``."""
        with self._lock:
            if kernel not in self._functions:
                self._functions[kernel] = self._compile(kernel)

    def _compile(self, kernel: Kernel) -> int:
        with self._place:  # CuPy loads a module onto the card that is current
            module = self._cupy.RawModule(
                code=kernel.text(), options=(*OPTIONS, *kernel.defines), backend="nvrtc"
            )
            try:
                function = module.get_function(kernel.name)
                address = int(function.kernel.ptr)
            # NVRTC's own error and the driver's have no common base but Exception.
            except Exception as error:
                raise compile_error(kernel, error) from error
        self._modules.append((module, function))
        return address

    def launch(
        self, kernel: Kernel, grid: tuple[int, int], threads: int, arguments: Arguments
    ) -> None:
        """See ``Launcher``.

        Raises:
            DeviceError: the card has failed.
        """
        function = self._functions.get(kernel)
        if function is None:
            self.prepare(kernel)
            function = self._functions[kernel]
        try:
            # torch leaves another card current than the one whose tensors it computes on, and a
            # thread that has not asked the card for anything yet has none.
            if getattr(self._known, "here", False) and torch.cuda.current_device() == self._index:
                self._start(function, grid, threads, arguments)
            else:
                with self._place:
                    self._start(function, grid, threads, arguments)
                self._known.here = True
        except Exception as error:
            raise DeviceError(
                f"the card did not take kernel {kernel} ({grid[0]} x {grid[1]} blocks of {threads} "
                f"threads): {_first_lines(str(error), 1)}"
            ) from error

    def _start(
        self, function: int, grid: tuple[int, int], threads: int, arguments: Arguments
    ) -> None:
        # One parameter, by value: the driver has read it when the call returns.
        parameters = _Parameters(ctypes.addressof(arguments))
        self._raw(
            function, grid[0], grid[1], 1, threads, 1, 1, 0, self._stream(),
            ctypes.addressof(parameters), 0,
        )  # fmt: skip

    def floats_at(self, address: int, count: int) -> torch.Tensor:
        """See ``Launcher``."""
        return torch.as_tensor(_Floats(address, count), device=self.device)

    def _stream(self) -> int:
        """Torch's current stream. Scratch memory is used again by the next call, so what moves to
        another stream comes after what was queued on the one before."""
        handle: int = torch._C._cuda_getCurrentRawStream(self._index)
        if handle != self._last:
            current = self._streams[handle] = torch.cuda.current_stream(self.device)
            if self._last in self._streams:
                current.wait_stream(self._streams[self._last])
            self._last = handle
        return handle


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
