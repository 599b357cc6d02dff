"""``offload plan``: what would live where, and how fast it would be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offload.cli import finetune_flags as tune
from offload.cli import flags, output
from offload.errors import OffloadError


def plan(
    model: flags.Model,
    quant: flags.Quant = None,
    kernels: flags.Kernels = None,
    ram: flags.Ram = None,
    kv_ram: flags.KvRam = None,
    kv: flags.Kv = None,
    kv_keep: flags.KvKeep = None,
    attention: flags.Attention = None,
    gpu: flags.Gpu = None,
    device: flags.DeviceName = "auto",
    disk: flags.Disk = None,
    disk_space: flags.DiskSpace = None,
    hardware: flags.HardwareName = None,
    dtype: flags.Dtype = None,
    context: flags.Context = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Of them in the prompt. Default: all."),
    ] = None,
    threads: flags.Threads = None,
    predict: flags.Predict = True,
    hybrid: flags.Hybrid = None,
    guess: flags.Guess = True,
    expert_policy: flags.ExpertPolicy = None,
    routing: flags.RoutingFile = None,
    method: tune.MethodFlag = None,
    states: tune.StatesFlag = None,
    seq_len: tune.SeqLen = None,
    batch_size: tune.BatchSize = None,
    grad_accum: tune.GradAccum = None,
    max_grad_norm: tune.MaxGradNorm = None,
    lora_r: tune.LoraR = None,
    router_aux_loss: tune.RouterAuxLoss = None,
    head: tune.HeadFlag = None,
    gpu_updates: tune.GpuUpdatesFlag = None,
    plan_out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the plan, for 'offload generate --plan' to obey."),
    ] = None,
    json_file: flags.JsonFile = None,
    verbose: flags.Verbose = False,
) -> None:
    """Show the plan for a model and its budgets; loads no weights.

    What lives where, every line of the budget, the predicted speed with its spread, the bound and
    what sets it, and the reason for each choice. A long prompt needs room for activations that
    'generate' with a short one leaves to weights: see --prompt-tokens. With --hardware the plan is
    for a machine that is not here; with --method, too, it is of fine-tuning there, from the
    model's config alone, layers on its card with --gpu ('offload finetune' itself shows its plan
    before it begins).
    """
    tuning = {
        "states": states, "seq_len": seq_len, "batch_size": batch_size, "grad_accum": grad_accum,
        "max_grad_norm": max_grad_norm, "lora_r": lora_r, "router_aux_loss": router_aux_loss,
        "head": head, "gpu_updates": gpu_updates,
    }  # fmt: skip
    if method is not None:
        others = [
            flag
            for flag, value in (
                ("--quant", quant), ("--kv-ram", kv_ram), ("--kv", kv),
                ("--attention", attention), ("--context", context), ("--plan-out", plan_out),
                ("--prompt-tokens", prompt_tokens), ("--disk-space", disk_space),
                ("--disk", disk), ("--kernels", kernels), ("--routing", routing),
                ("--threads", threads), ("--expert-policy", expert_policy),
            )
            if value is not None
        ]  # fmt: skip
        if others:
            raise OffloadError(f"{', '.join(others)} says nothing about fine-tuning; drop it")
        from offload.cli.finetune_plan import plan_training

        plan_training(
            model, hardware, ram, gpu, {"method": method, "dtype": dtype, **tuning}, json_file,
            verbose=verbose,
        )  # fmt: skip
        return
    if lone := [name for name, value in tuning.items() if value is not None]:
        flags_given = ", ".join(f"--{name.replace('_', '-')}" for name in lone)
        raise OffloadError(f"{flags_given} is of fine-tuning: give --method, too, or drop it")
    output.check_targets({"--json": json_file, "--plan-out": plan_out})
    from offload.cli import libraries

    libraries.set_up(verbose=verbose)

    from offload.cli import console, machines, session, view
    from offload.cli.frozen import REPLAY_ROOM, frozen_json
    from offload.cli.planning import (
        Wanted,
        context_limit,
        default_context,
        find_model,
        first_token,
        make_plan,
    )
    from offload.cli.threads import use_threads
    from offload.models.meta import read_config

    machine = None if hardware is None else machines.load(hardware)
    if machine is not None and not predict:
        raise OffloadError("--hardware is there to predict from; drop it or --no-predict")
    wanted = Wanted(
        ram=ram,
        kv_ram=kv_ram,
        kv=None if kv is None else kv.value,
        kv_keep=kv_keep,
        attention=None if attention is None else attention.value,
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
        hardware=machine,
    )
    options = wanted.options()
    use_threads(threads)
    directory = find_model(model, None if quant is None else quant.value, wanted.kernels)
    room = default_context(context, context_limit(read_config(directory)))
    if prompt_tokens is not None and prompt_tokens > room:
        raise OffloadError(
            f"--prompt-tokens {prompt_tokens} is more than the context of {room}; raise --context"
        )
    # Of the run that will follow: without it "the smallest that works" would not.
    beside = session.measured_tokenizer(directory)[1]
    if plan_out is not None:
        beside += REPLAY_ROOM
    prepared = make_plan(
        directory,
        wanted,
        options,
        prompt_tokens=prompt_tokens or room,
        context=room,
        tokenizer_bytes=beside,
    )
    machines.check_space(disk_space, prepared.plan)
    if machine is not None:
        prepared.notes.append(
            f"planned for {machine.name}, not for this machine; what Python takes per layer was "
            "measured here"
        )
    first = first_token(prepared)
    view.show_plan(console.out(), prepared, first)
    if plan_out is not None:
        output.write_json(plan_out, frozen_json(prepared), "--plan-out")
        console.note(f"{plan_out}, for 'offload generate --plan'", "plan")
    output.write_json(json_file, view.plan_json(prepared, first))
