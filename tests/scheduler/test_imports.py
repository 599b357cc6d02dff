"""Dependencies go one way, and no name of ours shadows the standard library."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASE = {"blocks", "errors", "units", "version"}
LOWER = BASE | {"scheduler", "io", "cpu_ops"}
MAY_IMPORT = {  # package of offload -> other packages of offload it may import
    "blocks": BASE,
    "errors": set[str](),
    "units": BASE,
    "version": set[str](),
    "scheduler": BASE,
    "io": BASE,
    "cpu_ops": BASE,
    "gpu_ops": BASE | {"cpu_ops"},
    "runtime": LOWER,
    "kv": LOWER | {"runtime"},
    "generation": BASE | {"kv"},
    "models": LOWER | {"runtime", "kv", "generation", "gpu_ops"},
    "batch": LOWER | {"runtime", "kv", "generation", "models"},
    "train": LOWER | {"runtime", "models", "gpu_ops"},
}


def imports(path: Path) -> set[str]:
    """Dotted names a file imports, at any depth (also lazily)."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            names |= {f"{node.module}.{a.name}" for a in node.names}
    return names


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_dependencies_go_one_way(package: str) -> None:
    place = ROOT / "offload" / package
    files = [place.with_suffix(".py")] if place.with_suffix(".py").exists() else []
    files += sorted(place.rglob("*.py"))
    assert files
    for path in files:
        ours = {n.split(".")[1] for n in imports(path) if n.startswith("offload.")}
        assert ours <= MAY_IMPORT[package] | {package}, path


@pytest.mark.parametrize("package", ["scheduler", "io", "cpu_ops", "gpu_ops", "runtime", "kv"])
def test_no_file_needs_itself(package: str) -> None:
    """By way of others of its package, a late import or one for its types included."""
    files = {f"offload.{package}.{p.stem}": p for p in (ROOT / "offload" / package).glob("*.py")}
    needs = {
        name: {m for n in imports(path) for m in (n, n.rpartition(".")[0])} & files.keys()
        for name, path in files.items()
    }
    while ready := [name for name, others in needs.items() if not others & needs.keys()]:
        for name in ready:
            del needs[name]
    assert not needs


def test_the_scheduler_is_pure() -> None:
    allowed = set(sys.stdlib_module_names) - {"threading", "asyncio", "time", "io", "os"}
    for path in (ROOT / "offload" / "scheduler").glob("*.py"):
        roots = {n.split(".")[0] for n in imports(path)}
        assert roots - {"offload"} <= allowed, path


def test_the_io_package_does_not_shadow_the_standard_library() -> None:
    run = subprocess.run(
        [sys.executable, "-X", "frozen_modules=off", "-c", "import io, offload; io.StringIO()"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert not (ROOT / "offload" / "io" / "__init__.py").exists()


def test_an_unquantised_run_does_without_numba(tmp_path: Path) -> None:
    """60 MB and a second, for kernels that it does not use."""
    script = """
import sys
from offload.cli.main import main
sys.argv = ["offload", "generate", "-m", sys.argv[1], "--prompt-ids", "5,6,7", "-n", "2"]
try:
    main()
finally:
    assert not {"numba", "llvmlite"} & sys.modules.keys(), "numba was imported"
"""
    model = ROOT / "examples" / "tiny_moe"
    run = subprocess.run(
        [sys.executable, "-c", script, str(model)], capture_output=True, text=True, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
