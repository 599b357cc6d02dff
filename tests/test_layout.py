"""The root's doors, and that importing the package is cheap."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_doors_lead_to_the_packages() -> None:
    for name in ("scheduler", "io", "cpu_ops"):
        assert (ROOT / name).is_symlink()
        assert (ROOT / name).resolve() == ROOT / "offload" / name
    assert not (ROOT / "offload" / "io" / "__init__.py").exists()


def test_no_two_test_modules_have_one_name() -> None:
    """Without packages pytest imports them by their names alone, and leaves the second out."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py"))
    assert [name for name, n in names.items() if n > 1 and name != "conftest.py"] == []


def test_importing_offload_imports_nothing_heavy() -> None:
    code = "import offload, sys; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"
