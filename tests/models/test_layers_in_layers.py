"""Layers that run while others do: that call themselves, or each other, or are called past their
hooks. With the resident model's bits, or one clear error at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from wrap_support import seeded_alone

import offload
from offload.errors import OffloadError, PlanError

N, LAYERS = 96, 10
WEIGHTS = 2 * 4 * N * N
"""Bytes of one layer's."""


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    with seeded_alone():
        yield


class Layer(nn.Module):
    """Has its weight in hand before it calls what it calls, and uses it after."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(N, N, bias=False)
        self.b = nn.Linear(N, N, bias=False)
        self.__dict__["calls"] = lambda x, depth: x  # no submodule of it

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        if depth < 0:
            raise ValueError("deep enough")
        weight = self.b.weight
        x = self.calls(torch.tanh(self.a(x)), depth)
        return torch.tanh(x @ weight.T) + self.a(x)


class Layers(nn.Module):
    def __init__(self, link: Callable[[list[Any]], None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        link(list(self.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def each(layers: list[Any], what: Callable[[int, torch.Tensor, int], torch.Tensor]) -> None:
    for i, layer in enumerate(layers):
        layer.__dict__["calls"] = lambda x, depth, i=i: what(i, x, depth)


def itself(layers: list[Any]) -> None:
    each(layers, lambda i, x, depth: layers[i](x, depth - 1) if depth else x)


def the_first(layers: list[Any]) -> None:
    each(layers, lambda i, x, depth: layers[0](x, depth - 1) if depth else x)


def the_next(layers: list[Any]) -> None:
    def call(i: int, x: torch.Tensor, depth: int) -> torch.Tensor:
        return layers[i + 1](x, depth - 1) if depth and i + 1 < len(layers) else x

    each(layers, call)


def its_forward(layers: list[Any]) -> None:
    each(layers, lambda i, x, depth: layers[i].forward(x, depth - 1) if depth else x)


def itself_with_an_error(layers: list[Any]) -> None:
    def call(i: int, x: torch.Tensor, depth: int) -> torch.Tensor:
        try:
            return layers[i](x, depth - 1)  # type: ignore[no-any-return]
        except ValueError:
            return x

    each(layers, call)


LINKS = [itself, the_first, the_next, its_forward, itself_with_an_error]


def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(x)
    return out


@pytest.mark.parametrize("link", LINKS, ids=lambda link: link.__name__)
@pytest.mark.parametrize("room", [5, 7])
def test_same_bits(link: Callable[[list[Any]], None], room: int, tmp_path: Path) -> None:
    model, x = Layers(link), torch.randn(3, N)
    want = run(model, x)
    offload.wrap(model, ram=room * WEIGHTS + 2**17, disk=tmp_path)
    assert model.offload.plan.streamed_bytes_per_pass > 0  # type: ignore[union-attr, operator]
    for _ in range(3):
        assert torch.equal(run(model, x), want)
    executor = model.offload.executor  # type: ignore[union-attr]
    executor.validate()
    assert executor.held() == []
    offload.unwrap(model)
    assert torch.equal(run(model, x), want)


def test_no_room_for_two_is_said_at_once(tmp_path: Path) -> None:
    """It was said after the watchdog's two minutes."""
    model, x = Layers(the_next), torch.randn(3, N)
    want = run(model, x)
    offload.wrap(model, ram=2 * WEIGHTS + 2**16, disk=tmp_path)
    before = set(threading.enumerate())
    with pytest.raises(PlanError, match=r"layers\.\d is called while another layer runs") as said:
        run(model, x)
    assert "layers.0" in str(said.value)
    assert "bytes" in str(said.value)
    assert model.offload.executor.held() == []  # type: ignore[union-attr]
    # Those of models before may end meanwhile, and the store's begin one by one as reads come.
    assert not [t for t in set(threading.enumerate()) - before if "worker" not in t.name]
    # One after the other there is room, and nothing is left behind.
    for layer in model.layers:
        layer.__dict__["calls"] = lambda x, depth: x
    got = run(model, x)
    offload.unwrap(model)
    assert torch.equal(run(model, x), got)
    the_next(list(model.layers))
    assert torch.equal(run(model, x), want)


def test_layers_called_past_their_hooks(tmp_path: Path) -> None:
    """``layer.forward(x)`` is what some programs call; hooks of torch do not run there."""
    model, x = Layers(lambda layers: None), torch.randn(3, N)
    want = run(model, x)
    weights = [layer.b.weight.detach().clone() for layer in model.layers]
    offload.wrap(model, ram=2 * WEIGHTS + 2**16, disk=tmp_path)
    with torch.no_grad():
        y = x
        for layer in model.layers:
            y = layer.forward(y)
    assert torch.equal(y, want)
    with torch.no_grad(), pytest.raises(ValueError, match="deep enough"):
        model.layers[3].forward(x, -1)
    # A part of a weight that it returns outlives the run.
    layer: Any = model.layers[4]
    part = offload.wrap(
        nn.ModuleList(_Half() for _ in range(LAYERS)), ram=2 * WEIGHTS + 2**16, disk=tmp_path
    )
    kept = part[0].forward()
    again = kept.clone()
    for other in part:
        other.forward()
    assert torch.equal(kept, again)
    with pytest.raises(OffloadError, match="streamed and not in memory"):
        layer.b(x)
    offload.unwrap(model)
    assert all(
        torch.equal(a, layer.b.weight) for a, layer in zip(weights, model.layers, strict=True)
    )


class _Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(N, 2 * N))

    def forward(self) -> torch.Tensor:
        return self.weight[: N // 2]


# -- gradients that nobody gets -------------------------------------------------------------------


class Sums(nn.Module):
    """With a parameter that stays in memory, and an output that may be complex."""

    def __init__(self, *, complex_output: bool = False) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(N))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.complex_output = complex_output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.shift
        for layer in self.layers:
            x = layer(x)
        return torch.complex(x, x) if self.complex_output else x


def small(model: nn.Module, disk: Path) -> Any:
    return offload.wrap(model, ram=2 * WEIGHTS + 2**17, disk=disk)


GRADIENTS = {
    "jacobian": lambda m, x: torch.autograd.functional.jacobian(m, x.detach()),
    "vjp": lambda m, x: torch.autograd.functional.vjp(m, x.detach(), torch.ones(2, N)),
    "hessian": lambda m, x: torch.autograd.functional.hessian(lambda y: m(y).sum(), x.detach()),
    "grad of an input": lambda m, x: torch.autograd.grad(m(x).sum(), x, allow_unused=True),
    "grad of a weight": lambda m, x: torch.autograd.grad(
        m(x.detach()).sum(), m.layers[-1].b.weight, allow_unused=True
    ),
    "grad of one that stays": lambda m, x: torch.autograd.grad(
        m(x.detach()).sum(), m.shift, allow_unused=True
    ),
    "grad through a layer": lambda m, x: torch.autograd.grad(
        m.layers[2](x).sum(), x, allow_unused=True
    ),
    "a checkpoint": lambda m, x: (
        torch.utils.checkpoint.checkpoint(m, x, use_reentrant=True).sum().backward()
    ),
}


@pytest.mark.parametrize("how", GRADIENTS)
def test_whoever_asks_for_a_gradient_hears_of_it(how: str, tmp_path: Path) -> None:
    """Some were None or 0: what is not in the graph has none."""
    model = small(Sums(), tmp_path)
    x = torch.randn(2, N, requires_grad=True)
    with pytest.raises(OffloadError, match="backward through a streamed model"):
        GRADIENTS[how](model, x)
    assert x.grad is None


def test_gradients_of_complex_outputs(tmp_path: Path) -> None:
    model = small(Sums(complex_output=True), tmp_path)
    x = torch.randn(2, N, requires_grad=True)
    with pytest.raises(OffloadError, match="backward through a streamed model"):
        model(x).abs().sum().backward()


def test_a_frozen_model_has_no_graph(tmp_path: Path) -> None:
    """As in memory: a loss of its outputs may be a constant beside others."""
    model = small(Sums().requires_grad_(False), tmp_path)
    x = torch.randn(2, N, requires_grad=True)
    assert not model(x.detach()).requires_grad
    with pytest.raises(OffloadError, match="backward through a streamed model"):
        model(x).sum().backward()
    weight = torch.ones((), requires_grad=True)
    (weight * model(x.detach())).sum().backward()
    assert weight.grad is not None


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_mode(tmp_path: Path) -> None:
    """Tangents go forward with the values, and need no graph."""
    import torch.autograd.forward_ad as forward_ad

    def tangent(model: nn.Module) -> torch.Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            found: torch.Tensor = forward_ad.unpack_dual(model(dual)).tangent.detach()  # type: ignore[attr-defined]
        return found

    model, x = Sums(), torch.randn(2, N)
    want = tangent(model)
    small(model, tmp_path)
    assert torch.equal(tangent(model), want)
    with torch.no_grad():
        assert torch.equal(tangent(model), want)


class Force(Sums):
    """A gradient of an energy is what it returns, as of models of molecules."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            energy = super().forward(at).sum() + (at**2).sum()
            return torch.autograd.grad(energy, at)[0]


@pytest.mark.parametrize("grad", [False, True])
def test_a_forward_that_asks_for_gradients_of_its_layers(grad: bool, tmp_path: Path) -> None:
    """With autograd on it got what does not pass a layer, and took that for all of it."""
    model = small(Force(), tmp_path)
    with torch.set_grad_enabled(grad), pytest.raises(OffloadError, match="backward through"):
        model(torch.randn(2, N))
    assert model.offload.executor.held() == []


class Learns(Layer):
    """Takes a step on its own weight while it runs, as layers do that train on their input."""

    def forward(self, x: torch.Tensor, depth: int = 0) -> torch.Tensor:
        with torch.enable_grad():
            weight = self.b.weight
            (step,) = torch.autograd.grad(((x.detach() @ weight.T) ** 2).mean(), weight)
        return torch.tanh(x @ (weight - 0.1 * step).T) + self.a(x)


class Graph(Layer):
    """Returns what has a graph, wherever it is called."""

    def forward(self, x: torch.Tensor, depth: int = 0) -> torch.Tensor:
        with torch.enable_grad():
            return torch.tanh(self.b(torch.tanh(self.a(x))))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", [Learns, Graph])
def test_layers_that_switch_autograd_on(kind: type[Layer], grad: bool, tmp_path: Path) -> None:
    """Inside of a layer its weights are there; behind it a graph would find others' bytes."""
    model = Layers(lambda layers: None)
    model.layers = nn.ModuleList(kind() for _ in range(LAYERS))
    x = torch.randn(2, N)
    with torch.set_grad_enabled(grad):
        want = model(x)
        small(model, tmp_path)
        for _ in range(2):
            got = model(x)
            assert torch.equal(got, want)
            assert got.requires_grad == want.requires_grad
    if got.requires_grad:
        with pytest.raises(OffloadError, match="backward through a streamed model"):
            got.sum().backward()


def test_outputs_can_be_written_to(tmp_path: Path) -> None:
    """Where autograd is on torch took them for views that nobody may change."""
    model, x = Sums(), torch.randn(2, N)

    def used(out: torch.Tensor) -> torch.Tensor:
        out /= 2
        out[0].add_(1)
        out[:, 3] = 0
        return out.relu_()

    want = used(model(x))
    assert torch.equal(used(small(model, tmp_path)(x)), want)
    with pytest.raises(OffloadError, match="backward through a streamed model"):
        used(model(x)).sum().backward()


# -- torch.func, and what records what runs -------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_tangents_of_torch_func(tmp_path: Path) -> None:
    """The error of those that need gradients says that ``jvp`` works. A view of a slot that was
    made inside of a transform was the transform's, and void behind it."""
    model, x = Sums(), torch.randn(2, N)

    def found() -> list[torch.Tensor]:
        with torch.no_grad():
            rows = torch.func.jacfwd(model)(x[0])
            return [*torch.func.jvp(model, (x,), (x + 1,)), rows, model(x)]

    want = found()
    small(model, tmp_path)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(found(), want, strict=True))


def traced(model: Any, x: torch.Tensor) -> Any:
    return torch.jit.trace(model, x, check_trace=False)


def made_fx(model: Any, x: torch.Tensor) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(lambda y: model(y))(x)


RECORDERS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "jit.trace": traced,
    "of a layer": lambda m, x: traced(m.layers[2], x),
    "make_fx": made_fx,
    "export": lambda m, x: torch.export.export(m, (x,)),
    "linearize": torch.func.linearize,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", RECORDERS)
def test_what_is_recorded_would_read_others_bytes(how: str, tmp_path: Path) -> None:
    """``linearize`` gave other tangents without a word, the others torch's own tracebacks."""
    model, x = Sums().requires_grad_(False), torch.randn(2, N)
    want = run(model, x)
    small(model, tmp_path)
    with torch.no_grad(), pytest.raises(OffloadError, match="cannot be traced or exported"):
        RECORDERS[how](model, x)
    assert model.offload.executor.held() == []
    assert torch.equal(run(model, x), want)
