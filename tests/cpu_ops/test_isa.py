"""Choosing instructions, the disk cache, and processors unlike this one."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_support import restore_threads

from offload.cpu_ops import isa, threads
from offload.cpu_ops.isa import Isa, choose
from offload.errors import OffloadError

__all__ = ["restore_threads"]

ROOT = Path(__file__).resolve().parents[2]

RUN = """
import sys
import numpy as np
from offload.cpu_ops.entries import warm
from offload.cpu_ops.formats import FORMATS
from offload.cpu_ops.isa import choose
from offload.cpu_ops.kernels import gemv
from offload.cpu_ops.packing import pack_rows, quantize
fmt = FORMATS["q4_0"]
w = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
out = np.empty(32, np.float32)
cached = warm(["q4_0"])
gemv(fmt, pack_rows(fmt, quantize(fmt, w), 64), 32, 64, w[0], out)
print([choose().value, cached["q4_0"], out.tobytes().hex()])
"""


def elsewhere(cache: Path, **environment: str) -> list[object]:
    """(instruction set, whether the kernel was cached, its result) in another process."""
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "NUMBA_CACHE_DIR": str(cache), **environment},
    )
    found: list[object] = ast.literal_eval(done.stdout)
    return found


@pytest.mark.slow
def test_cache_and_other_processors(tmp_path: Path) -> None:
    """A second process compiles nothing; one with another processor's flags does not use the
    first's code; results are equal on all of them."""
    best = choose().value
    first = elsewhere(tmp_path)
    assert first[:2] == [best, False]
    assert elsewhere(tmp_path) == [best, True, first[2]]
    portable = elsewhere(tmp_path, OFFLOAD_ISA="portable")
    assert portable == ["portable", False, first[2]]
    if "sse2" not in isa.features():
        pytest.skip("the other processors of this test are x86-64")
    generic = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    assert elsewhere(tmp_path, **generic) == ["portable", False, first[2]]
    if "avx2" in isa.features():
        haswell = {
            "NUMBA_CPU_NAME": "haswell",
            "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+f16c,+sse4.2,+ssse3,+popcnt",
        }
        assert elsewhere(tmp_path, **haswell) == ["avx2", False, first[2]]


def test_forcing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_ISA", "portable")
    assert choose() is Isa.PORTABLE
    monkeypatch.setenv("OFFLOAD_ISA", "mmx")
    with pytest.raises(OffloadError, match="'mmx' is no instruction set; use avx512vnni, avx2"):
        choose()
    assert choose("portable") is Isa.PORTABLE
    monkeypatch.delenv("OFFLOAD_ISA")
    monkeypatch.setattr(isa, "features", lambda: frozenset({"avx2", "fma", "f16c"}))
    assert choose() is Isa.AVX2
    with pytest.raises(OffloadError, match=r"needs avx512bw, .* unset it to use avx2"):
        choose("avx512vnni")
    monkeypatch.setattr(isa, "features", frozenset)
    assert choose() is Isa.PORTABLE


@pytest.mark.usefixtures("restore_threads")
def test_threads_that_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(OffloadError, match="at least 1 thread, not 0"):
        threads.setup(0)
    monkeypatch.setattr(threads, "openmp", lambda: None)
    assert threads.setup(4) == 1
    assert "run on 1 thread instead of 4" in caplog.text
