"""Reading and multiplying at once: figures that can be, from real reads of a sparse file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from offload.cli.planning import main_dtype
from offload.errors import StoreError
from offload.io.safetensors import read_header
from offload.runtime import probe_together
from offload.runtime.probe_together import AREA_BYTES, area_bytes, measure, measure_fewer


@pytest.fixture(scope="module")
def long_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("long") / "model.bin"
    with path.open("wb") as file:
        file.truncate(257 << 20)
    return path


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_shares_and_rates(long_file: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr(probe_together, "AREA_BYTES", 32 << 20)
    monkeypatch.setattr(probe_together, "CACHES", Path("/nowhere"))
    monkeypatch.setattr(probe_together, "ROUNDS", 2)
    monkeypatch.setattr(probe_together, "ENTER_S", 0.02)
    monkeypatch.setattr(probe_together, "BOTH_S", 0.05)
    found = measure([long_file], dtype)
    assert found is not None
    assert 0 < found.read_beside <= 1
    assert 0 < found.gemv_beside <= 1
    assert found.product_s >= 0
    assert 2 <= found.read.n <= probe_together.MOST_ROUNDS
    assert found.gemv.low > 0


class Burst:
    """One read of a made-up disk, that ends by its clock."""

    def __init__(self, ends: float) -> None:
        self.ends = ends


class Reads:
    """``Bursts`` that take 4 ms of a clock at first, and 16 ms after 0.1 s of it."""

    def __init__(self, products: Disturbed) -> None:
        self.products = products

    def _takes(self) -> float:
        return 4e-3 if self.products.clock < 0.1 else 16e-3

    def begin(self) -> Burst:
        return Burst(self.products.clock + self._takes())

    def finish(self, burst: Burst) -> float:
        return 1 / self._takes()


def test_both_are_looked_at_when_they_have_run_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the disk and the products do once a ration is used up, and small products like large
    ones."""
    products = Disturbed(slow=-1)
    monkeypatch.setattr(probe_together.time, "perf_counter", lambda: products.clock)
    monkeypatch.setattr(Burst, "done", lambda self: products.clock >= self.ends, raising=False)
    rate, seconds = probe_together._both(Reads(products), products)  # type: ignore[arg-type]
    assert rate == pytest.approx(1 / 16e-3)
    assert seconds == pytest.approx(2e-3 + 10 * 0.2e-3)
    assert products.clock >= probe_together.ENTER_S + probe_together.BOTH_S


def test_one_thread_fewer(long_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured with so many, and nothing has changed afterwards, even if it fails."""
    before = torch.get_num_threads()
    seen: list[int] = []
    told: list[int] = []

    def noted(*_: object) -> None:
        seen.append(torch.get_num_threads())

    monkeypatch.setattr(probe_together, "measure", noted)
    try:
        torch.set_num_threads(3)
        assert measure_fewer([long_file], "float32", also=told.append) is None
        assert seen == [2]
        assert told == [2, 3]
        assert torch.get_num_threads() == 3

        def fails(*_: object) -> None:
            raise StoreError("gone")

        monkeypatch.setattr(probe_together, "measure", fails)
        with pytest.raises(StoreError, match="gone"):
            measure_fewer([long_file], "float32", also=told.append)
        assert told == [2, 3, 2, 3]
        assert torch.get_num_threads() == 3

        torch.set_num_threads(1)
        assert measure_fewer([long_file], "float32") is None
        assert seen == [2]
    finally:
        torch.set_num_threads(before)


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


def test_the_area_is_more_than_the_largest_cache_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mib = 1 << 20
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.touch()
        os.truncate(file, 300 * mib)  # a hole
    monkeypatch.setattr(probe_together, "CACHES", tmp_path / "cache")
    monkeypatch.setattr(probe_together, "available_ram", lambda: 8 << 30)
    assert area_bytes(files) == AREA_BYTES  # nobody says
    for i, size in enumerate(("48K", "2048K", "266240K", "what")):
        (tmp_path / "cache" / f"index{i}").mkdir(parents=True)
        (tmp_path / "cache" / f"index{i}" / "size").write_text(f"{size}\n")
    assert area_bytes(files) == 520 * mib
    assert area_bytes(files[:1]) == 300 * mib
    monkeypatch.setattr(probe_together, "available_ram", lambda: 400 * mib)
    assert area_bytes(files) == 100 * mib
    monkeypatch.setattr(probe_together, "available_ram", lambda: 0)
    assert area_bytes(files) == AREA_BYTES
