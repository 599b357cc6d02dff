"""``offload finetune``: from a plan to steps, from steps to a model."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from offload.errors import OffloadError, StoreError
from offload.io.tile_file import DamagedError
from offload.io.tile_store import stored_identity
from offload.models.meta import MetaModel
from offload.runtime.choice import make_device
from offload.runtime.cuda_api import telling
from offload.runtime.device import Device
from offload.runtime.rss import peak_rss
from offload.scheduler.timeline import Record
from offload.train.checks import check_device
from offload.train.commits import Commits
from offload.train.data.opening import TrainData
from offload.train.decay import group_maker
from offload.train.engine import Engine, NotFinite
from offload.train.head_find import HeadForm
from offload.train.identity import check_continues, identity_of
from offload.train.layout import TrainLayout
from offload.train.loop import LanguageLoop
from offload.train.lora import Adapters
from offload.train.lora_targets import ALL_LINEAR
from offload.train.needs import row_tables, rows_in_ram
from offload.train.opening import EngineOptions, open_engine
from offload.train.options import TrainOptions
from offload.train.packed_base import PackedBase
from offload.train.plan import TrainPlan
from offload.train.predicting import Prediction
from offload.train.recording import RecordedDevice
from offload.train.reports import EndReport, EvalReport, Listener, StepReport, StepSums
from offload.train.result import Result, last_output
from offload.train.schedule import Schedule
from offload.train.updates import update_workers

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Output:
    """What was written: see ``EndReport``."""

    path: str | None = None
    step: int | None = None
    best_loss: float | None = None
    last: str | None = None


FULL = (
    "what is committed stays; lower --gpu, --seq-len or --batch-size, or end what else uses the "
    "card, and go on with --resume"
)


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
        if options.resume:
            check_continues(stored_identity(states), self.identity, options.schedule)
        self.prediction: Prediction | None = None
        """Of a step's time; None where it cannot be measured."""
        self.record: Record | None = None
        """Set before ``train``: told what every lane does."""
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
            stack.callback(self._commits.close)
            engine = self._open(listener, self._open_device(stack))
            stack.callback(engine.close)
            engine.keep_freed(self.plan.placement.freed_bytes, self.baseline + self.plan.limit)
            engine.bound_freed(self.plan.ahead, self.baseline + self.plan.budget)
            loop = LanguageLoop(
                engine, self.form, router=options.router_aux_loss, seed=options.seed,
                vertical=options.grad_accum if options.order == "vertical" else 1,
            )  # fmt: skip
            stack.callback(loop.close)
            loop.phases.counters = partial(self._counters, engine)
            loop.phases.record = self.record
            with telling("the card", "a step", FULL):
                report = self._steps(engine, loop, listener, should_stop, began)
            if engine.homes.tier is not None:
                engine.homes.tier.device.check()
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
                if step == first + 1:
                    self._check_used(listener)
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
            if stopped == "done" and self.data.eval is not None:
                self._evaluate(loop, step, listener)
        except NotFinite as error:
            # What was updated before is good: keep it, unless this step has begun to change it.
            if step > first and not engine.torn:
                self._commits.begin(engine, step, listener)
            self._commits.end(listener)
            # Weights that no step has changed are not the rate's fault.
            way_out = (
                "" if not step else f"; --resume would come to the same again: if the rows are in "
                f"order, begin another run with a lower --lr than {options.lr:g}"
            )  # fmt: skip
            raise NotFinite(f"{error}{way_out}{self._write_best(engine, listener)}") from error
        except StoreError as error:
            # The tile store's own errors say it themselves, and damage is in what was safe.
            if "--resume" not in str(error) and not _is_damage(error):
                error.args = (f"{error}; {self._commits.what_is_left()}",)
            raise
        if stopped == "done":
            written_out = self._write_safely(engine, step, listener)
        read, written = self._bytes(engine)
        tier = engine.homes.tier
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
            device_budget_bytes=None if tier is None else tier.placement.budget,
            device_peak_bytes=None if tier is None else tier.device.peak_memory(),
            output=written_out.path,
            output_step=written_out.step,
            best_loss=written_out.best_loss,
            last_output=written_out.last,
            skipped_updates=self._skipped_updates,
            expert_updates=self._expert_updates,
            merged_onto=self._result.merged_onto,
            **self._sums.fields(),
        )

    def _check_used(self, listener: Listener) -> None:
        """Behind the first step: some models use a layer's weight and not the layer, and an adapter
        there stays at nothing. It is an error to ask for one by name.

        Raises:
            OffloadError: see above.
        """
        unused = [] if self.adapters is None else self.adapters.unused()
        if not unused:
            return
        names = ", ".join(unused[:4]) + ", ..." * (len(unused) > 4)
        targets = self.options.lora_targets
        if targets is None or any(name.lower() == ALL_LINEAR for name in targets):
            listener.note(
                f"the model uses the weights of {len(unused)} linear layers without the layers, so "
                f"their adapters change nothing: {names}"
            )
            return
        raise OffloadError(
            f"adapters that no forward has used would never be trained: {names}; leave them out of "
            f"--lora-targets"
        )

    def _open_device(self, stack: contextlib.ExitStack) -> Device | None:
        """What layers run on, if the plan has it; closed with ``stack``."""
        place = self.plan.placement.device
        if place is None:
            return None
        device = make_device(check_device(self.options), place.arena_bytes, self.options.seed)
        stack.callback(device.close)
        return (
            device if self.record is None else cast("Device", RecordedDevice(device, self.record))
        )

    def _open(self, listener: Listener, device: Device | None) -> Engine:
        options = self.options
        return open_engine(
            self.meta, self.layout, self.plan.placement,
            EngineOptions(
                states=options.states, grad_dtype=self.grad_dtype, seed=options.seed,
                skip_untouched=options.skip_untouched_experts,
                row_tables=row_tables(
                    self.layout, rows_in_ram(self.layout, options, self.grad_dtype)
                ),
                directory=self.states.parent, progress=listener.phase, record=self.record,
                initial={} if self.adapters is None else self.adapters.initial, base=self.base,
                device=device,
                update_workers=update_workers(card=device is not None and device.kind == "cuda"),
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

    def _write_safely(self, engine: Engine, step: int, listener: Listener) -> _Output:
        """``_write``; whoever reads that it failed reads, too, that nothing was trained in vain,
        unless it was: where the states are damaged."""
        try:
            return self._write(engine, step, listener)
        except OffloadError as error:
            if not _is_damage(error):
                error.args = (
                    f"{error}; training has ended and is safe in {self.states}: the same command "
                    f"with --resume writes the output (for another --output, give --disk "
                    f"{self.states})",
                )
            raise

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


def _is_damage(error: BaseException | None) -> bool:
    """Whether it came of a state whose checksum is wrong."""
    while error is not None and not isinstance(error, DamagedError):
        error = error.__cause__
    return error is not None


__all__ = ["Run"]
