"""The rate of a pack's own products, measured before it is planned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_packed_run import packed

from offload.cpu_ops import threads as kernel_threads
from offload.cpu_ops.formats import FORMATS
from offload.models.load import prepare
from offload.models.options import Options
from offload.models.pack_reader import PackedModel
from offload.models.packed_probe import PackedProducts, main_format, on_this_pack
from offload.runtime import probe_together
from offload.runtime.memory import HostMemory
from offload.scheduler.costs import PACKED, CostModel
from offload.scheduler.hardware import BYTES_PER_S, FLOP_PER_S, Hardware, Rate


def rate(value: float) -> Rate:
    return Rate.of([value], BYTES_PER_S)


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    fast = rate(1e12)
    return Hardware(
        name="made up", cores=2, ram_bytes=2**34, ssd_read=fast, ssd_write=fast, ssd_mixed=fast,
        ram_read=fast, memcpy=fast, gemv={"bfloat16": fast},
        matmul={"bfloat16": Rate.of([1e12], FLOP_PER_S)},
    )  # fmt: skip


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "bf16", "q4_k"])
def test_products_go_round_and_are_numbers(name: str) -> None:
    memory = HostMemory(20 << 20, "weights")
    try:
        products = PackedProducts(memory, FORMATS[name])
        large, small = products.nbytes
        assert large > small
        for size in range(2):
            assert products.seconds(size, 12) > 0
            assert np.isfinite(products._out[size]).all()
            # Round and round: never beyond the memory.
            start = memory.tensor().data_ptr()
            ends = [at + products.nbytes[size] for at in products._places[size]]
            assert max(ends) <= start + memory.nbytes
            assert len(ends) > 1
        assert products.tiny_s() > 0
    finally:
        memory.close()


def test_the_format_of_what_a_token_uses_most(tmp_path: Path) -> None:
    _, pack_dir = packed("qwen3_moe", tmp_path, "q4")
    pack = PackedModel.open(pack_dir)
    found = main_format(pack)
    assert found is not None
    assert {found.name} == {name for pair in pack.expert_formats() for name in pair}


def test_a_pack_too_short_to_measure_keeps_the_machines_rates(
    tmp_path: Path, hardware: Hardware
) -> None:
    _, pack_dir = packed("llama", tmp_path, "q8")
    now, fewer = on_this_pack(hardware, PackedModel.open(pack_dir))
    assert now is hardware
    assert fewer is None


@pytest.mark.parametrize("threads", [1, 2])
def test_rates_of_a_long_pack(
    threads: int, tmp_path: Path, hardware: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(threads)
    kernel_threads.setup(threads)
    monkeypatch.setattr(probe_together, "ENTER_S", 0.02)
    monkeypatch.setattr(probe_together, "BOTH_S", 0.05)
    monkeypatch.setattr(probe_together, "AREA_BYTES", 20 << 20)
    monkeypatch.setattr(probe_together, "ROUNDS", 2)
    _, pack_dir = packed("llama", tmp_path, "q8")
    pack = PackedModel.open(pack_dir)
    with (pack_dir / "bundle-99.bin").open("wb") as file:
        file.truncate(257 << 20)
    now, fewer = on_this_pack(hardware, pack)
    assert (fewer is None) is (threads == 1)
    for found in filter(None, (now, fewer)):
        assert found.gemv[PACKED].n == 2
        assert found.product_s == 0
        assert found.gemv["bfloat16"] == hardware.gemv["bfloat16"]
        assert found.matmul[PACKED].low > 0
        assert found.matmul["bfloat16"] == hardware.matmul["bfloat16"]
    assert torch.get_num_threads() == kernel_threads.count() == threads
    torch.set_num_threads(1)
    kernel_threads.setup(1)


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_several_tokens_cost_what_was_sampled(
    family: str, tmp_path: Path, hardware: Hardware
) -> None:
    """Of each token but the first, whose time is that of the bytes."""
    _, pack_dir = packed(family, tmp_path, "q4")
    pack = PackedModel.open(pack_dir)
    matmul = {**hardware.matmul, PACKED: Rate.of([1e6], FLOP_PER_S)}
    costs = CostModel(
        hardware=replace(hardware, gemv={PACKED: rate(1e6)}, matmul=matmul), flops=pack.flops()
    )
    specs = [block.spec() for block in pack.manifest.blocks if block.name in costs.flops]
    specs = [spec for spec in specs if {t.dtype for t in spec.tensors} == {PACKED}]
    assert len(specs) > 4
    for spec in specs:
        alone_s = costs.weights_s((spec,))
        assert alone_s == pytest.approx(sum(t.nbytes for t in spec.tensors) / 1e6)
        more_s = costs.weights_s((spec,), 5) - alone_s
        assert more_s == pytest.approx(4 * costs.flops[spec.id] / 1e6)


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_predictions_go_by_the_sampled_rate(
    family: str, tmp_path: Path, hardware: Hardware
) -> None:
    _, pack_dir = packed(family, tmp_path, "q4")
    seconds: list[float] = []
    asked: list[Any] = []
    for bytes_per_s in (1e6, 2e6):

        def sample(
            hardware: Hardware, pack: PackedModel, bytes_per_s: float = bytes_per_s
        ) -> tuple[Hardware, Hardware | None]:
            asked.append(pack.path)
            gemv = {**hardware.gemv, PACKED: rate(bytes_per_s)}
            return replace(hardware, gemv=gemv, product_s=0.0), None

        options = Options(ram=2**30, context=16, hardware=hardware, sample=sample)
        prepared = prepare(pack_dir, options)
        predicted = prepared.plan.predicted_pass_s
        assert predicted is not None
        seconds.append(predicted.mid)
    assert asked == [pack_dir, pack_dir]
    # Weights at 1 MB/s are all of it but what does not depend on the rate.
    assert seconds[0] > 1.7 * seconds[1]


def test_keys_and_values_at_the_end_of_the_context(hardware: Hardware, tmp_path: Path) -> None:
    """They are read like weights; fewer bits than their products are worth make them no faster."""
    _, pack_dir = packed("llama", tmp_path, "q4")
    slow = replace(hardware, gemv={PACKED: rate(1e6)})
    for kind, each in (None, 4), ("bf16", 2), ("q8", 1.2):
        found = []
        for context in (64, 64 + 1000):
            options = Options(
                ram=2**28, context=context, prompt_tokens=16, hardware=slow, kv=kind,
                sample=lambda hardware, _: (hardware, None),
            )  # fmt: skip
            prepared = prepare(pack_dir, options)
            predicted, config = prepared.plan.predicted_pass_s, prepared.meta.model.config
            assert predicted is not None
            found.append(predicted.mid)
        row = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        assert found[1] - found[0] == pytest.approx(1000 * 2 * row * each / 1e6, rel=0.02)
