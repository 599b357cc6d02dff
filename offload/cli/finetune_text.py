"""The lines that a fine-tuning run is told in."""

from __future__ import annotations

import math
from collections.abc import Sequence

from offload.train.metrics import step_figures
from offload.train.options import TrainOptions
from offload.train.reports import CommitReport, EndReport, EvalReport, StepReport
from offload.units import format_bytes, format_rate

DOT = " · "
_LOSE_FIRST = ("busy", "disk", "skipped", "norm", "speed", "lr", "left")
"""What a narrow terminal does without, in this order."""


def duration(seconds: float) -> str:
    """Two units at most: ``0.42 s``, ``12 s``, ``3 min 20 s``, ``5 h 02 min``, ``3 d 04 h``."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def rate(per_s: float) -> str:
    """Tokens per second; three digits, and no exponent."""
    return f"{format_rate(per_s)} tok/s"


def number(value: float) -> str:
    """A norm: four digits."""
    return f"{value:.4g}"


def step_parts(report: StepReport, loss: float, left_s: float | None) -> dict[str, str]:
    """What there is to say about a step, by name, in the order in which it is shown.

    Args:
        report: the step.
        loss: the loss to show, smoothed or not.
        left_s: seconds until the end, if known.
    """
    figures = step_figures(report)
    parts = {
        "step": f"step {report.step}/{report.of}",
        "loss": f"loss {loss:.4f}",
        "lr": f"lr {report.lr:.3g}",
        "norm": f"grad norm {number(report.grad_norm)}",
        "speed": rate(figures["tok_s"]),
    }
    if figures["utilisation"]:
        shares = figures["utilisation"].items()
        parts["busy"] = ", ".join(f"{lane} {share:.0%}" for lane, share in shares)
    if report.read_bytes or report.written_bytes:
        parts["disk"] = f"{format_bytes(figures['ssd_bytes_per_s'])}/s"
    if report.skipped_updates:
        parts["skipped"] = f"{report.skipped_updates} experts skipped"
    if left_s is not None and report.step < report.of:
        parts["left"] = f"{duration(left_s)} left"
    return parts


def fit(parts: dict[str, str], width: int) -> str:
    """One line of at most ``width`` columns: what matters least goes first."""
    kept = dict(parts)
    for name in _LOSE_FIRST:
        if len(DOT.join(kept.values())) <= width:
            break
        kept.pop(name, None)
    return DOT.join(kept.values())


def eval_line(report: EvalReport) -> str:
    """Loss and perplexity on what was held out."""
    perplexity = f"{math.exp(report.loss):.4g}" if report.loss < 700 else "beyond numbers"
    return DOT.join(
        [
            f"step {report.step}",
            f"loss {report.loss:.4f}",
            f"perplexity {perplexity}",
            f"{report.label_tokens} tokens",
            duration(report.seconds),
            *(["the best so far"] if report.best else []),
        ]
    )


def commit_line(report: CommitReport) -> str:
    """Up to where nothing can be lost."""
    return f"step {report.step} is safe, {duration(report.seconds)}"


def stats_line(end: EndReport, loss: float | None = None) -> str:
    """All that counts, separated by dots; ``loss``: the smoothed one at the end."""
    parts = [f"{count(end.steps, 'step')} in {duration(end.seconds)}"]
    if loss is not None:
        parts.append(f"smoothed loss {loss:.4f}")
    if end.seconds > 0 and end.tokens:
        parts.append(rate(end.tokens / end.seconds))
    simulated = 0 if end.device_peak_bytes is not None else end.device_budget_bytes or 0
    parts.append(memory_text(end.peak_rss_bytes, end.budget_bytes, simulated))
    if end.device_budget_bytes is not None and end.device_peak_bytes is not None:
        parts.append(
            f"{format_bytes(end.device_peak_bytes)} of the card's "
            f"{format_bytes(end.device_budget_bytes)}"
        )
    parts.append(
        f"SSD {format_bytes(end.read_bytes)} read, {format_bytes(end.written_bytes)} written"
    )
    if end.skipped_updates:
        due = end.skipped_updates + end.expert_updates
        parts.append(
            f"{end.skipped_updates:,} of {due:,} updates of experts skipped "
            f"({end.skipped_updates / due:.0%})"
        )
    if end.busy:
        parts.append("busy " + ", ".join(f"{lane} {share:.0%}" for lane, share in end.busy.items()))
        parts.append(f"{duration(end.exposed_update_s)} waited for updates")
    return DOT.join(parts)


def memory_text(peak: int, budget: int, simulated: int = 0) -> str:
    """The peak against the budget; ``simulated``: bytes of a device's budget that are RAM, too."""
    said = f"peak RSS {format_bytes(peak)} above the process"
    if budget > 0:
        said += f", {peak / (budget + simulated):.1%} of the budget {format_bytes(budget)}"
        if simulated:
            said += f" and {format_bytes(simulated)} of the simulated device"
    over = peak - budget - simulated
    return said + (f" (over by {format_bytes(over)})" if over > 0 else "")


def use_lines(end: EndReport, options: TrainOptions) -> list[str]:
    """Where the result is, and what to do with it."""
    if end.output is None:
        return []
    step = end.last_step if end.output_step is None else end.output_step
    onto = f", merged into {end.merged_onto}" if end.merged_onto else ""
    lines = [f"{end.output}: {_what(options)} after step {step}"]
    if end.best_loss is not None:
        of = "" if step == end.last_step else f" of {end.last_step}"
        lines[0] += f"{of}, where the evaluation was best (loss {end.best_loss:.4f})"
    lines[0] += onto
    if end.last_output is not None:
        lines.append(
            f"{end.last_output}: {_what(options)} after step {end.last_step}, the last{onto}"
        )
    if options.method == "lora" and not options.merge:
        lines.append(f"PeftModel.from_pretrained(model, {end.output!r})")
    else:
        lines.append(f"offload generate --model {quoted([end.output])}")
    return lines


def _what(options: TrainOptions) -> str:
    if options.method == "full":
        return "the model"
    return "the merged model" if options.merge else "the adapter"


def count(n: int, what: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{n} {what}{'' if n == 1 else 's'}"


def quoted(words: Sequence[str]) -> str:
    """As a shell takes it."""
    import shlex

    return shlex.join(words)
