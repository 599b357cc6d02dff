"""The public functions ``load``, ``wrap`` and ``unwrap``; optimizers come from ``train``."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from offload.errors import OffloadError
from offload.models.choose import model_directory
from offload.models.load import load as _load
from offload.models.option_types import check_path, check_progress, check_types
from offload.models.options import DEFAULT_CONTEXT, Options, Progress, parse_options
from offload.models.wrap import unwrap as _unwrap
from offload.models.wrap import wrap as _wrap
from offload.units import parse_bytes

_OF_WRAP = (
    "expert_policy", "guess", "queue_depth", "record_routing", "request_bytes", "routing", "seed",
)  # fmt: skip
"""Options that ``wrap`` heeds besides its own arguments: others are of keys and values, of what is
read from a checkpoint, or of plans for generation."""

P = ParamSpec("P")
T = TypeVar("T")


def _past_default_device(function: Callable[P, T]) -> Callable[P, T]:
    """What a program makes its own tensors on (``torch.set_default_device``) is not where weights
    are read to, buffers lie or kernels are tried: plans say that."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.get_default_device().type == "cpu":
            return function(*args, **kwargs)
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return called


_OPTIONS = Options.__dataclass_fields__.keys() | {"activations", "quant", "resume", "states"}
_FLAG = re.compile(r"offload [a-z]+(?: --[a-z-]+(?: \w+)?)*|--([a-z][a-z-]*)")
"""A command with its flags, which stays as it is, or a flag."""


def _in_python(function: Callable[P, T]) -> Callable[P, T]:
    """Errors name options as the caller of a function gives them (``kv_ram``), not as a command's
    flags (``--kv-ram``)."""

    def option(found: re.Match[str]) -> str:
        name = (found[1] or "").replace("-", "_")
        return name if name in _OPTIONS else found[0]

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except OffloadError as error:
            error.args = tuple(
                _FLAG.sub(option, said) if isinstance(said, str) else said for said in error.args
            )
            raise

    return called


@_in_python
@_past_default_device
def load(
    path: str | Path,
    *,
    quant: str | None = None,
    kernels: str | None = None,
    ram: str | int | None = None,
    kv_ram: str | int | None = None,
    kv: str | None = None,
    kv_keep: int | None = None,
    attention: str | None = None,
    prompt_cache: str | Path | None = None,
    prompt_cache_limit: str | int | None = None,
    gpu: str | int | None = None,
    disk: str | Path | None = None,
    dtype: str | torch.dtype | None = None,
    device: str = "auto",
    context: int | None = None,
    batch: int = 1,
    guess: bool = True,
    train: Any = False,
    progress: Progress | None = None,
    **options: Any,
) -> Any:
    """Load a checkpoint whose weights need not fit in memory.

    The result is an ordinary transformers model: ``model.generate`` and everything else that
    runs its forward works, and without ``quant`` gives the very bits that the resident model
    gives.

    Args:
        path: a directory with ``config.json`` and safetensors, a packed model (``offload pack``),
            a GGUF file, or a hub id in the local cache.
        quant: ``"q4"`` or ``"q8"``: run the weights quantised, ``"none"``: as they are, but on our
            own kernels. Packs the model into the cache directory on first use. What runs packed
            (a GGUF always does) computes in float32 and is not bit-equal to the reference.
        kernels: ``"exact"``: torch's, the default for a checkpoint. ``"fast"``: ours, as with
            ``quant="none"`` if ``quant`` says nothing else; for unquantised weights the difference
            to torch's logits is then measured: ``model.offload.kernel_error``.
        ram: bytes, or e.g. ``"8GiB"``: everything above the bare process is kept below it. None:
            a safe share of the memory that is free now.
        kv_ram: of ``ram`` for keys and values of past tokens; what does not fit streams from a
            private file in ``disk``. The results are the same. None: all are in RAM, or as many
            as fit beside the least that weights need. ``model.generate`` then makes its own cache
            (``model.offload.new_cache()`` one to pass as ``past_key_values``, or as ``cache`` since
            transformers 5.24), refuses a ``cache_implementation``, and one cache is alive at a
            time.
        kv: ``"q8"``, ``"q4"``: keys and values in 8 or 4 bits, quantised when a block of them is
            full; ``"bf16"``: in bfloat16. Lossy: ``model.offload.stats()["kv"]`` has by how much
            attention differed on the first prompt. Implies ``attention="offload"``.
        kv_keep: tokens of each layer whose keys and values stay: the first block, the newest, and
            of the others those that attention went to (``kv_importance``, an option, is what scores
            them: ``offload.kv.keep.Importance``). Lossy as soon as a text is longer; memory and
            time of a token then grow no more. Implies ``attention="offload"``; one sequence, or
            several of the same length, without padding.
        attention: ``"exact"``: the model's own, the default. ``"offload"``: our kernels, which read
            blocks of keys and values where they are: the same bits for any ``kv_ram``, other
            rounding than torch's, and no copy of a layer's keys and values in one piece.
        prompt_cache: a directory (made for its owner only) in which keys and values of prompts are
            kept: ``model.generate`` with one sequence reads from there what this or another process
            has computed before for the same first tokens, with the same model and settings, on the
            same kind of machine; ``model.offload.prompts.last`` says how much. Prompts are then
            read on a grid of ``prompt_cache_chunk`` tokens (an option; 256): the logits are those
            of ``generate(prefill_chunk_size=256)``, whatever was found. For a prompt that comes
            again whole no pass is made: its last logits are there, too. With ``kv`` the rounded
            bytes are kept; of 8 or 4 bits whole blocks, and what is found ends with one. While
            adapters or forward hooks are on its layers, or weights in memory have been changed
            (except through ``.data``), prompts are not reused, which is logged.
        prompt_cache_limit: bytes of all that is in it, 8 GiB by default; what was not used for
            longest goes.
        gpu: bytes, or e.g. ``"6GiB"``, of a card's memory: the card then computes, and everything
            that torch allocates on it for this model is kept below.
        disk: directory for private files (only used for weights that must be converted, and for
            keys and values that do not fit in RAM).
        dtype: compute dtype; None takes the checkpoint's.
        device: ``"auto"``: the card if there is a budget for one, else the CPU; ``"cpu"``;
            ``"cuda"`` or ``"cuda:1"``: a card, by default with most of what is free there;
            ``"sim"``: a simulated accelerator (``"sim:FILE"``: with the link's rates of a hardware
            file). Inputs may be on the CPU whatever computes.
        context: tokens of prompt and answer together that memory is set aside for.
        batch: sequences (or beams) at once that memory is set aside for.
        guess: whether a MoE layer's experts may be read before it is known that it needs them,
            when the disk has nothing else to do; the results are the same. False: only experts
            that were routed to are ever read.
        train: True: a model to fine-tune with ``offload.AdamW`` in a loop of yours, a ``Trainer``
            or ``SFTTrainer`` (``offload.trainer_optimizer``); its states are streamed, too. Layers
            run again in backward: what a hook of yours takes from inside of one has no gradient;
            take the layer's result, or what ``output_attentions`` and the like return.
            ``"adapters"``: all weights frozen, for PEFT on top. A function: which parameters are
            trained, by name. ``disk`` is then where the states live (None: a private directory,
            gone with the model), ``context`` and ``batch`` are those of a micro-batch, and
            ``options`` are ``states`` ("fp32", "bf16" or "8bit"), ``grad_dtype`` (in which
            gradients are summed; None: the weights'), ``seed`` (of stochastic rounding), ``keep``
            (commits that stay loadable: a Trainer's ``save_total_limit``) and ``resume`` (True: the
            newest commit in ``disk``; a number; a Trainer's checkpoint directory).
        progress: called as ``progress(what, done_bytes, total_bytes)``.
        options: more of ``offload.models.options.Options``: ``expert_policy``, ``routing`` and
            ``record_routing`` for experts, ``hybrid`` (the CPU computes a part of them while a card
            computes the others), ``queue_depth`` and others for the disk.

    Raises:
        OffloadError: with one clear message; see ``offload.errors``.
    """
    path = check_path(path)
    check_progress(progress)
    if train is not False:
        asked: dict[str, Any] = {"quant": quant, "kernels": kernels, "gpu": gpu, "kv_ram": kv_ram}
        asked |= {"attention": attention, "kv": kv, "kv_keep": kv_keep}
        asked |= {"prompt_cache": prompt_cache, "prompt_cache_limit": prompt_cache_limit}
        asked |= {"guess": None if guess is True else guess}
        given = [name for name, value in asked.items() if value is not None]
        if given or device not in ("auto", "cpu"):
            raise OffloadError(
                f"{', '.join(given) or 'device'} cannot be combined with train: training runs the "
                f"checkpoint's weights on the CPU; drop it"
            )
        from offload.train.dropin import DropinOptions
        from offload.train.dropin_load import load_trainable

        unknown = sorted(options.keys() - DropinOptions.__dataclass_fields__.keys())
        if unknown:
            raise OffloadError(f"{unknown[0]} is no option of training")
        options = check_types(DropinOptions, options)
        sizes: dict[str, Any] = {
            "batch": batch,
            "context": DEFAULT_CONTEXT if context is None else context,
        }
        sizes = check_types(Options, sizes | {"dtype": dtype, "disk": disk})
        return load_trainable(
            path, DropinOptions(train=train, **options), ram=ram, progress=progress, **sizes
        )
    if context is not None:
        options["context"] = context
    chosen = parse_options(
        kernels=kernels,
        ram=ram,
        kv_ram=kv_ram,
        kv=kv,
        kv_keep=kv_keep,
        attention=attention,
        prompt_cache=prompt_cache,
        prompt_cache_limit=prompt_cache_limit,
        gpu=gpu,
        disk=disk,
        dtype=dtype,
        device=device,
        batch=batch,
        guess=guess,
        **options,
    )
    return _load(model_directory(path, quant, kernels=kernels), chosen, progress)


@_in_python
@_past_default_device
def wrap(
    model: torch.nn.Module,
    *,
    ram: str | int | None = None,
    disk: str | Path | None = None,
    gpu: str | int | None = None,
    device: str = "auto",
    activations: str | int = 0,
    progress: Progress | None = None,
    **options: Any,
) -> torch.nn.Module:
    """Stream a model of any kind that is already in memory; returns the same object.

    Its weights are written to a private file in ``disk`` (mode 0600, without a name: it vanishes
    with the process) and freed; hooks bring them back when they are needed. A layer that writes to
    its own weights while it runs is an error if they are streamed (but not noticed if it does so
    through ``.data``, as nothing in torch counts that); what is written to weights that stay in
    memory is there after ``unwrap``.

    Args:
        model: on the CPU. Layers of repeated lists and large leaf modules are streamed.
        ram: bytes, or e.g. ``"2GiB"``, for weights, staging and ``activations``. None: half of
            what is free.
        disk: directory for the private file; None: the user's cache directory.
        gpu: bytes, or e.g. ``"1GiB"``, of the simulated accelerator's memory.
        device: ``"auto"`` or ``"cpu"``: the CPU; ``"sim"``: a simulated accelerator. A card takes
            models that ``load`` opens.
        activations: bytes, or e.g. ``"100MiB"``, of the budget (``gpu`` where there is one, else
            ``ram``) that the model's own activations need.
        progress: called as ``progress(what, done_bytes, total_bytes)``, ``what`` being ``"spill"``
            and then ``"load"``.
        options: of ``offload.models.options.Options`` those that concern a model in memory:
            ``guess``, ``expert_policy``, ``routing``, ``record_routing`` (see ``load``),
            ``queue_depth`` and ``request_bytes`` (of the disk), ``seed`` (of the simulated device).

    Raises:
        OffloadError: with one clear message; the model is then as it was.
    """
    check_progress(progress)
    chosen = parse_options(ram=ram, gpu=gpu, disk=disk, device=device, **options)
    if idle := sorted(options.keys() - set(_OF_WRAP)):
        raise OffloadError(
            f"{idle[0]} changes nothing for a model that is in memory already; drop it "
            f"(offload.wrap takes ram, disk, gpu, device, activations, {', '.join(_OF_WRAP)})"
        )
    spare = parse_bytes(activations) if activations else 0
    return _wrap(model, chosen, spare, progress)


@_in_python
@_past_default_device
def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Bring a streamed model's weights back into memory, bit for bit; returns the same object.

    Raises:
        OffloadError: the model is not streamed, is packed, or has been closed.
    """
    return _unwrap(model)
