"""llama.cpp's samplers alone, through the low-level calls of its Python bindings; run by
sampling.py in the interpreter that has them.

As its own programs do for every token, the candidates are made from the logits first.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import time
from pathlib import Path

import llama_cpp as api


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, required=True)
    parser.add_argument("--temperature", type=float, required=True)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
    if args.top_k:
        api.llama_sampler_chain_add(chain, api.llama_sampler_init_top_k(args.top_k))
    if args.top_p < 1:
        api.llama_sampler_chain_add(chain, api.llama_sampler_init_top_p(args.top_p, 1))
    if args.min_p > 0:
        api.llama_sampler_chain_add(chain, api.llama_sampler_init_min_p(args.min_p, 1))
    api.llama_sampler_chain_add(chain, api.llama_sampler_init_temp(args.temperature))
    api.llama_sampler_chain_add(chain, api.llama_sampler_init_dist(0))
    count = args.vocabulary
    rng = random.Random(0)
    source = (api.llama_token_data * count)()
    for i in range(count):
        source[i].id, source[i].logit = i, rng.gauss(0, 3)
    work = (api.llama_token_data * count)()
    seconds = []
    for _ in range(args.samples):
        began = time.perf_counter()
        ctypes.memmove(work, source, ctypes.sizeof(source))
        found = api.llama_token_data_array(work, count, -1, False)
        api.llama_sampler_apply(chain, ctypes.byref(found))
        seconds.append(time.perf_counter() - began)
        if found.selected < 0:
            raise SystemExit("nothing was drawn")
    args.json.write_text(json.dumps({"seconds": statistics.median(seconds)}))


if __name__ == "__main__":
    main()
