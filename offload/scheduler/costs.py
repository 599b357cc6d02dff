"""What things cost on measured hardware, in seconds. Pure arithmetic on ``Hardware``.

Every cost is a latency plus bytes over a rate, or the slower of "read the weights once" and "do
the multiplications": a roofline with two roofs. Rates have a spread, so a cost model looks at the
machine through one of three glasses (``Pick``), and a figure becomes an interval by asking all.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from offload.blocks import BlockSpec, TensorSpec
from offload.scheduler.hardware import Card, Hardware, Rate
from offload.scheduler.interval import Interval

PACKED = "uint8"
"""The dtype of packed weights, which to the scheduler are just bytes."""


class Pick(enum.Enum):
    """Which of a rate's samples counts."""

    FAST = "fast"
    MID = "mid"
    SLOW = "slow"


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Costs in seconds on ``hardware``.

    Attributes:
        read_latency_s: from a disk request to its first byte; requests in flight share it.
        copy_latency_s: from queueing a copy between tiers to its first byte.
        queue_depth: blocks that the read lane has in flight at once.
        staged: reads land in a staging buffer and are copied once more (originals whose tensors
            are unaligned on disk), by the lane's threads, so that copies overlap with reads.
        expert_overhead_s: seconds per expert call that are not its weights (dispatch).
        fetch_s: seconds that a block read from disk takes of the time of those who compute, where
            the CPU does: the threads that fetch it run on the same cores.
        crowd_s: processor time that those threads take for such a block, where compute has all
            cores. A toy, whose products are too small for a second thread, leaves them a core of
            their own; of products on all cores each second of theirs takes one, as a product ends
            with the last of its threads.
        product_overhead_s: seconds of a product that the CPU computes beside a device, besides the
            product: its copies and threads (see ``bounds.host_product_s``); None: not measured.
        guess_precision: share of the experts guessed for the next layer that it will use: 0.7 to
            0.8 on a small trained model with two experts per token, 0.9 to 1 on random ones with
            eight. What a model's own guesses were, where that is known.
        flops: per token, of the blocks whose tensors do not tell: packed ones are just bytes.
        on_card: the hardware's card computes, and not the CPU.
        pick: which of the measured rates to use.

    Raises:
        ValueError: ``on_card`` without a card.
    """

    hardware: Hardware
    read_latency_s: float = 1e-4
    copy_latency_s: float = 1e-5
    queue_depth: int = 4
    staged: bool = False
    expert_overhead_s: float = 0.0
    fetch_s: float = 0.0
    crowd_s: float = 0.0
    product_overhead_s: float | None = None
    guess_precision: float = 0.85
    flops: Mapping[str, int] = field(default_factory=dict, hash=False)
    on_card: bool = False
    pick: Pick = Pick.MID

    def __post_init__(self) -> None:
        if self.on_card and self.hardware.card is None:
            raise ValueError(f"{self.hardware.name} has no card to compute on")

    def at(self, pick: Pick) -> CostModel:
        """The same machine on a fast, typical or slow day."""
        return dataclasses.replace(self, pick=pick)

    def beside_card(self) -> CostModel:
        """The same machine where its CPU computes."""
        return dataclasses.replace(self, on_card=False)

    def interval(self, cost_s: Callable[[CostModel], float]) -> Interval:
        """A cost with the spread of the measurements: ``low`` is the best case."""
        fast, mid, slow = (cost_s(self.at(p)) for p in (Pick.FAST, Pick.MID, Pick.SLOW))
        return Interval(low=fast, mid=mid, high=slow)

    # -- moving ---------------------------------------------------------------------------

    def read_s(self, nbytes: int) -> float:
        """One read of ``nbytes`` from an idle disk into its place."""
        return self.read_latency_s + self.read_busy_s(nbytes)

    def read_busy_s(self, nbytes: float) -> float:
        """What ``nbytes`` take of the read lane's time with other requests in flight."""
        busy_s = nbytes / self._of(self.hardware.ssd_read)
        return max(busy_s, self.memcpy_s(nbytes)) if self.staged else busy_s

    def copy_up_s(self, nbytes: int) -> float:
        """One copy of ``nbytes`` from RAM to the device."""
        return self.copy_latency_s + self.copy_up_busy_s(nbytes)

    def copy_up_busy_s(self, nbytes: float) -> float:
        """What ``nbytes`` take of the h2d lane's time. Without a measured h2d rate (a device that
        lives in RAM) a copy is a memcpy."""
        return nbytes / self._of(self.hardware.h2d or self.hardware.memcpy)

    def memcpy_s(self, nbytes: float) -> float:
        """A copy of ``nbytes`` inside RAM."""
        return nbytes / self._of(self.hardware.memcpy)

    def attend_s(self, nbytes: float) -> float:
        """Keys and values read once, at the rate of packed weights."""
        return nbytes / self._gemv(PACKED)

    # -- computing ------------------------------------------------------------------------

    def weights_s(self, specs: Iterable[BlockSpec], tokens: float = 1.0) -> float:
        """All tensors of ``specs`` applied to ``tokens`` rows of activations.

        Decode reads each weight once, at the GEMV rate of its dtype. More tokens cost the flops
        (2 per weight and token) at the matmul rate, but never less than reading the weights; of
        packed ones each token more costs its flops.
        """
        gemv_s = matmul_s = more_s = 0.0
        card = self._card
        product_s = self.hardware.product_s if card is None else card.launch_s
        for spec in specs:
            packed = tokens > 1 and spec.id in self.flops
            if packed and self._packed_rates:
                more_s += self.flops[spec.id] * (tokens - 1) / self._matmul(PACKED)
            elif packed:  # dequantised, if nobody has measured the pack's own kernels
                matmul_s += self.flops[spec.id] * tokens / self._matmul("bfloat16")
            for tensor in spec.tensors:
                gemv_s += tensor.nbytes / self._gemv(tensor.dtype)
                if len(tensor.shape) > 1:
                    gemv_s += product_s
                if tokens > 1 and not packed:
                    matmul_s += _flops(tensor) * tokens / self._matmul(tensor.dtype)
        return max(gemv_s, matmul_s) + more_s

    def step_s(
        self, specs: Iterable[BlockSpec], *, tokens: float = 1.0, overhead_s: float = 0.0
    ) -> float:
        """One step of the trace without its experts; ``overhead_s`` is the caller's (Python,
        module hooks, attention over the cache)."""
        return self.weights_s(specs, tokens) + overhead_s

    def expert_s(self, spec: BlockSpec, tokens: float = 1.0) -> float:
        """One expert on the ``tokens`` routed to it."""
        return self.weights_s((spec,), tokens) + self.expert_overhead_s

    def _of(self, rate: Rate) -> float:
        if self.pick is Pick.MID:
            return rate.median
        return rate.high if self.pick is Pick.FAST else rate.low

    @property
    def _card(self) -> Card | None:
        return self.hardware.card if self.on_card else None

    def _gemv(self, dtype: str) -> float:
        card = self._card
        rates, limit = (
            (self.hardware.gemv, self.hardware.ram_read) if card is None else (card.gemv, card.read)
        )
        # A dtype that was not probed is assumed to run at the limit of the memory.
        return self._of(rates.get(dtype, limit))

    @property
    def _packed_rates(self) -> bool:
        card = self._card
        return PACKED in (self.hardware.matmul if card is None else card.matmul)

    def _matmul(self, dtype: str) -> float:
        card = self._card
        rates = self.hardware.matmul if card is None else card.matmul
        if dtype in rates:
            return self._of(rates[dtype])
        # Not probed (an integer format): computed in some float type, the slowest to be safe.
        return min(self._of(r) for r in rates.values())


def _flops(tensor: TensorSpec) -> int:
    """Per token. Vectors (norms, biases) take part once per element, not as a product."""
    return 2 * math.prod(tensor.shape) if len(tensor.shape) > 1 else 0
