"""The engine: answers as if alone, turns, cancelling, ends, failures."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serve_support import (
    CHUNK,
    CONTEXT,
    TINY,
    Alone,
    Listener,
    make_engine,
    open_streaming,
    request,
)

from offload.batch.conductor import Conductor
from offload.cli import decode
from offload.cli.sampling import Sampling
from offload.errors import OffloadError, StoreError
from offload.models.lean_cache import LeanCache
from offload.models.load import Options, prepare
from offload.models.pack_open import open_source
from offload.models.pack_run import pack
from offload.serve.engine import Engine
from offload.serve.events import Ended, Event, Failed, Piece
from offload.serve.problems import Problem

TEXTS = ["What is a list?", "The interpreter " * 20, "A", "for x in range(10):\n    print(x)\n" * 3]


@pytest.fixture
def one(model: Any, alone: Alone) -> Iterator[Engine]:
    """One request at a time, at most three waiting; not started."""
    engine = make_engine(model, alone.tokenizer, parallel=1, max_queue=3)
    yield engine
    engine.close()


@pytest.fixture
def several(model: Any, alone: Alone) -> Iterator[Engine]:
    engine = make_engine(model, alone.tokenizer)
    engine.start()
    yield engine
    engine.close()


@pytest.fixture
def waiting(model: Any, alone: Alone) -> Iterator[Engine]:
    """As ``several``, not started: what is asked of it before begins together."""
    engine = make_engine(model, alone.tokenizer)
    yield engine
    engine.close()


def test_answers_are_those_of_each_alone(waiting: Engine, alone: Alone) -> None:
    """More requests than run at once, prompts of one piece and of several, greedy and sampled."""
    asked: list[tuple[list[int], dict[str, Any], Listener]] = []
    for i in range(8):
        ids = alone.ids(TEXTS[i % len(TEXTS)])
        how = {} if i % 2 else {"temp": 0.9, "top_p": 0.9, "seed": i}
        wish = request(ids, 12, sampling=Sampling(**how), ignore_eos=False)
        asked.append((ids, how, Listener(waiting, wish)))
    waiting.start()
    results = [listener.result() for *_, listener in asked]
    # Only now: torch's random numbers are the whole process's.
    for (ids, how, _), (text, end) in zip(asked, results, strict=True):
        if how:
            how["temperature"] = how.pop("temp")
        assert text == alone.answer(ids, 12, **how)
        assert isinstance(end, Ended)
        assert end.prompt_tokens == len(ids)
    stats = waiting.stats()
    assert stats["requests"]["completed"] == 8
    assert stats["weights"]["disk_read_bytes"] > 0
    assert stats["passes"] < 8 * 12  # shared


def test_the_checkpoints_stop_strings_end_every_answer(model: Any, alone: Alone) -> None:
    ids = alone.ids("What is a list?")
    whole = alone.answer(ids, 12)
    stop = whole[len(whole) // 2 :][:3]
    model.generation_config.stop_strings = [stop]
    engine = make_engine(model, alone.tokenizer)
    try:
        engine.start()
        for _ in range(2):
            text, end = Listener(engine, request(ids, 12, ignore_eos=False)).result()
            assert text == whole[: whole.index(stop)]
            assert isinstance(end, Ended)
            assert end.finish == "stop"
    finally:
        engine.close()
        model.generation_config.stop_strings = None


def test_a_checkpoint_that_was_trained_without_a_cache(model: Any, alone: Alone) -> None:
    """Trainers leave ``use_cache: false`` in the files they save."""
    ids = alone.ids("What is a list, and what is a tuple, and which of them is longer?")
    assert len(ids) > CHUNK
    model.generation_config.use_cache = False
    engine = make_engine(model, alone.tokenizer)
    try:
        engine.start()
        text, end = Listener(engine, request(ids, 8)).result()
        assert isinstance(end, Ended), end
        assert text == alone.answer(ids, 8)
    finally:
        engine.close()
        model.generation_config.use_cache = True


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"temperature": "hot"}, {"repetition_penalty": 0}]
)
def test_settings_of_a_checkpoint_that_are_nothing_are_said_at_once(
    model: Any, alone: Alone, wrong: dict[str, Any]
) -> None:
    name, value = next(iter(wrong.items()))
    before = getattr(model.generation_config, name)
    setattr(model.generation_config, name, value)
    try:
        with pytest.raises(OffloadError, match=f"generation_config.json says {name} {value!r}"):
            make_engine(model, alone.tokenizer)
    finally:
        setattr(model.generation_config, name, before)
    make_engine(model, alone.tokenizer).close()


def test_a_temperature_next_to_nothing_takes_the_likeliest(several: Engine, alone: Alone) -> None:
    ids = alone.ids("A")
    wish = request(ids, 8, sampling=Sampling(temp=1e-320, seed=1), ignore_eos=False)
    text, end = Listener(several, wish).result()
    assert isinstance(end, Ended)
    assert text == alone.answer(ids, 8)


def test_weights_are_read_once_for_all(alone: Alone) -> None:
    """Three equal prompts that begin together read what one reads. Without guesses, which go into
    whatever time the disk has; and the prompts fit one pass together, or one would be a token
    behind the others for ever, with other experts."""
    model = open_streaming(guess=False)
    ids = alone.ids("A")
    assert 3 * len(ids) <= CHUNK

    def read(count: int) -> int:
        model.offload.executor.settle()
        engine = make_engine(model, alone.tokenizer)
        before = model.offload.stats()["payload_read_bytes"]
        listeners = [Listener(engine, request(ids, 16)) for _ in range(count)]
        engine.start()
        for listener in listeners:
            assert isinstance(listener.result()[1], Ended)
        engine.close()
        model.offload.executor.settle()
        return int(model.offload.stats()["payload_read_bytes"] - before)

    try:
        read(1)
        single = read(1)
        assert single > 0
        assert read(3) <= 1.02 * single  # rows of the embedding are looked up by each
    finally:
        model.offload.close()


def test_a_long_prompt_does_not_hold_up_others(several: Engine, alone: Alone) -> None:
    """The short one writes while the long one is read, a piece per pass."""
    long = (alone.ids(TEXTS[1]) * 4)[: CONTEXT - 8]
    order: list[str] = []
    lock = threading.Lock()
    first, ended = threading.Event(), threading.Event()

    def deliver(name: str, done: threading.Event) -> Any:
        def take(event: Event) -> None:
            with lock:
                order.append(name)
            first.set()
            if not isinstance(event, Piece):
                done.set()

        return take

    short_done = threading.Event()
    several.submit(request(alone.ids("A"), 60), deliver("short", short_done))
    assert first.wait(60)
    several.submit(request(long, 2), deliver("long", ended))
    assert ended.wait(60)
    assert short_done.wait(60)
    at = order.index("long")
    # Nine pieces of 16 tokens: as many tokens of the short answer came meanwhile.
    assert at >= len(long) // 16 - 1, order


def test_clients_are_served_in_turn(one: Engine, alone: Alone) -> None:
    ids = alone.ids("A")
    order: list[str] = []
    ended = threading.Semaphore(0)

    def deliver(name: str) -> Any:
        def take(event: Event) -> None:
            if isinstance(event, Ended):
                order.append(name)
                ended.release()

        return take

    for name, client in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        one.submit(request(ids, 2, client), deliver(name))
    one.start()
    for _ in range(3):
        assert ended.acquire(timeout=60)
    assert order == ["a1", "b1", "a2"]


def test_beyond_the_queue_is_refused(one: Engine, alone: Alone) -> None:
    ids = alone.ids("A")
    waiting = [Listener(one, request(ids, 2)) for _ in range(3)]
    with pytest.raises(Problem) as refused:
        Listener(one, request(ids, 2))
    assert refused.value.status == 429
    assert int(refused.value.headers["Retry-After"]) >= 1
    one.cancel(waiting[1].handle)  # a place
    waiting[1] = Listener(one, request(ids, 2))
    one.start()
    for listener in waiting:
        assert isinstance(listener.result()[1], Ended)
    stats = one.stats()["requests"]
    assert (stats["completed"], stats["cancelled"], stats["rejected"]) == (3, 1, 1)


def test_cancelling_frees_the_place(one: Engine, alone: Alone) -> None:
    one.start()
    ids = alone.ids("A")
    endless = Listener(one, request(ids, CONTEXT - len(ids)))
    assert isinstance(endless.next(), Piece)
    one.cancel(endless.handle)
    after = Listener(one, request(ids, 4))
    text, end = after.result()
    assert isinstance(end, Ended)
    assert text == alone.answer(ids, 4)
    assert isinstance(endless.result()[1], Failed)
    one.cancel(endless.handle)  # what has ended is left alone
    assert one.stats()["requests"]["cancelled"] == 1


def test_draining_finishes_what_runs(one: Engine, alone: Alone) -> None:
    one.start()
    ids = alone.ids("A")
    runs = Listener(one, request(ids, 20))
    first = runs.next()
    assert isinstance(first, Piece)
    waits = Listener(one, request(ids, 2))
    one.drain()
    refused = waits.result()[1]
    assert isinstance(refused, Failed)
    assert refused.problem.status == 503
    with pytest.raises(Problem) as problem:
        Listener(one, request(ids, 2))
    assert problem.value.status == 503
    text, end = runs.result()
    assert isinstance(end, Ended)
    assert first.text + text == alone.answer(ids, 20)
    assert one.state == "stopping"


def test_a_failed_read_ends_one_answer_only(
    several: Engine, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = alone.ids("A")
    right = decode.generate

    def generate(model: Any, prompt: Any, **more: Any) -> Any:
        if len(prompt) == 2:
            raise StoreError("the disk has gone away")
        return right(model, prompt, **more)

    monkeypatch.setattr(decode, "generate", generate)
    bad, good = Listener(several, request([5, 6], 4)), Listener(several, request(ids, 4))
    failure = bad.result()[1]
    assert isinstance(failure, Failed)
    assert failure.problem.status == 500
    assert "disk has gone away" in failure.problem.message
    assert good.result()[0] == alone.answer(ids, 4)
    assert several.state == "ok"


def test_an_engine_that_fails_tells_all(
    one: Engine, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, steps = Conductor.step, 0

    def broken(conductor: Conductor) -> bool:
        nonlocal steps
        steps += 1
        if steps > 5:  # in the middle of the first pass
            raise AssertionError("a bug")
        return step(conductor)

    monkeypatch.setattr(Conductor, "step", broken)
    ids = alone.ids("A")
    listeners = [Listener(one, request(ids, 2)) for _ in range(2)]
    one.start()
    for listener in listeners:
        failure = listener.result()[1]
        assert isinstance(failure, Failed)
        assert "a bug" in failure.problem.message
    assert one.state == "failed"
    assert isinstance(one.error, AssertionError)
    with pytest.raises(Problem, match="a bug"):
        one.check_open()
    one.close()
    assert one.stats()["requests"]["failed"] == 2


def one_and_then_others(
    model: Any, alone: Alone, prompts: list[list[int]]
) -> tuple[list[Any], dict[str, Any]]:
    """The first prompt's answer, those of all others together once it is stored, and figures; the
    model is closed."""
    engine = make_engine(model, alone.tokenizer)
    engine.start()
    try:
        first = Listener(engine, request(prompts[0], 8)).result()
        if model.offload.prompts is not None:
            model.offload.prompts.prefixes.flush()
        others = [Listener(engine, request(ids, 8)) for ids in prompts[1:]]
        return [first, *(listener.result() for listener in others)], engine.stats()
    finally:
        engine.close()
        model.offload.close()


def test_a_shared_beginning_is_read_once(alone: Alone, tmp_path: Path) -> None:
    """Over the prompt cache: what the first request has read is not read again, by several at once
    either, and the answers stay the same."""
    beginning = alone.ids("The interpreter " * 60)[:64]
    prompts = [beginning + alone.ids(text) for text in ("A", "What is a list?", "for x", "B")]
    model = open_streaming(prompt_cache=tmp_path / "prompts", prompt_cache_chunk=CHUNK)
    results, stats = one_and_then_others(model, alone, prompts)
    ends = [end for _, end in results]
    assert [end.reused_tokens for end in ends if isinstance(end, Ended)] == [0, 64, 64, 64]
    assert [text for text, _ in results] == [alone.answer(ids, 8) for ids in prompts]
    assert stats["tokens"]["reused"] == 3 * 64
    assert stats["prompt_cache"]["written_groups"] >= 4


def test_a_prompt_that_comes_again_whole(
    alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is computed: its end is kept, too, and the answers stay the same, beside others
    and sampled."""
    prompts = [
        (alone.ids(text) * 9)[:n] for text, n in zip(TEXTS, (2 * CHUNK, 70, 1, 41), strict=True)
    ]
    how: list[dict[str, Any]] = [{}, {"seed": 7, "temperature": 0.9}]
    wishes = [
        Sampling() if not one else Sampling(temp=one["temperature"], seed=one["seed"])
        for one in how
    ]
    computed: list[int] = []
    embed = torch.nn.Embedding.forward

    def forward(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        computed.append(ids.shape[1])
        return embed(self, ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", forward)  # a hook might change something
    for _ in range(2):  # the second time from the files alone
        computed.clear()
        model = open_streaming(prompt_cache=tmp_path / "prompts", prompt_cache_chunk=CHUNK)
        engine = make_engine(model, alone.tokenizer)
        engine.start()
        found, reused, passes = [], [], []
        try:
            for wish in wishes:
                listeners = [Listener(engine, request(ids, 6, sampling=wish)) for ids in prompts]
                for listener in listeners:
                    text, end = listener.result()
                    assert isinstance(end, Ended)
                    found.append(text)
                    reused.append(end.reused_tokens)
                model.offload.prompts.prefixes.flush()
                passes.append(sum(n for n in computed if n > 1))
                computed.clear()
        finally:
            stats = engine.stats()
            engine.close()
            model.offload.close()
        want = [alone.answer(ids, 6, **one) for one in how for ids in prompts]
        assert found == want
        whole = [2 * CHUNK, 70, 0, 41]  # one that fits a pass is not kept
        assert reused[4:] == whole
        assert passes[1] == 0
    assert reused[:4] == whole
    assert passes[0] == 0
    assert stats["tokens"]["prompt"] == 2, "the one that fits a pass"


def test_reused_prefixes_of_a_pack(alone: Alone, tmp_path: Path) -> None:
    """Whose decode kernels keep keys and values themselves, each request's apart: what a request
    finds on the disk is not read again, and changes no answer."""
    packed = tmp_path / "packed"
    with contextlib.closing(open_source(TINY)) as source:
        pack(source, packed, quant="q8")
    beginning = alone.ids("The interpreter " * 60)[:64]
    prompts = [beginning + alone.ids(text) for text in ("A", "What is a list?", "for x", "B")]
    found = []
    for directory in (None, tmp_path / "prompts"):
        more = {"prompt_cache": directory, "prompt_cache_chunk": CHUNK} if directory else {}
        wish = {"context": CONTEXT, "prompt_tokens": CHUNK, "sequences": 3, "pass_rows": CHUNK}
        model = prepare(packed, Options(ram=200 * 2**20, **wish, **more)).open()
        assert isinstance(model.offload.new_cache(), LeanCache)
        results, stats = one_and_then_others(model, alone, prompts)
        found.append([text for text, _ in results])
        if directory:
            ends = [end for _, end in results]
            reused = [end.reused_tokens for end in ends if isinstance(end, Ended)]
            assert reused == [0, 64, 64, 64]
            config = model.config
            row = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
            assert stats["prompt_cache"]["read_bytes"] >= 3 * 64 * row
    assert found[0] == found[1]


def test_reused_prefixes_that_are_rounded(alone: Alone, tmp_path: Path) -> None:
    """Blocks of two passes each, of several requests at once: the answers without a cache."""
    beginning = alone.ids("The interpreter " * 60)[:64]
    prompts = [beginning + alone.ids(text) for text in ("A", "What is a list?", "for x", "B")]
    found = []
    for directory in (None, tmp_path / "prompts"):
        more = {"prompt_cache": directory, "prompt_cache_chunk": CHUNK} if directory else {}
        model = open_streaming(kv="q8", kv_block_tokens=2 * CHUNK, **more)
        results, stats = one_and_then_others(model, alone, prompts)
        found.append([text for text, _ in results])
        ends = [end for _, end in results]
        reused = [end.reused_tokens for end in ends if isinstance(end, Ended)]
        assert reused == ([0, 64, 64, 64] if directory else [0] * 4)
    assert stats["prompt_cache"]["group"] == 2 * CHUNK
    assert found[0] == found[1]


def test_keys_and_values_that_stream_too(alone: Alone, tmp_path: Path) -> None:
    """Several requests, with room for a part of their keys and values in RAM."""
    model = open_streaming(kv_ram=600 * 1024, kv_block_tokens=16, disk=tmp_path)
    engine = make_engine(model, alone.tokenizer)
    engine.start()
    try:
        prompts = [(alone.ids(text) * 3)[:100] for text in TEXTS]
        listeners = [Listener(engine, request(ids, 8)) for ids in prompts]
        texts = [listener.result()[0] for listener in listeners]
        kv = engine.stats()["kv"]
    finally:
        engine.close()
        model.offload.close()
    assert texts == [alone.answer(ids, 8) for ids in prompts]
    assert kv["read_bytes"] > 0


def test_what_stays_of_long_prompts_is_what_stays_alone(alone: Alone) -> None:
    """With ``kv_keep``, whatever the engine reads at once."""
    model = open_streaming(kv_keep=48)
    prompts = [(alone.ids(text) * 9)[:120] for text in TEXTS]
    expected = []
    for ids in prompts:
        out = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)
        expected.append(alone.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True))
    engine = Engine(
        model, tokenizer=alone.tokenizer, parallel=3, max_queue=64, prefill_chunk=4 * CHUNK
    )
    engine.start()
    try:
        listeners = [Listener(engine, request(ids, 8, ignore_eos=False)) for ids in prompts]
        texts = [listener.result()[0] for listener in listeners]
        evicted = engine.stats()["kv"]["evicted_tokens"]
    finally:
        engine.close()
        model.offload.close()
    assert texts == expected
    assert evicted >= 2 * sum(len(ids) - 48 for ids in prompts)
