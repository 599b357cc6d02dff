"""Numbers as the plan of a run says them, and what its time is measured on."""

from __future__ import annotations

import pytest
import torch
from families import tiny_config
from transformers import AutoModelForCausalLM

from offload.train.describe import _time
from offload.train.rates import _real, made_up
from offload.units import format_count, format_rate


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"), (999, "999"), (1000, "1k"), (116_736, "117k"), (999_499, "999k"),
        (999_500, "1M"), (5_655_168, "5.66M"), (12_000_000, "12M"), (1_235_814_400, "1.24B"),
        (70_553_706_496, "70.6B"), (1_026_408_232_448, "1.03T"),
    ],
)  # fmt: skip
def test_counts_have_three_digits(count: int, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0.00123, "0.00123"), (9.876, "9.88"), (999.4, "999"), (999.6, "1,000"), (1163.2, "1,163")],
)
def test_rates_have_no_exponent(rate: float, text: str) -> None:
    assert format_rate(rate) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (26.114, "26.11 s"), (0.1, "0.10 s"), (0.0997, "100 ms"), (0.0421, "42 ms"),
        (0.0042, "4.2 ms"),
    ],
)  # fmt: skip
def test_times_are_plain_numbers(seconds: float, text: str) -> None:
    assert _time(seconds) == text


def test_units_that_are_timed_use_most_of_their_experts() -> None:
    """Each expert has a fixed cost, which is most of a tiny one's."""
    config = tiny_config("qwen3_moe", num_local_experts=12)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    layer = made_up(model.model.layers[0])
    before = torch.get_rng_state()
    hidden = _real(torch.empty(64, config.hidden_size, dtype=torch.bfloat16, device="meta"))
    assert torch.equal(torch.get_rng_state(), before)
    scores = hidden.float() @ layer.mlp.gate.weight.float().T
    chosen = scores.topk(config.num_experts_per_tok).indices
    assert len(chosen.unique()) >= 10
