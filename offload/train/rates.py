"""What a step will cost on this machine, measured in a few seconds before anything is planned.

One unit of each kind is run forward, and forward and backward, on made-up weights in the run's own
shapes: the bound of matrix products alone leaves out a fifth. The disk is asked for reads and
writes at once, as updates do. What the two cost each other is ``beside``'s.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import os
import time
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from offload.io.engines import make_engine
from offload.io.files import DirectFile
from offload.io.memory import Staging
from offload.io.private import nameless_file, reserve
from offload.models.params import parameters
from offload.runtime.choice import Choice, link_rates, make_device, release_cached
from offload.runtime.device import Region, Stream
from offload.train.footprint import any_unit_calls
from offload.train.head_find import HeadForm
from offload.train.head_loss import ResidentHead, head_loss
from offload.train.head_weights import HEAD_ROWS
from offload.train.layout import TrainLayout, TrainUnit
from offload.train.made_experts import MadeExperts
from offload.train.packed_base import PackedBase
from offload.train.row_grads import RowGradient, taking_rows
from offload.train.stopwatch import SAMPLES, timed

logger = logging.getLogger(__name__)

COPIED_BYTES = 16 << 20
"""Of a copy over a device's link that is timed."""

ROUTER_ELEMENTS = 2**21
"""The largest matrix that is filled with random numbers: routers are no larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Computing:
    """Seconds of one micro-batch."""

    units: tuple[tuple[float, float], ...]
    """Each unit's forward, and forward and backward."""
    head: float
    """The loss by slices."""
    head_away: float | None
    """The same on the card; None: there is none."""
    sample: Sample | None
    """The kind of unit that takes most."""
    sample_s: float
    """Seconds of its forward and backward."""


class Site(NamedTuple):
    """Where something computes."""

    place: torch.device
    settle: Callable[[], object]
    """Wait for what was queued there."""


HOST = Site(torch.device("cpu"), lambda: None)


@contextlib.contextmanager
def card_site(choice: Choice) -> Iterator[Site]:
    """A card that computes; what torch keeps of its memory is given back behind it."""
    with contextlib.closing(make_device(choice, None)) as device:
        yield Site(device.torch_device, lambda: device.compute.record().wait())
    release_cached(choice)


def compute_seconds(
    model: Any, units: Sequence[nn.Module], form: HeadForm | None, rows: int, length: int,
    tables: Sequence[torch.Tensor] = (), away: Container[nn.Module] = (), card: Site | None = None,
    layout: TrainLayout | None = None, base: PackedBase | None = None,
) -> Computing | None:  # fmt: skip
    """How long each unit takes alone; None where a unit does not run on made-up inputs.

    ``tables``: parameters whose gradients from lookups leave by rows. ``away``: units that run on
    ``card``. ``layout``: experts in RAM come one by one, packed ones of ``base`` (with their
    unpacking) where there is one.
    """
    trained = {} if layout is None else {id(u.module): u for u in layout.units if u.groups}
    try:
        calls = any_unit_calls(model, list(units), rows, length)
        known: dict[Any, tuple[float, float]] = {}
        each: list[tuple[float, float]] = []
        sample: Sample | None = None
        most = sample_s = 0.0
        for unit in units:
            if id(unit) not in calls:
                each.append((0.0, 0.0))
                continue
            leaves, spec = tree_flatten(calls[id(unit)])
            shapes = tuple((tuple(x.shape), x.dtype) for x in leaves if torch.is_tensor(x))
            site = HOST if card is None or unit not in away else card
            key = type(unit), shapes, sum(p.nbytes for p in parameters(unit).values()), site.place
            if key not in known:
                mine = trained.get(id(unit)) if site is HOST else None
                real = Sample(unit, leaves, spec, tables, site, layout, mine, base)
                known[key] = real.seconds()
                alike = sum(type(u) is type(unit) for u in units)
                if (all_of_them := known[key][1] * alike) > most:
                    if sample is not None:
                        sample.close()
                    sample, most, sample_s = real, all_of_them, known[key][1]
                else:
                    real.close()
            each.append(known[key])
        head, head_away = 0.0, None
        if form is not None:
            shape = next(model.parameters()).dtype, rows * length
            head = _time_head(form, *shape, HOST)
            head_away = None if card is None else _time_head(form, *shape, card)
    except Exception as error:  # noqa: BLE001  a prediction must never stop a run
        logger.info("a step's computing cannot be measured: %s", error)
        return None
    return Computing(
        units=tuple(each), head=head, head_away=head_away, sample=sample, sample_s=sample_s
    )


class Sample:
    """A unit on made-up weights and inputs."""

    def __init__(
        self, unit: nn.Module, leaves: list[Any], spec: Any, tables: Sequence[torch.Tensor],
        site: Site = HOST, layout: TrainLayout | None = None, trained: TrainUnit | None = None,
        base: PackedBase | None = None,
    ) -> None:  # fmt: skip
        """``trained``: its experts come one by one, as they do in a run."""
        fused = () if layout is None or trained is None else _fused(trained)
        self._real = made_up(unit, fused).to(site.place)
        self._settle = site.settle
        self._by_rows = {
            id(now.weight): _drop
            for was, now in zip(unit.modules(), self._real.modules(), strict=True)
            if isinstance(now, nn.Embedding) and any(was.weight is table for table in tables)
        }
        self._grads = [isinstance(x, torch.Tensor) and x.is_floating_point() for x in leaves]
        self._inputs = [
            _real(x).to(site.place) if isinstance(x, torch.Tensor) else x for x in leaves
        ]
        self._spec = spec
        self._generator = torch.Generator().manual_seed(0)  # torch's own numbers are the run's
        self._experts: MadeExperts | None = None
        if layout is not None and trained is not None:
            self._experts = MadeExperts(layout, trained, self._real, base)

    def close(self) -> None:
        """Free the memory."""
        if self._experts is not None:
            self._experts.close()
            self._experts = None

    def _vary(self) -> None:
        """Other tokens: each layer and step sends other numbers of them to each expert, and each
        number is a product that may have to be compiled."""
        if self._experts is None:
            return
        at = next((i for i, moves in enumerate(self._grads) if moves), None)
        if at is not None:
            x = self._inputs[at]
            signs = torch.randint(0, 2, x.shape[-1:], generator=self._generator).to(x.dtype)
            self._inputs[at] = x * (2 * signs - 1)

    def _end(self) -> None:
        if self._experts is not None:
            self._experts.end()

    def forward(self) -> None:
        self._vary()
        with torch.no_grad():
            args, kwargs = tree_unflatten(self._inputs, self._spec)
            self._real(*args, **kwargs)
        self._settle()
        self._end()

    def both(self) -> None:
        """Forward and backward."""
        self._vary()
        fresh = [
            x.detach().requires_grad_() if g else x
            for x, g in zip(self._inputs, self._grads, strict=True)
        ]
        args, kwargs = tree_unflatten(fresh, self._spec)
        with torch.enable_grad(), taking_rows(self._by_rows):
            out, _spec = tree_flatten(self._real(*args, **kwargs))
        outs = [x for x in out if isinstance(x, torch.Tensor) and x.requires_grad]
        if outs:  # none of a frozen embedding's
            torch.autograd.backward(outs, [torch.ones_like(x) for x in outs])
        self._real.zero_grad()
        self._settle()
        self._end()

    def seconds(self) -> tuple[float, float]:
        """(forward, forward and backward)"""
        forward, both = timed(self.forward, self.both)
        return min(forward, both), both


def _fused(unit: TrainUnit) -> frozenset[str]:
    """Names of its fused experts' parameters in its module."""
    places = {
        (id(place.module), place.attr)
        for group in unit.groups for param in group.params for place in param.places
    }  # fmt: skip
    return frozenset(
        f"{path}.{name}" if path else name
        for path, module in unit.module.named_modules()
        for name in module._parameters
        if (id(module), name) in places
    )


def _drop(rows: RowGradient) -> None:
    del rows


def made_up(unit: nn.Module, fused: Collection[str] = ()) -> nn.Module:
    """A copy of a unit on meta with some weights. Small matrices are random: routers are among
    them, and equal rows would send all tokens to the same few experts, where real ones use most of
    them, each at a cost of its own. ``fused``: parameters that nobody looks at, which get no
    memory."""
    real: nn.Module = copy.deepcopy(unit).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)  # torch's own numbers are the run's
    with torch.no_grad():
        for name, tensor in (*real.named_parameters(), *real.named_buffers()):
            if name in fused:
                continue
            if not tensor.is_floating_point():
                tensor.zero_()
            elif tensor.dim() == 2 and tensor.numel() <= ROUTER_ELEMENTS:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.02)
            else:
                tensor.fill_(0.01)
    return real


def _real(like: torch.Tensor) -> torch.Tensor:
    if like.dtype == torch.bool:
        return torch.ones(like.shape, dtype=like.dtype)  # a mask that hides nothing
    if not like.is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype)
    # Of both signs: a common part would send most tokens to the same experts.
    generator = torch.Generator().manual_seed(0)
    return torch.randn(like.shape, generator=generator).to(like.dtype)


def _time_head(form: HeadForm, dtype: torch.dtype, tokens: int, site: Site) -> float:
    """Loss and gradients over a few slices, extended to all."""
    rows = min(form.vocabulary, 4 * HEAD_ROWS)
    weight, hidden = (torch.rand(n, form.width).to(site.place, dtype) for n in (rows, tokens))
    head = ResidentHead(weight, rows=HEAD_ROWS)
    labels = torch.zeros(tokens, dtype=torch.int64, device=site.place)

    def work() -> None:
        head_loss(hidden, labels, head, scale=1.0, transform=form.transform)
        site.settle()

    (seconds,) = timed(work)
    return seconds * form.vocabulary / rows


def copy_rates(choice: Choice) -> tuple[float, float]:
    """Bytes per second to a device and back: those that it simulates, or measured.

    Raises:
        OffloadError: the file of rates cannot be used.
    """
    if choice.rates is not None:
        return link_rates(choice.rates)
    device = make_device(choice, 2 * COPIED_BYTES)
    with contextlib.closing(device):
        host = device.host_memory(COPIED_BYTES, "sample")
        there = device.device_memory(COPIED_BYTES, "sample")
        here, away = (Region(memory, 0, COPIED_BYTES) for memory in (host, there))

        def rate(to: Region, of: Region, stream: Stream) -> float:
            times = []
            for _ in range(SAMPLES):
                began = time.perf_counter()
                device.copy(to, of, stream).wait()
                times.append(time.perf_counter() - began)
            return COPIED_BYTES / min(times)

        device.touch("host", here, "w")
        device.h2d.wait(device.signal("host"))
        up = rate(away, here, device.h2d)
        device.d2h.wait(device.h2d.record())
        return up, rate(here, away, device.d2h)


def disk_mix(
    directory: Path, *, request_bytes: int = 4 << 20, depth: int = 4, sample_bytes: int = 384 << 20
) -> tuple[float, float]:
    """Bytes per second of reads, and of writes, while both go on in turns."""
    slots = sample_bytes // request_bytes
    fd, _ = nameless_file(directory)
    try:
        reserve(fd, slots * request_bytes, os.fspath(directory))
    except BaseException:
        os.close(fd)
        raise
    file = DirectFile(fd, f"{directory}/(probe)")
    engine, staging = make_engine(queue_depth=depth), Staging(depth, request_bytes)
    noise = memoryview(os.urandom(request_bytes))
    spent = {"read": 0.0, "write": 0.0}

    def move(slot: int, what: str) -> None:
        with staging.chunk() as chunk:
            if what == "write":
                chunk.view[:] = noise
            began = time.perf_counter()
            (file.write if what == "write" else file.read)(slot * request_bytes, chunk.view)
            spent[what] += time.perf_counter() - began

    def run(jobs: Sequence[tuple[int, str]]) -> float:
        began = time.perf_counter()
        futures: list[Future[None]] = []
        for slot, what in jobs:
            futures.append(engine.submit(lambda s=slot, w=what: move(s, w)))  # type: ignore[misc]
        for future in futures:
            future.result()
        return time.perf_counter() - began

    try:
        run([(s, "write") for s in range(slots)])  # the first write of a block is no disk's rate
        spent.update(read=0.0, write=0.0)
        kinds = itertools.cycle(("read", "write"))
        seconds = run([(s, next(kinds)) for s in range(slots)])
    finally:
        engine.close()
        staging.close()
        file.close()
    nbytes = slots // 2 * request_bytes
    share = spent["read"] / (spent["read"] + spent["write"])
    return nbytes / (seconds * share), nbytes / (seconds * (1 - share))
