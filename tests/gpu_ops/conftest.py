from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cpu_card import CpuCard, built


@pytest.fixture(scope="session")
def library() -> Path:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not on the PATH: the kernels' arithmetic is not checked here")
    return built()


@pytest.fixture
def card(library: Path) -> CpuCard:
    return CpuCard(library)
