"""From options and a tokenizer to batches."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.errors import DataError
from offload.models.prompt_time import stopped_at
from offload.train.data.batches import Batches
from offload.train.data.bins import Bins, fill_bins
from offload.train.data.encode import Encoder, check_ids
from offload.train.data.permutation import Permutation
from offload.train.data.sources import Source
from offload.train.data.store import TokenStore
from offload.train.data.tokenise import Progress, tokenise
from offload.train.options import TrainOptions

logger = logging.getLogger(__name__)

_SPLIT = -1
"""The stream of the permutation that splits; epochs have 0, 1, 2, ..."""

Wanted = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.bool_]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainData:
    """Tokenised data of a run. Close it, or use it in a ``with``."""

    train: Batches
    eval: Batches | None
    fingerprint: str
    """Hash of all tokens, labels and boundaries and of the split: what a resumed run compares.
    Packing, seed and batch sizes are settings, compared as such."""
    owned: tuple[TokenStore | Bins, ...]
    prompt_time: str | None = None
    """The time that chat templates saw, if the rows depend on it: see ``models.prompt_time``."""

    @property
    def steps_per_epoch(self) -> int:
        return self.train.steps_per_epoch

    def close(self) -> None:
        """Delete the private files; a second call does nothing."""
        for file in self.owned:
            file.close()

    def __enter__(self) -> TrainData:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_data(
    options: TrainOptions,
    tokenizer: Any,
    *,
    max_positions: int | None,
    vocab_size: int | None = None,
    obstacle: str | None = None,
    cache: Path | None = None,
    moment: datetime | None = None,
    note: Callable[[str], None] = logger.info,
    progress: Progress | None = None,
) -> TrainData:
    """Read, tokenise and pack the data of a run.

    Args:
        options: ``data``, ``eval_data``, ``eval_share``, ``seq_len``, ``batch_size``,
            ``grad_accum``, ``packing``, ``seed`` and ``skip_bad_rows`` count.
        tokenizer: of transformers.
        max_positions: the longest sequence of the model; None: it has no limit.
        vocab_size: rows of the model's embedding; None: not checked.
        obstacle: what ``packing_obstacle`` said.
        cache: directory of the private files, 4 bytes per token and 48 per example; None: the
            system's directory of temporary files, which is memory on some systems.
        moment: the time that chat templates are to see; None: now.
        note: told what the user should know, a sentence each.
        progress: told (bytes done, bytes in all) of the files.

    Raises:
        DataError: see there; also if the sequences are longer than the model's, or the model
            cannot be packed.
        StoreError: no room for the private files.
    """
    _check(options, max_positions, obstacle)
    directory = cache or Path(tempfile.gettempdir())
    sources = [Source(options.data)]
    if options.eval_data is not None:
        sources.append(Source(options.eval_data))
    for source in sources:
        if source.left_out:
            names = ", ".join(f.name for f in source.left_out[:4])
            more = ", ..." * (len(source.left_out) > 4)
            note(f"{source.path}: left out are {names}{more}: held out by their names, or no data")
    if len(sources) == 2 and sources[0].files == sources[1].files:
        note("--eval-data reads the files of --data again: nothing is held out")
    encoder = Encoder(tokenizer, options.seq_len)
    if encoder.eos is None:
        note("the tokenizer has no end of sequence token: texts and completions are not terminated")
    owned: list[TokenStore | Bins] = []
    try:
        stores: list[TokenStore] = []
        before, total = 0, sum(source.nbytes for source in sources)
        with stopped_at(moment) as clock:
            for source in sources:
                stores.append(
                    tokenise(
                        source,
                        encoder,
                        directory,
                        skip_bad_rows=options.skip_bad_rows,
                        note=note,
                        progress=_shifted(progress, before, total),
                    )
                )
                owned.append(stores[-1])
                before += source.nbytes
                check_ids(stores[-1].max_token, vocab_size)
        parts = _parts(options, stores)
        bins = []
        for store, wanted in parts:
            capacity = options.seq_len if options.packing else None
            bins.append(fill_bins(store, directory, capacity=capacity, wanted=wanted))
            owned.append(bins[-1])
    except BaseException:
        for file in owned:
            file.close()
        raise
    if progress is not None:
        progress(total, total)
    batches = [
        Batches(
            store,
            binned,
            sources[-1 if i else 0].place,
            batch_size=options.batch_size,
            # Evaluation has no steps: a pass is micro_batch(k, 0) for every k.
            grad_accum=1 if i else options.grad_accum,
            seq_len=options.seq_len,
            packing=options.packing,
            pad_id=_pad_id(tokenizer),
            seed=None if i else options.seed,
        )
        for i, ((store, _), binned) in enumerate(zip(parts, bins, strict=True))
    ]
    split = "" if options.eval_data or not options.eval_share else f"-{options.eval_share!r}"
    return TrainData(
        train=batches[0],
        eval=batches[1] if len(batches) == 2 else None,
        fingerprint="-".join(store.fingerprint for store in stores) + split,
        owned=tuple(owned),
        prompt_time=clock.text,
    )


def _check(options: TrainOptions, max_positions: int | None, obstacle: str | None) -> None:
    if options.seq_len < 2:
        raise DataError(f"--seq-len {options.seq_len}: a sequence has at least 2 tokens")
    if max_positions is not None and options.seq_len > max_positions:
        raise DataError(
            f"--seq-len {options.seq_len} is longer than the model's {max_positions} positions; "
            f"use --seq-len {max_positions} or less"
        )
    if options.eval_data is None and not 0 <= options.eval_share < 1:
        raise DataError(f"--eval-share {options.eval_share}: a share is at least 0 and below 1")
    if options.packing and obstacle is not None:
        raise DataError(
            f"this model cannot be trained on packed rows: {obstacle}; use --no-packing"
        )


def _shifted(progress: Progress | None, before: int, total: int) -> Progress | None:
    if progress is None:
        return None
    return lambda done, _: progress(before + done, total)


def _parts(options: TrainOptions, stores: list[TokenStore]) -> list[tuple[TokenStore, Wanted]]:
    """Stores and which rows of them: of training, then of evaluation if there is one."""

    def everything(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        return np.ones(rows.shape, dtype=bool)

    if len(stores) == 2 or not options.eval_share:
        return [(store, everything) for store in stores]
    store = stores[0]
    if store.rows < 2:
        raise DataError(
            f"{options.data} has one row: --eval-share needs two at least, one to learn and one "
            "to hold out; give --eval-data"
        )
    # As many as the share says, whatever the seed: hashing each row alone would hold out about so
    # many, and of a small file none.
    held_out = min(store.rows - 1, max(1, round(options.eval_share * store.rows)))
    ranks = Permutation(store.rows, options.seed, _SPLIT)
    return [
        (store, lambda rows: ranks(rows) >= held_out),
        (store, lambda rows: ranks(rows) < held_out),
    ]


def _pad_id(tokenizer: Any) -> int:
    """Any token does: padding is neither seen nor a label."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0
