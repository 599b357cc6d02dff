"""``offload generate --batch``: many prompts from a file, their answers into another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.batch.answers import ID, TIME, Answers, prompt_time
from offload.batch.choose import Choice, choose
from offload.batch.generation import Generation, OnToken
from offload.batch.generation import Sampling as TokenSampling
from offload.batch.jobs import Defaults, Job, read_jobs
from offload.batch.runner import Tally, Task, run_batch
from offload.cli import console, decode, output, report, view
from offload.cli.batch_tasks import make_tasks
from offload.cli.planning import find_model, make_plan
from offload.cli.session import Wish, close_model, measured_tokenizer, open_model, say_kernel_error
from offload.cli.session import stop_between_units as stop_between
from offload.cli.signals import raise_received, signals_wait
from offload.cli.template import check_settings
from offload.cli.text import StoppedText, TextDecoder
from offload.cli.threads import use_threads
from offload.cpu_ops import row_products
from offload.errors import OffloadError
from offload.models.meta import model_class, read_config
from offload.models.naming import model_name
from offload.models.prepared import Prepared
from offload.models.prompt_time import stopped_at
from offload.models.sampling import own_stops
from offload.units import format_bytes, format_rate

TICK_S = 0.2
"""Between two looks at the progress."""

SHARES = 10
"""Lines of progress where there is no terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The flags that only a batch has."""

    batch: Path
    output: Path
    size: int | None


def run(files: Files, wish: Wish) -> None:
    """Check, plan, load, answer, report. The model is closed whatever happens.

    Raises:
        OffloadError: anything for the user to change; prompts that failed.
    """
    options = wish.wanted.options()
    use_threads(wish.wanted.threads)
    jobs = read_jobs(files.batch, _defaults(wish))
    directory = find_model(wish.model, wish.quant, wish.wanted.kernels)
    config = read_config(directory)
    decode.check_can_generate(model_class(config), model_name(directory))
    tokenizer, tokenizer_bytes = measured_tokenizer(directory)
    if tokenizer is None:
        raise OffloadError(
            f"{model_name(directory)} has no tokenizer, which --batch needs; copy its files there"
        )
    check_settings(wish.template, tokenizer, directory)
    with stopped_at(prompt_time(files.output)) as clock:
        tasks, keys, context = make_tasks(jobs, wish, tokenizer, directory, config)
    with Answers(files.output, keys, [job.id for job in jobs]) as answers:
        todo = [task for task in tasks if task.index not in answers.done]
        _say_found(answers, len(tasks), clock.text)
        if not todo:
            return
        row_products.prepare()
        prepared = make_plan(
            directory,
            wish.wanted,
            options,
            prompt_tokens=max(len(t.ids) for t in todo),
            context=context,
            tokenizer_bytes=tokenizer_bytes,
        )
        choice = choose(prepared, jobs=len(todo), asked=files.size)
        view.show_summary(console.err(), prepared)
        console.note(choice_text(choice), "batch")
        with signals_wait():
            _answer(wish, prepared, choice, jobs, todo, keys, answers, tokenizer, clock.text)
    raise_received()


def _defaults(wish: Wish) -> Defaults:
    flags = wish.sampling
    return Defaults(
        sampling=TokenSampling(
            temperature=flags.temp, top_k=flags.top_k, top_p=flags.top_p, min_p=flags.min_p
        ),
        max_new_tokens=wish.max_new_tokens,
        stops=wish.stops,
    )


def _say_found(answers: Answers, total: int, prompts_of: str | None) -> None:
    if answers.torn:
        console.note(f"cut off {answers.torn} bytes of a line that a stop had left unfinished")
    if answers.done:
        left = total - len(answers.done)
        ends = f"{left} to go" if left else "nothing to do"
        console.note(f"{len(answers.done)} of {total} prompts are answered already: {ends}")
        if left and prompts_of is not None:
            console.note(f"the chat template's date stays that of their prompts: {prompts_of}")


def choice_text(choice: Choice) -> str:
    """The number of sequences and what is expected, in a line."""
    many = choice.sequences > 1
    said = f"{choice.sequences} prompt{'s' if many else ''} at once ({choice.why})"
    if choice.tok_s is not None:
        said += f", predicted {format_rate(choice.tok_s)} tok/s, set by {choice.bound}"
    said += f"; a pass reads {format_bytes(round(choice.read_bytes))} from disk"
    if choice.compute_s is not None and choice.read_s is not None:
        said += (
            f" in {choice.read_s:.3g} s and computes "
            f"{1e3 * choice.compute_s / choice.sequences:.3g} ms for each"
        )
    return said


def _answer(
    wish: Wish,
    prepared: Prepared,
    choice: Choice,
    jobs: Sequence[Job],
    todo: list[Task],
    keys: Sequence[str],
    answers: Answers,
    tokenizer: Any,
    prompts_of: str | None,
) -> None:
    model = open_model(prepared)
    texts: dict[int, _Text] = {}
    tally = Tally(len(todo))
    start = end = model.offload.stats()

    def tap(task: Task) -> OnToken:
        texts[task.index] = text = _Text(tokenizer, [*jobs[task.index].stops, *own])
        return text.push

    def on_answer(task: Task, found: Generation) -> None:
        text = texts.pop(task.index)
        answer = {
            ID: jobs[task.index].id,
            "text": text.finish(),
            "prompt_tokens": len(task.ids),
            "new_tokens": len(found.tokens),
            "finish_reason": found.finish_reason,
        }
        if task.seed is not None:
            answer["seed"] = task.seed
        if prompts_of is not None:
            answer[TIME] = prompts_of
        answers.add(task.index, keys[task.index], answer)

    def on_step(now: Tally) -> None:
        nonlocal tally
        tally = now
        raise_received()
        tell(now)

    try:
        stop_between(prepared)
        say_kernel_error(prepared, model)
        start = model.offload.stats()
        own = own_stops(model.generation_config)
        with console.share_progress("answering") as bar:
            tell = _Progress(bar)
            tally = run_batch(
                model,
                todo,
                sequences=choice.sequences,
                pass_rows=choice.pass_rows,
                tap=tap,
                on_answer=on_answer,
                on_step=on_step,
            )
    finally:
        end = model.offload.stats()
        close_model(prepared, model)
        if tally.passes:
            read = end["disk_read_bytes"] - start["disk_read_bytes"]
            console.note(stats_line(tally, end, read), "stats")
            output.write_json(wish.json_file, _json(tally, prepared, choice, end, read))
    if tally.failed:
        index, why = min(tally.failed.items())
        missing = tally.total - tally.done
        raise OffloadError(
            f"{missing} of {tally.total} prompts have no answer; the first that failed (line "
            f"{jobs[index].line}): {why}; the same command tries them again"
        ) from why


class _Text:
    """The text of one answer as it comes."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._text = StoppedText(TextDecoder(tokenizer), stops)
        self._pieces: list[str] = []

    def push(self, token: int) -> bool:
        self._pieces.append(self._text.push(token))
        return self._text.hit

    def finish(self) -> str:
        self._pieces.append(self._text.finish())
        return "".join(self._pieces)


class _Progress:
    """A bar on a terminal, a line for each tenth elsewhere."""

    def __init__(self, bar: Callable[[str, float], None]) -> None:
        self._bar = bar
        self._next_s = 0.0
        self._said = 0

    def __call__(self, tally: Tally) -> None:
        now = time.perf_counter()
        share = tally.done * SHARES // tally.total
        if console.err().is_terminal:
            if now >= self._next_s:
                self._next_s = now + TICK_S
                self._bar(progress_text(tally), tally.done / tally.total)
        elif self._said < share < SHARES:
            self._said = share
            console.note(progress_text(tally), "progress")


def progress_text(tally: Tally) -> str:
    """``12/100 prompts, 34.5 tok/s, 67 s left``."""
    parts = [f"{tally.done}/{tally.total} prompts"]
    if tally.tok_s is not None:
        parts.append(f"{format_rate(tally.tok_s)} tok/s")
    if tally.eta_s is not None:
        parts.append(f"{tally.eta_s:.0f} s left")
    return ", ".join(parts)


def stats_line(tally: Tally, end: decode.Snapshot, read_bytes: int) -> str:
    """All that counts, separated by dots. ``read_bytes``: from the disk since the start."""
    parts = [
        f"{tally.done} of {tally.total} prompts in {tally.seconds:.2f} s",
        f"{report.rate_text(tally.tok_s)} ({tally.new_tokens} new tokens, {tally.prompt_tokens} "
        f"of prompts)",
        f"{tally.passes} passes for {tally.forwards} forwards",
    ]
    if read_bytes and tally.new_tokens:
        parts.append(f"{read_bytes / 2**20 / tally.new_tokens:.3g} MiB/token from disk")
    parts.append(report.memory_text(end))
    return " · ".join(parts)


def _json(
    tally: Tally, prepared: Prepared, choice: Choice, end: decode.Snapshot, read_bytes: int
) -> dict[str, Any]:
    return {
        "prompts": tally.total,
        "answered": tally.done,
        "failed": len(tally.failed),
        "prompt_tokens": tally.prompt_tokens,
        "new_tokens": tally.new_tokens,
        "seconds": tally.seconds,
        "tok_s": tally.tok_s,
        "passes": tally.passes,
        "forwards": tally.forwards,
        "most_at_once": tally.most,
        "read_bytes": read_bytes,
        "batch": choice.to_json(),
        "plan": view.plan_json(prepared),
        "end": end,
    }


__all__ = ["Files", "run"]
