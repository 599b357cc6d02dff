"""What is asked of a fine-tuning run, judged before anything is opened.

Every value out of its range and every contradiction is one ``OffloadError``. A flag that cannot
take effect is an error, too, and never ignored: whoever gives it believes that it does something.
Nothing here needs the model; ``check_dtypes`` is for when its dtype is known.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

from offload.errors import OffloadError
from offload.io.whole_file import check_name, takes_bytes
from offload.runtime import cuda_api
from offload.runtime.choice import Choice, choose
from offload.train.options import KEEPS, METHODS, SCHEDULES, STATES, TrainOptions
from offload.units import format_bytes

ORDERS = ("vertical", "usual")
GRAD_DTYPES = ("bf16", "fp32")
QUANTS = ("q4", "q8")
HEADS = ("auto", "gpu", "cpu")
DTYPES = ("bfloat16", "float32")
"""What a model may be trained in."""

LORA_ONLY = ("lora_r", "lora_alpha", "lora_dropout", "lora_targets", "merge", "quant")
_COUNTS = (
    "max_steps", "batch_size", "grad_accum", "eval_every", "save_every", "save_total_limit",
    "lora_r", "threads",
)  # fmt: skip


def check_options(options: TrainOptions, given: Collection[str] | None = None) -> None:
    """Refuse what cannot be done.

    Args:
        options: what is asked.
        given: names of the options that somebody set, whatever to; None: those that differ from
            their defaults.

    Raises:
        OffloadError: the first thing to change, with its flag, its value and a way out.
    """
    if given is None:
        given = changed(options)
    _check_names(options)
    _check_numbers(options)
    _check_length(options, given)
    _check_method(options, given)
    choice = check_device(options)
    for name in ("head", "gpu_updates"):
        if name in given and choice.kind == "cpu":
            raise OffloadError(
                f"{flag(name)} {getattr(options, name)} cannot take effect: no layers run on a "
                f"device; drop it, or give --gpu SIZE --device sim"
            )
    _check_gradients(options)
    _check_evaluation(options, given)
    _check_saving(options, given)
    _check_files(options)


def changed(options: TrainOptions) -> set[str]:
    """Names of the options that differ from their defaults."""
    return {f.name for f in fields(options) if getattr(options, f.name) != f.default}


def flag(name: str) -> str:
    """How the command line spells an option."""
    return "--" + name.replace("_", "-")


def state_directory(options: TrainOptions) -> Path:
    """Where states, gradients and commits live, as an absolute path."""
    if options.disk is not None:
        return _absolute(options.disk)
    output = _absolute(options.output)
    return output.parent / f"{output.name}.offload"


def _absolute(path: Path) -> Path:
    return Path(os.path.realpath(path.expanduser()))


def check_dtypes(options: TrainOptions, compute: str) -> None:
    """Refuse what the compute dtype does not allow.

    Args:
        options: what is asked.
        compute: torch's name of the dtype, of ``options`` or else of the checkpoint.

    Raises:
        OffloadError: float16 (nothing here scales the loss), or states narrower than the weights.
    """
    if compute not in DTYPES:
        why = ": gradients would underflow, as nothing scales the loss" * (compute == "float16")
        asked = f"--dtype {compute}" if options.dtype is not None else f"the model is {compute}"
        raise OffloadError(f"{asked}, which is not trained in{why}; give --dtype bfloat16")
    if options.states == "bf16" and compute == "float32":
        raise OffloadError(
            "--states bf16 keeps no bits of a float32 weight beyond bfloat16; give --states fp32 "
            "(or 8bit), or compute in --dtype bfloat16"
        )


def check_device(options: TrainOptions) -> Choice:
    """Where layers run: the CPU, a card, or a simulated accelerator.

    Raises:
        OffloadError: a device that is not trained on, or something that is not done on one.
    """
    asked = _asked(options)
    if options.gpu is not None and options.gpu < 1:
        _refuse(options, "gpu", "is no budget; give bytes")
    if options.gpu is not None and options.device == "auto" and not cuda_api.card_count():
        raise OffloadError(
            f"{asked}: torch sees no accelerator here; drop --gpu: the CPU computes, or add "
            f"--device sim to simulate one"
        )
    return choose(options.device, options.gpu)


def _asked(options: TrainOptions) -> str:
    """The device as the command line names it."""
    asked = f"--device {options.device}"
    if options.gpu is None:
        return asked
    return f"--gpu {format_bytes(options.gpu)}" + f" {asked}" * (options.device != "auto")


def _refuse(options: TrainOptions, name: str, why: str) -> NoReturn:
    raise OffloadError(f"{flag(name)} {_shown(getattr(options, name))} {why}")


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(_shown(v) for v in value) if isinstance(value, tuple) else str(value)


def _check_names(options: TrainOptions) -> None:
    for name, choices in (
        ("method", METHODS),
        ("states", STATES),
        ("schedule", SCHEDULES),
        ("order", ORDERS),
        ("grad_dtype", GRAD_DTYPES),
        ("keep", KEEPS),
        ("quant", QUANTS),
        ("head", HEADS),
    ):
        value = getattr(options, name)
        optional = name in ("grad_dtype", "keep", "quant")
        if value not in choices and not (value is None and optional):
            _refuse(options, name, f"is none of {', '.join(choices)}")
    check_updates(options)
    if options.dtype is not None:
        check_dtypes(options, options.dtype)


def check_updates(options: TrainOptions) -> None:
    """Raise OffloadError for a ``gpu_updates`` that says nothing."""
    every = options.gpu_updates
    if every not in ("auto", "off") and not (every.isascii() and every.isdecimal() and int(every)):
        _refuse(options, "gpu_updates", "is none of auto, off and whole numbers from 1")


def _check_numbers(options: TrainOptions) -> None:
    for name in _COUNTS:
        value = getattr(options, name)
        if value is not None and value < 1:
            _refuse(options, name, "is too few; at least 1")
    if options.seq_len < 2:
        _refuse(options, "seq_len", "leaves no token to predict; at least 2")
    if not 0 <= options.seed < 2**63:
        _refuse(options, "seed", f"is not one of 0 to 2**63-1 ({2**63 - 1})")
    if options.ram is not None and options.ram < 1:
        _refuse(options, "ram", "is no budget; give bytes")
    for name in ("lr", "eps", "epochs", "lora_alpha"):
        value = getattr(options, name)
        if not (math.isfinite(value) and value > 0):
            _refuse(options, name, "must be finite and above 0")
    for name in ("weight_decay", "max_grad_norm", "warmup", "router_aux_loss"):
        value = getattr(options, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            _refuse(options, name, "must be finite, and 0 or more")
    for name in ("lora_dropout", "eval_share"):
        if not 0 <= getattr(options, name) < 1:
            _refuse(options, name, "must be a share: 0 or more, below 1")
    if len(options.betas) != 2 or not all(0 <= beta < 1 for beta in options.betas):
        _refuse(options, "betas", "must be two numbers of 0 or more, below 1 (usual: 0.9,0.999)")
    if options.lr * options.weight_decay >= 1:
        raise OffloadError(
            f"--lr {options.lr:g} times --weight-decay {options.weight_decay:g} is "
            f"{options.lr * options.weight_decay:g}: a step would take all of a weight away; "
            "their product must be below 1"
        )


def _check_length(options: TrainOptions, given: Collection[str]) -> None:
    if options.warmup > 1 and options.warmup != int(options.warmup):
        _refuse(options, "warmup", "is neither whole steps nor a share below 1")
    if options.max_steps is None:
        return
    if "epochs" in given:
        raise OffloadError(
            f"--max-steps {options.max_steps} and --epochs {options.epochs:g} contradict: either "
            "says when the run ends; give one"
        )
    if options.warmup >= 1 and options.warmup >= options.max_steps:
        _refuse(
            options,
            "warmup",
            f"would take all of --max-steps {options.max_steps}; the rate would never be --lr "
            f"{options.lr:g}: give fewer, or a share below 1",
        )
    for name in ("eval_every", "save_every"):
        value = getattr(options, name)
        if value is not None and value > options.max_steps:
            _refuse(options, name, f"cannot take effect: the run ends at step {options.max_steps}")


def _check_method(options: TrainOptions, given: Collection[str]) -> None:
    if options.method == "lora":
        if options.skip_untouched_experts:
            raise OffloadError(
                "--skip-untouched-experts cannot take effect with --method lora: no expert is "
                "updated, and the adapters of a layer's experts are one parameter; drop it"
            )
        if options.lora_targets is not None and not all(t.strip() for t in options.lora_targets):
            raise OffloadError("--lora-targets names no module; e.g. --lora-targets q_proj,v_proj")
        if options.lora_targets == ():
            raise OffloadError("--lora-targets is empty: nothing would be trained; drop it for all")
        return
    idle = [flag(name) for name in LORA_ONLY if name in given]
    if idle:
        raise OffloadError(
            f"{', '.join(idle)} cannot take effect with --method full; drop "
            f"{'it' if len(idle) == 1 else 'them'}, or give --method lora"
        )


def _check_gradients(options: TrainOptions) -> None:
    # A sum kept in bfloat16 drops what is less than 1/256 of it: micro-batch after micro-batch
    # adds less, and the two orders would no longer agree. The memory it saves is better saved by
    # larger micro-batches.
    if options.grad_dtype == "bf16" and options.grad_accum > 1:
        raise OffloadError(
            f"--grad-dtype bf16 cannot add up --grad-accum {options.grad_accum} micro-batches: "
            "what is below 1/256 of the sum would be lost; drop --grad-dtype (fp32), or give "
            f"--batch-size {options.batch_size * options.grad_accum} --grad-accum 1"
        )


def _check_evaluation(options: TrainOptions, given: Collection[str]) -> None:
    if options.eval_data is not None and "eval_share" in given:
        raise OffloadError(
            f"--eval-data {options.eval_data} and --eval-share {options.eval_share:g} contradict: "
            "either says what is held out; give one"
        )
    if options.eval_every is not None and options.eval_data is None and not options.eval_share:
        raise OffloadError(
            f"--eval-every {options.eval_every} has nothing to evaluate on; give --eval-data FILE, "
            "or e.g. --eval-share 0.05 to hold out some of --data"
        )
    if options.kept != "last" and options.eval_every is None:
        raise OffloadError(
            f"--keep {options.keep} cannot take effect: without --eval-every N there is no "
            "evaluation before the last step's to choose from; give it, or drop --keep"
        )


def _check_saving(options: TrainOptions, given: Collection[str]) -> None:
    if "save_total_limit" in given and options.save_every is None:
        best = " and the best" * (options.kept != "last")
        raise OffloadError(
            f"--save-total-limit {options.save_total_limit} cannot take effect: without "
            f"--save-every N the only commit is the last{best}"
        )


def _check_files(options: TrainOptions) -> None:
    for name in ("model", "data", "eval_data", "output", "disk"):
        path = getattr(options, name)
        if path is not None:
            check_name(Path(path), flag(name))
    for name in ("data", "eval_data"):
        path = getattr(options, name)
        if path is not None:
            _check_readable(path.expanduser(), name)
    output, states = _absolute(options.output), state_directory(options)
    check_name(states, "--disk")  # longer than the output's where it is beside that
    for name, path in (("output", output), ("disk", states)):
        _check_writable(path, name)
    if output == states or output in states.parents:
        raise OffloadError(
            f"--disk {states} lies in --output {output}, which becomes the finished model; "
            "give another directory"
        )
    read = {"data": options.data, "eval_data": options.eval_data, "model": Path(options.model)}
    for other, path in read.items():
        if path is None or not os.path.exists(path.expanduser()):
            continue  # a model may be a hub id
        taken = _absolute(path)
        # What is read may lie beside the states on one scratch disk, but never among the output,
        # which is replaced as a whole.
        for name, target in (("output", output), ("disk", states)):
            if target == taken or taken in target.parents:
                raise OffloadError(
                    f"{flag(name)} {target} is {flag(other)} {taken} or lies in it; keep what is "
                    "written apart from what is read"
                )
        if output in taken.parents:
            raise OffloadError(
                f"{flag(other)} {taken} lies in --output {output}, which the finished model "
                "replaces; give another directory"
            )
    if options.resume and not states.is_dir():
        raise OffloadError(
            f"--resume: there is no {states} to resume from; drop --resume to start, or give the "
            "--output and --disk of the run that stopped"
        )


def _check_readable(path: Path, name: str) -> None:
    if takes_bytes(path):  # not resolved: /dev/fd/63 leads to no name
        raise OffloadError(
            f"{flag(name)} {path} is a pipe or a device; data is looked into before it is read, "
            "and its name tells its kind: write it to a file first, e.g. train.jsonl"
        )
    path = _absolute(path)
    if not os.path.exists(path):  # Path.exists raises for a name that is too long
        raise OffloadError(f"{flag(name)} {path}: there is no such file or directory")
    if not os.access(path, os.R_OK):
        raise OffloadError(f"{flag(name)} {path} is not readable")
    if path.is_file() and path.stat().st_size == 0:
        raise OffloadError(f"{flag(name)} {path} is empty ({format_bytes(0)})")


def _check_writable(path: Path, name: str) -> None:
    """``path`` is a directory one can write to, or can be made."""
    there = path
    while not os.path.exists(there):
        there = there.parent
    if not there.is_dir():
        raise OffloadError(f"{flag(name)} {path}: {there} is a file; give a directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise OffloadError(f"{flag(name)} {path}: the directory {there} is not writable")
