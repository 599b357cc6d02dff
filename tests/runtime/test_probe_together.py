"""Reading and multiplying at once: figures that can be, from real reads of a sparse file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offload.cli.planning import main_dtype
from offload.errors import StoreError
from offload.io.safetensors import read_header
from offload.runtime import probe_together
from offload.runtime.probe_together import measure


@pytest.fixture(scope="module")
def long_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("long") / "model.bin"
    with path.open("wb") as file:
        file.truncate(257 << 20)
    return path


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_shares_and_rates(long_file: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr(probe_together, "AREA_BYTES", 32 << 20)
    monkeypatch.setattr(probe_together, "ROUNDS", 2)
    found = measure([long_file], dtype)
    assert found is not None
    assert 0 < found.read_beside <= 1
    assert 0 < found.gemv_beside <= 1
    assert found.product_s >= 0
    assert 2 <= found.read.n <= probe_together.MOST_ROUNDS
    assert found.gemv.low > 0


class Disturbed:
    """Products that take ten times as long until they have run for a while."""

    nbytes = (2000, 200)

    def __init__(self, slow: int) -> None:
        self.slow, self.clock = slow, 0.0

    def one(self, size: int) -> None:
        self.slow -= 1
        self.clock += self.nbytes[size] * (1e-6 if self.slow < 0 else 1e-5)

    def seconds(self, size: int, count: int) -> float:
        began = self.clock
        for _ in range(count):
            self.one(size)
        return (self.clock - began) / count

    def tiny_s(self) -> float:
        return 1e-6


def test_rates_are_of_threads_that_have_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    products = Disturbed(slow=4)
    monkeypatch.setattr(probe_together.time, "perf_counter", lambda: products.clock)
    assert probe_together._settled_s(products, 0) == pytest.approx(2e-3)
    assert not probe_together._unsettled([9.0, *[1.0] * 5, 1.2])
    assert probe_together._unsettled([1.0, *[1.3] * 5])


def test_files_too_short_to_measure(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_bytes(bytes(1 << 20))
    assert measure([short], "float32") is None
    assert measure([], "float32") is None


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nowhere"):
        measure([tmp_path / "nowhere"], "float32")


def test_the_rate_is_the_slope_between_the_sizes() -> None:
    assert probe_together._slope([1000, 200], [10.0, 2.0]) == pytest.approx(100)
    assert probe_together._slope([1000, 200], [11.0, 3.0]) == pytest.approx(100)
    # Noise: the small one took as long as the large one, or almost.
    assert probe_together._slope([1000, 200], [10.0, 10.0]) == pytest.approx(100)
    assert probe_together._slope([1000, 200], [10.0, 9.9]) == pytest.approx(200)


def test_the_dtype_of_most_bytes(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(8, dtype=torch.float32), "b": torch.zeros(64).half()}, path)
    assert "float16" in {t.dtype for t in read_header(path).tensors.values()}
    assert main_dtype([path]) == "float16"
    assert main_dtype([]) == "float32"
