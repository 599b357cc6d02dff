"""Carry a plan for a packed model out."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from offload.blocks import Tier
from offload.cpu_ops.experts import ExpertLayout, TokenExperts
from offload.io.engines import make_engine
from offload.io.memory import AlignedBuffer, Staging
from offload.io.pack_manifest import Layout
from offload.models.absent import row_table
from offload.models.attach import Attachment
from offload.models.expert_groups import ExpertGroup
from offload.models.expert_options import recorder_of
from offload.models.experts import ExpertSession, held_at_once
from offload.models.handle import OffloadHandle
from offload.models.hybrid import Rows
from offload.models.lean_forward import take_over
from offload.models.lean_run import LeanRun
from offload.models.meta import materialise_buffers, place_rest
from offload.models.naming import model_name
from offload.models.opening import finish_model, make_device, serve_caches
from offload.models.options import Progress
from offload.models.pack_reader import PackedModel
from offload.models.packed_card import CardExperts, CardMerge, PackedCard, open_card, stand_in_on
from offload.models.packed_hybrid import HybridPacked, KernelMerge, Merge
from offload.models.packed_load import plain_tensor
from offload.models.packed_modules import (
    PackedExperts,
    PackedSession,
    expert_layout_of,
)
from offload.models.packed_reserves import MOST_TOGETHER, ROWS_BYTES
from offload.models.recipes import RoutedStore
from offload.models.routing_tap import RoutingRecorder
from offload.models.shadow import shadow
from offload.models.teams import serve_team
from offload.models.units import RowEmbedding
from offload.runtime.collected import when_collected
from offload.runtime.device import Device
from offload.runtime.executor import Executor

if TYPE_CHECKING:
    from offload.models.packed_load import PackedPrepared


class PackedAttachment(Attachment):
    """The hooks of a model that runs on packed weights."""

    def __init__(
        self, pack: PackedModel, *args: Any, card: PackedCard | None = None, **kwargs: Any
    ) -> None:
        """``card``: what computes, if the CPU does not."""
        self.pack = pack
        self._card = card
        self._token_calls: dict[tuple[ExpertLayout, int], TokenExperts] = {}
        super().__init__(*args, **kwargs)
        if self.cut.embedding is None:
            self._hook_table()  # tied to the head, or plain

    def _session(self, group: ExpertGroup, after: Sequence[ExpertGroup]) -> PackedSession:
        pinned = group.blocks[0] in self._resident
        at_once = self._at_once(group)
        session = PackedSession(self.executor, group, after, at_once=at_once, pinned=pinned)
        layout = expert_layout_of(self.pack.experts[group.name], group.module)
        kind = (layout, at_once)
        if self._card is not None:
            experts: PackedExperts | CardExperts = CardExperts(layout, session, self._card)
        else:
            if kind not in self._token_calls:
                self._token_calls[kind] = TokenExperts(layout, at_once)
            experts = PackedExperts(layout, session, self._token_calls[kind])
        self._undo.append(shadow(group.module, "forward", experts))
        return session

    def _hybrid(self, group: ExpertGroup, session: ExpertSession) -> HybridPacked | None:
        split = self.plan.split
        if split is None:
            return None
        assert isinstance(session, PackedSession)
        experts = group.module.__dict__["forward"]
        layout, card = experts.layout, self._card

        def merge(x: Any, index: Any, weights: Any, rows: Rows) -> Merge:
            if card is not None:
                return CardMerge(card, layout, x, index, weights, rows)
            return KernelMerge(layout, x, weights, rows)

        at_once = self._at_once(group)
        hybrid = HybridPacked(self.executor, group, session, layout, merge, split.rows, at_once)
        self._undo.append(shadow(group.module, "forward", hybrid))
        return hybrid

    def _at_once(self, group: ExpertGroup) -> int:
        """Experts of a layer that are held together."""
        pinned = group.blocks[0] in self._resident
        slots = None if pinned else self.plan.tiers[self.plan.compute_tier].slots
        return min(MOST_TOGETHER, held_at_once(slots, self.plan.top_k[group.name]))

    def _hook_embedding(self, embedding: RowEmbedding) -> None:
        self._hook_table()

    def _hook_table(self) -> None:
        """Rows of the embedding are decoded as they are looked up."""
        module = self.model.get_input_embeddings()  # type: ignore[operator]
        names = {m: path for path, m in self.model.named_modules()}
        name = f"{names[module]}.weight"
        if self.pack.tensors[name].part.layout is Layout.PLAIN:
            return
        rows = self.pack.rows(name)
        executor, nbytes = self.executor, rows.read_bytes
        together = max(1, ROWS_BYTES // nbytes)
        spare: list[AlignedBuffer] = []  # for one row: fresh memory costs more than the row

        def read_one(row: int) -> torch.Tensor:
            buffer = spare.pop() if spare else AlignedBuffer(nbytes)
            executor.road().read_rows(rows.block, [rows.span(row)], buffer.view)
            out = torch.from_numpy(rows.decode(row, buffer.view))
            spare.append(buffer)
            return out.view(1, -1).to(executor.device.torch_device)

        def read(wanted: Sequence[int]) -> torch.Tensor:
            if len(wanted) == 1:
                return read_one(wanted[0])
            out = torch.empty(len(wanted), rows.columns, dtype=torch.float32, device="cpu")
            with AlignedBuffer(min(together, len(wanted)) * nbytes) as buffer:
                for first in range(0, len(wanted), together):
                    some = wanted[first : first + together]
                    spans = [rows.span(row, i * nbytes) for i, row in enumerate(some)]
                    executor.road().read_rows(rows.block, spans, buffer)
                    for i, row in enumerate(some):
                        part = buffer[i * nbytes : (i + 1) * nbytes]
                        out[first + i] = torch.from_numpy(rows.decode(row, part))
                        part.release()
            return out.to(executor.device.torch_device)

        shape_only = torch.empty(rows.rows, rows.columns, dtype=torch.float32, device="meta")
        table = row_table(name, shape_only, executor.device.torch_device, read)
        module._parameters["weight"] = nn.Parameter(table, requires_grad=False)


def open_packed(prepared: PackedPrepared, progress: Progress | None, wrap_store: Any) -> Any:
    options, meta, plan = prepared.options, prepared.meta, prepared.plan
    began = time.perf_counter()
    finish_model(meta.model, meta.directory)  # first: a file that is wrong costs nothing yet
    chunks = options.queue_depth
    staging = Staging(chunks, plan.reserves[Tier.RAM]["I/O staging"] // chunks)
    engine = (
        make_engine(options.engine, options.queue_depth)
        if options.engine
        else make_engine(queue_depth=options.queue_depth)
    )
    store: Any = None
    device: Device | None = None
    executor: Executor | None = None
    recorder: RoutingRecorder | None = None
    try:
        recorder = recorder_of(options, prepared.cut, model_name(meta.directory))
        bundles = prepared.pack.store(engine, staging)
        store = RoutedStore([bundles], engine, staging)
        if wrap_store is not None:
            store = wrap_store(store)
        device = make_device(options, plan.budgets.get(Tier.DEVICE))
        stand_in_on(device.torch_device, meta.model)
        fill_resident(prepared, store, device.torch_device)
        card = open_card(device, prepared.pack, plan)
        executor = Executor(plan, store, device, recorder=options.recorder)
        executor.start((lambda d, t: progress("load", d, t)) if progress else None)
        attachment = PackedAttachment(
            prepared.pack, meta.model, prepared.cut, plan, executor, recorder=recorder, card=card
        )
        attachment.take_loop()
        if card is not None:
            card.take(meta.model, attachment.on_detach)
        make_cache = end_cache = run = None
        if prepared.lean.layers:
            tokens = max(options.context, options.prompt_tokens or 0)
            run = LeanRun(meta.model, prepared.lean, attachment, tokens, options.sequences)
            make_cache, end_cache = run.new_cache, run.release
            with executor.rehearsal():
                layers = list(prepared.lean.layers)
                take_over(meta.model, layers, make_cache, attachment, run.token, run.untouched)
    except BaseException:
        if recorder is not None:
            recorder.abandon()
        if executor is not None:
            executor.close()
        elif store is not None:
            store.close()
        else:
            engine.close()
            staging.close()
        if device is not None:
            device.close()
        raise
    model = meta.model
    handle = OffloadHandle(
        plan=plan,
        executor=executor,
        attachment=attachment,
        load_s=time.perf_counter() - began,
        baseline_rss=prepared.baseline_rss,
        notes=(*prepared.notes, *device.notes),
        make_cache=make_cache,
        end_cache=end_cache,
        lean=run,
        packed=True,
    )
    serve_caches(prepared, model, handle)
    serve_team(prepared.team, model, handle, kernels=True)
    model.__dict__["offload"] = handle
    when_collected(model, executor.close)
    if recorder is not None:
        when_collected(model, recorder.close)
    gc.collect()
    return model


def fill_resident(prepared: PackedPrepared, store: Any, place: torch.device) -> None:
    """Read what is plain, and give the model its norms, routers, biases and buffers, on the device
    that computes."""
    pack, model = prepared.pack, prepared.meta.model
    values: dict[str, torch.Tensor] = {}
    plain = {
        b.name: b
        for b in pack.manifest.blocks
        if not b.group and any(p.layout is Layout.PLAIN for p in b.parts)
    }
    for block in plain.values():
        with AlignedBuffer(block.spec().slot_nbytes) as buffer:
            store.read_into(block.name, buffer).result()
            for part in block.parts:
                raw = buffer[part.offset : part.offset + part.nbytes]
                values[part.name] = plain_tensor(raw, part.format, part.shape)
                raw.release()
    for alias, name in pack.manifest.aliases.items():
        if name in values:
            values[alias] = values[name]

    def convert(name: str, _read: Any) -> torch.Tensor:
        return values[name]

    mapping: Any = prepared.meta.mapping
    mapping.convert = convert
    materialise_buffers(model, mapping, None)
    for name, param in prepared.resident.items():
        real = nn.Parameter(values[name].to(place), requires_grad=False)
        for spot in param.places:
            spot.module._parameters[spot.attr] = real
    place_rest(model, place)
