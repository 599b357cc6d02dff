"""A prompt whose prefix comes from the disk gives the logits of one that was read, bit for bit."""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, QuantoQuantizedLayer

from offload.errors import OffloadError, UnsupportedModelError
from offload.kv.prefix_cache import PrefixCache, Reuse
from offload.kv.prefix_layers import check_config, check_layers
from offload.kv.tiers import KvTiers

CHUNK = 8
FAMILIES = [
    "llama", "gemma3_text", "gpt_oss", "mixtral", "qwen3_next", "deepseek_v3", "glm_moe_dsa",
    "lfm2",
]  # fmt: skip
MIB = 2**20


def ids(n: int, seed: int = 1, vocabulary: int = 100) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(t) for t in torch.randint(3, vocabulary, (n,), generator=generator)]


class Reader:
    """A tiny model with a prompt cache, or without."""

    def __init__(self, model: Any, prompts: PrefixCache | None, make: Callable[[], Any]) -> None:
        self.model, self.prompts, self.make = model, prompts, make
        self.passes = 0
        self.reuse = Reuse()
        self.ends = False

    def _pass(self, tokens: Sequence[int], cache: Any) -> torch.Tensor:
        self.passes += 1
        with torch.no_grad():
            return self.model(torch.tensor([list(tokens)]), past_key_values=cache).logits[0]

    def logits(self, tokens: Sequence[int], new: int = 3) -> torch.Tensor:
        """Of what is left of the prompt behind its groups, and of ``new`` greedy tokens."""
        cache = self.make()
        end = (len(tokens) - 1) // CHUNK * CHUNK
        self.passes = 0
        if self.prompts is None:
            for at in range(0, end, CHUNK):
                self._pass(tokens[at : at + CHUNK], cache)
        else:
            self.reuse = self.prompts.restore(tokens, cache)
            for at in range(self.reuse.tokens, end, CHUNK):
                with self.prompts.recording(tokens, at, cache):
                    self._pass(tokens[at : at + CHUNK], cache)
            self.prompts.flush()
        found = [self._last(tokens, end, cache)]
        for _ in range(new):
            found.append(self._pass([int(found[-1][-1].argmax())], cache))
        return torch.cat(found)

    def _last(self, tokens: Sequence[int], end: int, cache: Any) -> torch.Tensor:
        if self.prompts is None or not self.ends:
            return self._pass(tokens[end:], cache)
        stored = self.prompts.restore_end(tokens, cache)
        if stored is not None:
            return stored[0]
        with self.prompts.recording_end(tokens, cache) as put:
            logits = self._pass(tokens[end:], cache)
            put(logits[None, -1:])
        self.prompts.flush()
        return logits


def opened(
    directory: Path, facts: dict[str, Any] | None = None, limit: int = 64 * MIB, **more: Any
) -> PrefixCache:
    return PrefixCache(
        directory, facts or {"model": "a"}, chunk=CHUNK, limit=limit, group_bytes=4096, **more
    )


@pytest.fixture
def prompts(tmp_path: Path) -> Iterator[PrefixCache]:
    found = opened(tmp_path / "prompts")
    yield found
    found.close()


def files(prompts: PrefixCache) -> list[Path]:
    return sorted(prompts._folder.path.iterdir())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_layer_comes_back_exactly(
    family: str, tiny: Callable[..., Any], prompts: PrefixCache
) -> None:
    model = tiny(family)
    make = lambda: DynamicCache(config=model.config)  # noqa: E731
    plain, reader = Reader(model, None, make), Reader(model, prompts, make)
    prompt = ids(5 * CHUNK + 3)
    want = plain.logits(prompt)
    assert torch.equal(reader.logits(prompt), want)
    assert reader.reuse.tokens == 0
    assert len(files(prompts)) == 5
    assert torch.equal(reader.logits(prompt), want)
    assert reader.reuse.tokens == 5 * CHUNK
    assert reader.passes == 1 + 3
    assert reader.reuse.read_bytes == sum(f.stat().st_size for f in files(prompts))
    # Shorter, longer, another tail, another beginning, exactly on the grid: all on the same files.
    other = ids(20, seed=2)
    for tokens, shared in (
        (prompt[: 2 * CHUNK + 5], 2),
        (prompt + other, 5),
        (prompt[: 3 * CHUNK + 1] + other, 3),
        (prompt[: 3 * CHUNK], 2),
        (other + prompt, 0),
        (prompt[:CHUNK], 0),
        (prompt[:1], 0),
    ):
        want = plain.logits(tokens)
        assert torch.equal(reader.logits(tokens), want), (len(tokens), shared)
        assert reader.reuse.tokens == shared * CHUNK


@pytest.mark.parametrize(
    ("family", "rest"), [*((f, 3) for f in FAMILIES), (FAMILIES[0], 1), (FAMILIES[0], CHUNK)]
)
def test_the_end_of_a_prompt_comes_back_exactly(
    family: str, rest: int, tiny: Callable[..., Any], prompts: PrefixCache
) -> None:
    model = tiny(family)
    make = lambda: DynamicCache(config=model.config)  # noqa: E731
    plain, reader = Reader(model, None, make), Reader(model, prompts, make)
    reader.ends = True
    prompt = ids(2 * CHUNK + rest)
    want = plain.logits(prompt)
    assert torch.equal(reader.logits(prompt), want)
    assert len(files(prompts)) == 3
    assert torch.equal(reader.logits(prompt), want[rest - 1 :])
    assert reader.passes == 3, "only what comes behind the prompt"
    assert prompts.last.tokens == len(prompt)
    other = [*prompt[:-1], prompt[-1] % 90 + 4]
    assert torch.equal(reader.logits(other), plain.logits(other))
    assert reader.passes == 1 + 3
    # A damaged one is said with the tokens that it has.
    (prompts._folder.path / f"{prompts._end_name(prompt)}.kv").write_bytes(b"")
    said: list[str] = []
    prompts._say = said.append
    assert torch.equal(reader.logits(prompt), want)
    assert len(said) == 1
    assert f"tokens {2 * CHUNK} to {len(prompt)} in" in said[0]


def test_what_is_being_written_is_waited_for(
    tiny: Callable[..., Any], prompts: PrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next prompt comes while groups and the end of the one before are on their way."""
    model = tiny("llama")
    make = lambda: DynamicCache(config=model.config)  # noqa: E731
    reader, asked = Reader(model, prompts, make), threading.Event()
    reader.ends = True
    prompt = ids(CHUNK + 3)
    publish, submit = prompts._folder.publish, prompts._thread.submit

    def slow(*args: Any) -> None:
        assert asked.wait(60)
        publish(*args)

    def watched(work: Any, *args: Any) -> Any:
        future = submit(work, *args)
        result = future.result
        future.result = lambda timeout=None: asked.set() or result(timeout)
        return future

    monkeypatch.setattr(prompts._folder, "publish", slow)
    monkeypatch.setattr(prompts._thread, "submit", watched)
    monkeypatch.setattr(prompts, "flush", lambda: None)
    want = reader.logits(prompt)
    assert not asked.is_set()
    assert torch.equal(reader.logits(prompt), want[2:])
    assert reader.passes == 3, "only what comes behind the prompt"


def test_blocks_on_two_tiers(
    tiny: Callable[..., Any], prompts: PrefixCache, tmp_path: Path
) -> None:
    """Stored from RAM, brought back into blocks that spill, and the other way round."""
    model = tiny("gemma3_text")
    prompt = ids(6 * CHUNK + 5)
    make = lambda: DynamicCache(config=model.config)  # noqa: E731
    want = Reader(model, None, make).logits(prompt)
    probe = KvTiers(model.config, ram=2**24, directory=tmp_path, block_tokens=4)
    with torch.no_grad():
        model(torch.tensor([prompt[:4]]), past_key_values=(cache := probe.new_cache()))
    size, layers = probe.pool.slot_bytes if probe.pool else 0, len(cache.life.layers)
    probe.close()
    tiers = KvTiers(model.config, ram=size * (layers + 3), directory=tmp_path, block_tokens=4)
    try:
        tiered = Reader(model, prompts, tiers.new_cache)
        tiered.logits(prompt[: 4 * CHUNK])
        assert tiers.stats()["written_bytes"] > 0, "nothing was spilled: the test shows nothing"
        whole = Reader(model, prompts, make)
        assert torch.equal(whole.logits(prompt), want)
        assert whole.reuse.tokens == 3 * CHUNK
        assert torch.equal(tiered.logits(prompt), want)
        assert tiered.reuse.tokens == 6 * CHUNK
        if tiers.store is not None:
            tiers.store.validate()
    finally:
        tiers.close()


def test_a_cache_that_holds_groups_goes_on(tiny: Callable[..., Any], prompts: PrefixCache) -> None:
    model = tiny("llama")
    make = lambda: DynamicCache(config=model.config)  # noqa: E731
    reader = Reader(model, prompts, make)
    prompt = ids(4 * CHUNK + 2)
    want = reader.logits(prompt)
    held = make()
    with torch.no_grad():
        for at in range(0, 2 * CHUNK, CHUNK):
            model(torch.tensor([prompt[at : at + CHUNK]]), past_key_values=held)
    reader.make = lambda: held
    assert torch.equal(reader.logits(prompt), want)
    assert (reader.reuse.kept, reader.reuse.tokens) == (2 * CHUNK, 4 * CHUNK)
    with pytest.raises(UnsupportedModelError, match="not on the grid"):
        prompts.restore(prompt, held)


def test_what_is_not_known_is_refused(tiny: Callable[..., Any], prompts: PrefixCache) -> None:
    check_config(tiny("llama").config)
    cache = DynamicCache(config=tiny("llama").config)

    class Odd(type(cache.layers[0])):  # type: ignore[misc]
        """Looks like a full layer, and may do anything."""

    for layer in (Odd(), QuantoQuantizedLayer.__new__(QuantoQuantizedLayer)):
        cache.layers[0] = layer
        with pytest.raises(UnsupportedModelError, match=type(layer).__name__):
            check_layers(cache)
        with pytest.raises(UnsupportedModelError, match="not known"):
            prompts.restore(ids(20), cache)


def test_a_pass_over_something_else_is_not_stored(tiny: Callable[..., Any], tmp_path: Path) -> None:
    model, said = tiny("llama"), []
    prompts = opened(tmp_path, say=said.append)
    prompt = ids(20)
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), prompts.recording(prompt, 0, cache):
        model(torch.tensor([prompt[: CHUNK - 1]]), past_key_values=cache)
    prompts.flush()
    assert files(prompts) == []
    assert len(said) == 1
    assert "cannot be stored" in said[0]
    with pytest.raises(ValueError, match="grid"), prompts.recording(prompt, 3, cache):
        pass
    prompts.close()
    with pytest.raises(OffloadError, match="closed"):
        prompts.restore(prompt, cache)


def test_tokens_that_come_by_another_road(tiny: Callable[..., Any], tmp_path: Path) -> None:
    """Without ``update`` nothing was seen: no group, and one sentence; or the layer tells."""
    said: list[str] = []
    prompt = ids(20)
    keys = torch.rand(1, 2, CHUNK, 4)

    class Odd(DynamicLayer):
        appends_exactly = True

        def unseen(self) -> None:
            DynamicLayer.update(self, keys, keys + 1)

    class Telling(Odd):
        def stored(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
            return self.keys[:, :, start:stop], self.values[:, :, start:stop]

    def read(prompts: PrefixCache, layer: Any, method: str) -> Any:
        cache = DynamicCache(config=tiny("llama").config)
        cache.layers = [layer]
        with prompts.recording(prompt, 0, cache):
            getattr(layer, method)()
        prompts.flush()
        return cache

    prompts = opened(tmp_path / "a", say=said.append)
    read(prompts, Odd(), "unseen")
    assert files(prompts) == []
    assert "unseen" in said.pop()
    prompts.close()
    prompts = opened(tmp_path / "b", say=said.append)
    read(prompts, Telling(), "get_seq_length")  # nothing came
    assert files(prompts) == []
    assert "0 of 8 tokens" in said.pop()
    prompts.close()
    prompts = opened(tmp_path / "c", say=said.append)
    read(prompts, Telling(), "unseen")
    cache = DynamicCache(config=tiny("llama").config)
    cache.layers = [Telling()]
    assert prompts.restore(prompt, cache).tokens == CHUNK
    assert torch.equal(cache.layers[0].keys, keys)
    assert torch.equal(cache.layers[0].values, keys + 1)
    # A layer that the file says nothing of would stay empty.
    cache.layers = [Telling(), Telling()]
    reuse = prompts.restore(prompt, cache)
    assert (reuse.tokens, reuse.damaged) == (0, 1)
    assert "layer 1" in said.pop()
    assert cache.get_seq_length() == 0
    assert files(prompts) == []
    prompts.close()
    assert not said


def test_a_broken_pass_leaves_nothing(tiny: Callable[..., Any], prompts: PrefixCache) -> None:
    model = tiny("llama")
    prompt = ids(20)

    def broken(cache: Any) -> None:
        with torch.no_grad(), prompts.recording(prompt, 0, cache):
            model(torch.tensor([prompt[:CHUNK]]), past_key_values=cache)
            raise KeyError

    for _ in range(4):  # more often than there are buffers
        cache = DynamicCache(config=model.config)
        with pytest.raises(KeyError):
            broken(cache)
        assert "update" not in vars(cache.layers[0])
    prompts.flush()
    assert files(prompts) == []


def test_files_are_private_and_nothing_else_is_there(
    tiny: Callable[..., Any], tmp_path: Path
) -> None:
    directory = tmp_path / "new" / "prompts"
    before = os.umask(0)
    try:
        prompts = opened(directory)
        model = tiny("llama")
        Reader(model, prompts, lambda: DynamicCache(config=model.config)).logits(ids(20))
    finally:
        os.umask(before)
    for path in (directory, prompts._folder.path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    found = files(prompts)
    assert len(found) == 2
    for file in found:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert file.suffix == ".kv"
        assert file.stat().st_size % 4096 == 0
    prompts.close()
    prompts.close()
    prompts._folder.path.chmod(0o755)
    with pytest.raises(OffloadError, match=r"open to others .*mode 755"):
        opened(directory)


def test_anything_that_changes_a_number_is_another_name(
    tiny: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    prompt = ids(20)

    def reused(facts: dict[str, Any]) -> int:
        prompts = opened(tmp_path, facts)
        reader = Reader(model, prompts, lambda: DynamicCache(config=model.config))
        reader.logits(prompt)
        prompts.close()
        return reader.reuse.tokens

    facts = {"model": "a", "dtype": "bfloat16", "version": "1"}
    assert reused(facts) == 0
    assert reused(facts) == 16
    for name in facts:
        assert reused({**facts, name: "x"}) == 0, name
    monkeypatch.setattr("offload.kv.prefix_format.FORMAT", 99)
    assert reused(facts) == 0


def test_other_tokens_in_a_file_are_not_taken(
    tiny: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole files under wrong names: as a copy gone wrong would leave."""
    model = tiny("llama")
    prompts = opened(tmp_path)
    make = lambda: DynamicCache(config=model.config)  # noqa: E731
    reader, prompt = Reader(model, prompts, make), ids(3 * CHUNK + 1)
    want = reader.logits(prompt)
    a, b, c = files(prompts)
    data = [p.read_bytes() for p in (a, b, c)]
    for path, other in zip((a, b, c), (data[1], data[2], data[0]), strict=True):
        path.write_bytes(other)
    with caplog.at_level(logging.WARNING, "offload"):
        assert torch.equal(reader.logits(prompt), want)
    assert reader.reuse.tokens == 0
    assert "another prefix" in caplog.text
    prompts.close()
