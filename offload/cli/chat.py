"""``offload chat``: a conversation with a model that need not fit in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offload.cli import flags, output
from offload.cli.chat_history import Overflow
from offload.cli.chat_input import open_source
from offload.cli.prompt import read_text
from offload.cli.sampling import Sampling
from offload.cli.template import parse_settings
from offload.cli.tracing import Tracing, check_picture
from offload.errors import OffloadError


def chat(
    model: flags.Model,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A system prompt: how to answer.")
    ] = None,
    system_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read it from a UTF-8 file.")
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="All of stdin is one message; answer it and end.")
    ] = False,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--max-new-tokens",
            min=1,
            metavar="N",
            help="Tokens of one answer at most. Default: as many as the context takes.",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "-c",
            "--context",
            min=8,
            metavar="N",
            help="Tokens of conversation that memory is set aside for. Default: 4096, or the "
            "model's limit if that is less.",
        ),
    ] = None,
    overflow: Annotated[
        Overflow,
        typer.Option(
            help="When the conversation outgrows the context: drop its oldest exchanges, and say "
            "so, or stop and take no more messages."
        ),
    ] = Overflow.DROP,
    reuse: Annotated[
        bool,
        typer.Option(
            "--reuse/--no-reuse",
            help="Keep what was read for the next turn, or read the whole conversation each time.",
        ),
    ] = True,
    threads: flags.Threads = None,
    temp: flags.Temp = 0.0,
    top_k: flags.TopK = None,
    top_p: flags.TopP = None,
    min_p: flags.MinP = None,
    seed: flags.Seed = None,
    stop: flags.Stop = None,
    ignore_eos: flags.IgnoreEos = False,
    template: flags.Template = None,
    quant: flags.Quant = None,
    kernels: flags.Kernels = None,
    ram: flags.Ram = None,
    kv: flags.Kv = None,
    kv_keep: flags.KvKeep = None,
    attention: flags.Attention = None,
    kv_ram: flags.KvRam = None,
    prompt_cache: flags.PromptCache = None,
    prompt_cache_limit: flags.PromptCacheLimit = None,
    prompt_cache_chunk: flags.PromptCacheChunk = None,
    gpu: flags.Gpu = None,
    device: flags.DeviceName = "auto",
    disk: flags.Disk = None,
    dtype: flags.Dtype = None,
    predict: flags.Predict = True,
    hybrid: flags.Hybrid = None,
    guess: flags.Guess = True,
    expert_policy: flags.ExpertPolicy = None,
    routing: flags.RoutingFile = None,
    record_routing: flags.RecordRouting = None,
    trace: flags.Trace = None,
    trace_plot: flags.TracePlot = None,
    json_file: flags.JsonFile = None,
    verbose: flags.Verbose = False,
) -> None:
    """Talk to a model; the weights stream from the disk as far as they do not fit.

    At a terminal: messages with line editing; /help lists commands; Ctrl-C stops an answer and not
    the program, Ctrl-D leaves. In a pipe every line is a message (or all of stdin with --once);
    there are no commands, and stdout carries the answers and nothing else. Only what is new since
    the last turn is read by the model; with --prompt-cache, since the last run with the same
    beginning. Sampling is as in 'offload generate'. --verbose adds figures after each answer.
    """  # fmt: skip
    if system is not None and system_file is not None:
        raise OffloadError("--system and --system-file contradict each other; give one")
    if system is not None:
        flags.check_text(system, "--system")
    if system_file is not None:
        system = read_text(system_file, "--system-file")
    sampling = Sampling(temp=temp, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    flags.check_stops(stop)
    settings = parse_settings(template)
    reads = (system_file, routing)
    targets = {
        "--json": json_file, "--record-routing": record_routing, "--trace": trace,
        "--trace-plot": trace_plot,
    }  # fmt: skip
    output.check_targets(targets, reads=reads)
    check_picture(trace_plot)
    source = open_source(once=once)
    from offload.cli import libraries

    libraries.set_up(verbose=verbose)
    from offload.cli.chat_session import Wish, run_chat
    from offload.cli.planning import Wanted

    wanted = Wanted(
        ram=ram,
        kv=None if kv is None else kv.value,
        kv_keep=kv_keep,
        attention=None if attention is None else attention.value,
        kv_ram=kv_ram,
        prompt_cache=prompt_cache,
        prompt_cache_limit=prompt_cache_limit,
        prompt_cache_chunk=prompt_cache_chunk,
        gpu=gpu,
        device=device,
        disk=disk,
        dtype=dtype,
        threads=threads,
        predict=predict,
        hybrid=hybrid,
        guess=guess,
        expert_policy=expert_policy,
        routing=routing,
        kernels=None if kernels is None else kernels.value,
        record_routing=record_routing,
    )
    run_chat(
        Wish(
            model=model,
            quant=None if quant is None else quant.value,
            system=system,
            template=settings,
            context=context,
            max_new_tokens=max_new_tokens,
            overflow=overflow,
            reuse=reuse,
            sampling=sampling,
            stops=tuple(stop or ()),
            ignore_eos=ignore_eos,
            wanted=wanted,
            json_file=json_file,
            tracing=Tracing(trace, trace_plot),
            verbose=verbose,
        ),
        source,
    )
