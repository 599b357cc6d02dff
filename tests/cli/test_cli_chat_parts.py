"""The parts of a chat, each alone: entries, saved files, and what a cache may keep."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache, LlamaConfig, MistralConfig, Qwen3NextConfig

from offload.cli.chat_cache import KeptCache, can_crop, can_reuse, common_prefix
from offload.cli.chat_history import Conversation, Exchange
from offload.cli.chat_input import CONTINUED, PROMPT, Command, Said, Terminal
from offload.cli.chat_report import Sum
from offload.cli.chat_talk import Turn
from offload.cli.decode import Run
from offload.errors import OffloadError

NONE: dict[str, Any] = {"at_start": {}, "at_end": {}}
"""Counters of a run that are not looked at."""


def entries(*lines: str) -> tuple[list[Said | Command], list[str]]:
    """What a terminal makes of lines, and the prompts it showed."""
    left = list(lines)
    prompts: list[str] = []

    def read_line(prompt: str) -> str | None:
        prompts.append(prompt)
        return left.pop(0) if left else None

    source = Terminal(read_line)
    found = []
    while (entry := source.read()) is not None:
        found.append(entry)
    return found, prompts


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["hi", "", "  ", "there"], [Said("hi"), Said("there")]),
        (["one\\", "two\\", "three"], [Said("one\ntwo\nthree")]),
        (["one\\"], [Said("one")]),
        (['"""', "a", "", "/b\\", '"""', "c"], [Said("a\n\n/b\\"), Said("c")]),
        (['"""a', 'b"""'], [Said("a\nb")]),
        (['"""a"""'], [Said("a")]),
        (['"""', "the end of input closes it"], [Said("the end of input closes it")]),
        (['"""', '"""', "x"], [Said("x")]),
        (["/save  my file.json "], [Command("save", "my file.json")]),
        (["/stats"], [Command("stats", "")]),
        (["/"], [Command("", "")]),
        (["//etc is a directory"], [Said("/etc is a directory")]),
        ([" /etc"], [Said(" /etc")]),
    ],
)
def test_entries_at_a_terminal(lines: list[str], found: list[Said | Command]) -> None:
    assert entries(*lines)[0] == found


def test_a_line_that_goes_on_has_another_prompt() -> None:
    assert entries("a\\", "b")[1] == [PROMPT, CONTINUED, PROMPT]


def test_a_message_that_is_no_utf8_is_refused_whole() -> None:
    """In the C locale Python takes such bytes for halves of surrogate pairs."""
    lines = ['"""', "caf\udce9", "/exit", '"""', "next"]
    source = Terminal(lambda _: lines.pop(0))
    with pytest.raises(OffloadError, match=r"that message is not UTF-8 text \(character 3\)"):
        source.read()
    assert source.read() == Said("next")
    assert entries("/save caf\udce9")[0] == [Command("save", "caf\udce9")]


def test_a_prompt_of_which_nothing_was_computed_has_no_speed() -> None:
    read = Turn(run=Run(prompt_tokens=30, reused_tokens=10, ttft_s=2.0, **NONE), forgotten=0)
    found = Turn(run=Run(prompt_tokens=24, reused_tokens=24, ttft_s=0.5, **NONE), forgotten=0)
    broken = Turn(run=Run(prompt_tokens=9, **NONE), forgotten=0)  # before its first token
    assert Sum([found, broken]).prefill_tok_s is None
    assert Sum([read, found, broken]).prefill_tok_s == 10


texts = st.text(st.characters(codec="utf-8"), max_size=20)


@given(
    system=st.none() | texts,
    said=st.lists(st.tuples(texts, texts), max_size=4),
)
def test_a_saved_conversation_comes_back(
    tmp_path_factory: pytest.TempPathFactory, system: str | None, said: list[tuple[str, str]]
) -> None:
    file = tmp_path_factory.getbasetemp() / "talk.json"
    talk = Conversation(system, [Exchange(*pair) for pair in said])
    talk.save(file, "a model")
    assert Conversation.load(file) == talk
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_saving_replaces_whole_files_and_follows_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    real.chmod(0o644)
    link.symlink_to(real)
    Conversation(None, [Exchange("q", "a")]).save(link, "m")
    assert link.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o600
    before = real.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OffloadError, match="No space left"):
        Conversation(None, []).save(real, "m")
    assert real.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.json", "real.json"]
    with pytest.raises(OffloadError, match="not a file"):
        Conversation(None, []).save(tmp_path, "m")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("3", "no list"),
        ('{"version": 2, "messages": []}', "version 2"),
        ('[{"role": "user"}]', "message 0"),
        ('[{"role": "user", "content": 1}]', "message 0"),
        ('[{"role": "assistant", "content": "x"}]', "'assistant' where another"),
        ('[{"role": "user", "content": "x"}]', "no answer"),
        ('[{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]', "message 1"),
    ],
)
def test_files_that_are_no_conversation(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "talk.json"
    file.write_text(text)
    with pytest.raises(OffloadError, match=said):
        Conversation.load(file)
    with pytest.raises(OffloadError, match="cannot be read"):
        Conversation.load(tmp_path / "none.json")


def test_a_bare_list_of_messages_loads(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    file.write_text(json.dumps(messages))
    assert Conversation.load(file) == Conversation(None, [Exchange("q", "a")])


def test_what_is_forgotten_is_saved_but_not_visible(tmp_path: Path) -> None:
    talk = Conversation("s", [Exchange("q", "a"), Exchange("r", "b")], forgotten=1)
    assert [m["content"] for m in talk.visible()] == ["s", "r", "b"]
    talk.save(tmp_path / "talk.json", "m")
    assert len(Conversation.load(tmp_path / "talk.json").exchanges) == 2
    assert talk.take_back() == Exchange("r", "b")
    assert [m["content"] for m in talk.visible()] == ["s", "q", "a"]
    assert talk.reset() == 1
    assert talk.take_back() is None


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix(one: list[int], other: list[int]) -> None:
    n = common_prefix(one, other)
    assert one[:n] == other[:n]
    assert one[n : n + 1] != other[n : n + 1] or n == len(one) == len(other)


SMALL: dict[str, Any] = dict(
    hidden_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=4, num_hidden_layers=2
)
FULL = LlamaConfig(**SMALL)
SLIDING = MistralConfig(**SMALL, sliding_window=4)
LINEAR = Qwen3NextConfig(**SMALL, layer_types=["linear_attention", "full_attention"])


def feed(cache: Any, ids: list[int], layers: int | None = None) -> None:
    """Put keys that are the ids into the (first) attention layers."""
    keys = torch.tensor(ids, dtype=torch.float32).reshape(1, 1, -1, 1).expand(1, 1, -1, 4)
    for i, layer in list(enumerate(cache.layers))[:layers]:
        if not hasattr(layer, "recurrent_states"):
            cache.update(keys, keys, i)


def held(cache: Any, layer: int = -1) -> list[int]:
    return list(cache.layers[layer].keys[0, 0, :, 0].int().tolist())


def talked(config: Any, ids: list[int]) -> KeptCache:
    """A cache that a turn with ``ids`` left."""
    kept = KeptCache(lambda: DynamicCache(config=config))
    feed(kept.begin(ids), ids)
    kept.end(ids)
    return kept


def test_what_is_kept_is_the_common_prefix() -> None:
    kept = talked(FULL, [1, 2, 3, 4])
    assert held(kept.begin([1, 2, 3, 4, 5])) == [1, 2, 3, 4]
    assert held(kept.begin([1, 2, 9])) == [1, 2]
    assert kept.ids == [1, 2]
    # A model has to be given at least one token.
    assert held(kept.begin([1, 2])) == [1]
    assert kept.begin([7]).get_seq_length() == 0
    assert kept.ids == []


def test_a_window_that_moved_on_cannot_go_back() -> None:
    near = talked(SLIDING, [1, 2, 3])
    assert held(near.begin([1, 2, 9])) == [1, 2]
    far = talked(SLIDING, [1, 2, 3, 4, 5, 6])
    assert far.begin([1, 2, 3, 4, 5, 6, 7]).get_seq_length() == 6
    assert far.begin([1, 2, 3, 4, 5, 9]).get_seq_length() == 0


def test_a_running_state_cannot_go_back() -> None:
    kept = talked(LINEAR, [1, 2, 3])
    assert kept.begin([1, 2, 3, 4]).get_seq_length() == 3
    assert kept.begin([1, 2, 9]).get_seq_length() == 0


@pytest.mark.parametrize(
    ("config", "left"), [(FULL, [1, 2, 3]), (SLIDING, [1, 2, 3]), (LINEAR, [])]
)
def test_a_pass_that_was_stopped_between_two_layers(config: Any, left: list[int]) -> None:
    kept = talked(config, [1, 2, 3])
    cache = kept.begin([1, 2, 3, 4, 5])
    if config is not SLIDING:  # one token more, and its window cannot go back
        feed(cache, [4], layers=1)
    kept.broken([1, 2, 3, 4, 5])
    assert kept.ids == left
    if left:
        assert [held(cache, i) for i in range(2)] == [left, left]


def test_stopped_in_the_first_pass() -> None:
    kept = KeptCache(lambda: DynamicCache(config=FULL))
    feed(kept.begin([1, 2]), [1, 2], layers=1)
    kept.broken([1, 2])
    assert kept.ids == []
    assert kept.begin([1, 2]).get_seq_length() == 0


def test_a_model_with_a_cache_of_its_own_keeps_nothing() -> None:
    kept = KeptCache(lambda: DynamicCache(config=FULL))
    kept.begin([1, 2])
    kept.end([1, 2])  # nothing was put in
    assert kept.ids == []
    assert not can_crop(None)


def test_rotary_positions_that_depend_on_the_length() -> None:
    class Model:
        config: Any = None

        @classmethod
        def _supports_default_dynamic_cache(cls) -> bool:
            return True

    class MambaModel(Model):
        pass

    model, mamba = Model(), MambaModel()
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 512}
    text = SimpleNamespace(rope_parameters=rope, max_position_embeddings=4096)
    model.config = mamba.config = SimpleNamespace(
        is_encoder_decoder=False, get_text_config=lambda: text
    )
    assert can_reuse(model, 512) is None
    assert "beyond 512" in str(can_reuse(model, 513))
    text.rope_parameters = {"full_attention": rope | {"rope_type": "default"}}
    assert can_reuse(model, 4096) is None
    assert "cache of its own" in str(can_reuse(mamba, 8))
