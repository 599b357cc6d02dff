"""What an executor is asked about experts: who is needed, who is there, who computes them.

The other half of ``Executor``, whose lock and lanes these calls use.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Condition

import torch

from offload.runtime.cpu_site import CpuSite, Work
from offload.runtime.interrupts import Shield
from offload.runtime.stats import Stats
from offload.runtime.timeline import Story
from offload.runtime.transfers import Places, Transfers
from offload.runtime.waiting import Waiting
from offload.scheduler.policy import Scores
from offload.scheduler.residency import Instruction, Residency
from offload.scheduler.split import Schedule

Views = dict[str, torch.Tensor]
"""A block's tensors by name, on the device that computes; valid while the block is held."""


class ExpertCalls(ABC):
    """Of one thread, as ``Executor.enter`` and ``leave``."""

    stats: Stats
    story: Story | None
    _residency: Residency
    _transfers: Transfers
    _waiting: Waiting
    _shield: Shield
    _changed: Condition
    _cpu: CpuSite | None

    @property
    @abstractmethod
    def closed(self) -> bool: ...

    @abstractmethod
    def views(self, block: str) -> Views: ...

    @abstractmethod
    def _submit(self, todo: Sequence[Instruction]) -> None: ...

    @abstractmethod
    def _let_close(self) -> None: ...

    # -- experts --------------------------------------------------------------------------

    def route(self, group: str, experts: Sequence[str], scores: Scores | None = None) -> None:
        """A MoE layer needs these experts, in this order: start reading what is not there.
        ``scores``: what its router says of them, for eviction policies that listen."""
        with self._shield, self._changed:
            self._route(group, experts, scores, None)

    def _route(
        self,
        group: str,
        experts: Sequence[str],
        scores: Scores | None,
        loads: Mapping[str, int] | None,
    ) -> None:
        self._waiting.check_open()
        self._waiting.forgive(experts)
        self.stats.host_waits["routing"] += 1
        self._submit(self._residency.route(group, experts, scores, loads))
        self._count_experts()

    def _count_experts(self) -> None:
        self.stats.hits = self._residency.hits
        self.stats.misses = self._residency.misses
        self.stats.guessed, self.stats.guessed_right = self._residency.guessed

    # -- experts that are there -----------------------------------------------------------

    @property
    def calm(self) -> int:
        """How many layers in a row were routed to experts that were all there; 0 while a timeline
        is recorded, which hears of each."""
        return self._residency.calm if self.story is None else 0

    def places(self, experts: Sequence[str]) -> Places:
        """Where a layer's experts lie, int64 [E], addresses in host memory, where compute runs; 0:
        not there. Kept up to date; to be relied on inside ``unasked``."""
        with self._changed:
            return self._transfers.places(experts)

    @contextmanager
    def unasked(self) -> Iterator[list[tuple[str, Sequence[str]]]]:
        """Inside, compute reads experts by their ``places``, and none of them leaves. To the list
        it adds the layers that it has run, and the experts that each has used, all there."""
        used: list[tuple[str, Sequence[str]]] = []
        begun = False
        try:
            with self._shield, self._changed:
                self._waiting.check_open()
                self._transfers.begin_unasked()
                self._residency.hold_all()
                begun = True
            yield used
        finally:
            if begun:
                with self._shield, self._changed:
                    self._transfers.end_unasked()
                    self._submit(self._residency.release_all_of(used))
                    self._count_experts()
                    self._let_close()

    def split_route(
        self,
        group: str,
        loads: Mapping[str, int],
        activations: Callable[[Sequence[str]], Sequence[torch.Tensor]],
        scores: Scores | None = None,
    ) -> tuple[Schedule | None, list[torch.Tensor]]:
        """As ``route``, with a choice of sites: who computes which expert, in which order.

        Args:
            loads: the experts, in the order of use, and tokens of each.
            activations: from the CPU's experts, if there are any, to what it needs for them.

        Returns:
            The schedule, or None if the device computes all, in the order of ``loads``; and the
            activations as the CPU will see them. Give it each of its experts with ``on_cpu``, in
            the schedule's order.
        """
        with self._shield, self._changed:
            self._route(group, tuple(loads), scores, loads)
            found = self._residency.schedule
        if self._cpu is None or found is None or not found.cpu:
            return None, []
        return found, self._cpu.send(activations(found.cpu))

    def compute_below(
        self, block: str, inputs: Sequence[torch.Tensor], work: Work, shape: Sequence[int]
    ) -> torch.Tensor:
        """``work(views, *inputs)`` with a dense block of ``Plan.sites`` on the CPU, of the dtype of
        the first input. The result is on the device until the next call.

        Raises:
            Exception: what computing it has raised.
        """
        cpu = self._cpu
        assert cpu is not None
        with self._shield:
            self._waiting.check_open()
            self.stats.cpu_products += 1
            if self.story is not None:
                self.story.waits(block)
            try:
                return cpu.compute(block, inputs, work, shape)
            finally:
                if self.story is not None:
                    self.story.goes_on()

    def on_cpu(self, expert: str, work: Work, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Have the CPU compute an expert; ``work``: from its tensors in RAM to a result."""
        assert self._cpu is not None
        with self._shield:
            self._cpu.submit(expert, work, shape, dtype)

    def from_cpu(self, expert: str) -> torch.Tensor:
        """The result of ``on_cpu``, on the device, until the next ``split_route``.

        Raises:
            StoreError, WatchdogError: as ``acquire``.
            Exception: what computing it has raised.
        """
        cpu = self._cpu
        assert cpu is not None
        with self._shield, self._changed:
            self._waiting.check_open()
            began = time.perf_counter()
            if cpu.pending(expert):
                self.stats.host_waits["cpu"] += 1
                if self.story is not None:
                    self.story.waits(expert)
                while cpu.pending(expert):
                    self._waiting.raise_failures([expert])
                    self._waiting.wait("an expert on the CPU", [expert], self._waiting.progress)
            self.stats.stall_s += time.perf_counter() - began
            self.stats.cpu_experts += 1
            if self.story is not None:
                self.story.goes_on()
        return cpu.take(expert)

    def abandon_cpu(self) -> None:
        """Results that have not been taken are not wanted."""
        if self._cpu is not None:
            with self._shield:
                self._cpu.abandon()

    def guess(self, group: str, experts: Sequence[str], *, far: bool = False) -> None:
        """The next MoE layer (``far``: the one after it) may need these experts, the likeliest
        first: read them if the disk has nothing else to do."""
        with self._shield, self._changed:
            self._waiting.check_open()
            self._submit(self._residency.guess(group, experts, far=far))

    def acquire(self, expert: str) -> Views:
        """Wait for a routed expert and hold it."""
        views: Views | None = None
        try:
            with self._shield, self._changed:
                self._waiting.check_open()
                self._await_expert(expert)
                self._transfers.begin_use((expert,))
                views = self.views(expert)
        except KeyboardInterrupt:
            if views is not None:  # at the shield's end: the caller does not know that it is held
                self.release(expert)
            raise
        return views

    def acquire_run(self, experts: Sequence[str], most: int) -> list[int]:
        """Wait for the first of some routed experts, and hold it and those behind it that are there
        already, ``most`` at once. Returns the addresses of the bundles held, in order: in host
        memory, until ``release_run``."""
        held: list[str] = []
        try:
            with self._shield, self._changed:
                self._waiting.check_open()
                first = experts[0]
                self._await_expert(first)
                held.append(first)
                for expert in experts[1:most]:
                    self._transfers.promote(expert)
                    if self._residency.where(expert) is None:
                        break
                    there, todo = self._residency.acquire(expert)
                    self._submit(todo)
                    if not there:
                        break
                    held.append(expert)
                self._transfers.begin_use(held)
                return [self._transfers.lease(expert).address for expert in held]
        except KeyboardInterrupt:
            if held:  # at the shield's end, as in ``acquire``
                self.release_run(held)
            raise

    def release_run(self, experts: Sequence[str]) -> None:
        """These experts have been used."""
        with self._shield, self._changed:
            self._transfers.end_use(experts)
            self._submit(self._residency.release_all(experts))
            self._let_close()

    def release(self, expert: str) -> None:
        """The expert has been used."""
        with self._shield, self._changed:
            self._transfers.end_use((expert,))
            self._submit(self._residency.release(expert))
            self._let_close()

    def end_route(self) -> None:
        """The MoE layer has finished or failed."""
        with self._shield, self._changed:
            if not self.closed:
                self._submit(self._residency.end_route())
            if self.story is not None:
                self.story.goes_on()

    def _await_expert(self, expert: str) -> None:
        """Hold a routed expert, as soon as it is there."""
        began = time.perf_counter()
        while True:
            seen = self._waiting.progress
            there, todo = self._residency.acquire(expert)
            self._submit(todo)
            if there:
                break
            if self._transfers.promote(expert) or self._transfers.promote_all():
                continue
            self.stats.host_waits["block"] += 1
            self._waiting.raise_failures([expert])
            if self.story is not None:
                self.story.waits(expert)
            self._waiting.wait("an expert", [expert], seen)
        self.stats.stall_s += time.perf_counter() - began
        if self.story is not None:
            self.story.expert(expert)


__all__ = ["ExpertCalls", "Views"]
