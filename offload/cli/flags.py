"""Options that several commands share. One name, one meaning, one help text."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Annotated

import typer

from offload.errors import OffloadError
from offload.scheduler.policy import NAMES
from offload.units import parse_bytes

MOST_THREADS = 64
"""Of ``--threads`` on any machine; more where it has more than a quarter as many CPUs."""

_DTYPES = {
    "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float16": "float16", "fp16": "float16", "half": "float16",
    "float32": "float32", "fp32": "float32", "float": "float32",
    "float64": "float64",
}  # fmt: skip


def size(text: str) -> int:
    """Bytes from a flag's text."""
    try:
        return parse_bytes(text)
    except OffloadError as error:
        raise typer.BadParameter(str(error)) from None


def dtype(text: str) -> str:
    """torch's name of a dtype from a flag's text."""
    found = _DTYPES.get(text.lower())
    if found is None:
        names = ", ".join(dict.fromkeys(_DTYPES.values()))
        raise typer.BadParameter(f"{text!r} is not one of {names}")
    return found


def expert_policy(text: str) -> str:
    """A policy's name from a flag's text."""
    if text not in NAMES:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(NAMES)}")
    return text


def few_threads(count: int | None) -> int | None:
    """``--threads`` as it is, unless the machine could only choke on it: every thread has stacks
    and work space that no budget counts."""
    cpus = os.cpu_count() or 1
    most = max(MOST_THREADS, 4 * cpus)
    if count is not None and count > most:
        raise typer.BadParameter(
            f"{count} threads would wait for each other on {cpus} CPUs; give at most {most}"
        )
    return count


def check_stops(stops: list[str] | None) -> None:
    """Refuse ``--stop ''``, and what no text could meet.

    Raises:
        OffloadError: a stop string is empty, or no text.
    """
    if stops is not None and "" in stops:
        raise OffloadError("--stop '' would stop before the first token; give some text")
    for stop in stops or ():
        check_text(stop, "--stop")


def check_text(text: str, flag: str) -> None:
    """Refuse bytes that are no UTF-8: Python makes halves of surrogate pairs of them, which no
    tokenizer takes.

    Raises:
        OffloadError: there are such; says where.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OffloadError(f"{flag} is not UTF-8 text (character {error.start})") from None


Model = Annotated[
    str,
    typer.Option(
        "-m", "--model", metavar="MODEL",
        help="Directory with config.json and safetensors, a packed model, a GGUF file, or a hub "
        "id in the local cache.",
    ),
]  # fmt: skip
Ram = Annotated[
    int | None,
    typer.Option(
        parser=size, metavar="SIZE",
        help="Budget for everything above the bare process, e.g. 8GiB. "
        "Default: 80 % of what is free.",
    ),
]  # fmt: skip


class QuantName(enum.StrEnum):
    """``--quant``."""

    none = "none"
    q8 = "q8"
    q4 = "q4"


Quant = Annotated[
    QuantName | None,
    typer.Option(
        help="Run the weights packed: q4, q8, or none (every bit kept, our kernels). Packs into "
        "the cache directory on first use. The text differs from the unquantised model's.",
    ),
]


class KernelsName(enum.StrEnum):
    """``--kernels``."""

    exact = "exact"
    fast = "fast"


Kernels = Annotated[
    KernelsName | None,
    typer.Option(
        help="exact: torch's, bit-equal to transformers (default of a checkpoint); fast: ours, on "
        "weights packed with every bit kept, and says by how much the logits differ."
    ),
]
Gpu = Annotated[
    int | None,
    typer.Option(
        parser=size, metavar="SIZE",
        help="Budget of the card's memory: the card then computes; with --device sim, of a "
        "simulated one.",
    ),
]  # fmt: skip
DeviceName = Annotated[
    str,
    typer.Option(
        "--device", metavar="NAME",
        help="auto: a card if there is a --gpu, else the CPU; cpu; cuda or cuda:N: a card; sim: a "
        "simulated accelerator, sim:FILE: with the link of a hardware file.",
    ),
]  # fmt: skip
Disk = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Where private files go if weights have to be converted, or keys and values do not "
        "fit in RAM. Default: the cache directory.",
    ),
]  # fmt: skip
KvRam = Annotated[
    int | None,
    typer.Option(
        "--kv-ram", parser=size, metavar="SIZE",
        help="Of --ram for keys and values of past tokens; the others stream from the disk. "
        "Default: all of them, or what fits beside the least that weights need. The text is the "
        "same.",
    ),
]  # fmt: skip


class AttentionName(enum.StrEnum):
    """``--attention``."""

    exact = "exact"
    offload = "offload"


class KvName(enum.StrEnum):
    """``--kv``."""

    bf16 = "bf16"
    q8 = "q8"
    q4 = "q4"


Kv = Annotated[
    KvName | None,
    typer.Option(
        "--kv",
        help="Keep keys and values in 8 or 4 bits, or in bfloat16. Lossy (but bf16 of a model that "
        "computes in it); says by how much attention differs. Implies --attention offload.",
    ),
]
KvKeep = Annotated[
    int | None,
    typer.Option(
        "--kv-keep", min=1, metavar="N",
        help="Keep keys and values of N tokens of each layer: the first, the newest, and of the "
        "others the blocks that attention went to. Lossy beyond N tokens; memory and time of a "
        "token grow no more. Implies --attention offload.",
    ),
]  # fmt: skip
Attention = Annotated[
    AttentionName | None,
    typer.Option(
        help="exact: the model's own (default); offload: ours, which reads keys and values where "
        "they are, RAM or disk; the same text for any --kv-ram, rounded otherwise than torch's."
    ),
]
PromptCache = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Keep the keys and values of prompts there, and do not read again what another run "
        "has read: a system prompt, a document, a conversation. The text is the same on every "
        "run with it.",
    ),
]  # fmt: skip
PromptCacheLimit = Annotated[
    int | None,
    typer.Option(
        parser=size, metavar="SIZE",
        help="Of all that is in --prompt-cache; what was not used for longest goes. Default: 8GiB.",
    ),
]  # fmt: skip
PromptCacheChunk = Annotated[
    int | None,
    typer.Option(
        min=2, metavar="N",
        help="Tokens of a pass over the prompt with --prompt-cache, and the grid that reuse ends "
        "on (with --kv q8 or q4 where a block of those ends, too). More is better where weights "
        "stream, less where prompts are short. Default: 256.",
    ),
]  # fmt: skip
Dtype = Annotated[
    str | None,
    typer.Option(parser=dtype, metavar="DTYPE", help="Compute dtype. Default: the checkpoint's."),
]
Context = Annotated[
    int | None,
    typer.Option(
        "-c", "--context", min=2, metavar="N",
        help="Tokens of prompt and answer together that memory is set aside for. Default: what a "
        "prompt and -n take, or 1024 where there is no prompt yet.",
    ),
]  # fmt: skip
Threads = Annotated[
    int | None,
    typer.Option(
        "-t", "--threads", min=1, metavar="N", callback=few_threads,
        help="Threads that compute. Default: torch's, or what a CPU quota pays for.",
    ),
]  # fmt: skip
Predict = Annotated[
    bool,
    typer.Option(
        "--predict/--no-predict",
        help="Predict the speed from the probe's rates; measures quickly if there are none.",
    ),
]
Guess = Annotated[
    bool,
    typer.Option(
        "--guess/--no-guess",
        help="Read experts before they are routed to, when the disk has nothing else to do. "
        "The text is the same.",
    ),
]
Hybrid = Annotated[
    bool | None,
    typer.Option(
        "--hybrid/--no-hybrid",
        help="Whether the CPU computes a part: of a MoE layer's experts while the card computes "
        "the others, and at decode dense weights in RAM that cost more to move. Default: no.",
    ),
]
ExpertPolicy = Annotated[
    str | None,
    typer.Option(
        parser=expert_policy, metavar="NAME",
        help="Which cached expert makes room for another: laps (default), lru, lfu, clock, mrs or "
        "pinned (needs --routing). The text is the same.",
    ),
]  # fmt: skip
RoutingFile = Annotated[
    Path | None,
    typer.Option(
        "--routing", metavar="FILE",
        help="For --expert-policy pinned: a recorded routing, whose most used experts stay.",
    ),
]  # fmt: skip
RecordRouting = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Record which experts every token uses, for 'offload bench cache' and --routing.",
    ),
]
Temp = Annotated[float, typer.Option(metavar="T", help="Sample at this temperature; 0 is greedy.")]
TopK = Annotated[int | None, typer.Option(metavar="K", help="Sample among the K likeliest tokens.")]
TopP = Annotated[
    float | None, typer.Option(metavar="P", help="Sample among the likeliest of this mass.")
]
MinP = Annotated[
    float | None,
    typer.Option(metavar="P", help="Sample among tokens of P times the likeliest's mass."),
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Of sampling. Default: a fresh one.")]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="End before this text; may be given several times."),
]
Template = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="A setting that the model's chat template reads, such as enable_thinking=false or "
        "reasoning_effort=low; may be given several times.",
    ),
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-text token.")]
HardwareName = Annotated[
    str | None,
    typer.Option(
        "--hardware", metavar="NAME|FILE",
        help="Of another machine: rtx4090-desktop, rtx3060-laptop, h200, cpu-laptop, or a file "
        "that 'offload probe --json' has written. Default: this one.",
    ),
]  # fmt: skip
DiskSpace = Annotated[
    int | None,
    typer.Option(
        "--disk-space", parser=size, metavar="SIZE",
        help="Budget of the disk for the model. Default: as much as it takes.",
    ),
]  # fmt: skip
PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--plan", metavar="FILE",
        help="Obey the plan that 'offload plan --plan-out' has written: same model, budgets and "
        "machine.",
    ),
]  # fmt: skip
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace", metavar="FILE",
        help="Write what every lane did when, as a Chrome trace: open it in ui.perfetto.dev.",
    ),
]  # fmt: skip
TracePlot = Annotated[
    Path | None,
    typer.Option(
        "--trace-plot", metavar="FILE",
        help="The same as a picture (PNG): does I/O hide behind compute? Needs matplotlib.",
    ),
]  # fmt: skip
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the result as JSON, too."),
]
Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="Show what libraries log and warn about.")
]
