"""The head's loss in slices against the whole logits: values, gradients, bits and bytes."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.loss.loss_utils import ForCausalLMLoss

from offload.errors import OffloadError
from offload.train import head_loss as module
from offload.train.head_loss import (
    ResidentHead,
    Transform,
    evaluate,
    head_loss,
    shift_labels,
    token_chunk,
    workspace_bytes,
)

V, H, T = 331, 48, 150
TRANSFORMS = {
    "plain": Transform(),
    "scaled": Transform(factor=0.0625),
    "capped": Transform(softcap=3.0),
    "both": Transform(factor=1.7, softcap=5.0),
}


def data(dtype: torch.dtype, *, bias: bool = False, labelled: float = 0.7) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    made = {
        "hidden": torch.randn(T, H, generator=g),
        "weight": torch.randn(V, H, generator=g) * 0.4,
        "bias": torch.randn(V, generator=g) if bias else None,
    }
    labels = torch.randint(0, V, (T,), generator=g)
    labels[torch.rand(T, generator=g) > labelled] = -100
    return {k: None if t is None else t.to(dtype) for k, t in made.items()} | {"labels": labels}


def whole(d: dict[str, Any], transform: Transform, scale: float) -> tuple[Tensor, ...]:
    """Loss and gradients by autograd with all logits, in the dtype of ``d``."""
    hidden, weight = d["hidden"].clone().requires_grad_(), d["weight"].clone().requires_grad_()
    bias = None if d["bias"] is None else d["bias"].clone().requires_grad_()
    z = F.linear(hidden, weight, bias) * transform.factor
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    z = z.float() if z.dtype != torch.float64 else z
    loss = F.cross_entropy(z, d["labels"], reduction="sum")
    (loss * scale).backward()
    return loss.detach(), hidden.grad, weight.grad, None if bias is None else bias.grad


def sliced(
    d: dict[str, Any], transform: Transform, scale: float, rows: int = 100, **options: Any
) -> tuple[Tensor, ...]:
    head = ResidentHead(d["weight"], d["bias"], rows)
    loss, grad = head_loss(
        d["hidden"], d["labels"], head, scale=scale, transform=transform, **options
    )
    return loss, grad, head.weight_grad, head.bias_grad


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of tokens and several blocks of each, the last of one row."""
    monkeypatch.setattr(module, "CHUNK_LOGITS", 64 * 100)
    monkeypatch.setattr(module, "BLOCK_LOGITS", 700)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("how", TRANSFORMS)
@pytest.mark.parametrize("rows", [1, 100, V])
def test_float64_is_the_whole_logits(how: str, bias: bool, rows: int, small_chunks: None) -> None:
    d = data(torch.float64, bias=bias)
    for got, want in zip(
        sliced(d, TRANSFORMS[how], 0.01, rows), whole(d, TRANSFORMS[how], 0.01), strict=True
    ):
        if want is None:
            assert got is None
        else:
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("how", TRANSFORMS)
def test_float32_within_1e_5_of_float64(how: str, small_chunks: None) -> None:
    d = data(torch.float32, bias=True)
    exact = {k: t.double() if t.is_floating_point() else t for k, t in d.items()}
    for got, want in zip(
        sliced(d, TRANSFORMS[how], 0.01), whole(exact, TRANSFORMS[how], 0.01), strict=True
    ):
        assert got.dtype == torch.float32
        assert relative(got, want) < 1e-5


@pytest.mark.parametrize("how", TRANSFORMS)
@pytest.mark.parametrize("chunks", ["one", "several"])
def test_bfloat16_is_as_near_to_float64_as_torch(
    how: str, chunks: str, request: pytest.FixtureRequest
) -> None:
    if chunks == "several":
        request.getfixturevalue("small_chunks")
    d = data(torch.bfloat16, bias=True)
    exact = {k: t.double() if t.is_floating_point() else t for k, t in d.items()}
    oracle = whole(exact, TRANSFORMS[how], 0.01)
    ours, torchs = sliced(d, TRANSFORMS[how], 0.01), whole(d, TRANSFORMS[how], 0.01)
    for got, peer, want in zip(ours, torchs, oracle, strict=True):
        # One number, the loss, may be luckier than another.
        assert relative(got, want) < max(1.3 * relative(peer, want), 5e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_transformers_own_loss(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, 40, H, generator=g).to(dtype)
    weight = torch.randn(V, H, generator=g).to(dtype)
    labels = torch.randint(0, V, (3, 40), generator=g)
    labels[1, :9] = -100
    want = ForCausalLMLoss(F.linear(hidden, weight), labels, V)
    flat = shift_labels(labels)
    got = evaluate(hidden.reshape(-1, H), flat, ResidentHead(weight))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got / (flat != -100).sum(), want, rtol=2e-6, atol=0)


def test_unlabelled_tokens_change_nothing() -> None:
    d = data(torch.float32)
    kept = (d["labels"] != -100).nonzero().squeeze(1)
    small = {**d, "hidden": d["hidden"][kept], "labels": d["labels"][kept]}
    d["hidden"][d["labels"] == -100] = torch.nan
    loss, grad, weight, _ = sliced(d, Transform(), 0.1)
    want_loss, want_grad, want_weight, _ = sliced(small, Transform(), 0.1)
    assert torch.equal(loss, want_loss)
    assert torch.equal(weight, want_weight)
    assert torch.equal(grad[kept], want_grad)
    assert not grad[d["labels"] == -100].any()


def test_no_labels_at_all() -> None:
    d = data(torch.bfloat16, bias=True)
    d["labels"].fill_(-100)
    loss, grad, weight, bias = sliced(d, Transform(), 0.1)
    assert loss == 0
    assert grad.shape == (T, H)
    for t in (grad, weight, bias):
        assert not t.any()


def test_no_tokens_at_all() -> None:
    d = {**data(torch.bfloat16), "hidden": torch.zeros(0, H).bfloat16()}
    loss, grad, weight, _ = sliced({**d, "labels": d["labels"][:0]}, Transform(), 0.1)
    assert loss == 0
    assert grad.shape == (0, H)
    assert not weight.any()


def test_micro_batches_may_come_together() -> None:
    """Two of them in one call: weights move once, gradients are summed in one product."""
    d = data(torch.float32)
    halves = slice(0, 64), slice(64, T)
    parts = [{**d, "hidden": d["hidden"][h], "labels": d["labels"][h]} for h in halves]
    loss, grad, weight, _ = sliced(d, Transform(), 0.1)
    apart = [sliced(part, Transform(), 0.1) for part in parts]
    torch.testing.assert_close(loss, apart[0][0] + apart[1][0])
    torch.testing.assert_close(grad, torch.cat([a[1] for a in apart]), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weight, apart[0][2] + apart[1][2], rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_device_agrees_with_the_processor(dtype: torch.dtype, small_chunks: None) -> None:
    d = data(dtype, bias=True)
    there = {k: t.to("cuda") for k, t in d.items()}
    limit = 0.01 if dtype == torch.bfloat16 else 1e-4
    for got, want in zip(
        sliced(there, TRANSFORMS["both"], 0.1), sliced(d, TRANSFORMS["both"], 0.1), strict=True
    ):
        assert got.is_cuda
        assert relative(got.cpu(), want) < limit


def test_frozen_head_gets_no_gradient() -> None:
    d = data(torch.bfloat16)
    loss, grad, weight, bias = sliced(d, Transform(), 0.1, frozen=True)
    full = sliced(d, Transform(), 0.1)
    assert weight is None
    assert bias is None
    assert torch.equal(loss, full[0])
    assert torch.equal(grad, full[1])
    assert torch.equal(
        loss, evaluate(d["hidden"], d["labels"], ResidentHead(d["weight"], rows=100))
    )


@pytest.mark.parametrize("chunks", ["one", "several"])
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ],
)
def test_gradient_dtype(
    chunks: str,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    request: pytest.FixtureRequest,
) -> None:
    if chunks == "several":
        request.getfixturevalue("small_chunks")
    d = data(dtype, bias=True)
    plain, cast = sliced(d, Transform(), 0.1), sliced(d, Transform(), 0.1, grad_dtype=grad_dtype)
    for a, b in zip(plain[2:], cast[2:], strict=True):
        assert b.dtype == grad_dtype
        assert relative(b, a) < 0.004
    assert torch.equal(plain[1], cast[1])


def test_confident_predictions_keep_small_gradients() -> None:
    """softmax - 1 is taken in float32: in bfloat16 it would be 0 from a probability of 0.998 on."""
    hidden = torch.tensor([[1.0, 0.0]]).bfloat16()
    weight = torch.tensor([[8.0, 0.0], [0.0, 1.0]]).bfloat16()
    loss, grad = head_loss(hidden, torch.tensor([0]), ResidentHead(weight), scale=1.0)
    p = torch.sigmoid(torch.tensor(-8.0))
    assert loss.item() == pytest.approx(p.item(), rel=1e-3)
    assert grad[0].tolist() == pytest.approx([-8 * p.item(), p.item()], rel=0.01)


def test_a_slice_of_minus_infinity() -> None:
    """Some checkpoints mask padding tokens by their bias."""
    d = data(torch.float32, bias=True)
    d["labels"] = d["labels"].clamp(max=199)
    d["bias"][200:] = -torch.inf
    loss, grad, weight, _ = sliced(d, Transform(), 0.1, rows=50)
    want = whole({**d, "weight": d["weight"][:200], "bias": d["bias"][:200]}, Transform(), 0.1)
    torch.testing.assert_close(loss, want[0])
    torch.testing.assert_close(grad, want[1], rtol=1e-4, atol=1e-6)
    assert not weight[200:].any()


def test_a_nan_is_seen() -> None:
    d = data(torch.float32, labelled=1.0)
    d["hidden"][5, 3] = torch.nan
    assert sliced(d, Transform(), 1.0)[0].isnan()


@pytest.mark.parametrize("tokens", [1, 65, 150])
def test_bits_do_not_depend_on_threads(tokens: int) -> None:
    d = data(torch.bfloat16, bias=True, labelled=1.0)
    d = {**d, "hidden": d["hidden"][:tokens], "labels": d["labels"][:tokens]}
    # Rows long enough for torch to share one among threads.
    d["weight"], d["bias"] = d["weight"].repeat(300, 1), d["bias"].repeat(300)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(sliced(d, TRANSFORMS["both"], 0.1, rows=60_000))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_the_order_in_which_weights_are_asked_for() -> None:
    d = data(torch.float32)
    asked: list[tuple[str, int]] = []

    class Watched(ResidentHead):
        def weight(self, i: int) -> Any:
            asked.append(("weight", i))
            return super().weight(i)

        def gradient(self, i: int, weight: Tensor, bias: Tensor | None) -> None:
            asked.append(("gradient", i))
            weight_now = weight.clone()
            super().gradient(i, weight, bias)
            weight.fill_(torch.nan)  # the receiver may do what it likes
            assert not weight_now.isnan().any()

    head = Watched(d["weight"], rows=100)
    head_loss(d["hidden"], d["labels"], head, scale=1.0)
    down = [(what, i) for i in (3, 2, 1, 0) for what in ("weight", "gradient")]
    assert asked == [("weight", i) for i in range(4)] + down
    assert head.weight_grad is not None
    assert not head.weight_grad.isnan().any()


@pytest.mark.parametrize("tokens", [1, 63, 512, 2049, 5000, 70_000])
@pytest.mark.parametrize("widest", [1, 256, 4096, 128_000, 2**24])
def test_chunks(tokens: int, widest: int) -> None:
    chunk = token_chunk(tokens, widest)
    assert 1 <= chunk <= min(tokens, 4096)
    assert chunk * widest <= module.CHUNK_LOGITS or chunk <= 64
    assert chunk == tokens or chunk % 64 == 0


class _Peak(TorchDispatchMode):
    """Peak bytes of what is allocated inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        old = {t.untyped_storage().data_ptr() for t in arguments}
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            storage = t.untyped_storage() if isinstance(t, Tensor) else None
            at = storage.data_ptr() if storage is not None else 0
            if storage is not None and at and at not in old and at not in self.seen:
                self.seen.add(at)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, at, storage.nbytes())
        return result

    def _gone(self, at: int, nbytes: int) -> None:
        self.seen.discard(at)
        self.now -= nbytes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("labelled", [0.5, 1.0])
@pytest.mark.parametrize("chunks", ["one", "several"])
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [
        (torch.bfloat16, None),
        (torch.bfloat16, torch.float32),
        (torch.float32, None),
        (torch.float32, torch.bfloat16),
    ],
)
def test_workspace_is_what_it_says(
    softcap: float | None,
    frozen: bool,
    labelled: float,
    chunks: str,
    dtype: torch.dtype,
    grad_dtype: torch.dtype | None,
    request: pytest.FixtureRequest,
) -> None:
    if chunks == "several":
        request.getfixturevalue("small_chunks")
    d = data(dtype, bias=True, labelled=labelled)
    head = ResidentHead(d["weight"], d["bias"], 100)
    if not frozen:
        head.weight_grad = torch.empty(V, H, dtype=grad_dtype or dtype)
        head.bias_grad = torch.empty(V, dtype=grad_dtype or dtype)
    tokens = int((d["labels"] != -100).sum())
    said = workspace_bytes(
        tokens, H, head.slices, dtype, frozen=frozen, softcap=softcap is not None,
        grad_dtype=grad_dtype, gathered=tokens < T,
    )  # fmt: skip
    with _Peak() as peak:
        head_loss(
            d["hidden"], d["labels"], head, scale=1.0, transform=Transform(softcap=softcap),
            frozen=frozen, grad_dtype=grad_dtype,
        )  # fmt: skip
    assert peak.peak > 0.6 * said
    result = T * H * dtype.itemsize
    assert peak.peak <= said + result


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, T, H)}, "flatten batches"),
        ({"labels": torch.zeros(T - 1, dtype=torch.int64)}, "flatten batches"),
        ({"labels": torch.full((T,), V)}, f"label {V} is outside"),
        ({"labels": torch.full((T,), -1)}, "label -1 is outside"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor], message: str) -> None:
    d = {**data(torch.float32), **change}
    with pytest.raises(OffloadError, match=message):
        evaluate(d["hidden"], d["labels"], ResidentHead(d["weight"]))


def test_slices_with_a_gap_are_refused() -> None:
    d = data(torch.float32)
    head = ResidentHead(d["weight"], rows=100)
    del head.slices[1]
    with pytest.raises(OffloadError, match=r"rows 200\.\.300 after 100"):
        evaluate(d["hidden"], d["labels"], head)
