"""``offload finetune``: from options to a plan, from the plan to steps, from steps to a model."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offload.errors import OffloadError, StoreError
from offload.io.checksum import xxh3
from offload.io.tile_store import TileStore, has_commits, is_tile_store, reserved
from offload.models.expert_groups import expert_groups
from offload.models.meta import MetaModel, build, pick_dtype, read_config, resolve
from offload.models.options import SAFE_SHARE
from offload.models.workspace import limit_kernels
from offload.runtime.heap import return_large_blocks, share_one_heap
from offload.runtime.rss import available_ram, current_rss, peak_rss, reset_peak_rss
from offload.train.causal import check_causal
from offload.train.checks import check_dtypes, check_options, state_directory
from offload.train.data.obstacles import packing_obstacle
from offload.train.data.opening import TrainData, open_data
from offload.train.decay import group_maker
from offload.train.engine import Engine, NotFinite
from offload.train.footprint import measure_training
from offload.train.head_find import HeadForm, find_head
from offload.train.identity import identity_of
from offload.train.layout import TrainLayout, lay_out
from offload.train.loop import HEAD_ROWS, LanguageLoop
from offload.train.lora import Adapters, inject
from offload.train.lora_output import MergedValues, write_adapter
from offload.train.merging import HeldReader
from offload.train.needs import loss_bytes, product_bytes, step_rates, sum_dtype
from offload.train.opening import EngineOptions, open_engine
from offload.train.options import TrainOptions
from offload.train.output import write_model
from offload.train.output_target import check_target
from offload.train.output_tensors import OutputTensors, check_writable
from offload.train.packed_base import Choice, PackedBase, choose_base, refuse_full
from offload.train.plan import (
    ORDERS,
    Needs,
    Prediction,
    TrainPlan,
    make_plan,
    predict,
    slot_bytes,
)
from offload.train.reports import (
    CommitReport,
    EndReport,
    EvalReport,
    Listener,
    StepReport,
    StepSums,
)
from offload.train.schedule import Schedule
from offload.train.spilling import KEPT, KeptInputs, best, input_sizes, plans
from offload.train.updates import Updater
from offload.train.warm import warm_training
from offload.units import format_bytes

logger = logging.getLogger(__name__)


def prepare(options: TrainOptions) -> Run:
    """Check everything that can be checked, read the data, and plan. Loads no weights.

    Raises:
        OffloadError: something to change: an option, the data, the model, the budget, the disk.
    """
    check_options(options)
    if options.method == "full":
        refuse_full(options.model)
    ram = options.ram if options.ram is not None else int(available_ram() * SAFE_SHARE)
    limit_kernels(ram)
    return_large_blocks()
    share_one_heap()
    choice = choose_base(options.model, options.quant) if options.method == "lora" else None
    directory = resolve(options.model) if choice is None else choice.directory
    config = read_config(directory)
    check_causal(config)
    dtype = _pick_dtype(options, config, directory, choice)
    check_dtypes(options, str(dtype).removeprefix("torch."))
    output = options.output.expanduser()
    check_target(output, directory)
    check_target(adapter_directory(options), directory)
    states = state_directory(options)
    _check_states(states, options)
    notes: list[str] = []
    if choice is not None:
        choice.compile(dtype)
        notes.append(f"the base stays packed: {choice.pack.path}")
    baseline = warm_training(config, dtype, options)
    reset_peak_rss()
    base = None if choice is None else choice.open(dtype)
    meta = build(directory, dtype) if base is None else base.meta
    meta.model.train()
    check_writable(meta.mapping)
    data = _open_data(meta, options, states, notes)
    try:
        run = _plan(meta, data, options, states, baseline, ram, notes, base)
        _check_room(run)
        return run
    except BaseException:
        data.close()
        raise


def _pick_dtype(
    options: TrainOptions, config: Any, directory: Path, choice: Choice | None
) -> torch.dtype:
    """The compute dtype. Packed weights have none of their own: bfloat16 unless told otherwise."""
    from offload.io.safetensors import CheckpointIndex

    if choice is None:
        return pick_dtype(options.dtype, config, CheckpointIndex.open(directory))
    dtype: torch.dtype = getattr(torch, options.dtype or "bfloat16")
    return dtype


def _check_states(states: Path, options: TrainOptions) -> None:
    if options.resume and not is_tile_store(states):
        raise OffloadError(
            f"--resume: there is nothing to resume in {states}; drop --resume, or give the "
            f"--output and --disk of the run that was interrupted"
        )
    if not options.resume and is_tile_store(states):
        raise OffloadError(
            f"{states} holds the states of another run; continue it with --resume, or delete it, "
            f"or give another --output or --disk"
        )


def _check_room(run: Run) -> None:
    """Refuse to begin what would end without room for its output. For the states there is room, or
    they are not made; what they will take of the same disk is not there for the output any more."""
    paths = (run.options.output.expanduser().absolute(), run.states)
    parents = [next(p for p in path.parents if p.exists()) for path in paths]
    taken = run.plan.spill_bytes + run.plan.inputs_bytes
    taken += max(0, run.plan.disk_bytes - reserved(run.states))
    need = run.output_bytes()
    if os.stat(parents[0]).st_dev != os.stat(parents[1]).st_dev:
        taken = 0
    disk = os.statvfs(parents[0])
    free = disk.f_bavail * disk.f_frsize
    if free < need + taken:
        more = f" and training another {format_bytes(taken)}" if taken else ""
        raise StoreError(
            f"the output needs {format_bytes(need)} in {parents[0]}{more}, {format_bytes(free)} "
            f"are free: {format_bytes(need + taken - free)} too little; free some, or choose "
            f"another --output or --disk"
        )


def _open_data(meta: MetaModel, options: TrainOptions, states: Path, notes: list[str]) -> TrainData:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(meta.directory, trust_remote_code=False)
    except Exception as error:
        first = str(error).strip().splitlines()
        raise OffloadError(
            f"{meta.directory.name} has no tokenizer that transformers can load: "
            f"{first[0] if first else type(error).__name__}"
        ) from error
    config = meta.model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    obstacle = packing_obstacle(type(meta.model), config) if options.packing else None
    cache = states.parent
    cache.mkdir(parents=True, exist_ok=True)
    return open_data(
        options, tokenizer,
        max_positions=getattr(text, "max_position_embeddings", None),
        vocab_size=getattr(text, "vocab_size", None),
        obstacle=obstacle, cache=cache, note=notes.append,
    )  # fmt: skip


def _plan(
    meta: MetaModel, data: TrainData, options: TrainOptions, states: Path, baseline: int, ram: int,
    notes: list[str], base: PackedBase | None,
) -> Run:  # fmt: skip
    if options.router_aux_loss is not None and not expert_groups(meta.model):
        raise OffloadError(
            f"--router-aux-loss {options.router_aux_loss:g} cannot take effect: the model has no "
            f"experts; drop it"
        )
    adapters = _choose_trained(meta, options)
    form, why = find_head(meta.model)
    if form is None:
        notes.append(f"the model's own loss is used, with whole logits: {why}")
    layout = lay_out(meta.model, packed=() if base is None else base.names)
    if base is not None:
        base.attach(layout)
    total = options.max_steps or math.ceil(options.epochs * data.steps_per_epoch)
    schedule = Schedule.of(options, total)
    clipping = options.max_grad_norm > 0
    vertical = options.grad_accum if options.order == "vertical" else 1
    grad_dtype = sum_dtype(options)
    # The head runs in slices if the form of the loss is known.
    head = None if form is None else meta.model.get_submodule(form.head)
    modules = [u.module for u in layout.units if u.module is not head]
    footprint = measure_training(meta.model, modules, options.batch_size, options.seq_len)
    if not footprint.measured:
        notes.append("activations are estimated by formula, not measured on this architecture")
    inputs = KeptInputs(
        sizes=input_sizes(layout, modules, footprint), at_once=vertical,
        micro_batches=options.grad_accum,
    )  # fmt: skip
    fixed = {
        "activations of a unit": footprint.unit_bytes,
        KEPT: footprint.boundary_bytes * vertical + footprint.shared_bytes * (vertical + 1),
        "loss": loss_bytes(meta, form, layout, options, grad_dtype),
        "compiled products": product_bytes(layout, options, ram),
    }
    if base is not None:
        tokens = options.batch_size * options.seq_len * vertical
        fixed["unpacked weights"] = base.work_bytes(layout) + base.scratch_bytes
        fixed["rows of packed tables"] = base.table_bytes(
            layout, tokens, HEAD_ROWS, sliced=form is not None
        )
    gc.collect()
    fixed["Python, data, tokenizer"] = max(0, current_rss() - baseline) + (8 << 20)
    fetched = max(
        (2 * layout.blocks[ids[0]].nbytes for u in layout.units for ids in u.experts.values()),
        default=0,
    )
    needs = Needs(
        fixed=fixed, kinds=Updater.kinds(layout, options.states), grad_dtype=grad_dtype,
        fetched_bytes=fetched,
    )  # fmt: skip
    passes = 1 if vertical > 1 else options.grad_accum
    always = frozenset[int]() if adapters is None else adapters.blocks(layout)
    candidates: list[TrainPlan] = []
    for first in ORDERS:
        make = partial(
            make_plan, layout, budget=ram, versions=state_versions(options, states, total),
            clipping=clipping,
            backwards=passes, first=first, always=always,
        )  # fmt: skip
        candidates += plans(make, needs, inputs)
    rates = step_rates(meta, modules, form, options, states)
    plan, prediction = candidates[0], None
    if rates is not None and base is not None:
        unpack = base.unpack_seconds(layout, options.grad_accum, passes)
        compute = {phase: s + unpack[phase] for phase, s in rates.compute.items()}
        rates = replace(rates, compute=compute)
    if rates is not None:
        update_bytes = 2 * sum(slot_bytes(layout, needs, b.index) for b in layout.trained)
        predictions = [predict(p, rates, update_bytes, clipping=clipping) for p in candidates]
        i = best(candidates, predictions)
        plan, prediction = candidates[i], predictions[i]
    if options.ram is None:
        notes.append(
            f"no --ram given: {SAFE_SHARE:.0%} of the {format_bytes(available_ram())} that are free"
        )
    run = Run(
        meta,
        data,
        options,
        states,
        baseline,
        layout,
        form,
        plan,
        schedule,
        total,
        grad_dtype,
        notes,
        adapters,
        base,
    )
    run.prediction = prediction
    gc.collect()
    reset_peak_rss()
    return run


def state_versions(options: TrainOptions, states: Path, total: int) -> int:
    """How often each tile of states is on the disk: as the run changes it, and as each commit has
    it that is there meanwhile. The last commit is none of these: nothing is changed behind it."""
    if has_commits(states):
        return options.save_total_limit + 1
    during = 0 if options.save_every is None else (total - 1) // options.save_every
    return min(during, options.save_total_limit) + 1


def _choose_trained(meta: MetaModel, options: TrainOptions) -> Adapters | None:
    """Everything, or nothing but the adapters that are added here."""
    if options.method == "full":
        for parameter in meta.model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        return None
    adapters = inject(
        meta.model, r=options.lora_r, alpha=options.lora_alpha, dropout=options.lora_dropout,
        targets=options.lora_targets, seed=options.seed,
    )  # fmt: skip
    if options.merge:
        adapters.check_mergeable()
    return adapters


def adapter_directory(options: TrainOptions) -> Path:
    """Where a LoRA run's adapter is written: the output, or beside it if that is the merged
    model."""
    output = options.output.expanduser()
    return output.parent / f"{output.name}.adapter" if options.merge else output


class Run:
    """A planned run. ``train`` once, then ``close``."""

    def __init__(
        self, meta: MetaModel, data: TrainData, options: TrainOptions, states: Path, baseline: int,
        layout: TrainLayout, form: HeadForm | None, plan: TrainPlan, schedule: Schedule, total: int,
        grad_dtype: str | None, notes: list[str], adapters: Adapters | None,
        base: PackedBase | None = None,
    ) -> None:  # fmt: skip
        self.adapters = adapters
        self.base = base
        self.meta = meta
        self.data = data
        self.options = options
        self.states = states
        self.baseline = baseline
        self.layout = layout
        self.form = form
        self.plan = plan
        self.schedule = schedule
        self.total = total
        self.grad_dtype = grad_dtype
        self.notes = notes
        fingerprint = None if base is None else base.fingerprint
        self.identity = identity_of(meta, layout, data, options, total, fingerprint)
        self.prediction: Prediction | None = None
        """Of a step's time; None where it cannot be measured."""
        self._engine: Engine | None = None
        self._merging: MergedValues | None = None
        self._reader: HeldReader | None = None
        self._tensors: OutputTensors | None = None
        if adapters is None:
            trained = {
                alias
                for block in layout.trained
                for piece in block.pieces
                for alias in layout.params[piece.param].names
            }
            # Now, while the model is whole: it shows which parameters are tied.
            self._tensors = OutputTensors(
                meta.mapping, self._parameter, dtype=meta.dtype, trained=trained
            )
        elif options.merge:
            # Of a pack there are no files to copy the rest from.
            whole = base is not None and not base.of_checkpoint
            self._tensors = OutputTensors(
                meta.mapping, self._merged, dtype=meta.dtype,
                trained=meta.mapping.map.sources.keys() if whole
                else {t.weight for t in adapters.targets},
            )  # fmt: skip
        self._store: TileStore | None = None
        self._commit: tuple[int, float, Future[None]] | None = None
        self._best = math.inf
        self._sums = StepSums()

    def _parameter(self, name: str, start: int, count: int) -> torch.Tensor:
        if self._engine is None:
            raise OffloadError("the run is not open")
        return self._engine.read_elements(name, start, count)

    def _merged(self, name: str, start: int, count: int) -> torch.Tensor:
        if self._engine is None or self.adapters is None:
            raise OffloadError("the run is not open")
        if self._merging is None:
            values = self.adapters.values(self._engine)
            self._merging = self.adapters.merged_values(self._base_values, values)
        return self._merging(name, start, count)

    def _base_values(self, name: str, start: int, count: int) -> torch.Tensor:
        """Of what adapters are merged into: the checkpoint's own bits where that is at hand."""
        if self.base is not None and self.base.of_checkpoint and self._tensors is not None:
            return self._tensors.source(name, start, count)
        if self._reader is None:
            raise OffloadError("the run is not open")
        return self._reader(name, start, count)

    # -- before ---------------------------------------------------------------------------

    def output_bytes(self) -> int:
        """Of the model that comes out, but for its small files."""
        if self._tensors is None:
            return 4 * self.layout.elements
        sizes: list[int] = [
            math.prod(shape) * getattr(torch, dtype).itemsize
            for _, dtype, shape in self._tensors.tensors
        ]
        return sum(sizes)

    def describe(self) -> list[str]:
        """The plan, line by line."""
        from offload.train.describe import describe

        return describe(self)

    # -- the run --------------------------------------------------------------------------

    def train(
        self, listener: Listener, *, should_stop: Callable[[], bool] = lambda: False
    ) -> EndReport:
        """Train to the end, or until ``should_stop`` says so after a step, and write the model.

        Raises:
            NotFinite: a loss or gradient is not a number; the last commit stays.
            OffloadError: reading or writing failed; the last commit stays and can be resumed.
        """
        began = time.perf_counter()
        options = self.options
        for note in self.notes:
            listener.note(note)
        with contextlib.ExitStack() as stack:
            engine = self._open(listener)
            stack.callback(engine.close)
            loop = LanguageLoop(
                engine, self.form, router=options.router_aux_loss, seed=options.seed,
                vertical=options.grad_accum if options.order == "vertical" else 1,
            )  # fmt: skip
            stack.callback(loop.close)
            loop.phases.counters = partial(self._counters, engine)
            report = self._steps(engine, loop, listener, should_stop, began)
        listener.ended(report)
        return report

    def _steps(
        self, engine: Engine, loop: LanguageLoop, listener: Listener,
        should_stop: Callable[[], bool], began: float,
    ) -> EndReport:  # fmt: skip
        options = self.options
        step = self._resume(engine)
        first, tokens, stopped, output = step, 0, "done", None
        try:
            groups = group_maker(self.meta.model, options)
            while step < self.total:
                tokens += self._step(engine, loop, step, groups, listener)
                step += 1
                if step == first + 1 and self.adapters is not None and self.adapters.unused():
                    raise OffloadError(
                        f"adapters that no forward has used would never be trained: "
                        f"{', '.join(self.adapters.unused()[:4])}; leave them out of --lora-targets"
                    )
                if options.eval_every and step % options.eval_every == 0 and step < self.total:
                    self._evaluate(loop, step, listener)
                if should_stop() and step < self.total:
                    stopped = "interrupted"
                    break
                if options.save_every and step % options.save_every == 0 and step < self.total:
                    self._begin_commit(engine, step, listener)
                self._poll_commit(listener)
            if step > first or stopped == "interrupted":
                self._begin_commit(engine, step, listener)
            self._end_commit(listener)
            if stopped == "done":
                if self.data.eval is not None:
                    self._evaluate(loop, step, listener)
                output = self._write(engine, listener)
        except NotFinite:
            # What was updated before is good: keep it, unless this step has begun to change it.
            if step > first and not engine.torn:
                self._begin_commit(engine, step, listener)
                self._end_commit(listener)
            raise
        read, written = self._bytes(engine)
        return EndReport(
            steps=step - first,
            last_step=step,
            stopped=stopped,
            seconds=time.perf_counter() - began,
            tokens=tokens,
            budget_bytes=self.plan.budget,
            peak_rss_bytes=max(0, peak_rss() - self.baseline),
            read_bytes=read,
            written_bytes=written,
            output=output,
            merged_onto=self._merged_onto(),
            **self._sums.fields(),
        )

    def _merged_onto(self) -> str | None:
        if self.base is None or not self.options.merge:
            return None
        if self.base.of_checkpoint:
            return f"the weights of {self.meta.directory.name}, not quantised"
        return f"the pack's values in {str(self.meta.dtype).removeprefix('torch.')}"

    def _open(self, listener: Listener) -> Engine:
        options = self.options
        self.states.mkdir(parents=True, exist_ok=True, mode=0o700)

        def tiles(layout: TrainLayout, parts: Callable[[int], tuple[int, ...]], io: Any) -> Any:
            shapes = [parts(i) for i in range(len(layout.tiles))]
            make = TileStore.open if options.resume else TileStore.create
            store = make(  # type: ignore[operator]
                directory=self.states, shapes=shapes, engine=io, identity=self.identity,
                keep=options.save_total_limit, checksum=xxh3,
                generations=1 if options.resume else self.plan.versions,
            )  # fmt: skip
            self._store = store
            return store

        return open_engine(
            self.meta, self.layout, self.plan.placement,
            EngineOptions(
                states=options.states, grad_dtype=self.grad_dtype, seed=options.seed,
                directory=self.states.parent, progress=listener.phase,
                initial={} if self.adapters is None else self.adapters.initial, base=self.base,
            ),
            tiles,
        )  # fmt: skip

    def _resume(self, engine: Engine) -> int:
        """The number of steps that the store's commit holds; 0 for a new run."""
        store = self._need_store()
        meta = store.commit_meta
        if meta is None or int(meta["step"]) < self.total:
            store.reserve(self.plan.versions)  # else nothing will be written
        if meta is None:
            return 0  # also of a run that was killed before its first commit
        engine.steps.update(meta["param_steps"])
        self._best = meta["best"] if meta["best"] is not None else math.inf
        return int(meta["step"])

    def _need_store(self) -> TileStore:
        if self._store is None:
            raise OffloadError("the run is not open")
        return self._store

    def _step(
        self, engine: Engine, loop: LanguageLoop, step: int, groups: Any, listener: Listener
    ) -> int:
        began = time.perf_counter()
        before = self._counters(engine)
        train = self.data.train
        batches = [train.micro_batch(step, i) for i in range(train.micro_batches(step))]
        lr = self.schedule.rate(step + 1)
        taken = loop.step(step, batches, groups(lr), self.options.max_grad_norm)
        seconds = time.perf_counter() - began
        now = self._counters(engine)
        grown = {name: value - before[name] for name, value in now.items()}
        report = StepReport(
            step=step + 1, of=self.total,
            epoch=(step + 1) / train.steps_per_epoch,
            loss=taken.loss, grad_norm=taken.result.norm, lr=lr,
            tokens=taken.tokens, label_tokens=taken.label_tokens, seconds=seconds,
            phases=taken.phases,
            lanes={
                "compute": seconds - grown["waiting"], "ssd": grown["ssd"],
                "update": grown["update"],
            },
            read_bytes=int(grown["read"]), written_bytes=int(grown["written"]),
            phase_read_bytes={p: int(c["read"]) for p, c in taken.counted.items()},
            phase_written_bytes={p: int(c["written"]) for p, c in taken.counted.items()},
            exposed_update_s=grown["exposed"],
        )  # fmt: skip
        self._sums.add(report)
        listener.step(report)
        return taken.tokens

    def _bytes(self, engine: Engine) -> tuple[int, int]:
        """Bytes read and written since the start: tiles, spilled gradients and inputs, the
        checkpoint."""
        store, gradients, inputs = self._need_store(), engine.gradients, engine.inputs
        read = store.read_bytes + gradients.read_bytes + engine.checkpoint_bytes()
        written = store.written_bytes + gradients.written_bytes
        if inputs is not None:
            read, written = read + inputs.read_bytes, written + inputs.written_bytes
        return read, written

    def _counters(self, engine: Engine) -> dict[str, float]:
        """What only grows: bytes of the disk, busy seconds of lanes, seconds of waiting."""
        read, written = self._bytes(engine)
        return {
            "read": read, "written": written, "ssd": self._need_store().busy_s,
            "update": engine.updater.busy_s, "waiting": engine.clock.waiting,
            "exposed": engine.clock.updates,
        }  # fmt: skip

    def _evaluate(self, loop: LanguageLoop, step: int, listener: Listener) -> None:
        held_out = self.data.eval
        if held_out is None:
            return
        began = time.perf_counter()
        loss, tokens = loop.evaluate(
            held_out.micro_batch(k, 0) for k in range(held_out.steps_per_epoch)
        )
        best = loss < self._best
        self._best = min(self._best, loss)
        listener.evaluated(
            EvalReport(
                step=step, loss=loss, label_tokens=tokens, seconds=time.perf_counter() - began,
                best=best,
            )
        )  # fmt: skip

    # -- commits --------------------------------------------------------------------------

    def _begin_commit(self, engine: Engine, step: int, listener: Listener) -> None:
        """Make step ``step`` durable: wait for its updates, then let the disk work beside us."""
        self._end_commit(listener)
        began = time.perf_counter()
        engine.drain()
        engine.updater.write_resident()
        meta = {
            "step": step,
            "param_steps": engine.steps,
            "best": self._best if math.isfinite(self._best) else None,
        }
        self._commit = step, began, self._need_store().commit(meta)

    def _poll_commit(self, listener: Listener) -> None:
        if self._commit is not None and self._commit[2].done():
            self._end_commit(listener)

    def _end_commit(self, listener: Listener) -> None:
        if self._commit is None:
            return
        step, began, future = self._commit
        self._commit = None
        future.result()
        listener.committed(CommitReport(step=step, seconds=time.perf_counter() - began))

    # -- the result -----------------------------------------------------------------------

    def _write(self, engine: Engine, listener: Listener) -> str:
        output = self.options.output.expanduser()

        self._engine = engine
        run_id = secrets.token_hex(8)
        if self.adapters is not None:
            values = self.adapters.values(engine)
            write_adapter(
                adapter_directory(self.options), self.meta.model, self.adapters.pairs(values),
                self.adapters.options(
                    self.meta.directory.resolve() if self.base is None else self.base.source
                ), run_id=run_id,
                source=self.meta.directory,
            )  # fmt: skip
        if self._tensors is not None:
            with self._tensors as tensors, HeldReader(engine) as self._reader:
                write_model(
                    output, self.meta.directory, tensors.tensors, tensors.read,
                    run_id=run_id, dtype=str(self.meta.dtype).removeprefix("torch."),
                    progress=lambda done, total: listener.phase("write", done, total),
                )  # fmt: skip
        return str(output)

    def close(self) -> None:
        """Let go of the data. The engine is closed by ``train``."""
        self.data.close()


__all__ = ["Run", "prepare"]
