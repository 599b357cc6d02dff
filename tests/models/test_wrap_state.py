"""What a program may do to a model while it is streamed, and what it finds when it has it back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence import options, prompt, reference
from families import write
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import parametrizations
from wrap_support import mlp, seeded_alone, tight

import offload
from offload.errors import OffloadError
from offload.models.load import prepare


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with seeded_alone():
        yield


class Stack(nn.Module):
    def __init__(self, layers: list[nn.Module], result: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.result = result

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return self.result(x)


@dataclass
class Result:
    hidden: torch.Tensor


def linears(result: Callable[[Any], Any] = lambda x: x) -> Stack:
    return Stack([nn.Linear(64, 64) for _ in range(6)], result)


def test_a_recurrent_weight_that_is_computed(tmp_path: Path) -> None:
    """Its layer asks for it as soon as it has one of its parameters back."""
    layers = [parametrizations.weight_norm(nn.LSTM(64, 64), "weight_hh_l0") for _ in range(4)]
    model, x = Stack(layers, lambda x: x), torch.randn(5, 2, 64)
    resident = copy.deepcopy(model)
    offload.wrap(model, ram=tight(model), disk=tmp_path)
    with torch.no_grad():
        assert torch.equal(model(x), resident(x))
    offload.unwrap(model)
    for module in (model, resident):
        module(x).sum().backward()
    pairs = list(zip(model.parameters(), resident.parameters(), strict=True))
    assert all(torch.equal(a, b) and torch.equal(a.grad, b.grad) for a, b in pairs)


@pytest.mark.parametrize(
    ("wrapped", "unwrapped"),
    [
        (Result, lambda out: out.hidden),
        (lambda x: {"states": (x, x)}, lambda out: out["states"][1]),
        (lambda x: ([x], 0), lambda out: out[0][0]),
    ],
    ids=["dataclass", "dict", "list"],
)
def test_backward_through_a_nested_output_is_refused(
    wrapped: Any, unwrapped: Any, tmp_path: Path
) -> None:
    """A head on top of it would train, and nothing below."""
    model, head, x = linears(wrapped), nn.Linear(64, 2), torch.randn(3, 64)
    offload.wrap(model, ram=tight(model), disk=tmp_path)
    with pytest.raises(OffloadError, match="backward through a streamed model"):
        head(unwrapped(model(x))).sum().backward()


@pytest.mark.parametrize("how", ["module", "parameters"])
def test_what_is_trained_can_be_said_while_it_is_streamed(how: str, tmp_path: Path) -> None:
    """torch picks kernels by it: a frozen encoder takes its fast path, with other rounding."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 4).eval()
    resident, x = copy.deepcopy(model).requires_grad_(False), torch.randn(2, 5, 64)
    own = list(model.parameters())
    offload.wrap(model, ram=tight(model), disk=tmp_path)
    seen: list[bool] = []
    model.layers[2].register_forward_pre_hook(
        lambda module, _: seen.extend(p.requires_grad for p in module.parameters())
    )
    assert model(x).isfinite().all()
    assert all(seen)
    seen.clear()
    if how == "module":
        model.requires_grad_(False)
    else:
        for p in model.parameters():
            p.requires_grad = False
    want = resident(x)
    model.layers[2]._forward_pre_hooks.popitem()
    assert torch.equal(model(x), want)
    model.layers[2].register_forward_pre_hook(
        lambda module, _: seen.extend(p.requires_grad for p in module.parameters())
    )
    model(x)
    assert seen
    assert not any(seen)
    offload.unwrap(model)
    assert all(p is q for p, q in zip(model.parameters(), own, strict=True))
    assert not any(p.requires_grad for p in own)


def test_a_loaded_model_can_be_trained_after_unwrap() -> None:
    path = Path(__file__).parents[2] / "examples" / "tiny_moe"
    model = offload.load(path, ram="8MiB", context=32, overhead_bytes=0)
    model.get_input_embeddings().requires_grad_(False)
    offload.unwrap(model)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"model.embed_tokens.weight"}


def test_modes_of_torch_around_wrap_and_unwrap(tmp_path: Path) -> None:
    """A default device, and inference: what is made there could not be trained."""
    (model, x), ram = mlp(), 0
    resident, ram = copy.deepcopy(model), tight(model)
    with torch.inference_mode(), torch.device("meta"):
        offload.wrap(model, ram=ram, disk=tmp_path)
    with torch.no_grad():
        assert torch.equal(model(*x), resident(*x))
    with torch.inference_mode(), torch.device("meta"):
        offload.unwrap(model)
    model(*x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("trained", [False, True])
def test_vmap_over_a_model(trained: bool, tmp_path: Path) -> None:
    """torch refuses ``requires_grad_`` there, also of a weight that all of a batch share."""
    model, x = linears().requires_grad_(trained), torch.randn(3, 64)
    want = torch.vmap(model)(x)
    offload.wrap(model, ram=tight(model), disk=tmp_path)
    got = torch.vmap(model)(x)
    assert torch.equal(got, want)
    assert got.requires_grad == trained
    with torch.no_grad():
        assert torch.equal(torch.vmap(model)(x), want)


def test_a_part_of_a_streamed_model_is_neither_wrapped_nor_copied(tmp_path: Path) -> None:
    model = linears()
    offload.wrap(model, ram=tight(model), disk=tmp_path)
    for part in (model.layers, model.layers[1]):
        with pytest.raises(OffloadError, match=f"{type(part).__name__} is a part of a model that"):
            offload.wrap(part, ram="1MiB", disk=tmp_path)
        with pytest.raises(OffloadError, match="cannot be copied or pickled"):
            copy.deepcopy(part)
    with pytest.raises(OffloadError, match=r"layers.0.weight is streamed"):
        save_file(model.state_dict(), tmp_path / "model.safetensors")
    offload.unwrap(model)
    copy.deepcopy(model.layers[1])


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("inner_first", [True, False])
def test_a_streamed_model_inside_of_another(room: bool, inner_first: bool, tmp_path: Path) -> None:
    """The outer one leaves it alone, so that they can be given back in any order."""
    inner, x = linears(), torch.randn(3, 64)
    outer = nn.Sequential(inner, *(nn.Linear(64, 64) for _ in range(4)))
    own = list(outer.parameters())
    with torch.no_grad():
        want = outer(x)
    offload.wrap(inner, ram="4MiB" if room else tight(inner), disk=tmp_path)
    offload.wrap(outer, ram="4MiB" if room else tight(outer), disk=tmp_path)
    with torch.no_grad():
        assert torch.equal(outer(x), want)
    for module in (inner, outer) if inner_first else (outer, inner):
        offload.unwrap(module)
    assert all(p is q for p, q in zip(outer.parameters(), own, strict=True))
    assert not any("_apply" in vars(module) for module in outer.modules())
    outer(x).sum().backward()
    assert all(p.grad is not None for p in own)


@pytest.mark.parametrize("how", ["load", "wrap"])
def test_another_vocabulary_of_tables_that_stay(how: str, tmp_path: Path) -> None:
    """transformers gives the same parameter other data, of another size."""
    write("llama", tmp_path)
    want = reference(tmp_path, torch.bfloat16)
    if how == "load":
        model = prepare(tmp_path, options("cpu")).open()
    else:
        model = offload.wrap(reference(tmp_path, torch.bfloat16), ram="1MiB")
    for resized in (want, model):
        resized.resize_token_embeddings(300, mean_resizing=False)
    with torch.no_grad():
        new = want.get_input_embeddings().weight[256:], want.get_output_embeddings().weight[256:]
        model.get_input_embeddings().weight[256:] = new[0]
        model.get_output_embeddings().weight[256:] = new[1]
        logits = want(prompt()).logits
        assert logits.shape[-1] == 300
        assert torch.equal(model(prompt()).logits, logits)
        offload.unwrap(model)
        assert torch.equal(model(prompt()).logits, logits)
