from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cpu_card import CpuCard, build


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not on the PATH: the kernels' arithmetic is not checked here")
    return build(tmp_path_factory.mktemp("gpu_ops") / "kernels.so")


@pytest.fixture
def card(library: Path) -> CpuCard:
    return CpuCard(library)
