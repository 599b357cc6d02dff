"""peft loads what we write, and computes what W + B A · scale computes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch
from families import write

from offload.errors import OffloadError, UnsupportedModelError
from offload.models.meta import build
from offload.train import lora_output
from offload.train.lora_output import (
    AdapterOptions,
    LoraPair,
    MergedValues,
    merged,
    write_adapter,
)
from offload.train.output import write_model
from offload.train.output_tensors import OutputTensors

pytestmark = [
    # Both are peft's own: it reads a name that transformers gave up, and it looks for patterns of
    # parameters among the modules, after having used them.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
]

TOKENS = torch.arange(24).reshape(2, 12) * 7 % 250

# E experts, R rank; the last parts of what is targeted: linear layers, then fused parameters.
FAMILIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "llama": (("q_proj", "v_proj", "down_proj"), ()),
    "gpt2": (("c_attn", "c_fc"), ()),
    "phi3": (("qkv_proj",), ()),
    "mixtral": (("q_proj", "o_proj"), ("gate_up_proj", "down_proj")),
    "qwen3_moe": (("q_proj",), ("down_proj",)),
    "qwen2_moe": (("k_proj", "gate_proj", "up_proj"), ("gate_up_proj", "down_proj")),
    "deepseek_v3": (("o_proj", "down_proj"), ("gate_up_proj",)),
    "gpt_oss": (("q_proj",), ("gate_up_proj", "down_proj")),
    "llama4_text": (("v_proj", "up_proj"), ("gate_up_proj", "down_proj")),
    "olmoe": ((), ("gate_up_proj", "down_proj")),
}
TRANSPOSED_EXPERTS = ("gpt_oss", "llama4_text")


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    logging.disable_progress_bar()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, experts_implementation="eager"
    ).eval()


def with_peft(model: Any, adapter: Path) -> Any:
    peft = pytest.importorskip("peft")
    return peft.PeftModel.from_pretrained(model, adapter)


def pairs_for(model: Any, family: str, r: int = 2) -> dict[str, LoraPair]:
    """Random factors, of one rank more in every second."""
    linear, fused = FAMILIES[family]
    generator = torch.Generator().manual_seed(3)
    pairs: dict[str, LoraPair] = {}

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    for name, parameter in model.named_parameters():
        rank = r + len(pairs) % 2
        path = name.removesuffix(".weight")
        if path != name and path.rpartition(".")[2] in linear:
            flipped = family == "gpt2"
            n_in, n_out = parameter.shape if flipped else parameter.shape[::-1]
            pairs[path] = LoraPair(draw(rank, n_in), draw(n_out, rank), flipped)
        elif parameter.dim() == 3 and name.rpartition(".")[2] in fused:
            flipped = family in TRANSPOSED_EXPERTS
            experts, *sizes = parameter.shape
            n_in, n_out = sizes if flipped else sizes[::-1]
            pairs[name] = LoraPair(draw(experts, rank, n_in), draw(experts, n_out, rank), flipped)
    assert pairs
    return pairs


def options_for(base: Path, pairs: dict[str, LoraPair]) -> AdapterOptions:
    names = list(pairs)
    return AdapterOptions(
        base=str(base), r=2, alpha=4, dropout=0.1, alphas={names[0]: 5, names[-1]: 2.5}
    )


def names_of(pairs: dict[str, LoraPair], model: Any) -> dict[str, str]:
    known = dict(model.named_parameters())
    return {(n if n in known else f"{n}.weight"): n for n in pairs}


def add_by_hand(model: Any, pairs: dict[str, LoraPair], options: AdapterOptions) -> None:
    """In float64, so that it is no second copy of what is tested."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for parameter, name in names_of(pairs, model).items():
            pair = pairs[name]
            delta = pair.b.double() @ pair.a.double() * options.scale(name, pair)
            if pair.transposed:
                delta = delta.transpose(-1, -2)
            target = parameters[parameter]
            target.copy_(target.double() + delta)


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_gives_the_logits_of_merged_weights(family: str, tmp_path: Path) -> None:
    base = write(family, tmp_path / "base", torch.float32)
    pairs = pairs_for(load(base), family)
    options = options_for(base, pairs)
    write_adapter(tmp_path / "adapter", build(base).model, pairs, options, run_id="r")

    adapted = with_peft(load(base), tmp_path / "adapter")
    by_hand = load(base)
    plain = by_hand(TOKENS).logits
    add_by_hand(by_hand, pairs, options)
    got, want = adapted(TOKENS).logits, by_hand(TOKENS).logits
    assert not torch.allclose(got, plain, atol=1e-2)
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-3)

    # And peft's own merging is ours: the same operations for linear layers, up to the order of
    # additions for experts, which it multiplies all at once.
    unloaded = dict(adapted.merge_and_unload().named_parameters())
    original = dict(load(base).named_parameters())
    for parameter, name in names_of(pairs, by_hand).items():
        pair, scale = pairs[name], options.scale(name, pairs[name])
        if pair.a.dim() == 2:
            ours = merged(original[parameter], pair.a, pair.b, scale, transposed=pair.transposed)
            assert torch.equal(unloaded[parameter], ours), parameter
        for expert in range(pair.a.shape[0] if pair.a.dim() == 3 else 0):
            ours = merged(
                original[parameter][expert], pair.a[expert], pair.b[expert], scale,
                transposed=pair.transposed,
            )  # fmt: skip
            torch.testing.assert_close(unloaded[parameter][expert], ours, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2_moe", "gpt_oss"])
def test_the_merged_model_is_written(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora_output, "BLOCK_ELEMENTS", 1000)
    base = write(family, tmp_path / "base", torch.bfloat16)
    model, meta = load(base, torch.bfloat16), build(base)
    pairs = pairs_for(model, family)
    options = options_for(base, pairs)
    state = model.state_dict()
    asked: list[int] = []

    def parameter(name: str, start: int, count: int) -> torch.Tensor:
        asked.append(count)
        return state[name].reshape(-1)[start : start + count]

    names = names_of(pairs, model)
    scales = {n: options.scale(n, p) for n, p in pairs.items()}
    values = MergedValues(parameter, pairs, scales, names)
    with OutputTensors(meta.mapping, values) as tensors:
        write_model(tmp_path / "out", base, tensors.tensors, tensors.read, run_id="r")
    # Three numbers in a row at every place give the same as all at once.
    name = next(iter(names))
    at_once = values(name, 0, state[name].numel())
    for start in range(0, 600, 7):
        assert torch.equal(values(name, start, 300), at_once[start : start + 300])

    written = load(tmp_path / "out", torch.bfloat16).state_dict()
    by_hand = load(base, torch.float32)
    add_by_hand(by_hand, pairs, options)
    for key, want in by_hand.state_dict().items():
        rounded = want.to(torch.bfloat16)
        if key not in names:
            assert torch.equal(written[key], rounded)
            continue
        # Once rounded: another value only where float32 and float64 fall on two sides of a tie.
        differs = written[key] != rounded
        assert differs.float().mean() < 1e-3
        torch.testing.assert_close(written[key].float(), want, atol=1e-3, rtol=2**-8)
    assert any(not torch.equal(written[n], state[n]) for n in names)


def test_peft_merges_bfloat16_as_we_do(tmp_path: Path) -> None:
    base = write("llama", tmp_path / "base", torch.bfloat16)
    model = load(base, torch.bfloat16)
    pairs = pairs_for(model, "llama")
    options = options_for(base, pairs)
    write_adapter(tmp_path / "adapter", model, pairs, options, run_id="r")
    theirs = with_peft(load(base, torch.bfloat16), tmp_path / "adapter").merge_and_unload()
    for name, pair in pairs.items():
        weight = model.get_submodule(name).weight
        ours = merged(weight, pair.a, pair.b, options.scale(name, pair))
        assert ours.dtype == torch.bfloat16
        assert torch.equal(theirs.get_submodule(name).weight, ours)


def test_targets_are_short_where_that_is_exact(tmp_path: Path) -> None:
    base = write("llama", tmp_path / "base", torch.float32)
    model = build(base).model
    pairs = pairs_for(model, "llama", r=4)

    def config(some: dict[str, LoraPair]) -> Any:
        options = AdapterOptions(base="b", r=4, alpha=8.0)
        write_adapter(tmp_path / "out", model, some, options, run_id="r", source=base)
        return json.loads((tmp_path / "out" / "adapter_config.json").read_text())

    every = config(pairs)
    assert every["target_modules"] == ["down_proj", "q_proj", "v_proj"]
    assert every["lora_alpha"] == 8
    odd = [n for i, n in enumerate(pairs) if i % 2]
    assert set(every["rank_pattern"]) == {re.escape(n) for n in odd}
    one = {"model.layers.2.self_attn.q_proj": pairs["model.layers.2.self_attn.q_proj"]}
    assert config(one)["target_modules"] == list(one)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "offload_training.json",
    ]  # fmt: skip


def test_dropout_is_told_where_peft_has_it(tmp_path: Path) -> None:
    for family, want in (("llama", 0.1), ("mixtral", 0.0)):
        base = write(family, tmp_path / family, torch.float32)
        model = build(base).model
        pairs = pairs_for(model, family)
        write_adapter(tmp_path / "out", model, pairs, options_for(base, pairs), run_id="r")
        config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
        assert config["lora_dropout"] == want


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = build(write("llama", tmp_path / "base", torch.float32)).model
    options = AdapterOptions(base="b", r=2, alpha=4)

    def refused(name: str, a: tuple[int, ...], b: tuple[int, ...], **how: bool) -> None:
        pair = LoraPair(torch.zeros(a), torch.zeros(b), **how)
        write_adapter(tmp_path / "out", model, {name: pair}, options, run_id="r")

    q = "model.layers.0.self_attn.q_proj"
    k = "model.layers.0.self_attn.k_proj"
    with pytest.raises(ValueError, match=r"do not fit"):
        refused(q, (2, 65), (64, 2))
    with pytest.raises(ValueError, match=r"do not fit"):
        refused(q, (2, 64), (64, 3))
    with pytest.raises(ValueError, match=r"transposed do not fit"):
        refused(k, (2, 64), (32, 2), transposed=True)
    with pytest.raises(UnsupportedModelError, match="neither a linear layer nor a parameter"):
        refused("model.layers.9.q_proj", (2, 64), (64, 2))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(OffloadError, match="not replaced"):
        refused(q, (2, 64), (64, 2))
