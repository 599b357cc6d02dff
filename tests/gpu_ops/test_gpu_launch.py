"""CuPy: what is said where it is missing, refuses, or meets a kernel that does not compile."""

from __future__ import annotations

import builtins
import ctypes
import importlib
import re
import sys
import threading
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from offload.errors import DeviceError, OffloadError
from offload.gpu_ops import launch
from offload.gpu_ops.arguments import LinearArgs
from offload.gpu_ops.launch import OPTIONS, CupyLauncher, compile_error, import_cupy
from offload.gpu_ops.source import DIRECTORY, Kernel

LINEAR = Kernel("linear", "mxfp4", 1)


@pytest.mark.parametrize(("cuda", "extra"), [("13.0", "cuda13"), ("12.8", "cuda12")])
def test_cupy_is_missing(monkeypatch: pytest.MonkeyPatch, cuda: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(OffloadError, match=rf"CuPy is missing.*'offload\[{extra}\]'"):
        import_cupy()


def test_cupy_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def broken(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "cupy":
            raise RuntimeError("libcudart.so.13: cannot open")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", broken)
    with pytest.raises(OffloadError, match=r"CuPy failed: libcudart.so.13: cannot open; install"):
        import_cupy()


def test_a_driver_that_is_too_old_for_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch may work with it, which brings a runtime of its own."""
    cupy = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)

    def counted() -> int:
        raise RuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")

    cupy.cuda.runtime.getDeviceCount = counted
    with pytest.raises(OffloadError, match="CuPy failed: cudaErrorInsufficientDriver"):
        CupyLauncher(torch.device("cuda", 0))


def test_a_compilers_log_is_shortened() -> None:
    log = "\n".join(
        ["linear.cu(5): warning: odd"] + [f"linear.cu({i}): error: no {i}" for i in range(40)]
    )
    said = str(compile_error(LINEAR, RuntimeError(log)))
    assert said.startswith("kernel linear for weights in mxfp4 does not compile for this card:")
    assert "error: no 0\n" in said
    assert "(and 34 more lines)" in said
    assert "odd" not in said
    assert said.count("\n") < 12


class FakeCupy(types.ModuleType):
    """As much of CuPy as a launch uses; functions write down what they are called with."""

    def __init__(self, fails: str = "", at_launch: str = "") -> None:
        super().__init__("cupy")
        self.calls: list[Any] = []
        self.modules: list[dict[str, Any]] = []
        outer = self

        class Device:
            def __init__(self, index: int) -> None:
                self.index = index

            def __enter__(self) -> None:
                outer.calls.append(("on", self.index))

            def __exit__(self, *_: object) -> None:
                outer.calls.append("left")

        class RawKernel:
            @property
            def kernel(self) -> Any:  # compiled when it is asked for
                if fails:
                    raise RuntimeError(fails)
                return types.SimpleNamespace(ptr=1000 + len(outer.modules))

        class RawModule:
            def __init__(self, **words: Any) -> None:
                outer.modules.append(words)

            def get_function(self, name: str) -> RawKernel:
                del name
                return RawKernel()

        def launch_kernel(*words: int) -> None:
            if at_launch:
                raise RuntimeError(at_launch)
            *_, parameters, extra = words
            assert extra == 0
            at = ctypes.c_void_p.from_address(parameters).value
            assert at
            outer.calls.append((words[:-2], ctypes.string_at(at, ctypes.sizeof(LinearArgs))))

        self.cuda = types.SimpleNamespace(
            Device=Device,
            driver=types.SimpleNamespace(launchKernel=launch_kernel),
            runtime=types.SimpleNamespace(getDeviceCount=lambda: 4),
        )
        self.RawModule = RawModule


class FakeStream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle
        self.after: list[FakeStream] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.after.append(other)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> list[FakeStream]:
    """The stream that torch computes on is the last of the list; the card is the third."""
    streams = [FakeStream(0x10)]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: streams[-1])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda _: streams[-1].cuda_stream, raising=False
    )
    return streams


def launcher(monkeypatch: pytest.MonkeyPatch, cupy: FakeCupy) -> CupyLauncher:
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return CupyLauncher(torch.device("cuda", 3))


def test_a_launch(monkeypatch: pytest.MonkeyPatch, stream: list[FakeStream]) -> None:
    cupy = FakeCupy()
    card = launcher(monkeypatch, cupy)
    arguments = LinearArgs(rows=7, columns=64, tokens=2)
    card.launch(LINEAR, (5, 2), 64, arguments)
    (module,) = cupy.modules
    assert "linear_block" in module["code"]
    assert module["options"] == (*OPTIONS, "-DFORMAT=MXFP4", "-DTOKENS=1")
    said = ((1001, 5, 2, 1, 64, 1, 1, 0, 0x10), bytes(arguments))
    # Compiled for that card, and first launched with it current.
    assert cupy.calls == [("on", 3), "left", ("on", 3), said, "left"]
    card.launch(LINEAR, (5, 2), 64, arguments)
    assert cupy.calls[5:] == [said]
    assert len(cupy.modules) == 1
    assert stream[0].after == []


def test_a_thread_of_its_own_and_another_card_are_brought_to_the_card(
    monkeypatch: pytest.MonkeyPatch, stream: list[FakeStream]
) -> None:
    """Where nothing is current the driver would refuse, and elsewhere know no such kernel."""
    del stream
    cupy = FakeCupy()
    card = launcher(monkeypatch, cupy)
    launch_one = partial(card.launch, LINEAR, (1, 1), 32, LinearArgs())
    launch_one()
    for start in (lambda: in_thread(launch_one), lambda: elsewhere(monkeypatch, launch_one)):
        cupy.calls.clear()
        start()
        assert cupy.calls[0] == ("on", 3)
        assert cupy.calls[-1] == "left"


def in_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def elsewhere(monkeypatch: pytest.MonkeyPatch, work: Callable[[], None]) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        work()


def test_another_stream_comes_after_the_last(
    monkeypatch: pytest.MonkeyPatch, stream: list[FakeStream]
) -> None:
    """Scratch is used again: what is queued there next must not overtake."""
    card = launcher(monkeypatch, FakeCupy())
    card.launch(LINEAR, (1, 1), 32, LinearArgs())
    stream.append(FakeStream(0x20))
    card.launch(LINEAR, (1, 1), 32, LinearArgs())
    card.launch(LINEAR, (1, 1), 32, LinearArgs())
    assert stream[1].after == [stream[0]]
    stream.append(stream[0])  # and back
    card.launch(LINEAR, (1, 1), 32, LinearArgs())
    assert stream[0].after == [stream[1]]


def test_a_kernel_that_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    card = launcher(monkeypatch, FakeCupy(fails="nvrtc: error: invalid value for --gpu-arch"))
    with pytest.raises(OffloadError, match=r"in mxfp4 does not compile.*\n.*invalid value"):
        card.prepare(LINEAR)


def test_a_card_that_fails(monkeypatch: pytest.MonkeyPatch, stream: list[FakeStream]) -> None:
    del stream
    card = launcher(monkeypatch, FakeCupy(at_launch="CUDA_ERROR_ILLEGAL_ADDRESS: illegal\nmore"))
    with pytest.raises(DeviceError, match=r"kernel linear .* \(4 x 1 blocks of 32 threads\): CUDA"):
        card.launch(LINEAR, (4, 1), 32, LinearArgs())


def test_the_runtime_compiler_takes_every_file() -> None:
    """NVRTC has no headers of the toolkit and of the system; it needs no card."""
    pytest.importorskip("cupy", exc_type=ImportError, reason="CuPy is not installed")
    from cupy_backends.cuda.libs import nvrtc

    try:
        nvrtc.getVersion()
    except Exception as error:  # noqa: BLE001  as many kinds as there are ways to lack a library
        pytest.skip(f"no NVRTC: {error}")
    for name in ("linear", "gate_up", "down", "dequantize", "quantize", "merge"):
        kernel = Kernel(
            name,
            "" if name in ("quantize", "merge") else "q5_k",
            4 if name in ("linear", "gate_up", "down") else 0,
        )
        program = nvrtc.createProgram(kernel.text(), f"{name}.cu", (), ())
        # As CuPy does it.
        options = (*OPTIONS, *kernel.defines, "-ftz=true", "-arch=sm_80")
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            pytest.fail(f"{kernel}: {error}: {nvrtc.getProgramLog(program)}")
        assert nvrtc.getCUBIN(program)
        assert "mul.rn.f32" in (text := nvrtc.getPTX(program).decode()) or name == "merge"
        assert not re.findall(r"\b(?:add|mul|fma|div)[.\w]*\.ftz\b.*", text)


def test_no_arithmetic_hangs_on_what_the_compiler_is_told_of_small_numbers() -> None:
    """CuPy compiles with ``-ftz=true``: what is not written out takes numbers below 2^-126 as 0."""
    text = (DIRECTORY / "lane.cuh").read_text()
    for name, instruction in (
        ("fma32", "fma"),
        ("mul32", "mul"),
        ("add32", "add"),
        ("sub32", "sub"),
        ("divide", "div"),
    ):
        found = re.search(rf"DEVICE float {name}\(.*?\n}}", text, re.DOTALL)
        assert found is not None
        assert f'asm("{instruction}.rn.f32 ' in found[0]
    sources = "\n".join(f.read_text() for f in DIRECTORY.iterdir())
    assert not re.findall(r"__f(?:ma|add|mul|div|sub|sqrt)\w*", sources)


def test_nothing_of_cupy_is_imported_before_a_card_is_used() -> None:
    assert launch.__name__ in sys.modules
    if "cupy" in sys.modules:
        pytest.skip("another test has imported CuPy")
    for name in ("experts", "linear"):
        importlib.import_module(f"offload.gpu_ops.{name}")
    assert "cupy" not in sys.modules
