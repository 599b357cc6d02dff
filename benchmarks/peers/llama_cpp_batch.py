"""llama.cpp decoding many sequences at once, through the low-level calls of its Python bindings;
run by batch.py in the interpreter that has them.

Each sequence has a prompt of random ids of its own; a pass is one ``llama_decode`` with one token
of each. Tokens are given, not drawn.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import llama_cpp as api
from llama_cpp_model import opened


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--sizes", required=True, help="numbers of sequences, 1,2,4")
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--new", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mmap-only", action="store_true", help="no repacked copy of the weights")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    model = opened(args.model, mmap_only=args.mmap_only)
    rows = [measure(model, args, int(size)) for size in args.sizes.split(",")]
    args.json.write_text(json.dumps({"rows": rows}))


def measure(model: object, args: argparse.Namespace, size: int) -> dict[str, float]:
    """Mean seconds of the passes after the second: the first reads the prompts, as in batch.py."""
    settings = api.llama_context_default_params()
    settings.n_ctx = size * (args.prompt + args.new + 8)
    settings.n_seq_max = size
    settings.n_batch = settings.n_ubatch = max(512, size)
    settings.kv_unified = True
    settings.n_threads = settings.n_threads_batch = args.threads
    context = api.llama_init_from_model(model, settings)
    if not context:
        raise SystemExit(f"llama.cpp makes no context for {size} sequences")
    words = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    draw = random.Random(0)

    def run(tokens: Sequence[tuple[int, int]]) -> float:
        """Of (sequence, position); the logits of each are computed."""
        batch = api.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, (sequence, at) in enumerate(tokens):
            batch.token[i], batch.pos[i] = draw.randrange(3, words), at
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = True
        began = time.perf_counter()
        if api.llama_decode(context, batch):
            raise SystemExit(f"llama_decode failed with {size} sequences")
        api.llama_get_logits_ith(context, len(tokens) - 1)
        seconds = time.perf_counter() - began
        api.llama_batch_free(batch)
        return seconds

    for sequence in range(size):
        run([(sequence, at) for at in range(args.prompt)])
    steps = [run([(s, args.prompt + i) for s in range(size)]) for i in range(args.new - 1)]
    api.llama_free(context)
    pass_s = sum(steps[1:]) / len(steps[1:])
    return {"sequences": size, "pass_s": pass_s, "tok_s": size / pass_s}


if __name__ == "__main__":
    main()
