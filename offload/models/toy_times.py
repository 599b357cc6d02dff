"""What a family's code costs besides its weights: Python, dispatch, and the books of what is where.

Measured on the streamed toy, which has next to nothing to compute. But a toy's Python runs from the
processor's caches, and a model's does not: between any two of its lines, products pull megabytes of
weights through them. The same line then takes one and a half to two and a half times as long. So
the toy is run under *pressure*: before each of its products one of the model's size is computed
that nobody needs, and whose time is not counted.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from offload.cpu_ops.crowding import not_computing, read_times
from offload.models.expert_groups import expert_groups
from offload.models.experts import ExpertProxy, ExpertSession, ExpertSource
from offload.models.shadow import shadow
from offload.models.units import unit_modules
from offload.runtime.memory import HostMemory

TOKENS = 13
"""Decoded; the first ones do not count."""

AREA_BYTES = 32 << 20
WIDEST = 1024
"""Rows and columns of the largest product that nobody needs: more presses no harder."""
LAYER_MATRICES = 12
"""Squares of its width in a layer's weights: four for attention, eight for feed-forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Of a decoded token, in seconds; medians, since something else may have run meanwhile.

    ``layer_s``: one layer without its experts. ``expert_s``: one routed expert. ``fixed_s``: what
    ``generate`` adds besides the layers. ``token_s``: all of it, of which ``wait_s`` is spent
    waiting for ``blocks`` from disk. ``others_s``: processor time of the threads that fetch them.
    """

    layer_s: float = 0.0
    expert_s: float = 0.0
    fixed_s: float = 0.0
    token_s: float = 0.0
    wait_s: float = 0.0
    blocks: float = 0.0
    others_s: float = 0.0


class Pressure:
    """Products that push what Python needs out of the caches; ``spent_s`` is what they took."""

    def __init__(self, memory: HostMemory, dtype: torch.dtype, width: int) -> None:
        """In all of ``memory``; ``dtype`` of its matrices and of the model, ``width``: both sides
        of one."""
        numbers = memory.tensor().view(dtype)
        numbers.fill_(1 / 64)
        each = width * width
        matrices = numbers[: numbers.numel() // each * each].view(-1, width, width)
        self._x = torch.ones(1, width, dtype=dtype)
        self._turns = itertools.cycle(list(matrices))
        self.spent_s = 0.0

    def __call__(self, *_: Any) -> None:
        """One product."""
        began = time.perf_counter()
        nn.functional.linear(self._x, next(self._turns))
        self.spent_s += time.perf_counter() - began


class _Pressed:
    """Experts whose every weight comes with a product before it."""

    def __init__(self, source: ExpertSource, pressure: Pressure) -> None:
        self._source, self._pressure = source, pressure

    def get(self, expert: int, name: str) -> torch.Tensor:
        self._pressure()
        return self._source.get(expert, name)


@dataclass(frozen=True, slots=True)
class Like:
    """The model that a toy stands for.

    A small one, whose weights stay in the caches, presses as little as it does.
    """

    dtype: torch.dtype
    width: int
    layers: int

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype) -> Like:
        """By its config; where that does not say how wide it is: a large one."""
        text = config.get_text_config()
        width, layers = (getattr(text, name, None) for name in ("hidden_size", "num_hidden_layers"))
        return cls(
            dtype,
            min(width, WIDEST) if isinstance(width, int) and width > 0 else WIDEST,
            layers if isinstance(layers, int) and layers > 0 else WIDEST,
        )

    @property
    def area_bytes(self) -> int:
        """Of the matrices that press."""
        each = self.width**2 * self.dtype.itemsize
        return max(each, min(AREA_BYTES, LAYER_MATRICES * self.layers * each))


@contextmanager
def pressed(model: nn.Module, like: Like) -> Iterator[Pressure]:
    """A streamed toy whose products each come after one of the model that it stands for."""
    memory = HostMemory(like.area_bytes, "weights that press on the caches")
    try:
        pressure = Pressure(memory, like.dtype, like.width)
        proxies = [
            value
            for module in model.modules()
            for value in vars(module).values()
            if isinstance(value, ExpertProxy)
        ]
        hooks = [
            module.register_forward_pre_hook(pressure)
            for module in model.modules()
            if _multiplies(module)
        ]
        sources = [proxy.source for proxy in proxies]
        for proxy in proxies:
            proxy.source = _Pressed(proxy.source, pressure)
        sessions = {id(s): s for s in sources if isinstance(s, ExpertSession)}.values()
        undo = [shadow(s, "batches_of", _pressed(s.batches_of, pressure)) for s in sessions]
        try:
            yield pressure
        finally:
            for back in undo:
                back()
            for hook in hooks:
                hook.remove()
            for proxy, source in zip(proxies, sources, strict=True):
                proxy.source = source
            del pressure
    finally:
        memory.close()


def _pressed(batches_of: Callable[..., Iterator[Any]], pressure: Pressure) -> Callable[..., Any]:
    """Experts that come several at once, each of which is multiplied with twice."""

    def batches(*args: Any) -> Iterator[Any]:
        with closing(batches_of(*args)) as found:  # type: ignore[type-var]
            for some in found:
                for _ in range(2 * len(some[0])):
                    pressure()
                yield some

    return batches


def _multiplies(module: nn.Module) -> bool:
    """Whether it is one product with a matrix: ``Linear``, ``Conv1D``, a router."""
    weight = module._parameters.get("weight")
    return (
        weight is not None
        and weight.dim() == 2
        and not isinstance(module, nn.Embedding)
        and next(module.children(), None) is None
    )


def measure(model: Any, like: Like) -> Times:
    """Decode a few tokens of a streamed toy with a stopwatch on every layer and every fused experts
    module; without layers, or for a model that ends its answers at once: zeros."""
    with pressed(model, like) as pressure:
        watch = _Watch(model, pressure)
        try:
            return watch.tokens()
        finally:
            watch.close()


class _Watch:
    """Stopwatches on a toy."""

    def __init__(self, model: Any, pressure: Pressure) -> None:
        self._model, self._pressure = model, pressure
        self._spent = {"layer": 0.0, "experts": 0.0}
        self._routed = 0
        self._layers = [m for _, m in unit_modules(model)]
        self._hooks: list[Any] = []
        for module in self._layers:
            self._watch(module, "layer")
        for group in expert_groups(model):
            self._watch(group.module, "experts")

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _now(self) -> float:
        """Time that is the toy's own."""
        return time.perf_counter() - self._pressure.spent_s

    def _watch(self, module: nn.Module, what: str) -> None:
        began: list[float] = []

        def before(_: Any, args: Any) -> None:
            if what == "experts":
                self._routed += sum(a.unique().numel() for a in args if a.dtype == torch.int64)
            began.append(self._now())

        def after(_: Any, args: Any, output: Any) -> None:
            self._spent[what] += self._now() - began.pop()

        self._hooks.append(module.register_forward_pre_hook(before))
        self._hooks.append(module.register_forward_hook(after))

    def tokens(self) -> Times:
        """The medians over one answer's tokens, the first ones excepted."""
        stats = self._model.offload.executor.stats
        marks: list[list[float]] = []

        def mark() -> None:
            marks.append(
                [
                    self._now(), self._spent["layer"], self._spent["experts"], self._routed,
                    stats.stall_s, stats.read_blocks, _others_s(),
                ]
            )  # fmt: skip

        class Clock:
            def put(self, ids: torch.Tensor) -> None:
                mark()

            def end(self) -> None:
                pass

        self._model.generate(
            torch.ones((1, 4), dtype=torch.int64),
            max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0,
            streamer=Clock(),
        )  # fmt: skip
        # The first mark is the prompt's, the second comes when it has been read.
        found = [self._one(*pair) for pair in itertools.pairwise(marks[2:])]
        if not found or not self._layers:
            return Times()
        names = [f.name for f in fields(Times)]
        return Times(**{n: statistics.median(getattr(t, n) for t in found) for n in names})

    def _one(self, before: list[float], after: list[float]) -> Times:
        """One token."""
        token_s, layers_s, experts_s, routed, wait_s, blocks, others_s = (
            b - a for a, b in zip(before, after, strict=True)
        )
        return Times(
            layer_s=max(0.0, layers_s - experts_s) / max(1, len(self._layers)),
            expert_s=experts_s / routed if routed else 0.0,
            fixed_s=max(0.0, token_s - layers_s),
            token_s=token_s,
            wait_s=wait_s,
            blocks=blocks,
            others_s=others_s,
        )


def _others_s() -> float:
    """Processor time, so far, of our threads that fetch; 0 where the kernel does not say."""
    times = read_times()
    return sum(times[thread][0] for thread in not_computing() & times.keys()) / 1e9


__all__ = ["Like", "Pressure", "Times", "measure", "pressed"]
