"""Try every family and write docs/families.md: ``python tests/models/make_families_table.py``.

Takes some minutes. Each family's tiny random model is loaded with as little memory as it can run
in, on the simulated accelerator, and compared with unmodified transformers, as the tests do.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from equivalence import budgets, check_logits, golden, opened, options  # noqa: E402
from families import CORE, FLOAT32_ONLY, UNTESTED, all_families, write  # noqa: E402

from offload.errors import OffloadError  # noqa: E402
from offload.models import load, toy, units  # noqa: E402

HEAD = """# Families

Every causal language model of transformers {version}, as a tiny random model: its weights
streamed from disk through RAM to the simulated accelerator with as little memory as it can run
in, and compared with unmodified transformers (prompt logits, greedy tokens, the logits of each
decode step; `torch.equal`). Written by `tests/models/make_families_table.py`.

{summary}

- **bit-equal**: all of it, bit for bit.
- **experts**: fused experts are streamed one by one; "by layer": all of a layer's experts at once.
- **converted once**: part of the weights are not the file's own bytes (stored in another dtype than
  the model computes in, or permuted) and are written once to a private file at load.
- **not tried**: there is no tiny model to compare with. The family is not refused; a weight read
  where it is not in memory is an error in every family, never wrong numbers.

What is refused, whatever the family, with the reason in the error: quantised checkpoints, code from
the checkpoint's directory, `.bin` files, gradients.

Known differences: for Youtu with a padding token, transformers overwrites the padding row of the
loaded embedding with zeros; here the row is the checkpoint's.

| family | result | weights |
|---|---|---|
"""


def row(family: str) -> tuple[str, str]:
    """What became of a family, and what is special about its weights."""
    if family in UNTESTED:
        return f"not tried: {UNTESTED[family]}", ""
    dtype = torch.float32 if family in FLOAT32_ONLY else torch.bfloat16
    with tempfile.TemporaryDirectory() as scratch:
        directory = write(family, Path(scratch), dtype)
        want = golden(directory, dtype)
        least = budgets(directory, "sim")["minimum"]
        prepared = load.prepare(directory, options("sim", **least))
        traits = []
        if prepared.cut.groups:
            traits.append("experts")
        if any("experts are streamed" in note for note in prepared.notes):
            traits.append("experts by layer")
        if prepared.recipes.convert:
            why = next(iter(prepared.recipes.reasons.values()))
            traits.append(f"converted once ({why})")
        try:
            with opened(prepared) as model:
                check_logits(model, want)
        except (OffloadError, AssertionError) as error:
            lines = str(error).splitlines() or [type(error).__name__]
            return f"**fails**: {lines[0]}", "; ".join(traits)
    tested = "" if family in CORE else " (slow tests)"
    return f"bit-equal{tested}", "; ".join(traits)


def main() -> None:
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    units.HEAD_SLICE_BYTES = 16384  # a vocabulary of 256 gets two slices
    load.warm_up = lambda *_: toy.Warm(baseline_rss=0)  # type: ignore[assignment]
    rows = []
    for family in all_families():
        result, traits = row(family)
        print(family, result, traits, flush=True)
        rows.append((family, result, traits))
    counts = Counter(result.split(":")[0].split(" (")[0].strip("*") for _, result, _ in rows)
    summary = ", ".join(f"{n} {what}" for what, n in counts.most_common())
    text = HEAD.format(
        version=transformers.__version__, summary=f"{len(rows)} families: {summary}."
    )
    text += "".join(f"| {family} | {result} | {traits} |\n" for family, result, traits in rows)
    (ROOT / "docs" / "families.md").write_text(text)


if __name__ == "__main__":
    main()
