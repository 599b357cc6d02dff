"""One run of ``generate`` from the prompt to the report."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.cli import console, decode, output, prompt, report, view
from offload.cli.frozen import Frozen
from offload.cli.planning import Wanted, context_limit, find_model, fit_context, make_plan
from offload.cli.sampling import Sampling
from offload.cli.signals import raise_received, signals_wait
from offload.cli.streams import write_words
from offload.cli.template import check_settings
from offload.cli.text import IdDecoder, TextDecoder
from offload.cli.threads import use_threads
from offload.cli.tracing import Tracing
from offload.errors import OffloadError
from offload.models.meta import model_class, read_config
from offload.models.naming import model_name
from offload.models.pause import pause_before
from offload.models.prepared import Prepared
from offload.models.sampling import own_stops, vocabulary_of
from offload.runtime.guess_cache import remember
from offload.runtime.rss import current_rss
from offload.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The flags of ``generate``, checked as far as they can be without the model."""

    model: str
    quant: str | None
    asked: prompt.Asked
    raw: bool
    template: Mapping[str, Any]
    max_new_tokens: int | None
    context: int | None
    sampling: Sampling
    stops: tuple[str, ...]
    ignore_eos: bool
    wanted: Wanted
    json_file: Path | None
    tracing: Tracing


def run_session(wish: Wish) -> None:
    """Plan, load, generate, report. The model is closed whatever happens.

    Raises:
        OffloadError: anything for the user to change.
    """
    options = wish.wanted.options()
    options.recorder = wish.tracing.recorder
    use_threads(wish.wanted.threads)
    directory = find_model(wish.model, wish.quant, wish.wanted.kernels)
    config = read_config(directory)
    decode.check_can_generate(model_class(config), model_name(directory))
    tokenizer, tokenizer_bytes = measured_tokenizer(directory)
    if tokenizer is None and wish.stops:
        raise OffloadError(
            f"--stop needs text, and {model_name(directory)} has no tokenizer; drop it"
        )
    check_settings(wish.template, tokenizer, directory)
    ids = prompt.encode(
        wish.asked, tokenizer, raw=wish.raw, directory=directory, settings=wish.template
    )
    prompt.check_ids(ids, config)
    frozen = None if wish.wanted.plan is None else Frozen(wish.wanted.plan)
    new_tokens, context = fit_context(
        prompt=len(ids),
        new_tokens=wish.max_new_tokens,
        context=wish.context if frozen is None else frozen.context(wish.context),
        limit=context_limit(config),
    )
    prepared = make_plan(
        directory,
        wish.wanted,
        options,
        prompt_tokens=len(ids) if frozen is None else frozen.prompt_tokens(len(ids)),
        context=context,
        tokenizer_bytes=tokenizer_bytes + wish.tracing.ring_bytes,
        frozen=frozen,
    )
    view.show_summary(console.err(), prepared)
    describe_run(wish.tracing, prepared)
    with wish.tracing, signals_wait():
        _load_and_run(wish, prepared, ids, new_tokens, tokenizer)
    raise_received()


def _load_and_run(
    wish: Wish, prepared: Prepared, ids: list[int], new_tokens: int, tokenizer: Any | None
) -> None:
    model = open_model(prepared)
    sampling: Mapping[str, float | int] = {}
    runs: list[decode.Run] = []
    pipe_gone = False
    try:
        stop_between_units(prepared)
        say_kernel_error(prepared, model)
        say_lost_stops(model, tokenizer)
        sampling = wish.sampling.apply(model.generation_config, vocabulary_of(model))
        with console.waiting(f"reading the prompt, {len(ids)} tokens") as first_text:
            decode.generate(
                model,
                ids,
                max_new_tokens=new_tokens,
                ignore_eos=wish.ignore_eos,
                decoder=IdDecoder() if tokenizer is None else TextDecoder(tokenizer),
                stops=wish.stops,
                show=lambda text: _show(text, first_text),
                on_end=runs.append,
            )
    except BrokenPipeError:
        pipe_gone = True
        raise
    finally:
        close_model(prepared, model)
        if runs and not pipe_gone:
            _report(runs[0], prepared, wish, sampling)


def describe_run(tracing: Tracing, prepared: Prepared) -> None:
    """What a trace says of the run beside its spans."""
    if tracing.recorder is not None:
        tracing.title = f"offload: {model_name(prepared.meta.directory)}"
        tracing.facts |= view.plan_json(prepared)


def stop_between_units(prepared: Prepared) -> None:
    """Let a signal that waits raise before each unit: a long prompt can take minutes until the
    first token."""
    pause_before((unit.module for unit in prepared.cut.units), raise_received)


def measured_tokenizer(directory: Path) -> tuple[Any | None, int]:
    """The tokenizer and the memory it takes: that counts against the budget, too."""
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # What the libraries weigh is the bare process's: use them once on nothing.
    toy = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), unk_token="?")
    toy.decode(toy("?")["input_ids"])
    _ = AutoTokenizer
    before = current_rss()
    found = prompt.load_tokenizer(directory)
    return found, 0 if found is None else max(0, current_rss() - before)


def open_model(prepared: Prepared) -> Any:
    """Load what stays in memory, with a bar; then say how long it took."""
    with console.byte_progress() as progress:
        model = prepared.open(progress)
    stats = model.offload.stats()
    read, load_s = stats["disk_read_bytes"], stats["load_s"]
    said = f"{load_s:.2f} s, {format_bytes(read)} into memory"
    if converted := prepared.recipes.convert_bytes(prepared.cut.blocks):
        said += f" after converting {format_bytes(converted)}"
    elif load_s > 0:
        said += f", {format_bytes(read / load_s)}/s"
    console.note(said, "load")
    return model


def close_model(prepared: Prepared, model: Any) -> None:
    """End a run, and keep for the next prediction how often its guesses were right."""
    stats = model.offload.executor.stats
    model.offload.close()
    remember(prepared.meta.directory, stats.guessed, stats.guessed_right)


def say_kernel_error(prepared: Prepared, model: Any) -> None:
    """Measure by how much fast kernels change the logits, if they were asked for, and say it."""
    if prepared.options.kernels != "fast":
        return
    with console.waiting("comparing the fast kernels with torch's"):
        prepared.check_kernels(model)
    if (found := prepared.kernel_error) is not None:
        console.note(f"{found} ({found.seconds:.1f} s)", "fast kernels")


def say_lost_stops(model: Any, tokenizer: Any | None) -> None:
    """Say which of the checkpoint's stop strings nobody can look for without text.

    Raises:
        OffloadError: they are nothing.
    """
    own = own_stops(model.generation_config)
    if own and tokenizer is None:
        shown = ", ".join(map(repr, own))
        console.note(f"without a tokenizer the checkpoint's stop strings ({shown:.60}) end nothing")


def _show(text: str, first_text: Any) -> None:
    first_text()  # the spinner goes before the first letter comes
    write_words(text)


def _report(
    run: decode.Run, prepared: Prepared, wish: Wish, sampling: Mapping[str, float | int]
) -> None:
    if sys.stdout.isatty() and run.text and not run.text.endswith("\n"):
        # The next line should start at the left. A pipe gets the text as it is.
        _show("\n", lambda: None)
    console.note(report.stats_line(run, prepared), "stats")
    if (recorded := prepared.options.record_routing) is not None:
        computed = "" if prepared.options.prompt_cache is None else " that was computed"
        console.note(f"what every token{computed} was routed to is in {recorded}", "routing")
    if (said := report.resident_note(prepared.plan, run.at_end)) is not None:
        console.note(said)
    output.write_json(
        wish.json_file, report.run_json(run, prepared, sampling, torch.get_num_threads())
    )
