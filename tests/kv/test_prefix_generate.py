"""``offload.load(prompt_cache=...)``: what ``generate`` gives, with and without stored prefixes."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from program_changes import (
    Shifted,
    hook_before,
    hook_on_all,
    instead,
    own_forward_inside,
    rotary_buffer,
    same_name,
)
from transformers import AutoModelForCausalLM, GenerationConfig

import offload
from offload.errors import OffloadError
from offload.models.options import Options
from offload.models.pack_open import open_source
from offload.models.pack_run import pack
from offload.models.prompt_plan import HARMLESS

TINY = Path(__file__).parents[2] / "examples" / "tiny_moe"
CHUNK, NEW = 32, 6
ALL = 5 * CHUNK + 9
IDS = torch.randint(3, 2000, (1, ALL), generator=torch.Generator().manual_seed(4))


@contextmanager
def loaded(directory: Path | None, path: Path = TINY, **more: Any) -> Iterator[Any]:
    if directory is not None:
        more |= {"prompt_cache": directory, "prompt_cache_chunk": CHUNK}
    model = offload.load(path, **{"ram": "200MiB", "context": 256, **more})
    try:
        yield model
    finally:
        model.offload.close()


def generate(model: Any, ids: torch.Tensor = IDS, **how: Any) -> Any:
    return model.generate(
        ids,
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        output_logits=True,
        **{"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **how},
    )


@contextmanager
def looked_up() -> Iterator[list[int]]:
    """How many tokens each pass has had embedded. Not by a hook: that might change something."""
    found: list[int] = []
    inner = torch.nn.Embedding.forward

    def forward(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        found.append(ids.numel())
        return inner(self, ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Embedding, "forward", forward)
        yield found


def check_equal(got: Any, want: Any) -> None:
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.logits, want.logits, strict=True):
        assert torch.equal(a, b)


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY, experts_implementation="eager").eval()


def test_the_logits_of_transformers_on_the_same_grid(reference: Any, tmp_path: Path) -> None:
    want = generate(reference, prefill_chunk_size=CHUNK)
    with loaded(tmp_path) as model:
        check_equal(generate(model), want)
        assert model.offload.prompts.last.tokens == 0
        assert model.offload.stats()["prompt_cache"]["chunk"] == CHUNK
    with loaded(tmp_path) as model:
        check_equal(generate(model), want)
        last = model.offload.prompts.last
        assert last.tokens == ALL
        assert last.read_bytes > 0
        tail = torch.cat([IDS[:, : 2 * CHUNK + 7], IDS[:, 90:130]], 1)
        check_equal(generate(model, tail), generate(reference, tail, prefill_chunk_size=CHUNK))
        assert model.offload.prompts.last.tokens == 2 * CHUNK
        torch.manual_seed(3)
        drawn = generate(model, do_sample=True, temperature=0.9)
        torch.manual_seed(3)
        check_equal(
            drawn, generate(reference, do_sample=True, temperature=0.9, prefill_chunk_size=CHUNK)
        )
        assert model.offload.stats()["prompt_cache"]["reused_tokens"] == 2 * ALL + 2 * CHUNK
    # Blocks on two tiers and streamed weights: the same numbers, so the same files.
    for more in ({"kv_ram": "640KiB"}, {"ram": "40MiB"}):
        with loaded(tmp_path, **more) as model:
            check_equal(generate(model), want)
            assert model.offload.prompts.last.tokens == ALL, more


@pytest.mark.filterwarnings("error:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("more", [{}, {"quant": "q8"}, {"kv_ram": "640KiB"}], ids=str)
def test_no_argument_has_a_name_that_is_deprecated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    monkeypatch.setattr("offload.models.pack_cache.pack_cache_dir", lambda *_: tmp_path / "pack")
    with loaded(tmp_path / "prompts", **more) as model:
        for _ in range(2):
            generate(model)


def test_what_is_not_one_plain_sequence_goes_its_own_way(reference: Any, tmp_path: Path) -> None:
    padded = IDS.clone()
    padded[0, :4] = 0
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    ways: list[dict[str, Any]] = [
        {"ids": torch.cat([IDS, IDS.flip(1)])},
        {"num_beams": 2},
        {"ids": padded, "attention_mask": mask},
        {"ids": padded},
        {"prompt_lookup_num_tokens": 2},
        {"assistant_early_exit": 1},  # drafts with the first layer, in a cache of its own
        {"use_cache": False},
        {"cache_implementation": "static"},  # leaves its length in the model
        {"ids": IDS[:, :CHUNK]},
    ]
    with loaded(tmp_path) as model:
        generate(model)
        for how in ways:
            check_equal(generate(model, **how), generate(reference, **how))
            assert model.offload.prompts.last is None, how
        held = model.offload.new_cache()
        check_equal(generate(model, past_key_values=held), generate(reference))
        generate(model)
        assert model.offload.prompts.last.tokens == ALL


def test_settings_are_found_without_their_name(reference: Any, tmp_path: Path) -> None:
    """``generate(ids, config)`` is what ``generate(ids, generation_config=config)`` is."""

    def settings(**how: Any) -> GenerationConfig:
        blank: Any = GenerationConfig  # untyped
        greedy = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        config: GenerationConfig = blank(**greedy, **how)
        return config

    more = settings(output_hidden_states=True, return_dict_in_generate=True)
    with loaded(tmp_path) as model:
        generate(model)
        for config in (settings(num_beams=2), settings(use_cache=False)):
            assert torch.equal(model.generate(IDS, config), reference.generate(IDS, config))
            assert model.offload.prompts.last is None
        assert len(model.generate(IDS, more).hidden_states) == NEW
        with pytest.raises(TypeError, match="multiple values"):
            model.generate(IDS, more, generation_config=more)
    with loaded(None, kv_ram="640KiB") as model:
        static = settings(cache_implementation="static")
        with pytest.raises(OffloadError, match="past the KV budget"):
            model.generate(IDS, static)
        with pytest.raises(OffloadError, match="assistant_early_exit"):
            model.generate(IDS, settings(assistant_early_exit=1))
        assert torch.equal(model.generate(IDS, settings()), reference.generate(IDS, settings()))


def test_a_model_that_is_changed_is_not_served_from_the_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with loaded(tmp_path) as model:
        generate(model)
        model.model.layers[0].extra = torch.nn.Identity()  # as adapters do
        with caplog.at_level(logging.WARNING, "offload"):
            generate(model)
        assert model.offload.prompts.last is None
        assert "not reused: modules, modules in place" in caplog.text
        del model.model.layers[0].extra
        generate(model)
        assert model.offload.prompts.last.tokens == ALL
        layer = model.model.layers[1]
        handle = layer.register_forward_hook(lambda _, __, output: output)  # as steering does
        generate(model)
        assert (model.offload.prompts.last, "hooks changed" in caplog.text) == (None, True)
        handle.remove()
        norm = model.model.norm
        norm.weight, kept = torch.nn.Parameter(norm.weight * 2), norm.weight
        generate(model)
        assert (model.offload.prompts.last, "weights changed" in caplog.text) == (None, True)
        norm.weight = kept
        generate(model)
        assert model.offload.prompts.last.tokens == ALL
        with torch.no_grad():
            norm.weight.mul_(1)
        generate(model)
        assert model.offload.prompts.last is None
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with loaded(tmp_path) as model:
            generate(model)
            assert model.offload.prompts.last.tokens == 0, "threads may round otherwise"
    finally:
        torch.set_num_threads(before)
    with loaded(tmp_path, dtype="float32") as model:
        generate(model)
        assert model.offload.prompts.last.tokens == 0


CHANGES: dict[str, Any] = {
    "scale of scores": lambda m: instead(m.model.layers[1].self_attn, "scaling", 0.5),
    "epsilon": lambda m: instead(m.model.layers[0].input_layernorm, "variance_epsilon", 0.5),
    "experts of a token": lambda m: instead(m.model.layers[0].mlp.gate, "top_k", 1),
    "activation": lambda m: instead(m.model.layers[0].mlp.experts, "act_fn", torch.nn.Tanh()),
    "depth": lambda m: instead(m.config, "num_hidden_layers", 1),
    "forward": own_forward_inside,
    "hook before": hook_before,
    "hook on all": hook_on_all,
    "frequencies": rotary_buffer,
    "attention": same_name,
    "mode": lambda _: Shifted(),
    "autocast": lambda _: torch.autocast("cpu", torch.float16),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", CHANGES)
def test_passes_that_would_come_to_something_else(
    reference: Any, tmp_path: Path, change: str
) -> None:
    """Keys and values from before were used, with whatever was changed since."""
    how = CHANGES[change]
    with loaded(tmp_path) as model:
        unchanged = generate(model)
        with how(reference):
            want = generate(reference)  # it runs as without a prompt cache
        assert not torch.equal(want.logits[0], unchanged.logits[0])
        with how(model):
            check_equal(generate(model), want)
            assert model.offload.prompts.last is None
        check_equal(generate(model), unchanged)
        if change == "frequencies":  # written to twice
            assert model.offload.prompts.last is None
        else:
            assert model.offload.prompts.last.tokens == ALL


def test_packed_weights_and_their_decode_kernels(tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    with contextlib.closing(open_source(TINY)) as source:
        pack(source, packed, quant="q8")

    def run() -> tuple[Any, int]:
        with loaded(tmp_path / "p", packed) as model, looked_up() as asked:
            found = generate(model)
            assert type(model.offload.new_cache()).__name__ == "LeanCache"
            last = model.offload.prompts.last
            config = model.config
        row = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
        assert last.read_bytes >= last.tokens * row, "keys and values of every layer"
        assert sum(asked) == IDS.shape[1] - last.tokens + NEW - 1
        return found, last.tokens

    first, none = run()
    again, all_of_it = run()
    assert (none, all_of_it) == (0, ALL)
    check_equal(again, first)
    with loaded(tmp_path / "p", packed, kv_ram="1536KiB") as model:
        generate(model)
        assert model.offload.prompts.last.tokens == 0, "its own layers round otherwise"
    with loaded(tmp_path / "p") as model:
        generate(model)
        assert model.offload.prompts.last.tokens == 0, "unquantised weights are another model"


def test_attention_over_blocks(tmp_path: Path) -> None:
    """Kernels that read blocks where they are: the same bits from RAM, from the disk, restored."""
    found = []
    for budget in ("640KiB", "640KiB", "20MiB"):
        with loaded(tmp_path, attention="offload", kv_ram=budget) as model:
            found.append(generate(model))
            reused = model.offload.prompts.last.tokens
        assert reused == (0 if len(found) == 1 else ALL)
        check_equal(found[-1], found[0])
    with loaded(tmp_path, kv_ram="640KiB") as model:
        generate(model)
        assert model.offload.prompts.last.tokens == 0, "torch's attention rounds otherwise"


@pytest.mark.parametrize("rest", [1, CHUNK - 1, CHUNK])
def test_the_end_of_a_prompt(
    reference: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, rest: int
) -> None:
    """Of a prompt that comes again whole nothing is computed, whatever fills its last group."""
    ids = IDS[:, : 2 * CHUNK + rest]
    want = generate(reference, ids, prefill_chunk_size=CHUNK)
    with loaded(tmp_path) as model, looked_up() as passes:
        check_equal(generate(model, ids), want)
        passes.clear()
        check_equal(generate(model, ids), want)
        assert (model.offload.prompts.last.tokens, len(passes)) == (ids.shape[1], NEW - 1)
        # Whoever wants more than logits, or has put something around the model's forward, gets it.
        passes.clear()
        more = generate(model, ids, output_hidden_states=True)
        check_equal(more, want)
        assert (len(more.hidden_states), len(passes)) == (NEW, NEW)
        assert model.offload.prompts.last.tokens == 2 * CHUNK
        handle = model.register_forward_hook(
            lambda _, __, out: setattr(out, "logits", -out.logits) or out
        )
        negative = generate(model, ids)
        assert torch.equal(negative.logits[0], -want.logits[0])
        handle.remove()
        # What follows the prompt is another prompt: its end is not this one's.
        longer = torch.cat([ids, want.sequences[:, -3:]], 1)
        check_equal(generate(model, longer), generate(reference, longer, prefill_chunk_size=CHUNK))
        assert model.offload.prompts.last.tokens == 2 * CHUNK
        prefixes = model.offload.prompts.prefixes
        prefixes.flush()
        end = prefixes._folder.path / f"{prefixes._end_name(ids[0].tolist())}.kv"
    # Half of a file.
    end.write_bytes(end.read_bytes()[: end.stat().st_size // 2 // 4096 * 4096])
    with loaded(tmp_path) as model, caplog.at_level(logging.WARNING, "offload"):
        check_equal(generate(model, ids), want)
        assert model.offload.prompts.last.tokens == 2 * CHUNK
        assert "damaged" in caplog.text
        model.offload.prompts.prefixes.flush()
        check_equal(generate(model, ids), want)
        assert model.offload.prompts.last.tokens == ids.shape[1]


def test_conversations_go_on_where_they_were(reference: Any, tmp_path: Path) -> None:
    """The way of ``chat``: one cache from turn to turn, cropped to what is on the grid."""
    with loaded(tmp_path) as model:
        prompts = model.offload.prompts
        cache = prompts.new_cache()
        ids = IDS[:, : 2 * CHUNK + 3]
        for turn in range(3):
            assert prompts.keep(cache, ids[0].tolist())
            held = cache.get_seq_length()
            found = generate(model, ids, past_key_values=cache)
            check_equal(found, generate(reference, ids, prefill_chunk_size=CHUNK))
            assert prompts.last.kept == held >= turn * CHUNK
            assert prompts.last.read_bytes == 0
            ids = torch.cat([found.sequences, IDS[:, 20 + turn : 50]], 1)
        assert not prompts.keep(model.offload.new_cache(), [1, 2, 3]), "it is not one of ours"
        other = IDS[:, 1 : 3 * CHUNK]
        assert prompts.keep(cache, other[0].tolist())
        assert cache.get_seq_length() == 0


def test_options_in_a_name_are_words_and_numbers() -> None:
    """An object's text may say where in memory it lies, and nothing would be found again."""
    hints = typing.get_type_hints(Options)
    for field in dataclasses.fields(Options):
        if field.name not in HARMLESS:
            kinds = {*typing.get_args(hints[field.name])} or {hints[field.name]}
            assert kinds <= {str, int, float, bool, type(None), torch.dtype}, field.name
    assert {f.name for f in dataclasses.fields(Options)} >= HARMLESS


def test_refusals_come_before_loading(tmp_path: Path) -> None:
    with (
        pytest.raises(OffloadError, match="below one group"),
        loaded(tmp_path, prompt_cache_limit="10KiB"),
    ):
        pass
    with pytest.raises(OffloadError, match="simulated accelerator"), loaded(tmp_path, device="sim"):
        pass
    (tmp_path / "file").write_text("x")
    with pytest.raises(OffloadError, match="not a directory"), loaded(tmp_path / "file"):
        pass
