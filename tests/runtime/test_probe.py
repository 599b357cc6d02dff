"""The probe as a whole, what it finds as data, and the cache."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offload.errors import PlanError, StoreError
from offload.runtime import hardware_cache
from offload.runtime import probe as probe_module
from offload.runtime.hardware_cache import (
    cache_path,
    default_threads,
    disk_name,
    load_cached,
    machine_key,
    save,
)
from offload.runtime.probe import Effort, probe
from offload.scheduler.hardware import BYTES_PER_S, FLOP_PER_S, Hardware, Rate

TINY = Effort(
    file_bytes=4 << 20,
    request_bytes=64 << 10,
    depth=2,
    ram_bytes=8 << 20,
    matmul_side=128,
    samples=3,
    sample_s=0.001,
)


def rate(value: float = 1e9, unit: str = BYTES_PER_S) -> Rate:
    return Rate.of([value, value / 2, value * 2], unit)


def hardware(**changes: object) -> Hardware:
    facts: dict[str, object] = {
        "ssd_read": rate(3e9),
        "ssd_write": rate(2e9),
        "ssd_mixed": rate(),
        "ram_read": rate(30e9),
        "memcpy": rate(10e9),
        "matmul": {"float32": rate(1e11, FLOP_PER_S)},
        "gemv": {"float32": rate(2e10), "bfloat16": rate(1e10)},
        "cores": 2,
        "ram_bytes": 1 << 34,
        "name": "a machine",
    }
    return Hardware(**(facts | changes))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/offload/hardware.json"


def test_probe_measures_everything_and_restores_torch(tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    before = torch.get_num_threads()
    found = probe(
        tmp_path, threads=1, effort=TINY, progress=lambda what, share: seen.append((what, share))
    )
    assert torch.get_num_threads() == before
    assert found.cores == 1
    assert found.h2d is None
    assert set(found.matmul) == set(found.gemv) == {"float32", "bfloat16"}
    rates = [found.ssd_read, found.ssd_write, found.ssd_mixed, found.ram_read, found.memcpy]
    assert all(r.n == 3 for r in (*rates, *found.matmul.values(), *found.gemv.values()))
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert [what for what, _ in seen][-6:] == [
        "RAM",
        "memcpy",
        "GEMV float32",
        "matmul float32",
        "GEMV bfloat16",
        "matmul bfloat16",
    ]
    assert Hardware.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_checkpoint_s_own_files_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b.safetensors", "a.safetensors", "other"):
        (tmp_path / name).touch()
    asked: list[list[str]] = []

    def sampled(paths: list[Path]) -> list[float]:
        asked.append([p.name for p in paths])
        return [3e9, 1e9, 2e9]

    monkeypatch.setattr(probe_module, "sample", sampled)
    found = probe_module._of_a_checkpoint(tmp_path)
    assert found is not None
    assert (found.low, found.median, found.high) == (1e9, 2e9, 3e9)
    assert asked == [["a.safetensors", "b.safetensors"]]
    monkeypatch.setattr(probe_module, "sample", lambda paths: [])
    assert probe_module._of_a_checkpoint(tmp_path) is None

    def broken(paths: list[Path]) -> list[float]:
        raise StoreError("no such luck")

    monkeypatch.setattr(probe_module, "sample", broken)
    assert probe_module._of_a_checkpoint(tmp_path) is None


def test_probe_needs_some_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "available_ram", lambda: 100 << 20)
    with pytest.raises(
        PlanError, match=r"100.0 MiB of RAM are available; measuring needs 256.0 MiB"
    ):
        probe(tmp_path, effort=TINY)


def test_rate_of_samples() -> None:
    r = Rate.of([3.0, 1.0, 2.0, 10.0], BYTES_PER_S)
    assert (r.median, r.low, r.high, r.n) == (2.5, 1.0, 10.0, 4)
    for bad in ([], [0.0], [-1.0], [float("nan")], [float("inf")]):
        with pytest.raises(ValueError):
            Rate.of(bad, BYTES_PER_S)
    with pytest.raises(ValueError, match="unit"):
        Rate.of([1.0], "GB/s")


def test_hardware_is_frozen_through_and_through() -> None:
    hw = hardware(h2d=rate(), d2h=rate())
    with pytest.raises(dataclasses.FrozenInstanceError):
        hw.cores = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        hw.gemv["int8"] = rate()  # type: ignore[index]
    assert hash(hw) == hash(hardware(h2d=rate(), d2h=rate()))
    assert Hardware.from_json(json.loads(json.dumps(hw.to_json()))) == hw


@pytest.mark.parametrize(
    "changes",
    [
        {"cores": 0},
        {"ram_bytes": 0},
        {"matmul": {}},
        {"matmul": {"float32": rate()}},
        {"ssd_read": rate(1.0, FLOP_PER_S)},
    ],
)
def test_hardware_refuses_nonsense(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        hardware(**changes)


def test_every_damaged_field_is_a_value_error() -> None:
    good = hardware(h2d=rate()).to_json()

    def paths(node: object, at: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
        below = (
            [p for k, v in node.items() for p in paths(v, (*at, k))]
            if isinstance(node, dict)
            else []
        )
        return [*([at] if at else []), *below]

    tried = 0
    for path in paths(good):
        values: tuple[object, ...] = (None, True, "x", [], -1, float("nan"))
        for value in values:
            if path[-1] in ("h2d", "d2h", "card") and value is None:
                continue
            if path == ("name",) and value == "x":
                continue
            broken = copy.deepcopy(good)
            node: dict[str, object] = broken
            for key in path[:-1]:
                node = node[key]  # type: ignore[assignment]
            node[path[-1]] = value
            with pytest.raises(ValueError):
                Hardware.from_json(broken)
            tried += 1
    assert tried > 200
    with pytest.raises(ValueError):
        Hardware.from_json([])


def test_the_cache_keeps_several_disks_and_is_private(own_cache: Path, tmp_path: Path) -> None:
    assert load_cached(tmp_path) is None
    assert save(tmp_path, hardware()) == own_cache == cache_path()
    assert stat.S_IMODE(own_cache.stat().st_mode) == 0o600
    save("/proc", hardware(name="another disk"))
    save(tmp_path, hardware(name="one thread"), threads=1001)
    for directory, threads, name in (
        (tmp_path, None, "a machine"),
        (tmp_path / "not/yet/made", None, "a machine"),
        ("/proc", None, "another disk"),
        (tmp_path, 1001, "one thread"),
    ):
        found = load_cached(directory, threads=threads)
        assert found is not None
        assert found.name == name
    assert load_cached(tmp_path, threads=1002) is None
    assert [p.name for p in own_cache.parent.iterdir()] == ["hardware.json"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"machines": 3}', "\xff\xfe", "[" * 100_000, '{"version": 1}']
)
def test_a_damaged_cache_is_ignored_with_a_warning_and_replaced(
    own_cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    own_cache.parent.mkdir(parents=True)
    own_cache.write_bytes(text.encode("latin-1"))
    with caplog.at_level(logging.WARNING):
        assert load_cached(tmp_path) is None
    assert "ignored" in caplog.text
    save(tmp_path, hardware())
    assert load_cached(tmp_path) == hardware()


def test_a_damaged_entry_does_not_hide_the_others(
    own_cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, hardware())
    save("/proc", hardware())
    data = json.loads(own_cache.read_text())
    data["machines"][machine_key(tmp_path)]["cores"] = "many"
    own_cache.write_text(json.dumps(data))
    assert load_cached(tmp_path) is None
    assert "cores must be int, got 'many'" in caplog.text
    assert load_cached("/proc") == hardware()


def test_another_version_is_measured_anew(own_cache: Path, tmp_path: Path) -> None:
    save(tmp_path, hardware())
    data = json.loads(own_cache.read_text())
    own_cache.write_text(json.dumps(data | {"version": 0}))
    assert load_cached(tmp_path) is None


def test_a_failed_save_keeps_the_old_file(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, hardware())

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            save(tmp_path, hardware(name="new"))
    assert load_cached(tmp_path) == hardware()
    assert [p.name for p in own_cache.parent.iterdir()] == ["hardware.json"]


def test_threads_follow_omp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    assert default_threads() == 3
    for text in ("", "0", "many"):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert 1 <= default_threads() <= (os.cpu_count() or 1)


def test_disks_are_told_apart(tmp_path: Path) -> None:
    assert disk_name("/proc").startswith("proc on ")
    assert disk_name(tmp_path) != disk_name("/proc")
    assert hardware_cache.cpu_name()


@pytest.mark.parametrize("module", ["offload.runtime.hardware_cache", "offload.runtime.probe"])
def test_the_command_line_can_look_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ), timeout=240)
