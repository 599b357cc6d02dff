"""``offload serve``: a model behind OpenAI's interface."""

from __future__ import annotations

from typing import Annotated

import typer

from offload.cli import flags, output
from offload.cli.template import parse_settings
from offload.errors import OffloadError

PARALLEL, QUEUE, CHUNK, GRACE_S = 4, 64, 256, 10.0


def serve(
    model: flags.Model,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen. Beyond this machine: a key.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="N", help="0 takes any that is free.")
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="OFFLOAD_API_KEY",
            metavar="KEY",
            help="Who asks has to send it; several may be given (in the environment: with blanks "
            "between). Process lists show it here, and not in the environment.",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "-c",
            "--context",
            min=2,
            metavar="N",
            help="Tokens of prompt and answer together that memory is set aside for. Default: "
            "4096, or the model's limit if that is less.",
        ),
    ] = None,
    parallel: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Requests that run at once; memory is set aside for each."
        ),
    ] = PARALLEL,
    max_queue: Annotated[
        int, typer.Option(min=1, metavar="N", help="Requests that wait beyond those; then 429.")
    ] = QUEUE,
    prefill_chunk: Annotated[
        int,
        typer.Option(
            "--prefill-chunk",
            "--prompt-cache-chunk",  # as of the other commands, whose messages this one shares
            min=2,
            metavar="N",
            help="Tokens of prompts that one pass reads. More: prompts are read sooner; fewer: "
            "answers under way wait less for them, and more of --prompt-cache is reused.",
        ),
    ] = CHUNK,
    grace: Annotated[
        float,
        typer.Option(
            min=0, max=3600, metavar="SECONDS", help="For answers under way when it is to end."
        ),
    ] = GRACE_S,
    threads: flags.Threads = None,
    quant: flags.Quant = None,
    kernels: flags.Kernels = None,
    attention: flags.Attention = None,
    kv: flags.Kv = None,
    kv_keep: flags.KvKeep = None,
    ram: flags.Ram = None,
    kv_ram: flags.KvRam = None,
    prompt_cache: flags.PromptCache = None,
    prompt_cache_limit: flags.PromptCacheLimit = None,
    gpu: flags.Gpu = None,
    device: flags.DeviceName = "auto",
    disk: flags.Disk = None,
    dtype: flags.Dtype = None,
    predict: flags.Predict = True,
    hybrid: flags.Hybrid = None,
    guess: flags.Guess = True,
    expert_policy: flags.ExpertPolicy = None,
    routing: flags.RoutingFile = None,
    template: flags.Template = None,
    json_file: flags.JsonFile = None,
    verbose: flags.Verbose = False,
) -> None:
    """Answer OpenAI's clients over HTTP, several at once, with a chat page at /.

    /v1/chat/completions, /v1/completions, /v1/models, /health, /stats and /metrics. Requests go
    through the model together: weights that stream are read once per pass for all of them, and
    each answer is what it would be alone. Clients (by key and address) are served in turn. Without
    a temperature tokens are chosen as the checkpoint's generation_config.json says, greedily if it
    says nothing. Ctrl-C or SIGTERM: nothing new is taken, what runs is finished within --grace.
    """  # fmt: skip
    output.check_target(json_file, "--json")
    settings = parse_settings(template)
    check_extra()
    from offload.cli import libraries

    libraries.set_up(verbose=verbose)
    from offload.cli.planning import Wanted
    from offload.cli.serve_session import Wish, run_serve

    wanted = Wanted(
        ram=ram,
        kv_ram=kv_ram,
        kv=None if kv is None else kv.value,
        kv_keep=kv_keep,
        attention=None if attention is None else attention.value,
        prompt_cache=prompt_cache,
        prompt_cache_limit=prompt_cache_limit,
        prompt_cache_chunk=None if prompt_cache is None else prefill_chunk,
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
    )
    run_serve(
        Wish(
            model=model,
            quant=None if quant is None else quant.value,
            host=host,
            port=port,
            keys=tuple(api_key or ()),
            template=settings,
            context=context,
            parallel=parallel,
            max_queue=max_queue,
            prefill_chunk=prefill_chunk,
            grace_s=grace,
            wanted=wanted,
            json_file=json_file,
            verbose=verbose,
        )
    )


def check_extra() -> None:
    """Refuse before anything is loaded.

    Raises:
        OffloadError: what the extra ``serve`` installs is not there.
    """
    from importlib.util import find_spec

    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise OffloadError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed; "
            f"pip install 'offload[serve]'"
        )
