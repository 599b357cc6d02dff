"""One run of ``chat``: plan, load, talk, report."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.cli import chat_report, console, decode, output, session, view
from offload.cli.chat_cache import KeptCache, StoredCache, can_reuse
from offload.cli.chat_history import Conversation, Overflow
from offload.cli.chat_input import Source
from offload.cli.chat_shell import Shell
from offload.cli.chat_talk import Talk, Terms
from offload.cli.planning import Wanted, context_limit, find_model, make_plan
from offload.cli.report import resident_note
from offload.cli.sampling import Sampling
from offload.cli.signals import Interrupted, raise_received, signals_wait
from offload.cli.streams import write_words
from offload.cli.template import check_settings
from offload.cli.threads import use_threads
from offload.cli.tracing import Tracing
from offload.errors import OffloadError
from offload.models.meta import model_class, read_config
from offload.models.naming import model_name
from offload.models.prepared import Prepared
from offload.models.sampling import vocabulary_of

DEFAULT_CONTEXT = 4096
"""Tokens of a conversation that memory is set aside for, unless said otherwise; fewer if the model
takes fewer. More than a single prompt's: history is what a chat is about."""

TALK_BYTES = 2 << 20
"""What a conversation holds besides the model: its texts and tokens, and what the last answer has
left in the heap when the next begins. 0 to 2 MiB were seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The flags of ``chat``, checked as far as they can be without the model."""

    model: str
    quant: str | None
    system: str | None
    template: Mapping[str, Any]
    context: int | None
    max_new_tokens: int | None
    overflow: Overflow
    reuse: bool
    sampling: Sampling
    stops: tuple[str, ...]
    ignore_eos: bool
    wanted: Wanted
    json_file: Path | None
    tracing: Tracing
    verbose: bool


def run_chat(wish: Wish, source: Source) -> None:
    """Plan, load, talk, report. The model is closed whatever happens.

    Raises:
        OffloadError: anything for the user to change.
    """
    options = wish.wanted.options()
    options.recorder = wish.tracing.recorder
    options.caller_bytes, options.in_pieces = TALK_BYTES, True
    use_threads(wish.wanted.threads)
    directory = find_model(wish.model, wish.quant, wish.wanted.kernels)
    config = read_config(directory)
    decode.check_can_generate(model_class(config), model_name(directory))
    tokenizer, tokenizer_bytes = session.measured_tokenizer(directory)
    check_template(tokenizer, directory)
    check_settings(wish.template, tokenizer, directory)
    terms = Terms(
        directory=directory,
        config=config,
        tokenizer=tokenizer,
        template=wish.template,
        context=chat_context(wish.context, wish.max_new_tokens, context_limit(config)),
        new_tokens=wish.max_new_tokens,
        stops=wish.stops,
        ignore_eos=wish.ignore_eos,
        overflow=wish.overflow,
    )
    conversation = Conversation(wish.system)
    terms.check(conversation)
    prepared = make_plan(
        directory,
        wish.wanted,
        options,
        # All of the context may have to be read in one pass: a template that rewrites its
        # beginning, a conversation that is loaded. Splitting that would read the experts of an
        # MoE anew for every part.
        prompt_tokens=terms.context,
        context=terms.context,
        tokenizer_bytes=tokenizer_bytes + wish.tracing.ring_bytes,
    )
    view.show_summary(console.err(), prepared)
    session.describe_run(wish.tracing, prepared)
    with wish.tracing, signals_wait():
        _load_and_talk(wish, prepared, terms, conversation, source)
    raise_received()


def check_template(tokenizer: Any | None, directory: Path) -> None:
    """Refuse a checkpoint that nothing tells how a conversation looks.

    Raises:
        OffloadError: no tokenizer, or no chat template.
    """
    if tokenizer is None:
        raise OffloadError(
            f"{model_name(directory)} has no tokenizer to chat with; 'offload generate -m … "
            f"--prompt-ids 1,2,3' takes token ids"
        )
    if not getattr(tokenizer, "chat_template", None):
        raise OffloadError(
            f"{model_name(directory)} has no chat template: nothing says how it tells "
            f"messages apart; 'offload generate -m … -p TEXT' continues plain text"
        )


def chat_context(context: int | None, new_tokens: int | None, limit: int | None) -> int:
    """How many tokens of conversation memory is set aside for.

    Raises:
        OffloadError: more than the model takes, or an answer that leaves no room for a message.
    """
    if context is not None and limit is not None and context > limit:
        raise OffloadError(f"--context {context} is over the model's limit of {limit} tokens")
    found = context or min(DEFAULT_CONTEXT, limit or DEFAULT_CONTEXT)
    if new_tokens is not None and new_tokens >= found:
        raise OffloadError(
            f"-n {new_tokens} leaves no room for a message in the context of {found} tokens; "
            f"lower it or raise --context"
        )
    return found


def _load_and_talk(
    wish: Wish, prepared: Prepared, terms: Terms, conversation: Conversation, source: Source
) -> None:
    model = session.open_model(prepared)
    ended = "failed"
    talk: Talk | None = None
    sampling: Mapping[str, float | int] = {}
    try:
        session.stop_between_units(prepared)
        session.say_kernel_error(prepared, model)
        sampling = wish.sampling.apply(model.generation_config, vocabulary_of(model))
        cache = cache_for(model, wish.reuse)
        # On a grid keys are those of a run that reads everything, whatever rotates them.
        keeps = type(cache) is KeptCache
        if keeps and (why := can_reuse(model, terms.context)) is not None:
            console.note(f"every turn reads the whole conversation: {why}")
            cache = None
        talk = Talk(model, terms, conversation, cache=cache, show=write_words)
        shell = Shell(
            talk,
            source,
            plan=prepared.plan,
            counters=model.offload.stats,
            model=model_name(terms.directory),
            verbose=wish.verbose,
        )
        shell.run()
        ended = "left"
    except Interrupted as stop:
        ended = "interrupted" if stop.signum == signal.SIGINT else "terminated"
        raise
    except BrokenPipeError:
        talk = None  # nobody reads
        raise
    finally:
        end = model.offload.stats()
        session.close_model(prepared, model)
        if talk is not None:
            _report(talk, prepared, wish, sampling, end, ended)


def cache_for(model: Any, reuse: bool) -> KeptCache | None:
    """What is kept between turns, and between runs if there is a prompt cache."""
    if model.offload.prompts is not None:
        # Without --reuse, each turn finds what it read before on the disk.
        return StoredCache(model.offload.prompts) if reuse else None
    return KeptCache(model.offload.new_cache) if reuse else None


def _report(
    talk: Talk,
    prepared: Prepared,
    wish: Wish,
    sampling: Mapping[str, float | int],
    end: Mapping[str, Any],
    ended: str,
) -> None:
    if talk.turns:
        console.note(chat_report.stats_line(talk, prepared, end), "stats")
        if (said := resident_note(prepared.plan, end)) is not None:
            console.note(said)
    if (recorded := prepared.options.record_routing) is not None:
        computed = "" if prepared.options.prompt_cache is None else " that was computed"
        console.note(f"what every token{computed} was routed to is in {recorded}", "routing")
    threads = torch.get_num_threads()
    output.write_json(
        wish.json_file,
        chat_report.chat_json(talk, prepared, sampling, threads=threads, end=end, ended=ended),
    )
