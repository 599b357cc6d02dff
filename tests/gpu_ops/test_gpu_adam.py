"""The optimizer's kernels on a card: the bits of the CPU's, from the source that a card runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cpu_card import CpuCard

from offload.cpu_ops.adam import adam_fp32
from offload.cpu_ops.adam_states import adam_8bit, adam_bf16, blocks
from offload.cpu_ops.adam_step import AdamStep
from offload.errors import OffloadError
from offload.gpu_ops.adam import Range, adam

COUNT = 2 * 1024 + 256 + 37
"""Two tasks of threads, a whole 8-bit block, and a part of one."""

STEPS = {
    "usual": {"clip": 0.37, "weight_decay": 0.1},
    "l2": {"decoupled": False, "weight_decay": 0.1},
    "from the gradient": {"beta1": 0.3, "beta2": 0.5},
    "no eps": {"eps": 0.0, "weight_decay": 0.0},
}


def floats(seed: int, scale: float = 1.0) -> npt.NDArray[np.float32]:
    """Of many sizes, zeros and subnormal numbers among them."""
    rng = np.random.default_rng(seed)
    size = 10.0 ** rng.uniform(-6, 1, COUNT)
    out = (rng.standard_normal(COUNT) * size * scale).astype(np.float32)
    out[::17] = 0
    out[5::101] = 1e-40
    return out


def bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def where(card: CpuCard, **arrays: Any) -> Range:
    """The arrays as addresses that the card may use."""
    dtypes = {}
    for name in ("gradient", "copy"):
        array = arrays.get(name)
        dtypes[f"{name}_dtype"] = "float32" if _is_wide(array) else "bfloat16"
    card.give(*(a for a in arrays.values() if a is not None))
    at = {k: 0 if a is None else a.ctypes.data for k, a in arrays.items()}
    return Range(count=len(arrays["p"]), **at, **dtypes)


def _is_wide(array: Any) -> bool:
    return array is not None and array.dtype == np.float32


@pytest.mark.sampled(2)
@pytest.mark.parametrize("gradient", ["float32", "bfloat16", "none"])
@pytest.mark.parametrize(("how", "backwards"), [("usual", True), *((how, False) for how in STEPS)])
@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
def test_three_steps_are_the_cpus(
    card: CpuCard, states: str, how: str, gradient: str, backwards: bool
) -> None:
    card.backwards = backwards
    if states == "bf16":
        ours = {"p": bits(floats(1)), "m": np.zeros(COUNT, np.uint16)}
        ours["v"] = ours["m"].copy()
    elif states == "8bit":
        ours = {"p": floats(1), "m": np.zeros(COUNT, np.uint8), "v": np.zeros(COUNT, np.uint8)}
        for name in ("m_scales", "v_scales"):
            ours[name] = np.zeros(blocks(COUNT), np.float32)
    else:
        ours = {"p": floats(1), "m": np.zeros(COUNT, np.float32), "v": np.zeros(COUNT, np.float32)}
    if states != "bf16":
        ours["copy"] = np.zeros(COUNT, np.float32 if how == "l2" else np.uint16)
    cpu = {name: array.copy() for name, array in ours.items()}
    seed, first = -5, 64 << 31  # beyond 32 bits
    for k in range(1, 4):
        step = AdamStep(lr=1e-3, step=k, **STEPS[how])  # type: ignore[arg-type]
        grad: Any = None
        if gradient != "none":
            wide = floats(10 + k, 0.01)
            grad = wide if gradient == "float32" else bits(wide)
        adam(card, states, step, where(card, gradient=grad, **ours), seed=seed, first=first)
        known = np.zeros(COUNT, np.uint16) if grad is None else grad
        if states == "bf16":
            adam_bf16(step, known, **cpu, seed=seed, first=first)  # type: ignore[arg-type]
        elif states == "8bit":
            adam_8bit(step, known, **cpu)  # type: ignore[arg-type]
        else:
            adam_fp32(step, known, **cpu)  # type: ignore[arg-type]
        for name, array in ours.items():
            np.testing.assert_array_equal(array, cpu[name], err_msg=f"{name} in step {k}")


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_block_with_one_infinity_is_lost_as_on_the_cpu(card: CpuCard, value: float) -> None:
    p, gradient = floats(1), floats(2)
    gradient[300] = value
    m, v = (np.full(COUNT, 3, np.uint8) for _ in "mv")
    scales = [np.ones(blocks(COUNT), np.float32) for _ in "mv"]
    at = where(card, gradient=gradient, p=p, m=m, v=v, m_scales=scales[0], v_scales=scales[1])
    adam(card, "8bit", AdamStep(lr=1e-3, step=2), at)
    for scale in scales:
        assert np.isnan(scale).nonzero()[0].tolist() == [1]


def test_stochastic_rounding_begins_at_a_group(card: CpuCard) -> None:
    p = bits(floats(1))
    at = where(card, gradient=None, p=p, m=p.copy(), v=p.copy())
    with pytest.raises(OffloadError, match="a multiple of 64"):
        adam(card, "bf16", AdamStep(lr=1e-3, step=1), at, first=32)
