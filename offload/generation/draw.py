"""``torch.multinomial`` for one row on the CPU: the same token, the same generator behind it.

torch gives each of V tokens an exponential waiting time q of rate 1 and takes the largest p / q
(Gumbel-max: Maddison, Tarlow and Minka, "A* Sampling", NeurIPS 2014, section 2). Its q are
logarithms, one after the other: 22 ns a token, 3.6 ms for 152,000. They come of the numbers u that
``torch.rand`` gives in float64, and with q = -log(1 - u)

    u <= q <= u / (1 - u)

says of nearly all tokens that they have lost before a logarithm is taken. For the few that are left
it is computed as torch does. That this torch does so is not taken from its version: for each size
of a vocabulary both ways are tried from one state of a generator, and have to end in the same token
and the same state. If not, torch draws.

The road left: a Mersenne twister of our own takes half of the time, but a generator's state cannot
be read and set back in one go, and another thread's numbers in between would be drawn twice.
"""

from __future__ import annotations

import functools
import logging
import math

import numpy as np
import numpy.typing as npt
import torch
from torch._C import _len_torch_function_stack

logger = logging.getLogger(__name__)

_SMALLEST = 4096
"""Tokens; below, torch is as fast."""
_MARGIN = 1 - 1e-5
"""More than float32 rounds away in p, q and their ratio."""
_TORCHS = torch.multinomial


def draw(probabilities: torch.Tensor, generator: torch.Generator | None = None) -> int:
    """The token that ``torch.multinomial(probabilities, 1)`` draws, from torch's default generator
    or another one on the CPU.

    Args:
        probabilities: float32 [V]; they need not sum to one.

    Raises:
        RuntimeError: of torch: some are negative, infinite or no numbers, or all are 0.
    """
    count = probabilities.shape[0]
    # Whoever has put something in the way of torch's draw is asked, as ever.
    stock = torch.multinomial is _TORCHS and not _len_torch_function_stack()
    plain = probabilities.dtype == torch.float32 and probabilities.device.type == "cpu"
    if count >= _SMALLEST and stock and plain and _is_known(count):
        token = _drawn(probabilities.detach(), generator)
        if token is not None:
            return token
    return int(torch.multinomial(probabilities, 1, generator=generator))


def _drawn(probabilities: torch.Tensor, generator: torch.Generator | None) -> int | None:
    """None: it is for torch to say, and no number has been drawn."""
    p = probabilities.numpy()
    if not (p.min() >= 0 and 0 < p.max() < math.inf):  # a NaN is neither
        return None
    u = torch.rand(len(p), dtype=torch.float64, device="cpu", generator=generator).numpy()
    chances: npt.NDArray[np.int64] | None = None
    if np.count_nonzero(p) < len(p) // 8:  # behind a top-k
        (chances,) = np.nonzero(p > 0)
        p, u = p[chances], u[chances]
    with np.errstate(all="ignore"):
        most = p / u
        leader = int(most.argmax())
        least = most[leader] * (1 - u[leader]) * _MARGIN
        (left,) = np.nonzero(most >= least)
        # As torch's kernels: the logarithm in float64, the rest in float32.
        waited = np.array([-math.log1p(-one) for one in u[left].tolist()], np.float32)
        winner = left[(p[left] / waited).argmax()]
    return int(winner if chances is None else chances[winner])


@functools.cache
def _is_known(count: int) -> bool:
    """Whether this torch draws as it is done here, for so many tokens."""
    own, torchs = torch.Generator("cpu"), torch.Generator("cpu")
    for seed, scale in ((1, 0.01), (2, 8.0)):
        torchs.manual_seed(seed)
        logits = torch.randn(count, generator=torchs, dtype=torch.float32, device="cpu") * scale
        p = torch.softmax(logits, 0)
        torch.randint(9, (seed,), generator=torchs, device="cpu")  # of an odd number of words, too
        own.set_state(torchs.get_state())
        same = _drawn(p, own) == int(torch.multinomial(p, 1, generator=torchs))
        if not same or not torch.equal(own.get_state(), torchs.get_state()):
            logger.info("this torch draws %d tokens in another way: it is left to it", count)
            return False
    return True


__all__ = ["draw"]
