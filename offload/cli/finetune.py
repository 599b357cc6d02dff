"""``offload finetune``: train a model whose states need not fit in memory."""

from __future__ import annotations

from offload.cli import finetune_flags as tune
from offload.cli import flags
from offload.cli import output as targets
from offload.cli.tracing import check_picture


def finetune(
    model: flags.Model,
    data: tune.Data,
    output: tune.Output,
    eval_data: tune.EvalData = None,
    method: tune.MethodFlag = None,
    ram: flags.Ram = None,
    gpu: tune.Gpu = None,
    device: tune.DeviceFlag = None,
    head: tune.HeadFlag = None,
    gpu_updates: tune.GpuUpdatesFlag = None,
    disk: tune.Disk = None,
    states: tune.StatesFlag = None,
    grad_dtype: tune.GradDtypeFlag = None,
    dtype: flags.Dtype = None,
    max_steps: tune.MaxSteps = None,
    epochs: tune.Epochs = None,
    batch_size: tune.BatchSize = None,
    grad_accum: tune.GradAccum = None,
    order: tune.OrderFlag = None,
    seq_len: tune.SeqLen = None,
    packing: tune.Packing = None,
    skip_bad_rows: tune.SkipBadRows = False,
    lr: tune.Lr = None,
    schedule: tune.ScheduleFlag = None,
    warmup: tune.Warmup = None,
    weight_decay: tune.WeightDecay = None,
    betas: tune.Betas = None,
    eps: tune.Eps = None,
    max_grad_norm: tune.MaxGradNorm = None,
    seed: tune.Seed = None,
    eval_every: tune.EvalEvery = None,
    eval_share: tune.EvalShare = None,
    keep: tune.KeepFlag = None,
    save_every: tune.SaveEvery = None,
    save_total_limit: tune.SaveTotalLimit = None,
    resume: tune.Resume = False,
    router_aux_loss: tune.RouterAuxLoss = None,
    skip_untouched_experts: tune.SkipUntouchedExperts = False,
    quant: tune.QuantFlag = None,
    lora_r: tune.LoraR = None,
    lora_alpha: tune.LoraAlpha = None,
    lora_dropout: tune.LoraDropout = None,
    lora_targets: tune.LoraTargets = None,
    merge: tune.Merge = False,
    threads: flags.Threads = None,
    json_file: tune.JsonLinesFile = None,
    tensorboard: tune.TensorBoard = None,
    plot: tune.Plot = None,
    trace: flags.Trace = None,
    trace_plot: flags.TracePlot = None,
    verbose: flags.Verbose = False,
) -> None:
    """Train a model; its weights, gradients and states stream from the disk as far as needed.

    The plan comes first: memory and disk by purpose, the time of a step, the bytes written to the
    SSD. Ctrl-C finishes the step that runs, commits it and exits; a second one exits at once. After
    either, or a crash, the same command with --resume continues from the last commit. stdout says
    where the result is; everything else goes to stderr.
    """  # fmt: skip
    given = tune.given(locals())
    from offload.train import checks, plots
    from offload.train.options import TrainOptions

    options = TrainOptions(**given)
    checks.check_options(options, given)
    written = {"--json": json_file, "--plot": plot, "--trace": trace, "--trace-plot": trace_plot}
    targets.check_targets(written, reads=[data, eval_data])
    plots.check_plot(plot)
    check_picture(trace_plot)
    from offload.cli import libraries

    libraries.set_up(verbose=verbose)
    from offload.cli.finetune_run import Wish, run_finetune

    run_finetune(
        Wish(
            options=options, json=json_file, plot=plot, tensorboard=tensorboard,
            trace=trace, trace_plot=trace_plot,
        )
    )  # fmt: skip
