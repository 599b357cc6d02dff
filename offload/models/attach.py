"""Put a streamed model together: real parameters for what is pinned, hooks for what is not.

A unit's pre-hook waits for its blocks and puts views of them where the module looks for its
parameters; its post-hook takes them away again. Everything the model computes is its own code on
its own weights, so the results are bit-equal to the resident model's.

Fused experts keep their class's own eager loop as well; see ``experts``.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from offload.blocks import Tier
from offload.errors import OffloadError, UnsupportedModelError
from offload.io.store import Span
from offload.models.absent import absent, row_table
from offload.models.expert_groups import ExpertGroup
from offload.models.experts import ExpertProxy, ExpertSession, routing
from offload.models.host_products import HostProducts, tokens_of
from offload.models.hybrid import HybridExperts
from offload.models.inputs import take_inputs
from offload.models.params import Param
from offload.models.routing_tap import RouterTap, RoutingRecorder
from offload.models.shadow import shadow
from offload.models.units import Cut, HeadSlices, RowEmbedding, Unit
from offload.runtime.executor import Executor, Views
from offload.scheduler.plan import Plan
from offload.scheduler.policy import SCORED

if TYPE_CHECKING:
    from offload.models.packed_hybrid import HybridPacked

logger = logging.getLogger(__name__)

Undo = Callable[[], Any]


class Attachment:
    """The hooks of one streamed model. ``detach`` removes every trace of them."""

    def __init__(
        self,
        model: nn.Module,
        cut: Cut,
        plan: Plan,
        executor: Executor,
        *,
        head_rows_verified: Callable[[int], bool] = lambda _: True,
        recorder: RoutingRecorder | None = None,
    ) -> None:
        """``recorder``: gets what every MoE layer routes to; closed by ``publish``."""
        self.model = model
        self.cut = cut
        self.plan = plan
        self.executor = executor
        self._head_rows_verified = head_rows_verified
        self._recorder = recorder
        self._undo: list[Undo] = []
        self._spoiled = ""
        """What has made views of memory useless: no unit runs any more."""
        pinned = plan.tiers[plan.compute_tier].pinned
        self._resident = {b for b in plan.blocks if b in pinned}
        self._bound: set[str] = set()
        sliced = set(cut.head.blocks) if cut.head else set()
        for block, params in cut.params.items():
            if block in sliced or cut.blocks[block].group:
                continue
            if cut.embedding and block == cut.embedding.block:
                continue  # and if it is tied to a sliced head, the plan does not know it at all
            if block in self._resident:
                self._bind(block, params)
                self._bound.add(block)
            else:
                for param in params:
                    self._remove(param)
        self._host: HostProducts | None = None
        if plan.sites is not None and plan.sites.blocks:
            self._host = HostProducts(executor, plan)
            self._host.attach(cut, self._undo)
        for unit in cut.units:
            self._hook_unit(unit)
        cached = plan.tiers[plan.compute_tier].slots > 0
        guesses = plan.guesses and plan.split is None and cached
        for i, group in enumerate(cut.groups):
            last = i + 1 == len(cut.groups)
            self._hook_experts(group, cut.groups[i + 1] if guesses and not last else None)
        if cut.head:
            self._hook_head(cut.head)
        if cut.embedding:
            self._hook_embedding(cut.embedding)
        self._undo += take_inputs(model, executor.device.torch_device)
        self._without_grad(model)
        self._refuse_to_move(model)
        self._refuse_to_load(model)

    def lasting(self, block: str) -> list[torch.Tensor] | None:
        """Values of a block's parameters, in their order, if they are in RAM for good, where a
        program may have changed them; None: what was written is all there is."""
        if block not in self._bound or self.executor.plan.compute_tier is not Tier.RAM:
            return None
        places = [param.places[0] for param in self.cut.params[block]]
        found = [place.module._parameters[place.attr] for place in places]
        return [value.detach() for value in found if value is not None]

    def detach(self) -> None:
        """Remove hooks and proxies. Parameters are left to the caller."""
        while self._undo:
            self._undo.pop()()

    def on_detach(self, undo: Undo) -> None:
        """Have ``detach`` call ``undo``, before what was there already."""
        self._undo.append(undo)

    def publish(self) -> None:
        """Give what was recorded its name; the last thing to do, because it can fail.

        Raises:
            StoreError: the routing cannot be written.
        """
        if self._recorder is not None:
            self._recorder.close()

    def abandon(self) -> None:
        """Publish nothing: the model that was to be recorded has not been opened."""
        if self._recorder is not None:
            self._recorder.abandon()

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Inside, nothing is recorded: what runs is no use of the model."""
        if self._recorder is None:
            yield
            return
        self._recorder.paused = True
        try:
            yield
        finally:
            self._recorder.paused = False

    def bury(self) -> None:
        """Replace every parameter that lived in the arenas: their memory goes away."""
        for params in self.cut.params.values():
            for param in params:
                self._remove(param, closed=True)

    # -- parameters -----------------------------------------------------------------------

    def _bind(self, block: str, params: list[Param]) -> None:
        """Give a pinned block's parameters their memory for good."""
        views = self.executor.views(block)
        for param in params:
            real = nn.Parameter(views[param.name], requires_grad=param.tensor.requires_grad)
            for place in param.places:
                place.module._parameters[place.attr] = real
                _refresh_flat_weights(place.module)

    def _remove(self, param: Param, *, closed: bool = False) -> None:
        device = self.executor.device.torch_device
        stand_in = absent(param.name, param.tensor, device, closed=closed)
        for place in param.places:
            place.module._parameters[place.attr] = stand_in

    # -- units ----------------------------------------------------------------------------

    def _hook_unit(self, unit: Unit) -> None:
        blocks = tuple(b for b in unit.blocks if b not in self._resident)
        if not blocks:
            if (story := self.executor.story) is not None:
                self._hooks(
                    unit.module, lambda *_: story.begins(unit.name), lambda *_: story.ends()
                )
            return
        inside = set(map(id, unit.module.modules()))
        # (parameters dict, attribute, block, tensor name, flag): all a hook has to touch
        spots = [
            (place.module._parameters, place.attr, block, param.name, param.tensor.requires_grad)
            for block in blocks
            for param in self.cut.params[block]
            for place in param.places
            if id(place.module) in inside
        ]
        stand_ins = [parameters[attr] for parameters, attr, *_ in spots]
        # Embeddings that renormalise what they look up do so again with every use.
        exempt = {id(m._parameters) for m in unit.module.modules() if getattr(m, "max_norm", None)}
        watched = [spot[:4] for spot in spots if id(spot[0]) not in exempt]
        as_read: list[tuple[dict[str, Any], str, str, tuple[int, int, int]]] = []
        recurrent = [m for m in unit.module.modules() if isinstance(m, nn.RNNBase)]
        # Of the runs under way: whose, its ticket, and what it has been entered with.
        tickets: dict[object, tuple[int, tuple[str, ...]]] = {}
        above, host = self._without_host(blocks)
        bound = 0  # the ticket whose views are in place
        executor = self.executor

        def unbind() -> None:
            nonlocal bound
            bound = 0
            for (parameters, attr, *_), stand_in in zip(spots, stand_ins, strict=True):
                parameters[attr] = stand_in
            for rnn in recurrent:
                _refresh_flat_weights(rnn)
            tickets.clear()  # of a sequence that a Ctrl-C has ended

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal bound
            if self._spoiled:
                raise UnsupportedModelError(self._spoiled)
            road = executor.road()
            who = road.who()
            if who in tickets:
                # Left by a Ctrl-C in its forward: torch runs no hooks after one.
                leave(module, args, None)
            elif tickets and road is executor:
                raise UnsupportedModelError(
                    f"{unit.name} runs in two threads at once; a streamed model runs in one thread "
                    f"at a time"
                )
            few = host is not None and host.takes(tokens_of((*args, *kwargs.values())))
            needed = above if few else blocks
            ticket = road.enter(unit.name, needed, unbind)
            tickets[who] = ticket, needed
            if bound == ticket:
                return  # by another sequence
            bound = ticket
            views = {b: executor.views(b) for b in needed}
            for parameters, attr, block, name, grad in spots:
                if block in views:
                    # As in the resident model: torch picks kernels by this flag, also without grad.
                    parameters[attr] = views[block][name].requires_grad_(grad)  # type: ignore[assignment]
            for rnn in recurrent:
                _refresh_flat_weights(rnn)
            as_read[:] = [
                (parameters, attr, name, _mark(parameters[attr]))
                for parameters, attr, block, name in watched
                if block in views
            ]

        def changed() -> str | None:
            """A parameter that the forward has written to, or replaced."""
            for parameters, attr, name, mark in as_read:
                value = parameters[attr]
                if id(value) != mark[0] or _mark(value) != mark:
                    return name
            return None

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            # Also called after an error, and then possibly without an ``enter``.
            road = executor.road()
            entered = tickets.pop(road.who(), None)
            if entered is None:
                return
            name = changed() if bound == entered[0] and output is not None else None
            if road is executor:
                unbind()
            road.leave(*entered)
            if name is not None:
                self._spoiled = (
                    f"{unit.name} changes its own {name} while it runs; weights that come and go "
                    f"are as they were written, so the change would be lost. Raise the budget "
                    f"until all stay in memory, or run this model as it is (offload.unwrap)"
                )
                raise UnsupportedModelError(self._spoiled)

        self._without_grad(unit.module)
        self._hooks(unit.module, enter, leave)

    def _without_host(self, blocks: tuple[str, ...]) -> tuple[tuple[str, ...], HostProducts | None]:
        """What of a unit's blocks goes up when the CPU has its part, and who has it do so; None if
        it has none here."""
        host = self._host
        if host is None or host.blocks.isdisjoint(blocks):
            return blocks, None
        return tuple(b for b in blocks if b not in host.blocks), host

    def _hooks(self, module: nn.Module, before: Any, after: Any) -> None:
        first = module.register_forward_pre_hook(before, with_kwargs=True)
        last = module.register_forward_hook(after, always_call=True)
        self._undo += [first.remove, last.remove]

    # -- experts --------------------------------------------------------------------------

    def _session(self, group: ExpertGroup, after: ExpertGroup | None) -> ExpertSession:
        return ExpertSession(self.executor, group, after)

    def _hook_experts(self, group: ExpertGroup, after: ExpertGroup | None) -> None:
        session = self._session(group, after)
        for param in group.params:
            attr = param.places[0].attr
            self._remove(param)
            proxy = ExpertProxy(session, param, group.module._parameters[attr])
            # An instance attribute shadows the registered parameter of the same name.
            self._undo.append(shadow(group.module, attr, proxy))

        hybrid = self._hybrid(group, session)
        scored = self.plan.expert_policy in SCORED
        recorder = self._recorder
        tap = RouterTap(group) if scored or recorder is not None else None
        if tap is not None:
            self._undo.append(tap.detach)

        def route(module: nn.Module, args: Any, kwargs: Any) -> None:
            hidden = args[0] if args else kwargs.get("hidden_states")
            known = isinstance(hidden, torch.Tensor) and hidden.is_floating_point()
            said = tap.read(args, kwargs) if tap is not None else None
            if said is not None and recorder is not None:
                recorder.add(group.name, said)
            scores = said.rows(group.blocks) if said is not None and scored else None
            if hybrid is not None and hybrid.takes(args, kwargs):
                hybrid.begin(scores)
                return
            session.begin(routing(args, kwargs, group), hidden if known else None, scores)

        def finish(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            session.end()

        first = group.module.register_forward_pre_hook(route, with_kwargs=True)
        last = group.module.register_forward_hook(finish, with_kwargs=True, always_call=True)
        self._undo += [first.remove, last.remove]

    def _hybrid(
        self, group: ExpertGroup, session: ExpertSession
    ) -> HybridExperts | HybridPacked | None:
        """Have the CPU share in a layer's experts, if the plan says so."""
        split = self.plan.split
        if split is None:
            return None
        hybrid = HybridExperts(self.executor, group, session, split.rows)
        self._undo.append(shadow(group.module, "forward", hybrid))
        return hybrid

    # -- head and embedding ---------------------------------------------------------------

    def _hook_head(self, head: HeadSlices) -> None:
        module, param, executor = head.module, head.param, self.executor
        vocabulary, width = param.tensor.shape
        for place in param.places:
            place.module._parameters[place.attr] = absent(
                param.name, param.tensor, executor.device.torch_device
            )
        parts = [
            (rows, block, f"{head.name}#{i}", block not in self._resident)
            for i, (rows, block) in enumerate(zip(head.rows, head.blocks, strict=True))
        ]

        def forward(x: torch.Tensor) -> torch.Tensor:
            rows_in = x.numel() // width if width else 0
            if not self._head_rows_verified(rows_in):
                raise OffloadError(
                    f"the LM head is streamed in slices, and for {rows_in} rows at once slices "
                    f"are not bit-equal to the whole on this machine; raise the RAM budget by "
                    f"{param.nbytes / 2**20:.0f} MiB so that it stays whole, or use smaller batches"
                )
            out = x.new_empty((*x.shape[:-1], vocabulary))
            bias = module.bias
            road = executor.road()
            host = self._host if self._host is not None and self._host.takes(rows_in) else None

            def product(views: Views, x: torch.Tensor, *beside: torch.Tensor) -> torch.Tensor:
                weight = views[param.name].requires_grad_(param.tensor.requires_grad)
                return F.linear(x, weight, *beside)

            for (a, b), block, step, streamed in parts:
                beside = () if bias is None else (bias[a:b],)
                below = host is not None and block in host.blocks
                needed = () if below else (block,)
                ticket = road.enter(step, needed) if streamed else 0
                try:
                    if host is not None and below:
                        part = host.linear(block, product, (x, *beside), b - a)
                    else:
                        part = product(executor.views(block), x, *beside)
                    out[..., a:b] = part
                finally:
                    if streamed:
                        road.leave(ticket, needed)
            return out

        self._undo.append(shadow(module, "forward", forward))
        self._without_grad(module)

    def _hook_embedding(self, embedding: RowEmbedding) -> None:
        module, param, block = embedding.module, embedding.param, embedding.block
        if block in self._resident:
            views = self.executor.views(block)
            module._parameters["weight"] = nn.Parameter(
                views[param.name], requires_grad=param.tensor.requires_grad
            )
            return
        executor = self.executor
        device = executor.device.torch_device
        dtype, width = param.tensor.dtype, param.tensor.shape[1]
        row_bytes = width * param.tensor.element_size()
        (table_spec,) = executor.store.spec(block).tensors
        start = table_spec.offset

        def read(rows: Sequence[int]) -> torch.Tensor:
            out = torch.empty((len(rows), width), dtype=dtype)
            spans = [
                Span(start + row * row_bytes, i * row_bytes, row_bytes)
                for i, row in enumerate(rows)
            ]
            flat = out.view(torch.uint8).view(-1).numpy()
            executor.road().read_rows(block, spans, memoryview(cast(Any, flat)))
            return out.to(device)

        table = row_table(param.name, param.tensor, device, read)
        module._parameters["weight"] = nn.Parameter(table, requires_grad=False)

    # -- backward -------------------------------------------------------------------------

    def _without_grad(self, module: nn.Module) -> None:
        """Run a module's forward without autograd and make ``backward()`` through its output an
        error instead of a silent non-event. A graph would keep views of slots that other blocks
        fill next, and activations that no budget counts.

        Around ``forward`` and not in hooks: torch runs none after a Ctrl-C, and autograd would
        stay off for whatever the user does next.
        """
        inner: Callable[..., Any] = module.forward

        @wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return inner(*args, **kwargs)
            with torch.no_grad():
                output = inner(*args, **kwargs)
            return _guarded(output)

        self._undo.append(shadow(module, "forward", forward))

    def _refuse_to_move(self, model: nn.Module) -> None:
        """``to``, ``half``, ``cuda`` and ``save_pretrained`` would do half of it before they meet a
        weight that is not there. To where it is already (pipelines do that), the model may go."""
        device = self.executor.device.torch_device

        def apply(fn: Callable[[torch.Tensor], torch.Tensor], *_: Any, **__: Any) -> nn.Module:
            for dtype in {p.tensor.dtype for params in self.cut.params.values() for p in params}:
                probe = torch.empty(0, dtype=dtype, device=device)
                moved = fn(probe)
                if moved.dtype != dtype or moved.device != probe.device:
                    raise OffloadError(
                        f"a streamed model stays on {device} and in {dtype}; give dtype= and "
                        f"device= when you load it, or call offload.unwrap(model) first"
                    )
            return model

        def save_pretrained(*_: Any, **__: Any) -> None:
            raise OffloadError(
                "a streamed model cannot be saved: its weights are those of its checkpoint; call "
                "offload.unwrap(model) first if you have changed it"
            )

        def pickled(*_: Any) -> None:  # deepcopy asks for it, too
            raise OffloadError(
                "a streamed model cannot be copied or pickled, torch.save of all of it included; "
                "load it twice, or call offload.unwrap(model) first if it was wrapped"
            )

        replaced: dict[str, Callable[..., Any]] = {"_apply": apply, "__reduce_ex__": pickled}
        if hasattr(model, "save_pretrained"):
            replaced["save_pretrained"] = save_pretrained
        self._undo += [shadow(model, name, function) for name, function in replaced.items()]

    def _refuse_to_load(self, model: nn.Module) -> None:
        """``load_state_dict`` would overwrite what is in memory and then meet what is not.
        Adapters that were put on top load as ever."""
        params = [p for block in self.cut.params.values() for p in block]
        places = {(id(at.module), at.attr) for param in params for at in param.places}

        def refuse(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
            for path, inner in module.named_modules(prefix=prefix.removesuffix(".")):
                for attr in inner._parameters:
                    name = f"{path}.{attr}" if path else attr
                    if (id(inner), attr) in places and name in state:
                        raise OffloadError(
                            f"load_state_dict would change {name}, which is streamed: a streamed "
                            f"model's weights are those of its checkpoint; write the new ones as a "
                            f"checkpoint and load that, or call offload.unwrap(model) first"
                        )

        self._undo.append(model.register_load_state_dict_pre_hook(refuse).remove)


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise OffloadError(
            "backward through a streamed model: this one streams for inference, and no gradient "
            "would reach its weights. To train, use offload.load(path, train=True); for inference, "
            "torch.no_grad()"
        )


def _mark(value: Any) -> tuple[int, int, int]:
    """Differs if a lease's view was replaced, given other memory, or written to, unless through
    its ``.data``."""
    return id(value), value.data_ptr(), value._version


def _guarded(value: Any) -> Any:
    """The same structure, with every float tensor's backward an error."""
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point() or value.is_inference():
            return value
        anchor = torch.zeros((), dtype=value.dtype, requires_grad=True)
        return _NoBackward.apply(value, anchor)
    if isinstance(value, dict):  # ModelOutput is one, and must keep its class
        for key in list(value):
            if isinstance(value[key], torch.Tensor):
                value[key] = _guarded(value[key])
        return value
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_guarded(v) if isinstance(v, torch.Tensor) else v for v in value)
    return value


def _refresh_flat_weights(module: nn.Module) -> None:
    """Recurrent modules keep a list of their parameters beside them."""
    if isinstance(module, nn.RNNBase):
        names: list[str] = module._flat_weights_names
        module._flat_weights = [module._parameters.get(n) for n in names]  # type: ignore[misc]


__all__ = ["Attachment"]
