"""What a fine-tuning benchmark trains: a random checkpoint with a tokenizer, and random text."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import ROOT
from finetune_bound import Homes, Model


def checkpoint(config: Path, work: Path, layers: int | None) -> Path:
    """A random checkpoint of ``config`` in ``work``, made once, with one word for each token."""
    name = config.stem if layers is None else f"{config.stem}-{layers}"
    target = work / name
    if not (target / "tokenizer.json").exists():
        from offload.models.synth import synth

        synth(config, target, layers=layers, overwrite=target.exists())
        tokenizer(vocabulary(target)).save_pretrained(target)
    return target


def vocabulary(model: Path) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(model).get_text_config().vocab_size)


def word(token: int) -> str:
    return f"w{token}"


def tokenizer(vocabulary: int) -> Any:
    """Words "w3" .. in the place of their numbers, so that a text has any tokens one likes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {word(t): t for t in range(3, vocabulary)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    make: Any = PreTrainedTokenizerFast
    return make(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        pad_token="</s>",
    )  # fmt: skip


def text(path: Path, vocabulary: int, seq_len: int, sequences: int) -> Path:
    """A file of random words that fills exactly so many sequences, sixteen words to a line.

    Neighbouring sequences share a token, and one ends the text: a word more, and there were a step
    of a few tokens among those that are timed.
    """
    rng = random.Random(0)
    words = [word(rng.randrange(3, vocabulary)) for _ in range(sequences * (seq_len - 1))]
    path.write_text("\n".join(" ".join(words[i : i + 16]) for i in range(0, len(words), 16)))
    return path


def shape(directory: Path) -> Model:
    """What the model multiplies.

    Raises:
        SystemExit: it has experts, whose products depend on the routing.
    """
    import torch
    from torch import nn

    from offload.models.expert_groups import expert_groups
    from offload.models.meta import build

    model = build(directory, torch.bfloat16).model
    if expert_groups(model):
        raise SystemExit(f"{directory.name} has experts; the bound is for dense models")
    head = model.get_output_embeddings()
    linears = Counter(
        (m.out_features, m.in_features)
        for m in model.modules()
        if isinstance(m, nn.Linear) and m is not head
    )
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Model(
        linears=dict(linears),
        head=(head.out_features, head.in_features),
        attention=config.num_hidden_layers * config.num_attention_heads * width,
        parameters=sum(p.numel() for p in model.parameters()),
        layers=config.num_hidden_layers,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A run's plan."""

    homes: Homes
    lines: list[str]
    baseline: int
    """Bytes of RAM that the bare process has before anything counts."""
    predicted_s: float | None
    """Of a step; None if the plan says nothing."""


def planned(**options: Any) -> Planned:
    """What the plan of a run with ``options`` (of ``TrainOptions``) says. Trains nothing.

    In a process of its own, as the run is: a plan counts what its process holds.

    Raises:
        SystemExit: there is no plan; says why.
    """
    command = [sys.executable, __file__, json.dumps(options)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr.strip()[-500:])
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return Planned(**found | {"homes": Homes(**found["homes"])})


def main() -> None:
    """The other side of ``planned``."""
    from offload.train.options import TrainOptions
    from offload.train.preparing import prepare
    from offload.train.updates import Updater

    given = json.loads(sys.argv[1])
    paths: dict[str, Any] = {k: Path(given.pop(k)) for k in ("data", "output", "disk")}
    threads = given.pop("threads")
    import torch

    torch.set_num_threads(threads)
    run = prepare(TrainOptions(**given, **paths, threads=threads))
    try:
        layout, place = run.layout, run.plan.placement
        kinds = Updater.kinds(layout, given["states"])
        read = written = 0
        for block in layout.trained:
            if block.index in place.resident:
                continue
            kind = kinds[block.dtype]
            slots = sum(kind.offsets(layout.tiles[t].count)[-1] for t in block.tiles)
            copy = block.nbytes if kind.first_state else 0
            read += slots - copy
            written += slots - (copy if block.index in place.pinned else 0)
        homes = Homes(
            states_read=read, states_written=written, spilled=run.plan.spill_bytes,
            inputs=run.plan.inputs_moved,
            # Units that can keep their graph are layers, but for the embedding, which comes first.
            kept_layers=len([u for u in place.kept if layout.units[u].experts or u]),
        )  # fmt: skip
        found = Planned(
            homes=homes,
            lines=run.describe(),
            baseline=run.baseline,
            predicted_s=run.prediction.seconds if run.prediction else None,
        )
        print(json.dumps(asdict(found)))
    finally:
        run.close()


if __name__ == "__main__":
    main()
