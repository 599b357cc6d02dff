"""Dtypes that torch multiplies with its own loops: told by torch, said by the doctor."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import offload
from offload.cli.checks import Verdict, cpu_flags
from offload.runtime.slow_products import multiplies_slowly, slowness

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available(),
    reason="what is told of a processor is told of x86 with oneDNN",
)


@pytest.fixture
def without_onednn() -> Iterator[None]:
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(True)


def test_float32_is_never_slow(without_onednn: None) -> None:
    assert not multiplies_slowly(torch.float32)
    assert not multiplies_slowly(torch.float64)
    assert slowness(torch.float32) is None


@pytest.mark.usefixtures("without_onednn")
def test_without_onednn_both_halves_are_slow() -> None:
    assert multiplies_slowly(torch.bfloat16)
    assert multiplies_slowly(torch.float16)
    assert slowness(torch.bfloat16) == (
        "torch has no fast products of bfloat16 on this processor (they need AVX-512)"
    )
    check = cpu_flags()
    assert check.verdict is Verdict.BETTER
    assert "torch has no fast products of bfloat16" in check.detail
    assert "--dtype float32" in check.fix


def test_a_processor_without_avx512() -> None:
    """As oneDNN is told to see it: in a process of its own, because it looks once."""
    program = (
        "import torch; from offload.runtime.slow_products import multiplies_slowly; "
        "print(multiplies_slowly(torch.bfloat16), multiplies_slowly(torch.float32))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    )  # fmt: skip
    assert done.stdout.split() == ["True", "False"]


def test_another_torch_or_processor_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    assert not multiplies_slowly(torch.bfloat16)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert slowness(torch.bfloat16) is None


@pytest.mark.usefixtures("without_onednn")
def test_a_plan_says_that_prompts_take_long(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model: Any = LlamaForCausalLM(config)
    said = {}
    for dtype in (torch.bfloat16, torch.float32):
        directory = tmp_path / str(dtype)
        model.to(dtype).save_pretrained(directory)
        loaded = offload.load(directory, ram="256MiB")
        said[dtype] = " ".join(loaded.offload.notes)
        loaded.offload.close()
    assert "bfloat16 on this processor (they need AVX-512): prompts" in said[torch.bfloat16]
    assert "on this processor" not in said[torch.float32]
