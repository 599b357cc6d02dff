"""Drawing tokens: torch's token, torch's random numbers, torch's errors."""

from __future__ import annotations

import math

import pytest
import torch

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
            assert _drawn(p.numpy(), own) == int(torch.multinomial(p, 1, generator=torchs))
            assert torch.equal(own.get_state(), torchs.get_state())


def test_many_equal_ones_are_more_than_are_kept_at_a_time() -> None:
    """Rising probabilities: nearly every token has the lead for a while."""
    p = torch.exp(torch.linspace(-80, 0, 100_000))
    own, torchs = torch.Generator(), torch.Generator()
    for seed in range(10):
        own.manual_seed(seed)
        torchs.manual_seed(seed)
        token = _drawn(p.numpy(), own)
        if token is None:
            assert torch.equal(own.get_state(), torchs.get_state())
        else:
            assert token == int(torch.multinomial(p, 1, generator=torchs))


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
    stock = torch.multinomial

    def backwards(p: torch.Tensor, n: int, **more: torch.Generator) -> torch.Tensor:
        return len(p) - 1 - stock(p.flip(0), n, **more)

    monkeypatch.setattr(torch, "multinomial", backwards)
    p = probabilities(6001, 1, 0)
    assert not module._is_known(6001)
    try:
        torch.manual_seed(1)
        want = int(backwards(p, 1))
        torch.manual_seed(1)
        assert draw(p) == want
    finally:
        module._is_known.cache_clear()
