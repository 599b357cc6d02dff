"""Functions of kernels are LLVM code: machine code is made of the kernel they are linked into."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba.core import types
from numba.core.ccallback import CFunc

from offload.cpu_ops.linking import LinkedLibrary
from offload.cpu_ops.tags import inline, outline
from offload.cpu_ops.vectors import load_int, store_float


@inline
def inlined(n: int) -> int:
    return 3 * n


@outline
def called(n: int) -> int:
    total = 0
    for i in range(n):
        total += inlined(i)
    return total


def body(address: int) -> None:
    store_float(address, np.float32(called(load_int(address))))


def test_only_the_kernel_is_made_machine_code() -> None:
    options: dict[str, Any] = {"error_model": "numpy"}
    kernel: Any = CFunc(body, ((types.int64,), types.void), {}, options)
    kernel.compile()
    memory = np.array([5], np.int64)
    kernel.ctypes(memory.ctypes.data)
    assert memory.view(np.float32)[0] == 30
    engine = kernel._library._codegen._engine
    assert engine.is_symbol_defined(kernel.native_name)
    for function in (inlined, called):
        (compiled,) = function.overloads.values()  # type: ignore[attr-defined]
        assert isinstance(compiled.library, LinkedLibrary)
        assert not engine.is_symbol_defined(compiled.fndesc.mangled_name)


def test_python_cannot_call_what_is_only_linked() -> None:
    with pytest.raises(TypeError, match="is called by kernels, not by Python"):
        inlined(1)
