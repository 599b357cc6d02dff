"""A run's plan in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offload.models.naming import model_name
from offload.runtime import cuda_api
from offload.runtime.slow_products import TWICE, slowness
from offload.train.checks import check_device
from offload.units import format_bytes, format_count

if TYPE_CHECKING:
    from offload.train.layout import TrainLayout
    from offload.train.plan import TrainPlan
    from offload.train.predicting import Prediction
    from offload.train.run import Run


def describe(run: Run) -> list[str]:
    """What will be where, what a step moves, and how much the disk will have to take."""
    layout, plan, options = run.layout, run.plan, run.options
    weights = sum(b.nbytes for b in layout.blocks)
    data = run.data.train
    place = plan.placement.device
    best = options.kept != "last" and plan.versions > options.save_total_limit + 1
    lines = [
        f"model   {model_name(run.meta.directory)}: {format_count(layout.elements)} parameters "
        f"trained, {format_bytes(weights)} of weights{_kept(run)}",
        f"data    {data.examples:,} examples, {data.tokens:,} tokens an epoch; {run.total:,} steps "
        f"of up to {options.batch_size * options.grad_accum} x {options.seq_len} tokens",
        f"RAM     {format_bytes(plan.ram_bytes)} of {format_bytes(plan.budget)}: "
        + ", ".join(
            f"{format_bytes(v)} {k}" for k, v in sorted(plan.ram.items(), key=lambda i: -i[1])
        ),
        *([] if place is None else [f"device  {_device(run)}{place.describe()}"]),
        stays_text(layout, plan),
        f"disk    {format_bytes(plan.disk_bytes)} in {run.states} ({options.states} states, "
        + (f"the {plan.versions} versions that commits need" if plan.versions > 1 else "once")
        + (", one of them for the best evaluation)" if best else ")")
        + (f", {format_bytes(plan.spill_bytes)} of gradients" if plan.spill_bytes else "")
        + (f", {format_bytes(plan.inputs_bytes)} of inputs" if plan.inputs_bytes else ""),
        f"step    reads {format_bytes(plan.read_bytes)}, writes "
        f"{format_bytes(plan.written_bytes)}{copied_text(plan)}; the run writes "
        f"{format_bytes(plan.written_bytes * run.total)}",
    ]
    if options.skip_untouched_experts:
        lines.append(
            "not exact: a step leaves experts alone that none of its tokens reaches (the plan and "
            "its time count those that even routing would reach)"
        )
    if place is None and (slow := slowness(run.meta.dtype)):
        lines.append(
            f"slow    {slow}: a step takes many times as long as with --dtype float32, {TWICE}"
        )
    if run.prediction is not None:
        text = seconds_text(run.prediction)
        lines.append(f"time    {text}; {duration(run.prediction.seconds * run.total)}")
    return lines


def _device(run: Run) -> str:
    choice = check_device(run.options)
    if choice.kind == "cuda":
        return f"{cuda_api.open_card(choice.card).name}: "
    return "simulated, beside --ram in this machine's memory: " if choice.kind == "sim" else ""


def copied_text(plan: TrainPlan) -> str:
    """What a step copies, behind what it reads and writes; empty without a device."""
    if not plan.link:
        return ""
    return (
        f", copies {format_bytes(plan.up_bytes)} to the device and {format_bytes(plan.down_bytes)} "
        f"back"
    )


def stays_text(layout: TrainLayout, plan: TrainPlan) -> str:
    """What is in RAM for good."""
    place, trained = plan.placement, len(layout.trained)
    pinned = sum(layout.blocks[b].nbytes for b in place.pinned)
    weights = sum(b.nbytes for b in layout.blocks)
    return (
        f"stays   weights {format_bytes(pinned)} of {format_bytes(weights)}; states of "
        f"{len(place.resident)} of {trained} blocks; gradients of "
        f"{trained - len(place.spilled)} of {trained} blocks"
        + (f"; {plan.inputs_text}" if plan.inputs_text else "")
    )


def seconds_text(found: Prediction) -> str:
    """A step's seconds, and what its lanes do meanwhile."""
    phases = "; ".join(
        f"{phase} {_time(found.phases[phase])}: "
        + ", ".join(f"{lane} {_time(s)}" for lane, s in lanes.items() if s and s >= most / 100)
        for phase, lanes in found.lanes.items()
        for most in (max(lanes.values(), default=0.0),)
    )
    return f"{found.seconds:.2f} s a step ({phases}); the busiest lane is {found.busiest}"


def _time(seconds: float) -> str:
    if seconds >= 0.1:
        return f"{seconds:.2f} s"
    # Not two digits of 99.7 ms: that would be 1e+02.
    return f"{seconds * 1e3:.{0 if seconds >= 0.01 else 1}f} ms"


def _kept(run: Run) -> str:
    dtype = str(run.meta.dtype).removeprefix("torch.")
    if run.base is None:
        return f" in {dtype}"
    whole = sum(b.value_bytes for b in run.layout.blocks)
    return f", packed ({run.base.formats}); unpacked to {dtype} as units run, {format_bytes(whole)}"


def duration(seconds: float) -> str:
    """Hours, minutes, seconds: the two largest that count."""
    whole = max(1, round(seconds))
    if whole < 60:
        return f"{whole} s in all"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s in all"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min in all"
