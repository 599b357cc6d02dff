"""What the tests of the training data share: a tokenizer, files, options."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from offload.train.data import TrainData, open_data
from offload.train.data.batches import Batches
from offload.train.options import TrainOptions

TINY = Path(__file__).parents[2] / "examples" / "tiny_moe"
EOS = 0


def tokenizer(template: str | None = None, **changes: Any) -> Any:
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(TINY)
    if template is not None:
        found.chat_template = template
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def options(data: Path, **changes: Any) -> TrainOptions:
    return TrainOptions(
        **{"model": "m", "output": Path("out"), "data": data, "seq_len": 16, **changes}
    )


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(
    data: Path, tmp_path: Path, tok: Any = None, **changes: Any
) -> tuple[TrainData, list[str]]:
    notes: list[str] = []
    found = open_data(
        options(data, **changes), tok or tokenizer(), max_positions=1024, cache=tmp_path,
        note=notes.append,
    )  # fmt: skip
    return found, notes


def examples(batches: Batches, *, epoch: int = 0) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(ids, labels) of every example of an epoch, in the order of the steps."""
    found = []
    for step in range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch):
        for index in range(batches.micro_batches(step)):
            batch = batches.micro_batch(step, index)
            for b, length in enumerate(batch.lengths):
                positions = batch.position_ids[b, :length].numpy()
                ids, labels = batch.input_ids[b, :length].numpy(), batch.labels[b, :length].numpy()
                starts = [*np.flatnonzero(positions == 0).tolist(), length]
                for begin, end in itertools.pairwise(starts):
                    found.append(
                        (tuple(ids[begin:end].tolist()), tuple(labels[begin:end].tolist()))
                    )
    return found


def learnt(tok: Any, example: tuple[tuple[int, ...], tuple[int, ...]]) -> str:
    """The text of the labels."""
    return str(tok.decode([label for label in example[1] if label != -100]))
