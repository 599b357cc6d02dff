"""Decode kernels stand in for a model's own code as long as that would do the same: what a caller
hides from a token, and what a program changes of an open model, is heeded as by transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_config, write
from program_changes import (
    Shifted,
    hook_before,
    hook_on_all,
    instead,
    own_forward_inside,
    rotary_buffer,
    same_name,
)
from torch import nn
from transformers import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import offload
from offload.models.lean_cache import LeanCache
from offload.models.lean_step import LayerStep

IDS = torch.tensor([[5, 9, 17, 3, 44, 21, 8, 30, 2, 11]])
FAMILIES = ["qwen3", "qwen3_moe", "gemma3_text", "gpt_oss"]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """Models on the decode kernels, by family."""
    made: dict[str, Any] = {}

    def give(family: str) -> Any:
        if family not in made:
            home = tmp_path_factory.mktemp(family)
            wide = {"sliding_window": 16} if family in ("gemma3_text", "gpt_oss") else {}
            config = tiny_config(family, vocab_size=128, **wide)
            directory = write(family, home / "m", torch.float32, config=config)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("offload.models.pack_cache.pack_cache_dir", lambda *_: home / "p")
                made[family] = offload.load(directory, quant="none", ram="256MiB", context=48)
        return made[family]

    yield give
    for model in made.values():
        model.offload.close()


def caches(model: Any) -> tuple[Any, Any]:
    """Of the kernels, and of transformers, with which the layers run their own code."""
    ours = model.offload.new_cache()
    assert isinstance(ours, LeanCache)
    return ours, DynamicCache(config=model.config)


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * want.abs().max().item())


def padded(length: int) -> torch.Tensor:
    mask = torch.ones(1, length, dtype=torch.int64)
    mask[0, 2:4] = 0
    return mask


def added(length: int) -> torch.Tensor:
    mask = torch.zeros(1, 1, 1, length)
    mask[..., 2:4] = -3e38
    return mask


MASKS: dict[str, Callable[[int], Any]] = {
    "padding": padded,
    "of scores": added,
    "bool": lambda n: added(n) == 0,
    "by kind": lambda n: dict.fromkeys(("full_attention", "sliding_attention"), added(n)),
    "too short": lambda n: torch.ones(1, n - 1, dtype=torch.int64),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("named", [True, False], ids=["named", "positional"])
@pytest.mark.parametrize("whole", [True, False], ids=["model", "decoder"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_mask_hides_from_a_token(
    family: str, mask: str, whole: bool, named: bool, opened: Callable[[str], Any]
) -> None:
    model = opened(family)
    if mask == "by kind" and not hasattr(model.config, "layer_types"):
        pytest.skip("its layers are of one kind")
    run = model if whole else model.base_model
    told = []
    for cache in caches(model):
        with torch.no_grad():
            model(IDS[:, :6], past_key_values=cache)
            outs = []
            for i in range(6, 10):
                one: Any = {"input_ids": IDS[:, i : i + 1]} if named else {}
                args = () if named else (IDS[:, i : i + 1],)
                outs.append(
                    run(*args, **one, past_key_values=cache, attention_mask=MASKS[mask](i + 1))[0]
                )
        told.append(torch.cat(outs, 1))
    near(*told)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_of_a_generation_on_a_cache_of_its_own(
    family: str, opened: Callable[[str], Any]
) -> None:
    model, ids = opened(family), IDS.clone()
    ids[0, :3], mask = 0, torch.ones_like(IDS)
    mask[0, :3] = 0
    want = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    ours, stock = caches(model)
    got = model.generate(ids, **want, past_key_values=ours)
    assert torch.equal(got, model.generate(ids, **want, past_key_values=stock))


class Half(nn.Module):
    """Of what another module gives."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.__dict__["other"] = other

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["other"](*args, **kwargs) / 2


def fewer_layers(model: Any) -> Any:
    base = model.base_model
    return instead(base, "layers", nn.ModuleList(list(base.layers)[:3]))


def another_child(name: str) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        owner = model if name == "lm_head" else model.base_model
        return instead(owner, name, Half(getattr(owner, name)))

    return change


@contextmanager
def own_forward(model: Any) -> Iterator[None]:
    base = model.base_model
    inner = base.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = inner(*args, **kwargs)
        out.last_hidden_state = out.last_hidden_state / 2
        return out

    base.forward = forward
    try:
        yield
    finally:
        del base.forward


@contextmanager
def own_attention(model: Any) -> Iterator[None]:
    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def halved(*args: Any, **kwargs: Any) -> Any:
        out, shares = stock(*args, **kwargs)
        return out / 2, shares

    halved.__module__ = "somebody"
    before = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register("halved", halved)
    ALL_MASK_ATTENTION_FUNCTIONS.register("halved", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation("halved")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def rotary_hook(model: Any) -> Iterator[None]:
    rotary = model.base_model.rotary_emb
    hook = rotary.register_forward_hook(lambda _m, _a, out: tuple(x / 2 for x in out))
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def written(parameter: Any) -> Iterator[None]:
    with torch.no_grad():
        parameter.mul_(0.5)
    try:
        yield
    finally:
        with torch.no_grad():
            parameter.mul_(2)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "attention of the same name": same_name,
    "a hook before": hook_before,
    "own forward inside": own_forward_inside,
    "depth": lambda m: instead(m.config, "num_hidden_layers", 2),
    "last epsilon": lambda m: instead(m.base_model.norm, "variance_epsilon", 0.5),
    "a norm's weight": lambda m: written(m.base_model.layers[1].input_layernorm.weight),
    "the last norm's weight": lambda m: written(m.base_model.norm.weight),
    "the router's weight": lambda m: written(m.base_model.layers[1].mlp.gate.weight),
    "mode": lambda _: Shifted(),
    "autocast": lambda _: torch.autocast("cpu", torch.bfloat16),
    "fewer layers": fewer_layers,
    "another norm": another_child("norm"),
    "another head": another_child("lm_head"),
    "another embedding": another_child("embed_tokens"),
    "own forward": own_forward,
    "own attention": own_attention,
    "rotary hook": rotary_hook,
    "rotary scale": lambda m: instead(m.base_model.rotary_emb, "attention_scaling", 2.0),
    "rotary buffer": rotary_buffer,
    "a hook on all": hook_on_all,
    "scale of scores": lambda m: instead(m.base_model.layers[1].self_attn, "scaling", 1.0),
    "epsilon": lambda m: instead(m.base_model.layers[1].input_layernorm, "variance_epsilon", 0.5),
    "fewer experts": lambda m: instead(m.base_model.layers[1].mlp.gate, "top_k", 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_program_changes(change: str, opened: Callable[[str], Any]) -> None:
    model = opened("qwen3_moe")
    asked = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    asked |= {"output_logits": True, "return_dict_in_generate": True}
    plain = model.generate(IDS, **asked)
    with CHANGES[change](model):
        got = model.generate(IDS, **asked)
        want = model.generate(
            IDS, **asked, past_key_values=DynamicCache(config=model.config)
        )  # fmt: skip
    for ours, stock in zip(got.logits, want.logits, strict=True):
        near(ours, stock)
    assert not torch.allclose(got.logits[1], plain.logits[1]), "it has changed nothing"
    again = model.generate(IDS, **asked)
    assert all(torch.equal(a, b) for a, b in zip(again.logits, plain.logits, strict=True))


@pytest.mark.parametrize(
    "name", ["layers.1.input_layernorm.weight", "layers.1.mlp.gate.weight", "norm.weight"]
)
def test_copies_that_kernels_read(name: str, tmp_path: Path) -> None:
    """Of what is kept in another type or order than the model has it."""
    directory = write("qwen3_moe", tmp_path / "m", torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offload.models.pack_cache.pack_cache_dir", lambda *_: tmp_path / "p")
        model = offload.load(directory, quant="none", ram="256MiB", context=48)
    asked = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    asked |= {"output_logits": True, "return_dict_in_generate": True}

    def last(**more: Any) -> torch.Tensor:
        return model.generate(IDS % 64, **asked, **more).logits[-1].float()

    with contextlib.closing(model.offload):
        plain = last()
        with written(model.base_model.get_parameter(name)):
            got, want = last(), last(past_key_values=DynamicCache(config=model.config))
            assert (got - want).abs().max() < 0.1 * (plain - want).abs().max()
        assert torch.equal(last(), plain), "the kernels are used again"


def test_kernels_are_used_again_after_a_change(
    opened: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opened("qwen3_moe")
    prompts: list[int] = []
    inner = LayerStep.prompt
    monkeypatch.setattr(LayerStep, "prompt", lambda *a: prompts.append(1) or inner(*a))
    with CHANGES["fewer experts"](model):
        model.generate(IDS, max_new_tokens=2, do_sample=False)
    assert not prompts
    model.generate(IDS, max_new_tokens=2, do_sample=False)
    assert len(prompts) == len(model.base_model.layers)
