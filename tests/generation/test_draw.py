"""Drawing tokens: torch's token, torch's random numbers, torch's errors."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from offload.generation import draw as module
from offload.generation.draw import _drawn, draw


def probabilities(count: int, scale: float, zeros: float) -> torch.Tensor:
    p = torch.softmax(scale * torch.randn(count), 0)
    p[torch.rand(count) < zeros] = 0
    p[count // 2] = 1e-3
    return p


@pytest.mark.parametrize("count", [1, 17, 624, 4097, 50_000])
@pytest.mark.parametrize("used", [0, 1, 2, 311, 623, 624])
def test_torchs_token_and_state(count: int, used: int) -> None:
    """``used``: words of the twister that are gone when it begins."""
    own, torchs = torch.Generator(), torch.Generator()
    for seed, (scale, zeros) in enumerate([(0, 0), (1, 0), (12, 0), (3, 0.99), (0, 1)]):
        torch.manual_seed(seed)
        p = probabilities(count, scale, zeros)
        torchs.manual_seed(seed)
        torch.randint(9, (used,), generator=torchs)
        own.set_state(torchs.get_state())
        for _ in range(3):
            assert _drawn(p, own) == int(torch.multinomial(p, 1, generator=torchs))
            assert torch.equal(own.get_state(), torchs.get_state())


def test_rising_probabilities() -> None:
    """Most tokens are no chance at all, in float32 as they are."""
    p = torch.exp(torch.linspace(-80, 0, 100_000))
    own, torchs = torch.Generator(), torch.Generator()
    for seed in range(10):
        own.manual_seed(seed)
        torchs.manual_seed(seed)
        assert _drawn(p, own) == int(torch.multinomial(p, 1, generator=torchs))
        assert torch.equal(own.get_state(), torchs.get_state())


def test_numbers_of_another_thread_are_not_drawn_twice() -> None:
    """Each number is taken from torch's generator once, whoever takes it."""
    p = probabilities(5000, 1, 0)
    got: list[torch.Tensor] = []
    stop = threading.Event()

    def others() -> None:
        while not stop.is_set():
            got.append(torch.rand(2000, dtype=torch.float64))

    assert module._is_known(5000)
    thread = threading.Thread(target=others)
    thread.start()
    try:
        for _ in range(300):
            draw(p)
    finally:
        stop.set()
        thread.join()
    found = torch.cat(got)
    assert len(found.unique()) == len(found)


def test_the_default_generator_goes_on_as_with_torch() -> None:
    p = probabilities(20_000, 2, 0)
    torch.manual_seed(4)
    want = [int(torch.multinomial(p, 1)) for _ in range(20)], torch.randn(3)
    torch.manual_seed(4)
    got = [draw(p) for _ in range(20)], torch.randn(3)
    assert got[0] == want[0]
    assert torch.equal(got[1], want[1])
    assert module._is_known(20_000)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_errors_are_torchs(wrong: float) -> None:
    p = probabilities(5000, 1, 0)
    p[77] = wrong
    with pytest.raises(RuntimeError) as theirs:
        torch.multinomial(p, 1)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError) as ours:
        draw(p)
    assert str(ours.value) == str(theirs.value)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_torch_that_draws_otherwise_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = torch.rand
    monkeypatch.setattr(torch, "rand", lambda *a, **k: 1 - inner(*a, **k))
    module._is_known.cache_clear()
    p = probabilities(6001, 1, 0)
    try:
        assert not module._is_known(6001)
        torch.manual_seed(1)
        want = int(torch.multinomial(p, 1))
        torch.manual_seed(1)
        assert draw(p) == want
    finally:
        module._is_known.cache_clear()


def test_who_watches_or_replaces_the_draw_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    p, seen = probabilities(6000, 1, 0), []

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    draw(p)
    with Watch():
        draw(p)
    assert seen.count("multinomial") == 1
    monkeypatch.setattr(torch, "multinomial", lambda *_, **__: torch.tensor([77]))
    assert draw(p) == 77
