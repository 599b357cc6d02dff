"""llama.cpp on a GGUF file, through the low-level calls of its Python bindings; run by moe.py in
the interpreter that has them.

Random token ids, so that routing is as even as the weights make it, and no tokenizer is needed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import llama_cpp as api
from llama_cpp_model import opened


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mmap-only", action="store_true", help="no repacked copy of the weights")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    model = opened(args.model, mmap_only=args.mmap_only)
    settings = api.llama_context_default_params()
    settings.n_ctx = args.prompt + 2 * args.tokens + 8
    settings.n_batch = 512
    settings.n_threads = settings.n_threads_batch = args.threads
    context = api.llama_init_from_model(model, settings)
    words = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    rng = random.Random(0)

    def run(ids: list[int], start: int) -> float:
        batch = api.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i] = token, start + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = i + 1 == len(ids)
        began = time.perf_counter()
        if api.llama_decode(context, batch):
            raise SystemExit("llama_decode failed")
        api.llama_get_logits_ith(context, len(ids) - 1)
        seconds = time.perf_counter() - began
        api.llama_batch_free(batch)
        return seconds

    def draw(n: int) -> list[int]:
        return [rng.randrange(3, words) for _ in range(n)]

    chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
    api.llama_sampler_chain_add(chain, api.llama_sampler_init_temp(1.0))
    api.llama_sampler_chain_add(chain, api.llama_sampler_init_dist(0))

    def sampled(token: int, at: int) -> tuple[int, float]:
        """The next token as its own programs choose it at temperature 1, and the seconds of both:
        what the other side of the comparison does for a token, too."""
        began = time.perf_counter()
        run([token], at)
        token = api.llama_sampler_sample(chain, context, -1)
        return token, time.perf_counter() - began

    parts = range(0, args.prompt, settings.n_batch)
    prompt_s = sum(run(draw(min(settings.n_batch, args.prompt - at)), at) for at in parts)
    steps = [run(draw(1), args.prompt + i) for i in range(args.tokens)]
    token, chosen, start = draw(1)[0], [], args.prompt + args.tokens
    for i in range(args.tokens):
        token, seconds = sampled(token, start + i)
        chosen.append(seconds)
    out = {
        "prefill_tok_s": args.prompt / prompt_s,
        "decode_tok_s": len(steps) / sum(steps),
        "decode_median_tok_s": 1 / statistics.median(steps),
        "sampled_tok_s": len(chosen) / sum(chosen),
    }
    args.json.write_text(json.dumps(out))


if __name__ == "__main__":
    main()
