"""``offload finetune``: from options to a plan, from the plan to steps, from steps to a model."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offload.errors import OffloadError, StoreError
from offload.io.tile_store import reserved
from offload.models.expert_groups import expert_groups
from offload.models.meta import MetaModel, build, pick_dtype, read_config, resolve
from offload.models.options import SAFE_SHARE
from offload.models.workspace import limit_kernels
from offload.runtime.heap import return_large_blocks, share_one_heap
from offload.runtime.rss import available_ram, current_rss, peak_rss, reset_peak_rss
from offload.train.causal import check_causal
from offload.train.checks import check_dtypes, check_options, state_directory
from offload.train.commits import Commits, check_states, state_versions
from offload.train.data.obstacles import packing_obstacle
from offload.train.data.opening import TrainData, open_data
from offload.train.decay import group_maker
from offload.train.engine import Engine, NotFinite
from offload.train.footprint import measure_training
from offload.train.head_find import HeadForm, find_head
from offload.train.identity import identity_of
from offload.train.keeping import KeptGraphs, plans_keeping
from offload.train.layout import TrainLayout, lay_out
from offload.train.loop import HEAD_ROWS, LanguageLoop
from offload.train.lora import Adapters, inject
from offload.train.needs import (
    graph_sizes,
    head_in_slices,
    loss_bytes,
    product_bytes,
    row_tables,
    rows_in_ram,
    step_rates,
    sum_dtype,
)
from offload.train.opening import EngineOptions, open_engine
from offload.train.options import TrainOptions
from offload.train.output_target import check_target
from offload.train.output_tensors import check_writable
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
from offload.train.reports import EndReport, EvalReport, Listener, StepReport, StepSums
from offload.train.result import Result, adapter_directory, last_output
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
    if options.kept == "both":
        also = replace(options, output=last_output(options))
        check_target(also.output, directory)
        check_target(adapter_directory(also), directory)
    states = state_directory(options)
    check_states(states, resume=options.resume)
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
            f"another --output or --disk{_less_for_last(run)}"
        )


def _less_for_last(run: Run) -> str:
    """Another way out where the best evaluation's weights take space."""
    if run.options.kept == "last" or run.options.resume:
        return ""
    versions = state_versions(replace(run.options, keep="last"), run.states, run.total)
    less = run.plan.disk_bytes // run.plan.versions * (run.plan.versions - versions)
    if run.options.kept == "both":
        less += run.output_bytes() // 2
    if not less:
        return ""
    return f", or give --keep last, which needs {format_bytes(less)} less"


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
    if options.skip_untouched_experts and not expert_groups(meta.model):
        raise OffloadError(
            "--skip-untouched-experts cannot take effect: the model has no fused experts; drop it"
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
    rows = rows_in_ram(layout, options, grad_dtype)
    tables = [layout.params[name].tensor for name in row_tables(layout, rows)]
    footprint = measure_training(meta.model, modules, options.batch_size, options.seq_len, tables)
    if not footprint.measured:
        notes.append("activations are estimated by formula, not measured on this architecture")
    inputs = KeptInputs(
        sizes=input_sizes(layout, modules, footprint), at_once=vertical,
        micro_batches=options.grad_accum,
    )  # fmt: skip
    graphs = KeptGraphs(
        sizes=graph_sizes(layout, modules, footprint, options), at_once=vertical
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
        fetched_bytes=fetched, rows=rows, sliced=head_in_slices(layout, form, head, options),
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
        if base is None:
            candidates += plans_keeping(make, needs, graphs)
    rates = step_rates(meta, layout, modules, form, options, states, tables)
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
    run.rows = rows
    gc.collect()
    reset_peak_rss()
    return run


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


@dataclass(frozen=True, slots=True)
class _Output:
    """What was written: see ``EndReport``."""

    path: str | None = None
    step: int | None = None
    best_loss: float | None = None
    last: str | None = None


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
        self.rows: dict[str, int] = {}
        """See ``rows_in_ram``."""
        self.prediction: Prediction | None = None
        """Of a step's time; None where it cannot be measured."""
        self._sums = StepSums()
        self._expert_updates = self._skipped_updates = 0
        self._result = Result(meta, layout, options, adapters, base)
        self._commits = Commits(
            states, identity=self.identity, keep=options.save_total_limit,
            keep_best=options.kept != "last", versions=plan.versions, resume=options.resume,
        )  # fmt: skip

    # -- before ---------------------------------------------------------------------------

    def output_bytes(self) -> int:
        """Of what comes out, but for its small files."""
        return self._result.nbytes * (2 if self.options.kept == "both" else 1)

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
            NotFinite: a loss or gradient is not a number; the last commit stays, and the weights
                of the best evaluation are written if they were to be kept.
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
        step = self._commits.restore(engine, self.total, listener)
        first, tokens, stopped, written_out = step, 0, "done", _Output()
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
                if step < self.total:
                    save = options.save_every is not None and step % options.save_every == 0
                    if options.eval_every and step % options.eval_every == 0:
                        best = self._evaluate(loop, step, listener)
                        save |= best and self._commits.keep_best
                    if should_stop():
                        stopped = "interrupted"
                        break
                    if save:
                        self._commits.begin(engine, step, listener)
                self._commits.poll(listener)
            if step > first or stopped == "interrupted":
                self._commits.begin(engine, step, listener)
            self._commits.end(listener)
            if stopped == "done":
                if self.data.eval is not None:
                    self._evaluate(loop, step, listener)
                written_out = self._write(engine, step, listener)
        except NotFinite as error:
            # What was updated before is good: keep it, unless this step has begun to change it.
            if step > first and not engine.torn:
                self._commits.begin(engine, step, listener)
            self._commits.end(listener)
            raise NotFinite(f"{error}{self._write_best(engine, listener)}") from None
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
            output=written_out.path,
            output_step=written_out.step,
            best_loss=written_out.best_loss,
            last_output=written_out.last,
            skipped_updates=self._skipped_updates,
            expert_updates=self._expert_updates,
            merged_onto=self._result.merged_onto,
            **self._sums.fields(),
        )

    def _open(self, listener: Listener) -> Engine:
        options = self.options
        return open_engine(
            self.meta, self.layout, self.plan.placement,
            EngineOptions(
                states=options.states, grad_dtype=self.grad_dtype, seed=options.seed,
                skip_untouched=options.skip_untouched_experts,
                row_tables=row_tables(self.layout, self.rows),
                directory=self.states.parent, progress=listener.phase,
                initial={} if self.adapters is None else self.adapters.initial, base=self.base,
            ),
            self._commits.open_store,
        )  # fmt: skip

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
            skipped_updates=taken.result.skipped,
        )  # fmt: skip
        self._sums.add(report)
        self._expert_updates += taken.result.experts
        self._skipped_updates += taken.result.skipped
        listener.step(report)
        return taken.tokens

    def _bytes(self, engine: Engine) -> tuple[int, int]:
        """Bytes read and written since the start: tiles, spilled gradients and inputs, the
        checkpoint."""
        store, gradients, inputs = self._commits.store, engine.gradients, engine.inputs
        read = store.read_bytes + gradients.file.read_bytes + engine.checkpoint_bytes()
        written = store.written_bytes + gradients.file.written_bytes
        if inputs is not None:
            read, written = read + inputs.read_bytes, written + inputs.written_bytes
        return read, written

    def _counters(self, engine: Engine) -> dict[str, float]:
        """What only grows: bytes of the disk, busy seconds of lanes, seconds of waiting."""
        read, written = self._bytes(engine)
        return {
            "read": read, "written": written, "ssd": self._commits.store.busy_s,
            "update": engine.updater.busy_s, "waiting": engine.clock.waiting,
            "exposed": engine.clock.updates,
        }  # fmt: skip

    def _evaluate(self, loop: LanguageLoop, step: int, listener: Listener) -> bool:
        """Returns whether the weights as they are now are the best so far."""
        held_out = self.data.eval
        if held_out is None:
            return False
        began = time.perf_counter()
        loss, tokens = loop.evaluate(
            held_out.micro_batch(k, 0) for k in range(held_out.steps_per_epoch)
        )
        best = self._commits.evaluated(step, loss)
        listener.evaluated(
            EvalReport(
                step=step, loss=loss, label_tokens=tokens, seconds=time.perf_counter() - began,
                best=best,
            )
        )  # fmt: skip
        return best

    def _write(self, engine: Engine, step: int, listener: Listener) -> _Output:
        """Write the weights after ``step``, the last one, or the best, or both."""
        options, best, write = self.options, self._commits.best, self._result.write
        output = options.output.expanduser()
        if options.kept == "last":
            return _Output(write(engine, output, listener), step)
        if best is None:
            listener.note("no evaluation gave a finite loss: the last weights are kept")
            return _Output(write(engine, output, listener), step)
        last = None
        if options.kept == "both":
            last = write(engine, last_output(options), listener)
        if best.step != step:
            self._commits.go_back_to_best(engine)
        return _Output(write(engine, output, listener), best.step, best.loss, last)

    def _write_best(self, engine: Engine, listener: Listener) -> str:
        """Of a run that cannot go on, write the best weights it had; returns what to say of it."""
        best = self._commits.best
        if best is None or best.commit is None or not self._commits.keep_best:
            return ""
        which = f"the weights of the best evaluation (step {best.step}, loss {best.loss:.4f})"
        try:
            self._commits.go_back_to_best(engine)
            path = self._result.write(engine, self.options.output.expanduser(), listener)
        except OffloadError as error:  # not in the place of why the run stopped
            return f"; {which} could not be written: {error}"
        return f"; {which} are in {path}"

    def close(self) -> None:
        """Let go of the data. The engine is closed by ``train``."""
        self.data.close()


__all__ = ["Run", "prepare"]
