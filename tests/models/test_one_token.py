"""The experts of one token in fewer steps: the loop's bits, and only where that was shown."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers.models
from equivalence import Golden, budgets, check_logits, opened, options
from torch import nn

from offload.models import one_token
from offload.models.expert_groups import ExpertGroup
from offload.models.experts import ExpertSession
from offload.models.load import prepare
from offload.models.one_token import OneToken, Tried
from offload.models.params import Param, Place

Checkpoint = Callable[..., Golden]

OTHERWISE = {
    "MuseSparkExperts",  # a norm after each expert
    "OpenAIPrivacyFilterExperts",  # products in float32
}


class Config:
    """Numbers for whatever a module of experts asks its config for."""

    _experts_implementation = "eager"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("hidden_act", "hidden_activation", "mlp_hidden_act", "activation_function"):
            return "silu"
        if "hidden_size" in name:
            return 64
        if any(part in name for part in ("alpha", "limit", "eps")):
            return 1.5
        return 4 if "experts" in name else 32


def classes() -> Iterator[type[nn.Module]]:
    """Experts of every family, those that are built from a config alone."""
    for family in pkgutil.iter_modules(transformers.models.__path__):
        where = Path(transformers.models.__path__[0]) / family.name / f"modeling_{family.name}.py"
        if not where.exists() or "use_experts_implementation" not in where.read_text("utf-8"):
            continue
        name = f"transformers.models.{family.name}.modeling_{family.name}"
        for kind in vars(importlib.import_module(name)).values():
            own = inspect.isclass(kind) and issubclass(kind, nn.Module) and kind.__module__ == name
            if own and "Expert" in kind.__name__ and hasattr(kind.forward, "__wrapped__"):
                yield kind


def group_of(module: Any) -> ExpertGroup:
    own = [(a, t) for a, t in module._parameters.items() if t is not None and t.dim() >= 3]
    params = [Param(a, t, [Place(module, a)], [a]) for a, t in own]
    return ExpertGroup("experts", module, own[0][1].shape[0], params)


def filled(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 4)
    return module.to(dtype)


def check_one(module: Any, found: OneToken, dtype: torch.dtype, weighed: torch.dtype) -> None:
    """Tokens one by one."""
    generator = torch.Generator().manual_seed(2)
    width = one_token.width_in(group_of(module))
    for _ in range(10):
        # Not where torch puts what it allocates: as a part of something else.
        hidden = torch.randn(1, width + 1, generator=generator).to(dtype)[:, 1:]
        index = torch.randperm(4, generator=generator)[None, :3]
        weights = torch.rand(1, 3, generator=generator).to(weighed)
        with torch.no_grad():
            want = type(module).forward(module, hidden, index, weights)
            got = found.forward(hidden, index, weights)
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


def test_every_family_takes_the_loops_steps() -> None:
    kinds = list(classes())
    assert len(kinds) >= 40
    for kind in kinds:
        for dtype in (torch.bfloat16, torch.float32):
            module: Any = filled(kind(Config()), dtype)
            found = Tried()(group_of(module))
            if kind.__name__ in OTHERWISE and dtype == torch.bfloat16:
                assert found is None, kind
                continue
            if found is None:
                assert kind.__name__ in OTHERWISE, (kind, dtype)
                continue
            check_one(module, found, dtype, torch.float32)
            check_one(module, found, dtype, dtype)


class Plain(nn.Module):
    """An experts module as transformers has them, but for ``step``."""

    def __init__(self, step: str = "") -> None:
        super().__init__()
        self.config = Config()
        self.has_gate, self.has_bias, self.is_transposed = True, False, False
        self.num_experts, self.step = 4, step
        self.gate_up_proj = nn.Parameter(torch.empty(4, 64, 32))
        self.down_proj = nn.Parameter(torch.empty(4, 32, 32))
        self.looped = 0

    def act_fn(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x)

    def _apply_gate(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def _loop(self, hidden: Any, index: Any, weights: Any) -> torch.Tensor:
        if "looped" in self.__dict__:
            self.looped += 1
        out = torch.zeros_like(hidden)
        experts = sorted(set(index.reshape(-1).tolist()))
        for expert in reversed(experts) if self.step == "backwards" else experts:
            if expert == self.num_experts:
                continue
            tokens, slots = torch.where(index == expert)
            x = hidden[tokens]
            if self.step == "weighed first":
                x = x * weights[tokens, slots, None]
            x = nn.functional.linear(x, self.gate_up_proj[expert])
            x = self._apply_gate(x)
            if self.step == "twice":
                x = x + x - x
            x = nn.functional.linear(x, self.down_proj[expert])
            if self.step != "weighed first":
                x = x * weights[tokens, slots, None]
            out.index_add_(0, tokens, x.to(out.dtype))
        return out

    @wraps(_loop)
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._loop(*args, **kwargs)


Plain.forward.__wrapped__ = Plain._loop  # type: ignore[attr-defined]


@pytest.mark.parametrize("step", ["weighed first", "twice", "backwards"])
def test_a_loop_that_does_something_else_stays(step: str) -> None:
    assert Tried()(group_of(filled(Plain(), torch.bfloat16))) is not None
    assert Tried()(group_of(filled(Plain(step), torch.bfloat16))) is None


def test_attributes_beside_the_experts_are_not_guessed_at() -> None:
    module: Any = filled(Plain(), torch.float32)
    module.scale = nn.Parameter(torch.ones(4, 1, 1))
    assert Tried()(group_of(module)) is None
    module = filled(Plain(), torch.float32)
    module.offset = nn.Parameter(torch.ones(3))
    assert Tried()(group_of(module)) is None
    del module.has_gate
    assert Tried()(group_of(module)) is None


def test_calls_that_are_not_one_tokens_are_the_loops() -> None:
    module: Any = filled(Plain(), torch.float32)
    found = Tried()(group_of(module))
    assert found is not None

    def looped(*args: Any, **kwargs: Any) -> int:
        before = module.looped
        got = found.forward(*args, **kwargs)
        count = module.looped - before
        assert torch.equal(got, module._loop(*args, **kwargs))
        return int(count)

    one, index, weights = torch.ones(1, 32), torch.tensor([[2, 0]]), torch.rand(1, 2)
    with torch.no_grad():
        assert looped(one, index, weights) == 0
        assert looped(one, index.int(), weights) == 0
        assert looped(one, index, weights=weights) == 1
        assert looped(one.expand(2, 32), index.expand(2, 2), weights.expand(2, 2)) == 1
        assert looped(one, torch.tensor([[2, 2]]), weights) == 1
        assert looped(one, torch.tensor([[2, 4]]), weights) == 1
        assert looped(one, index[:, :0], weights[:, :0]) == 0
        with torch.autocast("cpu", torch.bfloat16):
            assert looped(one, index, weights) == 1
    assert looped(one, index, weights) == 1  # somebody wants gradients


def test_a_routing_that_was_heard_of_is_not_asked_for_again() -> None:
    session = ExpertSession(cast(Any, None), group_of(filled(Plain(), torch.float32)))
    index = torch.tensor([[2, 0]])
    assert session.row_heard(index) == [2, 0]
    session.heard = index, np.array([[3, 1]])  # as if it lay on a device, and said so
    assert session.row_heard(index) == [3, 1]
    assert session.row_heard(index.clone()) == [2, 0]


def test_what_is_added_up_on_a_card_is_added_as_the_loop_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its road, on the processor."""
    module: Any = filled(Plain(), torch.bfloat16)
    found = Tried()(group_of(module))
    assert found is not None
    asked: list[torch.device] = []

    class Elsewhere(torch.Tensor):
        """Says that it is on a card."""

        @property
        def device(self) -> Any:  # type: ignore[override]
            return torch.device("cuda")

    index_of = found._index_of

    def on_cpu(device: torch.device) -> torch.Tensor:
        asked.append(device)
        return index_of(torch.device("cpu"))

    monkeypatch.setattr(found, "_index_of", on_cpu)
    hidden = torch.randn(1, 32).bfloat16()
    weights = torch.rand(1, 2).bfloat16()
    with torch.no_grad():
        want = module._loop(hidden, torch.tensor([[2, 0]]), weights)
        got = found(hidden.as_subclass(Elsewhere), [2, 0], weights, module)
    assert asked == [torch.device("cuda")]
    assert torch.equal(got.as_subclass(torch.Tensor), want)


def test_each_class_and_size_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []
    same = one_token._same
    monkeypatch.setattr(
        one_token,
        "_same",
        lambda *a: tries.append(a[0].name) or same(*a),  # type: ignore[func-returns-value]
    )
    tried = Tried()
    for _ in range(3):
        assert tried(group_of(filled(Plain(), torch.float32))) is not None
    assert len(tries) == 1
    assert tried(group_of(filled(Plain(), torch.bfloat16))) is not None
    assert len(tries) == 2


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "nemotron_h"])
def test_a_streamed_model_decodes_with_it(
    checkpoint: Checkpoint, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    call = OneToken.__call__

    def counted(self: OneToken, *args: Any) -> torch.Tensor:
        used.append(1)
        return call(self, *args)

    want = checkpoint(family)
    prepared = prepare(want.directory, options("cpu", **budgets(want.directory, "cpu")["minimum"]))
    with opened(prepared) as model:
        monkeypatch.setattr(OneToken, "__call__", counted)
        check_logits(model, want)
    assert used
