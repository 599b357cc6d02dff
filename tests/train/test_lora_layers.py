"""Adapters as modules of a resident model: arithmetic, what is refused, and undoing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_support import batch
from equivalence import reference
from lora_support import EXPERTS, HOW, Made, adapted_reference

from offload.errors import OffloadError, UnsupportedModelError
from offload.models.meta import build
from offload.train.footprint import measure_training
from offload.train.head_find import find_head
from offload.train.layout import lay_out
from offload.train.lora import inject, uniform
from offload.train.lora_layers import AdaptedWeight, FusedWeight, Rule


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_products_with_one_expert(tiny: Made, family: str) -> None:
    """Against W + scale · B A in float64, values and gradients; gpt-oss stores [in, out]."""
    _, adapters = adapted_reference(tiny(family, torch.float32), torch.float32, targets=EXPERTS)
    target = next(t for t in adapters.targets if t.experts)
    pair = adapters.pairs(adapters.resident_values())[target.name]
    fused = FusedWeight(target, Rule(adapters.scale, 0.0))
    fused.begin(target.module._parameters[target.attr])
    adapted: Any = fused[torch.tensor(1)]
    delta = adapters.scale * pair.b[1].double() @ pair.a[1].double()
    weight = target.module._parameters[target.attr]
    assert weight is not None
    dense = weight[1].double() + (delta.T if target.transposed else delta)
    assert adapted.shape == dense.shape == adapted.size()
    assert adapted.T.shape == dense.T.shape
    rows, columns = dense.shape

    def close(got: torch.Tensor, want: torch.Tensor) -> None:
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)

    wide, tall = torch.randn(3, columns), torch.randn(3, rows)
    bias = torch.randn(rows)
    close(F.linear(wide, adapted), wide.double() @ dense.T)
    close(F.linear(wide, adapted, bias), wide.double() @ dense.T + bias)
    close(F.linear(tall, weight=adapted.t()), tall.double() @ dense)
    close(tall @ adapted, tall.double() @ dense)
    close(torch.matmul(tall, adapted), tall.double() @ dense)
    close(torch.mm(wide, adapted.transpose(0, 1)), wide.double() @ dense.T)
    # Gradients of the factors.
    a = target.module._parameters[f"{target.attr}_lora_A"]
    assert a is not None
    (tall @ adapted).square().sum().backward()
    a64 = pair.a[1].double().clone().requires_grad_()
    delta = adapters.scale * pair.b[1].double() @ a64
    dense = weight[1].double() + (delta.T if target.transposed else delta)
    (tall.double() @ dense).square().sum().backward()
    assert a.grad is not None
    gradient = a.grad.view(pair.a.shape)
    torch.testing.assert_close(gradient[1].double(), a64.grad, atol=1e-3, rtol=1e-4)
    assert not gradient[0].any()  # dense: zeros for the others
    assert weight.grad is None


def test_what_would_need_the_product_is_refused(tiny: Made) -> None:
    _, adapters = adapted_reference(tiny("mixtral"), targets=EXPERTS)
    target = next(t for t in adapters.targets if t.experts)
    fused: Any = FusedWeight(target, Rule(adapters.scale, 0.0))
    fused.begin(target.module._parameters[target.attr])
    one: Any = fused[0]
    assert isinstance(one, AdaptedWeight)
    x = torch.zeros(2, 2)
    for use in (
        lambda: one.chunk(2), lambda: one + x, lambda: x + one, lambda: one @ x, lambda: one * 2,
        lambda: one[0], lambda: torch.cat([one, one]), lambda: F.linear(one, x),
        lambda: torch.matmul(one, x), lambda: x.to(one), lambda: one.float(),
    ):  # fmt: skip
        with pytest.raises(UnsupportedModelError, match="leave it out of the LoRA targets"):
            use()
    for use in (
        lambda: fused[:2], lambda: fused[torch.tensor([0, 1])], lambda: torch.bmm(x, fused),
        lambda: fused.sum(), lambda: F.linear(x, weight=fused),
    ):  # fmt: skip
        with pytest.raises(UnsupportedModelError, match="one expert at a time"):
            use()


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_undoing_leaves_the_model_as_it_was(tiny: Made, family: str) -> None:
    model = reference(tiny(family), torch.bfloat16)
    ids = batch(0, 0)
    names = [n for n, _ in model.named_parameters()]
    frozen = next(iter(model.parameters()))
    frozen.requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    plain = model(input_ids=ids).logits
    adapters = inject(model, **HOW, targets=None if family != "qwen3_moe" else EXPERTS)
    # B is zero at first: the model computes what it did, and no name has changed.
    assert torch.equal(model(input_ids=ids).logits, plain)
    assert [n for n, _ in model.named_parameters() if n not in adapters.initial] == names
    assert {n for n, p in model.named_parameters() if p.requires_grad} == set(adapters.initial)
    assert adapters.elements == sum(p.numel() for p in model.parameters() if p.requires_grad)
    for name in adapters.initial:
        if "lora_B" in name:
            model.get_parameter(name).data.fill_(0.1)
    assert not torch.equal(model(input_ids=ids).logits, plain)
    adapters.undo()
    adapters.undo()
    assert [n for n, _ in model.named_parameters()] == names
    assert [p.requires_grad for p in model.parameters()] == flags
    assert torch.equal(model(input_ids=ids).logits, plain)


def test_first_values(tiny: Made) -> None:
    """A value depends on the seed and its name alone."""
    model = build(tiny("mixtral")).model
    every = inject(model, **HOW, targets=EXPERTS)
    some = inject(build(tiny("mixtral")).model, **HOW, targets=["down_proj"])
    other = inject(build(tiny("mixtral")).model, **{**HOW, "seed": 6}, targets=["down_proj"])
    assert set(some.initial) < set(every.initial)
    for name, make in some.initial.items():
        value = make()
        assert value.dtype == torch.float32
        assert value.shape == model.get_parameter(name).shape
        assert torch.equal(value, every.initial[name]())
        assert torch.equal(value, other.initial[name]()) == name.endswith("B")
        if name.endswith("B"):
            assert not value.any()
    a = uniform("some.lora_A", (64, 256), 3)
    assert a.abs().max() <= 1 / 16 < 1.01 * a.abs().max()
    assert a.std().item() == pytest.approx(1 / 16 / 3**0.5, rel=0.02)


def test_an_adapted_layer_that_is_never_called_is_named(tiny: Made) -> None:
    model, adapters = adapted_reference(tiny("llama"))
    assert adapters.unused() == [t.name for t in adapters.targets]
    skipped = model.model.layers[1].mlp
    skipped.forward = lambda x: F.linear(
        F.linear(x, skipped.up_proj.weight), skipped.down_proj.weight
    )
    model(input_ids=batch(0, 0))
    assert adapters.unused() == [f"model.layers.1.mlp.{x}_proj" for x in ("gate", "up", "down")]


def test_an_adapter_on_the_head_is_not_lost(tiny: Made) -> None:
    """The loss that takes the head's weight by itself would not see it."""
    model = build(tiny("llama", tie_word_embeddings=False)).model
    assert find_head(model)[0] is not None
    adapters = inject(model, **HOW, targets=["lm_head"])
    form, why = find_head(model)
    assert form is None
    assert "lora_A" in why
    adapters.undo()
    inject(model, **HOW)
    assert find_head(model)[0] is not None


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_measuring_activations_leaves_adapters_alone(tiny: Made, family: str) -> None:
    model = build(tiny(family)).model
    adapters = inject(model, **HOW, targets=None if family == "llama" else EXPERTS)
    forwards = {t.path: t.module.__dict__["forward"] for t in adapters.targets}
    assert measure_training(model, [u.module for u in lay_out(model).units], 2, 16).measured
    for path, forward in forwards.items():
        assert model.get_submodule(path).__dict__["forward"] is forward


def test_a_copy_of_a_layer_has_adapters_of_its_own(tiny: Made) -> None:
    """A plan times a copy, with memory, of a layer that has none."""
    model, _ = adapted_reference(tiny("mixtral"), targets=EXPERTS)
    layer = model.model.layers[0]
    other = copy.deepcopy(layer)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    plain = layer.self_attn.q_proj(x)
    assert torch.equal(other.self_attn.q_proj(x), plain)
    with torch.no_grad():
        other.self_attn.q_proj.lora_B.fill_(1.0)
    assert not torch.equal(other.self_attn.q_proj(x), plain)
    assert torch.equal(layer.self_attn.q_proj(x), plain)


@pytest.mark.parametrize(
    "how", [{"r": 0}, {"dropout": 1.0}, {"dropout": -0.1}, {"alpha": 0.0}, {"alpha": float("nan")}]
)
def test_numbers_out_of_range(tiny: Made, how: dict[str, float]) -> None:
    with pytest.raises(OffloadError, match="LoRA"):
        inject(build(tiny("llama")).model, **{**HOW, **how})
