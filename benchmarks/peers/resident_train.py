"""The resident peer: a plain PyTorch loop with everything in RAM.

float32 weights, bfloat16 autocast, gradient checkpointing, ``clip_grad_norm_`` and
``AdamW(fused=True)``: 16 bytes per parameter, and whole logits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--max-grad-norm", type=float, default=0.0)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    # Random weights of its own: reading the checkpoint would take its memory twice for a while.
    config = AutoConfig.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, fused=True)
    autocast = args.dtype == "bfloat16"
    ids = torch.randint(3, config.vocab_size, (1, args.tokens))
    steps, phases, losses = [], [], []
    for _ in range(args.steps):
        times = [time.perf_counter()]
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = model(input_ids=ids, labels=ids).loss
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        if args.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter())
        steps.append(times[-1] - times[0])
        phases.append([b - a for a, b in itertools.pairwise(times)])
        losses.append(float(loss.detach()))
    result = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps_s": steps,
        "phases_s": phases,
        "losses": losses,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    args.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
