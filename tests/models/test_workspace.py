"""What products take beside their matrices, measured and set aside."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

from offload.blocks import TensorSpec
from offload.models import workspace
from offload.models.workspace import (
    MATRIX_BYTES,
    WHOLE,
    WORTH_BYTES,
    Workspace,
    measure,
    measured,
    workspace_bytes,
    workspace_for,
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
    share, kept = measure(dtype)
    assert MIB <= kept < 4 * MIB  # all kernels are there
    assert kept % MIB == 0
    assert 1 / 16 <= share <= 1.25
    assert share * 16 == int(share * 16)
    assert current_rss() < before + MATRIX_BYTES // 2
    assert peak_rss() < before + MATRIX_BYTES // 2


def test_a_copy_of_the_whole_matrix_is_seen() -> None:
    needs_peaks()
    share = measure(torch.float32, lambda x, w: F.linear(x, w.clone())).share
    assert 15 / 16 <= share <= 1.25
    thrice = measure(torch.float32, lambda x, w: F.linear(x, w.repeat(3, 1)))
    assert thrice.share == 1.25


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_half_a_copy_is_seen_at_any_number_of_rows(rows: int) -> None:
    needs_peaks()

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w[: len(w) // 2].clone() if len(x) == rows else w)

    assert 6 / 16 <= measure(torch.float32, product).share <= 12 / 16


def test_what_cannot_be_measured_is_a_whole_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "reset_peak_rss", lambda: False)
    assert measure(torch.bfloat16) == WHOLE
    assert measured(torch.int8, 1) == WHOLE


def test_only_large_matrices_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    some = Workspace(0.125, MIB)

    def ask(dtype: torch.dtype, threads: int) -> Workspace:
        asked.append(dtype)
        return some

    monkeypatch.setattr(workspace, "measured", ask)
    assert workspace_for([]) == workspace_for([matrix(WORTH_BYTES - MIB)]) == WHOLE
    assert asked == []
    assert workspace_for([matrix(MIB, dtype="float16"), matrix(WORTH_BYTES)]) == some
    assert asked == [torch.bfloat16]


def test_set_aside_is_the_share_and_the_kernels_but_no_more_than_the_matrix() -> None:
    largest, other = matrix(64 * MIB), matrix(2 * MIB, columns=512)
    vector = TensorSpec(name="v", dtype="float32", shape=(5000,), offset=0)
    both = [largest, other, largest, vector]
    need = Workspace(1 / 16, MIB)
    assert workspace_bytes(both, need) == 4 * MIB + 2 * 2 * MIB
    assert workspace_bytes(both, WHOLE) == 64 * MIB
    assert workspace_bytes(both, Workspace(1.25, MIB)) == 80 * MIB
    assert workspace_bytes([other], need) == 2 * MIB
    assert workspace_bytes([], need) == 0


def test_what_a_product_leaves_behind_is_counted_apart() -> None:
    needs_peaks()
    held = []

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if len(w) > 64:
            held.append(torch.ones(5 * MIB, dtype=torch.uint8))
        return F.linear(x, w)

    measure(torch.float32)
    need = measure(torch.float32, product)
    assert len(held) == len(workspace.ROWS)
    assert 5 * MIB <= need.kept_bytes <= 6 * MIB
    assert need.share <= 2 / 16


@pytest.mark.parametrize(("mib", "kept"), [(5, 8), (200, 12), (430, 26), (1024, 32), (100_000, 32)])
def test_compiled_products_are_limited(
    monkeypatch: pytest.MonkeyPatch, mib: int, kept: int
) -> None:
    for name in workspace._VARIABLES:
        monkeypatch.setenv(name, "0")  # so that the state of before is restored
        monkeypatch.delenv(name)
    workspace.limit_kernels(mib << 20)
    assert [os.environ[name] for name in workspace._VARIABLES] == [str(kept)] * 2
    workspace.limit_kernels(1)  # whoever came first has decided
    assert os.environ[workspace._VARIABLES[0]] == str(kept)
    experts = [
        TensorSpec(name=n, dtype="bfloat16", shape=shape, offset=0)
        for n, shape in (("gate_up", (8, 4)), ("down", (4, 8)))
    ]
    assert workspace.kernel_bytes(experts, 200, mib << 20) == (kept - 8) * workspace.KERNEL_BYTES
    assert workspace.kernel_bytes(experts, 4, mib << 20) == 0
    assert workspace.kernel_bytes(experts, 200, 1) == 0  # as a process with so little would run
    assert workspace.kernel_bytes([], 200, mib << 20) == 0


@pytest.mark.parametrize(
    ("mib", "kept"), [(5, 8), (160, 10), (200, 20), (500, 95), (1024, 226), (100_000, 256)]
)
def test_trained_experts_have_more_compiled_products(
    monkeypatch: pytest.MonkeyPatch, mib: int, kept: int
) -> None:
    for name in workspace._VARIABLES:
        monkeypatch.setenv(name, "0")  # so that the state of before is restored
        monkeypatch.delenv(name)
    workspace.limit_kernels(mib << 20, trained=True)
    assert [os.environ[name] for name in workspace._VARIABLES] == [str(kept)] * 2
    expert = TensorSpec(name="down", dtype="bfloat16", shape=(8, 4), offset=0)
    found = workspace.kernel_bytes([expert], 600, mib << 20, trained=True)
    assert found == (kept - 8) * workspace.KERNEL_BYTES
    more = workspace.growth(mib << 20, 2**40, trained=True)
    assert more == (256 - kept) * workspace.KERNEL_BYTES
