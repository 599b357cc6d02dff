"""What must be the same for a run to go on: its model, its data, and the settings that matter.

Budgets, directories and how often something is saved do not: they change no bit of the result. Nor
does the order of micro-batches, unless a trained weight has several places: then the gradients of
its places are summed in the order in which they are made. How many steps there are matters as long
as the rate of each depends on it: a run at a constant rate may be made longer.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

from offload.errors import OffloadError
from offload.models.meta import MetaModel
from offload.models.values_fingerprint import values_fingerprint
from offload.train.data.opening import TrainData
from offload.train.layout import TrainLayout
from offload.train.options import TrainOptions
from offload.train.schedule import warmup_steps

_SETTINGS = (
    "method", "states", "batch_size", "grad_accum", "seq_len", "packing", "lr", "schedule",
    "warmup", "weight_decay", "betas", "eps", "max_grad_norm", "seed", "router_aux_loss",
    "skip_untouched_experts",
)  # fmt: skip
_LORA = ("lora_r", "lora_alpha", "lora_dropout", "lora_targets")
_NO_MODEL = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype"})
"""What says nothing of how a model computes, or is told by itself."""


PROMPT_TIME = "chat template's time"


def identity_of(
    meta: MetaModel, layout: TrainLayout, data: TrainData, options: TrainOptions, steps: int,
    base: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """JSON that two runs share exactly if one may continue the other. ``base``: what identifies the
    pack that frozen weights are in."""
    names = _SETTINGS + (_LORA if options.method == "lora" else ())
    settings: dict[str, Any] = {name: getattr(options, name) for name in names}
    if settings.get("lora_targets") is not None:
        # In which order they are named changes nothing.
        settings["lora_targets"] = sorted(set(settings["lora_targets"]))
    if options.schedule == "constant":
        settings["warmup"] = warmup_steps(options.warmup, steps)
    else:
        settings["steps"] = steps
    settings["grad_dtype"] = options.grad_dtype or (
        "fp32" if options.grad_accum > 1 else "of the weights"
    )
    if options.grad_accum > 1 and in_several_places(meta.model, layout):
        settings["order"] = options.order
    # Not there if no template asks for it.
    time = {} if data.prompt_time is None else {PROMPT_TIME: data.prompt_time}
    return {
        "base": base or "the checkpoint's own weights",
        **model_identity(meta),
        # Of several differences the first one in the alphabet is told: causes come before effects.
        "model layout": layout_fingerprint(layout),
        "tokenised data": data.fingerprint,
        **time,
        **{name: json.loads(json.dumps(value)) for name, value in settings.items()},
    }


_IN_WORDS = {
    "base": (
        "the frozen weights are in another pack, or in none where they were in one (--quant, or "
        "another pack as --model),"
    ),
    "model": "the model's checkpoint has other files, or other tensors in them",
    "model config": "the model's config.json says something else",
    "model layout": "other weights are trained, or they are cut otherwise",
    "layout": "other weights are trained (train=), or they are cut otherwise",
    "model values": "the model's weights have other values",
    "tokenised data": (
        "the data, once tokenised, is not what it was: --data, the tokenizer or its chat template "
        "has changed"
    ),
}
"""What differs where two runs are told apart by a digest, which says nothing to anybody."""


def check_model(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> None:
    """Say in words what of a model is not as it was when its states were made, for whoever trains
    it in a loop of their own; settings are told by the states themselves.

    Raises:
        OffloadError: something differs that would be told by two digests.
    """
    other = set() if before is None else _different(before, now)
    # What is trained follows from the model.
    told = [name for name in ("model", "model config", "model values", "layout") if name in other]
    if told:
        raise OffloadError(
            f"resume: {_IN_WORDS[told[0]]} since these states were made; load the model that they "
            f"are of, or begin anew with another disk="
        )


def _different(before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    return {name for name in before.keys() & now.keys() if now[name] != before[name]}


def check_continues(
    before: Mapping[str, Any] | None, now: Mapping[str, Any], schedule: str
) -> None:
    """Say what is not as it was, if the states would tell it by digests, and how to train on, if
    only the number of steps differs.

    Args:
        before: the run's whose states are there.
        now: this run's.

    Raises:
        OffloadError: it differs, and changes steps that have been taken.
    """
    if before is None:
        return
    other = sorted(_different(before, now))
    if other and other[0] in _IN_WORDS:
        raise OffloadError(
            f"--resume: {_IN_WORDS[other[0]]} since the run began; resume it with what it began "
            f"with, or begin another one with another --output (and --disk, if that is given)"
        )
    if other == ["steps"] and before.keys() == now.keys():
        raise OffloadError(
            f"--resume: that run is one of {before['steps']} steps and this one of {now['steps']}, "
            f"and with --schedule {schedule} the rate of every step depends on that; resume it as "
            f"it was, and to train on, begin another run with its output as --model (a run with "
            f"--schedule constant may be resumed with more steps)"
        )


def in_several_places(model: nn.Module, layout: TrainLayout) -> bool:
    """Whether a parameter that is trained belongs to more than one module (tied embeddings)."""
    trained = {piece.param for block in layout.trained for piece in block.pieces}
    parameters = list(model.named_parameters(remove_duplicate=False))
    shared = {i for i, n in Counter(id(p) for _, p in parameters).items() if n > 1}
    return any(name in trained for name, parameter in parameters if id(parameter) in shared)


def model_identity(meta: MetaModel) -> dict[str, str]:
    """What a model is, by its files, its config and some of its values."""
    return {
        "model": model_fingerprint(meta),
        "model config": config_fingerprint(meta.model.config),
        "model values": values_fingerprint(meta.index),
        "dtype": str(meta.dtype).removeprefix("torch."),
    }


def model_fingerprint(meta: MetaModel) -> str:
    """Of the checkpoint's files: names, sizes, and every tensor's place and dtype."""
    digest = hashlib.sha256()
    digest.update(type(meta.model).__name__.encode())
    for file in meta.index.files:
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    for name, (number, tensor) in sorted(meta.index.tensors.items()):
        digest.update(f"{name} {number} {tensor.dtype} {tensor.shape} {tensor.offset}\n".encode())
    return digest.hexdigest()[:32]


def config_fingerprint(config: Any) -> str:
    """Of what differs from its class's defaults, but for where it came from and what wrote it: the
    files of a model say nothing of its epsilons and rotations."""
    facts = {k: v for k, v in config.to_diff_dict().items() if k not in _NO_MODEL}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def layout_fingerprint(layout: TrainLayout) -> str:
    """Of blocks, pieces and tiles."""
    digest = hashlib.sha256()
    for block in layout.blocks:
        digest.update(f"{block.id} {block.dtype} {block.trained} {block.count}\n".encode())
        for piece in block.pieces:
            digest.update(f"{piece.param} {piece.start} {piece.count} {piece.offset}\n".encode())
        digest.update(str([layout.tiles[t].count for t in block.tiles]).encode())
    return digest.hexdigest()[:32]
