"""What ``--batch`` asks of a model: prompts in tokens, and what decides each answer, hashed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offload.batch.answers import job_key, key_of
from offload.batch.jobs import Job
from offload.batch.runner import Task
from offload.cli import prompt
from offload.cli.planning import context_limit, fit_context
from offload.cli.session import Wish
from offload.cli.template import template_ids
from offload.errors import OffloadError
from offload.io.pack_manifest import MANIFEST, is_pack
from offload.io.safetensors import CheckpointIndex
from offload.models.naming import model_name
from offload.models.values_fingerprint import values_fingerprint

_SETTINGS = (
    "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "merges.txt",
)  # fmt: skip


def facts_of(directory: Path) -> list[Any]:
    """What tells one model from another without reading all its weights: the text of its settings
    and of its tokenizer, and of the weights files' names and sizes and bytes of many tensors (one
    trained further has files of the same sizes; a pack's manifest has checksums of its blocks).
    Other files of the directory, the batch's own output among them, say nothing."""
    told = [directory / name for name in (MANIFEST, *_SETTINGS, *prompt.VOCABULARIES)]
    weights: list[Any] = []
    if not is_pack(directory):
        index = CheckpointIndex.open(directory)
        weights = [[p.name, p.stat().st_size] for p in index.files] + [values_fingerprint(index)]
    texts = [[p.name, p.read_bytes().decode("latin-1")] for p in told if p.is_file()]
    return [weights, [[name, key_of(text)] for name, text in texts]]


def make_tasks(
    jobs: Sequence[Job], wish: Wish, tokenizer: Any, directory: Path, config: Any
) -> tuple[list[Task], list[str], int]:
    """Every prompt in tokens, the key of its answer, and the longest context.

    Raises:
        OffloadError: a prompt that cannot be answered; says which line's.
    """
    model = facts_of(directory)
    flags = wish.wanted
    general = [flags.dtype, flags.kernels, flags.attention, flags.kv, flags.kv_keep]
    if flags.prompt_cache is not None:  # prompts are read in other pieces
        general.append(flags.options().prompt_cache_chunk)
    tasks: list[Task] = []
    keys: list[str] = []
    longest = 0
    limit = context_limit(config)
    for job in jobs:
        try:
            ids = _ids(job, tokenizer, wish, directory)
            prompt.check_ids(ids, config)
            new, context = fit_context(
                prompt=len(ids),
                new_tokens=job.max_new_tokens,
                context=wish.context,
                limit=limit,
                asked="-n" if job.max_new_tokens == wish.max_new_tokens else "max_new_tokens",
            )
        except OffloadError as error:
            raise OffloadError(f"line {job.line}: {error}") from error
        sampling = job.sampling
        how = [sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p]
        settings = [general, new, how, list(job.stops), wish.ignore_eos]
        seed = None
        if sampling.temperature > 0:
            # Without a seed: one that a later run, which continues this one, finds again.
            own = job.seed if wish.sampling.seed is None else wish.sampling.seed + job.index
            drawn = int(key_of([model, settings, ids, job.index]), 16) if own is None else own
            seed = (drawn if job.seed is None else job.seed) % 2**63
        keys.append(job_key(model, settings, [ids, seed]))
        longest = max(longest, context)
        tasks.append(
            Task(
                index=job.index,
                ids=tuple(ids),
                max_new_tokens=new,
                sampling=sampling,
                seed=seed,
                ignore_eos=wish.ignore_eos,
            )
        )
    return tasks, keys, longest


def _ids(job: Job, tokenizer: Any, wish: Wish, directory: Path) -> list[int]:
    if job.messages is None:
        asked = prompt.Asked(text=job.prompt)
        return prompt.encode(
            asked, tokenizer, raw=wish.raw, directory=directory, settings=wish.template
        )
    if not getattr(tokenizer, "chat_template", None):
        raise OffloadError(
            f"{model_name(directory)} has no chat template for messages; give a prompt instead"
        )
    return template_ids(
        job.messages,
        tokenizer,
        directory,
        way_out="give a prompt instead",
        settings=wish.template,
    )


__all__ = ["facts_of", "make_tasks"]
