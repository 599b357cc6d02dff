"""Carry a plan out: load what is pinned, start the executor, attach the hooks."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Container
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from offload.blocks import Tier
from offload.errors import OffloadError
from offload.io.engines import make_engine
from offload.io.memory import Staging
from offload.io.stores import RangeStore
from offload.models.attach import Attachment
from offload.models.expert_options import recorder_of
from offload.models.handle import OffloadHandle
from offload.models.head_check import ROWS_TRIED, verified_rows
from offload.models.meta import materialise_buffers, place_rest
from offload.models.options import Options, Progress
from offload.models.recipes import RoutedStore, TensorReader, convert_blocks, spill_directory
from offload.models.routing_tap import RoutingRecorder
from offload.models.sampling import check_tokens
from offload.models.shadow import shadow
from offload.models.teams import serve_team
from offload.models.units import HeadSlices
from offload.runtime import choice
from offload.runtime.collected import when_collected
from offload.runtime.device import Device
from offload.runtime.executor import Executor

if TYPE_CHECKING:
    from offload.models.prepared import Prepared


def make_device(options: Options, capacity: int | None) -> Device:
    """The device that the options name."""
    return choice.make_device(options.choice, capacity, options.seed or 0)


def open_prepared(prepared: Prepared, progress: Progress | None, wrap_store: Any) -> Any:
    options, meta, plan = prepared.options, prepared.meta, prepared.plan
    began = time.perf_counter()
    finish_model(meta.model, meta.directory)  # first: a file that is wrong costs nothing yet
    # Exactly what the plan has set aside.
    chunks = options.queue_depth
    staging = Staging(chunks, plan.reserves[Tier.RAM]["I/O staging"] // chunks)
    engine = (
        make_engine(options.engine, options.queue_depth)
        if options.engine
        else make_engine(queue_depth=options.queue_depth)
    )
    stores: list[Any] = []
    store: Any = None
    device: Device | None = None
    executor: Executor | None = None
    recorder: RoutingRecorder | None = None
    try:
        recorder = recorder_of(options, prepared.cut, meta.directory.resolve().name)
        reader = TensorReader(meta.index, engine, staging)
        try:
            materialise_buffers(meta.model, meta.mapping, reader.read)
            if prepared.recipes.convert:
                stores.append(
                    convert_blocks(
                        prepared.recipes.convert,
                        prepared.cut,
                        meta.mapping,
                        reader,
                        spill_directory(options.disk),
                        engine,
                        staging,
                        options.request_bytes,
                        (lambda d, t: progress("convert", d, t)) if progress else None,
                    )
                )
        finally:
            reader.close()
        files = [str(f) for f in meta.index.files]
        stores.append(
            RangeStore(
                files,
                prepared.recipes.direct,
                engine,
                staging,
                request_bytes=options.request_bytes,
            )
        )
        meta.index.check_unchanged()
        store = RoutedStore(stores, engine, staging)
        if wrap_store is not None:
            store = wrap_store(store)
        device = make_device(options, plan.budgets.get(Tier.DEVICE))
        place_rest(meta.model, device.torch_device)
        executor = Executor(plan, store, device, recorder=options.recorder)
        executor.start((lambda d, t: progress("load", d, t)) if progress else None)
        attachment = Attachment(
            meta.model,
            prepared.cut,
            plan,
            executor,
            head_rows_verified=rows_check(
                prepared.head_rows, prepared.cut.head, options.choice.name
            ),
            recorder=recorder,
            rows=prepared.single_rows,
        )
        attachment.take_loop()
    except BaseException:
        if recorder is not None:
            recorder.abandon()
        if executor is not None:
            executor.close()
        elif store is not None:
            store.close()
        else:
            for part in stores:
                part.close()
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
    )
    serve_caches(prepared, model, handle)
    serve_team(prepared.team, model, handle)
    model.__dict__["offload"] = handle
    when_collected(model, executor.close)
    if recorder is not None:
        when_collected(model, recorder.close)
    gc.collect()
    return model


def serve_caches(prepared: Prepared, model: Any, handle: OffloadHandle) -> None:
    """What the plan says of keys and values; on an error the handle is closed, and nothing is
    recorded."""
    try:
        _serve_blocks(prepared, model, handle)
        _serve_prompts(prepared, model, handle)
        if handle.kv is not None or handle.prompts is not None:
            _in_turn(model, handle)
    except BaseException:
        handle.attachment.abandon()  # an earlier recording of that name stays
        handle.close()
        raise


def _serve_blocks(prepared: Prepared, model: Any, handle: OffloadHandle) -> None:
    """Have the model generate with keys and values in blocks, if the plan says so."""
    kv, options = prepared.kv, prepared.options
    if kv is None:
        return
    from offload.kv.tiers import KvTiers

    tiers = KvTiers(
        model.config,
        ram=kv.ram_bytes,
        directory=spill_directory(options.disk),
        slot_bytes=kv.homes.slot_bytes,
        block_tokens=kv.need.block_tokens,
        context=kv.need.context,
        caches=options.sequences,
        engine=options.engine,
        queue_depth=options.queue_depth,
        in_place=kv.need.in_place,
        kind=kv.need.kind,
        tail_bytes=kv.need.tail_bytes or None,
        sequences=kv.need.sequences,
        keep=kv.need.keep,
    )
    if kv.need.in_place:
        from offload.models.block_attention import switch_on

        switch_on(model)
    tiers.serve(model, handle.attachment.on_detach)
    handle.kv, handle.make_cache, handle.end_cache = tiers, tiers.new_cache, tiers.release
    when_collected(model, tiers.close)


def _serve_prompts(prepared: Prepared, model: Any, handle: OffloadHandle) -> None:
    """Have the model generate with prefixes from the disk, if the plan says so."""
    if prepared.prompts is None:
        return
    from offload.models.prompt_reuse import PromptReuse

    options, capacity = prepared.options, None
    if handle.make_cache is not None and handle.kv is None:
        capacity = max(options.context, options.prompt_tokens or 0)
    prompts = PromptReuse(
        model, prepared.prompts, handle.new_cache, capacity, lean=handle.lean is not None
    )
    prompts.serve(handle.attachment.on_detach)
    handle.prompts = prompts
    when_collected(model, prompts.prefixes.close)


def _in_turn(model: Any, handle: OffloadHandle) -> None:
    """Have generations in several threads run one after the other: one cache is alive at a time."""
    inner, turn = model.generate, handle.attachment.turn

    @wraps(inner)
    def generate(*args: Any, **kwargs: Any) -> Any:
        with turn:
            return inner(*args, **kwargs)

    handle.attachment.on_detach(shadow(model, "generate", generate))


def finish_model(model: Any, directory: Path) -> None:
    """What ``from_pretrained`` does after loading: the checkpoint's generation settings."""
    if not (hasattr(model, "can_generate") and model.can_generate()):
        return
    if not (directory / "generation_config.json").is_file():
        return
    from transformers import GenerationConfig

    try:
        model.generation_config = GenerationConfig.from_pretrained(directory)
        check_tokens(model.generation_config)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        # Whatever transformers makes of a value of another kind.
        raise OffloadError(
            f"generation_config.json of {directory.name}: {error}; correct it, or move it "
            f"away to have transformers' defaults"
        ) from error


def rows_check(
    rows: Container[int] | None, head: HeadSlices | None, device: str = "cpu"
) -> Callable[[int, torch.dtype], bool]:
    """Whether slices of the LM head are bit-equal for a number of input rows in a dtype: the usual
    numbers were tried before the plan in the weights' own, any other (logits of a whole prompt,
    another dtype under autocast) is tried when it comes."""
    if rows is None or head is None:
        return lambda *_: True
    vocabulary, width = head.param.tensor.shape
    step = head.rows[0][1]
    known = {(m, head.param.tensor.dtype): m in rows for m in ROWS_TRIED}

    def verified(m: int, dtype: torch.dtype) -> bool:
        if (m, dtype) not in known:
            threads = torch.get_num_threads()
            phase = head.param.phase
            known[m, dtype] = m in verified_rows(
                vocabulary, width, dtype, step, threads, (m,), phase, device
            )
        return known[m, dtype]

    return verified
