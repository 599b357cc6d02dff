"""``torch.multinomial`` for one row on the CPU: the same token, the same generator behind it.

torch draws a waiting time for every token of the vocabulary. ``cpu_ops.mersenne`` goes through the
same random numbers and leaves some ten tokens; for these the waiting times are computed here as
torch computes them. Whether this torch does so is not taken from its version: for each size of a
vocabulary both ways are tried once from one state of a generator, and have to end in the same token
and the same state. If not, torch draws.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from offload.cpu_ops.kernels import address_of
from offload.cpu_ops.kv_cache import aligned
from offload.cpu_ops.mersenne import CAPACITY, STATE_WORDS, Race, race_kernel
from offload.cpu_ops.warm import compile_ahead

logger = logging.getLogger(__name__)

_STATE_BYTES = 5056
"""Of torch's generator on the CPU: a seed, how many words are left and where the next one lies,
each word in 8 bytes, and normal numbers that are kept for later."""
_LEFT, _NEXT, _WORDS = 8, 16, 24
_SMALLEST = 4096
"""Tokens; below, torch is as fast."""


def draw(probabilities: torch.Tensor, generator: torch.Generator | None = None) -> int:
    """The token that ``torch.multinomial(probabilities, 1)`` draws, from torch's default generator
    or another one on the CPU.

    Args:
        probabilities: float32 [V]; they need not sum to one.

    Raises:
        RuntimeError: of torch: some are negative, infinite or no numbers, or all are 0.
    """
    count = probabilities.shape[0]
    plain = probabilities.is_contiguous() and probabilities.dtype == torch.float32
    if count >= _SMALLEST and plain and _is_known(count):
        token = _drawn(probabilities.detach().numpy(), generator or torch.default_generator)
        if token is not None:
            return token
    return int(torch.multinomial(probabilities, 1, generator=generator))


class _Room:
    """A race's arguments and what they point to, made once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.state, words = (aligned((STATE_WORDS,), np.int32) for _ in range(2))
        self.tokens, self.digits = (aligned((CAPACITY,), np.int64) for _ in range(2))
        self.a = aligned((Race.SIZE,), np.int64)
        self.a[Race.STATE], self.a[Race.WORDS] = address_of(self.state), address_of(words)
        self.a[Race.TOKENS], self.a[Race.DIGITS] = map(address_of, (self.tokens, self.digits))
        self._words = words  # an address keeps nothing alive
        kernel = race_kernel()
        compile_ahead([kernel])
        self.entry = kernel.entry()


@functools.cache
def _room() -> _Room:
    return _Room()


def _drawn(p: npt.NDArray[np.float32], generator: Any) -> int | None:
    """None: it is for torch to say, and nothing has happened."""
    room = _room()
    # Two threads that start from the same state would draw the same token.
    with room.lock:
        full = generator.get_state()
        if full.numel() != _STATE_BYTES:
            return None
        state = full.numpy()
        left = state[_LEFT : _LEFT + 4].view(np.int32)
        following = state[_NEXT : _NEXT + 8].view(np.int64)
        words = state[_WORDS : _WORDS + 8 * STATE_WORDS].view(np.int64)
        room.state[:] = words.astype(np.uint32).view(np.int32)
        a = room.a
        # It is made anew when none is left, wherever the next one lies.
        a[Race.POSITION] = STATE_WORDS if left[0] == 1 else following[0]
        a[Race.COUNT], a[Race.PROBABILITIES] = len(p), p.ctypes.data
        room.entry.call(int(a.ctypes.data))
        found = int(a[Race.FOUND])
        if found <= 0:
            return None
        # As torch's kernels: the logarithm in float64, the rest in float32.
        ratios = []
        for token, digits in zip(room.tokens[:found], room.digits[:found].tolist(), strict=True):
            waited = np.float32(-math.log1p(-(digits * 2.0**-53)))
            if waited == 0:
                return None
            ratios.append(p[token] / waited)
        winner = int(room.tokens[int(np.argmax(ratios))])
        words[:] = room.state.view(np.uint32)
        following[0] = a[Race.POSITION]
        left[0] = STATE_WORDS + 1 - following[0]
        generator.set_state(full)
    return winner


@functools.cache
def _is_known(count: int) -> bool:
    """Whether this torch draws as it is done here, for so many tokens."""
    own, torchs = torch.Generator("cpu"), torch.Generator("cpu")
    for seed, scale in ((1, 0.01), (2, 8.0)):
        torchs.manual_seed(seed)
        logits = torch.randn(count, generator=torchs, device="cpu") * scale
        p = torch.softmax(logits, 0)
        torch.randint(
            9, (seed,), generator=torchs, device="cpu"
        )  # an odd number of words has been used
        own.set_state(torchs.get_state())
        token = _drawn(p.numpy(), own)
        if token is None:
            continue
        same = token == int(torch.multinomial(p, 1, generator=torchs))
        if not same or not torch.equal(own.get_state(), torchs.get_state()):
            logger.info("this torch draws %d tokens in another way: it is left to it", count)
            return False
    return True


__all__ = ["draw"]
