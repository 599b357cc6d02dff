"""``offload generate``: text from a prompt, with a model that need not fit in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offload.cli import flags, output
from offload.cli.prompt import read_prompt
from offload.cli.sampling import Sampling
from offload.cli.tracing import Tracing, check_trace


def generate(
    model: flags.Model,
    prompt: Annotated[
        str | None,
        typer.Option("-p", "--prompt", metavar="TEXT", help="The prompt; - reads it from stdin."),
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read the prompt from a UTF-8 file.")
    ] = None,
    prompt_ids: Annotated[
        str | None,
        typer.Option(metavar="IDS", help="The prompt as token ids, e.g. 1,2,3; no tokenizer."),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--max-new-tokens",
            min=1,
            metavar="N",
            help="Tokens to generate at most. Default: 128, or as many as the context takes.",
        ),
    ] = None,
    context: flags.Context = None,
    threads: flags.Threads = None,
    temp: flags.Temp = 0.0,
    top_k: flags.TopK = None,
    top_p: flags.TopP = None,
    min_p: flags.MinP = None,
    seed: flags.Seed = None,
    stop: flags.Stop = None,
    ignore_eos: flags.IgnoreEos = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Do not put the prompt through the chat template.")
    ] = False,
    quant: flags.Quant = None,
    kernels: flags.Kernels = None,
    ram: flags.Ram = None,
    kv_ram: flags.KvRam = None,
    gpu: flags.Gpu = None,
    device: flags.DeviceName = "auto",
    disk: flags.Disk = None,
    dtype: flags.Dtype = None,
    predict: flags.Predict = True,
    guess: flags.Guess = True,
    expert_policy: flags.ExpertPolicy = None,
    routing: flags.RoutingFile = None,
    record_routing: flags.RecordRouting = None,
    plan: flags.PlanFile = None,
    trace: flags.Trace = None,
    trace_plot: flags.TracePlot = None,
    json_file: flags.JsonFile = None,
    verbose: flags.Verbose = False,
) -> None:
    """Generate text; the weights stream from the disk as far as they do not fit.

    stdout carries the text and nothing else; the plan, progress and figures go to stderr. Decoding
    is greedy unless --temp says otherwise; then what is left out of --top-k, --top-p and --min-p
    comes from the checkpoint's generation_config.json, or is off. Without a prompt flag the prompt
    is read from stdin. If the tokenizer has a chat template, the prompt is put through it as a
    user's message, unless --raw. A checkpoint without a tokenizer takes --prompt-ids and gives ids.
    """  # fmt: skip
    asked = read_prompt(prompt, prompt_file, prompt_ids)
    sampling = Sampling(temp=temp, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    flags.check_stops(stop)
    output.check_target(json_file, "--json")
    output.check_target(record_routing, "--record-routing")
    check_trace(trace, trace_plot)
    from offload.cli import libraries

    libraries.set_up(verbose=verbose)
    from offload.cli.planning import Wanted
    from offload.cli.session import Wish, run_session

    wanted = Wanted(
        ram=ram,
        kv_ram=kv_ram,
        gpu=gpu,
        device=device,
        disk=disk,
        dtype=dtype,
        threads=threads,
        predict=predict,
        guess=guess,
        expert_policy=expert_policy,
        routing=routing,
        kernels=None if kernels is None else kernels.value,
        record_routing=record_routing,
        plan=plan,
    )
    tracing = Tracing(trace, trace_plot)
    run_session(
        Wish(
            model=model,
            quant=None if quant is None else quant.value,
            asked=asked,
            raw=raw,
            max_new_tokens=max_new_tokens,
            context=context,
            sampling=sampling,
            stops=tuple(stop or ()),
            ignore_eos=ignore_eos,
            wanted=wanted,
            json_file=json_file,
            tracing=tracing,
        )
    )
