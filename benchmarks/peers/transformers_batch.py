"""transformers decoding many sequences at once: SDPA, a DynamicCache, all weights in RAM or, with
``--folder``, by accelerate's ``disk_offload`` (prepared by accelerate_disk.py); run by batch.py.

A directory without safetensors (a pack) lends its config only; weights are random then.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--folder", type=Path, help="weights on the disk, by disk_offload")
    parser.add_argument("--sizes", required=True, help="numbers of sequences, 1,2,4")
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--new", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = opened(args)
    rows = [measure(model, args, int(size)) for size in args.sizes.split(",")]
    args.json.write_text(json.dumps({"rows": rows}))


def opened(args: argparse.Namespace) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    if args.folder is not None:
        from accelerate_disk import disk_offload

        return disk_offload(argparse.Namespace(step="run", model=args.model, folder=args.folder))
    if any(args.model.glob("*.safetensors")):
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    config = AutoConfig.from_pretrained(args.model)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@torch.inference_mode()
def measure(model: Any, args: argparse.Namespace, size: int) -> dict[str, float]:
    """Mean seconds of the passes after the second: the first reads the prompts, as in batch.py."""
    words = model.config.get_text_config().vocab_size
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, words, (size, args.prompt), generator=draw)
    cache, steps = None, []
    for _ in range(args.new):
        began = time.perf_counter()
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        ids, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
        steps.append(time.perf_counter() - began)
    pass_s = sum(steps[2:]) / len(steps[2:])
    return {"sequences": size, "pass_s": pass_s, "tok_s": size / pass_s}


if __name__ == "__main__":
    main()
