"""What a process weighs before any real weight is loaded, and what Python costs it: by a toy.

Running one token through a toy of the family imports the family's code, starts torch's threads and
fills its kernel caches; the resident set after that is the *baseline* above which a budget counts.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from offload.blocks import Tier
from offload.models import toy_times
from offload.models.request import expert_top_k
from offload.models.single_rows import Assumed, SingleRows
from offload.models.toy import Warm, quiet, toy_config, two_layers
from offload.runtime import choice
from offload.runtime.choice import Choice
from offload.runtime.rss import current_rss

logger = logging.getLogger(__name__)

PROMPT = 64
"""Tokens of a toy's prompt on a card: as many as take the kernels of long ones."""


def warm_up(
    config: Any, model_cls: Any, dtype: torch.dtype, timed: bool = True, single_rows: bool = False
) -> Warm:
    """Run a toy of the family, by plain transformers and then streamed by this package from a few
    kilobytes on disk, and look at what the process weighs and, if ``timed``, how long it took.

    So the baseline is the bare process: imported code, started threads, warmed kernels and
    allocator pools, and nothing of any model. Falls back to the resident set as it is if the
    family has no toy.

    Args:
        single_rows: whether the model's tokens are multiplied by ``models.single_rows``.
    """
    times = Warm(baseline_rss=0)
    like_it = toy_config(config, experts=expert_top_k(config)) if single_rows else None
    for toy in (two_layers(config, model_cls, dtype), like_it, toy_config(config)):
        if toy is None:
            continue
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                like = toy_times.Like.of(config, dtype) if timed else None
                times = _run_toy(toy, model_cls, dtype, like, single_rows)
            break
        except Exception as error:  # noqa: BLE001  a warm-up must never stop the real run
            logger.info("the toy of %s does not run: %s", type(config).__name__, error)
    gc.collect()
    return replace(times, baseline_rss=current_rss())


def _run_toy(
    toy: Any, model_cls: Any, dtype: torch.dtype, like: toy_times.Like | None, single_rows: bool
) -> Warm:
    """``like``: the model whose predictions need times; None: nobody asks."""
    from offload.models.load import Options, plan_model

    model = model_cls._from_config(toy, dtype=dtype).eval()
    model.set_experts_implementation("eager")
    _one_token(model)
    times = toy_times.Times()
    fetch_s = crowd_s = 0.0
    with tempfile.TemporaryDirectory() as directory, quiet():
        model.save_pretrained(directory)
        timed = like if model.can_generate() else None
        del model
        # All of it in memory, but asked for as ever: that is a quarter of an expert's time.
        options = Options(ram=2**30, context=32, overhead_bytes=0)
        with contextlib.closing(_Streamed(Path(directory), options, single_rows)) as kept:
            _one_token(kept.model)
            if timed is not None:
                times = toy_times.measure(kept.model, timed)
        prepared = plan_model(Path(directory), options, Warm(baseline_rss=0))
        options.ram = prepared.minimum[Tier.RAM]
        with contextlib.closing(_Streamed(Path(directory), options, single_rows)) as streamed:
            _one_token(streamed.model)
            if timed is not None:
                fetched = toy_times.measure(streamed.model, timed)
                more_s = fetched.token_s - fetched.wait_s - times.token_s
                if fetched.blocks:
                    fetch_s = max(0.0, more_s) / fetched.blocks
                    crowd_s = fetched.others_s / fetched.blocks
    return Warm(
        baseline_rss=0,
        layer_s=times.layer_s,
        expert_s=times.expert_s,
        fixed_s=times.fixed_s,
        fetch_s=fetch_s,
        crowd_s=crowd_s,
    )


def warm_card(chosen: Choice, config: Any, model_cls: Any, dtype: torch.dtype) -> None:
    """Have the process weigh what it will with a card in use, before ``warm_up`` weighs it.

    CUDA loads each kernel's code when it is first called, and keeps a part of it in the host's
    memory: a toy of the family calls those that a model will, with a prompt, a token, and a draw.
    Nothing to do on the CPU.
    """
    choice.warm_up(chosen)
    toy = toy_config(config) if chosen.kind == "cuda" else None
    if toy is None:
        return
    place = torch.device(chosen.name)
    cards = [] if place.index is None else [place.index]
    try:
        with torch.random.fork_rng(devices=cards), torch.no_grad():
            model = model_cls._from_config(toy, dtype=dtype).eval()
            model.set_experts_implementation("eager")
            _on_card(model.to(place))
    except Exception as error:  # noqa: BLE001  a warm-up must never stop the real run
        logger.info("the toy of %s does not run on %s: %s", type(config).__name__, place, error)
    finally:
        model = None
        gc.collect()
        choice.release_cached(chosen)


def _on_card(model: Any) -> None:
    for tokens in (PROMPT, 4):
        ids = torch.ones((1, tokens), dtype=torch.int64, device=model.device)
        if not model.can_generate():
            model(ids)
            continue
        for drawn in ({"do_sample": False}, {"do_sample": True, "top_k": 20, "top_p": 0.9}):
            model.generate(ids, max_new_tokens=2, pad_token_id=0, **drawn)


class _Streamed:
    def __init__(self, directory: Path, options: Any, single_rows: bool) -> None:
        from offload.models.load import plan_model

        prepared = plan_model(directory, options, Warm(baseline_rss=0))
        prepared.single_rows = SingleRows(Assumed()) if single_rows else None
        self.model = prepared.open()

    def close(self) -> None:
        self.model.offload.close()


def _one_token(model: Any) -> None:
    ids = torch.ones((1, 4), dtype=torch.int64)
    if model.can_generate():
        model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
    else:
        model(ids)


__all__ = ["warm_card", "warm_up"]
