"""Streaming layers that do odd things with their weights: the same bits, or one clear error."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from wrap_support import mlp, seeded_alone, tight

import offload
from offload.errors import OffloadError, UnsupportedModelError


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with seeded_alone():
        yield


class WritesIt(nn.Linear):
    """A weight that decays with every use."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(x)


class MovesIt(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.data * 0.9
        return super().forward(x)


class ReplacesIt(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight = nn.Parameter(self.weight * 0.9)
        return super().forward(x)


@pytest.mark.parametrize("kind", [WritesIt, MovesIt, ReplacesIt])
def test_a_layer_that_changes_its_own_weight(kind: type[nn.Linear], tmp_path: Path) -> None:
    """What stays in memory may be changed, and unwrap gives it back so; what comes and goes may
    not, or the change would be lost without a word."""
    model, x = nn.Sequential(*[kind(64, 64) for _ in range(4)]), torch.randn(3, 64)
    own = list(model.parameters())
    ram = tight(model)
    with torch.no_grad():
        resident = copy.deepcopy(model)
        offload.wrap(model, ram=2**26, disk=tmp_path)
        for _ in range(2):
            assert torch.equal(model(x), resident(x))
        offload.unwrap(model)
        assert all(torch.equal(a, b) for a, b in zip(own, resident.parameters(), strict=True))
        assert torch.equal(model(x), resident(x))
        offload.wrap(model, ram=ram, disk=tmp_path)
        for _ in range(2):  # the memory of other layers may have been taken with it
            with pytest.raises(UnsupportedModelError, match=r"changes its own \d.weight"):
                model(x)
        offload.unwrap(model)
        assert model(x).isfinite().all()


class Keeps(nn.Linear):
    """As some attention code keeps a transposed weight, or a slice of one, for later calls."""

    def __init__(self, how: str) -> None:
        super().__init__(512, 512)
        self.how = how
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            view = self.weight.t()
            self.kept = {"view": view, "list": [view], "dict": {"w": view}, "copy": view * 1.0}[
                self.how
            ]
        kept = self.kept
        if isinstance(kept, dict):
            kept = kept["w"]
        return x @ (kept[0] if isinstance(kept, list) else kept)


@pytest.mark.parametrize("how", ["view", "list", "dict", "copy"])
def test_a_layer_that_keeps_its_weight(how: str, tmp_path: Path) -> None:
    model, x = nn.Sequential(*(Keeps(how) for _ in range(6))), torch.randn(3, 512)
    model.requires_grad_(False)
    want = model(x)
    for layer in model:
        layer.kept = None
    offload.wrap(model, ram=tight(model), disk=tmp_path)
    if how == "copy":
        assert torch.equal(model(x), want)
        assert torch.equal(model(x), want)
        return
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="attribute kept of a Keeps"):
            model(x)
    for layer in model:
        layer.kept = None
    offload.unwrap(model)
    assert torch.equal(model(x), want)


@dataclass(frozen=True)
class Result:
    hidden: torch.Tensor
    weight: torch.Tensor


class Shows(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return Result(super().forward(x), self.weight[:2])


def test_a_dataclass_with_a_weight_in_it(tmp_path: Path) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Shows(512, 512) for _ in range(6)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = []
            for layer in self.layers:
                result = layer(x)
                x = result.hidden
                weights.append(result.weight)
            return x + torch.cat(weights).sum(0)

    model, x = Whole().requires_grad_(False), torch.randn(3, 512)
    want = model(x)
    offload.wrap(model, ram=tight(model), disk=tmp_path)
    assert torch.equal(model(x), want)
    assert torch.equal(model(x), want)


def test_an_embedding_that_renormalises(tmp_path: Path) -> None:
    """It writes to its weight whatever it looks up, the same with every use."""
    model = nn.Sequential(nn.EmbeddingBag(1000, 64, max_norm=0.5), nn.Linear(64, 64))
    model.append(nn.Linear(64, 64))
    ids, ram = torch.arange(12).view(3, 4), tight(model)
    with torch.no_grad():
        expected = copy.deepcopy(model)(ids)
        offload.wrap(model, ram=ram, disk=tmp_path)
        for _ in range(3):
            assert torch.equal(model(ids), expected)


def test_what_is_written_between_runs_is_kept(tmp_path: Path) -> None:
    """As a change of a weight that is in memory anyway."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    before = [p.detach().clone() for p in model.parameters()]
    offload.wrap(model, ram=2**26, disk=tmp_path)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    offload.unwrap(model)
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old + 1)


class Keeper(nn.Module):
    """Has its layers' weights in a list as well, past the module's own books."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)])
        self.kept = [layer.weight for layer in self.layers]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * sum(weight.abs().sum() for weight in self.kept)


def test_a_weight_that_somebody_keeps(tmp_path: Path) -> None:
    """It has no elements meanwhile: read as nothing, a sum would be 0 and a file empty."""
    model, x = Keeper().eval(), torch.randn(3, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    first = model.kept[0]
    with torch.no_grad():
        want = model(x)
    offload.wrap(model, ram=tight(model), disk=tmp_path)
    for read in (
        lambda: model(x),
        lambda: first.sum(),
        lambda: first.data,
        lambda: first.shape,
        lambda: first.detach(),
        lambda: torch.save(first, io.BytesIO()),
        lambda: copy.deepcopy(first),
    ):
        with pytest.raises(OffloadError, match=r"layers\.0\.weight belongs to a streamed model"):
            read()
    optimizer.zero_grad()
    optimizer.step()  # there are no gradients: nothing is asked of the weights
    assert first.requires_grad
    offload.unwrap(model)
    assert type(first) is nn.Parameter
    with torch.no_grad():
        assert torch.equal(model(x), want)
    model(x).sum().backward()
    before = first.detach().clone()
    optimizer.step()
    assert not torch.equal(first, before)


def test_a_weight_of_two_models(tmp_path: Path) -> None:
    one, x = mlp()
    other: Any = mlp()[0]
    other[4][0].weight = one[2][0].weight
    wants = [one(*x), other(*x)]
    offload.wrap(one, ram=tight(one), disk=tmp_path)
    with pytest.raises(OffloadError, match=r"4\.0\.weight is a weight of another model"):
        offload.wrap(other, ram="64MiB", disk=tmp_path)
    with pytest.raises(OffloadError, match=r"2\.0\.weight belongs to a streamed model"):
        other(*x)
    offload.unwrap(one)
    assert torch.equal(one(*x), wants[0])
    assert torch.equal(other(*x), wants[1])


@pytest.mark.parametrize("how", ["transposed", "same bytes", "buffer"])
def test_weights_in_one_memory(how: str, tmp_path: Path) -> None:
    """What trains one trains the other: after unwrap, too."""
    model, x = mlp()
    one, other = model[1][0], model[6][0]
    if how == "transposed":
        other.weight = nn.Parameter(one.weight.t())
    elif how == "same bytes":
        other.weight.data = one.weight.data
    else:
        other.register_buffer("mirror", one.weight.detach()[:3])
    want = model(*x)
    offload.wrap(model, ram=tight(model), disk=tmp_path)
    assert any("share memory" in note for note in model.offload.notes)
    with torch.no_grad():
        assert torch.equal(model(*x), want)
    offload.unwrap(model)
    with torch.no_grad():
        one.weight[2, 1] = 7.0
    there = {"transposed": (1, 2), "same bytes": (2, 1), "buffer": (2, 1)}[how]
    assert (other.mirror if how == "buffer" else other.weight)[there] == 7.0


class Odd(nn.Linear):
    """A weight whose bytes are not its values."""

    def __init__(self, kind: str) -> None:
        super().__init__(64, 64)
        odd = torch.randn(64, 64, dtype=torch.complex128)
        if kind != "complex128":
            odd = odd.to(torch.complex64).conj()
        self.odd = nn.Parameter(odd.imag if kind == "negative" else odd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = x.to(self.odd.dtype) @ self.odd
        imaginary = product.imag if product.is_complex() else product
        return super().forward(imaginary.to(x.dtype))


@pytest.mark.parametrize("kind", ["complex128", "conjugate", "negative"])
def test_weights_whose_bytes_are_not_their_values(kind: str, tmp_path: Path) -> None:
    model, x = nn.Sequential(*[Odd(kind) for _ in range(6)]).eval(), torch.randn(3, 64)
    with torch.no_grad():
        want = model(x)
        offload.wrap(model, ram=tight(model), disk=tmp_path)
        assert torch.equal(model(x), want)
        offload.unwrap(model)
        assert torch.equal(model(x), want)


class Attends(nn.Module):
    """torch's attention outside of every list; it multiplies with its output layer by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(640, 4, batch_first=True)
        self.layers = nn.Sequential(*[nn.Linear(640, 640) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(self.attention(x, x, x)[0])
        return out


def test_torchs_attention_outside_of_lists(tmp_path: Path) -> None:
    model, x = Attends().eval(), torch.randn(2, 5, 640)
    with torch.no_grad():
        want = model(x)
        offload.wrap(model, ram=tight(model), disk=tmp_path)
        assert model.offload.plan.streamed_bytes_per_pass > 0
        assert torch.equal(model(x), want)
    offload.unwrap(model)


def layers(norm_first: bool) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True, norm_first=norm_first)
        return nn.TransformerEncoder(layer, 4, enable_nested_tensor=not norm_first)

    return make


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnns = nn.ModuleList([nn.LSTM(256, 256, batch_first=True) for _ in range(4)])

    def forward(self, x: Any) -> Any:
        for rnn in self.rnns:
            x = rnn(x)[0]
        return x


PADDED = torch.tensor([[False, False, False, True, True], [False] * 5])
CHOOSING: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, torch.Tensor], Any]]] = {
    "encoder": (layers(norm_first=True), lambda m, x: m(x, src_key_padding_mask=PADDED)),
    "nested": (layers(norm_first=False), lambda m, x: m(x, src_key_padding_mask=PADDED)),
    "frozen": (
        lambda: layers(norm_first=True)().requires_grad_(False),
        lambda m, x: m(x, src_key_padding_mask=PADDED),
    ),
    "lstm": (Chain, lambda m, x: m(x)),
    "packed": (
        Chain,
        lambda m, x: (
            m(nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)).data
        ),
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", CHOOSING)
def test_modules_that_choose_by_autograd_and_hooks(kind: str, grad: bool, tmp_path: Path) -> None:
    """torch computes them otherwise where gradients may be asked for, or where a hook is."""
    make, run = CHOOSING[kind]
    torch.manual_seed(1)
    model, x = make().eval(), torch.randn(2, 5, 256)
    with torch.set_grad_enabled(grad):
        want = run(model, x)
        graph, want = want.requires_grad, want.detach()  # a frozen model's output has none
        heard: list[int] = []
        first = next(iter(model.children()))
        theirs = (first[0] if isinstance(first, nn.ModuleList) else first).register_forward_hook(
            lambda *_: heard.append(1)
        )
        hooked = run(model, x).detach()
        offload.wrap(model, ram=tight(model), disk=tmp_path)
        assert model.offload.plan.streamed_bytes_per_pass > 0
        assert torch.equal(run(model, x), hooked)
        theirs.remove()
        got = run(model, x)
        assert (torch.equal(got, want), len(heard), got.requires_grad) == (True, 2, graph)
    offload.unwrap(model)
    assert not any("forward" in module.__dict__ for module in model.modules())
