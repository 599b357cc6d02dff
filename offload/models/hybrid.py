"""A MoE layer whose experts the device and the CPU compute at the same time.

The arithmetic stays the model's own: the class's eager loop, one expert at a time, here on the
tokens that are routed to it. Those the device computes see the weights in its slots, those the CPU
computes see them in RAM; their results are added up in ascending order of the experts, as the loop
does, so that who computed what changes no bit where both compute alike. That the loop can be taken
apart in this way is tried on a small example of each class before it is planned.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from offload.blocks import TENSOR_ALIGN, align_up
from offload.errors import OffloadError
from offload.models.expert_groups import ExpertGroup
from offload.models.experts import ExpertSession
from offload.models.options import Options
from offload.models.units import Cut
from offload.runtime.executor import Executor
from offload.scheduler.policy import Scores

ROWS = 32
"""Most tokens of a pass that the CPU shares in. A prompt's experts see many tokens each, for which
a copy up pays."""
TRIED = 64
"""Tokens with which a class is tried: other rounding gives the same single number now and then."""


class Rows:
    """Which tokens of a pass go to which expert."""

    __slots__ = ("of", "tokens")

    def __init__(self, index_Tk: torch.Tensor, n_experts: int) -> None:
        """``index_Tk``: int [T, k]; numbers from ``n_experts`` on are of no expert."""
        found: dict[int, tuple[list[int], list[int]]] = {}
        # By slot, then by token: the order in which the eager loop gathers its rows.
        for slot, experts in enumerate(zip(*index_Tk.tolist(), strict=True)):
            for token, expert in enumerate(experts):
                if 0 <= expert < n_experts:
                    tokens, slots = found.setdefault(expert, ([], []))
                    tokens.append(token)
                    slots.append(slot)
        self.of = dict(sorted(found.items()))
        self.tokens = index_Tk.shape[0]


class HybridExperts:
    """What stands for the forward of a layer's experts module."""

    def __init__(
        self, executor: Executor, group: ExpertGroup, session: ExpertSession, rows: int
    ) -> None:
        """``rows``: most tokens of a pass that is split."""
        self._executor = executor
        self._group = group
        self._session = session
        self._rows = rows
        self._inner: Callable[..., Any] = group.module.forward
        self._loop = eager_loop(group)
        self._names = tuple(inspect.signature(self._loop).parameters)[1:4]
        self._beside = tuple(per_expert(group))
        self._scores: Scores | None = None

    def takes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether this pass is split: a short one, of a single sequence."""
        inputs = _inputs(self._names, args, kwargs)
        alone = self._executor.road() is self._executor
        return alone and inputs is not None and inputs[0].shape[0] <= self._rows

    def begin(self, scores: Scores | None) -> None:
        """A pass that is split begins. ``scores``: what its router says of the experts."""
        self._session.end()  # left by a Ctrl-C in the loop before
        self._executor.abandon_cpu()
        self._scores = scores

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Route, compute on both sites, merge."""
        inputs = _inputs(self._names, args, kwargs)
        if inputs is None or not self.takes(args, kwargs):
            return self._inner(*args, **kwargs)  # type: ignore[no-any-return]
        hidden_TH, index_Tk, weights_Tk = inputs
        group, executor = self._group, self._executor
        rows = Rows(index_Tk, group.n_experts)
        name = group.blocks
        number = {name[e]: e for e in rows.of}

        def activations(experts: Sequence[str]) -> list[torch.Tensor]:
            # Looked up now: they come and go with their layer.
            live = [group.module._parameters[attr] for attr in self._beside]
            beside = [p[number[b]] for b in experts for p in live if p is not None]
            return [hidden_TH, weights_Tk, *beside]

        loads = {name[e]: len(tokens) for e, (tokens, _) in rows.of.items()}
        self._session.opened()  # before: what fails behind the routing has to be ended, too
        schedule, below = executor.split_route(group.name, loads, activations, self._scores)
        if schedule is None:
            return self._inner(*args, **kwargs)  # type: ignore[no-any-return]
        parts: dict[int, torch.Tensor] = {}
        device = hidden_TH.device
        try:
            extra = len(self._beside)
            for i, block in enumerate(schedule.cpu):
                e = number[block]
                beside = dict(zip(self._beside, below[2 + i * extra :], strict=False))
                work = partial(self._on_cpu, beside, below[0], below[1], rows.of[e])
                shape = (len(rows.of[e][0]), hidden_TH.shape[1])
                executor.on_cpu(block, work, shape, hidden_TH.dtype)
            for block in schedule.device:
                e = number[block]
                parts[e] = self._one(group.module, e, hidden_TH, weights_Tk, rows.of[e])
            self._session.let_go()
            for block in schedule.cpu:
                parts[number[block]] = executor.from_cpu(block)
            out_TH = torch.zeros_like(hidden_TH)
            for e, (tokens, _) in rows.of.items():
                out_TH.index_add_(0, torch.tensor(tokens, device=device), parts[e])
        finally:
            executor.abandon_cpu()
        return out_TH

    def _on_cpu(
        self,
        beside: Mapping[str, torch.Tensor],
        hidden_TH: torch.Tensor,
        weights_Tk: torch.Tensor,
        rows: tuple[list[int], list[int]],
        views: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        of = {p.places[0].attr: views[p.name] for p in self._group.params}
        stand_in = StandIn(self._group.module, {**of, **beside})
        # Number 0 of a layer that has one expert: the stand-in gives its weights for any number.
        return self._one(stand_in, 0, hidden_TH, weights_Tk, rows)

    def _one(
        self,
        module: Any,
        expert: int,
        hidden_TH: torch.Tensor,
        weights_Tk: torch.Tensor,
        rows: tuple[list[int], list[int]],
    ) -> torch.Tensor:
        """One expert on its tokens: [rows, H]."""
        device = hidden_TH.device
        tokens, slots = (torch.tensor(some, device=device) for some in rows)
        index = torch.full((len(tokens), 1), expert, dtype=torch.int64, device=device)
        return self._loop(  # type: ignore[no-any-return]
            module, hidden_TH[tokens], index, weights_Tk[tokens, slots, None]
        )


class StandIn:
    """The experts module as the CPU sees it: its code and settings, one expert's weights."""

    def __init__(self, module: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        self.__dict__.update({attr: _Any(tensor) for attr, tensor in tensors.items()})
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


class _Any:
    """A tensor under every number."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, key: Any) -> torch.Tensor:
        return self._tensor


def eager_loop(group: ExpertGroup) -> Any:
    """The class's own loop over experts: ``(module, hidden, index, weights)``."""
    return type(group.module).forward.__wrapped__  # type: ignore[attr-defined]


def per_expert(group: ExpertGroup) -> dict[str, torch.Tensor]:
    """Parameters with one row for each expert that do not move with it (biases)."""
    moving = {p.places[0].attr for p in group.params}
    return {
        attr: tensor
        for attr, tensor in group.module._parameters.items()
        if tensor is not None and attr not in moving and tensor.shape[:1] == (group.n_experts,)
    }


def split_rows(options: Options, cut: Cut, apart: Collection[str] = ()) -> int:
    """Most tokens of a pass whose experts both sites share; 0: the device computes all, unless
    asked otherwise: on a card the CPU rounds otherwise than the resident model does there.

    ``apart``: dense blocks that the CPU may have instead, see ``host_products``.

    Raises:
        OffloadError: asked for, and it cannot be.
    """
    check_shareable(options, cut, apart)
    if not options.hybrid or not cut.groups:
        return 0
    reason = check_apart(cut)
    if reason is None:
        return ROWS
    raise OffloadError(f"--hybrid cannot take effect: {reason}; drop it")


def check_shareable(options: Options, cut: Cut, apart: Collection[str]) -> None:
    """Raises OffloadError: there is nothing that two sites could share, and it was asked for."""
    if options.hybrid and not cut.groups and not apart:
        raise OffloadError(
            "--hybrid cannot take effect: this model has no experts that are streamed one by one, "
            "and no linear layers that could do with their weights elsewhere; drop it"
        )


def activation_bytes(groups: Sequence[ExpertGroup], top_k: int, itemsize: int) -> int:
    """Most bytes that ``ROWS`` tokens of a layer send between the sites."""
    most = 0
    for group in groups:
        width = width_in(group)
        used = min(ROWS * top_k, group.n_experts)
        rows = align_up(width * itemsize, TENSOR_ALIGN)
        down = ROWS * (rows + align_up(4 * top_k, TENSOR_ALIGN))
        for tensor in per_expert(group).values():
            # By its shape: of a model that runs, a bias may be an AbsentTensor.
            row = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
            down += used * align_up(row, TENSOR_ALIGN)
        most = max(most, down + ROWS * top_k * rows + used * TENSOR_ALIGN)
    return align_up(most)


def check_apart(cut: Cut) -> str | None:
    """Why a cut's experts cannot be computed one by one on two sites; None if they can."""
    seen: set[type] = set()
    for group in cut.groups:
        kind = type(group.module)
        if kind in seen:
            continue
        seen.add(kind)
        try:
            reason = _try_apart(group)
        except Exception as error:  # noqa: BLE001  any failure means: not this way
            reason = f"{kind.__name__}: {type(error).__name__}: {error}"
        if reason is not None:
            return reason
    return None


def _try_apart(group: ExpertGroup) -> str | None:
    """Tokens on two experts, by the loop and one by one. Weights are one random row for all rows,
    so that they take no memory; a token's outputs are then all one number, so it takes many."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    kind = type(group.module).__name__
    beside = per_expert(group)
    moving = {p.places[0].attr: p.tensor for p in group.params}
    known = {*moving, *beside}
    if other := [
        a for a, t in group.module._parameters.items() if t is not None and a not in known
    ]:
        return f"{kind} has {', '.join(other)} beside its experts"
    shapes = {**moving, **beside}
    dtype = next(iter(moving.values())).dtype
    weights: dict[str, list[torch.Tensor]] = {
        attr: [random(int(t.shape[-1]), dtype=t.dtype).div(8).expand(t.shape[1:]) for _ in range(2)]
        for attr, t in shapes.items()
    }
    hidden = random(TRIED, width_in(group), dtype=dtype)
    index = torch.tensor([[0, 1], [1, 0]]).repeat(TRIED // 2, 1)
    loop = eager_loop(group)

    class Both:
        def __init__(self, of: list[torch.Tensor]) -> None:
            self.of = of

        def __getitem__(self, key: Any) -> torch.Tensor:
            return self.of[int(key)]

    whole: Any = StandIn(group.module, {})
    whole.__dict__.update({attr: Both(of) for attr, of in weights.items()})
    rows = Rows(index, group.n_experts)
    # Some routers weigh in float32, and some loops add up in the weights' dtype.
    for weighed in (dtype, torch.float32):
        scores = random(TRIED, 2, dtype=weighed).abs()
        with torch.no_grad():
            want = loop(whole, hidden, index, scores)
            got = torch.zeros_like(hidden)
            for e, (tokens, slots) in rows.of.items():
                one = StandIn(group.module, {attr: of[e] for attr, of in weights.items()})
                at = torch.zeros(len(tokens), 1, dtype=torch.int64)
                part = loop(one, hidden[tokens], at, scores[tokens, slots][:, None])
                got.index_add_(0, torch.tensor(tokens), part)
        if not torch.equal(got, want):
            return f"{kind} is more than the sum of its experts"
    return None


def width_in(group: ExpertGroup) -> int:
    params = {p.places[0].attr: p for p in group.params}
    first = params.get("gate_up_proj") or params.get("up_proj") or group.params[0]
    transposed = bool(getattr(group.module, "is_transposed", False))
    return int(first.tensor.shape[1] if transposed else first.tensor.shape[2])


def _inputs(
    names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """A forward's hidden states [T, H], index [T, k] and weights [T, k], by the loop's ``names``
    for them; None if they are not that."""
    given = [*args, *(kwargs[n] for n in names[len(args) :] if n in kwargs)]
    if len(given) != 3 or len(args) + len(kwargs) != 3:
        return None
    if not all(isinstance(t, torch.Tensor) and t.dim() == 2 for t in given):
        return None
    hidden, index, weights = given
    if index.is_floating_point() or index.dtype == torch.bool or index.shape != weights.shape:
        return None
    if hidden.shape[0] != index.shape[0] or not hidden.is_floating_point():
        return None
    return hidden, index, weights


__all__ = ["ROWS", "HybridExperts", "Rows", "activation_bytes", "check_apart", "split_rows"]
