"""A MoE layer's own eager loop over experts that come one by one, and the guess of the next ones.

What the loop indexes (``self.gate_up_proj[e]``) is replaced by a proxy that fetches expert ``e``
when it is asked for, after the routing has announced all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from offload.errors import OffloadError, UnsupportedModelError
from offload.models.absent import WHOLE_MODEL
from offload.models.expert_groups import ExpertGroup
from offload.models.params import Param
from offload.models.streamed_forward import refuse_recorders
from offload.models.unit_hooks import replaced
from offload.runtime.executor import Executor
from offload.runtime.road import Conducting, Road
from offload.scheduler.policy import Scores

GUESS_ROWS = 4
"""Tokens at once up to which the next layer's experts are guessed: a prompt uses most of them."""

FEW_ROUTED = 4096
"""Places of a routing that are looked at in Python: sorting them where they are, and waiting for
how many are left, takes as long, on a card several times."""

IN_NUMPY = 1 << 19
"""Elements of a gate that NumPy multiplies, at most: 0.2 ms."""

Floats = npt.NDArray[np.float32]


class Progress:
    """How far one sequence has come in one MoE layer's run."""

    __slots__ = ("current", "held", "open", "views", "wanted")

    def __init__(self) -> None:
        self.current: str | None = None  # the expert that the eager loop is at
        self.views: dict[str, torch.Tensor] = {}
        self.open = False  # between routing and the layer's end
        self.wanted: list[int] = []
        self.held: list[str] = []


class ExpertSession:
    """One MoE layer's run: which expert the eager loop is at."""

    def __init__(
        self, executor: Executor, group: ExpertGroup, after: Sequence[ExpertGroup] = ()
    ) -> None:
        """``after``: the next layers, whose experts are guessed while this one runs."""
        self.executor = executor
        self.group = group
        self.runs: Callable[[], bool] = lambda: True
        """Whether the calling thread runs the model now."""
        self.heard: tuple[torch.Tensor, npt.NDArray[np.int64]] | None = None
        """A routing that lies on a device, and what it is."""
        self._after = after
        self._own = Progress()

    def _at(self) -> tuple[Road, Progress]:
        """Whom to ask, and how far the caller has come."""
        road = self.executor.road()
        if road is self.executor:
            return road, self._own
        return road, cast(Conducting, road).local(self, Progress)

    def begin(
        self,
        experts: list[int],
        hidden: torch.Tensor | Floats | None = None,
        scores: Scores | None = None,
        likely: Sequence[list[int]] | None = None,
    ) -> None:
        """The layer routes to ``experts``; ``hidden`` [..., H] is what they are applied to, and
        ``scores`` what its router says, for eviction policies that listen. ``likely``: of the next
        layers, if that is known already (``hear``)."""
        refuse_recorders()
        road, at = self._at()
        self._let_go(road, at)  # left by a Ctrl-C in the loop before
        at.open = True
        road.route(self.group.name, [self.group.blocks[e] for e in experts], scores)
        for i, after in enumerate(self._after):
            if likely is not None:
                best = likely[i]
            elif hidden is not None:
                best = guess(after, hidden, len(experts))
            else:
                break
            road.guess(after.name, [after.blocks[e] for e in best], far=i > 0)

    def hear(
        self, index: torch.Tensor | None, hidden: torch.Tensor | None
    ) -> tuple[list[int], list[list[int]] | None]:
        """The experts that a routing names, and, where it lies on a device, those that are guessed
        of the next layers: for both together the host waits once."""
        self.heard = None
        n = self.group.n_experts
        if index is None:
            return [], None
        if index.device.type == "cpu" or not 0 < index.numel() <= FEW_ROUTED:
            return experts_in(index, n), None
        count = index.numel()
        guesses = [
            None if hidden is None else likeliest(after, hidden, count) for after in self._after
        ]
        said = torch.cat([index.reshape(-1), *(g for g in guesses if g is not None)]).cpu().numpy()
        self.heard = index, said[:count].reshape(index.shape)
        experts = sorted({e for e in said[:count].tolist() if 0 <= e < n})
        likely: list[list[int]] = []
        for one in guesses:
            size = 0 if one is None else len(one)
            likely.append(said[count : count + min(size, len(experts))].tolist())
            count += size
        return experts, likely

    def row_heard(self, index_1k: torch.Tensor) -> list[int]:
        """The experts of a routing of one token; of one that lies on a device, as ``hear`` found
        them."""
        known = self.heard
        row = index_1k if known is None or known[0] is not index_1k else known[1]
        experts: list[int] = row[0].tolist()
        return experts

    def get(self, expert: int, name: str) -> torch.Tensor:
        """A tensor of an expert. The loop has finished with the one before it."""
        if not 0 <= expert < self.group.n_experts:
            raise IndexError(f"expert {expert} of {self.group.n_experts} in {self.group.name}")
        if not self.runs():
            raise OffloadError(
                f"{name} is streamed expert by expert; its data can be read only while its layer "
                f"runs. {WHOLE_MODEL}"
            )
        block = self.group.blocks[expert]
        road, at = self._at()
        if block != at.current:
            self._let_go(road, at)
            at.views = road.acquire(block)
            at.current = block
        return at.views[name]

    def batches_of(
        self, experts: Sequence[int], most: int
    ) -> Generator[tuple[list[int], npt.NDArray[np.int64]]]:
        """Yields experts of a layer that is under way, in order, and the addresses of their blocks:
        the next one, waited for, and those behind it that are there already, ``most`` at once.
        They are let go when the next ones are asked for."""
        road, mine = self._at()
        blocks = self.group.blocks
        held: list[str] = []
        at = 0
        try:
            while at < len(experts):
                self._let_go(road, mine)
                some = list(experts[at : at + most])
                names = [blocks[e] for e in some]
                found = road.acquire_run(names, most)
                held = mine.held = names[: len(found)]
                yield some[: len(found)], np.array(found, np.int64)
                at += len(found)
        finally:
            # A traceback that somebody keeps may keep this as well, until another run holds some.
            if mine.held is held:
                self._let_go(road, mine)

    def opened(self) -> None:
        """Somebody else has said what the layer routes to."""
        self._at()[1].open = True

    def let_go(self) -> None:
        """The loop has finished with the expert it was at."""
        self._let_go(*self._at())

    def end(self) -> None:
        road, at = self._at()
        self._let_go(road, at)
        if at.open:
            at.open = False
            road.end_route()

    def _let_go(self, road: Road, at: Progress) -> None:
        if at.current is not None:
            current, at.current, at.views = at.current, None, {}
            road.release(current)
        if at.held:
            held, at.held = at.held, []
            road.release_run(held)


class ExpertSource(Protocol):
    """Who has experts: an ``ExpertSession``, or training's run of a layer."""

    def get(self, expert: int, name: str) -> torch.Tensor:
        """Parameter ``name`` of one expert."""
        ...


class ExpertProxy:
    """What an experts module finds in place of a fused parameter ``[E, ...]``."""

    source: ExpertSource

    def __init__(self, session: ExpertSource, param: Param) -> None:
        """``param``: as it stands in its module now."""
        self.source = session
        self._name = param.name
        self._module, self._attr = param.places[0].module, param.places[0].attr
        self._stand_in: Any = self._module._parameters[self._attr]

    def check(self) -> None:
        """Raise OffloadError if the module has been given another parameter that its loop would not
        find: ``functional_call`` leaves this one in front of it, an assignment does not."""
        module, attr = self._module, self._attr
        if module.__dict__.get(attr) is self and module._parameters[attr] is not self._stand_in:
            refuse_recorders()  # torch.export puts others there for itself
            raise OffloadError(replaced(self._name))

    def __getitem__(self, key: Any) -> torch.Tensor:
        if isinstance(key, torch.Tensor) and key.dim() == 0:
            key = int(key)
        if isinstance(key, int):
            return self.source.get(key, self._name)
        return self._refuse(f"indexing with {key!r}")

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "dtype", "device", "ndim", "size", "dim", "is_meta"):
            return getattr(self._stand_in, name)
        return self._refuse(name)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._refuse(getattr(func, "__name__", str(func)))

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise OffloadError(
            f"{self._name} is streamed expert by expert: no module that holds it can be copied or "
            f"pickled; load the model a second time, save it with save_pretrained, or leave this "
            f"part out of what copies it (PEFT's modules_to_save)"
        )

    __reduce_ex__ = __deepcopy__

    def _refuse(self, what: str) -> Any:
        raise UnsupportedModelError(
            f"{self._name} is streamed expert by expert and {what} needs all experts at once; "
            f"leave the model's experts implementation \"eager\". PEFT's adapters of experts are "
            f"such a use, and in MoE models all-linear, gate_proj, up_proj and down_proj may mean "
            f"these: name other target_modules (q_proj), or train them with offload finetune "
            f"--method lora --lora-targets {self._name.rpartition('.')[2]}"
        )


def routing(args: Any, kwargs: Any, group: ExpertGroup) -> list[int]:
    """The experts routed to, ascending: the order in which every eager loop takes them."""
    index = routed_index(args, kwargs)
    return [] if index is None else experts_in(index, group.n_experts)


def routed_index(args: Any, kwargs: Any) -> torch.Tensor | None:
    """The routing among what an experts module is called with: integers."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            if value.dtype == torch.bool:
                continue
            return value
    return None


def experts_in(index: torch.Tensor, n_experts: int) -> list[int]:
    """The experts that a routing names, ascending."""
    if index.numel() > FEW_ROUTED:
        named = torch.unique(index).tolist()
    else:
        named = sorted(set(index.reshape(-1).tolist()))
    # Expert-parallel routing marks tokens of other ranks with index ``n_experts``.
    return [e for e in named if 0 <= e < n_experts]


def other_than_loop(group: ExpertGroup) -> str | None:
    """Why a group of a model that is in memory already cannot come one by one, whatever its loop
    can: the model was made to compute all experts at once, which rounds otherwise."""
    config = getattr(group.module, "config", None)
    chosen = getattr(config, "_experts_implementation", None)
    if chosen in (None, "eager"):
        return None
    return (
        f"the model's experts implementation is {chosen!r}, which takes all at once; with "
        f"model.set_experts_implementation('eager') before they come one by one"
    )


def check_expert_loop(group: ExpertGroup) -> str | None:
    """Try a group's eager loop on one token and expert 0; the reason if it cannot be streamed.

    Uses zeros without memory for the weights, and leaves the module as it was.
    """
    module = group.module
    params = {p.places[0].attr: p for p in group.params}
    transposed = bool(getattr(module, "is_transposed", False))
    first = params.get("gate_up_proj") or params.get("up_proj") or group.params[0]
    shape = first.tensor.shape
    width = int(shape[1] if transposed else shape[2])
    dtype = first.tensor.dtype
    touched: set[int] = set()

    class Probe:
        def __init__(self, like: torch.Tensor) -> None:
            self.like = like

        def __getitem__(self, key: Any) -> torch.Tensor:
            touched.add(int(key))
            return torch.zeros((), dtype=self.like.dtype).expand(self.like.shape[1:])

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            raise UnsupportedModelError(f"{func.__name__} on all experts at once")

    saved = dict(module._parameters)
    try:
        for attr, tensor in saved.items():
            if attr in params:
                module.__dict__[attr] = Probe(tensor)  # type: ignore[arg-type]
            elif tensor is not None:
                module._parameters[attr] = torch.zeros(tensor.shape, dtype=tensor.dtype)  # type: ignore[assignment]
        hidden = torch.zeros((1, width), dtype=dtype)
        index = torch.zeros((1, 1), dtype=torch.int64)
        weight = torch.ones((1, 1), dtype=dtype)
        loop: Any = type(module).forward.__wrapped__  # type: ignore[attr-defined]
        with torch.no_grad():
            out = loop(module, hidden, index, weight)
        if touched != {0}:
            return f"its loop touched experts {sorted(touched)} for a token routed to expert 0"
        if out.shape != hidden.shape:
            return f"its loop returned {tuple(out.shape)}"
    except Exception as error:  # noqa: BLE001  any failure means: not this way
        return f"{type(error).__name__}: {error}"
    finally:
        for attr in params:
            module.__dict__.pop(attr, None)
        module._parameters.update(saved)
    return None


def held_at_once(slots: int | None, top_k: int) -> int:
    """Experts that a layer holds together. ``slots``: of the cache; None: all are resident."""
    if slots is None:
        return 1 << 30
    # The rest are free for what is still on its way: the plan has one more than a token uses.
    return max(1, min(top_k, slots - 1))


def guess(group: ExpertGroup, hidden: torch.Tensor | Floats, n: int) -> list[int]:
    """The ``n`` experts that ``group`` is likeliest to use, best first, if its own input were
    ``hidden`` [..., H]; none for more than ``GUESS_ROWS`` tokens, or where its gate is unknown.

    The stale gate of Eliseev and Mazur (2023), "Fast Inference of Mixture-of-Experts Language
    Models with Offloading", section 3.2. Residual streams change slowly from layer to layer.
    """
    if (gate := _gate_for(group, hidden)) is None:
        return []
    weight_EH, biases, rows = gate
    # Each of torch's operators lets go of Python, and gets it back 60 us later where threads that
    # read want it, too: of a guess's 0.4 ms nearly all was that.
    if rows == 1 and not biases and (arrays := _in_numpy(weight_EH, hidden)) is not None:
        scores_E = np.einsum("eh,h->e", *arrays)
        best: list[int] = np.argsort(-scores_E)[:n].tolist()
        return best
    if not isinstance(hidden, torch.Tensor):
        hidden = torch.from_numpy(hidden)
    found = likeliest(group, hidden, n)
    assert found is not None
    best = found.tolist()
    return best


def likeliest(group: ExpertGroup, hidden: torch.Tensor, n: int) -> torch.Tensor | None:
    """``guess`` as int64 [n] where ``hidden`` lies; None instead of none."""
    if (gate := _gate_for(group, hidden)) is None:
        return None
    weight_EH, biases, rows = gate
    with torch.no_grad():
        shape = (rows, weight_EH.shape[1])
        rows_TH = hidden if hidden.shape == shape else hidden.reshape(shape)
        if rows_TH.dtype != weight_EH.dtype:
            rows_TH = rows_TH.to(weight_EH.dtype)
        scores_TE = F.linear(rows_TH, weight_EH)
        for name, bias_E in biases:
            # DeepSeek's balancing bias comes after the sigmoid, others' before the softmax.
            scores_TE = scores_TE.float()
            scores_TE = (scores_TE.sigmoid() if "correction" in name else scores_TE) + bias_E
        best_E = scores_TE[0] if rows == 1 else scores_TE.amax(0)
        return best_E.topk(min(n, group.n_experts)).indices


def _gate_for(
    group: ExpertGroup, hidden: torch.Tensor | Floats
) -> tuple[torch.Tensor, list[tuple[str, torch.Tensor]], int] | None:
    """A group's gate [E, H] and what it adds to the scores, if it can be applied to ``hidden``, and
    the tokens of that."""
    if group.gate is None:
        return None
    place = group.gate.places[0]
    weight_EH, width = place.module._parameters[place.attr], hidden.shape[-1]
    if weight_EH is None or weight_EH.shape[1] != width:
        return None
    rows = math.prod(hidden.shape) // width
    if not 0 < rows <= GUESS_ROWS:
        return None
    biases = [
        (name, bias_E)
        for name, bias_E in (*place.module._parameters.items(), *place.module._buffers.items())
        if bias_E is not None and bias_E.shape == weight_EH.shape[:1]
    ]
    return weight_EH, biases, rows


def _in_numpy(weight: torch.Tensor, hidden: torch.Tensor | Floats) -> tuple[Floats, Floats] | None:
    """A gate [E, H] and a token [H] for NumPy, which multiplies small ones without letting go of
    Python; None: it would take longer, or cannot."""
    if weight.numel() > IN_NUMPY or weight.dtype != torch.float32 or weight.device.type != "cpu":
        return None
    if isinstance(hidden, torch.Tensor):
        if hidden.dtype != torch.float32 or hidden.device.type != "cpu":
            return None
        hidden = hidden.detach().numpy()
    if weight.requires_grad:
        weight = weight.detach()
    return weight.numpy(), hidden.reshape(-1)


__all__ = [
    "GUESS_ROWS",
    "ExpertProxy",
    "ExpertSession",
    "ExpertSource",
    "Progress",
    "check_expert_loop",
    "experts_in",
    "guess",
    "likeliest",
    "other_than_loop",
    "routed_index",
    "routing",
]
