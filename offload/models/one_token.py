"""A MoE layer's experts for one token, in fewer steps than the eager loop takes.

transformers' loop finds out for each expert which tokens are its own, gathers them and adds the
results where they belong. With a single token there is nothing to find, gather or place, and of the
60 µs that an expert takes besides its products (twice that where weights have pushed Python out of
the caches) half is gone. What computes is the same: the same operators on tensors of the same
shapes, in the same order, so the bits are the same. That is shown for each class before it is used:
the operators of both are recorded and compared, and their results, too. A class whose loop does
anything else keeps its loop.

Several sequences that decode together bring a row each to the same layer (``together``): the loop
would look for each expert's rows, and a function mode would look at every step. Rows are sorted
once, and products are those that give each row the bits it has alone.

On a card the loop asks the host to wait twice for each expert (is it another rank's, which tokens
are its own); here nobody waits, as the routing has been heard of already.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from functools import partial
from typing import Any, Protocol

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from offload.models.expert_groups import ExpertGroup
from offload.models.expert_rows import ExpertRows
from offload.models.hybrid import StandIn, eager_loop, per_expert, width_in
from offload.models.single_rows import looked_at

TRIED = 8
"""Tokens with which a class is tried, one by one."""
SMALL = 16
"""What the greatest common divisor of a class's dimensions is made for that: its experts may be
hundreds of megabytes."""
DEVICES = ("cpu", "cuda")
SUMS = ("token", "weights", "float32")
"""Whose dtype the loop adds up in, before it rounds to the token's."""

ALIGNED = 64
"""Bytes: where torch puts what it allocates. Products of floats may depend on where they begin."""

POINTWISE = frozenset("silu sigmoid mul add sub neg clamp clamp_min clamp_max _to_copy".split())
"""Operators of a gate that treat each value by itself. All but the first two round as IEEE 754
says; those give a row its bits whatever is beside it, within ``WHOLE_VECTORS``, ``ONE_THREADS``."""
WHOLE_VECTORS, ONE_THREADS = 64, 32768
"""Values of a row: torch takes two vectors of 512 bits at a time, and what is left over by another
routine. And of a tensor: from so many on torch shares them among threads, in the middle of rows."""

PLACING = frozenset(
    "index index_add_ add_ zeros_like select slice unsqueeze split view alias clone".split()
)
"""Operators on numbers that only gather them or put them where they belong. Those add, too: that a
token's experts are added up in the same order is left to the results."""


class RowsApart(Protocol):
    """How a layer's code runs for rows of several sequences, each of which keeps its bits."""

    def multiply(self, x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor | None:
        """Every row's own product; None: not known for these."""
        ...

    def plain(self) -> AbstractContextManager[Any]:
        """What runs in it is known to leave rows' bits alone."""
        ...

    def watched(self) -> AbstractContextManager[Any]:
        """Within ``plain``: what runs in it is looked at again."""
        ...


class _InForce(threading.local):
    rows: RowsApart | None = None
    """In whose context the thread runs a layer."""


IN_FORCE = _InForce()


def rows_at_once(values: int, width: int) -> int:
    """How many rows of so many values may go through silu or sigmoid together, if ``width`` of them
    lie behind each other, for each to get what it gets alone; 0: that is not known."""
    return 0 if width % WHOLE_VECTORS or not values else max(1, (ONE_THREADS - 1) // values)


class OneToken:
    """The forward of a layer's experts module, called for one token at a time, or for one of each
    of several sequences."""

    def __init__(self, group: ExpertGroup) -> None:
        """Raises ValueError: its attributes are not those of transformers' experts."""
        self.heard: Callable[[torch.Tensor], list[int]] = lambda index_1k: index_1k[0].tolist()
        """The experts of a routing [1, k]."""
        self.linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.linear
        """What multiplies, with torch's bits."""
        self.at_once: ExpertRows | None = None
        """Experts in fewer products than two for each."""
        self.tokens_at_once = False
        """Whether those of single tokens are."""
        self._only: dict[torch.device, torch.Tensor] = {}
        module = group.module
        self._module = module
        self._n_experts = group.n_experts
        self._up = "gate_up_proj" if module.has_gate else "up_proj"
        moving = {p.places[0].attr for p in group.params}
        if moving != {self._up, "down_proj"}:
            raise ValueError(f"its weights are {', '.join(sorted(moving))}")
        self._transposed = bool(module.is_transposed)
        beside = per_expert(group)
        biases = {f"{name}_bias" for name in moving}
        if set(beside) != (biases if module.has_bias else set()):
            raise ValueError(f"it has {', '.join(beside)} beside them")
        self._biased = bool(beside)
        self.takes_rows = not (self._biased or self._transposed)
        """Whether its products may be ``at_once``."""
        self._gated = bool(module.has_gate)
        self.sums = SUMS[0]
        self.pointwise = False
        """Whether its gate is nothing but ``POINTWISE``."""
        self._inner = module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What stands for the module's own."""
        if self._takes(args, kwargs):
            named = self.heard(args[1])
            # What an expert means that is named twice, or is another rank's, the loop knows.
            if len({e for e in named if 0 <= e < self._n_experts}) == len(named):
                found = self._of_all(args[0], named, args[2]) if self.tokens_at_once else None
                return self(args[0], named, args[2], self._module) if found is None else found
        elif (apart := IN_FORCE.rows) is not None and self._takes(args, kwargs, several=True):
            found = self._together(args[0], args[1], args[2], apart)
            if found is not None:
                return found
        return self._inner(*args, **kwargs)

    def _takes(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, several: bool = False
    ) -> bool:
        """Whether a call is of one token, or of ``several``, on a known device, and wants no
        gradients."""
        if len(args) != 3 or kwargs or torch.is_grad_enabled():
            return False
        hidden, index, weights = args
        return (
            all(isinstance(t, torch.Tensor) and t.dim() == 2 for t in args)
            and (several or hidden.shape[0] == 1)
            and hidden.device.type in DEVICES
            and index.shape == weights.shape
            and index.shape[0] == hidden.shape[0]
            and not index.is_floating_point()
            and index.dtype != torch.bool
            and not torch.is_autocast_enabled(hidden.device.type)
            and getattr(self._module.config, "_experts_implementation", None) in (None, "eager")
        )

    def __call__(
        self,
        hidden_1H: torch.Tensor,
        named: Sequence[int],
        weights_1k: torch.Tensor,
        module: Any,
    ) -> torch.Tensor:
        """What the loop returns, [1, H].

        Args:
            hidden_1H: the token.
            named: k experts, no two alike.
            weights_1k: of each.
            module: who has the experts.
        """
        slots = {e: slot for slot, e in enumerate(named)}
        weight_11 = weights_1k.split(1, 1)
        # The loop gathers its token anew, and so where torch puts what it allocates.
        if not hidden_1H.is_contiguous() or hidden_1H.data_ptr() % ALIGNED:
            hidden_1H = hidden_1H.clone(memory_format=torch.contiguous_format)
        out_1H = self._no_sums(hidden_1H, weights_1k)
        # A card's adds with atomics, which may round otherwise; the processor's row by row.
        only = None if hidden_1H.device.type == "cpu" else self._index_of(hidden_1H.device)
        up, down = getattr(module, self._up), module.down_proj
        for expert in sorted(slots):
            inner = self._product(hidden_1H, up[expert])
            if self._biased:
                inner = inner + getattr(module, f"{self._up}_bias")[expert]
            inner = module._apply_gate(inner) if self._gated else module.act_fn(inner)
            found_1H = self._product(inner, down[expert])
            if self._biased:
                found_1H = found_1H + module.down_proj_bias[expert]
            found_1H = found_1H * weight_11[slots[expert]]
            if found_1H.dtype != out_1H.dtype:
                found_1H = found_1H.to(out_1H.dtype)
            if only is None:
                out_1H.add_(found_1H)
            else:
                out_1H.index_add_(0, only, found_1H)
        return out_1H if out_1H.dtype == hidden_1H.dtype else out_1H.to(hidden_1H.dtype)

    def _of_all(
        self, hidden_1H: torch.Tensor, named: Sequence[int], weights_1k: torch.Tensor
    ) -> torch.Tensor | None:
        """What ``__call__`` returns, of experts at once; None: that is not known to be it."""
        rows = self.at_once
        if (
            rows is None
            or not named
            or not rows.ready
            or hidden_1H.dtype != torch.bfloat16
            or looked_at()
        ):
            return None
        found = rows.token(hidden_1H.contiguous(), named, self._gate_apart)
        if found is None:
            return None
        order, found_kH = found
        slots = {e: slot for slot, e in enumerate(named)}
        weight_k1 = weights_1k.view(-1, 1)
        if order != list(named):
            weight_k1 = weight_k1.index_select(0, torch.tensor([slots[e] for e in order]))
        found_kH = found_kH * weight_k1
        out_1H = self._no_sums(hidden_1H, weights_1k)
        if found_kH.dtype != out_1H.dtype:
            found_kH = found_kH.to(out_1H.dtype)
        one_1H = found_kH.split(1)
        place = {e: i for i, e in enumerate(order)}
        for expert in sorted(order):
            out_1H.add_(one_1H[place[expert]])
        return out_1H if out_1H.dtype == hidden_1H.dtype else out_1H.to(hidden_1H.dtype)

    def _gate_apart(self, inner: torch.Tensor) -> torch.Tensor:
        """What stands between the products, of rows [U, N] that each get what they get alone."""
        found = self._gate_known(inner)
        if found is None:
            gate = self._gate
            found = torch.cat([gate(row) for row in inner.split(1)])
        return found

    def _gate_known(self, inner: torch.Tensor) -> torch.Tensor | None:
        """The same, of several rows at once; None: that may not leave them their bits."""
        width = inner.shape[1] // (1 + self._gated)
        most = rows_at_once(inner.shape[1], width) if self.pointwise else 0
        if not most:
            return None
        parts, gate = inner.split(most), self._gate
        return gate(inner) if len(parts) == 1 else torch.cat([gate(part) for part in parts])

    def _gate(self, inner: torch.Tensor) -> torch.Tensor:
        module: Any = self._module
        found: torch.Tensor = module._apply_gate(inner) if self._gated else module.act_fn(inner)
        return found

    def _together(
        self,
        hidden_TH: torch.Tensor,
        index_Tk: torch.Tensor,
        weights_Tk: torch.Tensor,
        apart: RowsApart,
    ) -> torch.Tensor | None:
        """What each of T tokens gets alone, [T, H]; None: that is not known."""
        if self._transposed or hidden_TH.device.type != "cpu":
            return None
        with apart.plain():
            named_Tk: list[list[int]] = index_Tk.tolist()
            uses: dict[int, list[int]] = {}
            for row, named in enumerate(named_Tk):
                if len({e for e in named if 0 <= e < self._n_experts}) != len(named):
                    return None
                for slot, expert in enumerate(named):
                    uses.setdefault(expert, []).append(row * len(named) + slot)
            order = sorted(uses)
            use_U = torch.tensor([use for expert in order for use in uses[expert]])
            counts = [len(uses[expert]) for expert in order]
            row_U = use_U.div(index_Tk.shape[1], rounding_mode="floor")
            weight_U1 = weights_Tk.reshape(-1, 1).index_select(0, use_U)
            out_TH = self._no_sums(hidden_TH, weights_Tk)
            first = 0
            with closing(self._parts(order, counts, hidden_TH, apart)) as parts:
                for count, multiply in parts:
                    row_m = row_U[first : first + count]
                    found_mH = multiply(hidden_TH.index_select(0, row_m))
                    if found_mH is None:
                        return None
                    found_mH = found_mH * weight_U1[first : first + count]
                    if found_mH.dtype != out_TH.dtype:
                        found_mH = found_mH.to(out_TH.dtype)
                    _add(out_TH, row_m, found_mH)
                    first += count
            return out_TH if out_TH.dtype == hidden_TH.dtype else out_TH.to(hidden_TH.dtype)

    def _parts(
        self, order: Sequence[int], counts: Sequence[int], hidden_TH: torch.Tensor, apart: RowsApart
    ) -> Generator[tuple[int, Callable[[torch.Tensor], torch.Tensor | None]]]:
        """Yields how many rows of experts, ascending, are computed next, and what computes them."""

        def gate(inner: torch.Tensor) -> torch.Tensor:
            found = self._gate_known(inner)
            if found is None:
                with apart.watched():
                    found = self._gate(inner)
            return found

        at_once = self.at_once
        if at_once is not None and at_once.ready and hidden_TH.dtype == torch.bfloat16:
            yield from at_once.several(order, counts, len(hidden_TH), gate)
            return
        for expert, count in zip(order, counts, strict=True):
            yield count, partial(self._of_rows, expert, apart=apart)

    def _of_rows(self, expert: int, x_mH: torch.Tensor, apart: RowsApart) -> torch.Tensor | None:
        """An expert's results, before they are weighed."""
        module: Any = self._module
        inner = apart.multiply(x_mH, getattr(module, self._up)[expert])
        if inner is None:
            return None
        if self._biased:
            inner = inner + getattr(module, f"{self._up}_bias")[expert]
        gated = self._gate_known(inner)
        if gated is None:
            with apart.watched():
                gated = self._gate(inner)
        found = apart.multiply(gated, module.down_proj[expert])
        if found is not None and self._biased:
            found = found + module.down_proj_bias[expert]
        return found

    def _no_sums(self, hidden_TH: torch.Tensor, weights_Tk: torch.Tensor) -> torch.Tensor:
        """Where the loop adds up, before it has: zeros [T, H]."""
        dtypes = hidden_TH.dtype, weights_Tk.dtype, torch.float32
        return torch.zeros_like(hidden_TH, dtype=dtypes[SUMS.index(self.sums)])

    def _index_of(self, device: torch.device) -> torch.Tensor:
        """That of the only token."""
        found = self._only.get(device)
        if found is None:
            found = self._only[device] = torch.zeros(1, dtype=torch.int64, device=device)
        return found

    def _product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight if self._transposed else self.linear(x, weight)


def _add(out_TH: torch.Tensor, row_m: torch.Tensor, found_mH: torch.Tensor) -> None:
    """Add to rows of ``out``, one after the other where there are several for one."""
    times: dict[int, int] = {}
    nth: list[list[int]] = []
    for at, row in enumerate(row_m.tolist()):
        n = times[row] = times.get(row, -1) + 1
        if n == len(nth):
            nth.append([])
        nth[n].append(at)
    for some in nth:  # each row is there once: what it has so far, and one sum more
        if len(some) == len(row_m):
            rows, part = row_m, found_mH
        else:
            at_m = torch.tensor(some)
            rows, part = row_m.index_select(0, at_m), found_mH.index_select(0, at_m)
        out_TH.index_copy_(0, rows, out_TH.index_select(0, rows).add_(part))


class _Recorder(TorchDispatchMode):
    """The operators that compute, with the shapes and dtypes of what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if name not in PLACING and any(t.is_floating_point() for t in tensors):
            others = [repr(a) for a in args if not isinstance(a, torch.Tensor)]
            said = tuple((tuple(t.shape), str(t.dtype)) for t in tensors)
            self.seen.append((str(func), said, tuple(others), repr(sorted((kwargs or {}).items()))))
        return func(*args, **(kwargs or {}))


def _steps(way: Callable[[], torch.Tensor]) -> list[tuple[Any, ...]]:
    """The operators that a computation takes."""
    with torch.no_grad(), _Recorder() as recorder:
        way()
    return recorder.seen


class Tried:
    """Which classes of experts can be taken so: each is tried once for each size and dtype."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[str, bool] | None] = {}

    def __call__(self, group: ExpertGroup) -> OneToken | None:
        """The way for one token; None: only the loop is known to be right."""
        try:
            found = OneToken(group)
        except (AttributeError, ValueError):
            return None
        shapes = [(p.places[0].attr, tuple(p.tensor.shape), p.tensor.dtype) for p in group.params]
        key = (type(group.module), *shapes)
        if key not in self._known:
            sums = next((sums for sums in SUMS if _same(group, found, sums)), None)
            self._known[key] = None if sums is None else (sums, _is_pointwise(group))
        if (known := self._known[key]) is None:
            return None
        found.sums, found.pointwise = known
        return found


def _is_pointwise(group: ExpertGroup) -> bool:
    """Whether what stands between an expert's products treats each value by itself."""
    module: Any = group.module
    dtype = group.params[0].tensor.dtype
    try:
        with torch.no_grad(), _Recorder() as recorder:
            if module.has_gate:
                module._apply_gate(torch.ones(1, 2 * WHOLE_VECTORS, dtype=dtype))
            else:
                module.act_fn(torch.ones(1, WHOLE_VECTORS, dtype=dtype))
    except Exception:  # noqa: BLE001  weights of its own, still on meta: it stays watched
        return False
    # Two of an operator's names: aten.mul.Tensor, aten.clamp_.default.
    return all(step[0].split(".")[1].rstrip("_") in POINTWISE for step in recorder.seen)


def _same(group: ExpertGroup, found: OneToken, sums: str) -> bool:
    """Whether single tokens on three small experts take the loop's operators, and come to its
    results, added up in the dtype of ``sums``."""
    found.sums = sums
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    moving = {p.places[0].attr: p.tensor for p in group.params}
    known = {**moving, **per_expert(group)}
    if any(t is not None and a not in known for a, t in group.module._parameters.items()):
        return False
    divisor = math.gcd(*(d for t in moving.values() for d in t.shape[1:]))
    used = list(range(min(3, group.n_experts)))

    def smaller(size: int) -> int:
        return size // divisor * SMALL if divisor > SMALL else size

    whole: Any = StandIn(group.module, {})
    for attr, t in known.items():
        shape = [smaller(d) for d in t.shape[1:]]
        whole.__dict__[attr] = [random(*shape, dtype=t.dtype).div(8) for _ in used]
    loop: Callable[..., torch.Tensor] = eager_loop(group)
    dtype = next(iter(moving.values())).dtype
    try:
        # Some routers weigh in float32, and some loops add up in the weights' dtype.
        for weighed in (dtype, torch.float32):
            for number in range(TRIED):
                hidden = random(1, smaller(width_in(group)), dtype=dtype)
                index = torch.randperm(len(used), generator=generator)[None]
                scores = random(1, len(used), dtype=weighed).abs()
                ours = partial(found, hidden, index[0].tolist(), scores, whole)
                theirs = partial(loop, whole, hidden, index, scores)
                # Listening takes several times as long as computing: one token says all.
                if number == 0 and _steps(ours) != _steps(theirs):
                    return False
                with torch.no_grad():
                    got, want = ours(), theirs()
                if got.dtype != want.dtype or not torch.equal(got, want):
                    return False
    except Exception:  # noqa: BLE001  any failure means: not this way
        return False
    return True


__all__ = ["IN_FORCE", "OneToken", "RowsApart", "Tried", "rows_at_once"]
