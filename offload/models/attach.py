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
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from offload.blocks import Tier
from offload.errors import OffloadError
from offload.io.store import Span
from offload.models.absent import AbsentTensor, absent, row_table
from offload.models.expert_groups import ExpertGroup
from offload.models.expert_rows import ExpertRows
from offload.models.experts import ExpertProxy, ExpertSession, held_at_once, routed_index
from offload.models.host_products import HostProducts
from offload.models.hybrid import HybridExperts
from offload.models.inputs import take_inputs
from offload.models.one_token import OneToken, Tried
from offload.models.params import Param
from offload.models.refusals import refuse_changes
from offload.models.routing_tap import RouterTap, RoutingRecorder
from offload.models.shadow import shadow
from offload.models.single_rows import Blocks, SingleRows
from offload.models.streamed_forward import Turn, as_trained, refuse_recorders, stream_forward
from offload.models.torch_choices import keep_choices
from offload.models.unit_hooks import UnitHooks, refresh_flat_weights, replaced
from offload.models.units import Cut, HeadSlices, RowEmbedding, Unit
from offload.runtime.executor import Executor, Views
from offload.scheduler.plan import Plan
from offload.scheduler.policy import SCORED

if TYPE_CHECKING:
    from offload.models.packed_hybrid import HybridPacked

logger = logging.getLogger(__name__)

Undo = Callable[[], Any]
JoinHead = Callable[..., torch.Tensor | None]
"""``join(name, row, weight, bias=None)``: the row's product, or None."""


class Attachment:
    """The hooks of one streamed model. ``detach`` removes every trace of them."""

    def __init__(
        self,
        model: nn.Module,
        cut: Cut,
        plan: Plan,
        executor: Executor,
        *,
        head_rows_verified: Callable[[int, torch.dtype], bool] = lambda *_: True,
        recorder: RoutingRecorder | None = None,
        rows: SingleRows | None = None,
    ) -> None:
        """
        Args:
            head_rows_verified: whether slices of the LM head give the whole one's bits for so many
                rows in a dtype.
            recorder: gets what every MoE layer routes to; closed by ``publish``.
            rows: multiplies for single tokens, where the CPU computes; None: torch does.
        """
        self.model = model
        self.cut = cut
        self.plan = plan
        self.executor = executor
        self._head_rows_verified = head_rows_verified
        self._recorder = recorder
        self._undo: list[Undo] = []
        self._spoiled: list[str] = []
        """What has made views of memory useless: no unit runs any more."""
        self._units: list[UnitHooks] = []
        self._own_hooks: dict[int, set[int]] = {}
        """Numbers of hooks, by the identity of the module that they are on."""
        self._sessions: list[ExpertSession] = []
        self._one_token = Tried()
        self.join_head: JoinHead | None = None
        """Asked for a single row's product with a slice of the head, while several sequences run in
        turns; None: it is multiplied alone."""
        self.turn = Turn(self._let_go)
        """Of the thread that runs the model."""
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
        self.rows = rows
        if rows is not None:
            self._undo += rows.install(model)
        self._host: HostProducts | None = None
        if plan.sites is not None and plan.sites.blocks:
            self._host = HostProducts(executor, plan)
            self._host.attach(cut, self._undo)
        for unit in cut.units:
            self._hook_unit(unit)
        cached = plan.tiers[plan.compute_tier].slots > 0
        guesses = 0
        if plan.guesses and plan.split is None and cached:
            guesses = 2 if plan.compute_tier is Tier.RAM else 1
        for i, group in enumerate(cut.groups):
            self._hook_experts(group, cut.groups[i + 1 : i + 1 + guesses])
        if cut.head:
            self._hook_head(cut.head)
        if cut.embedding:
            self._hook_embedding(cut.embedding)
        self._undo += take_inputs(model, executor.device.torch_device)
        self._undo += keep_choices(model, self._own_hooks, lambda: executor.road() is not executor)
        self._stream_forwards()
        self._undo += refuse_changes(model, cut, executor.device.torch_device)

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

    def take_loop(self) -> None:
        """Have the model's ``generate``, if it is transformers' own, decode in
        ``generation.loop``."""
        if not hasattr(self.model, "generate") or "generate" in self.model.__dict__:
            return
        # Not above: a program that wraps a model of its own may have no transformers loaded.
        from offload.generation.loop import looped

        generate = looped(self.model)
        if generate is not None:
            self.on_detach(shadow(self.model, "generate", generate))

    def _let_go(self) -> None:
        """Give back what the calling thread holds: its run has ended in an error. torch runs no
        hooks after a Ctrl-C, and other layers may need the room before the same one comes again."""
        if self.executor.road() is not self.executor:
            return  # the conductor's, which knows what its sequences hold
        for session in self._sessions:
            session.end()
        for unit in self._units:
            unit.abandon()

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
                refresh_flat_weights(place.module)

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
        hooks = UnitHooks(unit, blocks, self.cut.params, self.executor, self._host, self._spoiled)
        self._units.append(hooks)
        self._hooks(unit.module, hooks.enter, hooks.leave)
        self._undo.append(shadow(unit.module, "forward", hooks.runs(unit.module)))

    def _hooks(self, module: nn.Module, before: Any, after: Any) -> None:
        # First of all: others' hooks may compute a weight from parameters (weight norm, pruning).
        first = module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        last = module.register_forward_hook(after, always_call=True)
        self._undo += [first.remove, last.remove]
        self._own_hooks.setdefault(id(module), set()).update((first.id, last.id))

    # -- experts --------------------------------------------------------------------------

    def _session(self, group: ExpertGroup, after: Sequence[ExpertGroup]) -> ExpertSession:
        return ExpertSession(self.executor, group, after)

    def _hook_experts(self, group: ExpertGroup, after: Sequence[ExpertGroup]) -> None:
        session = self._session(group, after)
        session.runs = lambda: self.turn.mine
        self._sessions.append(session)
        proxies = []
        for param in group.params:
            self._remove(param)
            proxies.append(ExpertProxy(session, param))
            # An instance attribute shadows the registered parameter of the same name.
            self._undo.append(shadow(group.module, param.places[0].attr, proxies[-1]))

        hybrid = self._hybrid(group, session)
        if hybrid is None and (one := self._one_token(group)) is not None:
            one.heard = session.row_heard
            self._serve_rows(one, group, session)
            self._undo.append(shadow(group.module, "forward", one.forward))
        scored = self.plan.expert_policy in SCORED
        recorder = self._recorder
        tap = RouterTap(group) if scored or recorder is not None else None
        if tap is not None:
            self._undo.append(tap.detach)

        def route(module: nn.Module, args: Any, kwargs: Any) -> None:
            for proxy in proxies:
                proxy.check()
            hidden = args[0] if args else kwargs.get("hidden_states")
            known = isinstance(hidden, torch.Tensor) and hidden.is_floating_point()
            said = tap.read(args, kwargs) if tap is not None else None
            if said is not None and recorder is not None:
                recorder.add(group.name, said)
            scores = said.rows(group.blocks) if said is not None and scored else None
            if hybrid is not None and hybrid.takes(args, kwargs):
                hybrid.begin(scores)
                return
            rows = hidden if known else None
            experts, likely = session.hear(routed_index(args, kwargs), rows)
            session.begin(experts, rows, scores, likely)

        def finish(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            session.end()

        first = group.module.register_forward_pre_hook(route, with_kwargs=True)
        last = group.module.register_forward_hook(finish, with_kwargs=True, always_call=True)
        self._undo += [first.remove, last.remove]

    def _serve_rows(self, one: OneToken, group: ExpertGroup, session: ExpertSession) -> None:
        """Have several experts multiplied in one go, and tokens by our kernel."""
        plan = self.plan
        if plan.compute_tier is not Tier.RAM:
            return
        if self.rows is not None:
            one.linear, one.tokens_at_once = self.rows.linear, True
        if not one.takes_rows:
            return
        pinned = group.blocks[0] in self._resident
        slots = None if pinned else plan.tiers[plan.compute_tier].slots
        most = held_at_once(slots, plan.top_k[group.name])
        specs = [plan.blocks[block] for block in group.blocks]
        first = [p.name for p in group.params if p.places[0].attr != "down_proj"]
        last = [p.name for p in group.params if p.places[0].attr == "down_proj"]
        with contextlib.suppress(ValueError):  # of another dtype, say: one by one
            blocks = Blocks() if self.rows is None else self.rows.blocks
            one.at_once = ExpertRows(session, specs, (first[0], last[0]), blocks, most)

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
        linear = F.linear if self.rows is None else self.rows.linear
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
            refuse_recorders()
            rows_in = x.numel() // width if width else 0
            kind = executor.device.torch_device.type
            cast = torch.is_autocast_enabled(kind)
            dtype = torch.get_autocast_dtype(kind) if cast else param.tensor.dtype
            if not self._head_rows_verified(rows_in, dtype):
                raise OffloadError(
                    f"the LM head is streamed in slices, and for {rows_in} rows at once slices "
                    f"are not bit-equal to the whole on this machine; raise the RAM budget by "
                    f"{param.nbytes / 2**20:.0f} MiB so that it stays whole, or use smaller batches"
                )
            stand_in = module._parameters.get("weight")
            if not isinstance(stand_in, AbsentTensor):
                raise OffloadError(replaced(param.name))
            out: torch.Tensor | None = None
            bias = module.bias
            road = executor.road()
            host = self._host if self._host is not None and self._host.takes(rows_in) else None

            def product(views: Views, x: torch.Tensor, *beside: torch.Tensor) -> torch.Tensor:
                weight = as_trained(views[param.name], stand_in._offload_trained)
                return linear(x, weight, *beside)

            join = self.join_head
            for (a, b), block, step, streamed in parts:
                beside = () if bias is None else (bias[a:b],)
                below = host is not None and block in host.blocks
                needed = () if below else (block,)
                ticket = road.enter(step, needed) if streamed else 0
                try:
                    if host is not None and below:
                        part = host.linear(block, product, (x, *beside), b - a)
                    else:
                        views = executor.views(block)
                        joined = None if join is None else join(step, x, views[param.name], *beside)
                        part = product(views, x, *beside) if joined is None else joined
                    if out is None:  # under autocast of another dtype than the input
                        out = part.new_empty((*x.shape[:-1], vocabulary))
                    out[..., a:b] = part
                finally:
                    if streamed:
                        road.leave(ticket, needed)
            assert out is not None
            return out

        self._undo.append(shadow(module, "forward", forward))

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
            refuse_recorders()
            out = torch.empty((len(rows), width), dtype=dtype, device="cpu")
            spans = [
                Span(start + row * row_bytes, i * row_bytes, row_bytes)
                for i, row in enumerate(rows)
            ]
            flat = out.view(torch.uint8).view(-1).numpy()
            executor.road().read_rows(block, spans, memoryview(cast(Any, flat)))
            return out.to(device)

        table = row_table(param.name, param.tensor, device, read)
        grad = param.tensor.requires_grad
        module._parameters["weight"] = nn.Parameter(table, requires_grad=grad)

    # -- forwards -------------------------------------------------------------------------

    def _stream_forwards(self) -> None:
        """Of the model, of what streams, and of whatever else one may call to run a part of it."""
        streams = [
            unit.module
            for unit in self.cut.units
            if unit.groups or not self._resident.issuperset(unit.blocks)
        ]
        if self.cut.head:
            streams.append(self.cut.head.module)
        found = {id(self.model), *map(id, streams)}
        inside = {id(m) for module in streams for m in module.modules()} - found
        for module in self.model.modules():
            lists = isinstance(module, (nn.ModuleList, nn.ModuleDict))
            if id(module) in inside or lists:
                continue
            if any(id(m) in found for m in module.modules()):
                self._undo.append(stream_forward(module, self.turn))


__all__ = ["Attachment"]
