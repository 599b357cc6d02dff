"""How many threads a command computes with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from offload.cli import threads


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _quota(monkeypatch: pytest.MonkeyPatch, quota: float | None) -> None:
    monkeypatch.setattr(threads, "cpu_quota", lambda: quota)


def test_a_quota_takes_threads_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _quota(monkeypatch, 0.75)
    threads.use_threads(None)
    assert torch.get_num_threads() == 1
    said = capsys.readouterr().err
    assert "1 of 2 threads" in said and "CPU quota of 0.75 " in said and "-t" in said  # noqa: PT018


@pytest.mark.parametrize("quota", [None, 64.0])
def test_without_one_torch_decides(
    quota: float | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _quota(monkeypatch, quota)
    torch.set_num_threads(3)
    threads.use_threads(None)
    assert torch.get_num_threads() == 3
    assert not capsys.readouterr().err


def test_what_the_user_says_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    _quota(monkeypatch, 0.5)
    threads.use_threads(2)
    assert torch.get_num_threads() == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    threads.use_threads(None)
    assert torch.get_num_threads() == 2
