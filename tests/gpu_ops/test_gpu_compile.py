"""Every kernel compiles for the cards it is meant for, without a warning or a register spilled."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from offload.cpu_ops.formats import FORMATS
from offload.gpu_ops import source
from offload.gpu_ops.launch import OPTIONS
from offload.gpu_ops.source import DIRECTORY, MOST_THREADS, OF_FORMAT, PLAIN, TOKENS, Kernel

nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")

ARCHITECTURES = ("sm_80", "sm_90")
REGISTERS = 65536
"""Of a multiprocessor."""


def compile_cubin(file: Path, architecture: str, *options: str) -> str:
    """What the assembler says of the kernels in ``file``."""
    done = subprocess.run(
        [
            "nvcc", *OPTIONS, f"-arch={architecture}", "-cubin", "-Xptxas=-v,--warning-as-error",
            "-Werror=all-warnings", *options, str(file), "-o", str(file.with_suffix(".cubin")),
        ],
        capture_output=True, text=True, check=False, cwd=file.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


def one_source(tokens: int, names: tuple[str, ...]) -> str:
    """Kernels ``names`` for every format in one source: a compiler's start takes longer than they.
    What each file of its own compiles to, one body with the macros' values, is the same."""
    lines = ['#include "dequantize.cuh"', '#include "experts.cuh"', '#include "linear.cuh"']
    arguments = {"linear": "LinearArgs", "dequantize": "DequantizeArgs"}
    for name in names:
        for fmt in FORMATS:
            body = f"{name}_block<{fmt.upper()}{'' if name == 'dequantize' else f', {tokens}'}>"
            lines.append(
                f'extern "C" __global__ void __launch_bounds__({MOST_THREADS}) {name}_{fmt}'
                f"(const __grid_constant__ {arguments.get(name, 'ExpertArgs')} a) {{ {body}(a); }}"
            )
    return "\n".join(lines) + "\n"


def check(said: str, count: int) -> None:
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", said)]
    assert len(spills) == len(registers) == count
    assert set(spills) == {("0", "0")}
    assert max(registers) * MOST_THREADS <= REGISTERS


@pytest.mark.sampled(2)
@nvcc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_every_format_compiles(tmp_path: Path, tokens: int, architecture: str) -> None:
    names = OF_FORMAT if (tokens, architecture) == (1, "sm_80") else ("gate_up",)
    file = tmp_path / "all.cu"
    file.write_text(one_source(tokens, names))
    check(compile_cubin(file, architecture), len(names) * len(FORMATS))


@nvcc
@pytest.mark.parametrize("name", [*OF_FORMAT, *PLAIN])
def test_every_file_compiles(tmp_path: Path, name: str) -> None:
    kernel = Kernel(name, "q6_k" if name in OF_FORMAT else "", 4 if name in OF_FORMAT[:3] else 0)
    file = tmp_path / f"{name}.cu"
    file.write_text(kernel.text())
    check(compile_cubin(file, "sm_89", *kernel.defines), 1)


@nvcc
@pytest.mark.parametrize("name", [k for k in PLAIN if k.startswith("adam")])
def test_no_instruction_of_the_optimizer_takes_small_numbers_as_zero(
    tmp_path: Path, name: str
) -> None:
    """CuPy compiles with -ftz=true, under which whatever the compiler itself chooses for floats
    (a negation, a comparison) does: moments below 2^-126 were 0 on a card that are not on a CPU."""
    file = tmp_path / f"{name}.cu"
    file.write_text(Kernel(name).text())
    said = tmp_path / "said.ptx"
    subprocess.run(
        ["nvcc", *OPTIONS, "-arch=sm_80", "-ftz=true", "-ptx", str(file), "-o", str(said)],
        check=True,
    )
    assert [line for line in said.read_text().splitlines() if ".ftz" in line] == []


def test_every_source_is_used() -> None:
    """And is in the wheel: it is data of the package."""
    text = (DIRECTORY.parents[2] / "pyproject.toml").read_text()
    assert '"offload.gpu_ops" = ["kernels/*.cu", "kernels/*.cuh"]' in text
    files = {f.name for f in DIRECTORY.iterdir()}
    assert {f"{name}.cu" for name in (*OF_FORMAT, *PLAIN)} == {
        f for f in files if f.endswith(".cu")
    }
    included = {
        name for f in DIRECTORY.iterdir() for name in re.findall(r'#include "(.+)"', f.read_text())
    }
    assert included == {f for f in files if f.endswith(".cuh")}


def test_a_change_of_any_file_is_another_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuPy's cache must not give an old kernel for a new header."""
    before = Kernel("merge").text()
    assert before == Kernel("merge").text()
    copied = Path(shutil.copytree(DIRECTORY, tmp_path / "kernels"))
    with (copied / "lane.cuh").open("a") as header:
        header.write("// more\n")
    monkeypatch.setattr(source, "DIRECTORY", copied)
    source.digest.cache_clear()
    try:
        assert Kernel("merge").text() != before
    finally:
        source.digest.cache_clear()


def test_a_kernel_for_every_need() -> None:
    fmt = FORMATS["q4_k"]
    assert source.kernel("linear", fmt, 1) == Kernel("linear", "q4_k", 1)
    assert source.kernel("linear", fmt, 2) == source.kernel("linear", fmt, 99)
    assert source.kernel("linear", fmt, 2).defines == ("-DFORMAT=Q4_K", "-DTOKENS=4")
    assert len(set(source.every_kernel())) == len(PLAIN) + len(FORMATS) * (3 * len(TOKENS) + 1)
    with pytest.raises(ValueError, match="no kernel 'gemm'"):
        Kernel("gemm")
    with pytest.raises(ValueError, match="for format 'q3_k'"):
        Kernel("linear", "q3_k", 1)
