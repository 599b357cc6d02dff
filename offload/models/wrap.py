"""Stream a model that is already in memory, and give it back.

``wrap`` writes every block to a private nameless file (it vanishes with the process, whatever
kills it), frees the parameters and attaches the same hooks as a loaded checkpoint. Nothing of the
model is touched before everything is on disk. ``unwrap`` reads it all back into the very same
``Parameter`` objects.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from offload.blocks import DTYPE_BYTES, TENSOR_ALIGN, Tier
from offload.errors import ClosedError, OffloadError, PlanError, UnsupportedModelError
from offload.io.engines import make_engine
from offload.io.memory import Staging
from offload.io.pack import PackStore
from offload.io.store import Store
from offload.models import single_rows
from offload.models.absent import UNPACKED
from offload.models.attach import Attachment
from offload.models.expert_options import check_recordable, policy_of, recorder_of
from offload.models.freed import FreedParameter, filled, freed
from offload.models.handle import OffloadHandle
from offload.models.load import drop_unloopable, try_head
from offload.models.opening import make_device, rows_check
from offload.models.options import Options, Progress
from offload.models.params import Param, parameters
from offload.models.recipes import RoutedStore, spill_directory
from offload.models.refusals import held
from offload.models.request import expert_top_k, rows_of, staging_shape, trace_of
from offload.models.routing_tap import RoutingRecorder
from offload.models.single_rows import SingleRows
from offload.models.units import Cut, cut
from offload.runtime.choice import budget
from offload.runtime.collected import when_collected
from offload.runtime.executor import Executor
from offload.runtime.memory import HostMemory
from offload.runtime.rss import available_ram, current_rss
from offload.scheduler.plan import Plan
from offload.scheduler.planner import PlanRequest, make_plan
from offload.scheduler.trace import Trace

logger = logging.getLogger(__name__)


def wrap(
    model: nn.Module, options: Options, activations: int = 0, progress: Progress | None = None
) -> nn.Module:
    """Spill a resident model to ``options.disk`` and stream it from there, in place.

    Args:
        activations: bytes of the budget to leave for the model's own activations.

    Raises:
        OffloadError: the model is on another device, on meta, or wrapped already.
        PlanError: the budget is too small. StoreError: not enough space on disk.
        Whatever is raised, the model is as it was.
    """
    if not isinstance(model, nn.Module):
        raise OffloadError(
            f"offload.wrap takes a torch.nn.Module, not a {type(model).__name__}; offload.load "
            f"opens a checkpoint"
        )
    if isinstance(getattr(model, "offload", None), OffloadHandle):
        raise OffloadError("this model is streamed already; call offload.unwrap(model) first")
    if held(model):
        raise OffloadError(
            f"this {type(model).__name__} is a part of a model that is streamed already; call "
            f"offload.unwrap on that model first"
        )
    if options.choice.kind == "cuda":
        raise OffloadError(
            "a model that is already in memory is streamed on the CPU; for a card, save it with "
            "save_pretrained and call offload.load(path, gpu=...) on that"
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedModelError(
                f"{name or type(model).__name__} is a TorchScript module, whose weights are not "
                f"reached through Python; wrap the module that it was made from"
            )
    began = time.perf_counter()
    single = _multiplies_rows(model, options)
    baseline = current_rss()
    kept, notes = _keep(model)
    fits_whole = cut(model, stream_head=False, keep=kept)
    chosen, plan, head_rows, shape = _plan(model, fits_whole, options, activations, kept, notes)
    staging = Staging(*shape)
    engine = make_engine(queue_depth=options.queue_depth)
    pack: PackStore | None = None
    try:
        specs = [chosen.blocks[b] for b in chosen.blocks]
        pack = PackStore.create(spill_directory(options.disk), specs, engine, staging)
        _spill(chosen, pack, progress)
    except BaseException:
        if pack is not None:
            pack.close()
        engine.close()
        staging.close()
        raise
    # Everything is on disk: from here on the parameters' own memory can go.
    originals = _Originals(chosen)
    originals.free()
    gc.collect()
    store = RoutedStore([pack], engine, staging)
    executor: Executor | None = None
    recorder: RoutingRecorder | None = None
    try:
        recorder = recorder_of(options, chosen, type(model).__name__)
        executor = Executor(plan, store, make_device(options, plan.budgets.get(Tier.DEVICE)))
        executor.start((lambda d, t: progress("load", d, t)) if progress else None)
        attachment = Attachment(
            model,
            chosen,
            plan,
            executor,
            head_rows_verified=rows_check(head_rows, chosen.head),
            recorder=recorder,
            rows=SingleRows() if single else None,
        )
        attachment.take_loop()
    except BaseException:
        if recorder is not None:
            recorder.abandon()
        originals.restore(chosen, pack)
        if executor is not None:
            executor.close()
        else:
            store.close()
        raise
    handle = OffloadHandle(
        plan=plan,
        executor=executor,
        attachment=attachment,
        load_s=time.perf_counter() - began,
        baseline_rss=baseline,
        notes=tuple(notes + chosen.notes),
        originals=originals,
    )
    model.__dict__["offload"] = handle
    when_collected(model, executor.close)
    if recorder is not None:
        when_collected(model, recorder.close)
    return model


def unwrap(model: nn.Module) -> nn.Module:
    """Bring all weights back into memory, bit for bit, and remove every hook.

    After ``wrap`` the same ``Parameter`` objects hold the values again (gradients, optimizers and
    ties that refer to them stay valid); after ``load`` the model gets new ones.

    Raises:
        OffloadError: the model is not streamed, or is packed. ClosedError: it has been closed.
    """
    handle = getattr(model, "offload", None)
    if not isinstance(handle, OffloadHandle):
        raise OffloadError("this model is not streamed: there is nothing to unwrap")
    if handle.closed:
        raise ClosedError("this model has been closed: its weights are gone; load it again")
    if handle.packed:
        raise OffloadError(
            f"a packed model cannot be unwrapped: its weights are bytes for our kernels; {UNPACKED}"
        )
    chosen = handle.attachment.cut
    originals = handle.originals or _Originals(chosen)
    with handle.attachment.turn:  # not while another thread runs it
        with torch.inference_mode(False):  # what it makes would never be trained
            values = originals.read(chosen, handle.executor.store, handle.attachment.lasting)
        handle.attachment.detach()
        originals.put_back(values)
        handle.executor.close()
        handle.closed = True
        del model.__dict__["offload"]
    handle.attachment.publish()
    return model


def _multiplies_rows(model: nn.Module, options: Options) -> bool:
    """Whether tokens are multiplied by the kernel of ``single_rows``; it is there then."""
    half = [p for p in model.parameters() if p.dtype == torch.bfloat16]
    nbytes = sum(p.nbytes for p in half)
    if not single_rows.worth(nbytes, torch.bfloat16, options.choice.kind):
        return False
    single_rows.prepare()
    return True


def _keep(model: nn.Module) -> tuple[set[int], list[str]]:
    """Parameters that stay as they are, and checks that the rest can be moved."""
    kept: set[int] = set()
    notes: list[str] = []
    others: set[int] = set()
    shared = _in_one_memory(model)
    for param in parameters(model).values():
        tensor = param.tensor
        if any(held(place.module) for place in param.places):
            # Of a streamed model inside of this one: two would give it back in their own order.
            others.add(id(tensor))
            continue
        if is_lazy(tensor):
            raise OffloadError(
                f"{param.name} has no shape yet (a lazy module); run the model once on an example "
                f"before wrapping it"
            )
        if tensor.is_meta:
            raise OffloadError(
                f"{param.name} has no data (meta device); load the model's weights first, or use "
                f"offload.load on its checkpoint"
            )
        if tensor.device.type != "cpu":
            raise OffloadError(
                f"{param.name} is on {tensor.device}; move the model to the CPU before wrapping"
            )
        if isinstance(tensor, FreedParameter):
            raise OffloadError(
                f"{param.name} is a weight of another model, too, which is streamed; wrap one "
                f"module that has both models in it, or call offload.unwrap on the other first"
            )
        plain = type(tensor) in (nn.Parameter, torch.Tensor) and tensor.layout == torch.strided
        known = str(tensor.dtype).removeprefix("torch.") in DTYPE_BYTES
        as_it_lies = not (tensor.is_conj() or tensor.is_neg())
        if not (plain and known and as_it_lies and tensor.is_contiguous() and tensor.numel()):
            # Another memory layout selects other kernels, so its bits could change.
            kept.add(id(tensor))
    if kept:
        notes.append(f"{len(kept)} parameters of special layout or dtype stay resident")
    if shared := shared - kept - others:
        kept |= shared
        notes.append(f"{len(shared)} parameters that share memory with others stay resident")
    if others:
        notes.append(f"{len(others)} parameters belong to a model inside that is streamed already")
    return kept | others, notes


def _in_one_memory(model: nn.Module) -> set[int]:
    """Parameters that have bytes in common with another one, or with a buffer: a decoder's weight
    that is an encoder's, transposed. What is written to one is in the other; with memory of its
    own each, they would be two after ``unwrap``, and be trained apart."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    spans: list[tuple[int, int, int]] = []
    for key, tensor in tensors.items():
        plain = type(tensor) in (nn.Parameter, torch.Tensor) and tensor.layout == torch.strided
        if plain and tensor.device.type == "cpu" and tensor.numel():
            sizes = zip(tensor.shape, tensor.stride(), strict=True)
            last = sum((n - 1) * step for n, step in sizes)
            start = tensor.data_ptr()
            spans.append((start, start + (last + 1) * tensor.element_size(), key))
    found: set[int] = set()
    reach, holder = 0, 0
    for start, end, key in sorted(spans):
        if start < reach:
            found |= {key, holder}
        if end > reach:
            reach, holder = end, key
    return found & {id(p) for p in model.parameters()}


def _plan(
    model: nn.Module,
    whole: Cut,
    options: Options,
    activations: int,
    kept: set[int],
    notes: list[str],
) -> tuple[Cut, Plan, frozenset[int] | None, tuple[int, int]]:
    """The last: chunks of staging and their bytes."""
    ram = options.ram if options.ram is not None else int(available_ram() * 0.5)
    drop_unloopable(whole, notes)
    on_device = budget(options.choice, options.gpu, ram)
    top = Tier.RAM if on_device is None else Tier.DEVICE
    budgets = {Tier.RAM: ram}
    if on_device is not None:
        budgets[top] = on_device
    largest = max((s.slot_nbytes for s in whole.blocks.values()), default=4096)
    shape = staging_shape(options, largest, ram)
    reserves: dict[Tier, dict[str, int]] = {Tier.RAM: {"I/O staging": math.prod(shape)}}
    reserves.setdefault(top, {})["activations"] = activations
    total = sum(s.slot_nbytes for s in whole.blocks.values())
    chosen, head_rows = whole, None
    if total + sum(reserves[top].values()) > budgets[top] and hasattr(model, "config"):
        head_rows, slices = try_head(cut(model, stream_head=True, keep=kept), notes)
        chosen = cut(model, stream_head=slices, keep=kept)
        drop_unloopable(chosen, notes)
    config = getattr(model, "config", None)
    top_k = expert_top_k(config) if config is not None else 2
    blocks, by_row = rows_of(chosen)
    policy, hot = policy_of(options, chosen)
    check_recordable(options, chosen)
    request = PlanRequest(
        blocks=blocks,
        trace=Trace(trace_of(chosen)),
        experts={g.name: g.blocks for g in chosen.groups},
        top_k={g.name: min(top_k, g.n_experts) for g in chosen.groups},
        always=frozenset(chosen.resident),
        by_row=by_row,
        budgets=budgets,
        reserves=reserves,
        compute_tier=top,
        guesses=options.guess,
        expert_policy=policy,
        hot=hot,
    )
    try:
        return chosen, make_plan(request), head_rows, shape
    except PlanError:
        # A share of a larger budget is more than the least: what a smaller one was told would do
        # has to do.
        least = staging_shape(options, largest, 0)
        if least == shape:
            raise
    reserves[Tier.RAM]["I/O staging"] = math.prod(least)
    return chosen, make_plan(request), head_rows, least


def _spill(chosen: Cut, pack: PackStore, progress: Progress | None) -> None:
    specs = list(chosen.blocks.values())
    total = sum(s.nbytes for s in specs)
    done = 0
    scratch = HostMemory(max((s.slot_nbytes for s in specs), default=4096), "spill")
    pieces = _Pieces(chosen)
    try:
        for spec in specs:
            for tensor, param in zip(spec.tensors, chosen.params[spec.id], strict=True):
                value = pieces.of(spec.id, param.tensor.detach())
                into = scratch.tensor()[tensor.offset : tensor.offset + tensor.nbytes]
                into.copy_(value.reshape(-1).view(torch.uint8))
            pack.write_from(spec.id, scratch.view()[: spec.slot_nbytes]).result()
            done += spec.nbytes
            if progress:
                progress("spill", done, total)
    finally:
        scratch.close()


class _Pieces:
    """Which part of a parameter a block holds: all, one expert, or rows of the head."""

    def __init__(self, chosen: Cut) -> None:
        self._expert = {b: e for g in chosen.groups for e, b in enumerate(g.blocks)}
        self._rows: Mapping[str, tuple[int, int]] = (
            dict(zip(chosen.head.blocks, chosen.head.rows, strict=True)) if chosen.head else {}
        )

    def of(self, block: str, whole: torch.Tensor) -> torch.Tensor:
        if block in self._expert:
            return whole[self._expert[block]]
        if block in self._rows:
            a, b = self._rows[block]
            return whole[a:b]
        return whole


class _Originals:
    """A model's own parameters, while their data is elsewhere."""

    def __init__(self, chosen: Cut) -> None:
        unique = {id(p.tensor): p for params in chosen.params.values() for p in params}
        self._params: list[Param] = list(unique.values())
        self._shapes = [p.tensor.shape for p in self._params]
        self._dtypes = [p.tensor.dtype for p in self._params]

    def free(self) -> None:
        """Drop the data; the objects and their places stay known."""
        for param in self._params:
            meta = param.tensor.detach().to("meta")
            holder = param.tensor
            holder.data = torch.empty(0, dtype=holder.dtype, device="cpu")
            freed(holder, param.name)
            # Shapes are still asked for while the model is streamed.
            param.tensor = _Shape(holder, meta)  # type: ignore[assignment]

    def read(
        self,
        chosen: Cut,
        store: Store,
        lasting: Callable[[str], list[torch.Tensor] | None] = lambda _: None,
    ) -> list[torch.Tensor]:
        """All values, read from the store. Needs memory for the whole model.

        ``lasting``: of a block that is in memory instead, with what was changed there.
        """
        values = [
            _empty_at(param.phase, shape, dtype)
            for param, shape, dtype in zip(self._params, self._shapes, self._dtypes, strict=True)
        ]
        index = {p.name: i for i, p in enumerate(self._params)}
        largest = max((s.slot_nbytes for s in chosen.blocks.values()), default=4096)
        scratch = HostMemory(largest, "unwrap")
        pieces = _Pieces(chosen)
        try:
            for spec in chosen.blocks.values():
                if (here := lasting(spec.id)) is not None:
                    for param, value in zip(chosen.params[spec.id], here, strict=True):
                        at = index[param.name]
                        if value.shape == values[at].shape:
                            values[at].copy_(value)
                        else:  # as a program has sized it since: resize_token_embeddings
                            values[at] = value.clone()
                    continue
                store.read_into(spec.id, scratch.view()[: spec.slot_nbytes]).result()
                for tensor, param in zip(spec.tensors, chosen.params[spec.id], strict=True):
                    raw = scratch.tensor()[tensor.offset : tensor.offset + tensor.nbytes]
                    target = pieces.of(spec.id, values[index[param.name]])
                    target.copy_(raw.view(target.dtype).view(target.shape))
        finally:
            scratch.close()
        return values

    def put_back(self, values: list[torch.Tensor]) -> None:
        """Give the parameters their data and put them where they belong."""
        recurrent: dict[int, nn.RNNBase] = {}
        for param, value in zip(self._params, values, strict=True):
            here = param.places[0].module._parameters[param.places[0].attr]
            if isinstance(param.tensor, _Shape):
                original = param.tensor.original
                filled(original)
                original.data = value
                if here is not None and here.requires_grad != param.tensor.requires_grad:
                    original.requires_grad_(here.requires_grad)  # as the program has said since
            else:
                trained = here is not None and here.requires_grad
                original = nn.Parameter(value, requires_grad=trained)
            for place in param.places:
                place.module._parameters[place.attr] = original  # type: ignore[assignment]
                if isinstance(place.module, nn.RNNBase):
                    recurrent[id(place.module)] = place.module
        # When all are back: a weight of these may be computed from others' (weight norm).
        for module in recurrent.values():
            module._init_flat_weights()

    def restore(self, chosen: Cut, pack: PackStore) -> None:
        """Undo ``free`` after a failed wrap."""
        self.put_back(self.read(chosen, pack))


def _empty_at(phase: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Memory that starts ``phase`` bytes behind a multiple of 64, as the original's did: in float32
    the model's results depend on it (see ``offload.models.units.cut``)."""
    if not phase:
        return torch.empty(shape, dtype=dtype, device="cpu")
    nbytes = shape.numel() * dtype.itemsize
    raw = torch.empty(nbytes + TENSOR_ALIGN, dtype=torch.uint8, device="cpu")
    start = (phase - raw.data_ptr()) % TENSOR_ALIGN
    return raw[start : start + nbytes].view(dtype).view(shape)


class _Shape:
    """What is still asked of a freed parameter: its shape, dtype and whether it is trained."""

    def __init__(self, original: torch.Tensor, meta: torch.Tensor) -> None:
        self.original = original
        self.shape = meta.shape
        self.dtype = meta.dtype
        self.requires_grad = original.requires_grad
        self._meta = meta

    def numel(self) -> int:
        return self._meta.numel()

    def element_size(self) -> int:
        return self._meta.element_size()

    def dim(self) -> int:
        return self._meta.dim()
