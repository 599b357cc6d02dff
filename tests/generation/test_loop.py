"""The decoding loop: the tokens, random numbers and calls of transformers' own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_config, write
from torch import nn
from transformers import (
    DynamicCache,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
    TextStreamer,
)
from transformers.generation.stopping_criteria import MaxLengthCriteria

import offload
from offload.generation import draw, scores
from offload.kv.named import CACHE
from offload.models.lean_watch import LayerWatch

IDS = torch.tensor([[5, 9, 17, 3, 44, 21, 8, 30, 2, 11]])
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "drawn": {"do_sample": True, "top_k": 0},
    "nucleus": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "cut": {"do_sample": True, "min_p": 0.05, "repetition_penalty": 1.3},
    "ends": {"do_sample": True, "eos_token_id": list(range(0, 4300, 9)), "pad_token_id": 1},
    "one": {"do_sample": False, "max_new_tokens": 1},
    "length": {"do_sample": True, "max_new_tokens": None, "max_length": 15},
    "words": {"bad_words_ids": [[7], [8, 9]], "no_repeat_ngram_size": 2, "do_sample": True},
}
VOCABULARY = 4300


@pytest.fixture(scope="module", params=["streamed", "packed"])
def model(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Any]:
    home = tmp_path_factory.mktemp("loop")
    config = tiny_config("qwen3_moe", vocab_size=VOCABULARY)
    directory = write("qwen3_moe", home / "m", torch.float32, config=config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offload.models.pack_cache.pack_cache_dir", lambda *_: home / "p")
        packed = {"quant": "none", "context": 64} if request.param == "packed" else {}
        model: Any = offload.load(directory, ram="256MiB", **packed)
    yield model
    model.offload.close()


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each call of transformers' loop."""
    calls: list[int] = []
    inner: Any = GenerationMixin._sample

    @wraps(inner)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return inner(*args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "_sample", counted)
    return calls


def own(*args: Any, **kwargs: Any) -> Any:
    """Transformers' loop, given as a caller's."""
    return GenerationMixin._sample(*args, **kwargs)


def theirs(model: Any, ids: torch.Tensor, **settings: Any) -> tuple[Any, torch.Tensor]:
    """With transformers' own loop: tokens, and the generator's state behind them."""
    torch.manual_seed(3)

    return model.generate(ids, custom_generate=own, **settings), torch.get_rng_state()


@pytest.mark.parametrize("way", WAYS)
def test_tokens_and_random_numbers(model: Any, way: str, stock: list[int]) -> None:
    settings = {"max_new_tokens": 12, **WAYS[way]}
    want, state = theirs(model, IDS, **settings)
    stock.clear()
    torch.manual_seed(3)
    got = model.generate(IDS, **settings)
    assert torch.equal(got, want)
    assert got.dtype == want.dtype
    assert torch.equal(torch.get_rng_state(), state)
    assert got.untyped_storage().nbytes() == got.nbytes
    assert stock == []


def test_others_are_transformers(model: Any, stock: list[int]) -> None:
    two = torch.cat([IDS, IDS.flip(1)])
    for ids, settings in (
        (two, {}), (IDS, {"return_dict_in_generate": True}), (IDS, {"num_beams": 2}),
        (IDS, {"num_return_sequences": 2, "do_sample": True}),
        (IDS, {"prompt_lookup_num_tokens": 2}),
    ):  # fmt: skip
        torch.manual_seed(3)
        found = model.generate(ids, max_new_tokens=4, **settings)
        assert len(getattr(found, "sequences", found)) >= 1
    assert len(stock) == 3  # not beams and drafts, which are loops of their own


def test_a_program_is_asked_in_transformers_order(model: Any) -> None:
    """Processors, criteria and streamers see the same, one after the other."""

    def run(generate: Any) -> list[Any]:
        seen: list[Any] = []

        def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append(("scores", ids.tolist(), scores.argmax().item(), tuple(scores.shape)))
            return scores.roll(1, -1)

        def stop(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            seen.append(("stop", ids.tolist(), scores))
            return torch.tensor([ids.shape[1] >= 15])

        class Streamer:
            def put(self, value: torch.Tensor) -> None:
                seen.append(("put", value.tolist()))

            def end(self) -> None:
                seen.append("end")

        out = generate(
            IDS,
            max_new_tokens=12,
            do_sample=False,
            logits_processor=LogitsProcessorList([process]),
            stopping_criteria=StoppingCriteriaList([stop]),
            streamer=Streamer(),
        )
        return [*seen, out.tolist()]

    def own(*args: Any, streamer: Any, **kwargs: Any) -> Any:
        return GenerationMixin._sample(*args, streamer=streamer, **kwargs)

    def stock_loop(*args: Any, streamer: Any, **kwargs: Any) -> Any:
        # Transformers keeps the streamer from a loop that it is given.
        return model.generate(
            *args, streamer=streamer, custom_generate=partial(own, streamer=streamer), **kwargs
        )

    assert run(model.generate) == run(stock_loop)


def test_streamers_get_each_token(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of transformers too, beside which the model is not looked at for every token."""
    got: list[Any] = []
    monkeypatch.setattr(TextStreamer, "put", lambda _, value: got.append(value.tolist()))
    monkeypatch.setattr(TextStreamer, "end", lambda _: got.append("end"))
    streamer = TextStreamer(None)
    ids = model.generate(IDS, max_new_tokens=3, do_sample=False, streamer=streamer)
    assert got == [IDS.tolist(), *([token] for token in ids[0, 10:].tolist()), "end"]


def test_a_hook_of_a_program_is_heeded_between_two_tokens(model: Any) -> None:
    """Also one that comes while nobody else's code was known to run."""
    layer = model.base_model.layers[1]
    norm = layer.input_layernorm
    hooks: list[Any] = []

    class Late:
        """Of this package by its name, so that nothing is looked at for its sake."""

        __module__ = "offload.tests"

        def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            if ids.shape[1] == 14:
                hooks.append(norm.register_forward_hook(lambda _, __, out: 5 * out.flip(-1)))
            return torch.tensor([False])

    def run(**more: Any) -> list[int]:
        try:
            late = StoppingCriteriaList([Late()])
            out = model.generate(
                IDS, max_new_tokens=12, do_sample=False, stopping_criteria=late, **more
            )
        finally:
            while hooks:
                hooks.pop().remove()
        return out[0].tolist()  # type: ignore[no-any-return]

    plain = model.generate(IDS, max_new_tokens=12, do_sample=False)[0].tolist()
    changed = run()
    assert changed == run(custom_generate=own)
    assert changed[:14] == plain[:14]
    assert changed != plain


def test_an_own_criterion_that_changes_a_module_is_seen(model: Any) -> None:
    """No hook, so nothing counts it: whoever is not known is looked after."""
    layer = model.base_model.layers[0]
    before = layer.mlp

    class Doubled(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return before(*args, **kwargs) * 3

    def run(**more: Any) -> list[int]:
        def change(ids: torch.Tensor, _: Any, **__: Any) -> torch.Tensor:
            if ids.shape[1] == 13:
                layer.mlp = Doubled()
            return torch.tensor([False])

        try:
            settings = {"max_new_tokens": 10, "do_sample": False}
            change_it = StoppingCriteriaList([change])
            out = model.generate(IDS, stopping_criteria=change_it, **settings, **more)
        finally:
            layer.mlp = before
        return out[0].tolist()  # type: ignore[no-any-return]

    assert run() == run(custom_generate=own)


def test_the_next_generation_looks_again(model: Any) -> None:
    """Also one that goes on in the same cache."""
    settings = {"max_new_tokens": 6, "do_sample": False}
    plain = model.generate(IDS, **settings)
    layer = model.base_model.layers[1]
    before = layer.mlp

    def again(**more: Any) -> torch.Tensor:
        layer.mlp = before
        cache = (model.offload.make_cache or DynamicCache)()
        first = model.generate(IDS, **{CACHE: cache}, **settings)
        layer.mlp = nn.Identity()
        out: torch.Tensor = model.generate(first, **{CACHE: cache}, **settings, **more)
        return out

    try:
        assert torch.equal(again(), again(custom_generate=own))
    finally:
        layer.mlp = before
    assert torch.equal(model.generate(IDS, **settings), plain)


def test_a_loop_of_somebody_else_is_kept(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a class, or put in transformers' place for all of them, whenever."""
    calls: list[int] = []
    inner: Any = GenerationMixin._sample

    def mine(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return inner(*args, **kwargs)

    want = model.generate(IDS, max_new_tokens=4, do_sample=False)
    assert calls == []
    for owner in (GenerationMixin, type(model)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, "_sample", mine, raising=False)
            assert torch.equal(model.generate(IDS, max_new_tokens=4, do_sample=False), want)
    assert len(calls) == 2
    made: list[int] = []
    prepare: Any = GenerationMixin.prepare_inputs_for_generation

    def prepared(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return prepare(*args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "prepare_inputs_for_generation", prepared)
    model.generate(IDS, max_new_tokens=4, do_sample=False)
    assert len(made) == 4


def test_what_is_in_front_of_the_forward_sees_every_pass(model: Any) -> None:
    inner, seen = model.forward, []

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = inner(*args, **kwargs)
        seen.append(1)
        out.logits[..., 7] += 1e4
        return out

    model.forward = forward
    try:
        out = model.generate(IDS, max_new_tokens=6, do_sample=False)
    finally:
        model.__dict__["forward"] = inner
    assert out[0, 10:].tolist() == [7] * 6
    assert len(seen) == 6


def test_hooks_of_the_head_may_change_a_layer(model: Any) -> None:
    layer, calls = model.base_model.layers[0], []
    before = layer.mlp

    def hook(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            layer.mlp = nn.Identity()

    def run(**more: Any) -> list[int]:
        calls.clear()
        handle = model.lm_head.register_forward_hook(hook)
        try:
            out = model.generate(IDS, max_new_tokens=8, do_sample=False, **more)
        finally:
            handle.remove()
            layer.mlp = before
        return out[0].tolist()  # type: ignore[no-any-return]

    assert run() == run(custom_generate=own)


def test_criteria_are_read_each_time(model: Any) -> None:
    """A program may end a text by what it has given."""

    def run(**more: Any) -> int:
        most = MaxLengthCriteria(30)

        def stop(ids: torch.Tensor, _: Any, **__: Any) -> torch.Tensor:
            if ids.shape[1] == 13:
                most.max_length = 0
            return torch.tensor([False])

        criteria = StoppingCriteriaList([stop, most])
        out = model.generate(
            IDS, max_new_tokens=20, do_sample=False, stopping_criteria=criteria, **more
        )
        return int(out.shape[1])

    assert run() == run(custom_generate=own) < 20


def test_settings_that_are_nothing_are_transformers_errors(model: Any) -> None:
    for settings in ({"prompt_lookup_num_tokens": 0}, {"num_beams": 0}, {"draw": 5}):
        with pytest.raises((ValueError, ZeroDivisionError)):
            model.generate(IDS, max_new_tokens=2, do_sample=False, **settings)


def test_a_packed_model_is_looked_at_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody else's code runs, the layers are not looked at before every token."""
    if model.offload.lean is None:
        pytest.skip("its layers run their own code")
    looks: list[int] = []
    inner = LayerWatch.untouched
    monkeypatch.setattr(LayerWatch, "untouched", lambda self: looks.append(1) or inner(self))
    counts = []
    for tokens in (4, 12):
        looks.clear()
        model.generate(IDS, max_new_tokens=tokens, do_sample=False)
        counts.append(len(looks))
    assert counts[0] == counts[1] > 0


def test_unwrapped_models_generate_as_before(tmp_path: Path) -> None:
    write("llama", tmp_path / "m", torch.float32)
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    resident = auto.from_pretrained(tmp_path / "m").eval()
    want = resident.generate(IDS % 60, max_new_tokens=8, do_sample=False)
    streamed = offload.wrap(resident, ram="64MiB")
    assert "generate" in streamed.__dict__
    assert torch.equal(streamed.generate(IDS % 60, max_new_tokens=8, do_sample=False), want)
    offload.unwrap(streamed)
    assert "generate" not in streamed.__dict__
    assert torch.equal(streamed.generate(IDS % 60, max_new_tokens=8, do_sample=False), want)


def test_a_default_device_of_a_program_changes_nothing(model: Any) -> None:
    settings = {"max_new_tokens": 6, "do_sample": True, "top_k": 20, "top_p": 0.9}
    want, _ = theirs(model, IDS, **settings)
    draw._is_known.cache_clear()
    scores._has_lanes.cache_clear()
    torch.manual_seed(3)
    with torch.device("meta"):
        got = model.generate(IDS, **settings)
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_a_default_dtype_of_a_program_changes_nothing(model: Any, dtype: torch.dtype) -> None:
    """Also where a pass has several tokens, or the text is embedded before."""
    two = torch.cat([IDS, IDS.flip(1)])

    def results() -> list[torch.Tensor]:
        embedded = model.get_input_embeddings()(IDS).detach()
        settings = {"max_new_tokens": 6, "do_sample": False}
        return [
            model.generate(IDS, **settings), model.generate(two, **settings),
            model.generate(inputs_embeds=embedded, **settings), model(IDS).logits.detach(),
        ]  # fmt: skip

    want = results()
    torch.set_default_dtype(dtype)
    try:
        got = results()
    finally:
        torch.set_default_dtype(torch.float32)
    assert [g.dtype for g in got] == [w.dtype for w in want]
    assert all(map(torch.equal, got, want))


def test_a_packed_model_loads_whatever_the_default_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.models.pack_cache.pack_cache_dir", lambda *_: tmp_path / "p")
    config = tiny_config("qwen3_moe", vocab_size=VOCABULARY)
    directory = write("qwen3_moe", tmp_path / "m", torch.float32, config=config)
    found = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            model = offload.load(directory, ram="256MiB", quant="q4", context=64)
            logits = model(IDS).logits.detach()
        finally:
            torch.set_default_dtype(torch.float32)
        found.append((logits, model.offload.plan.reasons))
        model.offload.close()
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
