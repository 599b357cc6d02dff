"""A tiny model for the executor: blocks with known bytes, and a run that checks all of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from offload.blocks import BlockKind, BlockSpec, Tier, layout
from offload.io.files import TransferError
from offload.io.store import Receipt, Span, Store
from offload.io.stores import MemoryStore
from offload.io.wrappers import Wrapper
from offload.runtime.device import Device
from offload.runtime.executor import Executor
from offload.runtime.null_device import NullDevice
from offload.runtime.sim_device import SimDevice
from offload.scheduler.plan import Plan
from offload.scheduler.planner import PlanRequest, make_plan, minimum_budgets
from offload.scheduler.trace import Step, Trace

UNITS, PARTS, EXPERTS = 6, 2, 5
WATCHDOG_S = 30.0


class WrongBytesError(AssertionError):
    """Compute saw other bytes than the block's."""


class BrokenStore(Wrapper):
    """Reads of the blocks in ``broken`` fail; ``failed`` counts them."""

    def __init__(self, inner: Store, *broken: str) -> None:
        super().__init__(inner)
        self.broken = set(broken)
        self.failed = 0

    def _around(
        self,
        op: str,
        block_id: str,
        spans: Sequence[Span],
        buf: memoryview,
        start: Callable[[], Future[Receipt]],
    ) -> Future[Receipt]:
        if block_id not in self.broken:
            return start()
        self.failed += 1
        out: Future[Receipt] = Future()
        out.set_exception(
            TransferError(f"{op} of {len(spans)} tensors of {block_id} into {len(buf)}: bad sector",
                          path="disk", offset=0)
        )  # fmt: skip
        return out


@dataclass(frozen=True)
class Toy:
    """Six units of two blocks each; with ``experts``, every second unit routes to two of five."""

    blocks: Mapping[str, BlockSpec]
    contents: Mapping[str, bytes]
    plan: Plan

    @classmethod
    def make(
        cls, device: str, *, experts: bool = False, extra: int = 0, ram: int | None = None
    ) -> Toy:
        """On the smallest budgets plus ``extra`` bytes in each tier, or ``ram`` bytes of RAM."""
        blocks: dict[str, BlockSpec] = {}
        groups: dict[str, tuple[str, ...]] = {}
        steps = []
        for u in range(UNITS):
            ids = tuple(f"u{u}/{p}" for p in range(PARTS))
            blocks |= {b: layout(b, BlockKind.WEIGHT, [("w", "uint8", (5000,))]) for b in ids}
            group = f"g{u}" if experts and u % 2 else ""
            if group:
                groups[group] = tuple(f"{group}#{e}" for e in range(EXPERTS))
                for b in groups[group]:
                    blocks[b] = layout(b, BlockKind.EXPERT, [("w", "uint8", (4000,))], group)
            steps.append(Step(unit=f"u{u}", blocks=ids, group=group))
        top = Tier.DEVICE if device == "sim" else Tier.RAM
        tiers = [t for t in (Tier.RAM, Tier.DEVICE) if t <= top]

        def request(budgets: Mapping[Tier, int]) -> PlanRequest:
            return PlanRequest(
                blocks=blocks,
                trace=Trace(steps),
                experts=groups,
                top_k=dict.fromkeys(groups, 2),
                budgets=budgets,
                compute_tier=top,
            )

        least = minimum_budgets(request(dict.fromkeys(tiers, 2**30)))
        budgets = {t: n + extra for t, n in least.items()}
        plan = make_plan(request(budgets if ram is None else {**budgets, Tier.RAM: ram}))
        rng = random.Random(0)
        return cls(blocks, {b: rng.randbytes(s.nbytes) for b, s in blocks.items()}, plan)

    def store(self) -> MemoryStore:
        return MemoryStore(self.blocks.values(), self.contents)

    def device(self, seed: int = 0) -> Device:
        if self.plan.compute_tier is Tier.RAM:
            return NullDevice()
        return SimDevice(2**20, seed=seed, jitter_s=200e-6, watchdog_s=WATCHDOG_S)

    @contextmanager
    def open(self, store: Store | None = None, seed: int = 0, **kwargs: Any) -> Iterator[Executor]:
        """An executor that has loaded what is pinned; closed at the end."""
        executor = Executor(
            self.plan,
            store or self.store(),
            self.device(seed),
            **{"watchdog_s": WATCHDOG_S, **kwargs},
        )
        try:
            executor.start()
            yield executor
        finally:
            executor.close()

    def streamed(self, unit: int) -> list[str]:
        pinned = self.plan.tiers[self.plan.compute_tier].pinned
        return [b for b in (f"u{unit}/{p}" for p in range(PARTS)) if b not in pinned]

    def some_streamed(self) -> str:
        """A block that is read anew in each pass, used late in it."""
        return [b for u in range(UNITS) for b in self.streamed(u)][-1]

    def check(self, block: str, views: Mapping[str, torch.Tensor]) -> None:
        """Raise WrongBytesError unless compute sees the block's bytes."""
        if views["w"].numpy().tobytes() != self.contents[block]:
            raise WrongBytesError(block)

    def run(self, executor: Executor, passes: int = 3, *, seed: int = 0) -> None:
        """Use every unit as a model's hooks do, and look at every byte."""
        rng = random.Random(seed)
        order = [u for _ in range(passes) for u in range(UNITS)]
        self.run_units(executor, order, rng)

    def run_units(
        self, executor: Executor, units: Sequence[int], rng: random.Random | None = None
    ) -> None:
        rng = rng or random.Random(0)
        for u in units:
            blocks = self.streamed(u)
            ticket = executor.enter(f"u{u}", blocks)
            try:
                for block in blocks:
                    self.check(block, executor.views(block))
                if f"g{u}" in self.plan.groups:
                    self._route(executor, f"g{u}", sorted(rng.sample(range(EXPERTS), 2)))
            finally:
                executor.leave(ticket, blocks)

    def _route(self, executor: Executor, group: str, experts: list[int]) -> None:
        ids = [f"{group}#{e}" for e in experts]
        try:
            executor.route(group, ids)
            for block in ids:
                views = executor.acquire(block)
                try:
                    self.check(block, views)
                finally:
                    executor.release(block)
        finally:
            executor.end_route()
