"""A run's plan in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offload.units import format_bytes

if TYPE_CHECKING:
    from offload.train.run import Run


def describe(run: Run) -> list[str]:
    """What will be where, what a step moves, and how much the disk will have to take."""
    layout, plan, options = run.layout, run.plan, run.options
    place = plan.placement
    trained = [b.index for b in layout.trained]
    weights = sum(b.nbytes for b in layout.blocks)
    pinned = sum(layout.blocks[b].nbytes for b in place.pinned)
    data = run.data.train
    lines = [
        f"model   {run.meta.directory.name}: {layout.elements / 1e6:,.0f}M parameters trained, "
        f"{format_bytes(weights)} of weights in {str(run.meta.dtype).removeprefix('torch.')}",
        f"data    {data.examples:,} examples, {data.tokens:,} tokens an epoch; {run.total:,} steps "
        f"of up to {options.batch_size * options.grad_accum} x {options.seq_len} tokens",
        f"RAM     {format_bytes(plan.ram_bytes)} of {format_bytes(plan.budget)}: "
        + ", ".join(
            f"{format_bytes(v)} {k}" for k, v in sorted(plan.ram.items(), key=lambda i: -i[1])
        ),
        f"stays   weights {format_bytes(pinned)} of {format_bytes(weights)}; states of "
        f"{len(place.resident)} of {len(trained)} blocks; gradients of "
        f"{len(trained) - len(place.spilled)} of {len(trained)} blocks",
        f"disk    {format_bytes(plan.disk_bytes)} in {run.states} ({options.states} states, the "
        f"{options.save_total_limit + 1} versions that commits need)"
        + (f", {format_bytes(plan.spill_bytes)} of gradients" if plan.spill_bytes else ""),
        f"step    reads {format_bytes(plan.read_bytes)}, writes "
        f"{format_bytes(plan.written_bytes)}; the run writes "
        f"{format_bytes(plan.written_bytes * run.total)}",
    ]
    return lines
