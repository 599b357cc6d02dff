"""``offload generate``: text from a prompt, with a model that need not fit in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offload.cli import flags, output
from offload.cli.prompt import Asked, read_prompt
from offload.cli.sampling import Sampling
from offload.cli.template import parse_settings
from offload.cli.tracing import Tracing, check_picture
from offload.errors import OffloadError


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
    batch: Annotated[
        Path | None,
        typer.Option(
            "--batch",
            metavar="FILE",
            help="Answer many prompts: a JSON object with prompt or messages per line, and if "
            "wanted id, max_new_tokens, temperature, top_k, top_p, seed, stop. The weights are "
            "read once for many of them; each answer is the same as alone.",
        ),
    ] = None,
    output_file: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="Where the answers to --batch go, a JSON object per line, as they come. What is "
            "there already is not done again.",
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Prompts of --batch at the same time. Default: what the plan finds fastest.",
        ),
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
    template: flags.Template = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Do not put the prompt through the chat template.")
    ] = False,
    quant: flags.Quant = None,
    kernels: flags.Kernels = None,
    ram: flags.Ram = None,
    kv_ram: flags.KvRam = None,
    kv: flags.Kv = None,
    kv_keep: flags.KvKeep = None,
    attention: flags.Attention = None,
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
    With --batch nothing goes to stdout.
    """  # fmt: skip
    batched = _batch_flags(
        batch,
        output_file,
        batch_size,
        {
            "-p": (prompt, "prompts come from the file"),
            "--prompt-file": (prompt_file, "prompts come from the file"),
            "--prompt-ids": (prompt_ids, "prompts come from the file"),
            "--record-routing": (record_routing, "what is recorded is one generation's"),
            "--trace": (trace, "a timeline shows one generation's waiting"),
            "--trace-plot": (trace_plot, "a timeline shows one generation's waiting"),
            "--plan": (plan, "the number of prompts at once is a part of the plan"),
        },
    )
    asked = Asked() if batched else read_prompt(prompt, prompt_file, prompt_ids)
    sampling = Sampling(temp=temp, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    flags.check_stops(stop)
    settings = parse_settings(template)
    if settings and (raw or prompt_ids is not None):
        other = "--raw" if raw else "--prompt-ids"
        raise OffloadError(f"--template is for the chat template, which {other} does without")
    reads = (prompt_file, batch, plan, routing)
    targets = {
        "--json": json_file, "--output": batched[1] if batched is not None else None,
        "--record-routing": record_routing, "--trace": trace, "--trace-plot": trace_plot,
    }  # fmt: skip
    output.check_targets(targets, reads=reads)
    check_picture(trace_plot)
    from offload.cli import libraries

    libraries.set_up(verbose=verbose)
    from offload.cli.planning import Wanted
    from offload.cli.session import Wish, run_session

    wanted = Wanted(
        ram=ram,
        kv_ram=kv_ram,
        kv=None if kv is None else kv.value,
        kv_keep=kv_keep,
        attention=None if attention is None else attention.value,
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
        plan=plan,
    )
    wish = Wish(
        model=model,
        quant=None if quant is None else quant.value,
        asked=asked,
        raw=raw,
        template=settings,
        max_new_tokens=max_new_tokens,
        context=context,
        sampling=sampling,
        stops=tuple(stop or ()),
        ignore_eos=ignore_eos,
        wanted=wanted,
        json_file=json_file,
        tracing=Tracing(trace, trace_plot),
    )
    if batched is None:
        run_session(wish)
        return
    from offload.cli.batch import Files, run

    run(Files(batch=batched[0], output=batched[1], size=batch_size), wish)


def _batch_flags(
    batch: Path | None,
    target: Path | None,
    size: int | None,
    others: dict[str, tuple[object, str]],
) -> tuple[Path, Path] | None:
    """The two files of a batch; None without one.

    Raises:
        OffloadError: flags that contradict each other or cannot take effect.
    """
    if batch is None:
        for flag, value in (("--output", target), ("--batch-size", size)):
            if value is not None:
                raise OffloadError(f"{flag} is for --batch FILE; add it, or drop {flag}")
        return None
    if target is None:
        raise OffloadError("--batch needs --output FILE for the answers")
    for name, (other, why) in others.items():
        if other is not None:
            raise OffloadError(f"{name} and --batch contradict each other ({why}); drop one")
    output.check_target(target, "--output")
    if target.exists() and target.samefile(batch if batch.exists() else target.parent):
        raise OffloadError("--output would write into --batch; give another file")
    return batch, target
