"""Results on the meta device that are known are those that torch would work out again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from offload.models import meta_ops
from offload.models.footprint import LiveBytes
from offload.models.meta_ops import KnownResults


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_ops, "_known", {})


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def places(value: Any) -> list[Any]:
    tensors = value if isinstance(value, tuple | list) else (value,)
    return [
        t if t is None else (t.shape, t.stride(), t.dtype, t.device, t.untyped_storage().nbytes())
        for t in tensors
    ]


HALF = on_meta(3, 1, dtype=torch.bfloat16)
WHOLE = on_meta(2, 3, 5)
IDS = on_meta(2, 4, dtype=torch.int64)

CASES = {
    "broadcasting": lambda: WHOLE * HALF,
    "a transposed one": lambda: WHOLE.transpose(0, 2) + 1,
    "a product": lambda: torch.matmul(WHOLE, on_meta(5, 7)),
    "sums": lambda: (WHOLE.sum(1), WHOLE.mean(-1, keepdim=True), WHOLE.amax((0, 2))),
    "several": lambda: torch.topk(WHOLE, 2),
    "pieces that are views": lambda: WHOLE.split(2, dim=-1),
    "joined": lambda: torch.cat([WHOLE, WHOLE.double()], dim=1),
    "rows": lambda: F.embedding(IDS, on_meta(9, 6)),
    "a norm": lambda: F.layer_norm(WHOLE, (5,), on_meta(5), on_meta(5)),
    "attention": lambda: F.scaled_dot_product_attention(*3 * (on_meta(1, 2, 4, 8),)),
    "a factory": lambda: torch.arange(7, device="meta"),
    "lines of its own": lambda: WHOLE.to(torch.float16, memory_format=torch.contiguous_format),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_known_is_what_torch_says(case: str) -> None:
    want = places(CASES[case]())
    with KnownResults():
        first, second = CASES[case](), CASES[case]()
    assert places(first) == places(second) == want


@pytest.mark.parametrize("numbers", [(1, 1.0, True), (2.0, 2)])
def test_numbers_that_are_equal_promote_differently(numbers: tuple[Any, ...]) -> None:
    """Neither does the default dtype show in arguments."""
    flags = on_meta(3, dtype=torch.bool)
    with KnownResults():
        found = [(flags * number).dtype for number in numbers]
        halves = [(IDS / 2).dtype]
        torch.set_default_dtype(torch.float64)
        try:
            halves.append((IDS / 2).dtype)
        finally:
            torch.set_default_dtype(torch.float32)
    assert found == [(flags * number).dtype for number in numbers]
    assert halves == [torch.float32, torch.float64]


def test_memory_is_shared_where_it_is_without() -> None:
    """Views, what is changed in place, and dropout that does nothing and returns what it is given;
    another result has memory of its own each time."""
    with KnownResults():
        for _ in range(2):
            view, same = WHOLE.view(6, 5), F.dropout(WHOLE, 0.5, training=False)
            added = WHOLE.add_(1)
            for shares in (view, same, added):
                assert shares.untyped_storage()._cdata == WHOLE.untyped_storage()._cdata
        one, two = WHOLE + 1, WHOLE + 1
    assert len({t.untyped_storage()._cdata for t in (WHOLE, one, two)}) == 3


def test_values_and_other_devices_are_computed() -> None:
    with KnownResults():
        for number in (1.0, 2.0):
            assert (torch.full((2,), number) * 2).tolist() == [2 * number] * 2
        for _ in range(2):
            with pytest.raises(RuntimeError, match="meta"):
                WHOLE.sum().item()


def test_as_much_memory_is_counted_and_gradients_flow() -> None:
    def peak() -> int:
        layer = torch.nn.Linear(5, 40, device="meta")
        watch = LiveBytes({p.untyped_storage()._cdata for p in layer.parameters()})
        with watch:
            out = torch.nn.functional.silu(layer(WHOLE)) * 2
            torch.autograd.backward([out], [torch.empty_like(out)])
        assert layer.weight.grad is not None
        assert layer.weight.grad.shape == layer.weight.shape
        return watch.peak

    assert peak() == peak() > 3 * 6 * 40 * 4


def test_it_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_ops, "MOST", 4)
    with KnownResults():
        for n in range(1, 20):
            assert (on_meta(n) + 1).shape == (n,)
    assert len(meta_ops._known) <= 4
