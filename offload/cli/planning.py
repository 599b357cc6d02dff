"""What ``plan`` and ``generate`` share: from flags to a plan, without loading a weight."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from offload.cli.compiling import compiling_notice
from offload.cli.console import byte_progress, note, share_progress
from offload.cli.frozen import Frozen
from offload.cli.imports import imported
from offload.cli.machines import check_fits, default_ram
from offload.cli.signals import signals_wait
from offload.cpu_ops.crowding import watched
from offload.errors import OffloadError
from offload.io.pack_manifest import is_pack
from offload.io.safetensors import read_header
from offload.kv.prefix_folder import open_directory
from offload.models import single_rows
from offload.models.choose import model_directory
from offload.models.load import DEFAULT_CONTEXT, Options, Prepared, prepare, ram_budget
from offload.models.recipes import spill_directory
from offload.models.workspace import limit_kernels
from offload.runtime.choice import with_card
from offload.runtime.guess_cache import recall
from offload.runtime.hardware_cache import load_cached, save
from offload.runtime.probe import probe
from offload.runtime.probe_together import measure, measure_fewer
from offload.scheduler.forecast import Forecast, prefill
from offload.scheduler.hardware import Hardware

if TYPE_CHECKING:
    from offload.models.pack_run import PackProgress

logger = logging.getLogger(__name__)

DEFAULT_NEW_TOKENS = 128
"""Tokens to generate unless said otherwise, as far as they fit the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The flags about where weights may live and who computes. Sizes in bytes."""

    ram: int | None
    gpu: int | None
    device: str
    disk: Path | None
    dtype: str | None
    threads: int | None
    predict: bool
    guess: bool
    hybrid: bool | None = None
    expert_policy: str | None = None
    routing: Path | None = None
    record_routing: Path | None = None
    kernels: str | None = None
    kv_ram: int | None = None
    attention: str | None = None
    kv: str | None = None
    kv_keep: int | None = None
    prompt_cache: Path | None = None
    prompt_cache_limit: int | None = None
    prompt_cache_chunk: int | None = None
    plan: Path | None = None
    """A frozen plan to obey."""
    hardware: Hardware | None = None
    """Of another machine: plan for that, run nothing."""

    def options(self) -> Options:
        """As the library takes them; checks what can be checked without the model.

        Raises:
            OffloadError: flags that contradict each other, or a directory that cannot be used.
        """
        if self.disk is not None:
            spill_directory(self.disk)
        more = {
            name: value
            for name in ("prompt_cache_limit", "prompt_cache_chunk")
            if (value := getattr(self, name)) is not None
        }
        if more and self.prompt_cache is None:
            flag = "--" + next(iter(more)).replace("_", "-")
            raise OffloadError(f"{flag} needs a prompt cache; add --prompt-cache DIR or drop it")
        if self.prompt_cache is not None:
            open_directory(self.prompt_cache)
        ram, device = self.ram, self.device
        if self.hardware is not None:
            check_fits(self.hardware, ram, self.gpu)
            ram = ram or default_ram(self.hardware)
            # The path through three tiers; whose card computes is the hardware's affair.
            device = "sim" if device == "auto" and self.gpu is not None else device
        return Options(
            ram=ram,
            gpu=self.gpu,
            device=device,
            hardware=self.hardware,
            elsewhere=self.hardware is not None,
            disk=self.disk,
            dtype=self.dtype,
            hybrid=self.hybrid,
            guess=self.guess,
            expert_policy=self.expert_policy,
            routing=self.routing,
            record_routing=self.record_routing,
            kernels=self.kernels,
            kv_ram=self.kv_ram,
            attention=self.attention,
            kv=self.kv,
            kv_keep=self.kv_keep,
            prompt_cache=self.prompt_cache,
            **more,
        )


def context_limit(config: Any) -> int | None:
    """Tokens that the model has positions for; None if it sets no limit."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def fit_context(
    *,
    prompt: int,
    new_tokens: int | None,
    context: int | None,
    limit: int | None,
    asked: str = "-n",
) -> tuple[int, int]:
    """How many tokens to generate, and how many to set memory aside for.

    Args:
        prompt: tokens of the prompt.
        new_tokens: asked for; None: the default, or as many as fit.
        context: the flag, or None for just what is needed.
        limit: of the model, or None.
        asked: where ``new_tokens`` was said.

    Raises:
        OffloadError: it does not fit; says by how many tokens.
    """
    if context is not None and limit is not None and context > limit:
        raise OffloadError(f"--context {context} is over the model's limit of {limit} tokens")
    room = context if context is not None else limit
    whose = f"--context {context}" if context is not None else f"the model's context of {limit}"
    if room is not None and prompt + (new_tokens or 1) > room:
        wanted = (
            f"{prompt} and the {new_tokens} new tokens ({asked}) make {prompt + new_tokens}"
            if new_tokens
            else f"{prompt} and at least one new token make {prompt + 1}"
        )
        raise OffloadError(
            f"the prompt does not fit: its tokens are {wanted}, {whose} takes {room}; "
            + " or ".join(_ways(prompt, new_tokens, room, asked))
            + (" or raise --context" if context is not None and context != limit else "")
        )
    if new_tokens is None:
        new_tokens = DEFAULT_NEW_TOKENS if room is None else min(DEFAULT_NEW_TOKENS, room - prompt)
    return new_tokens, context if context is not None else prompt + new_tokens


def _ways(prompt: int, new_tokens: int | None, room: int, asked: str) -> list[str]:
    """How what does not fit in ``room`` tokens would."""
    over = prompt + (new_tokens or 1) - room
    ways = [f"shorten it by {over}"] if over < prompt else []
    if new_tokens and prompt < room:
        ways.append(f"lower {asked} to {room - prompt}")
    return ways or [f"shorten it and lower {asked}"]


def default_context(context: int | None, limit: int | None) -> int:
    """The context of a plan that is not for a certain prompt.

    Raises:
        OffloadError: more than the model takes.
    """
    if context is not None and limit is not None and context > limit:
        raise OffloadError(f"--context {context} is over the model's limit of {limit} tokens")
    return context or min(DEFAULT_CONTEXT, limit or DEFAULT_CONTEXT)


@watched()
def make_plan(
    directory: Path,
    wanted: Wanted,
    options: Options,
    *,
    prompt_tokens: int,
    context: int,
    tokenizer_bytes: int = 0,
    frozen: Frozen | None = None,
) -> Prepared:
    """Plan the checkpoint in ``directory``; see ``offload.models.load.prepare`` for the errors.

    ``frozen``: the plan to obey.
    """
    options.prompt_tokens, options.context = prompt_tokens, context
    options.tokenizer_bytes = tokenizer_bytes
    imported()
    # Before the first product, and probes multiply: later it would have no effect.
    limit_kernels(ram_budget(options))
    if wanted.predict and wanted.hardware is None and frozen is None:
        # Before the plan: it measures what the process weighs, and a probe weighs something.
        hardware = find_hardware(directory)
        if hardware is not None and is_pack(directory) and options.choice.kind != "cuda":
            options.hardware = with_card(options.choice, hardware)
            options.sample = partial(sample_pack, fewer=_may_be_fewer(directory, options))
        elif hardware is not None:
            now, options.fewer = on_these_files(
                hardware, directory, options.choice.kind, fewer=_may_be_fewer(directory, options)
            )
            options.hardware = with_card(options.choice, now)
        options.guess_precision = recall(directory)
    with compiling_notice() as compiling:
        prepared = prepare(directory, options, compiling)
    if frozen is not None:
        frozen.apply(prepared)
    spills = prepared.kv is not None and prepared.kv.blocks[1]
    if wanted.disk is not None and not prepared.recipes.convert and not spills:
        prepared.notes.append(
            f"--disk {wanted.disk} is not needed: every block is read from the checkpoint itself"
        )
    return prepared


def first_token(prepared: Prepared) -> Forecast | None:
    """The first prompt after loading, predicted; None without rates."""
    costs = prepared.request.costs
    if costs is None:
        return None
    pack = getattr(prepared, "pack", None)
    if pack is not None:  # its blocks are bytes to the scheduler
        costs = replace(costs, flops=pack.flops())
    tokens = prepared.options.prompt_tokens or prepared.options.context
    return prefill(prepared.plan, costs, tokens)


def find_model(model: str, quant: str | None, kernels: str | None = None) -> Path:
    """The directory of a model, packed first where that is needed; see ``model_directory``."""
    with byte_progress() as report:

        def progress(state: PackProgress) -> None:
            before = state.bytes_before
            report("pack", state.bytes_done - before, state.bytes_total - before)

        return model_directory(
            model,
            quant,
            kernels=kernels,
            announce=lambda path: note(f"once, into {path}", "packing"),
            progress=progress,
        )


def _may_be_fewer(directory: Path, options: Options) -> bool:
    """Whether one thread fewer than torch's may be better for a token: something is streamed, and
    the CPU computes."""
    nbytes = sum(file.stat().st_size for file in weight_files(directory))
    return options.choice.kind == "cpu" and nbytes > ram_budget(options)


def weight_files(directory: Path) -> list[Path]:
    """Those of a checkpoint or a pack that hold its weights."""
    pattern = "bundle-*.bin" if is_pack(directory) else "*.safetensors"
    return sorted(file for file in directory.glob(pattern) if file.is_file())


def on_these_files(
    hardware: Hardware, directory: Path, device: str = "cpu", *, fewer: bool = True
) -> tuple[Hardware, Hardware | None]:
    """The same machine as it is now, and (``fewer``) with one thread fewer: the read rate of the
    checkpoint's own files, the rate of products with matrices of its dtype as ``device`` (by
    ``Choice.kind``) computes them, and what is left of either beside the other."""
    packed = is_pack(directory)  # that a card computes: the CPU's kernels are not there
    files = weight_files(directory)
    try:
        with signals_wait():
            dtype = "bfloat16" if packed else main_dtype(files)
            nbytes = 0 if packed else sum(file.stat().st_size for file in files)
            products = None
            if single_rows.worth(nbytes, getattr(torch, dtype), device):
                with compiling_notice() as compiling:
                    single_rows.prepare(compiling)
                products = single_rows.probed
            found = measure(files, dtype, products)
            less = measure_fewer(files, dtype, products) if fewer else None
    except OffloadError as error:
        logger.info("the checkpoint's files are not sampled: %s", error)
        return hardware, None
    if found is None:
        return hardware, None
    return found.on(hardware, dtype), None if less is None else less.on(hardware, dtype)


def sample_pack(
    hardware: Hardware, pack: Any, *, fewer: bool = True
) -> tuple[Hardware, Hardware | None]:
    """As ``on_these_files``, for a pack whose kernels are there."""
    from offload.models.packed_probe import on_this_pack

    try:
        with signals_wait():
            return on_this_pack(hardware, pack, fewer=fewer)
    except OffloadError as error:
        logger.info("the pack's files are not sampled: %s", error)
        return hardware, None


def main_dtype(files: Sequence[Path]) -> str:
    """The floating-point dtype of most of the first file's bytes, by torch's name.

    Raises:
        OffloadError: its header cannot be read.
    """
    nbytes = Counter({"float32": 0})
    for tensor in read_header(files[0]).tensors.values() if files else ():
        if tensor.dtype in ("float32", "bfloat16", "float16"):
            nbytes[tensor.dtype] += tensor.nbytes
    return nbytes.most_common(1)[0][0]


def find_hardware(directory: Path) -> Hardware | None:
    """Rates of this machine and the checkpoint's disk: as they were probed, else probed quickly.

    None if they cannot be measured; a note says why, and the plan goes without a prediction.
    """
    threads = torch.get_num_threads()
    found = load_cached(directory, threads=threads)
    if found is not None:
        return found
    note(
        f"nothing is measured for this disk and {threads} thread(s) yet: a quick probe, some "
        f"seconds; better: 'offload probe --disk {directory} -t {threads}'; none: --no-predict"
    )
    try:
        with signals_wait(), share_progress("probing") as report:
            found = probe(directory, quick=True, threads=threads, progress=report)
    except OffloadError as error:
        note(f"no prediction: {error}", "warning")
        return None
    try:
        save(directory, found, threads=threads)
    except OSError as error:
        logger.info("the probe's rates are not kept: %s", error)
    return found
