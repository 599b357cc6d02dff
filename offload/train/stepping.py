"""From gradients to updates: when a block's are complete, and what a step makes of them.

Updates run behind the next forward, block by block in its order (*deferred*), or inside backward as
soon as a block's gradients are complete (without clipping, whose factor is known only at the end).
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Collection, Iterator

from offload.train.device_tier import Homes
from offload.train.grads import Gradients
from offload.train.layout import Piece, TrainLayout
from offload.train.lazy_grad import GradientError
from offload.train.order import UseOrder
from offload.train.steps import Clock, Group, NotFinite, StepResult
from offload.train.updates import Job, Updater
from offload.train.vertical import Rounds
from offload.train.weights import Shared, Weights


class Stepping:
    """The half of an engine that takes steps. One training thread at a time."""

    def __init__(
        self, layout: TrainLayout, order: UseOrder, weights: Weights, gradients: Gradients,
        updater: Updater, shared: Shared, homes: Homes,
    ) -> None:  # fmt: skip
        self.layout = layout
        self.order = order
        self.weights = weights
        self.gradients = gradients
        self.updater = updater
        self.shared = shared
        self.homes = homes
        self.clock = Clock()
        self.steps: dict[str, int] = {}
        """Steps that each parameter has taken."""
        self.in_backward: Callable[[Piece], Group] | None = None
        """Set: update inside backward, with these hyper-parameters."""
        self.torn = False
        """Whether updates of a step have begun that is not taken (yet): only inside backward."""
        self._updated: set[int] = set()
        """Blocks that were updated in this step already: only inside backward."""
        self.last_micro_batch = True
        """Whether gradients of this backward complete the step."""
        self.rounds: Rounds | None = None
        """Set: micro-batches run in turns, unit by unit; weights stay until the last one is
        through."""
        self.skip_untouched = False
        """Set: a step leaves alone the fused experts that no token of its micro-batches (padding
        counts) was routed to: no update, no decay, no traffic. Lazy Adam, as
        ``torch.optim.SparseAdam``: their moments stay as they are and do not decay, and the bias
        correction of their next update is that of all steps of the fused parameter, not of their
        own. Not what the resident optimizer does, whose gradient for them is zero."""
        self._experts_taken = 0
        self.gradient_limit: int | None = None
        """Bytes of gradients that may wait for updates inside backward before backward waits."""
        self._left = self._uses()

    def last_in_round(self) -> bool:
        """Whether no other micro-batch runs the unit that runs, before the next unit."""
        rounds = self.rounds
        return rounds is None or rounds.index + 1 >= rounds.size

    def _uses(self) -> list[int]:
        """For each block, by how many units its gradients are added to in one backward."""
        return [len(users) for users in self.layout.users]

    def backward_done(self, unit: int) -> None:
        """Called when a unit's gradients of one micro-batch are all made."""
        blocks = [b for b in self._blocks_of(unit) if self.layout.blocks[b].trained]
        last = self.last_micro_batch
        if self.rounds is not None:
            if not self.last_in_round():
                return  # the next micro-batch adds to them at once
            last = True
        if self.in_backward is not None:
            self.homes.land()  # their updates may wait for memory, which a running unit has
            self._come(blocks, last=last)
        else:
            self.homes.when_landed(unit, functools.partial(self._come, blocks, last=last))

    def _come(self, blocks: Collection[int], *, last: bool) -> None:
        """A unit's gradients of one micro-batch, the step's last one or not, are all there."""
        if not last:
            for block in blocks:
                self.gradients.park(block)
            return
        complete = []
        for block in blocks:
            self._left[block] -= 1
            if self._left[block] > 0:
                self.gradients.park(block)
            else:
                self.gradients.seal(block)
                complete.append(block)
        self._update_now(complete)

    def _blocks_of(self, unit: int) -> Iterator[int]:
        spec = self.layout.units[unit]
        yield from spec.blocks
        for ids in spec.experts.values():
            yield from ids

    def begin_forward(self) -> None:
        """Wait for the updates of what is used outside of all units."""
        began = time.perf_counter()
        self.homes.begin_step()
        with self.shared.changed:
            rest = set(self.layout.rest)
            self.shared.wait_for(lambda: not rest & self.weights.stale, "the first updates")
        spent = time.perf_counter() - began
        self.clock.waiting += spent
        self.clock.updates += spent

    def end_backward(self) -> None:
        """Backward is through: seal what no unit has sealed (parameters outside of units, units
        that did not run)."""
        self.homes.land()
        self._left = self._uses()
        if not self.last_micro_batch:
            return
        late = [b for b in self.gradients.blocks() if not self.gradients.sealed(b)]
        for block in late:
            self.gradients.seal(block)
        self._update_now(late)

    def _update_now(self, blocks: Collection[int]) -> None:
        if self.in_backward is not None:
            self.torn = True
            now = [b for b in blocks if self.gradients.pieces(b)]
            self._check_first(now)
            self._update(now, self.in_backward, 1.0)
            limit = self.gradient_limit
            if limit is not None:
                with self.shared.changed, self.weights.idle():
                    self.shared.wait_for(
                        lambda: self.gradients.leaving_bytes() <= limit, "updates inside backward"
                    )

    def _check_first(self, blocks: Collection[int]) -> None:
        """Raise GradientError if one of these has had its update of this step: the rest of its
        gradient would be taken for another step's."""
        for block in sorted(self._updated.intersection(blocks)):
            name = self.layout.blocks[block].pieces[min(self.gradients.pieces(block))].param
            raise GradientError(
                f"more of the gradient of {name} comes after in_backward=True has made its update "
                f"of this step (some weights are those behind it by now: load the model again). "
                f"Several backward passes a step: all but the last go into "
                f"optimizer.accumulating(). A loss of several forward passes, or of weights "
                f"themselves: drop in_backward=True. And call step() after each last backward"
            )
        self._updated.update(blocks)

    def step(self, group_of: Callable[[Piece], Group], max_norm: float = 0.0) -> StepResult:
        """Take a step with the gradients of the backward passes since the last one.

        With ``max_norm`` > 0 gradients are multiplied by max_norm / (norm + 1e-6) where that is
        below 1, as ``torch.nn.utils.clip_grad_norm_`` does. All hyper-parameters are read now; the
        updates run when they run.

        Raises:
            NotFinite: the norm is not a finite number. Nothing is updated.
        """
        norm = self.gradients.norm()
        if not math.isfinite(norm):
            bad = self.gradients.first_bad()
            raise NotFinite(f"the gradient norm is {norm}" + (f" (first in {bad})" if bad else ""))
        clip = 1.0
        if max_norm > 0:
            clip = min(1.0, max_norm / (norm + 1e-6))
        if self.in_backward is None:
            self._update(self.gradients.blocks(), group_of, clip)
        self.gradients.clear_sums()
        self.torn = False
        self._updated.clear()
        with self.shared.changed:
            self.order.end_step()
        if not self.skip_untouched:
            return StepResult(norm, clip)
        taken, self._experts_taken = self._experts_taken, 0
        return StepResult(norm, clip, taken, len(self._trained_experts) - taken)

    def _update(
        self, blocks: Collection[int], group_of: Callable[[Piece], Group], clip: float
    ) -> None:
        if self.skip_untouched:
            touched = sorted(blocks)
            self._experts_taken += len(self._trained_experts.intersection(touched))
        else:
            touched = self._with_siblings(blocks)
        layout = self.layout
        some = {layout.blocks[b].pieces[i].param for b in blocks for i in self.gradients.pieces(b)}
        jobs, taken = [], set()
        for index in touched:
            block = self.layout.blocks[index]
            have = self.gradients.pieces(index)
            steps = {}
            for i, piece in enumerate(block.pieces):
                if i not in have and (piece.expert is None or piece.param not in some):
                    continue  # not of this step: nothing of the parameter has a gradient
                taken.add(piece.param)
                factor = clip * self.gradients.factor(index, i)
                steps[i] = group_of(piece).step(self.steps.get(piece.param, 0) + 1, factor)
            self.gradients.hand_over(index)
            jobs.append(Job(index, steps))
        for name in taken:
            self.steps[name] = self.steps.get(name, 0) + 1
        self.updater.schedule(jobs)

    @functools.cached_property
    def _trained_experts(self) -> frozenset[int]:
        blocks = self.layout.blocks
        groups = [ids for unit in self.layout.units for ids in unit.experts.values()]
        return frozenset(b for ids in groups for b in ids if blocks[b].trained)

    def _with_siblings(self, blocks: Collection[int]) -> list[int]:
        """With an expert go all experts of its layer: of a fused parameter the resident optimizer
        has a gradient of zeros for those that no token went to, and their moments decay."""
        out = set(blocks)
        for unit in self.layout.units:
            for ids in unit.experts.values():
                if not out.isdisjoint(ids):
                    out.update(ids)
        return sorted(out)


__all__ = ["Stepping"]
