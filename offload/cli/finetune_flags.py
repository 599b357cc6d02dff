"""The flags of ``offload finetune``. None means "not given": see ``offload.train.checks``."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from offload.cli import flags
from offload.errors import OffloadError
from offload.train.options import TrainOptions

_DEFAULT = {field.name: field.default for field in fields(TrainOptions)}


def _help(text: str, name: str) -> str:
    """``text``, and the default that the library has."""
    value = _DEFAULT[name]
    if isinstance(value, tuple):
        shown = ",".join(f"{v:g}" for v in value)
    else:
        shown = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{text} Default: {shown}."


def betas(text: str) -> tuple[float, float]:
    """Adam's betas from a flag's text.

    Raises:
        OffloadError: not two numbers.
    """
    try:
        first, second = (float(word) for word in text.split(","))
    except ValueError:
        raise OffloadError(f"--betas {text!r} is not two numbers; e.g. 0.9,0.999") from None
    return first, second


def targets(text: str) -> tuple[str, ...]:
    """Names of modules from a flag's text; empty for what names none. A comma within brackets is
    its regular expression's: ``layers\\.[0-9]{1,2}\\.``."""
    return tuple(word.strip() for word in _BETWEEN.split(text))


def given(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the flags that somebody gave and that are ``TrainOptions``, as it takes them.

    Args:
        asked: flags by the names of the options, and whatever else a command knows by other names.

    Raises:
        OffloadError: a text that says no value.
    """
    found: dict[str, Any] = {}
    for name, default in _DEFAULT.items():
        value = asked[name]
        if value is None or value is default is False:  # a switch that is off was not given
            continue
        if name in _PARSERS:
            value = _PARSERS[name](value)
        found[name] = value.value if isinstance(value, enum.Enum) else value
    return found


_BETWEEN = re.compile(r",(?![^{(\[]*[})\]])")
_PARSERS = {"betas": betas, "lora_targets": targets}


class Method(enum.StrEnum):
    """``--method``."""

    full = "full"
    lora = "lora"


class States(enum.StrEnum):
    """``--states``."""

    fp32 = "fp32"
    bf16 = "bf16"
    eight = "8bit"


class ScheduleName(enum.StrEnum):
    """``--schedule``."""

    linear = "linear"
    cosine = "cosine"
    constant = "constant"


class GradDtype(enum.StrEnum):
    """``--grad-dtype``."""

    bf16 = "bf16"
    fp32 = "fp32"


class Order(enum.StrEnum):
    """``--order``."""

    vertical = "vertical"
    usual = "usual"


class Keep(enum.StrEnum):
    """``--keep``."""

    best = "best"
    last = "last"
    both = "both"


class Head(enum.StrEnum):
    """``--head``."""

    auto = "auto"
    gpu = "gpu"
    cpu = "cpu"


class Quant(enum.StrEnum):
    """``--quant``."""

    q8 = "q8"
    q4 = "q4"


Data = Annotated[
    Path,
    typer.Option(
        metavar="FILE",
        help="JSONL or Parquet with text, prompt and completion, or messages; a plain text file; "
        "or a directory of such files, or one that 'datasets' saved.",
        show_default=False,
    ),
]
EvalData = Annotated[
    Path | None, typer.Option(metavar="FILE", help="What to evaluate on, as --data.")
]
Output = Annotated[
    Path,
    typer.Option(
        "--output", metavar="DIR", help="Where the model goes, as transformers write it.",
        show_default=False,
    ),
]  # fmt: skip
MethodFlag = Annotated[
    Method | None,
    typer.Option("--method", help=_help("Train every weight, or adapters.", "method")),
]
Gpu = Annotated[
    int | None,
    typer.Option(
        parser=flags.size, metavar="SIZE",
        help="Budget of the card that layers run on, or with --device sim of a simulated one.",
    ),
]  # fmt: skip
DeviceFlag = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="NAME",
        help="cpu; cuda or cuda:N, a card; sim, a simulated accelerator, or sim:FILE, one with the "
        "link of a hardware file.",
    ),
]  # fmt: skip
HeadFlag = Annotated[
    Head | None,
    typer.Option(
        "--head",
        help="Where the LM head and the loss are computed if layers run on an accelerator: there, "
        "on the CPU, or where a step is predicted to be faster. Default: auto.",
    ),
]
GpuUpdatesFlag = Annotated[
    str | None,
    typer.Option(
        "--gpu-updates", metavar="auto|off|K",
        help="Of each K tiles of optimizer states the accelerator updates one, while the CPU is at "
        "the others (1: all); auto: as many as make a step fastest by prediction. Default: auto.",
    ),
]  # fmt: skip
Disk = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Where states, gradients and commits live; of a fast SSD. Default: OUTPUT.offload.",
    ),
]
StatesFlag = Annotated[
    States | None,
    typer.Option(
        "--states",
        help=_help(
            "fp32: masters and moments; bf16: both rounded stochastically; 8bit: moments of one "
            "byte.",
            "states",
        ),
    ),
]
GradDtypeFlag = Annotated[
    GradDtype | None,
    typer.Option(
        "--grad-dtype",
        help="Of gradients on their way to the update. Default: fp32 if several micro-batches "
        "are added up, else the compute dtype.",
    ),
]
MaxSteps = Annotated[
    int | None,
    typer.Option(metavar="N", help="End after N steps, however often that goes through the data."),
]
Epochs = Annotated[
    float | None, typer.Option(metavar="X", help=_help("Passes over the data.", "epochs"))
]
BatchSize = Annotated[
    int | None,
    typer.Option(metavar="N", help=_help("Sequences of a micro-batch.", "batch_size")),
]
GradAccum = Annotated[
    int | None, typer.Option(metavar="N", help=_help("Micro-batches of a step.", "grad_accum"))
]
OrderFlag = Annotated[
    Order | None,
    typer.Option(
        "--order",
        help=_help(
            "Micro-batches layer by layer all together (weights are read once per step), or one "
            "after the other. The result is the same, but for how the sums of a weight in several "
            "places (tied embeddings) are rounded.",
            "order",
        ),
    ),
]
SeqLen = Annotated[
    int | None, typer.Option(metavar="N", help=_help("Tokens of a sequence.", "seq_len"))
]
Packing = Annotated[
    bool | None,
    typer.Option(
        "--packing/--no-packing",
        help="Several examples in a sequence, without attention across them. Default: packing.",
        show_default=False,
    ),
]
SkipBadRows = Annotated[
    bool, typer.Option("--skip-bad-rows", help="Count rows that cannot be used; do not stop.")
]
Lr = Annotated[
    float | None, typer.Option(metavar="X", help=_help("Learning rate at its peak.", "lr"))
]
ScheduleFlag = Annotated[
    ScheduleName | None,
    typer.Option("--schedule", help=_help("Of the learning rate after its warmup.", "schedule")),
]
Warmup = Annotated[
    float | None,
    typer.Option(
        metavar="X", help=_help("Steps of warmup, or a share of all steps if below 1.", "warmup")
    ),
]
WeightDecay = Annotated[
    float | None, typer.Option(metavar="X", help=_help("Decoupled, as AdamW's.", "weight_decay"))
]
Betas = Annotated[str | None, typer.Option(metavar="X,X", help=_help("Of Adam.", "betas"))]
Eps = Annotated[float | None, typer.Option(metavar="X", help=_help("Of Adam.", "eps"))]
MaxGradNorm = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help=_help("Clip the norm of all gradients together to this; 0: do not.", "max_grad_norm"),
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(metavar="N", help=_help("Of shuffling, dropout and adapters.", "seed")),
]
EvalEvery = Annotated[
    int | None, typer.Option(metavar="N", help="Evaluate every N steps. Default: at the end.")
]
EvalShare = Annotated[
    float | None,
    typer.Option(metavar="X", help="Hold out this share of --data to evaluate on. Default: none."),
]
KeepFlag = Annotated[
    Keep | None,
    typer.Option(
        "--keep",
        help="Weights to write: of the best evaluation (takes the disk space of one more commit), "
        "of the last step, or both (the last ones to OUTPUT.last). Default: best with "
        "--eval-every, else last.",
    ),
]
SaveEvery = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Commit every N steps: what --resume continues from after a crash. Default: at the "
        "end, and when interrupted.",
    ),
]
SaveTotalLimit = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help=_help(
            "Newest commits to keep, beside the best evaluation's; each costs disk space.",
            "save_total_limit",
        ),
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue from the last commit, bit by bit the same; with --schedule constant also "
        "with more steps.",
    ),
]
RouterAuxLoss = Annotated[
    float | None,
    typer.Option(
        metavar="X", help="Weight of the loss that balances experts (MoE models). Default: off."
    ),
]
SkipUntouchedExperts = Annotated[
    bool,
    typer.Option(
        "--skip-untouched-experts",
        help="Not exact: a step leaves experts alone that none of its tokens was routed to (no "
        "update, no decay, no disk traffic). Default: they get the update of a zero gradient.",
    ),
]
QuantFlag = Annotated[
    Quant | None,
    typer.Option(
        "--quant",
        help="LoRA: keep the frozen base packed, q4 or q8: less to read, and more of it in RAM. "
        "Packs into the cache directory on first use. Default: as the model is (or the pack).",
    ),
]
LoraR = Annotated[int | None, typer.Option(metavar="N", help=_help("Rank of adapters.", "lora_r"))]
LoraAlpha = Annotated[
    float | None,
    typer.Option(metavar="X", help=_help("Adapters are scaled by alpha over rank.", "lora_alpha")),
]
LoraDropout = Annotated[
    float | None, typer.Option(metavar="X", help=_help("Before adapters.", "lora_dropout"))
]
LoraTargets = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="Modules with adapters, e.g. q_proj,v_proj. Default: every linear layer of the "
        "decoder.",
    ),
]
Merge = Annotated[bool, typer.Option("--merge", help="Write the model with adapters merged, too.")]
JsonLinesFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write every figure as a line of JSON, too."),
]
TensorBoard = Annotated[
    bool | None,
    typer.Option(
        "--tensorboard/--no-tensorboard",
        help="Write events to OUTPUT.tensorboard. Default: if TensorBoard is installed.",
        show_default=False,
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw the losses, too, as PNG; needs matplotlib."),
]
