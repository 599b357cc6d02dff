"""Prompts by the kernels: to the bit what single tokens get, however the prompt is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_lean import CONFIGS, LeanModel, model_of, plan_of
from test_packed_run import IDS, LEAN, least, load, packed

from offload.cpu_ops import threads
from offload.cpu_ops.attention import BLOCK
from offload.cpu_ops.prompt import CHUNK, Room
from offload.errors import OffloadError
from offload.models import lean_step
from offload.models.lean_many import Rooms
from offload.models.lean_masks import is_causal

STEPS = 50


def by_token(model: Any, x_TH: Any) -> tuple[LeanModel, Any]:
    lean = LeanModel(model, len(x_TH) + 8)
    return lean, np.stack([lean(row)[-1] for row in x_TH])


def in_pieces(model: Any, x_TH: Any, cuts: list[int], rows: int) -> tuple[LeanModel, Any]:
    """A piece of one token goes the way of single tokens."""
    lean, outs = LeanModel(model, len(x_TH) + 8), []
    for first, last in zip([0, *cuts], [*cuts, len(x_TH)], strict=True):
        x = x_TH[first:last].copy()
        if len(x) == 1:
            x = lean(x[0])[-1][None]
        else:
            for layer in lean.layers:
                x = layer.prompt(x, rows)
        outs.append(x)
    return lean, np.concatenate(outs)


def assert_same(a: tuple[LeanModel, Any], b: tuple[LeanModel, Any]) -> None:
    (one, got), (other, expected) = a, b
    for i in range(len(one.layers)):
        assert np.array_equal(one.cache.keys(i), other.cache.keys(i))
        assert np.array_equal(one.cache.values(i), other.cache.values(i))
    assert np.array_equal(got, expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_prompt_is_its_tokens(name: str) -> None:
    model = model_of(name)
    x_TH = torch.randn(STEPS, model.config.hidden_size).numpy()
    expected = by_token(model, x_TH)
    assert_same(in_pieces(model, x_TH, [], STEPS), expected)
    assert_same(in_pieces(model, x_TH, [7, 8, 13], 16), expected)


@pytest.mark.parametrize(
    ("name", "window"),
    [("qwen3_moe", 0), ("gpt_oss", 9), ("gpt_oss", 130), ("gemma3", 261), ("mistral", 257)],
)
def test_over_several_blocks(name: str, window: int) -> None:
    """Sinks, and windows that begin in the middle of blocks, some tokens of a group in the next."""
    model = model_of(name, **({"sliding_window": window} if window else {}))
    x_TH = torch.randn(2 * BLOCK + 39, model.config.hidden_size).numpy()
    expected = by_token(model, x_TH)
    assert_same(in_pieces(model, x_TH, [BLOCK - 3], len(x_TH)), expected)
    assert_same(in_pieces(model, x_TH, [1, 2, 301], 97), expected)


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every layer's prompt that the kernels computed."""
    found: list[int] = []
    inner = lean_step.LayerStep.prompt

    def counted(self: Any, hidden: torch.Tensor, *args: Any) -> Any:
        found.append(hidden.shape[1])
        return inner(self, hidden, *args)

    monkeypatch.setattr(lean_step.LayerStep, "prompt", counted)
    return found


@pytest.mark.parametrize("family", LEAN)
def test_a_models_prompt_is_its_tokens(family: str, tmp_path: Path, prompts: list[int]) -> None:
    """On a budget that holds all, and on the least one."""
    _, pack_dir = packed(family, tmp_path, "q4")
    ids_1T = torch.cat([IDS, IDS.flip(1)], 1)
    for ram in (2**30, least(pack_dir)):
        model = load(pack_dir, ram)
        layers, make = len(model.base_model.layers), model.offload.new_cache
        try:
            with torch.no_grad():
                cache = make()
                alone = [model(i[None, None], past_key_values=cache).logits for i in ids_1T[0]]
                assert not prompts
                for cut in (ids_1T.shape[1], 5):
                    cache = make()
                    got = [
                        model(part, past_key_values=cache).logits for part in ids_1T.split(cut, 1)
                    ]
                    assert prompts == [
                        p.shape[1] for p in ids_1T.split(cut, 1) for _ in range(layers)
                    ]
                    assert torch.equal(torch.cat(got, 1), torch.cat(alone, 1))
                    prompts.clear()
        finally:
            model.offload.close()


def test_who_wants_more_of_a_prompt_gets_it(tmp_path: Path, prompts: list[int]) -> None:
    """States of all layers, each its own; a mask or gradients that the kernels know nothing of."""
    _, pack_dir = packed("qwen3_moe", tmp_path, "q4")
    model = load(pack_dir)
    layers, make = len(model.base_model.layers), model.offload.new_cache
    try:
        with torch.no_grad():
            plain = model(IDS, past_key_values=make(), output_hidden_states=True)
            assert len(prompts) == layers
            states = plain.hidden_states
            assert len({s.data_ptr() for s in states}) == layers + 1
            assert not torch.equal(states[0], states[1])
            by_hook: list[torch.Tensor] = []
            hooks = [
                layer.register_forward_hook(lambda _m, _a, out: by_hook.append(out.clone()))
                for layer in model.base_model.layers
            ]
            model(IDS, past_key_values=make())
            for hook in hooks:
                hook.remove()
            assert all(torch.equal(a, b) for a, b in zip(by_hook, states[1:-1], strict=False))
            # What is inside of layers their own code gives; transformers' hooks for it stay behind.
            prompts.clear()
            routed = model(IDS, past_key_values=make(), output_router_logits=True).router_logits
            assert len(routed) == layers
            assert not prompts
            model(IDS, past_key_values=make())
            assert len(prompts) == layers, "nobody asks any more"
            prompts.clear()
            hidden = torch.ones(1, 1, IDS.shape[1], IDS.shape[1], dtype=torch.bool).tril()
            hidden[..., 4, 1] = False
            own = model(IDS, past_key_values=make(), attention_mask=hidden).logits
            assert not prompts
            close = (own - plain.logits).abs().amax((0, 2)) < 1e-4
            assert close[:4].all()
            assert not close[4]
    finally:
        model.offload.close()


def test_threads_may_change_between_prompts(tmp_path: Path, prompts: list[int]) -> None:
    """Each thread has memory of its own: more of them need more. The bits stay."""
    _, pack_dir = packed("qwen3_moe", tmp_path, "q4")
    model, before = load(pack_dir), threads._threads
    found = []
    try:
        with torch.no_grad():
            for count in (1, 3, 2):
                threads.setup(count)
                found.append(model(IDS, past_key_values=model.offload.new_cache()).logits)
        assert prompts
        assert all(torch.equal(logits, found[0]) for logits in found)
    finally:
        threads._threads = before
        model.offload.close()
    plans = [lean.plan for lean in (plan_of(layer) for layer in model_of("qwen3_moe").layers)]
    threads.setup(1)
    try:
        room = Room(plans, 4, 8)
        room.scratch()
        threads.setup(2)
        with pytest.raises(OffloadError, match="made for 1 threads are used by 2"):
            room.scratch()
    finally:
        threads._threads = before


def test_hidden_states_of_any_layout(tmp_path: Path, prompts: list[int]) -> None:
    """And positions that are not one for each token are left to the layer's own code."""
    _, pack_dir = packed("llama", tmp_path, "q4")
    model = load(pack_dir)
    make, layer = model.offload.new_cache, model.base_model.layers[0]
    try:
        x = torch.randn(1, model.config.hidden_size, 6).transpose(1, 2)
        assert not x.is_contiguous()
        with torch.no_grad():
            out = layer(x, past_key_values=make())
            assert torch.equal(out, layer(x.contiguous(), past_key_values=make()))
            assert len(prompts) == 2
            positions = torch.arange(6)[None]
            same = layer(x, past_key_values=make(), position_ids=positions)
            assert torch.equal(out, same)
            rotary = model.base_model.rotary_emb(x, positions)
            own = layer(
                x, past_key_values=make(), position_ids=positions.expand(3, -1),
                position_embeddings=rotary,
            )  # fmt: skip
        assert len(prompts) == 3
        assert (own - out).abs().max() < 1e-3 * out.abs().max()
    finally:
        model.offload.close()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize(("cached", "window"), [(0, 0), (3, 0), (0, 4), (3, 4), (0, 99)])
def test_masks_that_hide_what_attention_hides(dtype: torch.dtype, cached: int, window: int) -> None:
    tokens = 6
    back = torch.arange(cached, cached + tokens)[:, None] - torch.arange(cached + tokens)
    seen = (back >= 0) & ((back < window) | (window == 0))
    mask = seen if dtype == torch.bool else torch.zeros(seen.shape).masked_fill(~seen, -3e38)
    mask = mask[None, None]
    assert is_causal(mask, tokens, cached, window)
    assert not is_causal(mask, tokens, cached, 5)
    assert not is_causal(mask.expand(2, 1, -1, -1), tokens, cached, window)
    assert not is_causal(mask[..., 1:], tokens, cached, window)
    assert is_causal(None, tokens, cached, window) == (cached == 0 and window in (0, 99))
    for at in ((0, 0, 2, cached + 1), (0, 0, 2, cached + 4)):
        other = mask.clone()
        other[at] = not other[at] if dtype == torch.bool else -1.0
        assert not is_causal(other, tokens, cached, window)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("window", [0, 50])
def test_every_row_of_a_long_mask_is_looked_at_in_little_memory(
    dtype: torch.dtype, window: int
) -> None:
    cached, tokens = 300, 2000
    back = torch.arange(cached, cached + tokens)[:, None] - torch.arange(cached + tokens)
    seen = (back >= 0) & ((back < window) | (window == 0))
    mask = seen if dtype == torch.bool else torch.zeros(seen.shape).masked_fill(~seen, -3e38)
    mask = mask[None, None]
    with torch.profiler.profile(profile_memory=True) as profile:
        assert is_causal(mask, tokens, cached, window)
    taken = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < taken < seen.numel(), "temporaries as large as the mask"
    for row, column in ((tokens - 1, cached + tokens - 1), (tokens - 40, 0), (777, cached + 700)):
        other = mask.clone()
        hidden = not bool(seen[row, column])
        here = hidden if dtype == torch.bool else 0.0 if hidden else -3e38
        other[0, 0, row, column] = here
        assert not is_causal(other, tokens, cached, window)


@pytest.mark.parametrize("keep", [lambda out: out, lambda out: out[:, -3:], torch.Tensor.numpy])
def test_outputs_that_a_program_keeps_stay_as_they_are(
    keep: Any, tmp_path: Path, prompts: list[int]
) -> None:
    """Layers write into memory that nobody holds any more, and only into that."""
    _, pack_dir = packed(LEAN[0], tmp_path, "q4")
    model = load(pack_dir, 2**30)
    kept, copies = [], []

    def watch(_module: Any, _args: Any, out: torch.Tensor) -> None:
        kept.append(keep(out))
        copies.append(out.clone())

    try:
        layers = list(model.base_model.layers)
        for layer in layers:
            layer.register_forward_hook(watch)
        for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
            with mode():
                model(IDS, past_key_values=model.offload.new_cache())
        assert len(prompts) == len(kept) == 3 * len(layers)
        same = [np.array_equal(a, keep(b)) for a, b in zip(kept, copies, strict=True)]
        assert all(same)
    finally:
        model.offload.close()


def test_an_output_goes_into_memory_that_nobody_holds() -> None:
    rooms = Rooms([], 8)
    shape = torch.Size((1, 5, 16))
    first = rooms.output(shape)
    second = rooms.output(shape)
    places = {first.data_ptr(), second.data_ptr()}
    assert len(places) == 2
    assert first._base is None  # to autograd a tensor of its own
    del first
    assert rooms.output(shape).data_ptr() in places - {second.data_ptr()}
    del second
    with torch.inference_mode():
        assert rooms.output(shape).data_ptr() not in places
    rooms.forget()
    shared = rooms.output(shape).share_memory_()
    place = shared.data_ptr()
    del shared
    assert rooms.output(shape).data_ptr() != place
    long = torch.Size((1, CHUNK + 1, 16))
    held = rooms.output(long)
    assert rooms.output(long).data_ptr() != held.data_ptr()
