"""What products take beside their matrices, measured and set aside."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from offload.blocks import TensorSpec
from offload.models import workspace
from offload.models.workspace import (
    KERNEL_BYTES,
    MATRIX_BYTES,
    WORTH_BYTES,
    matrix_share,
    measure,
    share_for,
    workspace_bytes,
)
from offload.runtime.rss import current_rss, peak_rss, reset_peak_rss

MIB = 2**20


def needs_peaks() -> None:
    if not reset_peak_rss():
        pytest.skip("this system does not let a process reset its peak")


def matrix(nbytes: int, columns: int = 1024, dtype: str = "bfloat16") -> TensorSpec:
    return TensorSpec(name="w", dtype=dtype, shape=(nbytes // 2 // columns, columns), offset=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_share_is_a_few_steps_and_the_memory_is_given_back(dtype: torch.dtype) -> None:
    needs_peaks()
    measure(dtype)  # compiles what is kept
    before = current_rss()
    share = measure(dtype)
    assert 1 / 16 <= share <= 1.25
    assert share * 16 == int(share * 16)
    assert current_rss() < before + MATRIX_BYTES // 2
    assert peak_rss() < before + MATRIX_BYTES // 2


def test_a_copy_of_the_whole_matrix_is_seen() -> None:
    needs_peaks()
    share = measure(torch.float32, lambda x, w: F.linear(x, w.clone()))
    assert 15 / 16 <= share <= 1.25
    assert measure(torch.float32, lambda x, w: F.linear(x, w.repeat(3, 1))[:, : len(w)]) == 1.25


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_half_a_copy_is_seen_at_any_number_of_rows(rows: int) -> None:
    needs_peaks()

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w[: len(w) // 2].clone() if len(x) == rows else w)

    assert 6 / 16 <= measure(torch.float32, product) <= 12 / 16


def test_what_cannot_be_measured_is_a_whole_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "reset_peak_rss", lambda: False)
    assert measure(torch.bfloat16) == 1.0
    assert matrix_share(torch.int8, 1) == 1.0


def test_only_large_matrices_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def share(dtype: torch.dtype, threads: int) -> float:
        asked.append(dtype)
        return 0.125

    monkeypatch.setattr(workspace, "matrix_share", share)
    assert share_for([]) == share_for([matrix(WORTH_BYTES - 2**20)]) == 1.0
    assert asked == []
    assert share_for([matrix(2**20, dtype="float16"), matrix(WORTH_BYTES)]) == 0.125
    assert asked == [torch.bfloat16]


def test_set_aside_is_the_share_and_the_kernels_but_no_more_than_the_matrix() -> None:
    largest, other = matrix(64 * MIB), matrix(2 * MIB, columns=512)
    vector = TensorSpec(name="v", dtype="float32", shape=(5000,), offset=0)
    both = [largest, other, largest, vector]
    assert workspace_bytes(both, 1 / 16) == 4 * MIB + 4 * KERNEL_BYTES
    assert workspace_bytes(both, 1.0) == 64 * MIB
    assert workspace_bytes(both, 1.25) == 80 * MIB
    assert workspace_bytes([other], 1 / 16) == 2 * MIB * 1 // 16 + 2 * KERNEL_BYTES
    assert workspace_bytes([matrix(MIB)], 1 / 16) == MIB
    assert workspace_bytes([], 0.5) == 0
